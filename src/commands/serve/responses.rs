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
use cactus::engine::tools::{Call, Tool, Tools};
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
    let output = answer.map(|answer| reply.output(answer)).unwrap_or_default();
    Ok(Json(reply.response(answer, &output)).into_response())
}

fn prepare(app: &App, fields: &Fields) -> Result<(Asked, Prompt, Option<String>)> {
    let mut asked = Asked::read(app, fields)?;
    asked.count = 1;
    for name in ["previous_response_id", "conversation", "prompt"] {
        fields.unsupported(name, |_| false)?;
    }
    fields.unsupported("background", |value| value == false)?;
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
    asked.prepare(app, fields, &mut messages)?;
    let prompt = Prompt::chat(app.service.engine(), &messages, asked.request.tools.as_ref(), think)?;
    Ok((asked, prompt, instructions))
}

/// Messages whose parts are called `input_text` and `output_text`, calls and their results.
fn items(fields: &Fields) -> Result<Vec<Message>> {
    let mut messages: Vec<Value> = Vec::new();
    for (i, item) in fields.get("input").and_then(Value::as_array).into_iter().flatten().enumerate() {
        let wrong = |what: String| Failure::wrong(&format!("input[{i}]"), format!("input[{i}]: {what}"));
        let text = |name: &str| item.get(name).and_then(Value::as_str).ok_or_else(|| wrong(format!("it has no {name}")));
        match item.get("type").and_then(Value::as_str).unwrap_or("message") {
            "message" => {
                let mut item = item.clone();
                for part in item.get_mut("content").and_then(Value::as_array_mut).into_iter().flatten() {
                    if let Some(kind) = part.get_mut("type").filter(|kind| *kind == "input_text" || *kind == "output_text") {
                        *kind = "text".into();
                    }
                }
                messages.push(item);
            }
            "function_call" => {
                let function = json!({"name": text("name")?, "arguments": text("arguments")?});
                let call = json!({"id": text("call_id")?, "type": "function", "function": function});
                // Calls that follow one another, or the words before them, are one answer.
                match messages.last_mut().filter(|last| last["role"] == "assistant") {
                    Some(last) => match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
                        Some(calls) => calls.push(call),
                        None => last["tool_calls"] = json!([call]),
                    },
                    None => messages.push(json!({"role": "assistant", "tool_calls": [call]})),
                }
            }
            "function_call_output" => {
                let output = match item.get("output") {
                    Some(Value::String(text)) => text.clone(),
                    Some(other) => other.to_string(),
                    None => return Err(wrong("it has no output".to_owned())),
                };
                messages.push(json!({"role": "tool", "tool_call_id": text("call_id")?, "content": output}));
            }
            // Reasoning is not read again.
            "reasoning" => {}
            kind => return Err(wrong(format!("items of type {kind:?} are not supported"))),
        }
    }
    let renamed = Map::from_iter([("input".to_owned(), messages.into())]);
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
    /// The response with these items; without an answer: as it is before there is one.
    fn response(&self, answer: Option<&Answer>, output: &[Value]) -> Value {
        let complete = answer.is_some_and(is_complete);
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
            "output": output,
            "parallel_tool_calls": self.asked.request.tools.is_some(),
            "previous_response_id": null,
            "store": false,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": if self.asked.request.tools.as_ref().is_some_and(Tools::forced) { "required" } else { "auto" },
            "tools": self.asked.request.tools.as_ref().map_or_else(|| json!([]), declared),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": {},
        });
        if let (Some(answer), Some(fields)) = (answer, response.as_object_mut()) {
            fields.extend(judgement(answer));
            fields.extend(self.asked.sources.clone().map(|sources| ("sources".to_owned(), sources)));
        }
        response
    }

    /// The items of a whole answer.
    fn output(&self, answer: &Answer) -> Vec<Value> {
        let mut items = Vec::new();
        if !answer.text.is_empty() || answer.calls.is_empty() {
            let status = if is_complete(answer) { "completed" } else { "incomplete" };
            items.push(self.message(0, status, &[part(&answer.text)]));
        }
        items.extend(answer.calls.iter().map(|call| self.call(call)));
        items
    }

    /// An item of words; `index`: its place in the output.
    fn message(&self, index: usize, status: &str, content: &[Value]) -> Value {
        json!({"id": self.message_id(index), "type": "message", "status": status, "role": "assistant", "content": content})
    }

    fn message_id(&self, index: usize) -> String {
        if index == 0 { self.item.clone() } else { format!("{}-{index}", self.item) }
    }

    fn call(&self, call: &Call) -> Value {
        json!({
            "id": self.app.fresh_id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": self.app.fresh_id("call"),
            "name": call.name,
            "arguments": Value::Object(call.arguments.clone()).to_string(),
        })
    }

    async fn stream(&self, from: &mut UnboundedReceiver<Heard>, events: &Events) {
        let mut sending = Sending { reply: self, number: 0, output: Vec::new(), text: None, waiting: Vec::new() };
        sending.event("response.created", json!({"response": self.response(None, &[])}));
        sending.event("response.in_progress", json!({"response": self.response(None, &[])}));
        loop {
            for (name, event) in sending.waiting.drain(..) {
                if !events.named(name, &event).await {
                    return;
                }
            }
            let Some(Heard { said, .. }) = events.next(from).await else { return };
            sending.hear(said);
        }
    }
}

/// A response on its way: its events have numbers, and its items come one after another.
struct Sending<'a> {
    reply: &'a Reply,
    number: usize,
    /// Items that are complete.
    output: Vec<Value>,
    /// The words of the item that is open.
    text: Option<String>,
    /// Events that are not sent yet.
    waiting: Vec<(&'static str, Value)>,
}

impl Sending<'_> {
    fn event(&mut self, name: &'static str, fields: Value) {
        let mut event = json!({"type": name, "sequence_number": self.number});
        self.number += 1;
        if let (Some(all), Value::Object(fields)) = (event.as_object_mut(), fields) {
            all.extend(fields);
        }
        self.waiting.push((name, event));
    }

    fn hear(&mut self, said: Said) {
        match said {
            Said::Thought(_) => {}
            Said::Answer(text) => {
                self.open();
                self.part_event("response.output_text.delta", "delta", text.clone().into());
                self.text.get_or_insert_default().push_str(&text);
            }
            Said::Call(call) => {
                self.close("completed");
                let item = self.reply.call(&call);
                let index = self.output.len();
                let mut begun = item.clone();
                (begun["status"], begun["arguments"]) = ("in_progress".into(), "".into());
                self.event("response.output_item.added", json!({"output_index": index, "item": begun}));
                let place = |name: &str| json!({"item_id": item["id"], "output_index": index, name: item["arguments"]});
                self.event("response.function_call_arguments.delta", place("delta"));
                self.event("response.function_call_arguments.done", place("arguments"));
                self.event("response.output_item.done", json!({"output_index": index, "item": item}));
                self.output.push(item);
            }
            Said::End(outcome) => match *outcome {
                Err(error) => {
                    let failure = Failure::from(error);
                    self.event("error", json!({"code": failure.code, "message": failure.message, "param": null}));
                }
                Ok(answer) => {
                    if self.output.is_empty() {
                        self.open();
                    }
                    let complete = is_complete(&answer);
                    self.close(if complete { "completed" } else { "incomplete" });
                    let response = self.reply.response(Some(&answer), &self.output);
                    let end = if complete { "response.completed" } else { "response.incomplete" };
                    self.event(end, json!({"response": response}));
                }
            },
        }
    }

    /// About the words of the item that is open.
    fn part_event(&mut self, event: &'static str, name: &str, value: Value) {
        let index = self.output.len();
        let id = self.reply.message_id(index);
        self.event(event, json!({"item_id": id, "output_index": index, "content_index": 0, name: value}));
    }

    /// Begins an item of words, if none is open.
    fn open(&mut self) {
        if self.text.is_some() {
            return;
        }
        let index = self.output.len();
        let item = self.reply.message(index, "in_progress", &[]);
        self.event("response.output_item.added", json!({"output_index": index, "item": item}));
        self.part_event("response.content_part.added", "part", part(""));
        self.text = Some(String::new());
    }

    /// Ends the item of words that is open, if one is.
    fn close(&mut self, status: &str) {
        let Some(text) = self.text.take() else { return };
        let index = self.output.len();
        let item = self.reply.message(index, status, &[part(&text)]);
        self.part_event("response.output_text.done", "text", text.clone().into());
        self.part_event("response.content_part.done", "part", part(&text));
        self.event("response.output_item.done", json!({"output_index": index, "item": item}));
        self.output.push(item);
    }
}

fn is_complete(answer: &Answer) -> bool {
    finish_reason(answer) != "length"
}

/// Tools as this API lists them.
fn declared(tools: &Tools) -> Value {
    let tool = |tool: &Tool| {
        let Tool { name, description, parameters, strict } = tool;
        json!({"type": "function", "name": name, "description": description, "parameters": parameters, "strict": strict})
    };
    tools.list().iter().map(tool).collect()
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}
