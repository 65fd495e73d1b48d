//! Reading the body of a request, so long and no longer.

use super::failure::{Failure, Result};
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use std::time::Duration;
use tokio_stream::StreamExt;

/// Time for a whole body.
const PATIENCE: Duration = Duration::from_secs(60);

/// The body, of at most `limit` bytes.
pub async fn read(request: Request, limit: usize) -> Result<Vec<u8>> {
    let too_large = || {
        let message = format!("the body is larger than {limit} bytes (--body-limit)");
        Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok());
    if length.is_some_and(|length: usize| length > limit) {
        return Err(too_large());
    }
    match tokio::time::timeout(PATIENCE, collect(request.into_body(), limit)).await {
        Ok(Ok(Some(bytes))) => Ok(bytes),
        Ok(Ok(None)) => Err(too_large()),
        Ok(Err(error)) => Err(Failure::wrong("body", format!("the body could not be read: {error}"))),
        Err(_) => {
            let message = format!("the body took longer than {} s", PATIENCE.as_secs());
            Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message))
        }
    }
}

/// `None`: there is more than `limit`.
async fn collect(body: Body, limit: usize) -> std::result::Result<Option<Vec<u8>>, axum::Error> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await {
        let piece: Bytes = piece?;
        if bytes.len() + piece.len() > limit {
            return Ok(None);
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(Some(bytes))
}
