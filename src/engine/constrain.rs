//! Answers of a given form: JSON of a schema, a regular expression, a grammar.
//!
//! Before every token the grammar says which tokens may come; the sampler chooses among those, so an answer that was
//! not cut short has the form whatever the model would rather say. The grammars are run by `llguidance`
//! (<https://github.com/guidance-ai/llguidance>). What a schema asks for and cannot be promised is refused beforehand.

mod numbers;
mod pattern;
mod recursion;
pub mod response_format;
mod schema;
mod token_trie;
mod wait;

use super::load::Engine;
use crate::error::{Error, Kind, Result};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob};
use llguidance::{Matcher, ParserFactory};
use numbers::Place;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
pub(super) use token_trie::TokenTrie;
use wait::Wait;

/// The form of an answer.
#[derive(Clone, Debug)]
pub struct Constraint {
    grammar: Arc<TopLevelGrammar>,
    /// The answer is one JSON value and ends with it.
    json: bool,
    /// What the answer is free up to, one after another.
    waits: Vec<Wait>,
}

impl Constraint {
    /// JSON that a schema allows.
    ///
    /// # Errors
    /// `Usage` for what cannot be promised, with the keyword and its JSON pointer.
    pub fn json_schema(schema: &Value) -> Result<Self> {
        checked_schema(schema).map(Constraint::json)
    }

    /// Any JSON object.
    pub fn json_object() -> Self {
        let object = Map::from_iter([("type".to_owned(), json!("object"))]);
        Constraint::json(schema::with_options(object))
    }

    /// Any JSON value: also a list, text, number, true, false or null.
    pub fn json_value() -> Self {
        Constraint::json(schema::with_options(Map::new()))
    }

    fn json(schema: Value) -> Self {
        Constraint { json: true, ..Constraint::of(TopLevelGrammar::from_json_schema(schema)) }
    }

    fn of(grammar: TopLevelGrammar) -> Self {
        Constraint { grammar: Arc::new(grammar), json: false, waits: Vec::new() }
    }

    /// Text that a regular expression matches as a whole, in the syntax of the
    /// [`regex`](https://docs.rs/regex/latest/regex/#syntax) crate, without look-around and anchors.
    ///
    /// # Errors
    /// `Usage` when it cannot be read.
    pub fn regex(pattern: &str) -> Result<Self> {
        // It is the whole text that must match, so anchors around it say nothing.
        let inner = pattern.strip_prefix('^').unwrap_or(pattern);
        let escaped = inner.len() - inner.trim_end_matches('$').trim_end_matches('\\').len();
        let inner = inner.strip_suffix('$').filter(|_| escaped % 2 == 1).unwrap_or(inner);
        let grammar = TopLevelGrammar::from_regex(inner);
        trial(&grammar).map_err(|e| Error::usage(format!("regular expression: {e}")))?;
        Ok(Constraint::of(grammar))
    }

    /// Text of a [Lark grammar](https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) whose first rule is
    /// `start`. Schemas in it (`%json {...}`) are held to as those of [`Constraint::json_schema`]. Special tokens are
    /// written `<|name|>`; whether the model has them is known only when an answer begins.
    ///
    /// # Errors
    /// `Usage` for a schema that cannot be promised.
    pub fn lark(grammar: &str) -> Result<Self> {
        Ok(Constraint::of_checked(with_checked_schemas(grammar)?))
    }

    /// Of a Lark grammar whose schemas are checked already.
    pub(super) fn of_checked(grammar: String) -> Self {
        Constraint::of(TopLevelGrammar::from_lark(grammar))
    }

    /// The form begins behind the first `text`; up to there the answer is free, and cannot end.
    #[must_use]
    pub fn after(mut self, text: &str) -> Self {
        if !text.is_empty() {
            self.waits.insert(0, Wait::until(text));
        }
        self
    }

    /// The answer is free, and may end, unless `open` comes, with `line` at the beginning of a line only: there the form
    /// begins.
    #[must_use]
    pub(super) fn once(mut self, open: &str, line: bool) -> Self {
        self.waits.push(Wait::unless(open, line));
        self
    }

    /// Nothing counts within a block that the answer begins with.
    #[must_use]
    pub(super) fn outside(mut self, open: &str, close: &str) -> Self {
        self.waits.iter_mut().for_each(|wait| wait.outside(open, close));
        self
    }

    /// Whether the answer may end before the form begins, or without it.
    pub(super) fn is_optional(&self) -> bool {
        self.waits.iter().any(Wait::is_optional)
    }
}

/// A schema as grammars take it, if it can be promised.
///
/// # Errors
/// As [`Constraint::json_schema`].
pub(super) fn checked_schema(schema: &Value) -> Result<Value> {
    let checked = schema::check(schema, false)?.schema;
    let Err(error) = trial(&TopLevelGrammar::from_json_schema(checked.clone())) else { return Ok(checked) };
    // The library names no place; a part that fails alone is it.
    for part in schema::check(schema, true)?.parts {
        let fields = if let Value::Object(fields) = part.schema { fields } else { Map::new() };
        let alone = TopLevelGrammar::from_json_schema(schema::with_options(fields));
        if let Err(error) = trial(&alone) {
            let why = part.wants.map_or_else(|| format!("cannot be promised: {error}"), str::to_owned);
            let place = if part.place.is_empty() { "its root" } else { &part.place };
            return Err(Error::usage(format!("schema: what stands at {place} {why}")));
        }
    }
    Err(Error::usage(format!("schema: it cannot be promised: {error}")))
}

/// A Lark grammar with its schemas written anew.
fn with_checked_schemas(grammar: &str) -> Result<String> {
    const MARK: &str = "%json";
    let (mut out, mut rest) = (String::with_capacity(grammar.len()), grammar);
    while let Some(at) = rest.find(MARK) {
        let (before, after) = rest.split_at(at + MARK.len());
        out.push_str(before);
        rest = after;
        if !after.trim_start().starts_with('{') {
            continue;
        }
        let mut values = serde_json::Deserializer::from_str(after).into_iter::<Value>();
        let schema = match values.next() {
            Some(Ok(schema)) => schema,
            Some(Err(e)) => return Err(Error::usage(format!("grammar: the schema behind `%json` is no JSON: {e}"))),
            None => continue,
        };
        Constraint::json_schema(&schema).map_err(|e| e.context("grammar"))?;
        out.push(' ');
        out.push_str(&schema::check(&schema, false)?.schema.to_string());
        rest = &after[values.byte_offset()..];
    }
    out.push_str(rest);
    Ok(out)
}

/// Whether the library takes a grammar; tokens of one byte suffice to know.
fn trial(grammar: &TopLevelGrammar) -> Result<(), String> {
    static FACTORY: OnceLock<Result<ParserFactory, String>> = OnceLock::new();
    let make = || token_trie::factory(ApproximateTokEnv::single_byte_env(), false).map_err(|e| e.to_string());
    let factory = FACTORY.get_or_init(make).as_ref().map_err(Clone::clone)?;
    let mut matcher = Matcher::new(factory.create_parser(grammar.clone()));
    match matcher.get_error() {
        Some(error) => Err(one_line(&error)),
        None => matcher.compute_mask().map(|_| ()).map_err(|e| format!("nothing can match ({})", one_line(&e.to_string()))),
    }
}

fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('<'));
    let mut line = lines.take(2).collect::<Vec<_>>().join("; ");
    if line.len() > 300 {
        let end = (0..=300).rev().find(|at| line.is_char_boundary(*at)).unwrap_or(0);
        line.truncate(end);
        line.push_str("...");
    }
    line
}

/// An answer that grows within a form.
pub struct Constrained<'e> {
    trie: &'e TokenTrie,
    matcher: Matcher,
    json: bool,
    /// What the form waits for.
    waits: VecDeque<Wait>,
    /// The form could not begin where it was to: the answer is free.
    missed: bool,
    mask: Option<SimpleVob>,
    /// The first token that the form is about.
    first: bool,
    /// Where the JSON stands, and its last byte.
    place: Place,
    last: u8,
    finished: bool,
}

impl<'e> Constrained<'e> {
    /// The first call for an engine takes as long as a few hundred tokens.
    ///
    /// # Errors
    /// `Usage` for a grammar that cannot be used, `Unsupported` for a tokenizer that cannot.
    pub fn new(engine: &'e Engine, constraint: &Constraint) -> Result<Self> {
        Constrained::over(engine.token_trie()?, constraint)
    }

    fn over(trie: &'e TokenTrie, constraint: &Constraint) -> Result<Self> {
        let matcher = trie.matcher((*constraint.grammar).clone());
        if let Some(error) = matcher.get_error() {
            return Err(Error::usage(format!("grammar: {}", one_line(&error))));
        }
        Ok(Constrained {
            trie,
            matcher,
            json: constraint.json,
            waits: constraint.waits.iter().cloned().collect(),
            missed: false,
            mask: None,
            first: true,
            place: Place::default(),
            last: 0,
            finished: false,
        })
    }

    /// Which tokens may come next: bit `id % 32` of word `id / 32`. `None`: all.
    ///
    /// # Errors
    /// `Unsupported` when the grammar becomes too complex, or leads to where no token can follow.
    pub fn mask(&mut self) -> Result<Option<&[u32]>> {
        match self.waits.front() {
            Some(wait) if wait.is_optional() => return Ok(None),
            Some(_) => return Ok(Some(self.trie.no_end.as_slice())),
            None if self.missed => return Ok(None),
            None => {}
        }
        let mut mask = self.matcher.compute_mask().map_err(|e| lost(&e.to_string()))?;
        // White space behind the value of an answer has no end; what is taken away from its beginning cannot count.
        let at_end = self.json && self.trie.has_end && !self.first && self.matcher.is_accepting().unwrap_or(false);
        if at_end || (self.first && self.trie.drops_space) {
            mask.sub(&self.trie.spaces);
        }
        if self.json {
            self.place.limit(&mut mask, &self.trie.lengthening);
        }
        if mask.is_zero() {
            return Err(lost("no token of this model can come next"));
        }
        Ok(Some(self.mask.insert(mask).as_slice()))
    }

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// `Unsupported` for one that [`mask`](Self::mask) forbids.
    pub fn commit(&mut self, id: u32) -> Result<()> {
        let bytes = self.trie.bytes(id);
        if let Some(wait) = self.waits.front_mut() {
            let optional = wait.is_optional();
            if let Some(rest) = wait.pass(bytes) {
                // A token may hold the mark and more. White space there is free; anything else was not asked for.
                self.missed = optional && !rest.trim_ascii().is_empty();
                self.waits.pop_front();
            }
            return Ok(());
        }
        if self.missed {
            return Ok(());
        }
        self.first = false;
        bytes.iter().for_each(|byte| self.place.push(*byte));
        self.last = bytes.last().copied().unwrap_or(self.last);
        self.matcher.consume_token(id).map_err(|e| lost(&e.to_string()))?;
        // A number may go on; everything else in JSON shows its end.
        let closed = !self.trie.has_end || (self.json && !self.last.is_ascii_digit());
        self.finished = self.matcher.is_stopped() || (closed && self.matcher.is_accepting().map_err(|e| lost(&e.to_string()))?);
        Ok(())
    }

    /// Whether the form is complete and nothing more can come.
    pub fn finished(&self) -> bool {
        self.finished
    }

    /// The tokens that must come next, as far as the form alone says so, `room` at most; added to `ids`.
    pub fn forced(&mut self, room: usize, ids: &mut Vec<u32>) {
        if self.trie.forces && self.waits.is_empty() && !self.missed && !self.finished && room > 0 {
            ids.extend(self.matcher.compute_ff_tokens().into_iter().take(room));
        }
    }
}

fn lost(why: &str) -> Error {
    Error::new(Kind::Unsupported, format!("the form of the answer cannot be kept up: {}", one_line(why)))
}

impl Engine {
    /// The tokens as grammars see them; made by the first call.
    fn token_trie(&self) -> Result<&TokenTrie> {
        let make = || TokenTrie::new(&self.tokenizer, self.vocab()).map_err(|e| e.to_string());
        self.trie.get_or_init(make).as_ref().map_err(|e| Error::unsupported(e.clone()))
    }
}

#[cfg(test)]
#[path = "constrain/form_tests.rs"]
pub(super) mod tests;
