//! `/v1/embeddings`: with the model of `--embedding-model`, else with the states of the chat model.

use super::failure::{Failure, Result};
use super::{App, body};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cactus::engine::embed::Embedder;
use cactus::engine::fields::Fields;
use serde_json::{Value, json};
use std::sync::Arc;

/// Texts of a request at most, as OpenAI has it.
const TEXTS: usize = 2048;

pub async fn answer(State(app): State<Arc<App>>, request: Request) -> Result<Response> {
    let body = body::read(request, app.body_limit).await?;
    super::apart(move || {
        let fields = Fields::parse(&body)?;
        app.with_embedder(|embedder| Ok(Json(embed(&app, embedder, &fields)?).into_response()))
    })
    .await
}

fn embed(app: &App, embedder: &Embedder, fields: &Fields) -> Result<Value> {
    let name = if app.embedder.is_some() { &embedder.bundle().manifest.source.name } else { &app.id };
    if let Some(model) = fields.text("model")?.filter(|model| !model.eq_ignore_ascii_case(name)) {
        app.knows(model)?;
    }
    fields.unsupported("dimensions", |value| value.as_u64() == Some(embedder.dim() as u64))?;
    let base64 = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(Failure::wrong("encoding_format", "encoding_format must be float or base64")),
    };
    let ids = inputs(embedder, fields)?;
    let mut data = Vec::new();
    let mut tokens = 0;
    let vectors = embedder.embed_ids(&ids, &|| false).map_err(|e| Failure::from(e).of("input"))?;
    for (index, (mut vector, ids)) in vectors.into_iter().zip(&ids).enumerate() {
        if embedder.normalizes() {
            cactus::engine::embed::to_length_one(&mut vector);
        }
        tokens += ids.len();
        let values: Value = if base64 {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            BASE64_STANDARD.encode(bytes).into()
        } else {
            vector.into()
        };
        data.push(json!({"object": "embedding", "index": index, "embedding": values}));
    }
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(json!({"object": "list", "data": data, "model": name, "usage": usage}))
}

/// Texts or token ids, one or several. A text that is too long is refused, for its end would be missing.
fn inputs(embedder: &Embedder, fields: &Fields) -> Result<Vec<Vec<u32>>> {
    let wrong =
        || Failure::wrong("input", format!("input must be a text, a list of token ids, or a list of up to {TEXTS} of such"));
    let text = |text: &str| {
        if text.is_empty() {
            return Err(Failure::wrong("input", "input holds an empty text"));
        }
        match embedder.ids(text)? {
            (ids, false) => Ok(ids),
            (_, true) => {
                let message = format!("a text of input has more than {} tokens", embedder.max_tokens());
                let status = axum::http::StatusCode::BAD_REQUEST;
                Err(Failure::new(status, "context_length_exceeded", message).of("input"))
            }
        }
    };
    let ids = |list: &[Value]| -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        list.iter().map(id).collect::<Option<_>>().ok_or_else(wrong)
    };
    match fields.get("input") {
        Some(Value::String(input)) => Ok(vec![text(input)?]),
        Some(Value::Array(list)) if list.first().is_some_and(Value::is_number) => Ok(vec![ids(list)?]),
        Some(Value::Array(list)) if (1..=TEXTS).contains(&list.len()) => list
            .iter()
            .map(|input| match input {
                Value::String(input) => text(input),
                Value::Array(list) if !list.is_empty() => ids(list),
                _ => Err(wrong()),
            })
            .collect(),
        _ => Err(wrong()),
    }
}
