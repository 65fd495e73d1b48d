//! Schemas that refer to themselves: whether a value can come to an end.

use serde_json::{Map, Value};
use std::collections::HashSet;

/// The name of a definition, or "" for the root, that only a value without an end could satisfy. References are `#` and
/// `#/$defs/NAME`.
pub(super) fn endless(root: &Map<String, Value>, definitions: &Map<String, Value>) -> Option<String> {
    let all = || definitions.iter().map(|(name, schema)| (name.as_str(), schema.as_object()));
    let all = || all().chain([("", Some(root))]);
    // What needs nothing but what is known to end does so itself.
    let mut ending = HashSet::new();
    loop {
        let more: Vec<&str> = all()
            .filter(|(name, schema)| !ending.contains(name) && schema.is_none_or(|schema| ends(schema, &ending)))
            .map(|(name, _)| name)
            .collect();
        if more.is_empty() {
            return all().map(|(name, _)| name).find(|name| !ending.contains(name)).map(str::to_owned);
        }
        ending.extend(more);
    }
}

/// Whether a value of the schema can end if those of the definitions in `ending` can. What cannot be told counts as ending.
fn ends(schema: &Map<String, Value>, ending: &HashSet<&str>) -> bool {
    let one = |schema: &Value| schema.as_object().is_none_or(|schema| ends(schema, ending));
    let list = |name: &str| schema.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let refers = |name: &str| ending.contains(name.strip_prefix("#/$defs/").unwrap_or_default());
    let some = |name: &str| !schema.contains_key(name) || list(name).iter().any(one);
    let applied = schema.get("$ref").and_then(Value::as_str).is_none_or(refers)
        && list("allOf").iter().all(one)
        && some("anyOf")
        && some("oneOf");
    let of_type = |kind: &str| match kind {
        "object" => {
            let required = list("required").iter().filter_map(Value::as_str);
            required.filter_map(|name| schema.get("properties")?.get(name)).all(one)
        }
        "array" => {
            let least = schema.get("minItems").and_then(Value::as_u64).unwrap_or(0);
            let first = list("prefixItems");
            let rest = least <= first.len() as u64 || schema.get("items").is_none_or(one);
            rest && (0..least).zip(first).all(|(_, item)| one(item))
        }
        _ => true,
    };
    let typed = match schema.get("type") {
        Some(Value::String(kind)) => of_type(kind),
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).any(of_type),
        _ => true,
    };
    applied && typed
}
