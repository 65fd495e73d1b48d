//! Turning a sentencepiece model into a `tokenizer.json` that cuts text into the same pieces.
//!
//! What sentencepiece does to a text, in its order, and what does it here:
//! 1. character replacements (`precompiled_charsmap`): the `Precompiled` normalizer;
//! 2. spaces at the ends dropped and runs of spaces joined: two `Replace` normalizers;
//! 3. a space put in front (`add_dummy_prefix`) and every space written as `▁`: `Prepend` and `Replace`, or a
//!    `Metaspace` pre-tokenizer when `legacy` is false in `tokenizer_config.json`, see [`normalizer`];
//! 4. BPE or Unigram over the whole text; user-defined pieces are always taken whole.
//!
//! Control pieces such as `<s>` become special added tokens, so unlike sentencepiece a tokenizer made here finds
//! them in the text, as every Hugging Face tokenizer does.
//!
//! Where the `tokenizers` crate itself differs from sentencepiece, the result does too, as it does in transformers:
//! its `Precompiled` replaces whole graphemes (a combining mark behind a replaced character is lost); Unigram breaks
//! ties of equal scores otherwise and takes a literal `<0x41>` in the text for a byte piece.

use super::folder_tokenizer::{AddedToken, check_added_ids, frame, token_text};
use super::sentencepiece_model::{Algorithm, Piece, PieceKind, SentencePieceModel};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use tokenizers::normalizers::Precompiled;

/// How sentencepiece writes a space.
const SPACE: &str = "▁";

/// Makes the text of a `tokenizer.json` from `bytes`, the content of the `tokenizer.model` at `path`.
///
/// `config` is `tokenizer_config.json`; `added` are the tokens added beside the model, by ascending id. One whose
/// id lies inside the vocabulary renames that piece.
pub(super) fn to_tokenizer_json(path: &Path, bytes: &[u8], config: &Value, mut added: Vec<AddedToken>) -> Result<String> {
    let mut model = SentencePieceModel::parse(path, bytes)?;
    let prefix = model.add_dummy_prefix && config["add_prefix_space"] != false;
    check_added_ids(path, model.pieces.len(), &added)?;
    rename(path, &mut model, &added)?;
    let user_defined = join_added(&model, prefix, &mut added);

    let find = |key: &str, piece: &str| {
        let text = config.get(key).map_or(Some(piece), token_text);
        added.iter().find(|t| Some(t.content.as_str()) == text).map(|t| (t.content.as_str(), t.id))
    };
    let t5 = config["tokenizer_class"].as_str().is_some_and(|class| class.starts_with("T5"));
    let add_bos = config["add_bos_token"].as_bool().unwrap_or(model.algorithm == Algorithm::Bpe);
    let add_eos = config["add_eos_token"].as_bool().unwrap_or(t5);
    let bos = find("bos_token", &model.bos_piece).filter(|_| add_bos);
    let eos = find("eos_token", &model.eos_piece).filter(|_| add_eos);
    let legacy = config["legacy"] != false;
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added.iter().map(AddedToken::to_json).collect::<Vec<_>>(),
        "normalizer": normalizer(path, &model, prefix && legacy)?,
        "pre_tokenizer": pre_tokenizer(prefix && !legacy, &user_defined),
        "post_processor": frame(bos, eos),
        "decoder": decoder(prefix),
        "model": match model.algorithm {
            Algorithm::Bpe => bpe(&model, !user_defined.is_empty()),
            Algorithm::Unigram => unigram(&model),
        },
    });
    Ok(json.to_string())
}

/// Gives pieces the names that `added` has for their ids. A renamed piece takes no part in merges any more.
fn rename(path: &Path, model: &mut SentencePieceModel, added: &[AddedToken]) -> Result<()> {
    for token in added {
        if let Some(piece) = model.pieces.get_mut(token.id).filter(|p| p.text != token.content) {
            piece.text.clone_from(&token.content);
            if piece.kind != PieceKind::Unknown {
                piece.kind = PieceKind::Control;
            }
        }
    }
    let size = model.pieces.len();
    let texts = model.pieces.iter().map(|p| &p.text).chain(added.iter().filter(|t| t.id >= size).map(|t| &t.content));
    let mut seen = HashSet::new();
    for text in texts {
        if !seen.insert(text) {
            return Err(Error::bad_file(path, format!("the added tokens give token {text:?} a second id")));
        }
    }
    Ok(())
}

/// Completes `added` with the model's own special pieces. Returns the user-defined pieces that must be found
/// another way: behind a prefix space an added token would make the rest of the text start with a space again.
fn join_added(model: &SentencePieceModel, prefix: bool, added: &mut Vec<AddedToken>) -> Vec<String> {
    let known: HashSet<usize> = added.iter().map(|t| t.id).collect();
    let mut user_defined = Vec::new();
    for (id, piece) in model.pieces.iter().enumerate().filter(|(id, _)| !known.contains(id)) {
        let special = match piece.kind {
            PieceKind::Control => true,
            // The turn marks of Gemma are user-defined pieces, but control the chat.
            PieceKind::UserDefined => matches!(piece.text.as_str(), "<start_of_turn>" | "<end_of_turn>"),
            _ => continue,
        };
        if piece.kind == PieceKind::UserDefined && prefix {
            user_defined.push(piece.text.clone());
        } else {
            added.push(AddedToken { id, content: piece.text.clone(), special, ..AddedToken::default() });
        }
    }
    if !prefix {
        // Runs of spaces are there only once spaces are written as `▁`.
        added.iter_mut().filter(|t| t.content.contains(SPACE)).for_each(|t| t.normalized = true);
    }
    added.sort_by_key(|t| t.id);
    user_defined
}

/// The normalizer runs on each stretch of text between added tokens, so `Prepend` puts a space after every added
/// token. That is how Llama tokenizers behave whose configuration does not say `legacy: false`.
fn normalizer(path: &Path, model: &SentencePieceModel, prepend: bool) -> Result<Value> {
    let replace = |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    let mut steps = Vec::new();
    if !model.charsmap.is_empty() {
        let damaged = |what: String| Error::bad_file(path, format!("the character map is damaged: {what}"));
        let map = Precompiled::from(&model.charsmap).map_err(|e| damaged(e.to_string()))?;
        steps.push(serde_json::to_value(map).map_err(|e| damaged(e.to_string()))?);
    }
    if model.remove_extra_whitespaces {
        // At the end of the text sentencepiece drops a literal `▁` as well, at its start it does not.
        steps.push(replace(json!({ "Regex": r"\A +|[ ▁]+\z" }), ""));
        steps.push(replace(json!({ "Regex": " {2,}" }), " "));
    }
    if prepend {
        steps.push(json!({ "type": "Prepend", "prepend": SPACE }));
    }
    steps.push(replace(json!({ "String": " " }), SPACE));
    Ok(json!({ "type": "Sequence", "normalizers": steps }))
}

/// `first` puts a space before the text but not after added tokens (`legacy: false`). User-defined pieces are cut
/// out, the longest first; the model then meets each of them alone and takes it whole.
fn pre_tokenizer(first: bool, user_defined: &[String]) -> Value {
    let mut steps = Vec::new();
    if first {
        steps.push(json!({ "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": false }));
    }
    if !user_defined.is_empty() {
        let mut pieces: Vec<&String> = user_defined.iter().collect();
        pieces.sort_by_key(|p| std::cmp::Reverse(p.chars().count()));
        let pattern = pieces.iter().map(|p| escape(p)).collect::<Vec<_>>().join("|");
        steps.push(json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false }));
    }
    if steps.is_empty() { Value::Null } else { json!({ "type": "Sequence", "pretokenizers": steps }) }
}

/// A regular expression that matches exactly `text`.
fn escape(text: &str) -> String {
    let mut pattern = String::new();
    for c in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

fn decoder(prefix: bool) -> Value {
    let mut steps = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": steps })
}

/// sentencepiece joins the neighbours whose union has the highest score, so the merges are all ways to cut a normal
/// piece in two normal pieces, by falling score. `whole` makes a stretch that is a piece come out as that piece.
fn bpe(model: &SentencePieceModel, whole: bool) -> Value {
    let normal: HashMap<&str, usize> =
        (0..).zip(&model.pieces).filter(|(_, p)| p.kind == PieceKind::Normal).map(|(id, p)| (p.text.as_str(), id)).collect();
    let mut results: Vec<(usize, &Piece)> =
        model.pieces.iter().enumerate().filter(|(_, p)| p.kind == PieceKind::Normal).collect();
    results.sort_by(|(_, a), (_, b)| b.score.total_cmp(&a.score));
    let mut merges: Vec<[&str; 2]> = Vec::new();
    for (_, piece) in results {
        let from = merges.len();
        let cuts = piece.text.char_indices().skip(1).map(|(at, _)| piece.text.split_at(at));
        merges.extend(cuts.filter(|(a, b)| normal.contains_key(a) && normal.contains_key(b)).map(|(a, b)| [a, b]));
        merges[from..].sort_by_key(|[a, b]| (normal[a], normal[b]));
    }
    let vocab: Map<String, Value> = (0..).zip(&model.pieces).map(|(id, p): (usize, _)| (p.text.clone(), id.into())).collect();
    json!({
        "type": "BPE", "dropout": null, "unk_token": model.pieces[model.unknown_id].text, "fuse_unk": true,
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "byte_fallback": model.byte_fallback,
        "ignore_merges": whole, "vocab": vocab, "merges": merges,
    })
}

fn unigram(model: &SentencePieceModel) -> Value {
    let vocab: Vec<Value> = model.pieces.iter().map(|p| json!([p.text, p.score])).collect();
    json!({ "type": "Unigram", "unk_id": model.unknown_id, "byte_fallback": model.byte_fallback, "vocab": vocab })
}

#[cfg(test)]
#[path = "sentencepiece_tests.rs"]
mod tests;
