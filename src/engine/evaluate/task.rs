//! Questions with a right answer, and prompts that are only watched for loops.

use super::super::chat::{Message, Role};
use super::super::generate::{Finish, Request};
use super::super::load::Engine;
use super::super::session::Session;
use super::super::thinking::{Prompt, generate_parts};
use super::metrics::Softmax;
use super::python::{self, Limits, Verdict};
use crate::error::{Error, Kind, Result};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Fields of a line.
const FIELDS: [&str; 12] =
    ["id", "prompt", "messages", "system", "answer", "match", "choices", "test", "prelude", "stop", "max_tokens", "raw"];

/// A line of a task file.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    content: Content,
    pub check: Check,
    stops: Vec<String>,
    max_tokens: Option<usize>,
}

#[derive(Clone, Debug, PartialEq)]
enum Content {
    /// Completed as it stands.
    Raw(String),
    Chat(Vec<Message>),
}

/// What makes an answer right.
#[derive(Clone, Debug, PartialEq)]
pub enum Check {
    /// Nothing: the answer is only watched.
    None,
    /// It is one of these, white space around it aside.
    Exact(Vec<String>),
    /// It contains one of these.
    Contains(Vec<String>),
    /// The choice with the highest log-probability by its length in bytes is this one.
    Choice { choices: Vec<String>, right: usize },
    /// The program of the answer runs to its end with this behind it.
    Python { prelude: String, test: String },
}

impl Task {
    /// Reads a line. `raw`: prompts that do not say otherwise are completed as they stand.
    pub fn parse(value: &Value, raw: bool) -> Result<Task> {
        let fields = value.as_object().ok_or_else(|| Error::usage("the line is no JSON object"))?;
        if let Some(name) = fields.keys().find(|name| !FIELDS.contains(&name.as_str())) {
            return Err(Error::usage(format!("unknown field `{}` (known: {})", name.escape_debug(), FIELDS.join(", "))));
        }
        let field = |name: &str| fields.get(name).filter(|value| !value.is_null());
        let raw = match field("raw") {
            None => raw,
            Some(value) => value.as_bool().ok_or_else(|| wrong("raw", "true or false"))?,
        };
        let max_tokens = match field("max_tokens") {
            None => None,
            Some(value) => Some(value.as_u64().filter(|n| *n > 0).ok_or_else(|| wrong("max_tokens", "a whole number above 0"))?),
        };
        let stops = texts(fields, "stop")?.unwrap_or_default();
        if stops.iter().any(String::is_empty) {
            return Err(wrong("stop", "a text or a list of texts, none of them empty"));
        }
        Ok(Task {
            content: content(fields, raw)?,
            check: check(fields)?,
            stops,
            max_tokens: max_tokens.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
        })
    }

    /// Whether there is a right answer.
    pub fn asks(&self) -> bool {
        self.check != Check::None
    }

    /// Whether running it means running code that a model wrote.
    pub fn runs_code(&self) -> bool {
        matches!(self.check, Check::Python { .. })
    }
}

fn wrong(name: &str, form: &str) -> Error {
    Error::usage(format!("`{name}` must be {form}"))
}

fn text(fields: &Map<String, Value>, name: &str) -> Result<Option<String>> {
    match fields.get(name).filter(|value| !value.is_null()) {
        None => Ok(None),
        Some(value) => value.as_str().map(|text| Some(text.to_owned())).ok_or_else(|| wrong(name, "a text")),
    }
}

/// A text or a list of texts.
fn texts(fields: &Map<String, Value>, name: &str) -> Result<Option<Vec<String>>> {
    let list = match fields.get(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => Some(vec![text.clone()]),
        Some(Value::Array(list)) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        Some(_) => None,
    };
    list.map(Some).ok_or_else(|| wrong(name, "a text or a list of texts"))
}

fn content(fields: &Map<String, Value>, raw: bool) -> Result<Content> {
    let system = text(fields, "system")?;
    let mut messages: Vec<Message> = system.iter().map(|text| Message::new(Role::System, text.as_str())).collect();
    match (text(fields, "prompt")?, fields.get("messages")) {
        (Some(_), None) if raw && system.is_some() => Err(Error::usage("a raw prompt has no `system`")),
        (Some(prompt), None) if raw => Ok(Content::Raw(prompt)),
        (Some(prompt), None) => {
            messages.push(Message::new(Role::User, prompt));
            Ok(Content::Chat(messages))
        }
        (None, Some(list)) => {
            let list: Vec<Message> =
                serde_json::from_value(list.clone()).map_err(|e| Error::usage(format!("`messages`: {e}")))?;
            messages.extend(list);
            Ok(Content::Chat(messages))
        }
        _ => Err(Error::usage("a line needs either `prompt` or `messages`")),
    }
}

fn check(fields: &Map<String, Value>) -> Result<Check> {
    let how = text(fields, "match")?;
    if let Some(choices) = texts(fields, "choices")? {
        let right = fields.get("answer").and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        return match right.filter(|right| *right < choices.len()) {
            Some(right) if choices.iter().all(|choice| !choice.is_empty()) => Ok(Check::Choice { choices, right }),
            Some(_) => Err(wrong("choices", "texts that are not empty")),
            None => Err(wrong("answer", "the number of the right choice, counted from 0")),
        };
    }
    if let Some(test) = text(fields, "test")? {
        return Ok(Check::Python { prelude: text(fields, "prelude")?.unwrap_or_default(), test });
    }
    match (texts(fields, "answer")?, how.as_deref()) {
        (None, None) => Ok(Check::None),
        (None, Some(_)) => Err(Error::usage("`match` without `answer`")),
        (Some(answers), _) if answers.iter().all(|answer| answer.trim().is_empty()) => Err(Error::usage("`answer` is empty")),
        (Some(answers), None | Some("exact")) => Ok(Check::Exact(answers)),
        (Some(answers), Some("contains")) => Ok(Check::Contains(answers)),
        (Some(_), Some(_)) => Err(wrong("match", "exact or contains")),
    }
}

/// How tasks are answered. Always the likeliest token, without a repetition penalty.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    pub max_tokens: usize,
    /// What chat templates are told about reasoning.
    pub think: Option<bool>,
    pub limits: Limits,
}

/// What became of a task.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// `None` for a prompt that is only watched.
    pub right: Option<bool>,
    /// What was written; `None` where choices were scored.
    pub answer: Option<Written>,
    /// The program had to be stopped.
    pub timed_out: bool,
}

#[derive(Clone, Debug)]
pub struct Written {
    pub text: String,
    /// Fewer than [`SHORT`] tokens, the end-of-text token not counted.
    pub short: bool,
    /// See [`loops`].
    pub loops: bool,
    /// It had not ended at the token limit.
    pub cut: bool,
}

/// An answer of fewer tokens is short.
pub const SHORT: usize = 5;
/// A loop is a run of this many tokens that occurs more than [`OFTEN`] times.
pub const RUN: usize = 20;
pub const OFTEN: usize = 4;

/// Whether some run of [`RUN`] tokens occurs more than [`OFTEN`] times; occurrences may overlap.
pub fn loops(ids: &[u32]) -> bool {
    let mut counts: HashMap<&[u32], usize> = HashMap::new();
    ids.windows(RUN).any(|run| {
        let count = counts.entry(run).or_default();
        *count += 1;
        *count > OFTEN
    })
}

/// Lets the model do a task.
///
/// # Errors
/// `Interrupted` when `stopped` says so, `Usage` for a prompt that does not fit the context, and what the
/// running of programs gives.
pub fn answer(session: &mut Session, task: &Task, manner: &Manner, stopped: &dyn Fn() -> bool) -> Result<Outcome> {
    let engine = session.engine();
    let prompt = prompt(engine, task, manner)?;
    if let Check::Choice { choices, right } = &task.check {
        let chosen = choose(session, task, &prompt, choices, stopped)?;
        return Ok(Outcome { right: Some(chosen == *right), answer: None, timed_out: false });
    }
    let max_tokens = task.max_tokens.unwrap_or(manner.max_tokens);
    let request = Request { max_tokens, stops: task.stops.clone(), ..Request::default() };
    let said = generate_parts(session, &prompt, &request, &mut |_| {}, stopped)?;
    if said.finish == Finish::Interrupted {
        return Err(Error::new(Kind::Interrupted, "interrupted"));
    }
    let mut ids = said.ids.as_slice();
    if let Some((last, before)) = ids.split_last()
        && engine.tokenizer.eos_ids().contains(last)
    {
        ids = before;
    }
    let mut timed_out = false;
    let text = said.text;
    let right = match &task.check {
        Check::None | Check::Choice { .. } => None,
        Check::Exact(answers) => Some(answers.iter().any(|answer| answer.trim() == text.trim())),
        Check::Contains(answers) => Some(answers.iter().any(|answer| text.contains(answer.trim()))),
        Check::Python { prelude, test } => {
            let program = match &task.content {
                Content::Raw(start) => {
                    let whole = engine.tokenizer.decode(&[&prompt.ids[..], ids].concat());
                    let before = engine.tokenizer.decode(&prompt.ids);
                    let text = indented(whole.strip_prefix(&before).unwrap_or_default(), &text);
                    format!("{prelude}\n{start}{text}\n{test}\n")
                }
                Content::Chat(_) => format!("{prelude}\n{}\n{test}\n", code(&text)),
            };
            let verdict = python::run(&program, &manner.limits, stopped)?;
            timed_out = verdict == Verdict::TimedOut;
            Some(verdict == Verdict::Passed)
        }
    };
    let cut = matches!(said.finish, Finish::Length | Finish::Context);
    let answer = Written { short: ids.len() < SHORT, loops: loops(ids), cut, text };
    Ok(Outcome { right, answer: Some(answer), timed_out })
}

fn prompt(engine: &Engine, task: &Task, manner: &Manner) -> Result<Prompt> {
    match &task.content {
        Content::Raw(text) => Ok(Prompt { ids: engine.tokenizer.encode(text, true)?, inside: false }),
        Content::Chat(_) if !engine.template.has_template() => {
            Err(Error::usage("this is a base model without a chat template")
                .with_hint("give --raw, or \"raw\": true in the line"))
        }
        Content::Chat(messages) => Prompt::chat(engine, messages, None, manner.think),
    }
}

/// The index of the choice with the highest log-probability by its length in bytes.
fn choose(session: &mut Session, task: &Task, prompt: &Prompt, choices: &[String], stopped: &dyn Fn() -> bool) -> Result<usize> {
    let engine = session.engine();
    let mut best = (f64::NEG_INFINITY, 0);
    for (at, choice) in choices.iter().enumerate() {
        // A raw prompt and its choice are one text, whose tokens may differ from those of its parts.
        let (ids, start) = match &task.content {
            Content::Raw(text) => {
                let ids = engine.tokenizer.encode(&format!("{text}{choice}"), true)?;
                let start = ids.iter().zip(&prompt.ids).take_while(|(a, b)| a == b).count();
                (ids, start.max(1))
            }
            Content::Chat(_) => {
                let choice = engine.tokenizer.encode(choice, false)?;
                ([&prompt.ids[..], &choice].concat(), prompt.ids.len())
            }
        };
        if start >= ids.len() {
            return Err(Error::usage(format!("choice {at} has no tokens of its own")));
        }
        let mut sum = log_prob(session.feed(&ids[..start], stopped)?.logits, ids[start])?;
        for pair in ids[start..].windows(2) {
            sum += log_prob(session.step(pair[0])?, pair[1])?;
        }
        let score = sum / choice.len() as f64;
        if score > best.0 {
            best = (score, at);
        }
    }
    Ok(best.1)
}

fn log_prob(logits: &[f32], id: u32) -> Result<f64> {
    let softmax = Softmax::of(logits).ok_or_else(|| Error::new(Kind::BadFile, "the model gives logits that are no numbers"))?;
    Ok(softmax.log_prob(logits[id as usize]))
}

/// An answer with the white space that it begins with where it stands, `continued`: some tokenizers drop a space
/// at the beginning of a text, which is part of the program here.
fn indented(continued: &str, text: &str) -> String {
    let space = &continued[..continued.len() - continued.trim_start().len()];
    let text = text.trim_start();
    if text.is_empty() { String::new() } else { format!("{space}{text}") }
}

/// The program in an answer: what stands in fences, all of it if there are several; without a fence the answer
/// itself. A fence that is not closed goes to the end.
fn code(answer: &str) -> String {
    let (mut inside, mut found, mut program) = (false, false, String::new());
    for line in answer.lines() {
        if line.trim_start().starts_with("```") {
            inside = !inside;
            found |= inside;
        } else if inside {
            program.push_str(line);
            program.push('\n');
        }
    }
    if found { program } else { answer.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_are_read_and_refused() {
        let task = |value: Value| Task::parse(&value, false);
        assert_eq!(task(json!({"prompt": "p", "answer": "4"})).unwrap().check, Check::Exact(vec!["4".into()]));
        let either = task(json!({"prompt": "p", "answer": ["a", "b"], "match": "contains", "stop": "\n"})).unwrap();
        assert_eq!(either.check, Check::Contains(vec!["a".into(), "b".into()]));
        assert_eq!(either.stops, ["\n"]);
        assert_eq!(task(json!({"prompt": "p"})).unwrap().check, Check::None);
        assert!(matches!(Task::parse(&json!({"prompt": "p"}), true).unwrap().content, Content::Raw(_)));
        assert!(task(json!({"prompt": "p", "test": "assert f() == 1"})).unwrap().runs_code());
        for (line, word) in [
            (json!([]), "object"),
            (json!({"promt": "p"}), "promt"),
            (json!({"answer": "4"}), "prompt"),
            (json!({"prompt": "p", "answer": 4}), "answer"),
            (json!({"prompt": "p", "answer": "4", "match": "like"}), "match"),
            (json!({"prompt": "p", "match": "exact"}), "match"),
            (json!({"prompt": "p", "choices": ["a", "b"], "answer": 2}), "answer"),
            (json!({"prompt": "p", "choices": ["a", ""], "answer": 0}), "choices"),
            (json!({"prompt": "p", "stop": [""]}), "stop"),
            (json!({"prompt": "p", "system": "s", "raw": true}), "system"),
        ] {
            let error = task(line.clone()).unwrap_err();
            assert!(error.kind == Kind::Usage && error.message().contains(word), "{line}: {error}");
        }
    }

    #[test]
    fn loops_are_runs_that_come_back() {
        assert!(!loops(&[7; 23]) && loops(&[7; 24]));
        let words: Vec<u32> = (0..20).collect();
        assert!(!loops(&words.repeat(4)) && loops(&words.repeat(5)));
        assert!(!loops(&(0..1000).collect::<Vec<u32>>()) && !loops(&[]));
    }

    #[test]
    fn programs_are_taken_from_fences() {
        assert_eq!(code("def f(): pass"), "def f(): pass");
        assert_eq!(indented("    return 1\nx", "   return 1"), "    return 1");
        assert_eq!(code("Sure:\n```python\nx = 1\n```\nand\n```\ny = 2"), "x = 1\ny = 2\n");
    }
}
