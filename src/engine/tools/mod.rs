//! Tools: functions that a caller offers, and the calls of them that a model writes.
//!
//! Every family has a notation for calls of its own, see [`Notation`]. Its chat template declares the tools; for a model
//! whose template knows none, [`Dialect::prepare`] does. Calls are read from the answer while it streams ([`reader`]), and
//! the form of a call is held to by a grammar ([`form`]), so that names and arguments are as they were declared.

mod form;
mod notation;
mod reader;
mod select;
mod values;

use super::chat::Message;
use super::fields::FieldError;
use crate::error::{Error, Result};
pub use notation::{Dialect, Notation};
pub(super) use reader::{Event, Reader};
pub(super) use select::Vectors;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Tools at most.
const MOST: usize = 512;

/// A function that can be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: String,
    /// JSON schema of the arguments, an object.
    pub parameters: Value,
    /// What of the schema cannot be promised is an error even where calls are optional.
    pub strict: bool,
}

/// A call that a model wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Call {
    pub name: String,
    pub arguments: Map<String, Value>,
}

impl Call {
    /// The call in a message of the assistant; `id` where there is one.
    pub fn message(&self, id: Option<&str>) -> Value {
        let mut call = json!({
            "type": "function",
            "function": {"name": self.name, "arguments": Value::Object(self.arguments.clone()).to_string()},
        });
        if let Some(id) = id {
            call["id"] = id.into();
        }
        call
    }
}

/// Whether a model may call, must, or must not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    #[default]
    Auto,
    None,
    /// At least one call.
    Required,
    /// One call of this tool.
    Named(String),
}

impl Choice {
    /// `auto`, `none`, `required`, or the name of a tool.
    pub fn named(text: &str) -> Self {
        match text {
            "auto" => Choice::Auto,
            "none" => Choice::None,
            "required" | "any" => Choice::Required,
            name => Choice::Named(name.to_owned()),
        }
    }

    /// As the OpenAI API has it: a word, or `{"type": "function", "function": {"name"}}` (the name may stand outside).
    ///
    /// # Errors
    /// What is neither.
    pub fn parse(value: &Value) -> Result<Self, FieldError> {
        let wrong = || FieldError::new("tool_choice", "tool_choice must be \"auto\", \"none\", \"required\" or name a function");
        match value {
            Value::String(word) if matches!(word.as_str(), "auto" | "none" | "required" | "any") => Ok(Choice::named(word)),
            Value::Object(_) => {
                let name = value.pointer("/function/name").or_else(|| value.get("name")).and_then(Value::as_str);
                Ok(Choice::Named(name.ok_or_else(wrong)?.to_owned()))
            }
            _ => Err(wrong()),
        }
    }
}

/// What can be called in an answer.
#[derive(Clone, Debug)]
pub struct Tools {
    list: Arc<Vec<Tool>>,
    /// Calls that an answer must have.
    forced: bool,
    /// An answer may have several calls.
    parallel: bool,
}

impl Tools {
    /// Reads `[{"type": "function", "function": {"name", "description", "parameters"}}]`; the outer object may be left out.
    /// `None` where nothing can be called.
    ///
    /// # Errors
    /// Names what is wrong: no list, a tool of another type, a name that is missing, taken or impossible, parameters that
    /// are no schema of an object, a choice of a tool that is not there.
    pub fn parse(tools: &Value, choice: &Choice, parallel: bool) -> Result<Option<Self>, FieldError> {
        let wrong = |what: String| FieldError::new("tools", what);
        let list = match tools {
            Value::Null => &[][..],
            Value::Array(list) => list,
            _ => return Err(wrong("tools must be a list".to_owned())),
        };
        if list.len() > MOST {
            return Err(wrong(format!("tools has {} entries, {MOST} is the most", list.len())));
        }
        let mut tools: Vec<Tool> = Vec::new();
        for (i, value) in list.iter().enumerate() {
            let tool =
                Tool::parse(value).map_err(|what| FieldError::new(format!("tools[{i}]"), format!("tools[{i}]: {what}")))?;
            if tools.iter().any(|other| other.name == tool.name) {
                return Err(wrong(format!("tools[{i}]: there are two tools {:?}", tool.name)));
            }
            tools.push(tool);
        }
        let forced = match choice {
            Choice::None => return Ok(None),
            Choice::Auto if tools.is_empty() => return Ok(None),
            Choice::Auto => false,
            Choice::Required if tools.is_empty() => {
                return Err(FieldError::new("tool_choice", "tool_choice asks for a call, but there are no tools"));
            }
            Choice::Required => true,
            Choice::Named(name) => {
                tools.retain(|tool| tool.name == *name);
                if tools.is_empty() {
                    return Err(FieldError::new(
                        "tool_choice",
                        format!("tool_choice names {name:?}, which is not among the tools"),
                    ));
                }
                true
            }
        };
        let parallel = parallel && !matches!(choice, Choice::Named(_));
        Ok(Some(Tools { list: Arc::new(tools), forced, parallel }))
    }

    pub fn list(&self) -> &[Tool] {
        &self.list
    }

    /// Whether the answer must have a call.
    pub fn forced(&self) -> bool {
        self.forced
    }

    /// The same, but no call must come.
    #[must_use]
    pub fn optional(self) -> Self {
        Tools { forced: false, ..self }
    }

    /// The list as templates and clients know it.
    pub fn json(&self) -> Value {
        let tool = |tool: &Tool| {
            let Tool { name, description, parameters, .. } = tool;
            json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}})
        };
        self.list.iter().map(tool).collect()
    }

    fn get(&self, name: &str) -> Option<&Tool> {
        self.list.iter().find(|tool| tool.name == name)
    }
}

impl Tool {
    fn parse(value: &Value) -> Result<Self, String> {
        let fields = value.as_object().ok_or("a tool is an object")?;
        let kind = fields.get("type").and_then(Value::as_str).unwrap_or("function");
        if kind != "function" && kind != "object" {
            return Err(format!("tools of type {kind:?} are not supported (supported: \"function\")"));
        }
        let fields = match fields.get("function") {
            Some(Value::Object(function)) => function,
            Some(_) => return Err("its function is no object".to_owned()),
            None => fields,
        };
        let name = fields.get("name").and_then(Value::as_str).ok_or("it has no name")?;
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > 128 || !name.chars().all(allowed) {
            return Err(format!("the name {name:?} is not made of up to 128 letters, digits, '_', '-' and '.'"));
        }
        let parameters = match fields.get("parameters") {
            None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
            Some(schema @ Value::Object(_)) if schema.get("type").is_none_or(|kind| kind == "object") => schema.clone(),
            Some(_) => return Err(format!("the parameters of {name:?} are no JSON schema of an object")),
        };
        Ok(Tool {
            name: name.to_owned(),
            description: fields.get("description").and_then(Value::as_str).unwrap_or_default().to_owned(),
            parameters,
            strict: fields.get("strict").and_then(Value::as_bool).unwrap_or(false),
        })
    }

    /// Names of the arguments, and whether each must be there.
    fn arguments(&self) -> impl Iterator<Item = (&str, &Value, bool)> {
        properties(&self.parameters)
    }
}

/// Names and schemas of an object's properties, and whether each must be there.
fn properties(schema: &Value) -> impl Iterator<Item = (&str, &Value, bool)> {
    let required = schema.get("required").and_then(Value::as_array);
    let must = move |name: &str| required.is_some_and(|list| list.iter().any(|value| value == name));
    let properties = schema.get("properties").and_then(Value::as_object);
    properties.into_iter().flatten().map(move |(name, schema)| (name.as_str(), schema, must(name)))
}

/// Reads tools from a file's text.
///
/// # Errors
/// `Usage` for what is no list of tools.
pub fn read(text: &str, choice: &Choice) -> Result<Option<Tools>> {
    let value =
        serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(|e| Error::usage(format!("tools: no JSON: {e}")))?;
    Tools::parse(&value, choice, true).map_err(FieldError::into_error)
}

/// Messages that say what was called and what came of it: the assistant's with its calls, and one for each result.
pub fn turn(text: &str, calls: &[Call], results: Vec<String>) -> Vec<Message> {
    let ids: Vec<String> = (0..calls.len()).map(|i| format!("call_{i}")).collect();
    let list = calls.iter().zip(&ids).map(|(call, id)| call.message(Some(id))).collect();
    let assistant = Message { tool_calls: Some(list), ..Message::new(super::chat::Role::Assistant, text) };
    let result = |((call, id), text): ((&Call, &String), String)| Message {
        name: Some(call.name.clone()),
        tool_call_id: Some(id.clone()),
        ..Message::new(super::chat::Role::Tool, text)
    };
    std::iter::once(assistant).chain(calls.iter().zip(&ids).zip(results).map(result)).collect()
}
