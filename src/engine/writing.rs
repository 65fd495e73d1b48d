//! An answer while it is written: from logits to tokens and text, and when it ends.

use super::confidence::Confidence;
use super::constrain::{Constrained, Constraint};
use super::draft::LONGEST;
use super::generate::{Answer, Finish, Request};
use super::load::Engine;
use super::sampler::{self, Sampler};
use super::stream::TextStream;
use super::thinking::{Part, Splitter, tag_ids};
use super::tools::{Dialect, Event, Reader};
use crate::error::{Error, Result};
use std::time::Instant;

/// The likeliest tokens at a place of an answer, and what their probabilities were.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenChoices {
    pub id: u32,
    /// Natural logarithm of the token's probability.
    pub logprob: f32,
    /// Ids and logarithms of probabilities of the likeliest, best first; as many as [`Request::top_logprobs`].
    pub top: Vec<(u32, f32)>,
}

/// Gets a part of an answer, and what was chosen since somebody took that.
pub type OnPart<'a> = &'a mut dyn FnMut(Part, &mut Vec<TokenChoices>);

/// One answer being written. Whoever runs the model gives it logits and is told which token to run next.
pub struct Writing<'e> {
    engine: &'e Engine,
    request: Request,
    sampler: Sampler,
    stream: TextStream<'e>,
    splitter: Splitter,
    reader: Option<Reader>,
    confidence: Confidence,
    form: Option<Constrained<'e>>,
    /// Prompt and answer.
    ids: Vec<u32>,
    choices: Vec<TokenChoices>,
    answer: Answer,
    ended: bool,
    begin: Instant,
}

impl<'e> Writing<'e> {
    /// What [`new`](Self::new) would refuse.
    ///
    /// # Errors
    /// `Usage` when a sampling value is out of range, the prompt leaves no room for an answer, or the form cannot be kept;
    /// `Unsupported` when this model can keep none.
    pub fn check(engine: &Engine, prompt: &[u32], request: &Request) -> Result<()> {
        Writing::check_sizes(engine, prompt, request)?;
        form_of(engine, request)?.map_or(Ok(()), |form| Constrained::new(engine, &form).map(drop))
    }

    fn check_sizes(engine: &Engine, prompt: &[u32], request: &Request) -> Result<()> {
        request.sampling.validate()?;
        if prompt.len() >= engine.context() {
            return Err(Error::usage(format!(
                "the prompt has {} tokens, the context of {} has no room for an answer",
                prompt.len(),
                engine.context()
            ))
            .with_hint(format!(
                "shorten the prompt, or give a larger --context (this model: up to {})",
                engine.spec().max_context
            )));
        }
        Ok(())
    }

    /// An answer to `prompt`; time is counted from `begin`.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn new(engine: &'e Engine, prompt: &[u32], request: &Request, splitter: Splitter, begin: Instant) -> Result<Self> {
        Writing::check_sizes(engine, prompt, request)?;
        let form = form_of(engine, request)?.map(|form| match (splitter.opened(), splitter.tags()) {
            (Some(close), _) => form.after(close),
            (None, Some(tags)) => form.outside(tags.open, tags.close),
            (None, None) => form,
        });
        let mut stops = request.stops.clone();
        if form.as_ref().is_some_and(|form| !form.is_optional()) {
            stops.clear();
        }
        let mut shown = tag_ids(&engine.tokenizer);
        let notation = request.tools.as_ref().map(|_| Dialect::of(engine).notation);
        if let Some(notation) = notation {
            shown.extend(notation.shown().filter_map(|mark| engine.tokenizer.token_id(mark)));
            stops.extend(notation.stop().map(str::to_owned));
        }
        let stream = TextStream::new(&engine.tokenizer, stops).showing(shown);
        let form = form.map(|form| Constrained::new(engine, &form)).transpose()?;
        let reader = notation.zip(request.tools.clone()).map(|(notation, tools)| Reader::new(notation, tools));
        Ok(Writing {
            engine,
            sampler: Sampler::new(request.sampling.clone()),
            stream,
            splitter,
            reader,
            form,
            confidence: Confidence::default(),
            ids: prompt.to_vec(),
            choices: Vec::new(),
            answer: Answer {
                text: String::new(),
                ids: Vec::new(),
                logprobs: Vec::new(),
                finish: Finish::Length,
                thinking: None,
                calls: Vec::new(),
                unfinished_thinking: false,
                confidence: None,
                prompt_tokens: prompt.len(),
                reused_tokens: 0,
                drafted_tokens: 0,
                first_token_ms: 0.0,
                total_ms: 0.0,
            },
            ended: request.max_tokens == 0,
            request: request.clone(),
            begin,
        })
    }

    /// Prompt and answer so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Tokens of the answer so far.
    pub fn tokens(&self) -> usize {
        self.answer.ids.len()
    }

    /// Tokens that may follow the next one.
    pub fn room(&self) -> usize {
        (self.engine.context() - self.ids.len()).min(self.request.max_tokens - self.tokens() - 1)
    }

    pub fn ended(&self) -> bool {
        self.ended
    }

    /// What was chosen since this was asked last; recorded when [`Request::top_logprobs`] is set.
    pub fn take_choices(&mut self) -> Vec<TokenChoices> {
        std::mem::take(&mut self.choices)
    }

    /// Notes how many prompt tokens were known from before.
    pub fn reused(&mut self, tokens: usize) {
        self.answer.reused_tokens = tokens;
    }

    /// Notes that the next token was guessed.
    pub fn drafted(&mut self) {
        self.answer.drafted_tokens += 1;
    }

    /// Ends the answer as it stands.
    pub fn end(&mut self, finish: Finish) {
        self.answer.finish = finish;
        self.ended = true;
    }

    /// Adds to `guess` what must come next, as far as the form alone says so. False if it says nothing.
    pub fn forced(&mut self, guess: &mut Vec<u32>) -> bool {
        let room = self.room().min(LONGEST);
        if let Some(form) = &mut self.form {
            form.forced(room, guess);
        }
        !guess.is_empty()
    }

    /// Chooses the next token from the logits after [`ids`](Self::ids), which are used as work space. Returns the token
    /// to run, or nothing when the answer has ended. `on_part` may take what was chosen since it did so last.
    ///
    /// # Errors
    /// `Unsupported` when the form leads to where no token can follow.
    pub fn choose(&mut self, logits: &mut [f32], on_part: OnPart) -> Result<Option<u32>> {
        if self.ended {
            return Ok(None);
        }
        let top = self.request.top_logprobs.map(|count| sampler::likeliest(logits, count));
        let allowed = self.form.as_mut().map(Constrained::mask).transpose()?.flatten();
        let choice = self.sampler.sample_among(logits, &self.ids, allowed);
        if self.answer.ids.is_empty() {
            self.answer.first_token_ms = self.elapsed_ms();
        }
        self.answer.ids.push(choice.id);
        self.answer.logprobs.push(choice.logprob);
        self.choices.extend(top.map(|top| TokenChoices { id: choice.id, logprob: choice.logprob, top }));
        self.confidence.add(choice.margin);
        self.ids.push(choice.id);
        if let Some(form) = &mut self.form {
            form.commit(choice.id)?;
        }
        if (!self.request.ignore_end || self.form.is_some()) && self.engine.tokenizer.eos_ids().contains(&choice.id) {
            self.end(Finish::Stop);
            return Ok(None);
        }
        let piece = self.stream.push(choice.id);
        self.say(&piece.text, on_part);
        if piece.stopped || self.form.as_ref().is_some_and(Constrained::finished) {
            self.end(Finish::Stop);
        } else if self.tokens() == self.request.max_tokens {
            self.end(Finish::Length);
        } else if self.ids.len() > self.engine.context() {
            self.end(Finish::Context);
        }
        Ok((!self.ended).then_some(choice.id))
    }

    fn say(&mut self, text: &str, on_part: OnPart) {
        if text.is_empty() {
            return;
        }
        self.split(on_part, |splitter, on_part| splitter.push(text, on_part));
    }

    /// Tells thoughts, text and calls apart in what `act` gets out of the splitter.
    fn split<T>(&mut self, on_part: OnPart, act: impl FnOnce(&mut Splitter, &mut dyn FnMut(Part)) -> T) -> T {
        let Writing { splitter, reader, answer, choices, .. } = self;
        act(splitter, &mut |part| match (part, reader.as_mut()) {
            (Part::Answer(text), Some(reader)) => reader.push(text, &mut |event| hear(answer, event, choices, on_part)),
            (part, _) => collect(answer, part, choices, on_part),
        })
    }

    fn elapsed_ms(&self) -> f64 {
        self.begin.elapsed().as_secs_f64() * 1e3
    }

    /// The answer, after what was held back of its text has been handed on.
    pub fn finish(mut self, on_part: OnPart) -> Answer {
        let rest = self.stream.finish();
        self.say(&rest, on_part);
        let unfinished = self.split(on_part, |splitter, on_part| splitter.finish(on_part));
        let Writing { reader, answer, choices, .. } = &mut self;
        if let Some(reader) = reader {
            reader.finish(&mut |event| hear(answer, event, choices, on_part));
        }
        self.answer.unfinished_thinking = unfinished;
        self.answer.confidence = self.confidence.value();
        self.answer.total_ms = self.elapsed_ms();
        self.answer
    }
}

/// The form that a request asks for, by itself or by its tools.
///
/// # Errors
/// `Usage` where it asks for both, or for what cannot be promised.
fn form_of(engine: &Engine, request: &Request) -> Result<Option<Constraint>> {
    match (&request.constraint, &request.tools) {
        (Some(_), Some(_)) => Err(Error::usage("a form of the answer and tools do not go together: a call has its own form")),
        (form, None) => Ok(form.clone()),
        (None, Some(tools)) => tools.constraint(&Dialect::of(engine), &engine.tokenizer),
    }
}

/// What the reader of calls tells, as a part.
fn hear(answer: &mut Answer, event: Event, choices: &mut Vec<TokenChoices>, on_part: OnPart) {
    match event {
        Event::Text(text) => collect(answer, Part::Answer(text), choices, on_part),
        Event::Call(call) => collect(answer, Part::Call(&call), choices, on_part),
    }
}

/// Adds a part to an answer and hands it on.
fn collect(answer: &mut Answer, part: Part, choices: &mut Vec<TokenChoices>, on_part: OnPart) {
    match part {
        Part::Thought(piece) => answer.thinking.get_or_insert_default().push_str(piece),
        Part::Answer(piece) => answer.text.push_str(piece),
        Part::Call(call) => answer.calls.push(call.clone()),
    }
    on_part(part, choices);
}
