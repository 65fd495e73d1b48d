//! GGUF tokenizer metadata as a `tokenizer.json`. Two kinds exist for our families: byte-level BPE ("gpt2"
//! with a pre-tokenizer name) and SentencePiece BPE ("llama", also used by Gemma), whose merges are not in
//! the file and are derived from the piece scores.

use super::TokenizerFiles;
use super::gguf::Family;
use super::gguf_header::Header;
use crate::error::{Error, Result};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::collections::HashMap;

/// `tokenizer.ggml.token_type` values.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER: i64 = 4;
const UNUSED: i64 = 5;

/// U+2581, SentencePiece's space.
const SPACE: char = '\u{2581}';

/// Tokens that end a turn or a document in any of the families, by the text that their releases gave them.
const END_TOKENS: [&str; 5] = ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<|endoftext|>"];

/// Contractions, words, single or grouped digits, punctuation, line breaks, spaces: the pattern of the
/// Llama 3 and Qwen 2 `tokenizer.json`, which differ in the digits.
macro_rules! word_pattern {
    ($digits:literal) => {
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// The case-aware pattern of o200k (GPT-4o, Phi-4-mini) and Tekken (Mistral Nemo), which differ in the digits
/// and in whether a contraction belongs to its word.
macro_rules! case_pattern {
    ($contraction:literal, $digits:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $contraction,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $contraction,
            "|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// What a `tokenizer.ggml.pre` name means.
struct PreTokenizer {
    names: &'static [&'static str],
    /// Applied one after another; every match and every gap becomes a piece.
    patterns: &'static [&'static str],
    /// Ends with GPT-2's own pattern, which the ByteLevel step of `tokenizers` has built in.
    gpt2: bool,
    nfc: bool,
    /// A piece that is itself in the vocabulary is taken whole.
    ignore_merges: bool,
    /// Whether texts start with the bos token where the file does not say.
    add_bos: bool,
}

const PLAIN: PreTokenizer =
    PreTokenizer { names: &[], patterns: &[], gpt2: false, nfc: false, ignore_merges: false, add_bos: false };

/// Sources: the `tokenizer.json` of the model that a name comes from, and llama.cpp's table of names
/// (<https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp>).
const PRE_TOKENIZERS: [PreTokenizer; 8] = [
    PreTokenizer { names: &["gpt-2"], gpt2: true, ..PLAIN },
    PreTokenizer { names: &["smollm"], patterns: &[r"\p{N}"], gpt2: true, ..PLAIN },
    PreTokenizer { names: &["qwen2", "deepseek-r1-qwen"], patterns: &[word_pattern!(r"\p{N}")], nfc: true, ..PLAIN },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        patterns: &[word_pattern!(r"\p{N}{1,3}")],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["smaug-bpe", "dbrx"], patterns: &[word_pattern!(r"\p{N}{1,3}")], ..PLAIN },
    PreTokenizer { names: &["gpt-4o"], patterns: &[case_pattern!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")], ..PLAIN },
    PreTokenizer { names: &["tekken"], patterns: &[case_pattern!("", r"\p{N}")], ignore_merges: true, add_bos: true, ..PLAIN },
    // What llama.cpp does with files that name no scheme of their own.
    PreTokenizer {
        names: &["default"],
        patterns: &[
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            r"[0-9][0-9][0-9]",
        ],
        ..PLAIN
    },
];

/// The token lists of a file, checked to be of equal length.
struct Vocabulary<'a> {
    header: &'a Header,
    tokens: &'a [String],
    types: &'a [i64],
}

impl<'a> Vocabulary<'a> {
    fn read(header: &'a Header) -> Result<Self> {
        let bad = |what: String| Error::bad_file(&header.file.path, what);
        let Some(tokens) = header.texts("tokenizer.ggml.tokens")? else {
            return Err(bad("metadata key tokenizer.ggml.tokens is missing".into()));
        };
        let Some(types) = header.ints("tokenizer.ggml.token_type")? else {
            return Err(bad("metadata key tokenizer.ggml.token_type is missing".into()));
        };
        if tokens.len() != types.len() {
            return Err(bad(format!("{} tokens, but {} token types", tokens.len(), types.len())));
        }
        Ok(Vocabulary { header, tokens, types })
    }

    /// Id and text of the token that `tokenizer.ggml.{key}` names.
    fn named(&self, key: &str) -> Result<Option<(usize, &'a str)>> {
        let key = format!("tokenizer.ggml.{key}");
        let Some(id) = self.header.size(&key)? else { return Ok(None) };
        match self.tokens.get(id) {
            Some(text) => Ok(Some((id, text))),
            None => {
                let what = format!("metadata key {key} is {id}, but there are {} tokens", self.tokens.len());
                Err(Error::bad_file(&self.header.file.path, what))
            }
        }
    }

    fn bad(&self, what: String) -> Error {
        Error::bad_file(&self.header.file.path, what)
    }
}

/// The tokenizer of a file: `tokenizer.json`, `tokenizer_config.json` and the chat template.
pub(super) fn tokenizer(header: &Header, family: &Family) -> Result<TokenizerFiles> {
    let v = Vocabulary::read(header)?;
    let path = header.file.path.display();
    let model = header.text("tokenizer.ggml.model")?.unwrap_or("(none)");
    let pre = header.text("tokenizer.ggml.pre")?;
    let (default_bos, sentencepiece) = match model {
        "llama" => (true, true),
        "gpt2" => (pre_tokenizer(header, pre)?.add_bos, false),
        _ => {
            return Err(Error::unsupported(format!("{path}: tokenizer model {model} is not supported; supported: gpt2, llama")));
        }
    };
    let bos = v.named("bos_token_id")?;
    let eos = v.named("eos_token_id")?;
    let add_bos = header.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(default_bos) && bos.is_some();
    let add_eos = header.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false) && eos.is_some();
    let post_processor = post_processor(bos.filter(|_| add_bos), eos.filter(|_| add_eos));
    let tokenizer_json = if sentencepiece {
        sentencepiece_json(&v, family, post_processor)?
    } else {
        byte_level_json(&v, pre_tokenizer(header, pre)?, post_processor)?
    };
    let chat_template = header.text("tokenizer.chat_template")?.map(str::to_string);
    let mut config = Map::new();
    for (name, key) in [
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ] {
        config.insert(name.into(), json!(v.named(key)?.map(|(_, text)| text)));
    }
    config.insert("add_bos_token".into(), json!(add_bos));
    config.insert("add_eos_token".into(), json!(add_eos));
    if let Some(template) = &chat_template {
        config.insert("chat_template".into(), json!(template));
    }
    Ok(TokenizerFiles { tokenizer_json, config: Value::Object(config), chat_template })
}

/// A `generation_config.json`: which tokens begin and end a text.
pub(super) fn generation(header: &Header) -> Result<Value> {
    let v = Vocabulary::read(header)?;
    let mut ends = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ends.extend(v.named(key)?.map(|(id, _)| id));
    }
    let control =
        |&(_, (text, ty)): &(usize, (&String, &i64))| matches!(*ty, CONTROL | USER) && END_TOKENS.contains(&text.as_str());
    ends.extend(v.tokens.iter().zip(v.types).enumerate().filter(control).map(|(id, _)| id));
    let mut seen = Vec::new();
    ends.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    let mut out = json!({ "eos_token_id": ends });
    for (name, key) in [("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")] {
        if let Some((id, _)) = v.named(key)? {
            out[name] = json!(id);
        }
    }
    Ok(out)
}

fn pre_tokenizer(header: &Header, name: Option<&str>) -> Result<&'static PreTokenizer> {
    let path = header.file.path.display();
    let hint = "convert from the original Hugging Face folder instead";
    let Some(name) = name else {
        let what = format!("{path}: does not say which pre-tokenizer it needs (tokenizer.ggml.pre is missing)");
        return Err(Error::unsupported(what).with_hint(hint));
    };
    PRE_TOKENIZERS.iter().find(|p| p.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = PRE_TOKENIZERS.iter().flat_map(|p| p.names).copied().collect();
        let known = known.join(", ");
        Error::unsupported(format!("{path}: pre-tokenizer {name} is not supported; supported: {known}")).with_hint(hint)
    })
}

/// The parts of a `tokenizer.json` in the order that `tokenizers` writes them.
#[derive(Serialize)]
struct TokenizerJson<'a> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<AddedToken<'a>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Bpe<'a>,
}

#[derive(Serialize)]
struct AddedToken<'a> {
    id: usize,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Bpe<'a> {
    r#type: &'static str,
    dropout: Option<()>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<()>,
    end_of_word_suffix: Option<()>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    #[serde(serialize_with = "as_map")]
    vocab: Vec<(&'a str, usize)>,
    merges: Vec<(&'a str, &'a str)>,
}

fn as_map<S: Serializer>(pairs: &[(&str, usize)], s: S) -> Result<S::Ok, S::Error> {
    s.collect_map(pairs.iter().copied())
}

impl TokenizerJson<'_> {
    fn text(&self, v: &Vocabulary) -> Result<String> {
        serde_json::to_string(self).map_err(|e| v.bad(format!("its tokenizer cannot be written: {e}")))
    }
}

fn added(id: usize, content: &str, special: bool) -> AddedToken<'_> {
    AddedToken { id, content, single_word: false, lstrip: false, rstrip: false, normalized: false, special }
}

/// Puts the bos token before and the eos token behind every text.
fn post_processor(bos: Option<(usize, &str)>, eos: Option<(usize, &str)>) -> Value {
    if bos.is_none() && eos.is_none() {
        return Value::Null;
    }
    let sequence = |id: &str, type_id: u8| {
        let special = |text: &str| json!({ "SpecialToken": { "id": text, "type_id": type_id } });
        let text = json!({ "Sequence": { "id": id, "type_id": type_id } });
        let (front, back) = (bos.map(|(_, t)| special(t)), eos.map(|(_, t)| special(t)));
        front.into_iter().chain([text]).chain(back).collect::<Vec<Value>>()
    };
    let mut specials = Map::new();
    for (id, text) in [bos, eos].into_iter().flatten() {
        specials.insert(text.to_string(), json!({ "id": text, "ids": [id], "tokens": [text] }));
    }
    let pair = [sequence("A", 0), sequence("B", 1)].concat();
    json!({
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": pair,
        "special_tokens": specials,
    })
}

/// The ids by text; of equal texts the first keeps the id.
fn by_text<'a>(pieces: impl Iterator<Item = (&'a str, usize)>) -> HashMap<&'a str, usize> {
    let mut ids = HashMap::new();
    for (text, id) in pieces {
        ids.entry(text).or_insert(id);
    }
    ids
}

fn byte_level_json(v: &Vocabulary, pre: &PreTokenizer, post_processor: Value) -> Result<String> {
    // Unused ids pad the matrix to a round size; they have no text.
    let used = || v.tokens.iter().zip(v.types).enumerate().filter(|(_, (_, ty))| **ty != UNUSED);
    let ids = by_text(used().map(|(id, (text, _))| (text.as_str(), id)));
    let added_tokens = used()
        .filter(|(_, (_, ty))| matches!(**ty, UNKNOWN | CONTROL | USER))
        .map(|(id, (text, ty))| added(id, text, *ty != USER))
        .collect();

    let Some(lines) = v.header.texts("tokenizer.ggml.merges")? else {
        return Err(v.bad("metadata key tokenizer.ggml.merges is missing".into()));
    };
    let mut merges = Vec::with_capacity(lines.len());
    let mut joined = String::new();
    for line in lines {
        let pair = line.split_once(' ').filter(|(a, b)| {
            joined.clear();
            joined.push_str(a);
            joined.push_str(b);
            [a, b, joined.as_str()].iter().all(|t| ids.contains_key(t))
        });
        merges.push(pair.ok_or_else(|| v.bad(format!("merge {line:?} does not join two tokens into a third")))?);
    }

    let level =
        |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    let split =
        |pattern: &&str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    let steps: Vec<Value> = pre.patterns.iter().map(split).chain([level(pre.gpt2)]).collect();
    TokenizerJson {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens,
        normalizer: if pre.nfc { json!({ "type": "NFC" }) } else { Value::Null },
        pre_tokenizer: json!({ "type": "Sequence", "pretokenizers": steps }),
        post_processor,
        decoder: level(true),
        model: Bpe {
            r#type: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: pre.ignore_merges,
            vocab: in_order(&ids),
            merges,
        },
    }
    .text(v)
}

fn in_order<'a>(ids: &HashMap<&'a str, usize>) -> Vec<(&'a str, usize)> {
    let mut vocab: Vec<_> = ids.iter().map(|(&text, &id)| (text, id)).collect();
    vocab.sort_unstable_by_key(|&(_, id)| id);
    vocab
}

fn sentencepiece_json(v: &Vocabulary, family: &Family, post_processor: Value) -> Result<String> {
    let scores = match v.header.floats("tokenizer.ggml.scores")? {
        Some(scores) if scores.len() == v.tokens.len() => scores,
        Some(scores) => return Err(v.bad(format!("{} tokens, but {} scores", v.tokens.len(), scores.len()))),
        None => return Err(v.bad("metadata key tokenizer.ggml.scores is missing".into())),
    };
    // Converters spell user-defined runs of spaces with plain spaces; pieces are matched after spaces have
    // become U+2581.
    let respelt: HashMap<usize, String> = (v.tokens.iter().zip(v.types).enumerate())
        .filter(|(_, (text, ty))| **ty == USER && !text.is_empty() && text.bytes().all(|b| b == b' '))
        .map(|(id, (text, _))| (id, text.chars().map(|_| SPACE).collect()))
        .collect();
    let piece = |id: usize| respelt.get(&id).unwrap_or(&v.tokens[id]).as_str();
    let ids = by_text((0..v.tokens.len()).map(|id| (piece(id), id)));

    // The Phi-3 release strips the space behind its chat marks.
    let strips =
        |id: usize, text: &str| family.name == "phi3" && v.types[id] != UNKNOWN && text != "<s>" && text != "<|endoftext|>";
    let gemma_marks = ["<start_of_turn>", "<end_of_turn>", "[multimodal]"];
    let added_tokens = (0..v.tokens.len())
        .filter(|&id| matches!(v.types[id], UNKNOWN | CONTROL | USER))
        .map(|id| {
            let text = piece(id);
            let special = v.types[id] != USER || family.is_gemma() && gemma_marks.contains(&text);
            AddedToken { rstrip: strips(id, text), ..added(id, text, special) }
        })
        .collect();
    let unknown = match v.named("unknown_token_id")? {
        Some((id, _)) => Some(piece(id)),
        None => v.types.iter().position(|&ty| ty == UNKNOWN).map(piece),
    };

    let space = SPACE.to_string();
    let to_piece = json!({ "type": "Replace", "pattern": { "String": " " }, "content": space });
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": space }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    let leading_space = v.header.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(!family.is_gemma());
    let normalizer = if leading_space {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": space }, to_piece] })
    } else {
        to_piece
    };
    TokenizerJson {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens,
        normalizer,
        pre_tokenizer: Value::Null,
        post_processor,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        model: Bpe {
            r#type: "BPE",
            dropout: None,
            unk_token: unknown,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: true,
            byte_fallback: true,
            ignore_merges: false,
            vocab: in_order(&ids),
            merges: merges_by_score(v.types, scores, piece, &ids),
        },
    }
    .text(v)
}

/// SentencePiece joins, of all neighbours, the two whose union has the best score. As a merge list: every
/// way to cut a piece into two pieces, best score first; among equal scores longer left and right parts
/// first, then lower ids. User-defined pieces count as score 0, above all others.
fn merges_by_score<'a>(
    types: &[i64],
    scores: &[f32],
    piece: impl Fn(usize) -> &'a str,
    ids: &HashMap<&'a str, usize>,
) -> Vec<(&'a str, &'a str)> {
    let mut merges = Vec::new();
    for (id, &ty) in types.iter().enumerate() {
        if !matches!(ty, NORMAL | USER) {
            continue;
        }
        let text = piece(id);
        // The sum makes -0 a plain 0.
        let score = if ty == USER { 0.0 } else { scores[id] + 0.0 };
        let chars = text.chars().count();
        for (n, (at, _)) in text.char_indices().enumerate().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(&a), Some(&b)) = (ids.get(left), ids.get(right)) {
                merges.push((score, Reverse((n, chars - n)), a, b, left, right));
            }
        }
    }
    merges.sort_unstable_by(|x, y| y.0.total_cmp(&x.0).then_with(|| (x.1, x.2, x.3).cmp(&(y.1, y.2, y.3))));
    merges.into_iter().map(|(.., left, right)| (left, right)).collect()
}
