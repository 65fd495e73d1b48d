//! Times, rates and memory of a run, for `--stats`.

use cactus::engine::thinking::{Part, Prompt, generate_parts};
use cactus::engine::{Answer, Engine, Request, Session, response};
use cactus::error::Result;
use serde_json::Value;
use std::time::Instant;

/// Collects what `--stats` tells.
pub struct Stats {
    /// Start of the program.
    started: Instant,
    /// From there until the bundle was found or made.
    found_ms: f64,
    /// From there until the first token of the first answer.
    first_token_ms: Option<f64>,
    answers: Vec<Tally>,
}

/// Tokens and times of an answer.
struct Tally {
    prompt: usize,
    reused: usize,
    generated: usize,
    drafted: usize,
    first_token_ms: f64,
    total_ms: f64,
}

impl Stats {
    /// Begins when the bundle has been found.
    pub fn new(started: Instant) -> Self {
        Stats { started, found_ms: started.elapsed().as_secs_f64() * 1e3, first_token_ms: None, answers: Vec::new() }
    }

    /// Generates, and remembers how long it took.
    pub fn answer(
        &mut self,
        session: &mut Session,
        prompt: &Prompt,
        request: &Request,
        on_part: &mut dyn FnMut(Part),
        stopped: &dyn Fn() -> bool,
    ) -> Result<Answer> {
        let before_ms = self.started.elapsed().as_secs_f64() * 1e3;
        let answer = generate_parts(session, prompt, request, on_part, stopped)?;
        self.first_token_ms.get_or_insert(before_ms + answer.first_token_ms);
        self.answers.push(Tally {
            prompt: answer.prompt_tokens,
            reused: answer.reused_tokens,
            generated: answer.ids.len(),
            drafted: answer.drafted_tokens,
            first_token_ms: answer.first_token_ms,
            total_ms: answer.total_ms,
        });
        Ok(answer)
    }

    pub fn table(&self, engine: &Engine) -> String {
        let sum = |part: fn(&Tally) -> usize| self.answers.iter().map(part).sum::<usize>();
        let ms = |part: fn(&Tally) -> f64| self.answers.iter().map(part).sum::<f64>();
        let per_second = |count: usize, ms: f64| if ms > 0.0 { count as f64 * 1e3 / ms } else { 0.0 };
        let (prefill_ms, total_ms) = (ms(|t| t.first_token_ms), ms(|t| t.total_ms));
        let (run, decoded) = (sum(|t| t.prompt - t.reused), sum(|t| t.generated.saturating_sub(1)));
        let times = engine.load_times();
        let peak = match response::ram_usage_mb() {
            Value::Null => "unknown".to_owned(),
            megabytes => format!("{megabytes} MB"),
        };
        format!(
            "stats: load         {:.1} ms (find {:.1}, open {:.1}, tokenizer {:.1}, plan {:.1})\n\
             stats: first token  {prefill_ms:.1} ms, {:.1} ms after the start of the program\n\
             stats: prefill      {run} tokens, {:.1} tokens/s ({} more known from before)\n\
             stats: decode       {decoded} tokens, {:.1} tokens/s ({} guessed)\n\
             stats: total        {total_ms:.1} ms for {} answer(s), {} threads, {} kernels\n\
             stats: peak memory  {peak}",
            self.found_ms + times.open_ms + times.tokenizer_ms + times.plan_ms,
            self.found_ms,
            times.open_ms,
            times.tokenizer_ms,
            times.plan_ms,
            self.first_token_ms.unwrap_or(0.0),
            per_second(run, prefill_ms),
            sum(|t| t.reused),
            per_second(decoded, total_ms - prefill_ms),
            sum(|t| t.drafted),
            self.answers.len(),
            engine.threads(),
            engine.level(),
        )
    }
}
