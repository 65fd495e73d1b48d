//! Against the ids that the sentencepiece library gives (`tests/fixtures/folder/generate.py`).

use super::*;
use crate::error::Kind;
use serde_json::json;
use tokenizers::Tokenizer;

const LLAMA: &[u8] = include_bytes!("../../../tests/fixtures/folder/llama.model");
const GEMMA: &[u8] = include_bytes!("../../../tests/fixtures/folder/gemma.model");
const UNIGRAM: &[u8] = include_bytes!("../../../tests/fixtures/folder/unigram.model");
const EXPECTED: &str = include_str!("../../../tests/fixtures/folder/expected.json");

fn path() -> &'static Path {
    Path::new("tokenizer.model")
}

fn tokenizer(model: &[u8], config: Value, added: Vec<AddedToken>) -> Tokenizer {
    to_tokenizer_json(path(), model, &config, added).unwrap().parse().unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, true).unwrap().get_ids().to_vec()
}

fn check(name: &str, model: &[u8], config: Value) {
    let tokenizer = tokenizer(model, config, Vec::new());
    let rows: Vec<Value> = serde_json::from_str(EXPECTED).unwrap();
    for row in &rows {
        let text = row["text"].as_str().unwrap();
        let expected: Vec<u32> = serde_json::from_value(row[name].clone()).unwrap();
        assert_eq!(ids(&tokenizer, text), expected, "{name}: {text:?}");
        // Decoding joins an unknown piece differently (sentencepiece writes " ⁇ "), so only known text is compared.
        if name != "unigram" || !expected.contains(&0) {
            assert_eq!(tokenizer.decode(&expected, false).unwrap(), row["decoded"][name], "{name}: {text:?}");
        }
    }
    assert!(rows.len() > 20);
}

#[test]
fn p12_bpe_with_prefix_gives_the_ids_of_sentencepiece() {
    check("llama", LLAMA, json!({ "add_bos_token": false }));
}

#[test]
fn p12_bpe_without_prefix_gives_the_ids_of_sentencepiece() {
    check("gemma", GEMMA, json!({ "add_bos_token": false }));
}

#[test]
fn unigram_gives_the_ids_of_sentencepiece() {
    check("unigram", UNIGRAM, json!({}));
}

#[test]
fn begin_and_end_tokens_follow_the_configuration() {
    let bare = ids(&tokenizer(LLAMA, json!({ "add_bos_token": false }), Vec::new()), "water");
    let bos = |config| ids(&tokenizer(LLAMA, config, Vec::new()), "water");
    assert_eq!(bos(json!({})), [&[1], &bare[..]].concat());
    assert_eq!(bos(json!({ "add_eos_token": true, "add_bos_token": false })), [&bare[..], &[2]].concat());
    assert_eq!(bos(json!({ "bos_token": { "content": "</s>" } })), [&[2], &bare[..]].concat());
    assert_eq!(bos(json!({ "bos_token": null })), bare);
    // Gemma numbers its tokens pad, eos, bos, unk.
    assert_eq!(ids(&tokenizer(GEMMA, json!({}), Vec::new()), "")[..], [2]);
    assert_eq!(ids(&tokenizer(UNIGRAM, json!({ "tokenizer_class": "T5Tokenizer" }), Vec::new()), ""), [2]);
}

/// As transformers has it for Llama: a space after control tokens by default, none with `legacy: false`.
#[test]
fn text_after_a_control_token() {
    let pieces = |config| {
        let encoding = tokenizer(LLAMA, config, Vec::new()).encode("the</s>the", false).unwrap();
        encoding.get_tokens().to_vec()
    };
    assert_eq!(pieces(json!({})), ["▁the", "</s>", "▁the"]);
    assert_eq!(pieces(json!({ "legacy": false })), ["▁the", "</s>", "t", "he"]);
    assert_eq!(pieces(json!({ "legacy": false, "add_prefix_space": false })), ["t", "he", "</s>", "t", "he"]);
}

#[test]
fn added_tokens_rename_pieces_and_extend_the_vocabulary() {
    let size = SentencePieceModel::parse(path(), LLAMA).unwrap().pieces.len();
    let token = |id, content: &str| AddedToken { id, content: content.into(), special: true, ..AddedToken::default() };
    let added = vec![token(3, "<|im_start|>"), token(size, "<|im_end|>"), token(size + 1, "<pad>")];
    let tokenizer = tokenizer(LLAMA, json!({ "add_bos_token": false }), added);
    assert_eq!(ids(&tokenizer, "<|im_start|><|im_end|><pad>"), [3, size as u32, size as u32 + 1]);

    let failure = |added| to_tokenizer_json(path(), LLAMA, &json!({}), added).unwrap_err();
    assert_eq!(failure(vec![token(size + 5, "<gap>")]).kind, Kind::Unsupported);
    assert!(failure(vec![token(3, "</s>")]).message().contains("\"</s>\" a second id"));
    assert!(failure(vec![token(size, "</s>")]).message().contains("\"</s>\" a second id"));
}

#[test]
fn user_defined_pieces_are_tokens() {
    let gemma = tokenizer(GEMMA, json!({}), Vec::new());
    let added = gemma.get_added_tokens_decoder();
    let find = |text: &str| added.values().find(|t| t.content == text).unwrap();
    assert!(find("<start_of_turn>").special && find("<s>").special);
    assert!(!find("\n\n").special);
    assert!(tokenizer(LLAMA, json!({}), Vec::new()).token_to_id("</tool>").is_some());
}

/// Cut short or with a bit flipped, it is still a model or one clear error.
#[test]
fn damaged_models_never_panic() {
    for whole in [LLAMA, UNIGRAM] {
        for cut in (0..whole.len()).step_by(7) {
            if let Err(e) = to_tokenizer_json(path(), &whole[..cut], &json!({}), Vec::new()) {
                assert!(e.message().starts_with("tokenizer.model: "), "{e}");
            }
        }
        let mut state = 1u32;
        for _ in 0..600 {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            let mut bytes = whole.to_vec();
            bytes[state as usize / 8 % whole.len()] ^= 1 << (state >> 29);
            if let Ok(json) = to_tokenizer_json(path(), &bytes, &json!({}), Vec::new())
                && let Ok(tokenizer) = json.parse::<Tokenizer>()
            {
                let _ = tokenizer.encode_fast("ＡＢＣ ﬁne ½ cup… water\t🌵", true);
            }
        }
    }
}

/// A message with one length-delimited field.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    let mut len = bytes.len();
    while len >= 128 {
        out.push(len as u8 | 128);
        len >>= 7;
    }
    out.push(len as u8);
    out.extend_from_slice(bytes);
    out
}

#[test]
fn what_is_not_sound_or_not_supported_is_named() {
    let unknown = field(1, &[&field(1, b"<unk>")[..], &[3 << 3, 2]].concat());
    let with = |more: &[u8]| to_tokenizer_json(path(), &[&unknown, more].concat(), &json!({}), Vec::new());
    assert!(with(&[]).is_ok());
    let piece = |text: &str| field(1, &field(1, text.as_bytes()));
    let map = |trie: &[u32], texts: &[u8]| {
        let trie: Vec<u8> = trie.iter().flat_map(|u| u.to_le_bytes()).collect();
        field(3, &field(2, &[&(trie.len() as u32).to_le_bytes(), &trie[..], texts].concat()))
    };
    let far_child = {
        let mut trie = [0u32; 256];
        trie[7] = 1 << 10 << 11 | 7;
        trie
    };
    let far_text = {
        let mut trie = [0u32; 256];
        trie[7] = 1 << 10 | 1 << 8 | 7;
        trie[6] = 1 << 31 | 900;
        trie
    };
    let cases = [
        (piece(""), Kind::BadFile, "piece 1 (\"\") is empty"),
        (piece("<unk>"), Kind::BadFile, "comes twice"),
        (piece(&"x".repeat(1025)), Kind::BadFile, "piece 1: longer than 1024 bytes"),
        (field(1, &[&field(1, b"a")[..], &[2 << 3 | 5, 0, 0, 0xc0, 0x7f]].concat()), Kind::BadFile, "piece 1: its score"),
        (field(1, &[&field(1, b"a")[..], &[3 << 3, 5]].concat()), Kind::Unsupported, "unused pieces"),
        (field(1, &[2 << 3 | 2, 0]), Kind::BadFile, "wrong type"),
        (vec![1 << 3 | 2, 0xff, 0xff, 0xff, 0xff, 0x7f], Kind::BadFile, "ends early"),
        (vec![0xff; 11], Kind::BadFile, "over 64 bits"),
        (vec![1 << 3 | 3], Kind::BadFile, "wire type 3"),
        (field(2, &[3 << 3, 3]), Kind::Unsupported, "algorithm WORD"),
        (field(2, &[0xc0, 1, 1]), Kind::Unsupported, "whitespace as a suffix"),
        (field(2, &[0x98, 2, 1]), Kind::BadFile, "no piece for byte 0"),
        (field(3, &[5 << 3, 0]), Kind::Unsupported, "spaces kept"),
        (field(3, &field(2, &[0xff, 0xff, 0xff, 0xff])), Kind::BadFile, "character map"),
        (map(&[0; 100], b""), Kind::BadFile, "character map"),
        (map(&far_child, b""), Kind::BadFile, "character map"),
        (map(&far_text, b"a\0"), Kind::BadFile, "character map"),
        (field(5, &field(2, b"x")), Kind::Unsupported, "a denormalizer"),
    ];
    for (more, kind, text) in cases {
        let error = with(&more).unwrap_err();
        assert!(error.kind == kind && error.message().contains(text), "{error} / expected {text}");
        assert!(error.hint().is_some());
    }
    let none = to_tokenizer_json(path(), &piece("a"), &json!({}), Vec::new()).unwrap_err();
    assert!(none.message().contains("no unknown piece"));
}
