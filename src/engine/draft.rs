//! Guessing the next tokens, so that one run of the model checks several at once.
//!
//! Answers repeat what stands before them: code that is edited, a text that is summed up, names. What followed
//! the last few tokens when they occurred before is a guess that costs nothing (prompt lookup: Saxena 2023,
//! <https://github.com/apoorvumang/prompt-lookup-decoding>). The model runs the guess behind the token that is certain,
//! and every token is then chosen from its logits as if it had been run alone: with the same random numbers, in the
//! same order. Where the choice is not the guess, what was run after it is forgotten. So the answer is the one without
//! guesses, token by token, whatever the sampling, and only its speed depends on them.

use super::draft_model::DraftModel;
use crate::error::Result;
use std::collections::HashMap;

/// Tokens that must have occurred before.
const WIDTH: usize = 3;
/// Tokens of a guess at most.
pub(super) const LONGEST: usize = 7;
/// From these lengths on, a match is of the second and of the third kind.
const GOOD_MATCH: [usize; 2] = [5, 9];
/// How often the tokens of a guess hold before anything is known, by kind of match.
const HELD: [f64; 3] = [0.5, 0.65, 0.85];
/// How fast what is known of that is forgotten, a run: bad guesses are tried again after some hundreds.
const FORGET: f64 = 0.005;
/// Weight of a new measurement in a moving mean.
const NEWS: f64 = 0.1;
/// Share of the time that guesses may have lost.
const LOSS: f64 = 0.01;
/// A run with guesses must be expected to be this much faster a token.
const GAIN: f64 = 1.05;
/// What each further token of a run is thought to cost, in runs of one, before it was measured.
const FURTHER: f64 = 0.25;

/// Guesses for one sequence, and what they have been worth.
#[derive(Debug, Default)]
pub struct Draft {
    /// The position after the last occurrence of every run of `WIDTH` tokens.
    after: HashMap<[u32; WIDTH], usize>,
    /// Runs that end before this position are in `after`.
    indexed: usize,
    guess: Vec<u32>,
    /// Kind of the match that the guess rests on; `None`: it is the draft model's.
    kind: Option<usize>,
    worth: Worth,
}

/// The kind that guesses of a draft model count as.
const MODEL: usize = 1;

impl Draft {
    /// Guesses at most `room` tokens that follow `ids`; none where none are likely to be worth it. `ids` are those of
    /// the last call and what came after them. Where the text so far says nothing, `model` may.
    pub fn guess(&mut self, ids: &[u32], room: usize, model: Option<&mut DraftModel>) -> Result<&[u32]> {
        self.look_up(ids, room);
        if let Some(model) = model.filter(|_| self.guess.is_empty()) {
            self.kind = None;
            model.guess(ids, model.worth.best_length(MODEL, room.min(LONGEST)), &mut self.guess)?;
        }
        Ok(&self.guess)
    }

    /// Guesses from the text so far.
    fn look_up(&mut self, ids: &[u32], room: usize) {
        self.guess.clear();
        for end in self.indexed.max(WIDTH)..ids.len() {
            self.after.insert(last(&ids[..end]), end);
        }
        self.indexed = ids.len();
        if ids.len() < WIDTH {
            return;
        }
        let Some(&start) = self.after.get(&last(ids)) else { return };
        let same = ids[..start].iter().rev().zip(ids.iter().rev()).take_while(|(a, b)| a == b).count();
        let kind = GOOD_MATCH.iter().filter(|good| same >= **good).count();
        self.kind = Some(kind);
        for i in 0..self.worth.best_length(kind, room.min(LONGEST)) {
            // A text that runs in circles goes on with the guess itself.
            let next = ids.get(start + i).copied().unwrap_or_else(|| self.guess[start + i - ids.len()]);
            self.guess.push(next);
        }
    }

    /// What became of the last guess: how many of its tokens were chosen, and how long it took to make and to run.
    pub fn learn(&mut self, held: usize, seconds: f64, model: Option<&mut DraftModel>) {
        let guessed = self.guess.len();
        if guessed == 0 || self.kind.is_some() {
            self.worth.learn(self.kind.unwrap_or(0), guessed, held, seconds);
        }
        if let Some(model) = model.filter(|_| guessed == 0 || self.kind.is_none()) {
            model.worth.learn(MODEL, guessed, held, seconds);
        }
    }
}

fn last(ids: &[u32]) -> [u32; WIDTH] {
    std::array::from_fn(|i| ids[ids.len() - WIDTH + i])
}

/// Times and odds.
#[derive(Debug, Default)]
pub(super) struct Worth {
    /// Seconds of a run by further tokens; 0: not measured.
    seconds: [f64; LONGEST + 1],
    /// What runs of several have cost, by what they were thought to.
    dear: Option<f64>,
    /// How often a token of a guess held, by kind of match, in excess of [`HELD`].
    held: [f64; 3],
    /// Seconds that were saved, and seconds in all.
    saved: f64,
    spent: f64,
}

impl Worth {
    fn odds(&self, kind: usize) -> f64 {
        HELD[kind] + self.held[kind]
    }

    fn run(&self, further: usize) -> f64 {
        let known = self.seconds[further];
        if known > 0.0 { known } else { self.thought(further) * self.dear.unwrap_or(1.0) }
    }

    fn thought(&self, further: usize) -> f64 {
        self.seconds[0] * (1.0 + FURTHER * further as f64)
    }

    /// How many tokens to guess.
    pub(super) fn best_length(&self, kind: usize, longest: usize) -> usize {
        if self.seconds[0] == 0.0 || self.saved < -LOSS * self.spent {
            return 0;
        }
        let odds = self.odds(kind);
        let (mut best, mut rate) = (0, GAIN / self.seconds[0]);
        let (mut tokens, mut all_hold) = (1.0, 1.0);
        for further in 1..=longest {
            all_hold *= odds;
            tokens += all_hold;
            if tokens / self.run(further) > rate {
                (best, rate) = (further, tokens / self.run(further));
            }
        }
        best
    }

    pub(super) fn learn(&mut self, kind: usize, guessed: usize, held: usize, seconds: f64) {
        let mean = &mut self.seconds[guessed];
        *mean = if *mean == 0.0 { seconds } else { *mean + NEWS * (seconds - *mean) };
        self.spent += seconds;
        self.held.iter_mut().for_each(|held| *held *= 1.0 - FORGET);
        if guessed > 0 {
            self.saved += (held + 1) as f64 * self.seconds[0] - seconds;
            let dear = seconds / self.thought(guessed);
            let mean = self.dear.get_or_insert(dear);
            *mean += NEWS * (dear - *mean);
            // Tokens behind the first that did not hold say nothing.
            for token in 0..guessed.min(held + 1) {
                self.held[kind] += NEWS * (f64::from(u8::from(token < held)) - self.odds(kind));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs of any length cost nearly the same.
    fn ready() -> Draft {
        let mut seconds = [1.01; LONGEST + 1];
        seconds[0] = 1.0;
        Draft { worth: Worth { seconds, ..Default::default() }, ..Default::default() }
    }

    impl Draft {
        fn looked_up(&mut self, ids: &[u32], room: usize) -> &[u32] {
            self.look_up(ids, room);
            &self.guess
        }
    }

    #[test]
    fn what_came_after_the_last_occurrence_is_guessed() {
        let ids = [1, 2, 3, 4, 5, 9, 9, 1, 2, 3, 7, 8, 6, 0, 1, 2, 3];
        assert_eq!(ready().looked_up(&ids, 3), [7, 8, 6]);
        assert_eq!(ready().looked_up(&ids, 100), [7, 8, 6, 0, 1, 2, 3]);
        assert!(ready().looked_up(&ids, 0).is_empty());
        assert!(ready().looked_up(&ids[..7], 9).is_empty());
        assert!(ready().looked_up(&[], 9).is_empty());
        // Before a single token was timed, nothing is.
        assert!(Draft::default().looked_up(&ids, 9).is_empty());
    }

    #[test]
    fn circles_go_on() {
        let circle: Vec<u32> = (0..14).map(|i| i % 2).collect();
        assert_eq!(ready().looked_up(&circle, 5), [0, 1, 0, 1, 0]);
        assert_eq!(ready().looked_up(&[5; 12], 4), [5; 4]);
    }

    /// A long match is trusted with more tokens.
    #[test]
    fn guesses_are_as_long_as_their_match_is_good() {
        let mut worth = Worth::default();
        worth.learn(0, 0, 0, 1.0);
        assert_eq!([0, 1, 2].map(|kind| worth.best_length(kind, LONGEST)), [1, 2, 4]);
    }

    /// Sequences given piece by piece and at once are the same.
    #[test]
    fn the_index_grows_with_the_sequence() {
        let ids: Vec<u32> = (0..200u32).map(|i| i * i % 23 % 7).collect();
        let mut grown = ready();
        for end in 1..=ids.len() {
            let mut fresh = ready();
            assert_eq!(grown.looked_up(&ids[..end], 5), fresh.looked_up(&ids[..end], 5), "{end}");
        }
    }

    /// Guesses that never hold stop, and what they lost stays within the bound and one run.
    #[test]
    fn bad_guesses_lose_little() {
        let mut worth = Worth::default();
        worth.learn(0, 0, 0, 1.0);
        let mut guesses = 0;
        for _ in 0..10_000 {
            let n = worth.best_length(2, LONGEST);
            guesses += usize::from(n > 0);
            worth.learn(2, n, 0, 1.0 + 0.3 * n as f64);
        }
        assert!(guesses > 0 && worth.saved > -LOSS * worth.spent - 0.3 * LONGEST as f64, "{guesses} {worth:?}");
        // They are tried again and pay off once they hold.
        for _ in 0..10_000 {
            let n = worth.best_length(2, LONGEST);
            worth.learn(2, n, n, 1.0 + 0.3 * n as f64);
        }
        assert!(worth.best_length(2, LONGEST) == LONGEST, "{worth:?}");
    }

    /// Where a run costs as much as its tokens one by one, nothing can be won.
    #[test]
    fn dear_runs_are_not_made() {
        let mut worth = Worth::default();
        worth.learn(0, 0, 0, 1.0);
        for _ in 0..50 {
            let n = worth.best_length(2, LONGEST);
            worth.learn(2, n, n, 1.0 + n as f64);
        }
        assert_eq!(worth.best_length(2, LONGEST), 0, "{worth:?}");
    }
}
