//! What a caller is told when a request cannot be answered, in the form of the OpenAI API.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use cactus::engine::fields::FieldError;
use cactus::engine::service::Refused;
use cactus::error::{Error, Kind};
use serde_json::{Value, json};

/// A failed request.
#[derive(Debug)]
pub struct Failure {
    pub status: StatusCode,
    pub message: String,
    /// The field of the request that is at fault.
    pub param: Option<String>,
    /// What programs look at.
    pub code: Option<&'static str>,
}

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Failure { status, message: message.into(), param: None, code: Some(code) }
    }

    /// A request that makes no sense.
    pub fn wrong(param: &str, message: impl Into<String>) -> Self {
        let message = message.into();
        Failure { status: StatusCode::BAD_REQUEST, message, param: Some(param.to_owned()), code: None }
    }

    pub fn of(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    /// The error object, as it stands in an answer and in a stream.
    pub fn json(&self) -> Value {
        let kind = match self.status {
            status if status.is_server_error() => "server_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<Error> for Failure {
    /// What the library refuses is the caller's fault, unless the machine failed.
    fn from(error: Error) -> Self {
        let status = match error.kind {
            Kind::Usage | Kind::Unsupported | Kind::NotFound | Kind::BadFile => StatusCode::BAD_REQUEST,
            Kind::Network | Kind::Io | Kind::Interrupted => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let message = match error.hint() {
            Some(hint) => format!("{} ({hint})", error.message()),
            None => error.message().to_owned(),
        };
        Failure { status, message, param: None, code: None }
    }
}

impl From<FieldError> for Failure {
    fn from(error: FieldError) -> Self {
        Failure::wrong(&error.name, error.message)
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Full => {
                Failure::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", "as many requests wait as may; try again later")
            }
            Refused::Closed => Failure::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "the server is shutting down"),
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.json())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
