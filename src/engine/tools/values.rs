//! Values in the notations of LFM2 (Python) and Gemma.

use super::Call;
use serde_json::{Map, Number, Value};
use std::fmt::Write;

/// Deeper values are no arguments.
const DEEPEST: usize = 64;

/// Reads a text from its beginning.
struct Text<'a>(&'a str);

impl<'a> Text<'a> {
    fn space(&mut self) {
        self.0 = self.0.trim_start();
    }

    /// Passes over `text` and the white space around it.
    fn take(&mut self, text: &str) -> Option<()> {
        self.space();
        self.0 = self.0.strip_prefix(text)?;
        self.space();
        Some(())
    }

    fn until(&mut self, mark: &str) -> Option<&'a str> {
        let (before, behind) = self.0.split_once(mark)?;
        self.0 = behind;
        Some(before)
    }

    fn name(&mut self, more: &str) -> Option<&'a str> {
        let end = self.0.find(|c: char| !c.is_alphanumeric() && c != '_' && !more.contains(c)).unwrap_or(self.0.len());
        let (name, rest) = self.0.split_at(end);
        self.0 = rest;
        (!name.is_empty()).then_some(name)
    }

    /// Items up to `close`, with commas between them.
    fn list(&mut self, close: &str, item: &mut dyn FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.space();
        if self.take(close).is_some() {
            return Some(());
        }
        loop {
            item(self)?;
            if self.take(close).is_some() {
                return Some(());
            }
            self.take(",")?;
            if self.take(close).is_some() {
                return Some(());
            }
        }
    }

    fn number(&mut self) -> Option<Value> {
        let end = self.0.find(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c)).unwrap_or(self.0.len());
        let (digits, rest) = self.0.split_at(end);
        let number: Number = serde_json::from_str(digits).ok()?;
        self.0 = rest;
        Some(Value::Number(number))
    }
}

/// `[f(x=1), g()]`, or one call without brackets.
pub(super) fn pythonic_calls(body: &str) -> Option<Vec<Call>> {
    let mut text = Text(body.trim());
    let mut calls = Vec::new();
    let mut call = |text: &mut Text| {
        let name = text.name("-.")?.to_owned();
        text.take("(")?;
        let mut arguments = Map::new();
        text.list(")", &mut |text| {
            let key = text.name("-.")?.to_owned();
            text.take("=")?;
            arguments.insert(key, python_value(text, 0)?).is_none().then_some(())
        })?;
        calls.push(Call { name, arguments });
        Some(())
    };
    match text.take("[") {
        Some(()) => text.list("]", &mut call)?,
        None => call(&mut text)?,
    }
    text.0.is_empty().then_some(calls)
}

fn python_value(text: &mut Text, depth: usize) -> Option<Value> {
    text.space();
    let first = text.0.chars().next().filter(|_| depth < DEEPEST)?;
    match first {
        '"' | '\'' => python_text(text).map(Value::String),
        '[' | '(' => {
            text.0 = &text.0[1..];
            let mut list = Vec::new();
            text.list(if first == '[' { "]" } else { ")" }, &mut |text| {
                list.push(python_value(text, depth + 1)?);
                Some(())
            })?;
            Some(Value::Array(list))
        }
        '{' => {
            text.0 = &text.0[1..];
            let mut map = Map::new();
            text.list("}", &mut |text| {
                text.space();
                let key = python_text(text)?;
                text.take(":")?;
                map.insert(key, python_value(text, depth + 1)?);
                Some(())
            })?;
            Some(Value::Object(map))
        }
        '-' | '0'..='9' => text.number(),
        _ => word(text.name("")?),
    }
}

fn word(word: &str) -> Option<Value> {
    match word {
        "True" | "true" => Some(Value::Bool(true)),
        "False" | "false" => Some(Value::Bool(false)),
        "None" | "null" => Some(Value::Null),
        _ => None,
    }
}

/// A text in quotes, with the escapes of Python and JSON.
fn python_text(text: &mut Text) -> Option<String> {
    let quote = text.0.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let mut chars = text.0[1..].char_indices();
    let mut out = String::new();
    let mut high: Option<u32> = None;
    while let Some((at, c)) = chars.next() {
        if c == quote && high.is_none() {
            text.0 = &text.0[1 + at + 1..];
            return Some(out);
        }
        let unit = match c {
            '\\' => match chars.next()?.1 {
                'n' => u32::from('\n'),
                't' => u32::from('\t'),
                'r' => u32::from('\r'),
                'b' => 8,
                'f' => 12,
                'x' => hex(&mut chars, 2)?,
                'u' => hex(&mut chars, 4)?,
                'U' => hex(&mut chars, 8)?,
                '\n' => continue,
                other => u32::from(other),
            },
            c => u32::from(c),
        };
        match (high.take(), unit) {
            (None, 0xd800..=0xdbff) => high = Some(unit),
            (None, unit) => out.push(char::from_u32(unit)?),
            (Some(high), 0xdc00..=0xdfff) => out.push(char::from_u32(0x10000 + ((high - 0xd800) << 10) + (unit - 0xdc00))?),
            (Some(_), _) => return None,
        }
    }
    None
}

fn hex(chars: &mut std::str::CharIndices, digits: usize) -> Option<u32> {
    (0..digits).try_fold(0u32, |value, _| value.checked_mul(16)?.checked_add(chars.next()?.1.to_digit(16)?))
}

/// `call:f{x:1}`; `quote` encloses text.
pub(super) fn gemma_call(body: &str, quote: &str) -> Option<Call> {
    let mut text = Text(body.trim());
    text.take("call:")?;
    let name = text.name("-.")?.to_owned();
    text.take("{")?;
    let arguments = gemma_fields(&mut text, quote, 0)?;
    text.0.is_empty().then_some(Call { name, arguments })
}

fn gemma_fields(text: &mut Text, quote: &str, depth: usize) -> Option<Map<String, Value>> {
    let mut map = Map::new();
    text.list("}", &mut |text| {
        let key = match text.0.strip_prefix(quote) {
            Some(rest) => {
                text.0 = rest;
                text.until(quote)?
            }
            None => text.until(":").map(str::trim_end).filter(|key| !key.is_empty() && !key.contains(['{', '}', ',']))?,
        };
        if text.0.trim_start().starts_with(':') {
            text.take(":")?;
        }
        map.insert(key.to_owned(), gemma_value(text, quote, depth)?).is_none().then_some(())
    })?;
    Some(map)
}

fn gemma_value(text: &mut Text, quote: &str, depth: usize) -> Option<Value> {
    text.space();
    if let Some(rest) = text.0.strip_prefix(quote) {
        text.0 = rest;
        return Some(Value::String(text.until(quote)?.to_owned()));
    }
    match text.0.chars().next().filter(|_| depth < DEEPEST)? {
        '{' => {
            text.0 = &text.0[1..];
            text.space();
            gemma_fields(text, quote, depth + 1).map(Value::Object)
        }
        '[' => {
            text.0 = &text.0[1..];
            let mut list = Vec::new();
            text.list("]", &mut |text| {
                list.push(gemma_value(text, quote, depth + 1)?);
                Some(())
            })?;
            Some(Value::Array(list))
        }
        '-' | '0'..='9' => text.number(),
        _ => word(text.name("")?),
    }
}

/// `f(x=1, y="text")`.
pub(super) fn write_pythonic(call: &Call) -> String {
    let arguments: Vec<String> = call.arguments.iter().map(|(key, value)| format!("{key}={}", python(value))).collect();
    format!("{}({})", call.name, arguments.join(", "))
}

/// A value as Python has it.
fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => python_quoted(text),
        Value::Array(list) => format!("[{}]", list.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let fields: Vec<String> =
                map.iter().map(|(key, value)| format!("{}: {}", python_quoted(key), python(value))).collect();
            format!("{{{}}}", fields.join(", "))
        }
    }
}

fn python_quoted(text: &str) -> String {
    without_marks(&Value::String(text.to_owned()).to_string())
}

/// A JSON text in which no control token is spelled: where `<` might begin one, it is written `\u003c`. Outside of
/// strings JSON has no `<`.
pub(super) fn without_marks(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut chars = json.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, chars.peek()) {
            ('<', Some(next)) if next.is_alphabetic() || matches!(next, '|' | '/' | '\u{ff5c}') => drop(write!(out, "\\u003c")),
            _ => out.push(c),
        }
    }
    out
}
