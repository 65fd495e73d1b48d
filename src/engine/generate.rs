//! From prompt ids to an answer.

use super::confidence::Confidence;
use super::constrain::{Constrained, Constraint};
use super::draft::{Draft, LONGEST};
use super::sampler::{Sampler, Sampling};
use super::session::Session;
use super::stream::TextStream;
use super::thinking::tag_ids;
use crate::error::{Error, Kind, Result};
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
    request.sampling.validate()?;
    let begin = Instant::now();
    let ms = |begin: Instant| begin.elapsed().as_secs_f64() * 1e3;
    let engine = session.engine();
    if prompt.len() >= engine.context() {
        return Err(Error::usage(format!(
            "the prompt has {} tokens, the context of {} has no room for an answer",
            prompt.len(),
            engine.context()
        ))
        .with_hint(format!(
            "shorten the prompt, or give a larger --context (this model: up to {})",
            engine.bundle.manifest.spec.max_context
        )));
    }
    let mut sampler = Sampler::new(request.sampling.clone());
    let mut form = request.constraint.as_ref().map(|constraint| Constrained::new(engine, constraint)).transpose()?;
    let stops = if form.is_none() { request.stops.clone() } else { Vec::new() };
    let mut stream = TextStream::new(&engine.tokenizer, stops).showing(tag_ids(&engine.tokenizer));
    let mut confidence = Confidence::default();
    let mut recent = prompt.to_vec();
    let mut answer = Answer {
        text: String::new(),
        ids: Vec::new(),
        logprobs: Vec::new(),
        finish: Finish::Length,
        thinking: None,
        unfinished_thinking: false,
        confidence: None,
        prompt_tokens: prompt.len(),
        reused_tokens: 0,
        drafted_tokens: 0,
        first_token_ms: 0.0,
        total_ms: 0.0,
    };
    let fed = match session.feed(prompt, stopped) {
        Ok(fed) => fed,
        Err(e) if e.kind == Kind::Interrupted => {
            answer.finish = Finish::Interrupted;
            answer.total_ms = ms(begin);
            return Ok(answer);
        }
        Err(e) => return Err(e),
    };
    answer.reused_tokens = fed.reused;
    let mut draft = request.draft.then(Draft::default);
    // Tokens that were run behind the last certain one, how many of them were chosen, and how long it took.
    let (mut guess, mut held, mut seconds): (Vec<u32>, usize, f64) = (Vec::new(), 0, 0.0);
    while answer.ids.len() < request.max_tokens {
        let allowed = form.as_mut().map(Constrained::mask).transpose()?;
        let choice = sampler.sample_among(session.logits(held), &recent, allowed);
        if answer.ids.is_empty() {
            answer.first_token_ms = ms(begin);
        }
        answer.ids.push(choice.id);
        answer.logprobs.push(choice.logprob);
        confidence.add(choice.margin);
        recent.push(choice.id);
        if let Some(form) = &mut form {
            form.commit(choice.id)?;
        }
        if (!request.ignore_end || form.is_some()) && engine.tokenizer.eos_ids().contains(&choice.id) {
            answer.finish = Finish::Stop;
            break;
        }
        let piece = stream.push(choice.id);
        if !piece.text.is_empty() {
            on_text(&piece.text);
            answer.text.push_str(&piece.text);
        }
        if piece.stopped || form.as_ref().is_some_and(Constrained::finished) {
            answer.finish = Finish::Stop;
            break;
        }
        if stopped() {
            answer.finish = Finish::Interrupted;
            break;
        }
        if answer.ids.len() == request.max_tokens {
            break;
        }
        let known = recent.len() - 1;
        if known == engine.context() {
            answer.finish = Finish::Context;
            break;
        }
        if guess.get(held) == Some(&choice.id) {
            held += 1;
            answer.drafted_tokens += 1;
            continue;
        }
        session.truncate(known);
        if answer.ids.len() == 1
            && let Some(model) = session.draft_model.as_deref_mut().filter(|_| request.draft)
        {
            match model.begin(&recent, &request.sampling, stopped) {
                Err(e) if e.kind == Kind::Interrupted => {
                    answer.finish = Finish::Interrupted;
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
            let room = (engine.context() - recent.len()).min(request.max_tokens - answer.ids.len() - 1);
            guess.clear();
            begin = Instant::now();
            if let Some(form) = &mut form {
                form.forced(room.min(LONGEST), &mut guess);
            }
            forced = !guess.is_empty();
            if !forced {
                guess.extend_from_slice(draft.guess(&recent, room, model)?);
            }
        }
        held = 0;
        session.run_ahead(choice.id, &guess)?;
        // What had to come says nothing about guesses.
        seconds = if forced { 0.0 } else { begin.elapsed().as_secs_f64() };
    }
    // Guesses that nobody chose are forgotten.
    session.truncate(recent.len() - usize::from(!answer.ids.is_empty()));
    let rest = stream.finish();
    if !rest.is_empty() {
        on_text(&rest);
        answer.text.push_str(&rest);
    }
    answer.confidence = confidence.value();
    answer.total_ms = ms(begin);
    Ok(answer)
}
