//! `/v1/responses`: the common part of it, without memory of earlier responses.

use super::asked::Asked;
use super::events::{self, Events, Heard, Said};
use super::failure::{Failure, Result};
use super::reply::{Usage, finish_reason, judgement};
use super::{App, ask, body};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use cactus::engine::Answer;
use cactus::engine::chat::{Message, Role};
use cactus::engine::constrain::response_format;
use cactus::engine::fields::Fields;
use cactus::engine::thinking::Prompt;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedReceiver;

pub async fn answer(State(app): State<Arc<App>>, request: Request) -> Result<Response> {
    let body = body::read(request, app.body_limit).await?;
    let (asked, prompt, instructions) = {
        let app = app.clone();
        super::apart(move || prepare(&app, &Fields::parse(&body)?)).await?
    };
    let (jobs, mut from) = asked.jobs(app.service.engine(), vec![prompt], true)?;
    app.service.submit(jobs)?;
    let reply = Reply { id: app.fresh_id("resp"), item: app.fresh_id("msg"), created: super::now(), asked, instructions, app };
    if reply.asked.stream {
        let (events, response) = events::stream();
        tokio::spawn(async move { reply.stream(&mut from, &events).await });
        return Ok(response);
    }
    let answers = events::whole(from, 1).await?;
    let answer = answers.first().map(|(answer, _)| answer);
    Ok(Json(reply.response(answer)).into_response())
}

fn prepare(app: &App, fields: &Fields) -> Result<(Asked, Prompt, Option<String>)> {
    let mut asked = Asked::read(app, fields)?;
    asked.count = 1;
    for name in ["previous_response_id", "conversation", "prompt"] {
        fields.unsupported(name, |_| false)?;
    }
    fields.unsupported("background", |value| value == false)?;
    fields.unsupported("tools", |value| value.as_array().is_some_and(Vec::is_empty))?;
    if let Some(format) = fields.get("text").and_then(|text| text.get("format")) {
        asked.request.constraint = response_format::parse(format).map_err(|e| Failure::from(e).of("text.format"))?;
    }
    let mut messages = match fields.get("input") {
        Some(Value::String(text)) => ask::user(text),
        Some(Value::Array(_)) => items(fields)?,
        _ => return Err(Failure::wrong("input", "input must be a text or a list of messages")),
    };
    let instructions = fields.text("instructions")?.map(str::to_owned);
    if let Some(text) = &instructions {
        messages.insert(0, Message::new(Role::System, text));
    }
    let effort = fields.get("reasoning").and_then(|reasoning| reasoning.get("effort")).and_then(Value::as_str);
    let think = effort.map(|effort| effort != "none");
    Ok((asked, Prompt::chat(app.service.engine(), &messages, think)?, instructions))
}

/// Messages whose parts are called `input_text` and `output_text`.
fn items(fields: &Fields) -> Result<Vec<Message>> {
    let mut list = fields.get("input").cloned().unwrap_or_default();
    for (i, item) in list.as_array_mut().into_iter().flatten().enumerate() {
        let kind = item.get("type").and_then(Value::as_str).unwrap_or("message");
        if kind != "message" {
            return Err(Failure::wrong(&format!("input[{i}]"), format!("input[{i}]: items of type {kind:?} are not supported")));
        }
        for part in item.get_mut("content").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(kind) = part.get_mut("type").filter(|kind| *kind == "input_text" || *kind == "output_text") {
                *kind = "text".into();
            }
        }
    }
    let mut renamed = Map::new();
    renamed.insert("input".to_owned(), list);
    ask::messages(&Fields::from(renamed), "input")
}

struct Reply {
    app: Arc<App>,
    asked: Asked,
    id: String,
    item: String,
    created: u64,
    instructions: Option<String>,
}

impl Reply {
    /// The response; without an answer: as it is before there is one.
    fn response(&self, answer: Option<&Answer>) -> Value {
        let complete = answer.is_some_and(|answer| finish_reason(answer) == "stop");
        let status = match answer {
            None => "in_progress",
            Some(_) if complete => "completed",
            Some(_) => "incomplete",
        };
        let usage = answer.map(|answer| {
            let mut usage = Usage::default();
            usage.add(answer, true);
            let usage = usage.json();
            json!({
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            })
        });
        let sampling = &self.asked.request.sampling;
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": (status == "incomplete").then(|| json!({"reason": "max_output_tokens"})),
            "instructions": self.instructions,
            "max_output_tokens": self.asked.request.max_tokens,
            "model": self.app.id,
            "output": answer.map(|answer| self.output(answer)).into_iter().collect::<Vec<_>>(),
            "parallel_tool_calls": false,
            "previous_response_id": null,
            "store": false,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": {},
        });
        if let (Some(answer), Some(fields)) = (answer, response.as_object_mut()) {
            fields.extend(judgement(answer));
        }
        response
    }

    fn output(&self, answer: &Answer) -> Value {
        let status = if finish_reason(answer) == "stop" { "completed" } else { "incomplete" };
        json!({"id": self.item, "type": "message", "status": status, "role": "assistant", "content": [part(&answer.text)]})
    }

    async fn stream(&self, from: &mut UnboundedReceiver<Heard>, events: &Events) {
        let mut number = 0;
        let mut event = |name: &str, fields: Value| {
            let mut event = json!({"type": name, "sequence_number": number});
            number += 1;
            if let (Some(all), Value::Object(fields)) = (event.as_object_mut(), fields) {
                all.extend(fields);
            }
            (name.to_owned(), event)
        };
        let place = json!({"item_id": self.item, "output_index": 0, "content_index": 0});
        let with = |name: &str, value: Value| {
            let mut fields = place.clone();
            fields[name] = value;
            fields
        };
        let item = json!({"id": self.item, "type": "message", "status": "in_progress", "role": "assistant", "content": []});
        for (name, fields) in [
            ("response.created", json!({"response": self.response(None)})),
            ("response.in_progress", json!({"response": self.response(None)})),
            ("response.output_item.added", json!({"output_index": 0, "item": item})),
            ("response.content_part.added", with("part", part(""))),
        ] {
            let (name, event) = event(name, fields);
            events.named(&name, &event).await;
        }
        while let Some(Heard { said, .. }) = events.next(from).await {
            let list = match said {
                Said::Thought(_) => Vec::new(),
                Said::Answer(text) => vec![event("response.output_text.delta", with("delta", text.into()))],
                Said::End(outcome) => match *outcome {
                    Err(error) => {
                        let failure = Failure::from(error);
                        vec![event("error", json!({"code": failure.code, "message": failure.message, "param": null}))]
                    }
                    Ok(answer) => {
                        let response = self.response(Some(&answer));
                        let end = if response["status"] == "completed" { "response.completed" } else { "response.incomplete" };
                        vec![
                            event("response.output_text.done", with("text", answer.text.clone().into())),
                            event("response.content_part.done", with("part", part(&answer.text))),
                            event("response.output_item.done", json!({"output_index": 0, "item": self.output(&answer)})),
                            event(end, json!({"response": response})),
                        ]
                    }
                },
            };
            for (name, event) in list {
                if !events.named(&name, &event).await {
                    return;
                }
            }
        }
    }
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}
