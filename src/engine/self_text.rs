//! Text that a model writes itself, in its own chat template: what it will read and write when it is used,
//! with nothing to download.
//!
//! An aligned model that is given its template up to an open user turn writes a question of the kind it was
//! trained on, and then answers it (Magpie: Xu et al. 2024, <https://arxiv.org/abs/2406.08464>). Tokens are
//! drawn at temperature 1, so the text is a sample of what the model thinks likely.

use super::chat::{ChatTemplate, Message, RenderOptions, Rendered, Role};
use super::evaluate::task::loops;
use super::sampler::{Sampler, Sampling};
use super::tokenizer::Tokenizer;
use super::{Engine, LoadOptions, Session};
use crate::error::Result;
use crate::model::Bundle;
use crate::model::bundle::Provenance;
use crate::model::calibrate::SAMPLE;
use crate::model::convert::{self, Options};
use crate::model::import::Checkpoint;
use crate::model::staging::Staging;
use crate::quant::Bits;
use jiff::civil::DateTime;
use std::path::Path;

/// What to write.
#[derive(Clone, Debug)]
pub struct Amount {
    /// Tokens in all, those of the template included.
    pub tokens: usize,
    /// Tokens of a text at most.
    pub longest: usize,
    /// Other seeds give other texts.
    pub seed: u64,
}

/// Stands where a turn is to be written; private use, so no template has a rule for it.
const MARK: char = '\u{f8ff}';
/// Texts shorter than this are not kept.
const SHORTEST: usize = 16;
/// A user's turn may take this share of a text, so that there is room for the answer.
const USER_SHARE: usize = 3;
/// The date that templates see: that of the day would make every day's bundle another one.
pub(super) const DATE: DateTime = DateTime::constant(2025, 6, 16, 12, 0, 0, 0);
/// System turns, in rotation.
const SYSTEMS: [Option<&str>; 12] = [
    None,
    Some("You write code."),
    None,
    Some("Du bist ein hilfreicher Assistent und antwortest auf Deutsch."),
    None,
    Some("You are a patient teacher. Explain step by step."),
    None,
    Some("Tu réponds en français."),
    Some("Answer in one or two sentences."),
    Some("请用中文回答。"),
    Some("You write stories and letters."),
    Some("Responde siempre en español."),
];

/// Lets a checkpoint write: it is rounded plainly to 8 bits in a folder beside `target`, which is gone again
/// afterwards, and run. `on_tokens` is told of tokens as they are written, and of none now and then; an
/// error from it ends everything.
///
/// The same checkpoint and amount give the same text on the same kind of CPU (instruction set), whatever the
/// number of threads. On other CPUs sums are rounded differently, and sooner or later another token is drawn.
pub fn write(
    checkpoint: &Checkpoint,
    target: &Path,
    amount: &Amount,
    on_tokens: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Vec<Vec<u32>>> {
    // Under a name of its own: an interrupted conversion to `target` is not to be disturbed.
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push("-text");
    let folder = Staging::create(&target.with_file_name(name))?;
    let bundle = folder.dir.join("writer");
    let options = Options::plain(Bits::EIGHT, Provenance::default());
    convert::convert(checkpoint, &bundle, &options, &mut |_| on_tokens(0))?;
    let context = amount.longest.min(Bundle::read_manifest(&bundle)?.spec.max_context());
    let engine = Engine::load(&bundle, &LoadOptions { context: Some(context), ..Default::default() })?;
    write_with(&engine, amount, on_tokens)
}

/// As [`write`], by an engine that is there already. Texts that run in circles (see [`loops`]) and very short
/// ones are thrown away, so there may be fewer tokens than were asked for, none in the worst case.
pub fn write_with(engine: &Engine, amount: &Amount, on_tokens: &mut dyn FnMut(usize) -> Result<()>) -> Result<Vec<Vec<u32>>> {
    let longest = amount.longest.min(engine.context());
    let mut session = engine.session();
    let mut texts: Vec<Vec<u32>> = Vec::new();
    let (mut kept, mut spent) = (0, 0);
    let openings = openings();
    for number in 0..amount.tokens {
        if kept >= amount.tokens || spent >= 2 * amount.tokens {
            break;
        }
        let seed = amount.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number as u64);
        let sampler = Sampler::new(Sampling { temperature: 1.0, seed, ..Default::default() });
        let mut writer = Writer { session: &mut session, sampler, longest, on_tokens };
        let mut ids = if engine.template.has_template() {
            writer.conversation(SYSTEMS[number % SYSTEMS.len()])?
        } else {
            writer.continuation(openings[number % openings.len()])?
        };
        spent += ids.len().max(SHORTEST);
        if ids.len() < SHORTEST.min(longest) || loops(&ids) {
            continue;
        }
        ids.truncate(amount.tokens - kept);
        kept += ids.len();
        texts.push(ids);
    }
    Ok(texts)
}

/// Beginnings of texts that ship with the program: their first words.
fn openings() -> Vec<&'static str> {
    let first = |text: &'static str| {
        let line = text.trim_start().lines().next().unwrap_or_default();
        let end = line.char_indices().filter(|(_, c)| *c == ' ').nth(7).map_or(line.len(), |(at, _)| at);
        let end = line.char_indices().nth(48).map_or(end, |(at, _)| at.min(end));
        &line[..end]
    };
    SAMPLE.split("\n---\n").map(first).filter(|line| !line.is_empty()).collect()
}

/// Writes one text.
struct Writer<'a, 'e> {
    session: &'a mut Session<'e>,
    sampler: Sampler,
    longest: usize,
    on_tokens: &'a mut dyn FnMut(usize) -> Result<()>,
}

impl Writer<'_, '_> {
    /// User and assistant in turns, as the template has it, until the text is full or somebody has nothing
    /// more to say.
    fn conversation(&mut self, system: Option<&str>) -> Result<Vec<u32>> {
        let engine = self.session.engine();
        let mut messages: Vec<Message> = system.map(|text| Message::new(Role::System, text)).into_iter().collect();
        let mut ids = Vec::new();
        for role in [Role::User, Role::Assistant].into_iter().cycle() {
            let Some(prompt) = open_turn(&engine.tokenizer, &engine.template, &messages, role)? else { break };
            let limit = if role == Role::User { self.longest / USER_SHARE } else { self.longest };
            let turn = self.turn(&prompt, limit)?;
            let said = engine.tokenizer.decode(&turn[..turn.len() - usize::from(self.ends(&turn))]);
            if said.trim().is_empty() {
                break;
            }
            ids = prompt;
            ids.extend(turn);
            if ids.len() >= self.longest {
                break;
            }
            messages.push(Message::new(role, said.trim()));
        }
        Ok(ids)
    }

    /// For models without a template: a text that begins with `opening`.
    fn continuation(&mut self, opening: &str) -> Result<Vec<u32>> {
        let mut ids = self.session.engine().tokenizer.encode_prompt(&Rendered::raw(opening))?;
        let rest = self.turn(&ids, self.longest)?;
        ids.extend(rest);
        Ok(ids)
    }

    /// What the model writes after `prompt`, with the control token that ends it.
    fn turn(&mut self, prompt: &[u32], limit: usize) -> Result<Vec<u32>> {
        let mut turn = Vec::new();
        let room = self.longest.saturating_sub(prompt.len()).min(limit);
        if prompt.is_empty() || room == 0 {
            return Ok(turn);
        }
        let mut id = self.sampler.sample(self.session.feed(prompt, &|| false)?.logits, &[]).id;
        loop {
            turn.push(id);
            (self.on_tokens)(1)?;
            if turn.len() == room || self.ends(&turn) {
                return Ok(turn);
            }
            id = self.sampler.sample(self.session.step(id)?, &[]).id;
        }
    }

    /// Whether a turn was ended by its writer.
    fn ends(&self, turn: &[u32]) -> bool {
        let tokenizer = &self.session.engine().tokenizer;
        turn.last().is_some_and(|id| tokenizer.eos_ids().contains(id) || tokenizer.is_control(*id))
    }
}

/// The ids of a conversation up to where `role` begins to speak; `None` if the template shows no such place.
fn open_turn(tokenizer: &Tokenizer, template: &ChatTemplate, messages: &[Message], role: Role) -> Result<Option<Vec<u32>>> {
    let options = |add_generation_prompt| RenderOptions { add_generation_prompt, now: Some(DATE), ..Default::default() };
    if role == Role::Assistant {
        return tokenizer.encode_prompt(&template.render(messages, &options(true))?).map(Some);
    }
    // The open turn is written as a turn of its own would be: the rendering is cut where its words stand.
    let mut messages = messages.to_vec();
    messages.push(Message::new(role, MARK));
    let rendered = template.render(&messages, &options(false))?;
    rendered.before(MARK).map(|open| tokenizer.encode_prompt(&open)).transpose()
}

#[cfg(test)]
#[path = "self_text_tests.rs"]
mod tests;
