//! JSON schemas, looked through before anything is generated: what cannot be promised is refused with its place.
//!
//! The grammar library skips keywords that it does not know, reads options of its own out of a schema, and names no
//! place in its errors. So a schema is not handed to it as it came but written anew, with the keywords of
//! [draft 2020-12](https://json-schema.org/draft/2020-12) that are known to be held to, and nothing else.

use super::pattern::{self, FORMATS, Format};
use super::recursion::endless;
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// White space between the parts of a JSON text: one space, or a new line with its indentation.
const WHITE_SPACE: &str = r" |\n {0,32}|\n\t{1,8}";
/// Nesting of a schema.
const DEEPEST: usize = 64;
/// Schemas within a schema.
const MOST: usize = 20_000;
/// Whole numbers below are exact as 64-bit floats, and no others look like them.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Say nothing about which values are valid.
const ANNOTATIONS: [&str; 22] = [
    "$schema",
    "$id",
    "id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentMediaType",
    "contentEncoding",
    "contentSchema",
    "discriminator",
    "externalDocs",
    "markdownDescription",
    "propertyOrdering",
];

/// A schema that can be held to.
#[derive(Debug)]
pub(super) struct Checked {
    /// For the grammar library, its options included.
    pub schema: Value,
    /// Parts that may turn out to be impossible, inner ones first; none unless they were asked for.
    pub parts: Vec<Part>,
}

/// A keyword on its own, to find out which one a refusal is about.
#[derive(Debug)]
pub(super) struct Part {
    /// JSON pointer of the keyword.
    pub place: String,
    /// A schema with that keyword.
    pub schema: Value,
    /// What it takes, where the library's own words do not help.
    pub wants: Option<&'static str>,
}

/// `explain`: with parts.
///
/// # Errors
/// `Usage` with the keyword and its JSON pointer.
pub(super) fn check(schema: &Value, explain: bool) -> Result<Checked> {
    let mut walk = Walk {
        root: schema,
        names: HashMap::new(),
        waiting: Vec::new(),
        open: Vec::new(),
        parts: explain.then(Vec::new),
        count: 0,
    };
    let mut out = match walk.schema("", schema, 0)? {
        Value::Object(fields) => fields,
        Value::Bool(true) => Map::new(),
        _ => return Err(Error::usage("the schema `false` allows no value")),
    };
    let mut definitions = Map::new();
    while let Some((name, pointer)) = walk.waiting.pop() {
        let target = schema.pointer(&pointer).unwrap_or(&Value::Null);
        definitions.insert(name, walk.schema(&pointer, target, 0)?);
    }
    if let Some(name) = endless(&out, &definitions) {
        let place = walk.names.iter().find(|(_, ours)| **ours == name).map_or("its root", |(pointer, _)| pointer.as_str());
        return Err(Error::usage(format!("schema: what stands at {place} contains itself, so that a value would have no end")));
    }
    if !definitions.is_empty() {
        for part in walk.parts.iter_mut().flatten() {
            part.schema["$defs"] = Value::Object(definitions.clone());
        }
        out.insert("$defs".into(), Value::Object(definitions));
    }
    Ok(Checked { schema: with_options(out), parts: walk.parts.unwrap_or_default() })
}

/// A checked schema with what the library is to do about white space and escapes. Names and texts have one spelling
/// only (no `\u0061` for `a`), or a name that is taken could come again in another one.
pub(super) fn with_options(mut schema: Map<String, Value>) -> Value {
    schema.insert("x-guidance".into(), json!({"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": "nrbtf\\\""}));
    Value::Object(schema)
}

struct Walk<'a> {
    root: &'a Value,
    /// Our names of what is referred to, by JSON pointer.
    names: HashMap<String, String>,
    /// Names and pointers that were not looked at yet.
    waiting: Vec<(String, String)>,
    /// What is being written in place of a reference to it.
    open: Vec<String>,
    parts: Option<Vec<Part>>,
    count: usize,
}

/// `keyword` at `place` is refused because of `why`.
fn refuse(place: &str, keyword: &str, why: &str) -> Error {
    Error::usage(format!("schema: `{keyword}` at {} {why}", below(place, keyword)))
}

/// The JSON pointer of `name` in what `place` points to.
fn below(place: &str, name: &str) -> String {
    format!("{place}/{}", name.replace('~', "~0").replace('/', "~1"))
}

impl Walk<'_> {
    fn schema(&mut self, place: &str, schema: &Value, depth: usize) -> Result<Value> {
        let shown = if place.is_empty() { "its root" } else { place };
        self.count += 1;
        if depth > DEEPEST || self.count > MOST {
            return Err(Error::usage(format!("schema: too large or too deep at {shown}")));
        }
        let fields = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(fields) => fields,
            _ => return Err(Error::usage(format!("schema: what stands at {shown} is neither an object nor true or false"))),
        };
        let (mut plain, mut applied) = (Map::new(), Map::new());
        for (keyword, value) in fields {
            let wrong = |form: &str| refuse(place, keyword, &format!("must be {form}"));
            let at = below(place, keyword);
            match keyword.as_str() {
                "$schema" => dialect(value).ok_or_else(|| refuse(place, keyword, "names an unknown dialect of JSON schema"))?,
                "$id" | "id" if !place.is_empty() => return Err(refuse(place, keyword, "below the root is not supported")),
                name if ANNOTATIONS.contains(&name) || name.starts_with("x-") => {}
                "type" => {
                    let one = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
                    if !one(value) && !value.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(one)) {
                        return Err(wrong(&format!("one or more of {}", TYPES.join(", "))));
                    }
                    plain.insert(keyword.clone(), value.clone());
                }
                "const" => {
                    literal(value).map_err(|why| refuse(place, keyword, &why))?;
                    applied.insert(keyword.clone(), value.clone());
                    self.part(&at, None, || json!({"const": value}));
                }
                "enum" => {
                    let list = value.as_array().filter(|list| !list.is_empty()).ok_or_else(|| wrong("a list of values"))?;
                    list.iter().try_for_each(literal).map_err(|why| refuse(place, keyword, &why))?;
                    applied.insert(keyword.clone(), value.clone());
                    self.part(&at, None, || json!({"enum": value}));
                }
                "allOf" | "anyOf" | "oneOf" => {
                    let list = value.as_array().filter(|list| !list.is_empty()).ok_or_else(|| wrong("a list of schemas"))?;
                    let only = keyword == "oneOf";
                    let branches =
                        list.iter().enumerate().map(|(i, branch)| self.branch(&format!("{at}/{i}"), branch, only, depth));
                    let branches = branches.collect::<Result<Vec<Value>>>()?;
                    let wants = only.then_some(
                        "can only be promised where its branches exclude each other by type or by constant texts of a \
                         property that is required; `anyOf` may do",
                    );
                    self.part(&at, wants, || json!({ keyword.as_str(): branches }));
                    if keyword == "allOf" {
                        branches.into_iter().for_each(|branch| conjoin(&mut applied, branch));
                    } else {
                        applied.insert(keyword.clone(), branches.into());
                    }
                }
                "$ref" => {
                    let pointer = self.target(place, value)?;
                    applied.insert(keyword.clone(), self.reference(pointer).into());
                }
                "items" if value.is_array() => {
                    if fields.contains_key("prefixItems") {
                        return Err(refuse(place, keyword, "cannot be a list beside `prefixItems`"));
                    }
                    plain.insert("prefixItems".into(), self.list(&at, value, depth)?.ok_or_else(|| wrong("schemas"))?);
                }
                "additionalItems" => {
                    if fields.get("items").is_some_and(Value::is_array) {
                        plain.insert("items".into(), self.schema(&at, value, depth + 1)?);
                    }
                }
                "prefixItems" => {
                    let list = self.list(&at, value, depth)?.ok_or_else(|| wrong("a list of schemas"))?;
                    plain.insert(keyword.clone(), list);
                }
                "items" | "additionalProperties" => {
                    plain.insert(keyword.clone(), self.schema(&at, value, depth + 1)?);
                }
                "properties" | "patternProperties" => {
                    let patterns = keyword == "patternProperties";
                    let map = value.as_object().ok_or_else(|| wrong("an object of schemas"))?;
                    let mut out = Map::new();
                    for (name, schema) in map {
                        let name_at = below(&at, name);
                        let written = if patterns {
                            pattern::rewritten(name).map_err(|why| inexpressible(&name_at, name, &why))?
                        } else {
                            text(name).map_err(|why| refuse(&at, name, &why))?;
                            name.clone()
                        };
                        if patterns {
                            self.part(&name_at, None, || json!({"type": "string", "pattern": written}));
                        }
                        out.insert(written, self.schema(&name_at, schema, depth + 1)?);
                    }
                    if patterns {
                        self.part(&at, None, || json!({"type": "object", "patternProperties": out}));
                    }
                    plain.insert(keyword.clone(), out.into());
                }
                "required" => {
                    let names = value.as_array().ok_or_else(|| wrong("a list of names"))?;
                    for name in names {
                        let name = name.as_str().ok_or_else(|| wrong("a list of names"))?;
                        text(name).map_err(|why| refuse(place, keyword, &why))?;
                    }
                    plain.insert(keyword.clone(), value.clone());
                }
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                    let whole = value.as_f64().filter(|n| (0.0..4e9).contains(n) && n.fract() == 0.0);
                    let whole = whole.ok_or_else(|| wrong("a whole number from 0 to 4e9"))? as u64;
                    if keyword == "minProperties" {
                        let required = fields.get("required").and_then(Value::as_array).map_or(0, |names| distinct(names));
                        // A name may come twice, so only one that is not required can be counted on.
                        if whole as usize > required + 1 {
                            return Err(refuse(place, keyword, "may be at most one more than the properties that are required"));
                        }
                    }
                    plain.insert(keyword.clone(), whole.into());
                }
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                    number(value).ok_or_else(|| wrong("a number that 64-bit floats hold exactly"))?;
                    if keyword == "multipleOf" && value.as_f64().is_none_or(|n| n <= 0.0) {
                        return Err(wrong("more than 0"));
                    }
                    plain.insert(keyword.clone(), value.clone());
                    self.part(&at, None, || json!({"type": "number", keyword.as_str(): value}));
                }
                "pattern" => {
                    let pattern = value.as_str().ok_or_else(|| wrong("a regular expression"))?;
                    let pattern = pattern::rewritten(pattern).map_err(|why| inexpressible(&at, keyword, &why))?;
                    self.part(&at, None, || json!({"type": "string", "pattern": pattern}));
                    plain.insert(keyword.clone(), pattern.into());
                }
                "format" => {
                    let name = value.as_str().ok_or_else(|| wrong("a name"))?;
                    let known = || refuse(place, keyword, &format!("is {name:?}; supported: {}", FORMATS.join(", ")));
                    match pattern::format(name).ok_or_else(known)? {
                        Format::Known => drop(plain.insert(keyword.clone(), value.clone())),
                        Format::Pattern(pattern) => {
                            // The schema may have a pattern of its own.
                            conjoin(&mut applied, json!({ "pattern": pattern }));
                        }
                    }
                }
                "uniqueItems" if value == &Value::Bool(false) => {}
                _ => return Err(refuse(place, keyword, "is not supported").with_hint(SUPPORTED)),
            }
        }
        if plain.contains_key("minProperties") || plain.contains_key("maxProperties") {
            let keyword = if plain.contains_key("minProperties") { "minProperties" } else { "maxProperties" };
            let wants =
                "can only be promised where all named properties are required, or no others are allowed and the limit is 1";
            self.part(&below(place, keyword), Some(wants), || Value::Object(plain.clone()));
        }
        self.part(place, None, || Value::Object(plain.clone()));
        // The library reads keywords in their order; what combines schemas comes last.
        for (keyword, value) in applied {
            plain.insert(keyword, value);
        }
        Ok(Value::Object(plain))
    }

    fn part(&mut self, place: &str, wants: Option<&'static str>, schema: impl FnOnce() -> Value) {
        if let Some(parts) = &mut self.parts {
            parts.push(Part { place: place.to_owned(), schema: schema(), wants });
        }
    }

    fn list(&mut self, place: &str, value: &Value, depth: usize) -> Result<Option<Value>> {
        let Some(list) = value.as_array() else { return Ok(None) };
        let schemas = list.iter().enumerate().map(|(i, schema)| self.schema(&format!("{place}/{i}"), schema, depth + 1));
        schemas.collect::<Result<Vec<Value>>>().map(|list| Some(list.into()))
    }

    /// A branch of `allOf`, `anyOf` or `oneOf`. In `oneOf`, what a branch refers to is written in its place, so that
    /// branches can be told apart.
    fn branch(&mut self, place: &str, branch: &Value, one_of: bool, depth: usize) -> Result<Value> {
        let only_refers = |fields: &Map<String, Value>| {
            fields.contains_key("$ref") && fields.keys().all(|name| name == "$ref" || ANNOTATIONS.contains(&name.as_str()))
        };
        let refers = branch.as_object().filter(|fields| one_of && only_refers(fields)).and_then(|fields| fields.get("$ref"));
        let Some(reference) = refers else { return self.schema(place, branch, depth + 1) };
        let pointer = self.target(place, reference)?;
        if self.open.contains(&pointer) {
            return self.schema(place, branch, depth + 1);
        }
        let target = self.root.pointer(&pointer).unwrap_or(&Value::Null).clone();
        self.open.push(pointer.clone());
        let written = self.schema(&pointer, &target, depth + 1);
        self.open.pop();
        written
    }

    /// The JSON pointer that a reference means.
    fn target(&self, place: &str, reference: &Value) -> Result<String> {
        let text = reference.as_str().ok_or_else(|| refuse(place, "$ref", "must be a text"))?;
        let refuse = |why: &str| refuse(place, "$ref", &format!("is {text:?}; {why}"));
        let fragment =
            text.strip_prefix('#').ok_or_else(|| refuse("only parts of the same schema (#/...) can be referred to"))?;
        let pointer = percent_decoded(fragment).ok_or_else(|| refuse("that is no JSON pointer"))?;
        if !pointer.is_empty() && !pointer.starts_with('/') {
            return Err(refuse("anchors are not supported, only JSON pointers (#/...)"));
        }
        match self.root.pointer(&pointer) {
            Some(_) => Ok(pointer),
            None => Err(refuse("there is nothing")),
        }
    }

    /// A reference by a name of ours.
    fn reference(&mut self, pointer: String) -> String {
        if pointer.is_empty() {
            return "#".into();
        }
        let next = format!("r{}", self.names.len());
        let name = self.names.entry(pointer.clone()).or_insert_with(|| {
            self.waiting.push((next.clone(), pointer));
            next
        });
        format!("#/$defs/{name}")
    }
}

const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

const SUPPORTED: &str = "docs/structured-output.md lists what is";

fn inexpressible(place: &str, keyword: &str, why: &str) -> Error {
    Error::usage(format!("schema: the pattern `{keyword}` at {place} cannot be expressed: it has {why}"))
}

/// Adds a schema that must hold too.
fn conjoin(applied: &mut Map<String, Value>, schema: Value) {
    if let Value::Array(list) = applied.entry("allOf").or_insert_with(|| Value::Array(Vec::new())) {
        list.push(schema);
    }
}

fn distinct(names: &[Value]) -> usize {
    names.iter().enumerate().filter(|(i, name)| !names[..*i].contains(name)).count()
}

/// Whether a dialect is one whose keywords are known.
fn dialect(value: &Value) -> Option<()> {
    let name = value.as_str()?.trim_end_matches('#');
    let name = name.strip_prefix("https://").or_else(|| name.strip_prefix("http://"))?.strip_prefix("json-schema.org/")?;
    ["draft/2020-12/schema", "draft/2019-09/schema", "draft-07/schema", "draft-06/schema", "draft-04/schema"]
        .contains(&name)
        .then_some(())
}

/// A number that survives as a 64-bit float, and whose digits do not run away.
fn number(value: &Value) -> Option<f64> {
    let number = value.as_f64().filter(|n| n.abs() < 1e200)?;
    (value.is_f64() || number.abs() < EXACT).then_some(number)
}

/// Whether a text can be written with the escapes that are allowed.
fn text(text: &str) -> Result<(), String> {
    match text.chars().find(|c| matches!(c, '\u{0}'..='\u{7}' | '\u{b}' | '\u{e}'..='\u{1f}' | '\u{7f}')) {
        Some(c) => Err(format!("has the control character U+{:04X}, which is not supported", u32::from(c))),
        None => Ok(()),
    }
}

/// Whether a value can be asked for to the letter.
fn literal(value: &Value) -> Result<(), String> {
    match value {
        Value::Number(_) => {
            number(value).map(|_| ()).ok_or_else(|| format!("has {value}, which 64-bit floats do not hold exactly"))
        }
        Value::String(string) => text(string),
        Value::Array(list) => list.iter().try_for_each(literal),
        Value::Object(fields) => fields.iter().try_for_each(|(name, value)| text(name).and_then(|()| literal(value))),
        Value::Null | Value::Bool(_) => Ok(()),
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&first, after)) = rest.split_first() {
        if first == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(first);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}
