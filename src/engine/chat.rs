//! Messages to prompt text, by the model's own chat template (Jinja, as `transformers` runs it).
//!
//! What a template refuses is tried again in a simpler form: see [`ChatTemplate::render`]. Text that
//! came from outside is guarded: control-token spellings in it are cut by an invisible mark, which
//! [`Tokenizer::encode_prompt`](super::tokenizer::Tokenizer::encode_prompt) turns into plain text.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::python_json::python_json;
use super::tokenizer::{ControlTokens, Tokenizer};
use crate::error::{Error, Kind, Result};

/// Who speaks. `developer` is read as system, `function` as tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    #[serde(alias = "developer")]
    System,
    User,
    Assistant,
    #[serde(alias = "function")]
    Tool,
}

/// One turn, in and out of JSON in the OpenAI form: content may be null or absent (read as ""), or a list
/// of text parts (joined by line feeds); unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "WireMessage")]
pub struct Message {
    pub role: Role,
    pub content: String,
    /// `[{"id", "type": "function", "function": {"name", "arguments"}}]`; arguments as an object or as JSON text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Text of our own making that is put after the content and may hold control tokens (families whose
    /// template expects tool calls within the content).
    #[serde(skip)]
    pub markup: String,
}

impl Message {
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Message { role, content: content.into(), tool_calls: None, name: None, tool_call_id: None, markup: String::new() }
    }
}

/// What the user said last.
pub fn last_question(messages: &[Message]) -> &str {
    messages.iter().rfind(|message| message.role == Role::User).map_or("", |message| &message.content)
}

#[derive(Deserialize)]
struct WireMessage {
    role: Role,
    #[serde(default)]
    content: Value,
    tool_calls: Option<Value>,
    name: Option<String>,
    tool_call_id: Option<String>,
}

impl TryFrom<WireMessage> for Message {
    type Error = String;
    fn try_from(wire: WireMessage) -> Result<Self, String> {
        let tool_calls = wire.tool_calls.filter(|calls| calls.as_array().is_none_or(|list| !list.is_empty()));
        let content = joined_content(&wire.content)?;
        let WireMessage { role, name, tool_call_id, .. } = wire;
        Ok(Message { role, content, tool_calls, name, tool_call_id, markup: String::new() })
    }
}

fn joined_content(content: &Value) -> Result<String, String> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let text = |part: &Value| match (part.get("type").and_then(Value::as_str), part) {
                (_, Value::String(text)) => Ok(text.clone()),
                (Some("text"), _) => match part.get("text").and_then(Value::as_str) {
                    Some(text) => Ok(text.to_string()),
                    None => Err("content part of type \"text\" has no text".to_string()),
                },
                (Some(other), _) => Err(format!("unknown content part type {other:?} (supported: \"text\")")),
                (None, _) => Err("content part has no type (supported: \"text\")".to_string()),
            };
            Ok(parts.iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err("content must be a string, null or a list of parts".to_string()),
    }
}

/// What a rendering depends on beside the messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct RenderOptions<'a> {
    /// Ends the prompt where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// `[{"type": "function", "function": {"name", "description", "parameters"}}]`; an empty list is none.
    pub tools: Option<&'a Value>,
    /// For templates that know it; `None` leaves the choice to the template.
    pub enable_thinking: Option<bool>,
    /// The date and time that templates see; the machine's local time if `None`.
    pub now: Option<jiff::civil::DateTime>,
}

/// A prompt, with marks where control-token spellings from outside were cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    marked: String,
    mark: Option<char>,
}

impl Rendered {
    /// Text that is taken as it is, control tokens included (completion without a chat).
    pub fn raw(text: impl Into<String>) -> Self {
        Rendered { marked: text.into(), mark: None }
    }

    /// The prompt as people should see it.
    pub fn text(&self) -> Cow<'_, str> {
        match self.mark {
            Some(mark) => Cow::Owned(self.marked.replace(mark, "")),
            None => Cow::Borrowed(&self.marked),
        }
    }

    /// The prompt up to where `stand_in` stands, without spaces right before it, which belong to the word that
    /// would come; `None` if it is not there.
    pub(super) fn before(&self, stand_in: char) -> Option<Rendered> {
        let (before, _) = self.marked.split_once(stand_in)?;
        Some(rendered(before.trim_end_matches(' ').to_owned(), self.mark.unwrap_or(stand_in)))
    }

    pub(super) fn marked_text(&self) -> &str {
        &self.marked
    }
    /// The mark, if there is one in the text.
    pub(super) fn mark(&self) -> Option<char> {
        self.mark
    }

    /// Whether the prompt ends inside a block that `open` ("<think>") began, so that the answer will
    /// start with reasoning and show only the closing tag.
    pub fn ends_inside(&self, open: &str) -> bool {
        self.marked.trim_end().ends_with(open)
    }
}

/// A compiled chat template, or none at all.
pub struct ChatTemplate {
    environment: Option<Environment<'static>>,
    bos: String,
    eos: String,
    control: Arc<ControlTokens>,
}

/// The name under which the template is compiled; without a file ending, so that nothing is escaped.
const NAME: &str = "chat";

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are the spellings of those tokens, which many templates write.
    /// Nothing is guarded until [`ChatTemplate::guarding`] says what control tokens are.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        let mut environment = environment().map_err(|e| template_error(&e))?;
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(|e| template_error(&e))?;
        Ok(ChatTemplate { environment: Some(environment), ..Self::none().with_tokens(bos, eos) })
    }

    /// For a model without a template: the prompt is the messages' text and nothing else, joined by line
    /// feeds if there are several.
    pub fn none() -> Self {
        ChatTemplate { environment: None, bos: String::new(), eos: String::new(), control: Arc::default() }
    }

    /// The template `source` (if any) with the names and control tokens of `tokenizer`.
    pub fn for_tokenizer(source: Option<&str>, tokenizer: &Tokenizer) -> Result<Self> {
        let template = match source {
            Some(source) => Self::new(source, tokenizer.bos_text(), tokenizer.eos_text())?,
            None => Self::none(),
        };
        Ok(template.guarding(tokenizer.control_tokens()))
    }

    /// Guards everything that comes from outside against these spellings.
    pub fn guarding(mut self, control: Arc<ControlTokens>) -> Self {
        self.control = control;
        self
    }

    fn with_tokens(mut self, bos: Option<&str>, eos: Option<&str>) -> Self {
        self.bos = bos.unwrap_or_default().to_string();
        self.eos = eos.unwrap_or_default().to_string();
        self
    }

    /// Whether the model has a template, that is, was made for chats.
    pub fn has_template(&self) -> bool {
        self.environment.is_some()
    }

    /// Renders a conversation.
    ///
    /// If the template itself refuses it (`raise_exception`) or leaves out the tool results, neighbours of the same role are merged and
    /// system turns after the first message become part of the next user turn; if it refuses that too, the
    /// first system turn is folded likewise, tool calls become text and tool results user turns. If nothing
    /// helps, the error carries the template's own words about the conversation as it was.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        let mark = unused_mark(messages, options.tools);
        let guard = |text: &str| self.control.cut(text, mark);
        let Some(environment) = &self.environment else {
            let text = messages.iter().map(|m| guard(&m.content) + &m.markup).collect::<Vec<_>>().join("\n");
            return Ok(rendered(text, mark));
        };
        let template = environment.get_template(NAME).map_err(|e| template_error(&e))?;
        let tools = options.tools.filter(|tools| tools.as_array().is_none_or(|list| !list.is_empty()));
        let tools = tools.map(|tools| map_strings(tools, &guard));
        let now = options.now.unwrap_or_else(|| jiff::Zoned::now().datetime());
        let attempt = |messages: &[Message]| {
            let messages: Vec<Value> = messages.iter().map(|message| template_message(message, &guard)).collect();
            let date = jiff::fmt::strtime::format("%d %b %Y", now).unwrap_or_default();
            let mut values = context! {
                messages => Serde(&messages),
                tools => tools.as_ref().map(Serde),
                documents => minijinja::Value::from(()),
                add_generation_prompt => options.add_generation_prompt,
                bos_token => self.bos.as_str(),
                eos_token => self.eos.as_str(),
                date_string => date,
                strftime_now => minijinja::Value::from_function(move |format: &str| {
                    jiff::fmt::strtime::format(format, now)
                        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
                }),
            };
            if let Some(thinking) = options.enable_thinking {
                // The variable has two names among the families.
                values = context! { enable_thinking => thinking, thinking, ..values };
            }
            template.render(values).map(|text| rendered(text, mark))
        };

        // Older templates skip turns of roles that they do not know; a result must not get lost.
        let attempt = |messages: &[Message]| {
            let text = attempt(messages)?;
            let mut others = messages.to_vec();
            others.iter_mut().filter(|m| m.role == Role::Tool).for_each(|m| m.content.push('.'));
            if others != messages && attempt(&others).is_ok_and(|other| other == text) {
                let words = "it leaves out tool results";
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, words).with_source(Raised(words.into())));
            }
            Ok(text)
        };
        let refused = match attempt(messages) {
            Ok(text) => return Ok(text),
            Err(e) => match raised(&e) {
                Some(words) => words,
                None => return Err(template_error(&e)),
            },
        };
        for plain in [false, true] {
            let simpler = simplify(messages, plain);
            if let Some(text) = (simpler != messages).then(|| attempt(&simpler).ok()).flatten() {
                return Ok(text);
            }
        }
        Err(Error::usage(format!("the chat template refuses these messages: {}", one_line(&refused))))
    }
}

fn rendered(marked: String, mark: char) -> Rendered {
    let mark = marked.contains(mark).then_some(mark);
    Rendered { marked, mark }
}

/// Merges neighbours of one role, and folds system turns into the user turn that follows; one that no
/// user turn follows becomes a user turn. Only if `plain` is that done to the first message too, and are
/// tool calls and results made plain turns.
fn simplify(messages: &[Message], plain: bool) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    let mut waiting = String::new();
    for message in messages {
        let leading = out.iter().all(|m| m.role == Role::System) && !plain;
        if message.role == Role::System && !leading {
            append(&mut waiting, &message.content);
            continue;
        }
        let mut message = message.clone();
        if plain && message.role == Role::Tool {
            message = Message::new(Role::User, message.content);
        }
        if plain && let Some(calls) = message.tool_calls.take() {
            for call in objects_for_arguments(&calls).as_array().into_iter().flatten() {
                let call = call.get("function").unwrap_or(call);
                append(&mut message.content, &python_json(call, None, None, false, false));
            }
        }
        if message.role == Role::User && !waiting.is_empty() {
            let mut text = std::mem::take(&mut waiting);
            append(&mut text, &message.content);
            message.content = text;
        }
        push_merged(&mut out, message);
    }
    if !waiting.is_empty() {
        push_merged(&mut out, Message::new(Role::User, waiting));
    }
    out
}

fn push_merged(out: &mut Vec<Message>, message: Message) {
    match out.last_mut() {
        Some(last)
            if last.role == message.role
                && message.role != Role::Tool
                && last.tool_calls.is_none()
                && message.tool_calls.is_none()
                && last.markup.is_empty() =>
        {
            append(&mut last.content, &message.content);
            last.markup = message.markup;
        }
        _ => out.push(message),
    }
}

/// Adds a paragraph.
fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(more);
}

/// The object that a template sees: text guarded, absent things absent, arguments as an object.
fn template_message(message: &Message, guard: &dyn Fn(&str) -> String) -> Value {
    let mut object = Map::new();
    let role = serde_json::to_value(message.role).unwrap_or(Value::Null);
    object.insert("role".to_string(), role);
    object.insert("content".to_string(), Value::String(guard(&message.content) + &message.markup));
    for (key, text) in [("name", &message.name), ("tool_call_id", &message.tool_call_id)] {
        if let Some(text) = text {
            object.insert(key.to_string(), Value::String(guard(text)));
        }
    }
    if let Some(calls) = &message.tool_calls {
        object.insert("tool_calls".to_string(), map_strings(&objects_for_arguments(calls), guard));
    }
    Value::Object(object)
}

/// Templates expect a call's arguments as an object, clients send its JSON text.
fn objects_for_arguments(calls: &Value) -> Value {
    let mut calls = calls.clone();
    for call in calls.as_array_mut().into_iter().flatten() {
        if let Some(arguments) = call.pointer_mut("/function/arguments")
            && let Some(text) = arguments.as_str()
            && let Ok(parsed @ Value::Object(_)) = serde_json::from_str(text)
        {
            *arguments = parsed;
        }
    }
    calls
}

/// `value` with `change` applied to every string and key in it.
fn map_strings(value: &Value, change: &dyn Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(change(text)),
        Value::Array(list) => list.iter().map(|v| map_strings(v, change)).collect(),
        Value::Object(map) => map.iter().map(|(k, v)| (change(k), map_strings(v, change))).collect(),
        other => other.clone(),
    }
}

/// A character that nobody sent: one of the 32 noncharacters that Unicode keeps for use within a
/// program (Unicode 16.0, section 23.7).
fn unused_mark(messages: &[Message], tools: Option<&Value>) -> char {
    let sent = serde_json::to_string(&(messages, tools)).unwrap_or_default();
    ('\u{fdd0}'..='\u{fdef}').find(|mark| !sent.contains(*mark)).unwrap_or('\u{fdef}')
}

/// The environment that `transformers` gives its templates
/// (<https://huggingface.co/docs/transformers/chat_templating_writing>).
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |words: minijinja::Value| -> Result<String, minijinja::Error> {
        let words = words.to_string();
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, words.clone()).with_source(Raised(words)))
    });
    Ok(environment)
}

/// `json.dumps`, with `ensure_ascii` off unless asked for.
fn tojson(value: minijinja::Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let value =
        serde_json::to_value(&value).map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, format!("tojson: {e}")))?;
    let separators = match separators.as_deref() {
        Some([item, key]) => Some((item.as_str(), key.as_str())),
        Some(_) => return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair")),
        None => None,
    };
    Ok(python_json(&value, indent, separators, ensure_ascii.unwrap_or(false), sort_keys.unwrap_or(false)))
}

/// `{% generation %}` marks the assistant's words for training. It becomes a condition that always holds,
/// so that line numbers and white-space control stay.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        out.push_str(before);
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match word {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => {
                // Not a tag of ours: go on right behind its start, as a tag may stand inside a string.
                out.push_str("{%");
                rest = &rest[start + 2..];
                continue;
            }
        }
        rest = after;
    }
    out + rest
}

/// Marks an error as the template's own refusal.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for Raised {}

fn raised(error: &minijinja::Error) -> Option<String> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(source) = next {
        if let Some(Raised(words)) = source.downcast_ref() {
            return Some(words.clone());
        }
        next = source.source();
    }
    None
}

fn template_error(error: &minijinja::Error) -> Error {
    let kind = match error.kind() {
        ErrorKind::UnknownFilter | ErrorKind::UnknownFunction | ErrorKind::UnknownTest | ErrorKind::UnknownMethod => {
            Kind::Unsupported
        }
        _ => Kind::BadFile,
    };
    let line = error.line().map(|line| format!(" line {line}")).unwrap_or_default();
    let detail = error.detail().map(|detail| format!(": {}", one_line(detail))).unwrap_or_default();
    Error::new(kind, format!("chat template{line}: {}{detail}", error.kind()))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
