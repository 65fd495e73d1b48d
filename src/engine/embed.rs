//! Texts to vectors: with an embedding model as it was trained to, or with a chat model by the mean of its last hidden
//! states.

use super::load::{Engine, LoadOptions};
use super::tokenizer::Tokenizer;
use crate::error::{Error, Kind, Result};
use crate::graph::{CacheFormat, Feed, Plan, Run};
use crate::kernels::{Level, Pool};
use crate::model::bundle::{self, Bundle};
use crate::model::spec::{Encoder, Pooling, Spec};
use crate::model::{decoder, text_encoder};
use std::path::Path;
use std::sync::Arc;

/// Tokens of a run of a chat model.
const CHAT_ROWS: usize = 128;
/// Tokens of a run of an embedding model, or one text of the most tokens that it takes, whichever is more. Larger runs win
/// little and need more memory.
const ENCODER_ROWS: usize = 256;

/// The vector of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// `[dim]`
    pub values: Vec<f32>,
    /// Tokens that were run, special tokens included.
    pub tokens: usize,
    /// The end of the text was left out, because it has more tokens than the model takes.
    pub truncated: bool,
}

/// Makes vectors with one model.
pub struct Embedder<'e> {
    model: Model<'e>,
    plan: Plan,
    pool: Arc<Pool>,
    max_tokens: usize,
    /// What stands before and behind the tokens of every text.
    before: Vec<u32>,
    behind: Vec<u32>,
}

enum Model<'e> {
    Encoder { bundle: Box<Bundle>, spec: Encoder, tokenizer: Box<Tokenizer> },
    Chat(Box<Engine>),
    Lent(&'e Engine),
}

impl Embedder<'static> {
    /// Opens the bundle at `path`: an embedding model, or a chat model. Of the options `context` limits the tokens of a
    /// text.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let manifest = Bundle::read_manifest(path)?;
        let Spec::Encoder(spec) = manifest.spec else {
            return Embedder::new(Model::Chat(Box::new(Engine::load(path, options)?)));
        };
        let bundle = Bundle::open(path)?;
        let (json, image) = (path.join(bundle::TOKENIZER), path.join(bundle::TOKENIZER_IMAGE));
        let tokenizer = Tokenizer::open_kept(&json, &image, &bundle.tokenizer_config, None)?;
        let threads = options.threads.unwrap_or_else(Pool::default_threads);
        let most = options.context.unwrap_or(spec.max_tokens);
        if most == 0 || most > spec.max_tokens {
            return Err(Error::usage(format!("{most} tokens for a text (this model takes 1 to {})", spec.max_tokens)));
        }
        let graph = text_encoder::graph(&spec, &|name| bundle.weight(name))?;
        let plan = Plan::new(&graph, Level::best(options.ceiling), most.max(ENCODER_ROWS), threads)?;
        let (before, behind) = around(&tokenizer)?;
        if before.len() + behind.len() > most {
            return Err(Error::usage(format!("{most} tokens leave no room for a text")));
        }
        let (bundle, tokenizer) = (Box::new(bundle), Box::new(tokenizer));
        let (pool, max_tokens) = (Arc::new(Pool::new(threads)), most);
        Ok(Embedder { model: Model::Encoder { bundle, spec, tokenizer }, plan, pool, max_tokens, before, behind })
    }
}

impl<'e> Embedder<'e> {
    /// Uses an open chat model. Its vectors are the mean of the last hidden states, which were made for the next token
    /// and not for likeness: they find less than those of an embedding model.
    pub fn of(engine: &'e Engine) -> Result<Self> {
        Embedder::new(Model::Lent(engine))
    }

    fn new(model: Model<'e>) -> Result<Self> {
        let engine = model.engine().expect("an encoder is opened by `load`");
        let graph = decoder::states_graph(engine.spec(), &|name| engine.bundle.weight(name))?;
        let plan = Plan::new(&graph, engine.level(), CHAT_ROWS.min(engine.context()), engine.threads())?;
        let (pool, max_tokens) = (engine.pool.clone(), engine.context());
        let (before, behind) = around(&engine.tokenizer)?;
        Ok(Embedder { model, plan, pool, max_tokens, before, behind })
    }

    /// Values of a vector.
    pub fn dim(&self) -> usize {
        self.bundle().manifest.spec.dim()
    }

    /// Tokens that are kept of a text, special tokens included.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Whether this is a model that was made for vectors.
    pub fn is_encoder(&self) -> bool {
        matches!(self.model, Model::Encoder { .. })
    }

    /// Whether vectors have length 1 when nobody says otherwise.
    pub fn normalizes(&self) -> bool {
        match &self.model {
            Model::Encoder { spec, .. } => spec.normalize,
            _ => true,
        }
    }

    pub fn bundle(&self) -> &Bundle {
        match &self.model {
            Model::Encoder { bundle, .. } => bundle,
            Model::Chat(engine) => &engine.bundle,
            Model::Lent(engine) => &engine.bundle,
        }
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        match &self.model {
            Model::Encoder { tokenizer, .. } => tokenizer,
            Model::Chat(engine) => &engine.tokenizer,
            Model::Lent(engine) => &engine.tokenizer,
        }
    }

    /// The ids that stand for a text, and whether its end was left out.
    pub fn ids(&self, text: &str) -> Result<(Vec<u32>, bool)> {
        let mut own = self.tokenizer().encode(text, false)?;
        let most = self.max_tokens.saturating_sub(self.before.len() + self.behind.len());
        let truncated = own.len() > most;
        own.truncate(most);
        let ids: Vec<u32> = self.before.iter().chain(&own).chain(&self.behind).copied().collect();
        let vocab = self.bundle().manifest.spec.vocab();
        match ids.iter().find(|id| **id as usize >= vocab) {
            Some(id) => Err(Error::unsupported(format!("the tokenizer gives id {id}, the embedding has {vocab} rows"))),
            None => Ok((ids, truncated)),
        }
    }

    /// A vector for every text as token ids, as it is. Short texts run together, as in [`embed`](Self::embed).
    ///
    /// # Errors
    /// `Usage` when there are too many ids or one is outside the vocabulary; `Interrupted` when `stopped` says so.
    pub fn embed_ids(&self, texts: &[Vec<u32>], stopped: &dyn Fn() -> bool) -> Result<Vec<Vec<f32>>> {
        let (vocab, most) = (self.bundle().manifest.spec.vocab(), self.max_tokens);
        let wrong = |ids: &&Vec<u32>| ids.len() > most || ids.iter().any(|id| *id as usize >= vocab);
        if let Some(ids) = texts.iter().find(wrong) {
            return Err(Error::usage(format!("{} ids (at most {most} are taken, all below {vocab})", ids.len())));
        }
        self.run(texts, stopped)
    }

    fn run(&self, ids: &[Vec<u32>], stopped: &dyn Fn() -> bool) -> Result<Vec<Vec<f32>>> {
        match &self.model {
            Model::Encoder { bundle, spec, .. } => self.encode(bundle, spec, ids, stopped),
            Model::Chat(engine) => self.run_chat(engine, ids, stopped),
            Model::Lent(engine) => self.run_chat(engine, ids, stopped),
        }
    }

    /// A vector for every text, scaled to length 1 with `normalize`. Short texts run together; that changes no bit of the
    /// result. A text without any token gives zeros. `stopped` is asked again and again.
    ///
    /// # Errors
    /// `Interrupted` when `stopped` says so.
    pub fn embed(&self, texts: &[&str], normalize: bool, stopped: &dyn Fn() -> bool) -> Result<Vec<Embedding>> {
        let (mut ids, mut cut) = (Vec::with_capacity(texts.len()), Vec::with_capacity(texts.len()));
        for text in texts {
            let (own, truncated) = self.ids(text)?;
            ids.push(own);
            cut.push(truncated);
        }
        let mut vectors = self.run(&ids, stopped)?;
        if normalize {
            vectors.iter_mut().for_each(|vector| to_length_one(vector));
        }
        let embedding =
            |((values, ids), truncated): ((Vec<f32>, &Vec<u32>), bool)| Embedding { values, tokens: ids.len(), truncated };
        Ok(vectors.into_iter().zip(&ids).zip(cut).map(embedding).collect())
    }

    fn encode(&self, bundle: &Bundle, spec: &Encoder, texts: &[Vec<u32>], stopped: &dyn Fn() -> bool) -> Result<Vec<Vec<f32>>> {
        let (mut buffers, mut state) = (self.plan.buffers(), self.plan.state(0, CacheFormat::F16));
        let mut vectors = vec![vec![0.0; spec.dim]; texts.len()];
        let mut next = 0;
        while next < texts.len() {
            let (mut run, mut ids, mut ends) = (Vec::new(), Vec::new(), Vec::new());
            while next < texts.len() && ids.len() + texts[next].len() <= self.plan.max_tokens() {
                if !texts[next].is_empty() {
                    ids.extend_from_slice(&texts[next]);
                    run.push(next);
                    ends.push(ids.len());
                }
                next += 1;
            }
            if run.is_empty() {
                continue;
            }
            state.truncate(0);
            let feed = Feed::Texts { ids: &ids, ends: &ends };
            let (weights, pool) = (bundle.bytes(), &*self.pool);
            let run_now = Run { weights, feed, state: &mut state, buffers: &mut buffers, pool, profile: None };
            if !self.plan.execute_unless(run_now, stopped) {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let states = self.plan.output(&buffers, 0);
            let mut start = 0;
            for (text, end) in run.into_iter().zip(ends) {
                let rows = &states[start * spec.dim..end * spec.dim];
                match spec.pooling {
                    Pooling::First => vectors[text].copy_from_slice(&rows[..spec.dim]),
                    Pooling::Mean => {
                        add_rows(&mut vectors[text], rows);
                        vectors[text].iter_mut().for_each(|v| *v /= (end - start) as f32);
                    }
                }
                start = end;
            }
        }
        Ok(vectors)
    }

    fn run_chat(&self, engine: &Engine, texts: &[Vec<u32>], stopped: &dyn Fn() -> bool) -> Result<Vec<Vec<f32>>> {
        let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
        let (mut buffers, mut state) = (self.plan.buffers(), self.plan.state(longest, engine.cache_format()));
        let mut vectors = vec![vec![0.0; self.dim()]; texts.len()];
        for (ids, vector) in texts.iter().zip(&mut vectors) {
            state.truncate(0);
            for ids in ids.chunks(self.plan.max_tokens()) {
                let (weights, feed, pool) = (engine.bundle.bytes(), Feed::Ids(ids), &*self.pool);
                let run = Run { weights, feed, state: &mut state, buffers: &mut buffers, pool, profile: None };
                if !self.plan.execute_unless(run, stopped) {
                    return Err(Error::new(Kind::Interrupted, "interrupted"));
                }
                add_rows(vector, self.plan.output(&buffers, 0));
            }
            vector.iter_mut().for_each(|v| *v /= ids.len().max(1) as f32);
        }
        Ok(vectors)
    }
}

impl Model<'_> {
    fn engine(&self) -> Option<&Engine> {
        match self {
            Model::Encoder { .. } => None,
            Model::Chat(engine) => Some(engine),
            Model::Lent(engine) => Some(engine),
        }
    }
}

/// What a tokenizer puts before and behind a text.
fn around(tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>)> {
    let (plain, whole) = (tokenizer.encode("a", false)?, tokenizer.encode("a", true)?);
    match whole.windows(plain.len().max(1)).position(|ids| ids == plain) {
        Some(at) => Ok((whole[..at].to_vec(), whole[at + plain.len()..].to_vec())),
        None => Ok((Vec::new(), Vec::new())),
    }
}

fn add_rows(sum: &mut [f32], rows: &[f32]) {
    for row in rows.chunks_exact(sum.len()) {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
}

/// Scales a vector to length 1; zeros stay zeros.
pub fn to_length_one(vector: &mut [f32]) {
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}
