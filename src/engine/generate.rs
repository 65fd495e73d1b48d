//! From prompt ids to an answer.

use super::constrain::Constraint;
use super::draft::Draft;
use super::sampler::Sampling;
use super::session::Session;
use super::thinking::{Part, Splitter};
use super::tools::{Call, Tools};
use super::writing::{TokenChoices, Writing};
use crate::error::{Kind, Result};
use std::time::Instant;

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    pub sampling: Sampling,
    /// Tokens at most; the answer also ends when the context is full.
    pub max_tokens: usize,
    /// Texts that end the answer; they are not part of it.
    pub stops: Vec<String>,
    /// Go on after end-of-text tokens (for comparisons and benchmarks).
    pub ignore_end: bool,
    /// Check guesses from the text so far, and of a draft model if the session has one, several at a time, see
    /// [`super::draft`]. The answer is the same.
    pub draft: bool,
    /// The form of the answer. It alone decides where the answer ends: stop texts do not count, and neither does
    /// `ignore_end`.
    pub constraint: Option<Constraint>,
    /// What the answer may call; not together with a form.
    pub tools: Option<Tools>,
    /// Record for every token so many of the likeliest ones, see [`super::writing::TokenChoices`].
    pub top_logprobs: Option<usize>,
}

/// The most probable tokens, 1024 at most, guessing ahead.
impl Default for Request {
    fn default() -> Self {
        Request {
            sampling: Sampling::default(),
            max_tokens: 1024,
            stops: Vec::new(),
            ignore_end: false,
            draft: true,
            constraint: None,
            tools: None,
            top_logprobs: None,
        }
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it, a stop text was met, or its form is complete.
    Stop,
    /// The token limit was reached.
    Length,
    /// The context is full.
    Context,
    /// The caller asked to stop.
    Interrupted,
}

/// An answer and how it came about.
#[derive(Clone, Debug)]
pub struct Answer {
    pub text: String,
    /// The generated ids, an end-of-text token included.
    pub ids: Vec<u32>,
    /// Natural logarithms of their probabilities.
    pub logprobs: Vec<f32>,
    pub finish: Finish,
    /// Reasoning that was taken out of the text; see [`super::thinking::generate_parts`].
    pub thinking: Option<String>,
    /// Calls of tools, which are no part of the text.
    pub calls: Vec<Call>,
    /// The answer ended inside a reasoning block.
    pub unfinished_thinking: bool,
    /// See [`super::confidence`].
    pub confidence: Option<f64>,
    pub prompt_tokens: usize,
    /// Prompt tokens that were still known from before.
    pub reused_tokens: usize,
    /// Answer tokens that were guessed before they were chosen.
    pub drafted_tokens: usize,
    /// From the call to the first token.
    pub first_token_ms: f64,
    pub total_ms: f64,
}

impl Answer {
    /// Prompt tokens a second until the first token.
    pub fn prefill_tps(&self) -> f64 {
        per_second(self.prompt_tokens - self.reused_tokens, self.first_token_ms)
    }

    /// Generated tokens a second after the first.
    pub fn decode_tps(&self) -> f64 {
        per_second(self.ids.len().saturating_sub(1), self.total_ms - self.first_token_ms)
    }
}

fn per_second(count: usize, ms: f64) -> f64 {
    if ms > 0.0 { count as f64 * 1000.0 / ms } else { 0.0 }
}

/// Runs `prompt` in `session` and generates. `on_text` gets the answer piece by piece; `stopped` is asked
/// before every token.
pub fn generate(
    session: &mut Session,
    prompt: &[u32],
    request: &Request,
    on_text: &mut dyn FnMut(&str),
    stopped: &dyn Fn() -> bool,
) -> Result<Answer> {
    let mut on_part = |part: Part| match part {
        Part::Thought(text) | Part::Answer(text) => on_text(text),
        Part::Call(_) => {}
    };
    write(session, prompt, request, Splitter::new(None, false), &mut on_part, stopped)
}

/// [`generate`] with a splitter that tells reasoning from the answer.
pub(super) fn write(
    session: &mut Session,
    prompt: &[u32],
    request: &Request,
    splitter: Splitter,
    on_part: &mut dyn FnMut(Part),
    stopped: &dyn Fn() -> bool,
) -> Result<Answer> {
    let engine = session.engine();
    let on_part = &mut |part: Part, _: &mut Vec<TokenChoices>| on_part(part);
    let mut writing = Writing::new(engine, prompt, request, splitter, Instant::now())?;
    match session.feed(prompt, stopped) {
        Ok(fed) => writing.reused(fed.reused),
        Err(e) if e.kind == Kind::Interrupted => {
            writing.end(Finish::Interrupted);
            return Ok(writing.finish(on_part));
        }
        Err(e) => return Err(e),
    }
    let mut draft = request.draft.then(Draft::default);
    // Tokens that were run behind the last certain one, how many of them were chosen, and how long it took.
    let (mut guess, mut held, mut seconds): (Vec<u32>, usize, f64) = (Vec::new(), 0, 0.0);
    while let Some(id) = writing.choose(session.logits(held), on_part)? {
        if stopped() {
            writing.end(Finish::Interrupted);
            break;
        }
        if guess.get(held) == Some(&id) {
            held += 1;
            writing.drafted();
            continue;
        }
        session.truncate(writing.ids().len() - 1);
        if writing.tokens() == 1
            && let Some(model) = session.draft_model.as_deref_mut().filter(|_| request.draft)
        {
            match model.begin(writing.ids(), &request.sampling, stopped) {
                Err(e) if e.kind == Kind::Interrupted => {
                    writing.end(Finish::Interrupted);
                    break;
                }
                begun => begun?,
            }
        }
        let (mut begin, mut forced) = (Instant::now(), false);
        if let Some(draft) = &mut draft {
            let mut model = session.draft_model.as_deref_mut();
            if seconds > 0.0 {
                draft.learn(held, seconds, model.as_deref_mut());
            }
            guess.clear();
            begin = Instant::now();
            forced = writing.forced(&mut guess);
            if !forced {
                guess.extend_from_slice(draft.guess(writing.ids(), writing.room(), model)?);
            }
        }
        held = 0;
        session.run_ahead(id, &guess)?;
        // What had to come says nothing about guesses.
        seconds = if forced { 0.0 } else { begin.elapsed().as_secs_f64() };
    }
    // Guesses that nobody chose are forgotten.
    session.truncate(writing.ids().len() - usize::from(writing.tokens() > 0));
    Ok(writing.finish(on_part))
}
