//! Logits where they are wanted, a few rows at a time: nothing of the size of a chunk times a vocabulary is
//! ever held, and the output head runs only for the rows that count.

use super::super::load::Engine;
use crate::error::{Error, Kind, Result};
use crate::graph::{Buffers, Feed, Plan, Run, State};
use crate::model::decoder::{self, Logits};
use std::ops::Range;

/// Rows of logits that are made at once: enough to spread the decoding of weights over, and 67 MB for the
/// largest vocabulary in use (262144).
const ROWS: usize = 64;

/// Token ids that are run from an empty context, and which of them the model is asked to predict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Which document it belongs to; intervals are taken over documents. Ascending.
    pub document: usize,
    pub ids: Vec<u32>,
    /// Places in `ids` that are predicted; ascending, apart, none holds place 0.
    pub targets: Vec<Range<usize>>,
}

impl Sequence {
    /// Tokens that are predicted.
    pub fn scored(&self) -> usize {
        self.targets.iter().map(Range::len).sum()
    }
}

/// Runs sequences through an engine.
pub struct Scorer<'e> {
    engine: &'e Engine,
    /// Logits for every token.
    plan: Plan,
    rows: Buffers,
    /// For tokens whose logits nobody wants.
    silent: Buffers,
    state: State,
}

/// Gets the ids to be predicted and a row of logits `[vocab]` for each, row after row.
pub type EachRows<'a> = &'a mut dyn FnMut(&[u32], &[f32]) -> Result<()>;

impl<'e> Scorer<'e> {
    /// For sequences of at most `longest` tokens.
    pub fn new(engine: &'e Engine, longest: usize) -> Result<Self> {
        let spec = engine.spec();
        if longest > spec.max_context {
            return Err(Error::usage(format!("{longest} tokens at once are more than the model's {}", spec.max_context)));
        }
        let graph = decoder::graph(spec, Logits::All, &|name| engine.bundle.weight(name))?;
        let plan = Plan::new(&graph, engine.level(), ROWS.min(longest.max(1)), engine.threads())?;
        Ok(Scorer {
            engine,
            rows: plan.buffers(),
            silent: engine.prefill.buffers(),
            state: plan.state(longest, engine.cache_format()),
            plan,
        })
    }

    /// Runs a sequence; `each` gets its predictions in order, at most [`ROWS`] at a time.
    ///
    /// # Errors
    /// `Usage` when an id is outside the vocabulary or the sequence is too long, `Interrupted` when `stopped`
    /// says so, and what `each` gives.
    pub fn run(&mut self, sequence: &Sequence, stopped: &dyn Fn() -> bool, each: EachRows) -> Result<()> {
        let ids = &sequence.ids;
        self.engine.check_ids(ids)?;
        if ids.len() > self.state.capacity() {
            return Err(Error::usage(format!("{} tokens do not fit {}", ids.len(), self.state.capacity())));
        }
        self.state.truncate(0);
        let mut at = 0;
        for target in &sequence.targets {
            // The row that predicts a token is that of the token before.
            let (from, to) = (target.start.saturating_sub(1), target.end.saturating_sub(1).min(ids.len()));
            while at < from {
                let end = from.min(at + self.engine.prefill.max_tokens());
                self.execute(&ids[at..end], false, stopped)?;
                at = end;
            }
            while at < to {
                let end = to.min(at + self.plan.max_tokens());
                self.execute(&ids[at..end], true, stopped)?;
                each(&ids[at + 1..end + 1], self.plan.output(&self.rows, 0))?;
                at = end;
            }
        }
        Ok(())
    }

    fn execute(&mut self, ids: &[u32], rows: bool, stopped: &dyn Fn() -> bool) -> Result<()> {
        let (plan, buffers) = if rows { (&self.plan, &mut self.rows) } else { (&self.engine.prefill, &mut self.silent) };
        let run = Run {
            weights: self.engine.bundle.bytes(),
            feed: Feed::Ids(ids),
            state: &mut self.state,
            buffers,
            pool: &self.engine.pool,
            profile: None,
        };
        match plan.execute_unless(run, stopped) {
            true => Ok(()),
            false => Err(Error::new(Kind::Interrupted, "interrupted")),
        }
    }
}
