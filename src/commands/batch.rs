//! Many prompts: a JSON object a line in, a JSON object a line out, in the same order. What is written stays
//! written, so a batch that was stopped goes on where it ended.

use super::terminal::{self, Terminal};
use super::{Failure, Outcome};
use cactus::engine::Request;
use cactus::engine::chat::{Message, Role};
use cactus::engine::constrain::response_format;
use cactus::engine::fields::FieldError;
use cactus::engine::thinking::Think;
use cactus::engine::tools::{Choice, Tools};
use cactus::error::{Error, Kind, Result};
use serde_json::{Map, Value};
use std::collections::VecDeque;
use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// How often a wait for input looks whether it was interrupted.
const GLANCE: Duration = Duration::from_millis(50);

/// Fields of an input line.
const FIELDS: [&str; 16] = [
    "id",
    "prompt",
    "messages",
    "system",
    "think",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "response_format",
    "tools",
    "tool_choice",
];

/// One request of a batch.
#[derive(Debug)]
pub struct Item {
    pub content: Content,
    pub system: Option<String>,
    pub think: Option<Think>,
    pub request: Request,
}

#[derive(Debug, PartialEq)]
pub enum Content {
    Prompt(String),
    Messages(Vec<Message>),
}

impl Item {
    /// Reads an input line; `base` holds what it does not say.
    fn parse(fields: &Map<String, Value>, base: &Request) -> Result<Item> {
        if let Some(name) = fields.keys().find(|name| !FIELDS.contains(&name.as_str())) {
            return Err(Error::usage(format!("unknown field `{}`", name.escape_debug()))
                .with_hint(format!("known: {}; put data of your own into id", FIELDS.join(", "))));
        }
        // A null is as good as nothing.
        let field = |name: &str| fields.get(name).filter(|value| !value.is_null());
        let wrong = |name: &str, form: &str| Error::usage(format!("`{name}` must be {form}"));
        let text = |name: &str| -> Result<Option<String>> {
            let read = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(|| wrong(name, "a text"));
            field(name).map(read).transpose()
        };
        let whole = |name: &str| -> Result<Option<u64>> {
            field(name).map(|value| value.as_u64().ok_or_else(|| wrong(name, "a whole number"))).transpose()
        };
        let real = |name: &str| -> Result<Option<f32>> {
            field(name).map(|value| value.as_f64().map(|x| x as f32).ok_or_else(|| wrong(name, "a number"))).transpose()
        };
        let messages = |value: &Value| -> Result<Vec<Message>> {
            let list = value.as_array().filter(|list| !list.is_empty()).ok_or_else(|| wrong("messages", "a list of turns"))?;
            let message = |(at, value): (usize, &Value)| {
                serde_json::from_value(value.clone()).map_err(|e| Error::usage(format!("`messages`, turn {}: {e}", at + 1)))
            };
            list.iter().enumerate().map(message).collect()
        };
        let system = text("system")?;
        let think = text("think")?.map(|name| name.parse()).transpose()?;
        let content = match (text("prompt")?, field("messages")) {
            (Some(prompt), None) if prompt.trim().is_empty() => return Err(Error::usage("the prompt is empty")),
            (Some(prompt), None) => Content::Prompt(prompt),
            (None, Some(list)) => {
                let messages = messages(list)?;
                if system.is_some() && messages.iter().any(|m| m.role == Role::System) {
                    return Err(Error::usage("`system` is given twice, also as a turn of `messages`"));
                }
                Content::Messages(messages)
            }
            _ => return Err(Error::usage("a line needs either `prompt` or `messages`")),
        };
        let mut request = base.clone();
        let sampling = &mut request.sampling;
        sampling.temperature = real("temperature")?.unwrap_or(sampling.temperature);
        sampling.top_p = real("top_p")?.unwrap_or(sampling.top_p);
        sampling.top_k = whole("top_k")?.map_or(sampling.top_k, |k| usize::try_from(k).unwrap_or(usize::MAX));
        sampling.min_p = real("min_p")?.unwrap_or(sampling.min_p);
        sampling.repetition_penalty = real("repetition_penalty")?.unwrap_or(sampling.repetition_penalty);
        sampling.seed = whole("seed")?.unwrap_or(sampling.seed);
        sampling.validate()?;
        request.max_tokens = whole("max_tokens")?.map_or(request.max_tokens, |n| usize::try_from(n).unwrap_or(usize::MAX));
        if let Some(stop) = field("stop") {
            let texts = match stop {
                Value::String(text) => Some(vec![text.clone()]),
                Value::Array(list) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
                _ => None,
            };
            let good = texts.filter(|texts| texts.iter().all(|text| !text.is_empty()));
            request.stops = good.ok_or_else(|| wrong("stop", "a text or a list of texts, none of them empty"))?;
        }
        if let Some(format) = field("response_format") {
            request.constraint = response_format::parse(format)?;
        }
        if field("tools").is_some() || field("tool_choice").is_some() {
            let choice = field("tool_choice").map(Choice::parse).transpose().map_err(FieldError::into_error)?;
            let known = request.tools.as_ref().map(Tools::json);
            let tools = field("tools").or(known.as_ref()).unwrap_or(&Value::Null);
            request.tools = Tools::parse(tools, &choice.unwrap_or_default(), true).map_err(FieldError::into_error)?;
        }
        if request.constraint.is_some() && field("stop").is_some() {
            return Err(Error::usage("`stop` could cut an answer that has a form").with_hint("leave `stop` out"));
        }
        Ok(Item { content, system, think, request })
    }
}

/// Answers an item; `None`: interrupted.
pub type Answering<'a> = &'a mut dyn FnMut(Item) -> Result<Option<Value>>;

/// A batch with its input and output opened.
pub struct Batch {
    input: Receiver<Result<Vec<u8>>>,
    /// Lines of the input, where they can be counted beforehand.
    lines: Option<u64>,
    output: Output,
    kept: Kept,
}

enum Output {
    Stdout,
    File(File, PathBuf),
}

/// What an earlier run has written: line numbers and ids, in order.
#[derive(Debug, Default)]
struct Kept {
    lines: VecDeque<(u64, Value)>,
    failed: u64,
}

impl Batch {
    /// Opens `input` (`-`: standard input) and `output` (`None`: standard output). A last line of the output
    /// that has no end is cut off.
    pub fn open(input: &str, output: Option<&Path>) -> Result<Batch> {
        let path = Path::new(input);
        let mut lines = None;
        let source: Box<dyn Read + Send> = if input == "-" {
            Box::new(std::io::stdin())
        } else {
            let mut file = File::open(path).map_err(|e| Error::io("open", path, &e))?;
            if path.is_dir() {
                return Err(Error::usage(format!("{input} is a folder")).with_hint("give --batch a file of JSON lines"));
            }
            if path.is_file() && output.is_some() {
                lines = Some(count_lines(&mut file).map_err(|e| Error::io("read", path, &e))?);
            }
            Box::new(file)
        };
        let mut kept = Kept::default();
        let output = match output {
            None => Output::Stdout,
            Some(output) => {
                let same = |a: &Path, b: &Path| a.canonicalize().ok().is_some_and(|a| b.canonicalize().is_ok_and(|b| a == b));
                if input != "-" && same(path, output) {
                    return Err(Error::usage(format!("{input} cannot be input and output of a batch")));
                }
                let file = open_output(output, &mut kept)?;
                Output::File(file, output.to_path_buf())
            }
        };
        Ok(Batch { input: read_lines(source, input), lines, output, kept })
    }

    /// Runs what is not done yet. `failure` makes the object for a line that failed.
    pub fn run(
        mut self,
        base: &Request,
        answer: Answering,
        failure: &dyn Fn(&Error) -> Value,
        terminal: &mut Terminal,
    ) -> Outcome {
        let skipped = self.kept.lines.len() as u64;
        if skipped > 0 {
            terminal.note(&format!("{skipped} prompts were done before"));
        }
        if self.lines.is_some() {
            terminal.start("prompts", self.lines, false);
        }
        let (mut line, mut done, mut failed) = (0, skipped, self.kept.failed);
        let interrupted = |terminal: &mut Terminal, done: u64| {
            terminal.finish();
            terminal.note(&format!("stopped after {done} prompts"));
            Err(Failure::Reported(130))
        };
        loop {
            let bytes = match self.input.recv_timeout(GLANCE) {
                _ if terminal::interrupted() => return interrupted(terminal, done),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
                Ok(bytes) => bytes?,
            };
            line += 1;
            terminal.advance(1);
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            let parsed = parse(&bytes);
            let id = parsed.as_ref().ok().and_then(|fields| fields.get("id")).cloned().unwrap_or(Value::Null);
            if let Some((number, kept)) = self.kept.lines.pop_front() {
                if (number, &kept) == (line, &id) {
                    continue;
                }
                return Err(self.other_input(line).into());
            }
            let result = parsed.and_then(|fields| Item::parse(&fields, base)).and_then(&mut *answer);
            let response = match result {
                Ok(Some(response)) => response,
                Ok(None) => return interrupted(terminal, done),
                Err(error) => {
                    failed += 1;
                    failure(&error)
                }
            };
            self.write(line, id, response)?;
            done += 1;
        }
        terminal.finish();
        if !self.kept.lines.is_empty() {
            return Err(self.other_input(line + 1).into());
        }
        if failed > 0 {
            let text = format!("{failed} of {done} prompts failed; the output says why, line by line");
            return Err(Error::new(Kind::BadFile, text).into());
        }
        Ok(())
    }

    fn write(&mut self, line: u64, id: Value, response: Value) -> Outcome {
        let mut object = Map::new();
        object.insert("line".into(), line.into());
        object.insert("id".into(), id);
        if let Value::Object(fields) = response {
            object.extend(fields);
        }
        let text = format!("{}\n", Value::Object(object));
        match &mut self.output {
            Output::Stdout => terminal::print(&text),
            Output::File(file, path) => file.write_all(text.as_bytes()).map_err(|e| Error::io("write", path, &e).into()),
        }
    }

    fn other_input(&self, line: u64) -> Error {
        let path = if let Output::File(_, path) = &self.output { path.display().to_string() } else { String::new() };
        Error::usage(format!("{path} holds the output of other prompts: it differs at input line {line}"))
            .with_hint("give another --output, or remove that file to begin anew")
    }
}

/// The fields of an input line.
fn parse(bytes: &[u8]) -> Result<Map<String, Value>> {
    let text = std::str::from_utf8(bytes).map_err(|_| Error::usage("the line is not UTF-8 text"))?;
    match serde_json::from_str(text.trim_start_matches('\u{feff}')) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(Error::usage("the line is no JSON object").with_hint("write {\"prompt\": \"...\"}")),
        Err(e) => Err(Error::usage(format!("the line is no JSON: {e}"))),
    }
}

/// Lines of `source`, read by a thread of its own, because a read cannot be interrupted.
fn read_lines(source: Box<dyn Read + Send>, name: &str) -> Receiver<Result<Vec<u8>>> {
    let (sender, receiver) = sync_channel(1);
    let name = if name == "-" { "standard input" } else { name }.to_owned();
    std::thread::spawn(move || {
        let mut source = BufReader::new(source);
        loop {
            let mut line = Vec::new();
            let read = source.read_until(b'\n', &mut line).map_err(|e| Error::io("read", Path::new(&name), &e));
            let end = !matches!(read, Ok(n) if n > 0);
            if matches!(read, Ok(0)) || sender.send(read.map(|_| line)).is_err() || end {
                return;
            }
        }
    });
    receiver
}

fn count_lines(file: &mut File) -> std::io::Result<u64> {
    let (mut lines, mut last) = (0, b'\n');
    let mut reader = BufReader::new(&mut *file);
    loop {
        let part = reader.fill_buf()?;
        let Some(end) = part.last() else { break };
        last = *end;
        lines += part.iter().filter(|b| **b == b'\n').count() as u64;
        let len = part.len();
        reader.consume(len);
    }
    file.rewind()?;
    Ok(lines + u64::from(last != b'\n'))
}

/// Opens the output to go on with it, and reads into `kept` what is there.
fn open_output(path: &Path, kept: &mut Kept) -> Result<File> {
    let io = |what: &str, e: &std::io::Error| Error::io(what, path, e);
    if path.metadata().is_ok_and(|data| !data.is_file() && !data.is_dir()) {
        // A device or a pipe keeps nothing.
        return File::options().write(true).open(path).map_err(|e| io("open", &e));
    }
    let mut file =
        File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(|e| io("create", &e))?;
    // Where locks do not exist, two batches into one file are the user's own care.
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        return Err(Error::usage(format!("another process is writing {}", path.display())));
    }
    let mut reader = BufReader::new(&mut file);
    let (mut whole, mut line) = (0, Vec::new());
    while reader.read_until(b'\n', &mut line).map_err(|e| io("read", &e))? > 0 && line.ends_with(b"\n") {
        let number = kept.lines.len() + 1;
        let (place, good) = kept_line(&line)
            .filter(|((n, _), _)| kept.lines.back().is_none_or(|(last, _)| last < n))
            .ok_or_else(|| strange(path, number))?;
        kept.lines.push_back(place);
        kept.failed += u64::from(!good);
        whole += line.len() as u64;
        line.clear();
    }
    drop(reader);
    // Only what can be the beginning of a line of ours is dropped.
    const BEGIN: &[u8] = b"{\"line\":";
    if !line.starts_with(BEGIN) && !BEGIN.starts_with(&line) {
        return Err(strange(path, kept.lines.len() + 1));
    }
    file.set_len(whole).and_then(|()| file.seek(std::io::SeekFrom::Start(whole))).map_err(|e| io("write", &e))?;
    Ok(file)
}

fn strange(path: &Path, line: usize) -> Error {
    Error::usage(format!("{} is no output of a batch: see its line {line}", path.display())).with_hint("give another --output")
}

/// Line number, id and success of an output line.
fn kept_line(text: &[u8]) -> Option<((u64, Value), bool)> {
    let Ok(Value::Object(mut fields)) = serde_json::from_slice(text) else { return None };
    let line = fields.get("line")?.as_u64()?;
    let good = fields.get("success")?.as_bool()?;
    Some(((line, fields.remove("id")?), good))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cactus::engine::sampler::Sampling;
    use serde_json::json;

    fn base() -> Request {
        Request {
            sampling: Sampling { seed: 3, ..Sampling::default() },
            max_tokens: 9,
            stops: vec!["x".into()],
            ..Request::default()
        }
    }

    fn item(fields: Value) -> Result<Item> {
        Item::parse(fields.as_object().unwrap(), &base())
    }

    #[test]
    fn a_line_overrides_the_flags() {
        let plain = item(json!({"prompt": "Hi", "id": {"any": 1}, "system": null, "stop": null})).unwrap();
        assert_eq!((plain.content, plain.system), (Content::Prompt("Hi".into()), None));
        assert_eq!((plain.request.max_tokens, plain.request.sampling.seed, plain.request.stops.len()), (9, 3, 1));
        let own = item(
            json!({"prompt": "Hi", "system": "s", "think": "off", "max_tokens": 2, "temperature": 1, "top_p": 0.5, "top_k": 4,
            "min_p": 0.1, "repetition_penalty": 1.5, "seed": 18446744073709551615u64, "stop": ["a", "b"]}),
        )
        .unwrap();
        let sampling = Sampling {
            temperature: 1.0,
            top_p: 0.5,
            top_k: 4,
            min_p: 0.1,
            repetition_penalty: 1.5,
            seed: u64::MAX,
            ..Sampling::default()
        };
        assert_eq!((own.think, plain.think), (Some(Think::Off), None));
        assert_eq!(own.request.sampling, sampling);
        assert_eq!((own.request.max_tokens, own.request.stops), (2, vec!["a".to_owned(), "b".to_owned()]));
        let turns =
            item(json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stop": "a"})).unwrap();
        assert_eq!(turns.content, Content::Messages(vec![Message::new(Role::User, "Hi")]));
        assert_eq!(turns.request.stops, ["a"]);
        let formed = item(json!({"prompt": "Hi", "response_format": {"type": "json_object"}})).unwrap();
        assert!(formed.request.constraint.is_some() && plain.request.constraint.is_none());
    }

    #[test]
    fn a_bad_line_names_the_field() {
        let system = json!([{"role": "system", "content": "a"}]);
        for (fields, part) in [
            (json!({}), "either `prompt` or `messages`"),
            (json!({"prompt": "a", "messages": system}), "either"),
            (json!({"prompt": " "}), "empty"),
            (json!({"prompt": 3}), "`prompt` must be a text"),
            (json!({"prompt": "a", "temprature": 1}), "temprature"),
            (json!({"prompt": "a", "temperature": "hot"}), "`temperature` must be a number"),
            (json!({"prompt": "a", "temperature": -1}), "temperature is -1"),
            (json!({"prompt": "a", "max_tokens": -1}), "`max_tokens` must be a whole"),
            (json!({"prompt": "a", "stop": [""]}), "`stop`"),
            (json!({"prompt": "a", "think": "hard"}), "hard"),
            (json!({"messages": []}), "`messages`"),
            (json!({"prompt": "a", "response_format": {"type": "xml"}}), "response_format"),
            (json!({"prompt": "a", "response_format": {"type": "json_object"}, "stop": "b"}), "`stop`"),
            (json!({"messages": [{"role": "king", "content": "a"}]}), "turn 1"),
            (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "image_url"),
            (json!({"messages": system, "system": "b"}), "twice"),
        ] {
            let error = item(fields.clone()).unwrap_err();
            assert!(error.message().contains(part), "{fields}: {error}");
        }
    }

    #[test]
    fn half_a_line_is_dropped_and_strange_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        let open = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let mut kept = Kept::default();
            open_output(&path, &mut kept).map(|_| (kept.lines.len(), kept.failed))
        };
        let (one, two) = ("{\"line\":1,\"id\":\"a\",\"success\":true}\n", "{\"line\":4,\"id\":null,\"success\":false}\n");
        assert_eq!(open("").unwrap(), (0, 0));
        assert_eq!(open(&format!("{one}{two}{}", &two[..20])).unwrap(), (2, 1));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{one}{two}"));
        assert_eq!(open(one.trim_end()).unwrap(), (0, 0));
        for strange in [
            "notes\n".to_owned(),
            format!("{two}{one}"),
            format!("{one}{one}"),
            "{\"line\":1}\n".to_owned(),
            "my notes".to_owned(),
        ] {
            assert_eq!(open(&strange).unwrap_err().kind, Kind::Usage);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), strange, "left as it was");
        }
    }

    #[test]
    fn lines_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in");
        for (text, lines) in [("", 0), ("a", 1), ("a\n", 1), ("a\n\nb", 3)] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(count_lines(&mut File::open(&path).unwrap()).unwrap(), lines);
        }
    }
}
