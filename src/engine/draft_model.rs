//! A smaller model of the same vocabulary that guesses what a larger one will say
//! ([speculative decoding](https://arxiv.org/abs/2211.17192)). Its guesses are checked like those from the text so far, see
//! [`super::draft`], so the answer is the larger model's, token by token.

use super::draft::Worth;
use super::sampler::{Sampler, Sampling};
use super::session::Session;
use crate::error::{Error, Result};

/// Ids whose texts are compared to tell vocabularies apart.
const COMPARED: usize = 512;

/// The smaller model, in step with a session of the larger one.
pub struct DraftModel<'e> {
    session: Session<'e>,
    sampler: Sampler,
    /// Ids so far and guesses after them.
    ids: Vec<u32>,
    /// What its guesses have been worth.
    pub(super) worth: Worth,
}

impl<'e> DraftModel<'e> {
    /// Guesses for `large` with `small`.
    ///
    /// # Errors
    /// When the vocabularies differ.
    pub(super) fn new(small: Session<'e>, large: &Session) -> Result<Self> {
        let (a, b) = (&small.engine().tokenizer, &large.engine().tokenizer);
        let count = a.vocab_len().min(b.vocab_len());
        let mut ids = (0..count).step_by((count / COMPARED).max(1)).map(|id| id as u32);
        if small.engine().vocab() != large.engine().vocab() || !ids.all(|id| a.token_text(id) == b.token_text(id)) {
            return Err(Error::usage("the draft model has another vocabulary")
                .with_hint("take a smaller model of the same family, or this model with fewer bits"));
        }
        Ok(DraftModel { session: small, sampler: Sampler::new(Sampling::default()), ids: Vec::new(), worth: Worth::default() })
    }

    /// Reads what it has not read of `ids`, so that guesses cost no more than themselves.
    pub(super) fn begin(&mut self, ids: &[u32], sampling: &Sampling, stopped: &dyn Fn() -> bool) -> Result<()> {
        self.sampler = Sampler::new(Sampling { temperature: 0.0, ..sampling.clone() });
        if ids.len() < self.session.engine().context() {
            self.session.feed(ids, stopped)?;
        }
        Ok(())
    }

    /// Adds to `guess` up to `count` tokens that may follow `ids`.
    pub(super) fn guess(&mut self, ids: &[u32], count: usize, guess: &mut Vec<u32>) -> Result<()> {
        let count = count.min(self.session.engine().context().saturating_sub(ids.len()));
        if count == 0 {
            return Ok(());
        }
        self.ids.clear();
        self.ids.extend_from_slice(ids);
        let mut logits = self.session.feed(ids, &|| false)?.logits;
        loop {
            let id = self.sampler.sample(logits, &self.ids).id;
            self.ids.push(id);
            guess.push(id);
            if guess.len() == count {
                return Ok(());
            }
            logits = self.session.step(id)?;
        }
    }
}
