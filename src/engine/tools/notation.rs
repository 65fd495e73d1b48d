//! How the families write calls.

use super::{Call, Tool, Tools, values};
use crate::engine::chat::{Message, Role};
use crate::engine::load::Engine;
use crate::engine::python_json::python_json;
use serde_json::{Map, Value};

/// How calls are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notation {
    /// `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`: Hermes, Qwen, Needle.
    Hermes,
    /// The whole answer is `{"name": "f", "parameters": {"x": 1}}`, with `<|python_tag|>` before it or not: Llama 3.
    Llama3,
    /// `<|tool_call_start|>[f(x=1)]<|tool_call_end|>`: LFM2.
    Pythonic,
    /// `<start_function_call>call:f{x:1,y:<escape>text<escape>}<end_function_call>`: FunctionGemma.
    FunctionGemma,
    /// `<|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>`: Gemma 4.
    Gemma4,
}

/// What Llama 3 may write before a call.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

impl Notation {
    /// All that have marks, with the mark that only they have.
    const MARKED: [Notation; 4] = [Notation::Pythonic, Notation::FunctionGemma, Notation::Gemma4, Notation::Hermes];

    /// What stands before and behind a call; nothing where a call is the whole answer.
    pub(super) fn marks(self) -> Option<(&'static str, &'static str)> {
        match self {
            Notation::Hermes => Some(("<tool_call>", "</tool_call>")),
            Notation::Llama3 => None,
            Notation::Pythonic => Some(("<|tool_call_start|>", "<|tool_call_end|>")),
            Notation::FunctionGemma => Some(("<start_function_call>", "<end_function_call>")),
            Notation::Gemma4 => Some(("<|tool_call>", "<tool_call|>")),
        }
    }

    /// What encloses text.
    pub(super) fn quotes(self) -> &'static [&'static str] {
        match self {
            Notation::Hermes | Notation::Llama3 => &["\""],
            Notation::Pythonic => &["\"", "'"],
            Notation::FunctionGemma => &["<escape>"],
            Notation::Gemma4 => &["<|\"|>"],
        }
    }

    /// The mark that encloses text in Gemma's notations.
    pub(super) fn quote(self) -> Option<&'static str> {
        match self {
            Notation::FunctionGemma | Notation::Gemma4 => Some(self.quotes()[0]),
            _ => None,
        }
    }

    /// Where a result would come, the model has nothing more to say.
    pub(in crate::engine) fn stop(self) -> Option<&'static str> {
        match self {
            Notation::FunctionGemma => Some("<start_function_response>"),
            Notation::Gemma4 => Some("<|tool_response>"),
            _ => None,
        }
    }

    /// Marks that the text of an answer has to show where they are tokens.
    pub(in crate::engine) fn shown(self) -> impl Iterator<Item = &'static str> {
        let (open, close) = self.marks().unwrap_or((PYTHON_TAG, PYTHON_TAG));
        [open, close].into_iter().chain(self.quote()).chain(self.stop())
    }

    /// The calls in what stands between the marks (or is the whole answer); `None` if that is anything else.
    pub(super) fn parse(self, body: &str, tools: &Tools) -> Option<Vec<Call>> {
        let calls = match self {
            Notation::Hermes | Notation::Llama3 => json_calls(body)?,
            Notation::Pythonic => values::pythonic_calls(body)?,
            Notation::FunctionGemma | Notation::Gemma4 => vec![values::gemma_call(body, self.quote()?)?],
        };
        let known = |call: &Call| tools.get(&call.name).is_some_and(|tool| !is_echo(call, tool));
        (!calls.is_empty() && calls.iter().all(known)).then_some(calls)
    }

    /// Calls as the model would have written them, for a template that leaves them out.
    fn write(self, calls: &[Call]) -> String {
        let each = |write: &dyn Fn(&Call) -> String, between: &str| calls.iter().map(write).collect::<Vec<_>>().join(between);
        match self {
            Notation::Pythonic => {
                let (open, close) = ("<|tool_call_start|>", "<|tool_call_end|>");
                format!("{open}[{}]{close}", each(&values::write_pythonic, ", "))
            }
            _ => {
                let call = |call: &Call| {
                    let value = serde_json::json!({"name": call.name, "arguments": call.arguments});
                    let text = values::without_marks(&python_json(&value, None, None, false, false));
                    format!("<tool_call>\n{text}\n</tool_call>")
                };
                each(&call, "\n")
            }
        }
    }
}

/// A declaration that is said back is no call.
fn is_echo(call: &Call, tool: &Tool) -> bool {
    let declared = |name: &str| tool.arguments().any(|(known, _, _)| known == name);
    call.arguments.contains_key("properties") && !declared("properties")
}

/// One call, a list of them, or several one after another with `;` or white space between.
fn json_calls(text: &str) -> Option<Vec<Call>> {
    let mut rest = text.trim().strip_prefix(PYTHON_TAG).unwrap_or(text.trim()).trim_start();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next()?.ok()? {
            Value::Array(list) => {
                for value in list {
                    calls.push(json_call(value)?);
                }
            }
            value => calls.push(json_call(value)?),
        }
        rest = rest[values.byte_offset()..].trim_start().trim_start_matches(';').trim_start();
    }
    Some(calls)
}

/// `{"name", "arguments"}`, with nothing beside it that a call does not have.
fn json_call(value: Value) -> Option<Call> {
    let Value::Object(mut fields) = value else { return None };
    if fields.keys().any(|key| !matches!(key.as_str(), "name" | "arguments" | "parameters" | "id" | "type")) {
        return None;
    }
    let Some(Value::String(name)) = fields.shift_remove("name") else { return None };
    let arguments = match (fields.shift_remove("arguments"), fields.shift_remove("parameters")) {
        (Some(arguments), None) | (None, Some(arguments)) => arguments,
        (None, None) => Value::Object(Map::new()),
        (Some(_), Some(_)) => return None,
    };
    let arguments = match arguments {
        // Some write the JSON text of the arguments.
        Value::String(text) => serde_json::from_str(&text).ok()?,
        arguments => arguments,
    };
    match arguments {
        Value::Object(arguments) => Some(Call { name, arguments }),
        _ => None,
    }
}

/// How a model is told of tools, and how it calls them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    pub notation: Notation,
    /// The chat template writes declarations and results.
    pub declares: bool,
    /// The chat template writes the calls of earlier answers.
    pub repeats: bool,
}

impl Dialect {
    pub fn of(engine: &Engine) -> Self {
        let known = |text: &str| engine.tokenizer.token_id(text).is_some();
        Dialect::new(engine.bundle.chat_template.as_deref().unwrap_or_default(), &known)
    }

    /// `known`: whether a text is a token.
    pub(super) fn new(template: &str, known: &dyn Fn(&str) -> bool) -> Self {
        let declares = template.contains("tools");
        let marked = |notation: &Notation| {
            notation.marks().is_some_and(|(open, _)| template.contains(open) || (known(open) && *notation != Notation::Hermes))
        };
        let llama = declares && (template.contains("ipython") || template.contains(PYTHON_TAG));
        let notation = Notation::MARKED.into_iter().find(marked).unwrap_or(match llama {
            true => Notation::Llama3,
            false => Notation::Hermes,
        });
        Dialect { notation, declares, repeats: template.contains("tool_calls") }
    }

    /// The messages as the template is to see them: what it would leave out is put into their text.
    pub fn prepare(&self, messages: &[Message], tools: Option<&Tools>) -> Vec<Message> {
        let mut out = Vec::with_capacity(messages.len() + 1);
        for message in messages {
            let mut message = message.clone();
            if !self.repeats
                && let Some(calls) = message.tool_calls.as_ref().and_then(calls_of)
            {
                let line = if message.content.is_empty() || self.notation == Notation::Pythonic { "" } else { "\n" };
                message.markup = format!("{line}{}", self.notation.write(&calls));
                message.tool_calls = None;
            }
            if !self.declares && message.role == Role::Tool {
                message = Message::new(Role::User, format!("<tool_response>\n{}\n</tool_response>", message.content));
            }
            out.push(message);
        }
        if let Some(tools) = tools.filter(|_| !self.declares) {
            let text = declarations(tools);
            match out.first_mut().filter(|message| message.role == Role::System) {
                Some(system) => system.content = format!("{}\n\n{text}", system.content),
                None => out.insert(0, Message::new(Role::System, text)),
            }
        }
        out
    }
}

/// Calls of a message in the OpenAI form; `None` if they are in another.
fn calls_of(calls: &Value) -> Option<Vec<Call>> {
    let call = |value: &Value| {
        let function = value.get("function").unwrap_or(value);
        json_call(serde_json::json!({"name": function.get("name")?, "arguments": function.get("arguments")?}))
    };
    calls.as_array()?.iter().map(call).collect()
}

/// For models that were never shown tools.
fn declarations(tools: &Tools) -> String {
    let mut text = "You can call these functions, each described by one line of JSON:\n<tools>\n".to_owned();
    for tool in tools.json().as_array().into_iter().flatten() {
        text += &python_json(&tool["function"], None, None, false, false);
        text.push('\n');
    }
    text += "</tools>\nTo call one, write nothing but its name and arguments as JSON between marks:\n<tool_call>\n\
             {\"name\": \"NAME\", \"arguments\": {\"KEY\": \"VALUE\"}}\n</tool_call>\n\
             If none of them helps, answer in words.";
    text
}

#[cfg(test)]
#[path = "notation_tests.rs"]
pub(super) mod tests;
