//! The `response_format` of an OpenAI chat completion.
//! Source: <https://platform.openai.com/docs/api-reference/chat/create>.

use super::Constraint;
use crate::error::{Error, Result};
use serde_json::Value;

/// Reads `{"type": "text"}` (no form), `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"name",
/// "schema", "strict"}}`. The schema is held to whether or not it is called strict. It may also stand beside the type, as
/// in the Responses form and in `{"type": "json_object", "schema": ...}`.
///
/// # Errors
/// `Usage` for anything else, and for a schema that cannot be promised.
pub fn parse(format: &Value) -> Result<Option<Constraint>> {
    let wrong = |what: &str| Error::usage(format!("response_format: {what}"));
    let fields = format.as_object().ok_or_else(|| wrong("it must be an object"))?;
    let kind = fields.get("type").and_then(Value::as_str).ok_or_else(|| wrong("`type` must be a text"))?;
    let known: &[&str] = match kind {
        "text" => &["type"],
        "json_object" => &["type", "schema"],
        "json_schema" => &["type", "json_schema", "schema", "name", "strict", "description"],
        _ => return Err(wrong(&format!("`type` is {kind:?}, but must be text, json_object or json_schema"))),
    };
    let within = fields.get("json_schema").filter(|_| kind == "json_schema");
    let inner = within.map(|inner| inner.as_object().ok_or_else(|| wrong("`json_schema` must be an object"))).transpose()?;
    let unknown = |name: &&String| !known.contains(&name.as_str());
    let inner_unknown = |name: &&String| !["schema", "name", "strict", "description"].contains(&name.as_str());
    let stray = fields.keys().find(unknown).or_else(|| inner.and_then(|inner| inner.keys().find(inner_unknown)));
    if let Some(name) = stray {
        return Err(wrong(&format!("unknown field `{}`", name.escape_debug())));
    }
    let strict = inner.unwrap_or(fields).get("strict");
    if strict.is_some_and(|strict| !strict.is_boolean() && !strict.is_null()) {
        return Err(wrong("`strict` must be true or false"));
    }
    let schema = inner.unwrap_or(fields).get("schema").filter(|schema| !schema.is_null());
    match (kind, schema) {
        ("text", _) => Ok(None),
        (_, Some(schema)) => Ok(Some(Constraint::json_schema(schema).map_err(|e| e.context("response_format"))?)),
        ("json_object", None) => Ok(Some(Constraint::json_object())),
        _ => Err(wrong("`json_schema` has no `schema`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_forms_are_told_apart() {
        let schema = json!({"type": "array"});
        assert!(parse(&json!({"type": "text"})).unwrap().is_none());
        for format in [
            json!({"type": "json_object"}),
            json!({"type": "json_object", "schema": schema}),
            json!({"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": schema}}),
            json!({"type": "json_schema", "name": "a", "schema": schema}),
        ] {
            assert!(parse(&format).unwrap().is_some(), "{format}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (format, part) in [
            (json!("json"), "object"),
            (json!({}), "`type`"),
            (json!({"type": "xml"}), "xml"),
            (json!({"type": "json_object", "shema": {}}), "shema"),
            (json!({"type": "json_schema"}), "no `schema`"),
            (json!({"type": "json_schema", "json_schema": 1}), "`json_schema`"),
            (json!({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}), "strict"),
            (json!({"type": "json_schema", "json_schema": {"schema": {}, "sttrict": true}}), "sttrict"),
            (
                json!({"type": "json_schema", "json_schema": {"schema": {"properties": {"a/b": {"uniqueItems": true}}}}}),
                "/properties/a~1b/uniqueItems",
            ),
        ] {
            let error = parse(&format).unwrap_err();
            assert!(error.message().contains(part), "{format}: {error}");
            assert_eq!(error.kind, crate::error::Kind::Usage);
        }
    }
}
