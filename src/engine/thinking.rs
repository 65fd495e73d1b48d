//! Reasoning before an answer: told apart while it streams, and never part of the answer.
//!
//! A block is recognised only where a model puts one: as the first thing it says, or opened by the chat
//! template at the end of the prompt. The same spelling later on is ordinary text.

use super::chat::{Message, RenderOptions, Rendered};
use super::generate::{Answer, Request, write};
use super::load::Engine;
use super::session::Session;
use super::tokenizer::Tokenizer;
use super::tools::{Call, Dialect, Tools};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// What encloses the reasoning of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tags {
    pub open: &'static str,
    pub close: &'static str,
}

/// Tags in use: Qwen, SmolLM, Phi, LFM and DeepSeek's distillates; Mistral's Magistral; Gemma 4, which names
/// the channel in the first line.
const TAGS: [Tags; 3] = [
    Tags { open: "<think>", close: "</think>" },
    Tags { open: "[THINK]", close: "[/THINK]" },
    Tags { open: "<|channel>thought\n", close: "<channel|>" },
];

impl Tags {
    /// The tags of a model: those that are tokens of its own or that its template speaks of. A model that
    /// knows none does not reason, and what it writes is answer whatever it looks like.
    pub fn of(tokenizer: &Tokenizer, template: Option<&str>) -> Option<Tags> {
        let known = |tags: &&Tags| {
            tokenizer.token_id(tags.close).is_some() || template.is_some_and(|template| template.contains(tags.close))
        };
        TAGS.iter().find(known).copied()
    }
}

/// Ids of special tokens that spell a tag; the text of an answer has to show them.
pub(super) fn tag_ids(tokenizer: &Tokenizer) -> Vec<u32> {
    // The name of Gemma's channel is no part of its token.
    let opens = |tags: &Tags, text: &str| tags.open.strip_prefix(text).is_some_and(|rest| !rest.contains(['>', ']']));
    let is_tag = |text: &str| TAGS.iter().any(|tags| opens(tags, text) || tags.close == text);
    tokenizer.special_tokens().iter().filter(|token| is_tag(&token.text)).map(|token| token.id).collect()
}

/// Whether a model is asked to reason, and whether its thoughts are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Think {
    /// As the template does when nothing is asked; shown.
    #[default]
    Auto,
    /// Asked for and shown.
    On,
    /// Not wanted.
    Off,
    /// Asked for and not shown.
    Hide,
}

impl Think {
    pub const NAMES: [&'static str; 4] = ["auto", "on", "off", "hide"];

    /// What the template is told.
    pub fn enable(self) -> Option<bool> {
        match self {
            Think::Auto => None,
            Think::On | Think::Hide => Some(true),
            Think::Off => Some(false),
        }
    }

    pub fn shows(self) -> bool {
        self != Think::Hide
    }
}

impl FromStr for Think {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Think::Auto),
            "on" => Ok(Think::On),
            "off" => Ok(Think::Off),
            "hide" => Ok(Think::Hide),
            _ => Err(Error::usage(format!("think is {text:?}, but must be one of {}", Self::NAMES.join(", ")))),
        }
    }
}

impl fmt::Display for Think {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Think::Auto => "auto",
            Think::On => "on",
            Think::Off => "off",
            Think::Hide => "hide",
        })
    }
}

/// A prompt, and whether the answer to it begins inside a reasoning block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub ids: Vec<u32>,
    pub inside: bool,
}

impl Prompt {
    /// For a conversation that the assistant is to continue, and may call `tools` in.
    pub fn chat(engine: &Engine, messages: &[Message], tools: Option<&Tools>, enable_thinking: Option<bool>) -> Result<Self> {
        let rendered = render(engine, messages, tools, enable_thinking)?;
        let inside = tags(engine).is_some_and(|tags| rendered.ends_inside(tags.open.trim_end()));
        Ok(Prompt { ids: engine.tokenizer.encode_prompt(&rendered)?, inside })
    }
}

/// The text of a prompt, see [`Prompt::chat`].
pub fn render(engine: &Engine, messages: &[Message], tools: Option<&Tools>, enable_thinking: Option<bool>) -> Result<Rendered> {
    let dialect = Dialect::of(engine);
    let declared = tools.filter(|_| dialect.declares).map(Tools::json);
    let options = RenderOptions { add_generation_prompt: true, tools: declared.as_ref(), enable_thinking, ..Default::default() };
    engine.template.render(&dialect.prepare(messages, tools), &options)
}

/// The tags of a loaded model.
pub fn tags(engine: &Engine) -> Option<Tags> {
    Tags::of(&engine.tokenizer, engine.bundle.chat_template.as_deref())
}

/// A piece of what a model says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    Thought(&'a str),
    Answer(&'a str),
    /// A call of a tool, see [`super::tools`].
    Call(&'a Call),
}

/// [`generate`](super::generate::generate) with the reasoning taken out: the answer's text is the answer only. A form holds
/// for the answer: where the prompt ends inside a reasoning block it begins behind that block, else with the first token.
pub fn generate_parts(
    session: &mut Session,
    prompt: &Prompt,
    request: &Request,
    on_part: &mut dyn FnMut(Part),
    stopped: &dyn Fn() -> bool,
) -> Result<Answer> {
    let splitter = Splitter::new(tags(session.engine()), prompt.inside);
    write(session, &prompt.ids, request, splitter, on_part, stopped)
}

/// Tells thoughts from the answer in text that arrives in arbitrary pieces. Tags, and white space around
/// thoughts, belong to neither.
pub struct Splitter {
    tags: Option<Tags>,
    place: Place,
    /// What cannot be told yet: white space, or the beginning of a tag.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nothing said yet; a block may be opened.
    Start,
    /// The prompt opened a block; some models open it again.
    Opened,
    /// In a block, before its first word.
    Inside,
    Thought,
    /// Behind a block, before the answer's first word.
    Closed,
    Answer,
}

impl Splitter {
    /// `inside`: the prompt ends inside a block.
    pub fn new(tags: Option<Tags>, inside: bool) -> Self {
        let place = match (tags, inside) {
            (None, _) => Place::Answer,
            (Some(_), true) => Place::Opened,
            (Some(_), false) => Place::Start,
        };
        Splitter { tags, place, held: String::new() }
    }

    pub(super) fn tags(&self) -> Option<Tags> {
        self.tags
    }

    /// What ends the block that the prompt opened, before anything was said.
    pub(super) fn opened(&self) -> Option<&'static str> {
        self.tags.filter(|_| self.place == Place::Opened).map(|tags| tags.close)
    }

    /// Takes the next piece of text and hands on what can be told.
    pub fn push(&mut self, text: &str, on_part: &mut dyn FnMut(Part)) {
        self.held.push_str(text);
        let Some(Tags { open, close }) = self.tags else { return self.say_answer(on_part) };
        loop {
            let words = self.held.trim_start();
            match self.place {
                Place::Start | Place::Opened => {
                    if let Some(rest) = words.strip_prefix(open) {
                        self.held = rest.to_owned();
                        self.place = Place::Inside;
                    } else if open.starts_with(words) {
                        return;
                    } else {
                        self.place = if self.place == Place::Start { Place::Answer } else { Place::Inside };
                    }
                }
                Place::Inside | Place::Closed => {
                    self.held = words.to_owned();
                    if self.held.is_empty() {
                        return;
                    }
                    self.place = if self.place == Place::Inside { Place::Thought } else { Place::Answer };
                }
                Place::Thought => {
                    let Some(at) = self.held.find(close) else {
                        let ready = self.held.len() - overlap(&self.held, close);
                        return self.say_thought(ready, on_part);
                    };
                    let rest = self.held.split_off(at + close.len());
                    self.say_thought(at, on_part);
                    self.held = rest;
                    self.place = Place::Closed;
                }
                Place::Answer => return self.say_answer(on_part),
            }
        }
    }

    /// The text has ended: hands on what was held back. True if it ended inside a block.
    pub fn finish(&mut self, on_part: &mut dyn FnMut(Part)) -> bool {
        let unfinished = matches!(self.place, Place::Opened | Place::Inside | Place::Thought);
        match unfinished {
            true => self.say_thought(self.held.len(), on_part),
            false => self.say_answer(on_part),
        }
        self.held.clear();
        unfinished
    }

    /// Hands on the first `ready` bytes without the white space at their end, which stays held.
    fn say_thought(&mut self, ready: usize, on_part: &mut dyn FnMut(Part)) {
        let rest = self.held.split_off(self.held[..ready].trim_end().len());
        if !self.held.is_empty() {
            on_part(Part::Thought(&self.held));
        }
        self.held = rest;
    }

    fn say_answer(&mut self, on_part: &mut dyn FnMut(Part)) {
        if !self.held.is_empty() {
            on_part(Part::Answer(&self.held));
            self.held.clear();
        }
    }
}

/// Length of the longest end of `text` that `tag` begins with.
pub(super) fn overlap(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|&len| text.ends_with(&tag[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THINK: Tags = TAGS[0];

    /// Thoughts and answer of `pieces`, and whether the block stayed open.
    fn split(tags: Option<Tags>, inside: bool, pieces: &[&str]) -> (String, String, bool) {
        let mut splitter = Splitter::new(tags, inside);
        let (mut thought, mut answer) = (String::new(), String::new());
        let mut collect = |part: Part| match part {
            Part::Thought(text) => thought.push_str(text),
            Part::Answer(text) => answer.push_str(text),
            Part::Call(_) => {}
        };
        for piece in pieces {
            splitter.push(piece, &mut collect);
        }
        let unfinished = splitter.finish(&mut collect);
        (thought, answer, unfinished)
    }

    /// `text` in one piece, one character at a time, and cut once or twice at every place, always gives the same.
    fn check(tags: Tags, inside: bool, text: &str, thought: &str, answer: &str, unfinished: bool) {
        let expected = (thought.to_owned(), answer.to_owned(), unfinished);
        let cuts: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
        let characters: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        assert_eq!(split(Some(tags), inside, &characters), expected, "{text:?} by characters");
        for &a in &cuts {
            for &b in cuts.iter().filter(|&&b| b >= a) {
                let pieces = [&text[..a], &text[a..b], &text[b..]];
                assert_eq!(split(Some(tags), inside, &pieces), expected, "{pieces:?}");
            }
        }
    }

    #[test]
    fn p06_reasoning_is_never_in_the_answer() {
        // Opened by the model.
        check(THINK, false, "<think>\nhm, é\n</think>\n\nYes.", "hm, é", "Yes.", false);
        check(THINK, false, "\n<think>a\n\n b</think>Yes", "a\n\n b", "Yes", false);
        // Opened by the template: only the closing tag is seen, or the tag is said again.
        check(THINK, true, "hm\n</think>\n\nYes.\n", "hm", "Yes.\n", false);
        check(THINK, true, "<think>\nhm</think>Yes", "hm", "Yes", false);
        // Empty blocks.
        check(THINK, false, "<think>\n\n</think>\n\nYes", "", "Yes", false);
        check(THINK, true, "\n</think>\n\nYes", "", "Yes", false);
        // Other spellings.
        check(TAGS[1], false, "[THINK]hm[/THINK]Yes", "hm", "Yes", false);
        check(TAGS[2], false, "<|channel>thought\nhm<channel|>Yes", "hm", "Yes", false);
    }

    #[test]
    fn p06_a_budget_spent_in_the_block_is_flagged() {
        check(THINK, false, "<think>\nhm, ", "hm,", "", true);
        check(THINK, true, "so </thi", "so </thi", "", true);
        check(THINK, true, "", "", "", true);
        check(THINK, false, "<think>", "", "", true);
        check(THINK, false, "<think>a</think>", "a", "", false);
    }

    #[test]
    fn literal_tags_survive() {
        let text = "  The tag <think> opens, </think> closes.";
        check(THINK, false, text, "", text, false);
        check(THINK, false, "<think>a</think>Write <think>b</think>.", "a", "Write <think>b</think>.", false);
        check(THINK, false, "</think> closes", "", "</think> closes", false);
        check(THINK, false, "<thinking> is no tag", "", "<thinking> is no tag", false);
        // An opening tag in thoughts, and what only looks like a closing one.
        check(THINK, true, "a <think> b </thin </think>c", "a <think> b </thin", "c", false);
        // A model that does not reason.
        assert_eq!(split(None, false, &["<think>a</th", "ink>b"]), (String::new(), "<think>a</think>b".into(), false));
        check(THINK, false, "<thi", "", "<thi", false);
        check(THINK, false, " \n", "", " \n", false);
    }

    #[test]
    fn think_has_names() {
        for name in Think::NAMES {
            assert_eq!(name.parse::<Think>().unwrap().to_string(), name);
        }
        assert!("yes".parse::<Think>().is_err());
        assert_eq!((Think::Auto.enable(), Think::Off.enable(), Think::Hide.enable()), (None, Some(false), Some(true)));
    }
}
