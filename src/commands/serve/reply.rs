//! Answers as the OpenAI API writes them.

use super::App;
use super::asked::Asked;
use super::events::{self, Events, Heard, Said};
use super::failure::{Failure, Result};
use axum::Json;
use axum::response::{IntoResponse, Response};
use cactus::engine::tokenizer::Tokenizer;
use cactus::engine::writing::TokenChoices;
use cactus::engine::{Answer, Finish};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedReceiver;

/// What sort of answer is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Chat,
    Text,
}

/// What all pieces of one reply have in common.
pub struct Reply {
    app: Arc<App>,
    form: Form,
    asked: Asked,
    id: String,
    created: u64,
}

/// Token counts over several answers.
#[derive(Default)]
pub struct Usage {
    prompt: usize,
    cached: usize,
    answer: usize,
}

impl Usage {
    /// `first`: the answer is the first one to its prompt, which counts once.
    pub fn add(&mut self, answer: &Answer, first: bool) {
        if first {
            self.prompt += answer.prompt_tokens;
            self.cached += answer.reused_tokens;
        }
        self.answer += answer.ids.len();
    }

    pub fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

pub fn finish_reason(answer: &Answer) -> &'static str {
    match answer.finish {
        Finish::Stop if !answer.calls.is_empty() => "tool_calls",
        Finish::Stop => "stop",
        Finish::Length | Finish::Context | Finish::Interrupted => "length",
    }
}

/// What is known of an answer beside its text.
pub fn judgement(answer: &Answer) -> Map<String, Value> {
    let fields = json!({
        "confidence": answer.confidence.map(|c| (c * 1e4).round() / 1e4),
        "cloud_handoff": false,
        "timings": {
            "time_to_first_token_ms": answer.first_token_ms,
            "total_time_ms": answer.total_ms,
            "prefill_tps": answer.prefill_tps(),
            "decode_tps": answer.decode_tps(),
            "drafted_tokens": answer.drafted_tokens,
        },
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

impl Reply {
    pub fn new(app: Arc<App>, form: Form, asked: Asked) -> Self {
        let prefix = if form == Form::Chat { "chatcmpl" } else { "cmpl" };
        let (id, created) = (app.fresh_id(prefix), super::now());
        Reply { app, form, asked, id, created }
    }

    /// All at once, or as a stream.
    pub async fn send(self, from: UnboundedReceiver<Heard>, count: usize) -> Result<Response> {
        if self.asked.stream {
            let (events, response) = events::stream();
            tokio::spawn(self.stream(from, count, events));
            return Ok(response);
        }
        let answers = events::whole(from, count).await?;
        let mut usage = Usage::default();
        let mut choices = Vec::new();
        for (i, (answer, tokens)) in answers.iter().enumerate() {
            usage.add(answer, i % self.asked.count == 0);
            choices.push(self.choice(i, answer, tokens));
        }
        let mut whole = self.head(if self.form == Form::Chat { "chat.completion" } else { "text_completion" });
        whole.insert("choices".to_owned(), choices.into());
        whole.insert("usage".to_owned(), usage.json());
        whole.extend(answers.first().map(|(answer, _)| judgement(answer)).unwrap_or_default());
        whole.extend(self.sources());
        Ok(Json(whole).into_response())
    }

    fn sources(&self) -> Option<(String, Value)> {
        Some(("sources".to_owned(), self.asked.sources.clone()?))
    }

    fn head(&self, object: &str) -> Map<String, Value> {
        let mut head = Map::new();
        head.insert("id".to_owned(), self.id.clone().into());
        head.insert("object".to_owned(), object.into());
        head.insert("created".to_owned(), self.created.into());
        head.insert("model".to_owned(), self.app.id.clone().into());
        head
    }

    fn choice(&self, index: usize, answer: &Answer, tokens: &[TokenChoices]) -> Value {
        let (reason, logprobs) = (finish_reason(answer), self.logprobs(tokens));
        match self.form {
            Form::Chat => {
                let mut message = json!({"role": "assistant", "content": answer.text, "refusal": null});
                if let Some(thought) = &answer.thinking {
                    message["reasoning_content"] = thought.clone().into();
                }
                if !answer.calls.is_empty() {
                    message["tool_calls"] =
                        answer.calls.iter().map(|call| call.message(Some(&self.app.fresh_id("call")))).collect();
                    if answer.text.is_empty() {
                        message["content"] = Value::Null;
                    }
                }
                json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
            }
            Form::Text => json!({"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": reason}),
        }
    }

    fn chunk(&self, index: usize, delta: Value, tokens: &[TokenChoices], reason: Option<&str>) -> Map<String, Value> {
        let object = if self.form == Form::Chat { "chat.completion.chunk" } else { "text_completion" };
        let mut chunk = self.head(object);
        let logprobs = self.logprobs(tokens);
        let choice = match self.form {
            Form::Chat => json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}),
            Form::Text => {
                let text = delta.get("content").cloned().unwrap_or_else(|| "".into());
                json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
            }
        };
        chunk.insert("choices".to_owned(), json!([choice]));
        if self.asked.include_usage {
            chunk.insert("usage".to_owned(), Value::Null);
        }
        chunk
    }

    async fn stream(self, mut from: UnboundedReceiver<Heard>, count: usize, events: Events) {
        let mut usage = Usage::default();
        let (mut left, mut calls) = (count, vec![0; count]);
        if self.form == Form::Chat {
            for i in 0..count {
                let start = json!({"role": "assistant", "content": "", "refusal": null});
                events.data(&self.chunk(i, start, &[], None).into()).await;
            }
        }
        while let Some(Heard { choice, said, tokens }) = events.next(&mut from).await {
            let chunk = match said {
                Said::Thought(text) => self.chunk(choice, json!({"reasoning_content": text}), &tokens, None),
                Said::Answer(text) => self.chunk(choice, json!({"content": text}), &tokens, None),
                Said::Call(call) => {
                    let mut call = call.message(Some(&self.app.fresh_id("call")));
                    call["index"] = calls[choice].into();
                    calls[choice] += 1;
                    self.chunk(choice, json!({"tool_calls": [call]}), &tokens, None)
                }
                Said::End(outcome) => match *outcome {
                    Err(error) => {
                        events.data(&Failure::from(error).json()).await;
                        return events.done().await;
                    }
                    Ok(answer) => {
                        left -= 1;
                        usage.add(&answer, choice % self.asked.count == 0);
                        let mut chunk = self.chunk(choice, json!({}), &tokens, Some(finish_reason(&answer)));
                        chunk.extend(judgement(&answer));
                        chunk.extend(self.sources());
                        chunk
                    }
                },
            };
            if !events.data(&chunk.into()).await {
                return;
            }
        }
        if left > 0 {
            events.data(&events::broken().json()).await;
        } else if self.asked.include_usage {
            let mut last = self.chunk(0, json!({}), &[], None);
            last.insert("choices".to_owned(), json!([]));
            last.insert("usage".to_owned(), usage.json());
            events.data(&last.into()).await;
        }
        events.done().await;
    }

    fn logprobs(&self, tokens: &[TokenChoices]) -> Value {
        if self.asked.request.top_logprobs.is_none() || (tokens.is_empty() && self.asked.stream) {
            return Value::Null;
        }
        let tokenizer = &self.app.service.engine().tokenizer;
        match self.form {
            Form::Chat => {
                let token = |choice: &TokenChoices| {
                    let mut token = token(tokenizer, choice.id, choice.logprob);
                    let top: Vec<Value> = choice.top.iter().map(|&(id, logprob)| self::token(tokenizer, id, logprob)).collect();
                    token["top_logprobs"] = top.into();
                    token
                };
                json!({"content": tokens.iter().map(token).collect::<Vec<_>>(), "refusal": null})
            }
            Form::Text => {
                let text = |id: u32| String::from_utf8_lossy(&tokenizer.token_bytes(id).unwrap_or_default()).into_owned();
                let top = |choice: &TokenChoices| {
                    choice.top.iter().map(|&(id, logprob)| (text(id), json!(rounded(logprob)))).collect::<Map<_, _>>()
                };
                json!({
                    "tokens": tokens.iter().map(|t| text(t.id)).collect::<Vec<_>>(),
                    "token_logprobs": tokens.iter().map(|t| rounded(t.logprob)).collect::<Vec<_>>(),
                    "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
                })
            }
        }
    }
}

/// Six digits behind the point are what f32 has.
fn rounded(logprob: f32) -> f64 {
    (f64::from(logprob) * 1e6).round() / 1e6
}

/// A token as text, as bytes (a token may be part of a character), and its probability.
fn token(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Value {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    json!({"token": String::from_utf8_lossy(&bytes), "logprob": rounded(logprob), "bytes": bytes})
}
