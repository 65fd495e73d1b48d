//! Opening a bundle for use.

use super::chat::ChatTemplate;
use super::session::Session;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use crate::graph::Plan;
use crate::kernels::{Level, Pool};
use crate::model::bundle::{self, Bundle};
use crate::model::decoder::{self, Logits};
use std::path::Path;

/// Tokens of a prefill run. Larger runs win little and need more memory.
const PREFILL: usize = 128;
/// Tokens of a run that returns logits for every token.
const SCORE: usize = 32;
/// Positions when nothing else is asked for.
pub const DEFAULT_CONTEXT: usize = 4096;

/// How to run a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Threads; `None`: the cores that this process may use.
    pub threads: Option<usize>,
    /// Highest instruction-set level; `None`: the best of this CPU.
    pub ceiling: Option<Level>,
    /// Positions a session can hold; `None`: [`DEFAULT_CONTEXT`] or what the model was made for, whichever is less.
    pub context: Option<usize>,
}

/// A loaded model. Immutable; sessions hold what changes.
pub struct Engine {
    pub bundle: Bundle,
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    pub(super) pool: Pool,
    /// Many tokens, logits of the last.
    pub(super) prefill: Plan,
    /// One token.
    pub(super) decode: Plan,
    level: Level,
    context: usize,
}

impl Engine {
    /// Opens the bundle at `path`.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let bundle = Bundle::open(path)?;
        let spec = &bundle.manifest.spec;
        let context = match options.context {
            None => DEFAULT_CONTEXT.min(spec.max_context),
            Some(0) => return Err(Error::usage("a context of 0 tokens holds nothing")),
            Some(n) if n > spec.max_context => {
                return Err(Error::usage(format!("a context of {n} tokens is more than the model's {}", spec.max_context)));
            }
            Some(n) => n,
        };
        let tokenizer_path = path.join(bundle::TOKENIZER);
        let tokenizer = Tokenizer::open(&tokenizer_path, &bundle.tokenizer_config, bundle.generation_config.as_ref())?;
        let template = ChatTemplate::for_tokenizer(bundle.chat_template.as_deref(), &tokenizer)
            .map_err(|e| e.context(path.join(bundle::CHAT_TEMPLATE).display()))?;
        let level = Level::best(options.ceiling);
        let pool = Pool::new(options.threads.unwrap_or_else(Pool::default_threads));
        let graph = decoder::graph(spec, Logits::Last, &|name| bundle.weight(name))?;
        let plan = |tokens| Plan::new(&graph, level, tokens, pool.threads());
        Ok(Engine { prefill: plan(PREFILL.min(context))?, decode: plan(1)?, bundle, tokenizer, template, pool, level, context })
    }

    /// A fresh session.
    pub fn session(&self) -> Session<'_> {
        Session::new(self)
    }

    /// Logits `[ids, vocab]` for every position of `ids`, from an empty context.
    pub fn score(&self, ids: &[u32]) -> Result<Vec<f32>> {
        self.check_ids(ids)?;
        let graph = decoder::graph(&self.bundle.manifest.spec, Logits::All, &|name| self.bundle.weight(name))?;
        let plan = Plan::new(&graph, self.level, SCORE.min(ids.len().max(1)), self.pool.threads())?;
        let (mut buffers, mut state) = (plan.buffers(), graph.state(ids.len()));
        let mut out = Vec::with_capacity(ids.len() * self.vocab());
        for ids in ids.chunks(plan.max_tokens()) {
            plan.execute(crate::graph::Run {
                weights: self.bundle.bytes(),
                ids,
                state: &mut state,
                buffers: &mut buffers,
                pool: &self.pool,
                profile: None,
            });
            out.extend_from_slice(plan.output(&buffers, 0));
        }
        Ok(out)
    }

    pub(super) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|id| **id as usize >= self.vocab()) {
            Some(id) => Err(Error::usage(format!("token id {id} is outside the vocabulary of {}", self.vocab()))),
            None => Ok(()),
        }
    }

    /// Rows of the embedding table, and logits of a token.
    pub fn vocab(&self) -> usize {
        self.bundle.manifest.spec.vocab
    }

    /// Positions that a session of this engine holds.
    pub fn context(&self) -> usize {
        self.context
    }

    pub fn level(&self) -> Level {
        self.level
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The two plans as text: steps, places, bytes.
    pub fn describe(&self) -> String {
        format!("prefill: {}\ndecode: {}", self.prefill.describe(), self.decode.describe())
    }
}
