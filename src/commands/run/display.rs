//! How an answer is shown while it arrives: thoughts on standard error, the answer on standard output.

use super::markdown::Markdown;
use crate::commands::Outcome;
use crate::commands::terminal::Output;
use cactus::engine::thinking::Part;
use serde_json::json;
use std::io::{IsTerminal, Write};

const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

/// Whether escape codes may go to a stream that is a terminal (https://no-color.org).
fn colour_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
}

/// Whether standard output, and standard error, take escape codes.
pub fn colours() -> (bool, bool) {
    let wanted = colour_wanted();
    (wanted && std::io::stdout().is_terminal(), wanted && std::io::stderr().is_terminal())
}

/// `text` as a remark, if standard error takes escape codes.
pub fn dimmed(text: &str) -> String {
    if colours().1 { format!("{DIM}{text}{RESET}") } else { text.to_owned() }
}

/// Which parts of an answer are shown.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    pub thoughts: bool,
    pub answer: bool,
    /// Calls of tools, each as a line of JSON.
    pub calls: bool,
    /// The answer is marked up for reading if standard output is a terminal.
    pub markdown: bool,
}

/// One answer on its way to the user.
pub struct Display {
    output: Output,
    shown: Shown,
    markdown: Option<Markdown>,
    dim: bool,
    thinking: bool,
    /// The end of the answer so far is the end of a line.
    line_ended: bool,
    closed: Outcome,
    /// The last thing was a call.
    called: bool,
}

impl Display {
    /// On standard output.
    pub fn new(shown: Shown) -> Self {
        Self::to(Output::Stdout, shown)
    }

    pub fn to(output: Output, shown: Shown) -> Self {
        let (stdout, dim) = colours();
        let readable = shown.markdown && std::io::stdout().is_terminal();
        let markdown = readable.then(|| Markdown::new(stdout));
        Display { output, shown, markdown, dim, thinking: false, line_ended: true, closed: Ok(()), called: false }
    }

    pub fn part(&mut self, part: Part) {
        match part {
            Part::Thought(text) if self.shown.thoughts => {
                let begin = if !self.thinking && self.dim { DIM } else { "" };
                self.thinking = true;
                // A closed standard error is no reason to stop.
                let _ = write!(std::io::stderr(), "{begin}{text}");
            }
            Part::Answer(text) if self.shown.answer => {
                self.end_thoughts("\n");
                self.line_ended = text.ends_with('\n');
                self.called = false;
                let text = self.markdown.as_mut().map_or_else(|| text.to_owned(), |markdown| markdown.push(text));
                self.print(&text);
            }
            Part::Call(call) if self.shown.calls => {
                self.end_thoughts("\n");
                let line = format!("{}\n", json!({"name": call.name, "arguments": call.arguments}));
                let begin = if self.line_ended { "" } else { "\n" };
                self.print(&format!("{begin}{line}"));
                (self.line_ended, self.called) = (true, true);
            }
            _ => {}
        }
    }

    /// Ends the thoughts' last line; `gap` sets them off from what follows.
    fn end_thoughts(&mut self, gap: &str) {
        if std::mem::take(&mut self.thinking) {
            let end = if self.dim { RESET } else { "" };
            let _ = write!(std::io::stderr(), "{end}\n{gap}");
        }
    }

    fn print(&mut self, text: &str) {
        if self.closed.is_ok() && !text.is_empty() {
            self.closed = self.output.write(text);
        }
    }

    /// Whether nothing more can be shown.
    pub fn is_closed(&self) -> bool {
        self.closed.is_err()
    }

    /// The answer is complete: shows what was held back, ends the line, and gives the output back.
    pub fn finish(mut self) -> Outcome<Output> {
        self.end_thoughts("");
        if self.shown.answer {
            let rest = self.markdown.as_mut().map(Markdown::finish).unwrap_or_default();
            let on_terminal = self.markdown.is_some();
            let end = if (on_terminal || self.called) && self.line_ended { "" } else { "\n" };
            self.print(&(rest + end));
        }
        self.closed.map(|()| self.output)
    }
}
