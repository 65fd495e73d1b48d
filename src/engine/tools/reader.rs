//! Calls told from text while an answer streams.

use super::super::thinking::overlap;
use super::notation::PYTHON_TAG;
use super::{Call, Notation, Tools};

/// What an answer says.
#[derive(Debug, PartialEq)]
pub(in crate::engine) enum Event<'a> {
    Text(&'a str),
    Call(Call),
}

type OnEvent<'a> = &'a mut dyn FnMut(Event);

/// Takes an answer in arbitrary pieces. A call counts only where a model writes one and only if it can be read and names a
/// tool that was offered; everything else is text as it stands. White space around calls belongs to neither.
pub(in crate::engine) struct Reader {
    notation: Notation,
    tools: Tools,
    place: Place,
    /// What cannot be told yet.
    held: String,
    line: Line,
    /// The last thing was a call.
    behind: bool,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// Nothing said yet, where a call may be the whole answer.
    Start,
    /// It may be one.
    Whole,
    /// It is none, and none can come.
    Prose,
    /// Between calls.
    Outside,
    Inside(Scan),
}

/// How far the inside of a call was searched for its end.
#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    at: usize,
    /// Within this quote.
    quote: Option<&'static str>,
}

/// The line that is being written.
#[derive(Clone, Default)]
struct Line {
    /// Its first characters, without white space.
    begin: String,
    /// Within a block of code.
    fenced: bool,
}

const FENCE: &str = "```";

impl Line {
    fn pass(&mut self, text: &str) {
        for c in text.chars() {
            if c == '\n' {
                self.fenced ^= self.begin == FENCE;
                self.begin.clear();
            } else if self.begin.len() < FENCE.len() && !(self.begin.is_empty() && c.is_whitespace()) {
                self.begin.push(c);
            }
        }
    }
}

impl Reader {
    pub fn new(notation: Notation, tools: Tools) -> Self {
        // Some models leave out the marks of JSON.
        let place = if matches!(notation, Notation::Hermes | Notation::Llama3) { Place::Start } else { Place::Outside };
        Reader { notation, tools, place, held: String::new(), line: Line::default(), behind: false }
    }

    pub fn push(&mut self, text: &str, on_event: OnEvent) {
        self.held.push_str(text);
        loop {
            match self.place {
                Place::Start => {
                    let Some(call) = self.may_be_whole() else { return };
                    self.place = match self.notation.marks() {
                        _ if call => Place::Whole,
                        Some(_) => Place::Outside,
                        None => Place::Prose,
                    };
                }
                Place::Whole => return,
                Place::Prose => return self.say(self.held.len(), on_event),
                Place::Outside => {
                    if !self.open(on_event) {
                        return;
                    }
                }
                Place::Inside(_) => {
                    if !self.close(on_event) {
                        return;
                    }
                }
            }
        }
    }

    /// The answer has ended.
    pub fn finish(&mut self, on_event: OnEvent) {
        match self.place {
            Place::Start | Place::Prose | Place::Outside => {}
            Place::Whole => match self.notation.parse(unfenced(&self.held), &self.tools) {
                Some(calls) => return calls.into_iter().for_each(|call| on_event(Event::Call(call))),
                None => self.place = Place::Prose,
            },
            Place::Inside(_) => {
                // The end of the answer ends a call too.
                if let Some(calls) = self.notation.parse(&self.held, &self.tools) {
                    return calls.into_iter().for_each(|call| on_event(Event::Call(call)));
                }
                // A quote too many hides the end from the scan.
                let (open, close) = self.notation.marks().unwrap_or_default();
                let end = self.held.find(close).map_or(self.held.len(), |at| at + close.len());
                let rest = self.held.split_off(end);
                self.held.insert_str(0, open);
                self.say(self.held.len(), on_event);
                self.place = Place::Outside;
                self.push(&rest, on_event);
                return self.finish(on_event);
            }
        }
        if self.behind && self.held.trim().is_empty() {
            return self.held.clear();
        }
        self.say(self.held.len(), on_event);
    }

    /// Whether the answer begins as a call that is all of it; `None` if that cannot be told yet.
    fn may_be_whole(&self) -> Option<bool> {
        let begun: String = self.held.chars().filter(|c| !c.is_whitespace()).collect();
        let mut open = false;
        for tool in self.tools.list() {
            for lead in ["", "[", "```json", "```json[", "```", PYTHON_TAG] {
                let call = format!("{lead}{{\"name\":\"{}\"", tool.name);
                if begun.starts_with(&call) {
                    return Some(true);
                }
                open |= call.starts_with(&begun);
            }
        }
        if open { None } else { Some(false) }
    }

    /// Looks for the beginning of a call. True if there is more to be told.
    fn open(&mut self, on_event: OnEvent) -> bool {
        let (open, _) = self.notation.marks().unwrap_or_default();
        let Some(at) = self.held.find(open) else {
            let ready = self.held.len() - overlap(&self.held, open);
            let ready = self.held[..ready].trim_end().len();
            self.say(ready, on_event);
            return false;
        };
        let rest = &self.held[at + open.len()..];
        let begins = match begins(self.notation, rest.trim_start()) {
            None => return false,
            Some(begins) => begins,
        };
        let before = self.held[..at].trim_end().len();
        let space = at - before;
        let mut line = self.line.clone();
        line.pass(&self.held[..at]);
        // A mark of plain characters may be spoken of; the model's own tokens may not.
        let placed = self.notation != Notation::Hermes || (line.begin.is_empty() && !line.fenced);
        if !(begins && placed) {
            self.say(at + open.len(), on_event);
            return true;
        }
        self.say(before, on_event);
        self.line = line;
        self.held.drain(..space + open.len());
        self.place = Place::Inside(Scan::default());
        true
    }

    /// Looks for the end of a call. True if there is more to be told.
    fn close(&mut self, on_event: OnEvent) -> bool {
        let Place::Inside(mut scan) = self.place else { return true };
        let (open, close) = self.notation.marks().unwrap_or_default();
        let found = scan.find(&self.held, self.notation, close);
        self.place = Place::Inside(scan);
        if !found {
            return false;
        }
        match self.notation.parse(&self.held[..scan.at], &self.tools) {
            Some(calls) => {
                calls.into_iter().for_each(|call| on_event(Event::Call(call)));
                self.held.drain(..scan.at + close.len());
                self.behind = true;
            }
            None => {
                self.held.insert_str(0, open);
                self.say(open.len() + scan.at + close.len(), on_event);
            }
        }
        self.place = Place::Outside;
        true
    }

    /// Hands on the first `ready` bytes as text.
    fn say(&mut self, ready: usize, on_event: OnEvent) {
        let rest = self.held.split_off(ready);
        let text = if self.behind { self.held.trim_start() } else { &self.held };
        if !text.is_empty() {
            self.behind = false;
            self.line.pass(text);
            on_event(Event::Text(text));
        }
        self.held = rest;
    }
}

/// What stands in a block of code that is the whole text.
fn unfenced(text: &str) -> &str {
    let inner = text.trim().strip_prefix(FENCE).and_then(|text| text.strip_suffix(FENCE));
    inner.map_or(text, |inner| inner.strip_prefix("json").unwrap_or(inner))
}

/// Whether a call may begin so; `None` if that cannot be told yet.
fn begins(notation: Notation, rest: &str) -> Option<bool> {
    let first = rest.chars().next()?;
    match notation {
        Notation::Hermes | Notation::Llama3 => Some(matches!(first, '{' | '[')),
        Notation::Pythonic => Some(first == '[' || first == '_' || first.is_alphabetic()),
        Notation::FunctionGemma | Notation::Gemma4 => {
            let word = "call:";
            if rest.len() < word.len() && word.starts_with(rest) { None } else { Some(rest.starts_with(word)) }
        }
    }
}

impl Scan {
    /// Goes on to `close` outside of quotes. False if it is not there yet.
    fn find(&mut self, text: &str, notation: Notation, close: &str) -> bool {
        let quotes = notation.quotes();
        while let Some(c) = text[self.at..].chars().next() {
            let rest = &text[self.at..];
            let might = |mark: &str| rest.len() < mark.len() && mark.starts_with(rest);
            if self.quote.is_none() && rest.starts_with(close) {
                return true;
            }
            if let Some(quote) = quotes.iter().find(|quote| rest.starts_with(**quote)) {
                if self.quote.is_none_or(|open| open == *quote) {
                    self.quote = if self.quote.is_none() { Some(quote) } else { None };
                }
                self.at += quote.len();
            } else if (self.quote.is_none() && might(close)) || quotes.iter().any(|quote| might(quote)) {
                return false;
            } else if c == '\\' && self.quote.is_some() && notation.quote().is_none() {
                let Some(next) = rest[1..].chars().next() else { return false };
                self.at += 1 + next.len_utf8();
            } else {
                self.at += c.len_utf8();
            }
        }
        false
    }
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
