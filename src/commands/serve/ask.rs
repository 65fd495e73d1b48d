//! `/v1/chat/completions` and `/v1/completions`.

use super::asked::{Asked, TOP_LOGPROBS};
use super::failure::{Failure, Result};
use super::reply::{Form, Reply};
use super::{App, body};
use axum::extract::{Request, State};
use axum::response::Response;
use cactus::engine::chat::{Message, Role};
use cactus::engine::fields::Fields;
use cactus::engine::thinking::Prompt;
use serde_json::Value;
use std::sync::Arc;

pub async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response> {
    answer(app, request, Form::Chat).await
}

pub async fn text(State(app): State<Arc<App>>, request: Request) -> Result<Response> {
    answer(app, request, Form::Text).await
}

async fn answer(app: Arc<App>, request: Request, form: Form) -> Result<Response> {
    let body = body::read(request, app.body_limit).await?;
    let prepared = {
        let app = app.clone();
        // Templates and tokenizers may take a while with long texts.
        super::apart(move || prepare(&app, &Fields::parse(&body)?, form)).await?
    };
    let (asked, prompts) = prepared;
    let (jobs, from) = asked.jobs(app.service.engine(), prompts, form == Form::Chat)?;
    let count = jobs.len();
    app.service.submit(jobs)?;
    Reply::new(app, form, asked).send(from, count).await
}

fn prepare(app: &App, fields: &Fields, form: Form) -> Result<(Asked, Vec<Prompt>)> {
    let mut asked = Asked::read(app, fields)?;
    let prompts = match form {
        Form::Chat => {
            if fields.flag("logprobs")?.unwrap_or(false) {
                let top = fields.whole("top_logprobs", 0..=TOP_LOGPROBS)?.unwrap_or(0);
                asked.request.top_logprobs = Some(top as usize);
            }
            let mut messages = messages(fields, "messages")?;
            asked.prepare(app, fields, &mut messages)?;
            vec![Prompt::chat(app.service.engine(), &messages, asked.request.tools.as_ref(), thinking(fields)?)?]
        }
        Form::Text => {
            fields.unsupported("echo", |value| value == false)?;
            fields.unsupported("suffix", |value| value == "")?;
            fields.unsupported("best_of", |value| value.as_u64() == Some(asked.count as u64))?;
            asked.request.top_logprobs = fields.whole("logprobs", 0..=TOP_LOGPROBS)?.map(|top| top as usize);
            prompts(app, fields)?
        }
    };
    Ok((asked, prompts))
}

/// The messages of a chat; an error names the one at fault.
pub fn messages(fields: &Fields, name: &str) -> Result<Vec<Message>> {
    let list = match fields.get(name) {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) | None => return Err(Failure::wrong(name, format!("{name} must hold at least one message"))),
        Some(_) => return Err(Failure::wrong(name, format!("{name} must be a list of messages"))),
    };
    let message = |(i, value): (usize, &Value)| {
        serde_json::from_value(value.clone()).map_err(|e| Failure::wrong(&format!("{name}[{i}]"), format!("{name}[{i}]: {e}")))
    };
    list.iter().enumerate().map(message).collect()
}

/// Whether reasoning is asked for: as OpenAI says it, or as vLLM does.
pub fn thinking(fields: &Fields) -> Result<Option<bool>> {
    let effort = fields.text("reasoning_effort")?.map(|effort| !matches!(effort, "none" | "off"));
    let switch = fields.get("chat_template_kwargs").and_then(|switches| switches.get("enable_thinking"));
    Ok(effort.or_else(|| switch.and_then(Value::as_bool)))
}

/// Texts or token ids, one prompt or several.
fn prompts(app: &App, fields: &Fields) -> Result<Vec<Prompt>> {
    let engine = app.service.engine();
    let wrong = || Failure::wrong("prompt", "prompt must be a text, a list of token ids, or a list of such");
    let text = |text: &str| Ok(Prompt { ids: engine.tokenizer.encode(text, true)?, inside: false });
    let ids = |list: &[Value]| -> Result<Prompt> {
        let id =
            |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < engine.vocab());
        let ids = list.iter().map(id).collect::<Option<Vec<u32>>>();
        Ok(Prompt { ids: ids.ok_or_else(|| Failure::wrong("prompt", "prompt holds what is no token id"))?, inside: false })
    };
    match fields.get("prompt") {
        Some(Value::String(prompt)) => Ok(vec![text(prompt)?]),
        Some(Value::Array(list)) if list.first().is_some_and(Value::is_number) => Ok(vec![ids(list)?]),
        Some(Value::Array(list)) if !list.is_empty() && list.len() <= 128 => list
            .iter()
            .map(|prompt| match prompt {
                Value::String(prompt) => text(prompt),
                Value::Array(list) => ids(list),
                _ => Err(wrong()),
            })
            .collect(),
        _ => Err(wrong()),
    }
}

/// A conversation of one user turn.
pub fn user(text: &str) -> Vec<Message> {
    vec![Message::new(Role::User, text)]
}
