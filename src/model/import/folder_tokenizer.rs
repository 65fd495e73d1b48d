//! The tokenizer side of a model folder: `tokenizer.json` when there is one, else the older forms it can be
//! made from, and the chat template from wherever it is kept.

use super::folder::{parse_json, read_bytes, read_json, read_text};
use super::{TokenizerFiles, sentencepiece};
use crate::error::{Error, Result};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// Reads the tokenizer files of `dir`. The added tokens of a `tokenizer.json` are taken as they stand, whatever
/// `tokenizer_config.json` or `special_tokens_map.json` say.
pub(super) fn read(dir: &Path) -> Result<TokenizerFiles> {
    let config = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_else(|| json!({}));
    let chat_template = chat_template(dir, &config)?;
    Ok(TokenizerFiles { tokenizer_json: tokenizer_json(dir, &config)?, config, chat_template })
}

fn tokenizer_json(dir: &Path, config: &Value) -> Result<String> {
    let path = dir.join("tokenizer.json");
    if let Some(text) = read_text(&path)? {
        #[derive(Deserialize)]
        struct Outline {
            #[serde(rename = "model")]
            _model: IgnoredAny,
        }
        parse_json::<Outline>(&path, &text)?;
        return Ok(text);
    }
    let path = dir.join("tokenizer.model");
    if let Some(bytes) = read_bytes(&path)? {
        return sentencepiece::to_tokenizer_json(&path, &bytes, config, added_tokens(dir, config)?);
    }
    let (vocab, merges) = (dir.join("vocab.json"), dir.join("merges.txt"));
    if let (Some(vocab_text), Some(merges_text)) = (read_text(&vocab)?, read_text(&merges)?) {
        return gpt2(dir, config, parse_json(&vocab, &vocab_text)?, &merges, &merges_text);
    }
    Err(Error::not_found(format!(
        "{}: no tokenizer (looked for tokenizer.json, tokenizer.model, vocab.json with merges.txt)",
        dir.display()
    ))
    .with_hint("download the whole repository, or save tokenizer.json with transformers (AutoTokenizer, save_pretrained)"))
}

/// The Jinja source: `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`, else in
/// `chat_template.json` (where processors of older vision models keep it).
fn chat_template(dir: &Path, config: &Value) -> Result<Option<String>> {
    if let Some(text) = read_text(&dir.join("chat_template.jinja"))? {
        return Ok(Some(text));
    }
    if let Some(text) = pick_template(&config["chat_template"]) {
        return Ok(Some(text));
    }
    let processor = read_json(&dir.join("chat_template.json"))?;
    Ok(processor.and_then(|p| pick_template(&p["chat_template"])))
}

/// A template is a string, or a list of named ones of which "default" is meant for plain chats.
fn pick_template(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|t| t["name"] == "default").or(if named.len() == 1 { named.first() } else { None });
            Some(default?["template"].as_str()?.to_string())
        }
        _ => None,
    }
}

/// A token that is matched in the text before the model sees it; the fields are those of `tokenizer.json`.
#[derive(Clone, Debug, Default)]
pub(super) struct AddedToken {
    pub id: usize,
    pub content: String,
    pub special: bool,
    pub normalized: bool,
    pub lstrip: bool,
    pub rstrip: bool,
    pub single_word: bool,
}

impl AddedToken {
    pub fn to_json(&self) -> Value {
        json!({
            "id": self.id, "content": self.content, "single_word": self.single_word, "lstrip": self.lstrip,
            "rstrip": self.rstrip, "normalized": self.normalized, "special": self.special,
        })
    }
}

/// The text of a token setting such as `bos_token`: a string or an object with `content`.
pub(super) fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// Tokens added outside the vocabulary files, by ascending id: `added_tokens_decoder` of `tokenizer_config.json`,
/// and the ids that only the older `added_tokens.json` has.
fn added_tokens(dir: &Path, config: &Value) -> Result<Vec<AddedToken>> {
    let config_path = dir.join("tokenizer_config.json");
    let mut by_id = BTreeMap::new();
    for (id, token) in config["added_tokens_decoder"].as_object().into_iter().flatten() {
        let (Ok(number), Some(content)) = (id.parse::<u32>(), token_text(token)) else {
            return Err(Error::bad_file(&config_path, format!("added_tokens_decoder entry {id:?} is no token")));
        };
        let flag = |name: &str| token[name] == true;
        let token = AddedToken {
            id: number as usize,
            content: content.to_string(),
            special: flag("special"),
            normalized: flag("normalized"),
            lstrip: flag("lstrip"),
            rstrip: flag("rstrip"),
            single_word: flag("single_word"),
        };
        by_id.insert(token.id, token);
    }
    let path = dir.join("added_tokens.json");
    for (content, id) in read_json(&path)?.unwrap_or_default().as_object().into_iter().flatten() {
        let Some(id) = id.as_u64().filter(|id| *id <= u32::MAX as u64) else {
            return Err(Error::bad_file(&path, format!("the id of {content:?} is not a token id")));
        };
        let token = AddedToken { id: id as usize, content: content.clone(), special: true, ..AddedToken::default() };
        by_id.entry(token.id).or_insert(token);
    }
    let mut contents = HashSet::new();
    match by_id.values().find(|t| t.content.is_empty() || !contents.insert(&t.content)) {
        Some(token) => Err(Error::bad_file(&config_path, format!("added token {:?} is empty or has two ids", token.content))),
        None => Ok(by_id.into_values().collect()),
    }
}

/// Checks that the added tokens beyond a vocabulary of `size` tokens continue its ids without a gap, which is how
/// a `tokenizer.json` numbers them.
pub(super) fn check_added_ids(path: &Path, size: usize, added: &[AddedToken]) -> Result<()> {
    match added.iter().filter(|t| t.id >= size).enumerate().find(|(i, t)| t.id != size + i) {
        Some((i, t)) => Err(Error::unsupported(format!(
            "{}: added token {:?} has id {}, the next free id is {}",
            path.display(),
            t.content,
            t.id,
            size + i
        ))),
        None => Ok(()),
    }
}

/// The post-processor that puts `bos` before and `eos` behind a text; `None` when there is neither.
pub(super) fn frame(bos: Option<(&str, usize)>, eos: Option<(&str, usize)>) -> Option<Value> {
    if bos.is_none() && eos.is_none() {
        return None;
    }
    let special = |token: Option<(&str, usize)>, kind: u32| {
        token.map(|(text, _)| json!({ "SpecialToken": { "id": text, "type_id": kind } }))
    };
    let sequence = |name: &str, kind: u32| {
        let text = json!({ "Sequence": { "id": name, "type_id": kind } });
        special(bos, kind).into_iter().chain([text]).chain(special(eos, kind)).collect::<Vec<_>>()
    };
    let tokens: Map<String, Value> = bos
        .iter()
        .chain(eos.iter())
        .map(|(text, id)| (text.to_string(), json!({ "id": text, "ids": [id], "tokens": [text] })))
        .collect();
    let pair = [sequence("A", 0), sequence("B", 1)].concat();
    Some(json!({
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": pair,
        "special_tokens": tokens,
    }))
}

/// Byte-level BPE from `vocab.json` and `merges.txt`. Other tokenizers use the same two files with another way to
/// cut the text into words, so only GPT-2's own class is taken.
fn gpt2(dir: &Path, config: &Value, vocab: BTreeMap<String, u32>, merges_path: &Path, merges: &str) -> Result<String> {
    let class = config["tokenizer_class"].as_str().unwrap_or("none named in tokenizer_config.json");
    if !matches!(class, "GPT2Tokenizer" | "GPT2TokenizerFast") {
        return Err(Error::unsupported(format!(
            "{}: vocab.json and merges.txt without tokenizer.json can be read for GPT2Tokenizer, not for tokenizer class {class}",
            dir.display()
        ))
        .with_hint("save tokenizer.json with transformers (AutoTokenizer.from_pretrained, then save_pretrained)"));
    }
    let ids: HashSet<u32> = vocab.values().copied().collect();
    if ids.len() != vocab.len() || ids.iter().any(|id| *id as usize >= vocab.len()) {
        return Err(Error::bad_file(&dir.join("vocab.json"), "the token ids do not run from 0 without gap or repetition"));
    }
    let mut pairs = Vec::new();
    for (number, line) in merges.lines().enumerate() {
        if line.trim().is_empty() || (number == 0 && line.starts_with("#version")) {
            continue;
        }
        let known =
            |(a, b): &(&str, &str)| vocab.contains_key(*a) && vocab.contains_key(*b) && vocab.contains_key(&[*a, *b].concat());
        match line.trim_end().split_once(' ').filter(known) {
            Some((a, b)) => pairs.push([a, b]),
            None => {
                let line = number + 1;
                return Err(Error::bad_file(
                    merges_path,
                    format!("line {line} does not join two tokens of vocab.json to a third"),
                ));
            }
        }
    }
    let id = |key: &str| token_text(&config[key]).and_then(|text| Some((text, *vocab.get(text)? as usize)));
    let (bos, eos) = (id("bos_token"), id("eos_token"));
    let mut added = added_tokens(dir, config)?;
    for (text, id) in [bos, eos, id("unk_token"), id("pad_token")].into_iter().flatten() {
        if !added.iter().any(|t| t.id == id) {
            added.push(AddedToken { id, content: text.to_string(), special: true, ..AddedToken::default() });
        }
    }
    added.sort_by_key(|t| t.id);
    check_added_ids(dir, vocab.len(), &added)?;
    let at_odds = |t: &&AddedToken| vocab.get(&t.content).map(|id| *id as usize) != (t.id < vocab.len()).then_some(t.id);
    if let Some(token) = added.iter().find(at_odds) {
        let (content, id) = (&token.content, token.id);
        return Err(Error::bad_file(dir, format!("added token {content:?} with id {id} contradicts vocab.json")));
    }
    let enabled = |key: &str| config[key] == true;
    let level = json!({
        "type": "ByteLevel", "add_prefix_space": enabled("add_prefix_space"), "trim_offsets": true, "use_regex": true,
    });
    let frame = frame(bos.filter(|_| enabled("add_bos_token")), eos.filter(|_| enabled("add_eos_token")));
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": pairs,
    });
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added.iter().map(AddedToken::to_json).collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": level, "post_processor": frame.unwrap_or_else(|| level.clone()),
        "decoder": level, "model": model,
    })
    .to_string())
}
