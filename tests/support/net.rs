//! A bundle as a function from token ids to logits, at an instruction-set level of choice.

use cactus::graph::{Buffers, Graph, Plan, Run, State};
use cactus::kernels::{Level, Pool};
use cactus::model::Bundle;
use cactus::model::decoder::{Logits, graph};

/// Positions that a test may fill.
const CAPACITY: usize = 256;

pub struct Net<'a> {
    bundle: &'a Bundle,
    pub graph: Graph,
    plan: Plan,
    pool: Pool,
    buffers: Buffers,
    state: State,
}

impl<'a> Net<'a> {
    /// Gives logits for every token of a run.
    pub fn new(bundle: &'a Bundle, level: Level) -> Self {
        let graph = graph(&bundle.manifest.spec, Logits::All, &|name| bundle.weight(name)).expect("a graph");
        let pool = Pool::new(2);
        let plan = Plan::new(&graph, level, CAPACITY, pool.threads()).expect("a plan");
        let (buffers, state) = (plan.buffers(), graph.state(CAPACITY));
        Net { bundle, graph, plan, pool, buffers, state }
    }

    pub fn vocab(&self) -> usize {
        self.bundle.manifest.spec.vocab
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.state.truncate(0);
    }

    /// Runs `ids` after what has been run: logits `[ids, vocab]`.
    pub fn feed(&mut self, ids: &[u32]) -> Vec<f32> {
        let run = Run {
            weights: self.bundle.bytes(),
            ids,
            state: &mut self.state,
            buffers: &mut self.buffers,
            pool: &self.pool,
            profile: None,
        };
        self.plan.execute(run);
        self.plan.output(&self.buffers, 0)[..ids.len() * self.vocab()].to_vec()
    }
}
