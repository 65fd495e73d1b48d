//! One timeline: the token ids that were run and what the model remembers of them.

use super::load::Engine;
use crate::error::{Error, Kind, Result};
use crate::graph::{Buffers, Feed, Plan, Profile, Run, State};

/// A sequence being continued.
pub struct Session<'e> {
    engine: &'e Engine,
    ids: Vec<u32>,
    state: State,
    prefill: Buffers,
    decode: Buffers,
    /// Times of the steps since it was set.
    pub profile: Option<Profile>,
}

/// What [`Session::feed`] did.
pub struct Fed<'s> {
    /// Logits after the last id; the caller may change them.
    pub logits: &'s mut [f32],
    /// Ids that were kept from before.
    pub reused: usize,
}

impl<'e> Session<'e> {
    pub(super) fn new(engine: &'e Engine) -> Self {
        Session {
            engine,
            ids: Vec::with_capacity(engine.context()),
            state: engine.prefill.state(engine.context(), engine.cache_format()),
            prefill: engine.prefill.buffers(),
            decode: engine.decode.buffers(),
            profile: None,
        }
    }

    pub fn engine(&self) -> &'e Engine {
        self.engine
    }

    /// The ids that have been run.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Makes the session hold exactly `ids` and returns the logits after the last one. The longest common
    /// beginning with what it held is kept, the rest is run. `stopped` is asked at every step of the runs.
    ///
    /// # Errors
    /// `Usage` when there are no ids, one is outside the vocabulary, or they do not fit the context;
    /// `Interrupted` when `stopped` says so (what was run stays).
    pub fn feed(&mut self, ids: &[u32], stopped: &dyn Fn() -> bool) -> Result<Fed<'_>> {
        self.engine.check_ids(ids)?;
        if ids.is_empty() {
            return Err(Error::usage("there are no tokens to run"));
        }
        let context = self.engine.context();
        if ids.len() > context {
            return Err(Error::usage(format!("{} tokens do not fit the context of {context}", ids.len())));
        }
        let same = self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count();
        // The last id is run again if need be, because its logits are wanted.
        let reused = same.min(ids.len() - 1);
        self.truncate(reused);
        let mut one = false;
        for piece in ids[reused..].chunks(self.engine.prefill.max_tokens()) {
            one = piece.len() == 1;
            if !self.run(piece, one, stopped) {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
        }
        let logits = if one {
            self.engine.decode.output_mut(&mut self.decode, 0)
        } else {
            self.engine.prefill.output_mut(&mut self.prefill, 0)
        };
        Ok(Fed { logits, reused })
    }

    /// Runs one more id, which must be in the vocabulary and fit the context.
    pub fn step(&mut self, id: u32) -> Result<&mut [f32]> {
        self.engine.check_ids(&[id])?;
        if self.ids.len() >= self.engine.context() {
            return Err(Error::usage(format!("the context of {} tokens is full", self.engine.context())));
        }
        self.run(&[id], true, &|| false);
        Ok(self.engine.decode.output_mut(&mut self.decode, 0))
    }

    /// Forgets everything from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.state.truncate(len);
    }

    /// False if it was stopped; then the session is as it was.
    fn run(&mut self, ids: &[u32], one: bool, stopped: &dyn Fn() -> bool) -> bool {
        let engine = self.engine;
        let (plan, buffers): (&Plan, _) =
            if one { (&engine.decode, &mut self.decode) } else { (&engine.prefill, &mut self.prefill) };
        let run = Run {
            weights: engine.bundle.bytes(),
            feed: Feed::Ids(ids),
            state: &mut self.state,
            buffers,
            pool: &engine.pool,
            profile: self.profile.as_mut(),
        };
        let done = plan.execute_unless(run, stopped);
        if done {
            self.ids.extend_from_slice(ids);
        }
        done
    }

    /// Bytes of keys and values for the positions that are filled.
    pub fn cache_bytes(&self) -> usize {
        self.engine.prefill.position_bytes(self.engine.cache_format()) * self.state.len()
    }
}
