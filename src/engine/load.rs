//! Opening a bundle for use.

use super::chat::ChatTemplate;
use super::constrain::TokenTrie;
use super::draft::LONGEST;
use super::session::Session;
use super::tokenizer::Tokenizer;
use super::tools;
use crate::error::{Error, Result};
use crate::graph::{CacheFormat, Plan};
use crate::kernels::{Level, Pool};
use crate::model::bundle::{self, Bundle};
use crate::model::decoder::{self, Logits};
use crate::model::spec::Decoder;
use crate::quant::Bits;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// Tokens of a prefill run. Larger runs win little and need more memory.
const PREFILL: usize = 128;
/// Tokens of a run that returns logits for every token.
const SCORE: usize = 32;
/// Positions when nothing else is asked for.
pub const DEFAULT_CONTEXT: usize = 4096;

/// Runs of decoding before weights move to huge pages: short answers do not pay for what they win nothing from.
const PATIENCE: usize = 16;
/// Times as long as the last move took, nothing is moved: on a virtual machine a page that was never used may take
/// milliseconds.
const REST: u32 = 8;

/// How to run a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Threads; `None`: the cores that this process may use.
    pub threads: Option<usize>,
    /// Highest instruction-set level; `None`: the best of this CPU.
    pub ceiling: Option<Level>,
    /// Positions a session can hold; `None`: [`DEFAULT_CONTEXT`] or what the model was made for, whichever is less.
    pub context: Option<usize>,
    /// How keys and values are kept; `None`: as int8 below 8 bits a weight, else as f16.
    pub cache: Option<CacheFormat>,
    /// Move weights to huge pages while answers are written, where the system has them. Reading is faster then, but other
    /// programs that run the same model do not share that memory.
    pub huge_pages: bool,
}

/// The ceiling that `CACTUS_CPU` sets.
///
/// # Errors
/// `Usage` when it names no level.
pub fn ceiling() -> Result<Option<Level>> {
    match std::env::var("CACTUS_CPU") {
        Ok(name) if !name.is_empty() => Level::parse(&name).map(Some).map_err(|e| Error::usage(format!("CACTUS_CPU: {e}"))),
        _ => Ok(None),
    }
}

/// A loaded model. Immutable; sessions hold what changes.
pub struct Engine {
    pub bundle: Bundle,
    spec: Decoder,
    pub tokenizer: Arc<Tokenizer>,
    pub template: ChatTemplate,
    pub(super) pool: Arc<Pool>,
    /// Many tokens, logits of the last.
    pub(super) prefill: Plan,
    /// One token.
    pub(super) decode: Plan,
    /// A token and guesses of what follows, logits of all.
    pub(super) check: Plan,
    level: Level,
    context: usize,
    cache: CacheFormat,
    huge_pages: bool,
    /// Runs of decoding so far.
    decoded: AtomicUsize,
    /// When weights may move again.
    next_move: Mutex<Instant>,
    times: LoadTimes,
    /// For answers of a given form; made when the first one is asked for.
    pub(super) trie: OnceLock<Result<TokenTrie, String>>,
    pub(super) tool_vectors: tools::Vectors,
}

/// Where the time of [`Engine::load`] went.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadTimes {
    /// Mapping the weights and checking the bundle.
    pub open_ms: f64,
    /// Tokenizer and chat template.
    pub tokenizer_ms: f64,
    /// Threads, graph and plans.
    pub plan_ms: f64,
}

/// Memory that a model with one session needs, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Footprint {
    /// The mapped weights.
    pub weights: u64,
    /// Keys and values of a full context.
    pub cache: u64,
    /// Working memory of the plans.
    pub arena: u64,
}

impl Footprint {
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.arena)
    }

    /// What both need together.
    #[must_use]
    pub fn and(self, other: Footprint) -> Footprint {
        Footprint {
            weights: self.weights.saturating_add(other.weights),
            cache: self.cache.saturating_add(other.cache),
            arena: self.arena.saturating_add(other.arena),
        }
    }
}

impl Engine {
    /// Opens the bundle at `path`.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let threads = options.threads.unwrap_or_else(Pool::default_threads);
        Engine::open(path, options, || Arc::new(Pool::new(threads)))
    }

    /// Opens another bundle, whose sessions run on the same threads and never at the same time; `options.threads` is
    /// without effect.
    pub fn load_beside(&self, path: &Path, options: &LoadOptions) -> Result<Self> {
        Engine::open(path, options, || self.pool.clone())
    }

    fn open(path: &Path, options: &LoadOptions, pool: impl FnOnce() -> Arc<Pool>) -> Result<Self> {
        let begin = Instant::now();
        let bundle = Bundle::open(path)?;
        let spec = bundle.manifest.decoder().map_err(|e| e.context(path.display()))?.clone();
        let context = match options.context {
            None => DEFAULT_CONTEXT.min(spec.max_context),
            Some(0) => return Err(Error::usage("a context of 0 tokens holds nothing")),
            Some(n) if n > spec.max_context => {
                return Err(Error::usage(format!("a context of {n} tokens is more than the model's {}", spec.max_context)));
            }
            Some(n) => n,
        };
        let opened = Instant::now();
        let tokenizer_path = path.join(bundle::TOKENIZER);
        let image = path.join(bundle::TOKENIZER_IMAGE);
        let tokenizer =
            Tokenizer::open_kept(&tokenizer_path, &image, &bundle.tokenizer_config, bundle.generation_config.as_ref())?;
        let template = ChatTemplate::for_tokenizer(bundle.chat_template.as_deref(), &tokenizer)
            .map_err(|e| e.context(path.join(bundle::CHAT_TEMPLATE).display()))?;
        let read = Instant::now();
        let level = Level::best(options.ceiling);
        let pool = pool();
        let graph = decoder::graph(&spec, Logits::Last, &|name| bundle.weight(name))?;
        let plan = |tokens| Plan::new(&graph, level, tokens, pool.threads());
        let (prefill, decode) = (plan(PREFILL.min(context))?, plan(1)?);
        let every = decoder::graph(&spec, Logits::All, &|name| bundle.weight(name))?;
        let check = Plan::new(&every, level, (LONGEST + 1).min(context), pool.threads())?;
        let exact = bundle.manifest.quantiser.bits >= Bits::EIGHT;
        let cache = options.cache.unwrap_or(if exact { CacheFormat::F16 } else { CacheFormat::Int8 });
        let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        let times = LoadTimes { open_ms: ms(begin, opened), tokenizer_ms: ms(opened, read), plan_ms: ms(read, Instant::now()) };
        let huge_pages = options.huge_pages;
        Ok(Engine {
            prefill,
            decode,
            check,
            bundle,
            spec,
            tokenizer: Arc::new(tokenizer),
            template,
            pool,
            level,
            context,
            cache,
            huge_pages,
            decoded: AtomicUsize::new(0),
            next_move: Mutex::new(begin),
            times,
            trie: OnceLock::new(),
            tool_vectors: tools::Vectors::default(),
        })
    }

    /// Sizes and rules of the network.
    pub fn spec(&self) -> &Decoder {
        &self.spec
    }

    /// A fresh session.
    pub fn session(&self) -> Session<'_> {
        Session::new(self)
    }

    /// Logits `[ids, vocab]` for every position of `ids`, from an empty context.
    pub fn score(&self, ids: &[u32]) -> Result<Vec<f32>> {
        self.check_ids(ids)?;
        let graph = decoder::graph(&self.spec, Logits::All, &|name| self.bundle.weight(name))?;
        let plan = Plan::new(&graph, self.level, SCORE.min(ids.len().max(1)), self.pool.threads())?;
        let (mut buffers, mut state) = (plan.buffers(), graph.state(ids.len(), self.cache));
        let mut out = Vec::with_capacity(ids.len() * self.vocab());
        for ids in ids.chunks(plan.max_tokens()) {
            plan.execute(crate::graph::Run {
                weights: self.bundle.bytes(),
                feed: crate::graph::Feed::Ids(ids),
                state: &mut state,
                buffers: &mut buffers,
                pool: &self.pool,
                profile: None,
            });
            out.extend_from_slice(plan.output(&buffers, 0));
        }
        Ok(out)
    }

    /// Between runs of decoding there is time to move weights.
    pub(super) fn decoded_once(&self) {
        if !self.huge_pages || self.decoded.fetch_add(1, Ordering::Relaxed) < PATIENCE {
            return;
        }
        let Ok(mut next) = self.next_move.try_lock() else { return };
        let begin = Instant::now();
        if begin >= *next {
            self.bundle.move_to_huge_page();
            *next = Instant::now() + begin.elapsed() * REST;
        }
    }

    pub(super) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|id| **id as usize >= self.vocab()) {
            Some(id) => Err(Error::usage(format!("token id {id} is outside the vocabulary of {}", self.vocab()))),
            None => Ok(()),
        }
    }

    /// Rows of the embedding table, and logits of a token.
    pub fn vocab(&self) -> usize {
        self.spec.vocab
    }

    /// Positions that a session of this engine holds.
    pub fn context(&self) -> usize {
        self.context
    }

    /// How sessions keep keys and values.
    pub fn cache_format(&self) -> CacheFormat {
        self.cache
    }

    pub fn level(&self) -> Level {
        self.level
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    pub fn load_times(&self) -> LoadTimes {
        self.times
    }

    /// What a session will need; nothing is allocated to find out.
    pub fn footprint(&self) -> Footprint {
        let position = self.prefill.position_bytes(self.cache) as u64;
        Footprint {
            weights: self.bundle.bytes().len() as u64,
            cache: position.saturating_mul(self.context as u64),
            arena: [&self.prefill, &self.decode, &self.check].map(|plan| plan.bytes() as u64).iter().sum(),
        }
    }

    /// The two plans as text: steps, places, bytes.
    pub fn describe(&self) -> String {
        format!("prefill: {}\ndecode: {}", self.prefill.describe(), self.decode.describe())
    }
}
