//! The JSON form of an answer: the completion response of the C API and of `--json`.

use super::generate::{Answer, Finish};
use crate::error::Error;
use serde_json::{Value, json};

/// Threshold that answers are compared with until handoff is configured.
pub const THRESHOLD: f64 = 0.7;

/// Fields of a completion response, in their documented order.
pub fn completion(answer: &Answer, threshold: f64) -> Value {
    let interrupted = answer.finish == Finish::Interrupted;
    let mut value = json!({
        "success": !interrupted,
        "error": interrupted.then_some("interrupted"),
        "cloud_handoff": false,
        "cloud_handoff_reason": "kept local",
        "response": answer.text,
        "thinking": answer.thinking,
        "function_calls": answer.calls,
        "segments": [],
        "confidence": answer.confidence.map(|c| round(c, 4)),
        "confidence_threshold": threshold,
        "time_to_first_token_ms": round(answer.first_token_ms, 2),
        "total_time_ms": round(answer.total_ms, 2),
        "prefill_tps": round(answer.prefill_tps(), 2),
        "decode_tps": round(answer.decode_tps(), 2),
        "ram_usage_mb": ram_usage_mb(),
        "prefill_tokens": answer.prompt_tokens,
        "decode_tokens": answer.ids.len(),
        "total_tokens": answer.prompt_tokens + answer.ids.len(),
    });
    // The one field that is absent when there is nothing to say.
    if answer.thinking.is_none()
        && let Some(fields) = value.as_object_mut()
    {
        fields.shift_remove("thinking");
    }
    value
}

/// The same fields for a failure.
pub fn failure(error: &Error, threshold: f64) -> Value {
    json!({
        "success": false,
        "error": error.in_one_line(),
        "cloud_handoff": false,
        "cloud_handoff_reason": "kept local",
        "response": null,
        "function_calls": [],
        "segments": [],
        "confidence": null,
        "confidence_threshold": threshold,
        "time_to_first_token_ms": 0.0,
        "total_time_ms": 0.0,
        "prefill_tps": 0.0,
        "decode_tps": 0.0,
        "ram_usage_mb": ram_usage_mb(),
        "prefill_tokens": 0,
        "decode_tokens": 0,
        "total_tokens": 0,
    })
}

fn round(x: f64, digits: i32) -> f64 {
    let factor = 10f64.powi(digits);
    (x * factor).round() / factor
}

/// Peak resident memory of this process in megabytes (10^6 bytes); null where the system does not tell.
pub fn ram_usage_mb() -> Value {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    match line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<f64>().ok()) {
        Some(kib) => round(kib * 1024.0 / 1e6, 2).into(),
        None => Value::Null,
    }
}
