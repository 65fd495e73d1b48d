//! The line the user types on: history, completion, messages of several lines.

use super::repl_commands::COMMANDS;
use cactus::engine::conversation::{Overflow, Settings};
use cactus::engine::thinking::Think;
use cactus::error::{Error, Result};
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::config::BellStyle;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Cmd, CompletionType, Config, Context, Helper, KeyCode, KeyEvent, Modifiers};
use std::cell::Cell;
use std::path::{Path, PathBuf};

/// Encloses a message of several lines.
const DELIMITER: &str = "\"\"\"";
/// Messages that the history keeps.
const HISTORY: usize = 1000;

/// What was typed.
pub enum Input {
    Text(String),
    /// Ctrl-C; `empty`: there was nothing on the line.
    Interrupt {
        empty: bool,
    },
    /// Bytes that are no UTF-8 text; the line is lost.
    Unreadable,
    /// Ctrl-D.
    End,
}

/// Folder for what the user made and wants to keep: the history and saved conversations.
pub fn data_folder() -> Option<PathBuf> {
    Some(dirs::data_dir()?.join("cactus"))
}

pub struct Editor {
    lines: rustyline::Editor<Assistance, FileHistory>,
    /// `None` where there is no place for it.
    history: Option<PathBuf>,
}

impl Editor {
    pub fn new() -> Result<Self> {
        let unusable = |e: ReadlineError| Error::usage(format!("cannot use the terminal: {e}"));
        let config = Config::builder()
            .max_history_size(HISTORY)
            .map_err(unusable)?
            .completion_type(CompletionType::List)
            .bell_style(BellStyle::None)
            .bracketed_paste(true)
            .build();
        let mut lines = rustyline::Editor::with_config(config).map_err(unusable)?;
        lines.set_helper(Some(Assistance::default()));
        lines.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), Cmd::Newline);
        let history = data_folder().and_then(|folder| private_folder(&folder).map(|()| folder.join("history")));
        if let Some(history) = &history {
            // Missing at first; an unreadable one is started anew.
            let _ = lines.load_history(history);
        }
        Ok(Editor { lines, history })
    }

    /// Waits for a message.
    pub fn read(&mut self, prompt: &str) -> Result<Input> {
        if let Some(assistance) = self.lines.helper() {
            assistance.typed.set(false);
        }
        match self.lines.readline(prompt) {
            Ok(text) => Ok(Input::Text(text)),
            Err(ReadlineError::Interrupted) => {
                let typed = self.lines.helper().is_some_and(|assistance| assistance.typed.get());
                Ok(Input::Interrupt { empty: !typed })
            }
            Err(ReadlineError::Eof) => Ok(Input::End),
            Err(ReadlineError::Io(e)) if e.kind() == std::io::ErrorKind::InvalidData => Ok(Input::Unreadable),
            Err(e) => Err(Error::usage(format!("cannot read from the terminal: {e}"))),
        }
    }

    /// Keeps a message for the arrow keys, now and next time.
    pub fn remember(&mut self, text: &str) {
        let _ = self.lines.add_history_entry(text);
        if let Some(history) = &self.history {
            // A chat is worth more than its history.
            let _ = self.lines.append_history(history);
        }
    }
}

/// Makes a folder that only the user may look into.
pub fn private_folder(folder: &Path) -> Option<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder).ok()
}

/// The message in what was typed: without enclosing delimiters, and without line ends behind it.
pub fn message(typed: &str) -> &str {
    let text = typed.trim();
    let inner = text.strip_prefix(DELIMITER).and_then(|rest| rest.strip_suffix(DELIMITER));
    match inner.filter(|inner| !inner.contains(DELIMITER)) {
        Some(inner) => {
            let inner = inner.strip_prefix('\n').unwrap_or(inner);
            inner.strip_suffix('\n').unwrap_or(inner)
        }
        None => typed.trim_end_matches(['\n', '\r']),
    }
}

/// Completion, and when Enter ends a message.
#[derive(Default)]
struct Assistance {
    files: FilenameCompleter,
    /// Something stands on the line.
    typed: Cell<bool>,
}

/// What may stand behind a command, for completion.
enum Argument {
    Words(Vec<String>),
    File,
    None,
}

fn argument(command: &str, before: &str) -> Argument {
    let words = |list: &[&str]| Argument::Words(list.iter().map(|word| (*word).to_owned()).collect());
    match (command, before.split_whitespace().collect::<Vec<_>>().as_slice()) {
        ("/set", []) => words(&Settings::NAMES),
        ("/set", ["think"]) => words(&Think::NAMES),
        ("/set", ["overflow"]) => words(&Overflow::NAMES),
        ("/save" | "/load" | "/model", []) => Argument::File,
        _ => Argument::None,
    }
}

impl Completer for Assistance {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, context: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let Some(typed) = line.get(..pos).filter(|typed| typed.starts_with('/') && !typed.contains('\n')) else {
            return Ok((pos, Vec::new()));
        };
        let pairs = |words: &[String], start: usize| {
            let fitting = words.iter().filter(|word| word.starts_with(&typed[start..]));
            fitting.map(|word| Pair { display: word.clone(), replacement: format!("{word} ") }).collect::<Vec<_>>()
        };
        let Some((command, rest)) = typed.split_once(' ') else {
            let names: Vec<String> = COMMANDS.iter().map(|command| command.name.to_owned()).collect();
            return Ok((0, pairs(&names, 0)));
        };
        let start = typed.rfind(' ').map_or(0, |at| at + 1);
        let before = &rest[..rest.rfind(' ').map_or(0, |at| at + 1)];
        match argument(command, before) {
            Argument::Words(words) => Ok((start, pairs(&words, start))),
            Argument::File => self.files.complete(line, pos, context),
            Argument::None => Ok((pos, Vec::new())),
        }
    }
}

impl Hinter for Assistance {
    type Hint = String;

    /// Gives no hints; it is asked at every change, which tells whether the line is empty.
    fn hint(&self, line: &str, _pos: usize, _context: &Context<'_>) -> Option<String> {
        self.typed.set(!line.is_empty());
        None
    }
}

impl Highlighter for Assistance {}

impl Validator for Assistance {
    /// An opened delimiter keeps the message open.
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        let open = context.input().trim_start().strip_prefix(DELIMITER).is_some_and(|rest| !rest.contains(DELIMITER));
        Ok(if open { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Helper for Assistance {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_lose_delimiters_only() {
        assert_eq!(message("a\n  b\n\n"), "a\n  b");
        assert_eq!(message("  indented"), "  indented");
        assert_eq!(message("\"\"\"\n\na\n\n\"\"\"\n"), "\na\n");
        assert_eq!(message("\"\"\"a\"\"\""), "a");
        assert_eq!(message("\"\"\"a\"\"\" b \"\"\"c\"\"\""), "\"\"\"a\"\"\" b \"\"\"c\"\"\"");
        assert_eq!(message("\"\"\"doc\"\"\"\ncode"), "\"\"\"doc\"\"\"\ncode");
        assert_eq!(message("\"\"\""), "\"\"\"");
    }

    fn completed(line: &str) -> Vec<String> {
        let history = FileHistory::new();
        let (_, pairs) = Assistance::default().complete(line, line.len(), &Context::new(&history)).expect("candidates");
        pairs.into_iter().map(|pair| pair.replacement).collect()
    }

    #[test]
    fn commands_and_settings_are_completed() {
        assert_eq!(completed("/sy"), ["/system "]);
        assert!(completed("/").len() >= 14);
        assert_eq!(completed("/set tem"), ["temperature "]);
        assert_eq!(completed("/set think h"), ["hide "]);
        assert_eq!(completed("/set seed 1"), [""; 0]);
        assert_eq!(completed("hello /s"), [""; 0]);
        assert_eq!(completed("/clear x"), [""; 0]);
    }
}
