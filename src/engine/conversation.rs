//! A chat: its turns, its settings, what of it fits the context, and its file.

use super::chat::{Message, Role};
use super::generate::Request;
use super::load::Engine;
use super::own_file;
use super::thinking::{Prompt, Think};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::fmt;
use std::io::{Read, Write};
use std::path::Path;
use std::str::FromStr;

/// What happens when a conversation outgrows the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// The user decides each time.
    #[default]
    Ask,
    /// The oldest turns are left out.
    Slide,
    /// No further answers.
    Stop,
}

impl Overflow {
    pub const NAMES: [&'static str; 3] = ["ask", "slide", "stop"];
}

impl FromStr for Overflow {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "ask" => Ok(Overflow::Ask),
            "slide" => Ok(Overflow::Slide),
            "stop" => Ok(Overflow::Stop),
            _ => Err(Error::usage(format!("overflow is {text:?}, but must be one of {}", Self::NAMES.join(", ")))),
        }
    }
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Overflow::Ask => "ask",
            Overflow::Slide => "slide",
            Overflow::Stop => "stop",
        })
    }
}

/// How answers of a chat are made.
#[derive(Clone, Debug)]
pub struct Settings {
    pub request: Request,
    pub think: Think,
    pub overflow: Overflow,
}

impl Settings {
    /// Names of [`Settings::set`], as they are shown. In files they have underscores.
    pub const NAMES: [&'static str; 9] =
        ["temperature", "top-k", "top-p", "min-p", "repetition-penalty", "seed", "max-tokens", "think", "overflow"];

    /// Value of a setting as text; `None` if there is no such setting.
    pub fn get(&self, name: &str) -> Option<String> {
        let (sampling, text) = (&self.request.sampling, name.replace('_', "-"));
        Some(match text.as_str() {
            "temperature" => sampling.temperature.to_string(),
            "top-k" => sampling.top_k.to_string(),
            "top-p" => sampling.top_p.to_string(),
            "min-p" => sampling.min_p.to_string(),
            "repetition-penalty" => sampling.repetition_penalty.to_string(),
            "seed" => sampling.seed.to_string(),
            "max-tokens" => self.request.max_tokens.to_string(),
            "think" => self.think.to_string(),
            "overflow" => self.overflow.to_string(),
            _ => return None,
        })
    }

    /// Changes a setting, or nothing if the value is refused.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        fn number<T: FromStr>(name: &str, value: &str, kind: &str) -> Result<T> {
            value.parse().map_err(|_| Error::usage(format!("{name} is {value:?}, but must be {kind}")))
        }
        let name = name.replace('_', "-");
        let real = || number::<f32>(&name, value, "a number");
        let mut next = self.clone();
        let sampling = &mut next.request.sampling;
        match name.as_str() {
            "temperature" => sampling.temperature = real()?,
            "top-k" => sampling.top_k = number(&name, value, "a whole number")?,
            "top-p" => sampling.top_p = real()?,
            "min-p" => sampling.min_p = real()?,
            "repetition-penalty" => sampling.repetition_penalty = real()?,
            "seed" => sampling.seed = number(&name, value, "a whole number")?,
            "max-tokens" => next.request.max_tokens = number(&name, value, "a whole number")?,
            "think" => next.think = value.parse()?,
            "overflow" => next.overflow = value.parse()?,
            _ => return Err(Error::usage(format!("no setting {name:?} (there are: {})", Self::NAMES.join(", ")))),
        }
        next.request.sampling.validate()?;
        *self = next;
        Ok(())
    }
}

/// What has to be left out for a conversation to fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slide {
    /// Turns (a question with its answer) that would no longer be shown to the model.
    pub turns: usize,
    /// Tokens of the prompt with and without them.
    pub before: usize,
    pub after: usize,
    /// Messages to pass over, as in [`Conversation`].
    passed: usize,
}

/// Messages and settings.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// The model that answers, as it was named.
    pub model: String,
    pub settings: Settings,
    system: Option<String>,
    /// Everything but the system turn.
    messages: Vec<Message>,
    /// Messages at the beginning that the model is no longer shown.
    passed: usize,
}

/// Version of the file form.
const VERSION: u64 = 1;
/// No conversation comes near this; a larger file is something else.
const LARGEST_FILE: u64 = 64 << 20;

impl Conversation {
    pub fn new(model: impl Into<String>, system: Option<&str>, settings: Settings) -> Self {
        let system = system.map(str::to_owned);
        Conversation { model: model.into(), settings, system, messages: Vec::new(), passed: 0 }
    }

    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Replaces the system turn; the other turns stay.
    pub fn set_system(&mut self, system: Option<&str>) {
        self.system = system.map(str::to_owned);
    }

    /// All messages after the system turn.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Turns so far.
    pub fn turns(&self) -> usize {
        turns(&self.messages)
    }

    /// Turns that the model is no longer shown.
    pub fn passed_turns(&self) -> usize {
        turns(&self.messages[..self.passed])
    }

    /// Forgets every turn but the system's.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.passed = 0;
    }

    pub fn ask(&mut self, text: impl Into<String>) {
        self.messages.push(Message::new(Role::User, text));
    }

    pub fn answer(&mut self, text: impl Into<String>) {
        self.messages.push(Message::new(Role::Assistant, text));
    }

    /// What was called, and what came of it.
    pub fn called(&mut self, turn: Vec<Message>) {
        self.messages.extend(turn);
    }

    /// Takes back the last question with all that followed; gives its text.
    pub fn undo(&mut self) -> Option<String> {
        let at = self.last_question()?;
        let question = self.messages.drain(at..).next()?;
        if self.passed >= self.messages.len() {
            // Nothing would be left to show: show it all again, and let the context decide anew.
            self.passed = 0;
        }
        Some(question.content)
    }

    /// Takes back what followed the last question. False if there is no question.
    pub fn take_back_answer(&mut self) -> bool {
        let Some(at) = self.last_question() else { return false };
        self.messages.truncate(at + 1);
        true
    }

    fn last_question(&self) -> Option<usize> {
        self.messages.iter().rposition(|m| m.role == Role::User)
    }

    /// The messages that the model is shown.
    fn shown(&self, passed: usize) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new(Role::System, text));
        system.chain(self.messages.iter().skip(passed).cloned()).collect()
    }

    fn prompt_from(&self, engine: &Engine, passed: usize) -> Result<Prompt> {
        Prompt::chat(engine, &self.shown(passed), self.settings.request.tools.as_ref(), self.settings.think.enable())
    }

    /// The prompt for the next answer.
    pub fn prompt(&self, engine: &Engine) -> Result<Prompt> {
        self.prompt_from(engine, self.passed)
    }

    /// What has to be left out before the next answer; `None` if it fits as it is.
    ///
    /// It fits when there is room for an answer of the token limit or a quarter of the context, whichever is
    /// less. What has to go are the oldest turns, whole, until half the context is free: each slide makes the
    /// model read everything again, so there should not be one at every turn. The system turn and the last
    /// question always stay.
    ///
    /// # Errors
    /// `Usage` when the system turn and the last question alone do not fit; and what rendering gives.
    pub fn overflow(&self, engine: &Engine) -> Result<Option<Slide>> {
        let context = engine.context();
        let room = self.settings.request.max_tokens.min(context / 4).max(1);
        let before = self.prompt(engine)?.ids.len();
        if before + room <= context {
            return Ok(None);
        }
        let mut slide = None;
        let questions = self.messages.iter().enumerate().skip(self.passed + 1).filter(|(_, m)| m.role == Role::User);
        for (turns, (passed, _)) in questions.enumerate() {
            let after = self.prompt_from(engine, passed)?.ids.len();
            slide = Some(Slide { turns: turns + 1, before, after, passed });
            if after <= context / 2 {
                break;
            }
        }
        let least = slide.as_ref().map_or(before, |slide| slide.after);
        if least >= context {
            let system = if self.system.is_some() { " with the system prompt" } else { "" };
            return Err(Error::usage(format!(
                "the last message{system} takes {least} tokens, the context of {context} has no room for an answer"
            ))
            .with_hint(format!(
                "shorten it, or start with a larger --context (this model: up to {})",
                engine.bundle.manifest.spec.max_context()
            )));
        }
        Ok(slide)
    }

    /// Leaves out what `slide` says. The messages stay in the file of the conversation.
    pub fn slide(&mut self, slide: &Slide) {
        self.passed = slide.passed.min(self.messages.len());
    }

    /// The form of the file: messages as in the OpenAI API, the system turn first.
    pub fn to_json(&self) -> Value {
        let setting = |name: &str| {
            let text = self.settings.get(name).unwrap_or_default();
            let value = text.parse::<serde_json::Number>().map_or(Value::String(text), Value::Number);
            (name.replace('-', "_"), value)
        };
        let settings: Map<String, Value> = Settings::NAMES.into_iter().map(setting).collect();
        json!({
            "cactus_chat": VERSION,
            "model": self.model,
            "settings": settings,
            "messages": self.shown(0),
        })
    }

    /// Reads the form of [`Conversation::to_json`]; settings that it does not name stay as `settings` has
    /// them. Nothing but `messages` is required, so that a request to an OpenAI server can be read too.
    ///
    /// # Errors
    /// `Usage` with what is wrong; the caller names the file.
    pub fn from_json(value: &Value, settings: &Settings) -> Result<Self> {
        let wrong = |what: &str| Error::usage(format!("not a conversation: {what}"));
        let object = value.as_object().ok_or_else(|| wrong("no JSON object"))?;
        match object.get("cactus_chat").map(Value::as_u64) {
            None | Some(Some(VERSION)) => {}
            Some(_) => return Err(wrong("made by another version of this program")),
        }
        let mut settings = settings.clone();
        if let Some(saved) = object.get("settings") {
            for (name, value) in saved.as_object().ok_or_else(|| wrong("settings is no object"))? {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                settings.set(name, &text)?;
            }
        }
        let messages = object.get("messages").ok_or_else(|| wrong("it has no messages"))?;
        let messages: Vec<Message> = serde_json::from_value(messages.clone()).map_err(|e| wrong(&e.to_string()))?;
        let mut messages = messages.into_iter().peekable();
        let system = messages.next_if(|m| m.role == Role::System).map(|m| m.content);
        let model = object.get("model").and_then(Value::as_str).unwrap_or_default().to_owned();
        Ok(Conversation { model, settings, system, messages: messages.collect(), passed: 0 })
    }

    /// Writes the conversation to a file that only its owner may read; whatever was there is replaced at once.
    pub fn save(&self, path: &Path) -> Result<()> {
        let text = format!("{:#}\n", self.to_json());
        own_file::replace(path, |file| file.write_all(text.as_bytes()))
    }

    /// Reads a file that [`Conversation::save`] wrote, or one of that form.
    pub fn load(path: &Path, settings: &Settings) -> Result<Self> {
        let failed = |e: &std::io::Error| Error::io("read", path, e);
        let file = std::fs::File::open(path).map_err(|e| failed(&e))?;
        let mut bytes = Vec::new();
        file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(|e| failed(&e))?;
        if bytes.len() as u64 > LARGEST_FILE {
            return Err(Error::bad_file(path, "too large for a conversation"));
        }
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(path, format!("not JSON: {e}")))?;
        Self::from_json(&value, settings).map_err(|e| e.context(path.display()))
    }
}

fn turns(messages: &[Message]) -> usize {
    messages.iter().filter(|m| m.role == Role::User).count()
}

#[cfg(test)]
#[path = "conversation_tests.rs"]
mod tests;
