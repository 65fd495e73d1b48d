//! The JSON form of an answer: the completion response of the C API and of `--json`.

use super::generate::{Answer, Finish};
use crate::error::Error;
use serde_json::{Map, Value, json};

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
        "function_calls": [],
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
    let mut map = Map::new();
    map.insert("success".into(), false.into());
    let text = match error.hint() {
        Some(hint) => format!("{error} (hint: {hint})"),
        None => error.to_string(),
    };
    map.insert("error".into(), text.into());
    map.insert("cloud_handoff".into(), false.into());
    map.insert("cloud_handoff_reason".into(), "kept local".into());
    map.insert("response".into(), Value::Null);
    map.insert("function_calls".into(), json!([]));
    map.insert("segments".into(), json!([]));
    map.insert("confidence".into(), Value::Null);
    map.insert("confidence_threshold".into(), threshold.into());
    for key in ["time_to_first_token_ms", "total_time_ms", "prefill_tps", "decode_tps"] {
        map.insert(key.into(), 0.0.into());
    }
    map.insert("ram_usage_mb".into(), ram_usage_mb());
    for key in ["prefill_tokens", "decode_tokens", "total_tokens"] {
        map.insert(key.into(), 0.into());
    }
    Value::Object(map)
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
