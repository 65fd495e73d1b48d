//! Text to token ids and back, on the `tokenizers` crate, with the rules that a chat needs on top:
//! exactly one begin-of-text token where the model wants one, and control tokens only where the
//! template (never a user's text) wrote them.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{
    AddedToken, AddedVocabulary, Model, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizer, PreTokenizerWrapper,
};

use super::chat::Rendered;
use super::stream::{Decoding, Detokenizer};
use super::vocabulary::{self, Inner, failed};
use crate::error::{Error, Result};

/// A token that was added beside the model's own vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    pub id: u32,
    pub text: String,
    /// Whether it steers the model (turn and tool markers, end of text, ...), as opposed to being a
    /// plain word or white-space run that was only added to the vocabulary.
    pub control: bool,
}

/// The spellings of a vocabulary's control tokens, and how to make them harmless inside user text.
#[derive(Clone, Debug, Default)]
pub struct ControlTokens {
    texts: HashSet<String>,
    /// Distinct lengths in bytes, ascending.
    lengths: Vec<usize>,
    first_bytes: HashSet<u8>,
}

impl ControlTokens {
    /// Spellings of a single character are left out: nothing could be put inside them.
    pub fn new(texts: impl IntoIterator<Item = String>) -> Self {
        let texts: HashSet<String> = texts.into_iter().filter(|text| text.chars().nth(1).is_some()).collect();
        let mut lengths: Vec<usize> = texts.iter().map(String::len).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let first_bytes = texts.iter().filter_map(|text| text.bytes().next()).collect();
        ControlTokens { texts, lengths, first_bytes }
    }

    /// `text` with `mark` put behind the first character of every control-token spelling in it
    /// (overlapping ones too), so that none of them is spelled any more.
    pub fn cut(&self, text: &str, mark: char) -> String {
        let mut out = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            out.push(c);
            let rest = &text[at..];
            let mut encoded = [0; 4];
            let first = c.encode_utf8(&mut encoded).as_bytes()[0];
            if self.first_bytes.contains(&first)
                && self.lengths.iter().any(|&n| rest.get(..n).is_some_and(|start| self.texts.contains(start)))
            {
                out.push(mark);
            }
        }
        out
    }
}

/// How to tokenise text some of whose control-token spellings are cut: only `markers` are recognised
/// as control tokens, the rest of the text sees every added token but those.
struct Guarded {
    markers: AddedVocabulary,
    plain: AddedVocabulary,
    /// Ids that the two vocabularies gave out differ from the tokenizer's own where a token is not in
    /// the model's vocabulary.
    marker_ids: HashMap<u32, u32>,
    plain_ids: HashMap<u32, u32>,
    /// The pre-tokenizer for text that does not start the prompt.
    later: Option<PreTokenizerWrapper>,
}

/// A model's tokenizer; immutable once open.
pub struct Tokenizer {
    inner: Inner,
    decoding: Decoding,
    special: Vec<SpecialToken>,
    /// Ids that are left out of decoded text.
    hidden: HashSet<u32>,
    control: Arc<ControlTokens>,
    control_ids: HashSet<u32>,
    guarded: Guarded,
    bos: Option<u32>,
    bos_text: Option<String>,
    eos_text: Option<String>,
    eos_ids: Vec<u32>,
    wants_bos: bool,
    post_processor_adds_bos: bool,
    vocab_len: usize,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. `config` is the content of `tokenizer_config.json` (or null),
    /// `generation` that of `generation_config.json`, whose end-of-text ids count too.
    pub fn open(tokenizer_json: &Path, config: &Value, generation: Option<&Value>) -> Result<Self> {
        let text = std::fs::read_to_string(tokenizer_json).map_err(|e| Error::io("read", tokenizer_json, &e))?;
        Self::from_text(&text, config, generation).map_err(|e| e.context(tokenizer_json.display()))
    }

    /// As [`Tokenizer::open`], with the tables of the vocabulary kept in `image`, so that it takes a few
    /// milliseconds from the second time on. They are made again when the `tokenizer.json` was written since.
    pub fn open_kept(tokenizer_json: &Path, image: &Path, config: &Value, generation: Option<&Value>) -> Result<Self> {
        let inner = vocabulary::open_kept(tokenizer_json, image)?;
        Self::from_inner(inner, config, generation).map_err(|e| e.context(tokenizer_json.display()))
    }

    /// As [`Tokenizer::open`], from the text of a `tokenizer.json`.
    pub fn from_text(text: &str, config: &Value, generation: Option<&Value>) -> Result<Self> {
        Self::from_inner(vocabulary::parse(text, "", |_| ())?, config, generation)
    }

    fn from_inner(inner: Inner, config: &Value, generation: Option<&Value>) -> Result<Self> {
        // Tokenising one prompt is short work; the crate's own thread pool would only surprise the caller.
        tokenizers::parallelism::set_parallelism(false);
        let mut special: Vec<SpecialToken> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .map(|(id, token)| SpecialToken { id, control: is_control(&token), text: token.content })
            .collect();
        special.sort_by_key(|token| token.id);
        let hidden = inner.get_added_tokens_decoder().into_iter().filter(|(_, t)| t.special).map(|(id, _)| id).collect();
        let control = ControlTokens::new(special.iter().filter(|t| t.control).map(|t| t.text.clone()));
        let control_ids = special.iter().filter(|t| t.control).map(|t| t.id).collect();
        let decoding = Decoding::new(&serde_json::to_value(inner.get_decoder()).unwrap_or(Value::Null));
        let guarded = Guarded::new(&inner)?;

        let plain = encode(&inner, "a", false)?;
        let processed = encode(&inner, "a", true)?;
        let bos_text = match token_name(config, "bos_token") {
            Some(name) => Some(name),
            // No word about it in the configuration: what the tokenizer itself puts in front is it.
            None if config.get("bos_token").is_none() && processed.first() != plain.first() => {
                processed.first().and_then(|&id| inner.id_to_token(id))
            }
            None => None,
        };
        let bos = bos_text.as_deref().and_then(|text| inner.token_to_id(text));
        let post_processor_adds_bos = bos.is_some() && processed.first() == bos.as_ref() && plain.first() != bos.as_ref();
        let wants_bos = bos.is_some() && config.get("add_bos_token").and_then(Value::as_bool).unwrap_or(post_processor_adds_bos);

        let eos_text = token_name(config, "eos_token");
        let mut eos_ids = match generation.and_then(|g| g.get("eos_token_id")) {
            Some(Value::Array(list)) => list.iter().filter_map(id_value).collect(),
            Some(one) => id_value(one).into_iter().collect(),
            None => Vec::new(),
        };
        eos_ids.extend(eos_text.as_deref().and_then(|text| inner.token_to_id(text)));
        let mut seen = HashSet::new();
        eos_ids.retain(|id| seen.insert(*id));

        let past_added = special.last().map_or(0, |token| token.id as usize + 1);
        let vocab_len = inner.get_vocab_size(true).max(past_added);
        Ok(Tokenizer {
            inner,
            decoding,
            special,
            hidden,
            control: Arc::new(control),
            control_ids,
            guarded,
            bos,
            bos_text,
            eos_text,
            eos_ids,
            wants_bos,
            post_processor_adds_bos,
            vocab_len,
        })
    }

    /// The ids of plain text, in which control tokens that are spelled out count as control tokens.
    /// With `add_special` also what the tokenizer itself adds around a text, and exactly one
    /// begin-of-text token where the model wants one.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let mut ids = encode(&self.inner, text, add_special)?;
        if add_special {
            if self.post_processor_adds_bos && !self.wants_bos {
                ids.remove(0);
            }
            self.one_bos(&mut ids);
        }
        Ok(ids)
    }

    /// The ids of a rendered prompt: nothing is added but a begin-of-text token that the model wants and
    /// the template did not write, and nothing that a user wrote becomes a control token.
    pub fn encode_prompt(&self, rendered: &Rendered) -> Result<Vec<u32>> {
        let mut ids = match rendered.mark() {
            Some(mark) => self.encode_guarded(rendered.marked_text(), mark)?,
            None => encode(&self.inner, rendered.marked_text(), false)?,
        };
        self.one_bos(&mut ids);
        Ok(ids)
    }

    /// The ids of text in the middle of a text; nothing in it is a control token.
    pub(super) fn encode_within(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encode_run(text, false, &mut ids)?;
        Ok(ids)
    }

    /// Leaves one begin-of-text token where there are several, and adds it where it is wanted.
    fn one_bos(&self, ids: &mut Vec<u32>) {
        let Some(bos) = self.bos else { return };
        let leading = ids.iter().take_while(|&&id| id == bos).count();
        if leading > 1 {
            ids.drain(1..leading);
        } else if leading == 0 && self.wants_bos {
            ids.insert(0, bos);
        }
    }

    /// Splits at the control tokens that are spelled without `mark` inside, and encodes the text between
    /// them (without its marks) as if there were no control tokens.
    fn encode_guarded(&self, text: &str, mark: char) -> Result<Vec<u32>> {
        let guarded = &self.guarded;
        let split = guarded.markers.extract_and_normalize(None::<&NormalizerWrapper>, text);
        let mut ids = Vec::new();
        let mut at_start = true;
        for (piece, _, tokens) in split.get_splits(OffsetReferential::Original, OffsetType::None) {
            match tokens.as_deref().and_then(<[_]>::first) {
                Some(token) => ids.push(*guarded.marker_ids.get(&token.id).unwrap_or(&token.id)),
                None => self.encode_run(&piece.replace(mark, ""), at_start, &mut ids)?,
            }
            at_start &= piece.is_empty();
        }
        Ok(ids)
    }

    /// Encodes text in which no control token is recognised.
    fn encode_run(&self, text: &str, at_start: bool, ids: &mut Vec<u32>) -> Result<()> {
        let guarded = &self.guarded;
        let mut pieces = guarded.plain.extract_and_normalize(self.inner.get_normalizer(), text);
        let pre_tokenizer = if at_start { self.inner.get_pre_tokenizer() } else { guarded.later.as_ref() };
        if let Some(pre_tokenizer) = pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        // What is an added token by now has an id of `plain`, which must be told from the model's own.
        let added: Vec<bool> = pieces
            .get_splits(OffsetReferential::Original, OffsetType::None)
            .iter()
            .map(|(_, _, tokens)| tokens.is_some())
            .collect();
        pieces.tokenize(|piece| self.inner.get_model().tokenize(piece.get())).map_err(failed)?;
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
        for ((_, _, tokens), added) in splits.iter().zip(added) {
            for token in tokens.iter().flatten() {
                ids.push(if added { *guarded.plain_ids.get(&token.id).unwrap_or(&token.id) } else { token.id });
            }
        }
        Ok(())
    }

    /// The text of `ids` without special tokens. An incomplete character at the end is left out;
    /// bytes that are no text become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut state = Detokenizer::default();
        let mut out = String::new();
        for &id in ids {
            if !self.is_hidden(id) {
                state.push(self, id, &mut out);
            }
        }
        out
    }

    /// The vocabulary's own spelling of a token (`Ġthe`, `▁the`, `<0x0A>`, `<|im_end|>`).
    pub fn token_text(&self, id: u32) -> Option<String> {
        let added = self.inner.get_added_vocabulary().simple_id_to_token(id);
        added.or_else(|| self.inner.get_model().id_to_token(id))
    }

    /// The bytes that a token adds in the middle of a text.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.token_text(id).map(|text| self.decoding.bytes(&text))
    }

    /// The begin-of-text token, whether or not prompts start with it.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }
    /// Its spelling, which templates ask for.
    pub fn bos_text(&self) -> Option<&str> {
        self.bos_text.as_deref()
    }
    /// The spelling of the tokenizer's end-of-text token.
    pub fn eos_text(&self) -> Option<&str> {
        self.eos_text.as_deref()
    }
    /// Every id that ends an answer: those of the generation settings, then the tokenizer's own.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }
    /// Whether text for this model starts with the begin-of-text token: as `add_bos_token` says, else as
    /// the tokenizer does with plain text.
    pub fn wants_bos(&self) -> bool {
        self.wants_bos
    }
    /// The added tokens, by id.
    pub fn special_tokens(&self) -> &[SpecialToken] {
        &self.special
    }
    /// Spellings that user text must not turn into tokens.
    pub fn control_tokens(&self) -> Arc<ControlTokens> {
        self.control.clone()
    }
    /// Whether the id is a control token's.
    pub fn is_control(&self, id: u32) -> bool {
        self.control_ids.contains(&id)
    }
    /// Whether [`Tokenizer::decode`] leaves the id out.
    pub fn is_hidden(&self, id: u32) -> bool {
        self.hidden.contains(&id)
    }
    /// The id of a token by its exact spelling.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }
    /// One more than the highest id in use; a model may have more rows.
    pub fn vocab_len(&self) -> usize {
        self.vocab_len
    }
    pub(super) fn decoding(&self) -> &Decoding {
        &self.decoding
    }
    /// The crate's own decoding, for decoders whose steps cannot be followed token by token.
    pub(super) fn decode_whole(&self, ids: &[u32]) -> String {
        self.inner.decode(ids, false).unwrap_or_default()
    }
}

impl Guarded {
    fn new(inner: &Inner) -> Result<Self> {
        let mut tokens: Vec<(u32, AddedToken)> = inner.get_added_tokens_decoder().into_iter().collect();
        tokens.sort_by_key(|(id, _)| *id);
        let ids: HashMap<&str, u32> = tokens.iter().map(|(id, token)| (token.content.as_str(), *id)).collect();
        let build = |tokens: Vec<AddedToken>, normalizer: Option<&NormalizerWrapper>| -> Result<_> {
            let mut vocabulary = AddedVocabulary::new();
            vocabulary.add_tokens(tokens, inner.get_model(), normalizer).map_err(failed)?;
            let back = vocabulary
                .get_added_tokens_decoder()
                .iter()
                .filter_map(|(id, token)| Some((*id, *ids.get(token.content.as_str())?)))
                .filter(|(new, own)| new != own)
                .collect();
            Ok((vocabulary, back))
        };
        let (control, other): (Vec<_>, Vec<_>) = tokens.iter().map(|(_, t)| t.clone()).partition(is_control);
        let control = control.into_iter().map(|token| token.normalized(false)).collect();
        let (markers, marker_ids) = build(control, None)?;
        let (plain, plain_ids) = build(other, inner.get_normalizer())?;
        Ok(Guarded { markers, plain, marker_ids, plain_ids, later: inner.get_pre_tokenizer().map(after_the_start) })
    }
}

/// The same pre-tokenizer, but without the space that some put before the first word of a text.
fn after_the_start(pre_tokenizer: &PreTokenizerWrapper) -> PreTokenizerWrapper {
    match pre_tokenizer {
        PreTokenizerWrapper::Metaspace(meta) if meta.get_prepend_scheme() == PrependScheme::First => {
            let mut meta = meta.clone();
            meta.set_prepend_scheme(PrependScheme::Never);
            PreTokenizerWrapper::Metaspace(meta)
        }
        PreTokenizerWrapper::Sequence(steps) => {
            PreTokenizerWrapper::Sequence(Sequence::new(steps.as_ref().iter().map(after_the_start).collect()))
        }
        other => other.clone(),
    }
}

/// Flagged special, or spelled like a turn or media marker: some vocabularies (DeepSeek's turns, Gemma's
/// `<start_of_image>`) leave the flag off.
fn is_control(token: &AddedToken) -> bool {
    let text = token.content.as_str();
    let inside = text.strip_prefix('<').and_then(|t| t.strip_suffix('>')).unwrap_or_default();
    let piped = inside.starts_with(['|', '\u{ff5c}']) || inside.ends_with(['|', '\u{ff5c}']);
    token.special || piped || inside.starts_with("start_of_") || inside.starts_with("end_of_")
}

/// `bos_token` and its like are a string, or an object with a `content`.
fn token_name(config: &Value, key: &str) -> Option<String> {
    let token = config.get(key)?;
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_string)
}

fn id_value(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn encode(inner: &Inner, text: &str, add_special: bool) -> Result<Vec<u32>> {
    Ok(inner.encode_fast(text, add_special).map_err(failed)?.get_ids().to_vec())
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
