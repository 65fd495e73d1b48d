//! One timeline: the token ids that were run and what the model remembers of them.

use super::draft;
use super::draft_model::DraftModel;
use super::load::Engine;
use crate::error::{Error, Kind, Result};
use crate::graph::{Buffers, Feed, Plan, Profile, Run, State};

/// A sequence being continued.
pub struct Session<'e> {
    engine: &'e Engine,
    ids: Vec<u32>,
    state: State,
    rooms: Rooms,
    /// Times of the steps since it was set.
    pub profile: Option<Profile>,
    pub(super) draft_model: Option<Box<DraftModel<'e>>>,
}

/// Memory of the plans of an engine.
struct Rooms {
    prefill: Buffers,
    decode: Buffers,
    /// Made when the first guess is checked.
    check: Option<Buffers>,
    last: Last,
}

impl Rooms {
    /// The plan that ran last, and its memory.
    fn last<'e>(&mut self, engine: &'e Engine) -> (&'e Plan, &mut Buffers) {
        match self.last {
            Last::Prefill => (&engine.prefill, &mut self.prefill),
            Last::Decode => (&engine.decode, &mut self.decode),
            Last::Check => (&engine.check, self.check.get_or_insert_with(|| engine.check.buffers())),
        }
    }
}

/// The plan that ran last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Prefill,
    Decode,
    Check,
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
            rooms: Rooms { prefill: engine.prefill.buffers(), decode: engine.decode.buffers(), check: None, last: Last::Decode },
            profile: None,
            draft_model: None,
        }
    }

    pub fn engine(&self) -> &'e Engine {
        self.engine
    }

    /// Lets a smaller model guess what comes next; answers stay the same. Its session should have as long a context.
    ///
    /// # Errors
    /// `Usage` when its vocabulary is another.
    pub fn guess_with(&mut self, small: Session<'e>) -> Result<()> {
        self.draft_model = Some(Box::new(DraftModel::new(small, self)?));
        Ok(())
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
        for piece in ids[reused..].chunks(self.engine.prefill.max_tokens()) {
            let plan = if piece.len() == 1 { Last::Decode } else { Last::Prefill };
            if !self.run(piece, plan, stopped) {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
        }
        Ok(Fed { logits: self.logits(0), reused })
    }

    /// Runs one more id, which must be in the vocabulary and fit the context.
    pub fn step(&mut self, id: u32) -> Result<&mut [f32]> {
        self.run_ahead(id, &[])?;
        Ok(self.logits(0))
    }

    /// As [`step`](Self::step), and ids (at most [`draft::LONGEST`]) that may follow it: then
    /// [`logits`](Self::logits) has a row after each of them.
    pub(super) fn run_ahead(&mut self, id: u32, guess: &[u32]) -> Result<()> {
        let mut ids = [id; draft::LONGEST + 1];
        let ids = &mut ids[..=guess.len()];
        ids[1..].copy_from_slice(guess);
        self.engine.check_ids(ids)?;
        if self.ids.len() + ids.len() > self.engine.context() {
            return Err(Error::usage(format!("the context of {} tokens is full", self.engine.context())));
        }
        self.run(ids, if guess.is_empty() { Last::Decode } else { Last::Check }, &|| false);
        self.engine.decoded_once();
        Ok(())
    }

    /// A row of logits of the last run; there is one but after [`run_ahead`](Self::run_ahead). The caller may change them.
    pub(super) fn logits(&mut self, row: usize) -> &mut [f32] {
        let vocab = self.engine.vocab();
        let (plan, buffers) = self.rooms.last(self.engine);
        &mut plan.output_mut(buffers, 0)[row * vocab..][..vocab]
    }

    /// Forgets everything from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.state.truncate(len);
    }

    /// The ids that were run and what is remembered of them.
    pub(super) fn memory(&mut self) -> (&mut Vec<u32>, &mut State) {
        (&mut self.ids, &mut self.state)
    }

    /// False if it was stopped; then the session is as it was.
    fn run(&mut self, ids: &[u32], plan: Last, stopped: &dyn Fn() -> bool) -> bool {
        let engine = self.engine;
        self.rooms.last = plan;
        let (plan, buffers) = self.rooms.last(engine);
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
