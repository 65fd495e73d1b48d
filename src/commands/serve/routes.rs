//! Which path leads where, and the short answers: models, health, metrics, the page.

use super::failure::Failure;
use super::{App, access, ask, embeddings, responses};
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: &str = include_str!("page.html");

pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(|| async { Html(PAGE) }))
        .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(ask::chat))
        .route("/v1/completions", post(ask::text))
        .route("/v1/embeddings", post(embeddings::answer))
        .route("/v1/responses", post(responses::answer))
        .fallback(|request: Request| async move {
            Failure::new(StatusCode::NOT_FOUND, "not_found", format!("there is nothing at {}", request.uri().path()))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let message = format!("{} does not go with {}", request.method(), request.uri().path());
            Failure::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
        })
        .layer(middleware::from_fn_with_state(app.clone(), access::guard))
        .layer(middleware::from_fn_with_state(app.clone(), count))
        .with_state(app)
}

/// Counts requests, and says on standard error what failed.
async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    app.requests.fetch_add(1, Ordering::Relaxed);
    let response = next.run(request).await;
    let status = response.status();
    if status.is_client_error() || status.is_server_error() {
        app.failed.fetch_add(1, Ordering::Relaxed);
        app.log(&format!("{method} {path:?}: {status}"));
    }
    response
}

fn card(app: &App) -> Value {
    let engine = app.service.engine();
    json!({
        "id": app.id, "object": "model", "created": app.created, "owned_by": "cactus",
        "context_window": engine.context(), "bits": engine.bundle.manifest.quantiser.bits_per_weight,
    })
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&app)]}))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, Failure> {
    app.knows(&name)?;
    Ok(Json(card(&app)))
}

/// Prometheus' text format.
async fn metrics(State(app): State<Arc<App>>) -> Response {
    let c = app.service.counters();
    let rows: [(&str, &str, &str, &AtomicU64); 11] = [
        ("requests_total", "counter", "HTTP requests", &app.requests),
        ("requests_failed_total", "counter", "HTTP requests that failed", &app.failed),
        ("answers_begun_total", "counter", "answers begun", &c.begun),
        ("answers_ended_total", "counter", "answers that came to their end", &c.ended),
        ("answers_left_total", "counter", "answers given up because nobody listened", &c.left),
        ("prompt_tokens_total", "counter", "prompt tokens that were run", &c.prompt_tokens),
        ("reused_tokens_total", "counter", "prompt tokens that were known from before", &c.reused_tokens),
        ("answer_tokens_total", "counter", "tokens of ended answers", &c.answer_tokens),
        ("steps_total", "counter", "runs of the model", &c.steps),
        ("slots_busy", "gauge", "answers being written", &c.busy),
        ("jobs_waiting", "gauge", "answers waiting for a slot", &c.waiting),
    ];
    let mut text = String::new();
    for (name, kind, help, value) in rows {
        let value = value.load(Ordering::Relaxed);
        let _ = write!(text, "# HELP cactus_{name} {help}\n# TYPE cactus_{name} {kind}\ncactus_{name} {value}\n");
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}
