//! What a request asks for: the fields that all ways of asking for text have in common.

use super::App;
use super::events::{Ear, Heard};
use super::failure::{Failure, Result};
use axum::http::StatusCode;
use cactus::engine::chat::{self, Message};
use cactus::engine::constrain::response_format;
use cactus::engine::fields::Fields;
use cactus::engine::schedule::Job;
use cactus::engine::thinking::{self, Prompt, Splitter};
use cactus::engine::tools::{Choice, Tools};
use cactus::engine::writing::Writing;
use cactus::engine::{Engine, Request};
use serde_json::Value;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Answers to one prompt at most.
const CHOICES: u64 = 16;
/// Likeliest tokens that can be asked for.
pub const TOP_LOGPROBS: u64 = 20;

/// How answers are wanted.
pub struct Asked {
    pub request: Request,
    /// Answers to each prompt.
    pub count: usize,
    pub stream: bool,
    /// A stream ends with token counts.
    pub include_usage: bool,
    /// The passages that the answer comes from.
    pub sources: Option<Value>,
}

impl Asked {
    /// Reads everything but the prompt.
    pub fn read(app: &App, fields: &Fields) -> Result<Self> {
        if let Some(model) = fields.text("model")? {
            app.knows(model)?;
        }
        let base = &app.defaults;
        let mut sampling = base.sampling.clone();
        let set = |to: &mut f32, value: Option<f64>| *to = value.map_or(*to, |value| value as f32);
        set(&mut sampling.temperature, fields.number("temperature", 0.0..=2.0)?);
        set(&mut sampling.top_p, fields.number("top_p", 0.0..=1.0)?);
        set(&mut sampling.min_p, fields.number("min_p", 0.0..=1.0)?);
        set(&mut sampling.repetition_penalty, fields.number("repetition_penalty", 0.01..=10.0)?);
        // Nothing but the likeliest, as 0 is meant.
        sampling.top_p = sampling.top_p.max(f32::MIN_POSITIVE);
        sampling.top_k = fields.whole("top_k", 0..=u64::from(u32::MAX))?.map_or(sampling.top_k, |k| k as usize);
        sampling.seed = fields.whole("seed", 0..=u64::MAX)?.unwrap_or_else(any_seed);
        set(&mut sampling.presence_penalty, fields.number("presence_penalty", -2.0..=2.0)?);
        set(&mut sampling.frequency_penalty, fields.number("frequency_penalty", -2.0..=2.0)?);
        fields.unsupported("logit_bias", |value| value.as_object().is_some_and(serde_json::Map::is_empty))?;
        let stops = fields.texts("stop")?;
        if stops.len() > 16 || stops.iter().any(String::is_empty) {
            return Err(Failure::wrong("stop", "stop must be up to 16 texts that are not empty"));
        }
        let mut max_tokens = None;
        for name in ["max_completion_tokens", "max_output_tokens", "max_tokens"] {
            max_tokens = max_tokens.or(fields.whole(name, 1..=u64::from(u32::MAX))?);
        }
        let constraint = match fields.get("response_format") {
            Some(format) => response_format::parse(format).map_err(|e| Failure::from(e).of("response_format"))?,
            None => None,
        };
        let usage = fields.get("stream_options").and_then(|options| options.get("include_usage"));
        Ok(Asked {
            request: Request {
                sampling,
                // The end of the context, if nothing else is said.
                max_tokens: max_tokens.map_or(app.service.engine().context(), |n| n as usize),
                stops,
                constraint,
                ..base.clone()
            },
            count: fields.whole("n", 1..=CHOICES)?.unwrap_or(1) as usize,
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage: usage.and_then(Value::as_bool).unwrap_or(false),
            sources: None,
        })
    }

    /// Reads what an answer to `messages` may call, and adds what it is to come from.
    pub fn prepare(&mut self, app: &App, fields: &Fields, messages: &mut Vec<Message>) -> Result<()> {
        let choice = fields.get("tool_choice").map(Choice::parse).transpose()?.unwrap_or_default();
        let parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
        let most = fields.whole("tool_rag_top_k", 0..=u64::from(u32::MAX))?.unwrap_or(0) as usize;
        let tools = Tools::parse(fields.get("tools").unwrap_or(&Value::Null), &choice, parallel)?;
        let few = |tools: Tools| tools.few(most, chat::last_question(messages), app.service.engine());
        self.request.tools = tools.map(few).transpose()?;
        self.sources = app.ground(messages)?;
        Ok(())
    }

    /// The jobs for answers to several prompts, and where their answers arrive: choice `i` answers prompt
    /// `i / self.count`. `chat`: reasoning is told from the answer.
    pub fn jobs(&self, engine: &Engine, prompts: Vec<Prompt>, chat: bool) -> Result<(Vec<Job>, UnboundedReceiver<Heard>)> {
        let (to, from) = unbounded_channel();
        let tags = thinking::tags(engine).filter(|_| chat);
        let mut jobs = Vec::new();
        for prompt in &prompts {
            if prompt.ids.is_empty() {
                return Err(Failure::wrong("prompt", "the prompt is empty"));
            }
            let (tokens, context) = (prompt.ids.len(), engine.context());
            if tokens >= context {
                let message = format!("the prompt has {tokens} tokens, the context of {context} has no room for an answer");
                let param = if chat { "messages" } else { "prompt" };
                return Err(Failure::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message).of(param));
            }
            let about = |e| if self.request.tools.is_some() { Failure::from(e).of("tools") } else { Failure::from(e) };
            Writing::check(engine, &prompt.ids, &self.request).map_err(about)?;
            for i in 0..self.count {
                let mut request = self.request.clone();
                request.sampling.seed = request.sampling.seed.wrapping_add(i as u64);
                let splitter = Splitter::new(tags, prompt.inside);
                let listener = Box::new(Ear { choice: jobs.len(), to: to.clone() });
                jobs.push(Job { prompt: prompt.ids.clone(), request, splitter, listener });
            }
        }
        Ok((jobs, from))
    }
}

/// Where nobody named a seed, answers differ from time to time.
fn any_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}
