//! Byte-pair encoding (Sennrich et al., <https://arxiv.org/abs/1508.07909>) on tables that are ready to use.
//!
//! The `tokenizers` crate needs a tenth to a quarter of a second to parse a vocabulary and to build its maps.
//! Here the tables are made once from a `tokenizer.json` and can be kept as a file, the *image*. Merging follows
//! the crate's rules step by step; all around it (normaliser, pre-tokeniser, added tokens, decoder) is the crate's.
//!
//! An image is a safetensors file with byte tensors; numbers are little-endian u32:
//! - `texts`: all texts, one after the other by id; `starts`: where each begins, and where the last one ends;
//! - `text_slots`: a hash table from texts to ids, id + 1 a slot, 0 if it is empty;
//! - `merge_slots`: one from pairs of ids to merges: first id, second id, rank, id of the result; all ones if empty;
//! - `rest`: the `tokenizer.json` without its model.
//!
//! Collisions go to the next slot.

use crate::error::{Error, Kind, Result};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use tokenizers::Token;
use tokenizers::models::bpe::BpeTrainer;

/// Names the layout of images; another one is not read.
const LAYOUT: &str = "1";
/// Bytes of a slot of the table of merges.
const MERGE_SLOT: usize = 16;
/// First word of a slot that holds no merge.
const EMPTY: u32 = u32::MAX;

/// The model of a `tokenizer.json`.
#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    fuse_unk: Option<bool>,
    #[serde(default)]
    byte_fallback: Option<bool>,
    #[serde(default)]
    ignore_merges: Option<bool>,
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

/// A pair of texts, or both with a space between them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Line(String),
}

/// What an image tells besides its tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Rules {
    /// The token for what is in no other.
    unknown: Option<u32>,
    /// Unknown characters next to each other are one unknown token.
    fuse_unknown: bool,
    /// What has no token becomes `<0x00>` to `<0xFF>`, if these are there.
    byte_fallback: bool,
    /// A word that is in the vocabulary is that token, whatever merges say.
    ignore_merges: bool,
    /// One more than the highest id.
    ids: usize,
    /// Ids that have a text.
    entries: usize,
}

/// Byte-pair encoding with one vocabulary.
pub struct BytePairs {
    image: Vec<u8>,
    rules: Rules,
    starts: Range<usize>,
    texts: Range<usize>,
    text_slots: Range<usize>,
    merge_slots: Range<usize>,
}

/// The image for a `tokenizer.json` and its `rest`, marked with `source`. `None` if the model is no byte-pair
/// encoding, or one with features that language models do not use (dropout, prefixes, suffixes).
pub fn image(json: &str, rest: &str, source: &str) -> Result<Option<Vec<u8>>> {
    #[derive(Deserialize)]
    struct Whole {
        model: Model,
    }
    // Models of other kinds have other fields.
    let Ok(Whole { model }) = serde_json::from_str(json) else { return Ok(None) };
    let plain = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
    let supported = model.kind.as_deref() == Some("BPE")
        && model.dropout.is_none_or(|p| p == 0.0)
        && plain(&model.continuing_subword_prefix)
        && plain(&model.end_of_word_suffix);
    if !supported {
        return Ok(None);
    }
    let mut entries: Vec<(u32, &str)> = model.vocab.iter().map(|(text, id)| (*id, text.as_str())).collect();
    entries.sort_unstable();
    let ids = entries.last().map_or(0, |last| last.0 as usize + 1);
    // What no tokenizer has is left to the crate: few texts with large ids, two texts for an id, an empty one.
    let odd = entries.windows(2).any(|two| two[0].0 == two[1].0) || entries.iter().any(|(_, text)| text.is_empty());
    if odd || ids > 4 * entries.len() || model.unk_token.as_deref().is_some_and(|text| !model.vocab.contains_key(text)) {
        return Ok(None);
    }
    let mut texts = Vec::new();
    let mut starts = Vec::with_capacity(4 * ids + 4);
    let slots = (2 * entries.len()).next_power_of_two().max(2);
    let mut text_slots = vec![0u8; 4 * slots];
    for (id, text) in &entries {
        // An id without a text is an empty one.
        while starts.len() <= 4 * *id as usize {
            starts.extend((texts.len() as u32).to_le_bytes());
        }
        texts.extend(text.as_bytes());
        let slot = probe(text_hash(text.as_bytes()), slots).find(|&slot| word(&text_slots, slot) == 0);
        put(&mut text_slots, slot.unwrap_or(0), id + 1);
    }
    starts.extend((texts.len() as u32).to_le_bytes());
    if u32::try_from(texts.len()).is_err() {
        return Ok(None);
    }

    let id = |text: &str| {
        let missing = || bad(format!("a merge has `{text}`, which is not in the vocabulary"));
        model.vocab.get(text).copied().ok_or_else(missing)
    };
    let slots = (2 * model.merges.len()).next_power_of_two().max(2);
    let mut merge_slots = vec![0xffu8; MERGE_SLOT * slots];
    let mut joined = String::new();
    let mut rank = 0u32;
    for merge in &model.merges {
        let (a, b) = match merge {
            Merge::Line(line) if line.starts_with("#version") => continue,
            Merge::Line(line) => match line.split_once(' ') {
                Some((a, b)) if !b.contains(' ') => (a, b),
                _ => return Err(bad(format!("merge {} is not two texts", rank + 1))),
            },
            Merge::Pair(a, b) => (a.as_str(), b.as_str()),
        };
        joined.clear();
        joined.extend([a, b]);
        let (first, second, result) = (id(a)?, id(b)?, id(&joined)?);
        // A pair that comes twice has its last rank, as in a map.
        let free = |slot: &usize| {
            let at = |i| word(&merge_slots, 4 * slot + i);
            at(0) == EMPTY || (at(0), at(1)) == (first, second)
        };
        let slot = probe(pair_hash(first, second), slots).find(free).unwrap_or(0);
        for (i, value) in [first, second, rank, result].into_iter().enumerate() {
            put(&mut merge_slots, 4 * slot + i, value);
        }
        rank += 1;
    }

    let unknown = model.unk_token.as_deref().map(id).transpose()?;
    let rules = Rules {
        unknown,
        fuse_unknown: model.fuse_unk.unwrap_or(false),
        byte_fallback: model.byte_fallback.unwrap_or(false),
        ignore_merges: model.ignore_merges.unwrap_or(false),
        ids,
        entries: entries.len(),
    };
    let parts = [
        ("starts", &starts[..]),
        ("texts", &texts),
        ("text_slots", &text_slots),
        ("merge_slots", &merge_slots),
        ("rest", rest.as_bytes()),
    ];
    let views = parts.map(|(name, part)| (name, TensorView::new(Dtype::U8, vec![part.len()], part)));
    let views: Vec<_> = views.into_iter().filter_map(|(name, view)| Some((name, view.ok()?))).collect();
    let rules = serde_json::to_string(&rules).unwrap_or_default();
    let about = [("layout", LAYOUT.to_owned()), ("source", source.to_owned()), ("rules", rules)];
    let about = about.map(|(key, value)| (key.to_owned(), value)).into();
    Ok(safetensors::serialize(views, Some(about)).ok())
}

impl BytePairs {
    /// Reads an image that is marked with `source`; gives also the rest of the `tokenizer.json`.
    pub fn open(image: Vec<u8>, source: &str) -> Option<(Self, String)> {
        let (_, about) = SafeTensors::read_metadata(&image).ok()?;
        let about = about.metadata().as_ref()?;
        let is = |key: &str, value: &str| about.get(key).is_some_and(|found| found == value);
        if !is("layout", LAYOUT) || !is("source", source) {
            return None;
        }
        let rules: Rules = serde_json::from_str(about.get("rules")?).ok()?;
        let tensors = SafeTensors::deserialize(&image).ok()?;
        let range = |name: &str| -> Option<Range<usize>> {
            let part = tensors.tensor(name).ok()?.data();
            let start = part.as_ptr() as usize - image.as_ptr() as usize;
            Some(start..start + part.len())
        };
        let [starts, texts, text_slots, merge_slots, rest] = ["starts", "texts", "text_slots", "merge_slots", "rest"].map(range);
        let (starts, texts, text_slots, merge_slots) = (starts?, texts?, text_slots?, merge_slots?);
        let slots = [text_slots.len() / 4, merge_slots.len() / MERGE_SLOT];
        if rules.ids.checked_add(1).and_then(|n| n.checked_mul(4)) != Some(starts.len())
            || !slots.iter().all(|n| n.is_power_of_two())
        {
            return None;
        }
        let rest = std::str::from_utf8(&image[rest?]).ok()?.to_owned();
        Some((BytePairs { rules, starts, texts, text_slots, merge_slots, image }, rest))
    }

    fn text(&self, id: u32) -> Option<&str> {
        if id as usize >= self.rules.ids {
            return None;
        }
        let at = |i| word(&self.image[self.starts.clone()], i) as usize;
        let text = self.image[self.texts.clone()].get(at(id as usize)..at(id as usize + 1))?;
        std::str::from_utf8(text).ok().filter(|text| !text.is_empty())
    }

    fn id(&self, text: &str) -> Option<u32> {
        let slots = &self.image[self.text_slots.clone()];
        for slot in probe(text_hash(text.as_bytes()), slots.len() / 4) {
            let id = word(slots, slot).checked_sub(1)?;
            if self.text(id) == Some(text) {
                return Some(id);
            }
        }
        None
    }

    /// Rank and result of the merge of two tokens.
    fn merge(&self, first: u32, second: u32) -> Option<(u32, u32)> {
        let slots = &self.image[self.merge_slots.clone()];
        for slot in probe(pair_hash(first, second), slots.len() / MERGE_SLOT) {
            let at = |i| word(slots, 4 * slot + i);
            if at(0) == EMPTY {
                return None;
            }
            if (at(0), at(1)) == (first, second) {
                return Some((at(2), at(3)));
            }
        }
        None
    }

    /// The characters of `text` as tokens, and the bytes of each.
    fn characters(&self, text: &str) -> Vec<Symbol> {
        let mut word = Vec::with_capacity(text.len());
        // Bytes of the unknown token that is being gathered.
        let mut unknown = 0;
        let mut buffer = [0; 4];
        for c in text.chars() {
            let c: &str = c.encode_utf8(&mut buffer);
            let bytes = |b: u8| self.id(&format!("<0x{b:02X}>"));
            if let Some(id) = self.id(c) {
                self.add_unknown(&mut word, &mut unknown);
                word.push(Symbol { id, bytes: c.len() });
            } else if let Some(ids) = self.rules.byte_fallback.then(|| c.bytes().map(bytes).collect::<Option<Vec<_>>>()).flatten()
            {
                // An unknown token before it stays open, as in the crate.
                word.extend(ids.into_iter().map(|id| Symbol { id, bytes: 1 }));
            } else if self.rules.unknown.is_some() {
                if !self.rules.fuse_unknown {
                    self.add_unknown(&mut word, &mut unknown);
                }
                unknown += c.len();
            }
        }
        self.add_unknown(&mut word, &mut unknown);
        word
    }

    fn add_unknown(&self, word: &mut Vec<Symbol>, bytes: &mut usize) {
        if let Some(id) = self.rules.unknown.filter(|_| *bytes > 0) {
            word.push(Symbol { id, bytes: std::mem::take(bytes) });
        }
    }

    /// Merges neighbours, always the pair of the lowest rank, the leftmost of several.
    fn merge_all(&self, word: &mut Vec<Symbol>) {
        let count = word.len();
        // Neighbours of what is left; `count`: none.
        let mut next: Vec<usize> = (1..=count).collect();
        let mut before: Vec<usize> = (0..count).map(|i| i.checked_sub(1).unwrap_or(count)).collect();
        let mut queue = BinaryHeap::with_capacity(count);
        let candidate = |word: &[Symbol], at: usize, right: usize| {
            let (rank, result) = self.merge(word[at].id, word.get(right)?.id)?;
            // The heap gives its largest first.
            Some((Reverse((rank, at)), result))
        };
        queue.extend((0..count).filter_map(|at| candidate(word, at, at + 1)));
        while let Some((Reverse((_, at)), result)) = queue.pop() {
            let right = next[at];
            // What was found earlier may be merged away or changed by now.
            if word[at].bytes == 0 || candidate(word, at, right).is_none_or(|(_, now)| now != result) {
                continue;
            }
            word[at] = Symbol { id: result, bytes: word[at].bytes + word[right].bytes };
            word[right].bytes = 0;
            next[at] = next[right];
            if next[at] < count {
                before[next[at]] = at;
            }
            if before[at] < count {
                queue.extend(candidate(word, before[at], at));
            }
            queue.extend(candidate(word, at, next[at]));
        }
        word.retain(|symbol| symbol.bytes > 0);
    }
}

/// A token of a word that is being merged.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    /// Bytes of the word that it covers; 0 once it is part of another.
    bytes: usize,
}

impl tokenizers::Model for BytePairs {
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        if let Some(id) = self.rules.ignore_merges.then(|| self.id(text)).flatten() {
            return Ok(vec![Token::new(id, text.to_owned(), (0, text.len()))]);
        }
        let mut word = self.characters(text);
        self.merge_all(&mut word);
        let mut start = 0;
        let token = |symbol: Symbol| {
            let range = (start, start + symbol.bytes);
            start = range.1;
            Token::new(symbol.id, self.text(symbol.id).unwrap_or_default().to_owned(), range)
        };
        Ok(word.into_iter().map(token).collect())
    }
    fn token_to_id(&self, text: &str) -> Option<u32> {
        self.id(text)
    }
    fn id_to_token(&self, id: u32) -> Option<String> {
        self.text(id).map(str::to_owned)
    }
    fn get_vocab(&self) -> HashMap<String, u32> {
        (0..self.rules.ids as u32).filter_map(|id| Some((self.text(id)?.to_owned(), id))).collect()
    }
    fn get_vocab_size(&self) -> usize {
        self.rules.entries
    }
    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("the tables of a vocabulary are not saved one by one".into())
    }
    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

fn bad(what: String) -> Error {
    Error::new(Kind::BadFile, format!("not a usable tokenizer: {what}"))
}

/// Word `i` of a table.
fn word(table: &[u8], i: usize) -> u32 {
    table.get(4 * i..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn put(table: &mut [u8], i: usize, value: u32) {
    table[4 * i..4 * i + 4].copy_from_slice(&value.to_le_bytes());
}

/// All slots of a table (a power of two of them), in the order in which `hash` tries them.
fn probe(hash: u64, slots: usize) -> impl Iterator<Item = usize> {
    (0..slots).map(move |i| (hash as usize).wrapping_add(i) & (slots - 1))
}

/// FNV-1a (<http://www.isthe.com/chongo/tech/comp/fnv/>), its high bits mixed into the low ones.
fn text_hash(text: &[u8]) -> u64 {
    let hash = text.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, b| (hash ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    hash ^ hash >> 32
}

/// Multiplication by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4).
fn pair_hash(first: u32, second: u32) -> u64 {
    let hash = (u64::from(first) << 32 | u64::from(second)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash >> 32 ^ hash
}

#[cfg(test)]
#[path = "bpe_tests.rs"]
mod tests;
