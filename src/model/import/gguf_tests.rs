//! GGUF files as a whole: sound ones of each family, a split set, and damaged ones.

use super::sentencepiece_model::{Piece, PieceKind, SentencePieceModel};
use super::{Checkpoint, RowOrder};
use crate::error::{Error, Kind};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer};

/// Written by the `gguf` Python package, see `make_sentencepiece.py`.
const FIXTURE: &[u8] = include_bytes!("../../../tests/fixtures/gguf/sentencepiece.gguf");
const TRUTH: &str = include_str!("../../../tests/fixtures/gguf/sentencepiece.json");

/// A GGUF file in the making.
#[derive(Clone, Default)]
struct Builder {
    meta: Vec<(String, Vec<u8>)>,
    /// Name, dimensions (innermost first), type number, data.
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat()
}

impl Builder {
    fn put(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.meta.retain(|(k, _)| k != key);
        self.meta.push((key.into(), [&kind.to_le_bytes(), value].concat()));
        self
    }
    fn u32(self, key: &str, v: u32) -> Self {
        self.put(key, 4, &v.to_le_bytes())
    }
    fn f32(self, key: &str, v: f32) -> Self {
        self.put(key, 6, &v.to_le_bytes())
    }
    fn flag(self, key: &str, v: bool) -> Self {
        self.put(key, 7, &[v as u8])
    }
    fn text(self, key: &str, v: &str) -> Self {
        self.put(key, 8, &string(v))
    }
    fn texts(self, key: &str, v: &[&str]) -> Self {
        let items: Vec<u8> = v.iter().flat_map(|s| string(s)).collect();
        self.put(key, 9, &[&8u32.to_le_bytes()[..], &(v.len() as u64).to_le_bytes(), &items].concat())
    }
    fn ints(self, key: &str, v: &[i32]) -> Self {
        let items: Vec<u8> = v.iter().flat_map(|i| i.to_le_bytes()).collect();
        self.put(key, 9, &[&5u32.to_le_bytes()[..], &(v.len() as u64).to_le_bytes(), &items].concat())
    }
    fn tensor(mut self, name: &str, dims: &[u64], values: &[f32]) -> Self {
        let data = values.iter().flat_map(|f| f.to_le_bytes()).collect();
        self.tensors.push((name.into(), dims.to_vec(), 0, data));
        self
    }
    fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.meta.len() as u64).to_le_bytes());
        for (key, value) in &self.meta {
            out.extend(string(key));
            out.extend(value);
        }
        let mut data = Vec::new();
        for (name, dims, kind, bytes) in &self.tensors {
            out.extend(string(name));
            out.extend((dims.len() as u32).to_le_bytes());
            out.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }
}

/// A model of a family with sizes and a byte-level tokenizer, but no tensors apart from the embedding.
fn model(family: &str, layers: u32) -> Builder {
    let key = |k: &str| format!("{family}.{k}");
    Builder::default()
        .text("general.architecture", family)
        .u32(&key("block_count"), layers)
        .u32(&key("context_length"), 4096)
        .u32(&key("embedding_length"), 64)
        .u32(&key("feed_forward_length"), 128)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "qwen2")
        .texts("tokenizer.ggml.tokens", &["a", "b", "ab", "<|im_end|>", "<tool>", "[PAD5]", "<|eot_id|>"])
        .ints("tokenizer.ggml.token_type", &[1, 1, 1, 3, 4, 5, 3])
        .texts("tokenizer.ggml.merges", &["a b"])
        .u32("tokenizer.ggml.eos_token_id", 3)
        .tensor("token_embd.weight", &[4, 8], &[0.0; 32])
}

fn write(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn open(bytes: &[u8]) -> Result<Checkpoint, Error> {
    let dir = TempDir::new().unwrap();
    Checkpoint::open(&write(&dir, "m.gguf", bytes))
}

fn config(b: &Builder) -> Value {
    open(&b.build()).unwrap().config
}

/// The error's kind, after checking that its text holds all of `parts`.
#[track_caller]
fn fails(bytes: &[u8], parts: &[&str]) -> Kind {
    let e = open(bytes).expect_err("should not open");
    assert!(parts.iter().all(|p| e.message().contains(p)), "{parts:?} not all in: {e}");
    // What is only not supported is not called damaged.
    let text = format!("{e} {}", e.hint().unwrap_or_default());
    let damage = ["corrupt", "damaged", "cut short", "again"].iter().any(|word| text.contains(word));
    assert!(!damage || e.kind == Kind::BadFile, "{text}");
    e.kind
}

#[test]
fn p12_a_file_of_the_gguf_package_opens_with_sentencepiece_ids() {
    let c = open(FIXTURE).unwrap();
    let truth: Value = serde_json::from_str(TRUTH).unwrap();
    let tokenizer = Tokenizer::from_bytes(&c.tokenizer.tokenizer_json).unwrap();
    for case in truth["texts"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let encoding = tokenizer.encode(text, true).unwrap();
        assert_eq!(json!(encoding.get_ids()), case["ids"], "{text:?}");
        assert_eq!(tokenizer.decode(&encoding.get_ids()[1..], false).unwrap(), text.replace('\u{2581}', " "));
    }
    let mark = tokenizer.encode("the<|mark|>the</s>", false).unwrap();
    assert!(mark.get_tokens().iter().any(|t| t == "<|mark|>") && mark.get_tokens().last().unwrap() == "</s>");

    assert_eq!(c.tokenizer.config["bos_token"], "<s>");
    assert_eq!(c.tokenizer.config["add_bos_token"], true);
    assert!(c.tokenizer.chat_template.unwrap().starts_with("{{ bos_token }}"));
    assert_eq!(c.generation.unwrap(), json!({ "eos_token_id": [2], "bos_token_id": 1 }));
    assert_eq!(c.config["tie_word_embeddings"], true);
    assert_eq!(c.config["rms_norm_eps"], 1e-6);
    assert_eq!(c.config["vocab_size"], 370);
    assert!(!c.norms_include_one);

    let read = |name: &str| {
        let t = &c.tensors[name];
        let mut out = vec![0f32; t.elements()];
        t.read_rows(0..t.rows(), &mut out).unwrap();
        (t, out)
    };
    for (name, rows, heads) in [("q_proj", 32, 4), ("k_proj", 16, 2)] {
        let (tensor, values) = read(&format!("model.layers.0.self_attn.{name}.weight"));
        assert_eq!((&tensor.shape[..], tensor.order), (&[rows, 32][..], RowOrder::RopePairs { heads }));
        assert!(values.chunks_exact(32).enumerate().all(|(r, row)| row.iter().all(|v| *v == r as f32)));
    }
    let (_, output) = read("model.layers.0.self_attn.o_proj.weight");
    let row = truth["o_proj_row_3"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32);
    assert!(output[96..128].iter().copied().eq(row));
    let (_, norm) = read("model.layers.0.post_attention_layernorm.weight");
    assert_eq!(norm, [2.0; 32]);
}

#[test]
fn p54_a_file_cut_anywhere_is_an_error() {
    let data = FIXTURE.len() - 12 * 1024;
    let mut ends: Vec<usize> = (0..12).map(|i| data / 12 * i).collect();
    ends.extend([1, 7, 23, FIXTURE.len() / 2, data + 1, FIXTURE.len() - 1000, FIXTURE.len() - 600, FIXTURE.len() - 544]);
    for end in ends {
        let size = format!("bytes, the file has {end}");
        assert_eq!(fails(&FIXTURE[..end], &["m.gguf", "cut short", &size]), Kind::BadFile, "{end} bytes");
        assert_eq!(open(&FIXTURE[..end]).unwrap_err().hint(), Some("download it again"));
    }
}

#[test]
fn p52_damaged_bytes_never_panic() {
    let dir = TempDir::new().unwrap();
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    for _ in 0..600 {
        let mut bytes = FIXTURE[..if next() % 4 == 0 { next() % FIXTURE.len() } else { FIXTURE.len() }].to_vec();
        for _ in 0..1 + next() % 3 {
            if bytes.len() > 8 {
                // Mostly the header, where lengths and counts are.
                let at = next() % if next() % 3 == 0 { bytes.len() - 8 } else { (bytes.len() - 8).min(900) };
                let value = [0, 1, u64::MAX, 1 << 63, 1 << 31, next() as u64][next() % 6].to_le_bytes();
                let width = [1, 4, 8][next() % 3];
                bytes[at..at + width].copy_from_slice(&value[..width]);
            }
        }
        if let Ok(c) = Checkpoint::open(&write(&dir, "m.gguf", &bytes)) {
            for t in c.tensors.values() {
                t.read_rows(0..t.rows(), &mut vec![0f32; t.elements()]).unwrap();
            }
        }
    }
}

#[test]
fn p52_absurd_counts_fail_at_once() {
    let started = std::time::Instant::now();
    let absurd = [1u64 << 63, u64::MAX, 1 << 62, 1 << 40, 1 << 20];
    for n in absurd.map(u64::to_le_bytes) {
        let front = |tensors: [u8; 8], keys: [u8; 8]| [b"GGUF\x03\0\0\0", &tensors[..], &keys].concat();
        let (zero, one) = ([0; 8], 1u64.to_le_bytes());
        let key = [&string("k")[..], &9u32.to_le_bytes()].concat();
        let file = [front(n, zero), front(zero, n), [front(zero, one), n.to_vec()].concat()];
        for bytes in file {
            assert_eq!(fails(&bytes, &[]), Kind::BadFile);
        }
        for element in [0u32, 8, 10] {
            let bytes = [&front(zero, one)[..], &key, &element.to_le_bytes(), &n, &[0; 3]].concat();
            assert_eq!(fails(&bytes, &[]), Kind::BadFile);
        }
        let nested = [&front(zero, one)[..], &key, &9u32.to_le_bytes(), &n].concat();
        assert_eq!(fails(&nested, &["unknown type 9"]), Kind::BadFile);
    }
    assert!(started.elapsed().as_secs() < 1);
}

#[test]
fn p52_impossible_tensors_are_named() {
    let (count, size) = ("dimensions; 1 to 4 are allowed", "impossible dimensions");
    for (dims, what) in [
        (&[][..], count),
        (&[4; 5], count),
        (&[0, 8], size),
        (&[1 << 32, 1 << 32], size),
        (&[u64::MAX, 2], size),
        (&[1 << 63], size),
        (&[1 << 40, 4], "cut short"),
    ] {
        let kind = fails(&model("llama", 1).tensor("blk.0.attn_q.weight", dims, &[0.0; 32]).build(), &[what]);
        assert_eq!(kind, Kind::BadFile, "{dims:?}");
    }
    let mut b = model("llama", 1).tensor("blk.0.attn_q.weight", &[4, 12], &[0.0; 48]);
    for (type_id, name) in [(16, "IQ2_XXS"), (39, "MXFP4"), (999, "unknown")] {
        b.tensors[1].2 = type_id;
        let kind = fails(&b.build(), &["blk.0.attn_q.weight", name, "supported: F32, F16, BF16, Q4_0", "IQ4_XS"]);
        assert_eq!(kind, Kind::Unsupported);
    }
    b.tensors[1].2 = 8;
    fails(&b.build(), &["rows of 4 weights are not whole Q8_0 blocks"]);
    b.tensors[1].2 = 0;
    fails(&b.build(), &["q_proj.weight of shape [12, 4] does not split into 4 heads"]);
}

#[test]
fn p55_other_containers_are_named() {
    let version = |v: [u8; 4]| [&b"GGUF"[..], &v, &FIXTURE[8..]].concat();
    assert_eq!(fails(&version([1, 0, 0, 0]), &["version 1", "2 and 3"]), Kind::Unsupported);
    assert_eq!(fails(&version([0, 0, 0, 3]), &["big-endian"]), Kind::Unsupported);
    assert_eq!(fails(&version([9, 0, 0, 0]), &["version 9"]), Kind::Unsupported);
    assert_eq!(fails(b"tjgg\x03\0\0\0", &["older"]), Kind::Unsupported);
    assert_eq!(fails(b"<!DOCTYPE html><html>", &["is not a GGUF file"]), Kind::BadFile);
    assert_eq!(fails(b"", &["cut short"]), Kind::BadFile);
    open(&version([2, 0, 0, 0])).unwrap();
}

#[test]
fn p55_unsupported_things_are_named() {
    let listed = "supported: llama, qwen2, qwen3, gemma2, gemma3, smollm3, phi3";
    assert_eq!(fails(&model("mamba", 1).build(), &["architecture mamba", listed]), Kind::Unsupported);
    let moe = model("qwen3moe", 1).u32("qwen3moe.expert_count", 128);
    assert_eq!(fails(&moe.build(), &["qwen3moe", "mixture of experts"]), Kind::Unsupported);
    let moe = model("llama", 1).u32("llama.expert_count", 8);
    assert_eq!(fails(&moe.build(), &["mixture of 8 experts"]), Kind::Unsupported);
    let tensor = |name: &str| fails(&model("llama", 1).tensor(name, &[4], &[0.0; 4]).build(), &[name]);
    assert_eq!(tensor("blk.0.ffn_gate_exps.weight"), Kind::Unsupported);
    assert_eq!(tensor("blk.0.attn_q.bias"), Kind::Unsupported);
    assert_eq!(tensor("v.patch_embd.weight"), Kind::Unsupported);
    assert_eq!(tensor("blk.1.attn_norm.weight"), Kind::BadFile);
    fails(&model("llama", 1).texts("tokenizer.ggml.merges", &["a c"]).build(), &["\"a c\""]);
    fails(&model("llama", 1).u32("tokenizer.ggml.eos_token_id", 7).build(), &["eos_token_id is 7", "7 tokens"]);
    fails(&model("gemma3", u32::MAX).build(), &["4294967295 layers"]);
    let mut narrow = model("llama", 1);
    narrow.tensors[0].1 = vec![8, 4];
    fails(&narrow.build(), &["7 tokens", "4 rows"]);
    fails(&model("llama", 1).text("llama.block_count", "x").build(), &["llama.block_count is a string"]);
}

#[test]
fn p12_unknown_tokenizers_stop_with_their_names() {
    let pre = model("llama", 1).text("tokenizer.ggml.pre", "poro-chat");
    assert_eq!(fails(&pre.build(), &["poro-chat", "gpt-2, smollm, qwen2"]), Kind::Unsupported);
    let mut pre = model("llama", 1);
    pre.meta.retain(|(k, _)| k != "tokenizer.ggml.pre");
    assert_eq!(fails(&pre.build(), &["tokenizer.ggml.pre is missing"]), Kind::Unsupported);
    let bert = model("llama", 1).text("tokenizer.ggml.model", "bert");
    assert_eq!(fails(&bert.build(), &["tokenizer model bert"]), Kind::Unsupported);
}

/// The vocabularies of two `tokenizer.model` files as GGUF files: the same ids as from the files themselves, those of
/// the sentencepiece library (`tests/fixtures/folder/generate.py`).
#[test]
fn p12_sentencepiece_ids_are_the_same_from_gguf() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../../../tests/fixtures/folder/expected.json")).unwrap();
    let files: [(&str, &str, &[u8]); 2] = [
        ("llama", "llama", include_bytes!("../../../tests/fixtures/folder/llama.model")),
        ("gemma", "gemma2", include_bytes!("../../../tests/fixtures/folder/gemma.model")),
    ];
    for (name, family, bytes) in files {
        let source = SentencePieceModel::parse(Path::new(name), bytes).unwrap();
        let texts: Vec<&str> = source.pieces.iter().map(|p| p.text.as_str()).collect();
        let kind = |p: &Piece| match p.kind {
            PieceKind::Normal => 1,
            PieceKind::Unknown => 2,
            PieceKind::Control => 3,
            PieceKind::UserDefined => 4,
            PieceKind::Byte => 6,
        };
        let kinds: Vec<i32> = source.pieces.iter().map(kind).collect();
        let scores: Vec<u8> = source.pieces.iter().flat_map(|p| p.score.to_le_bytes()).collect();
        let count = texts.len() as u64;
        let mut file = model(family, 1)
            .text("tokenizer.ggml.model", "llama")
            .texts("tokenizer.ggml.tokens", &texts)
            .ints("tokenizer.ggml.token_type", &kinds)
            .put("tokenizer.ggml.scores", 9, &[&6u32.to_le_bytes()[..], &count.to_le_bytes(), &scores].concat())
            .flag("tokenizer.ggml.add_space_prefix", source.add_dummy_prefix);
        file.tensors[0] = ("token_embd.weight".into(), vec![1, count], 0, vec![0; 4 * count as usize]);
        let checkpoint = open(&file.build()).unwrap();
        let tokenizer = Tokenizer::from_bytes(&checkpoint.tokenizer.tokenizer_json).unwrap();
        // GGUF does not tell pieces that sentencepiece itself splits off from tokens that were added later, behind
        // which a text begins anew, with a space; they are taken for the latter.
        let ambiguous = |text: &str| {
            let mut defined = source.pieces.iter().filter(|p| p.kind == PieceKind::UserDefined);
            source.add_dummy_prefix && defined.any(|p| text.contains(&p.text))
        };
        for case in cases.iter().filter(|case| !ambiguous(case["text"].as_str().unwrap())) {
            let text = case["text"].as_str().unwrap();
            let ids = tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
            assert_eq!(json!(ids), case[name], "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), case["decoded"][name], "{name}: {text:?}");
        }
    }
}

#[test]
fn end_tokens_are_gathered_from_ids_and_names() {
    let c = open(&model("qwen2", 1).build()).unwrap();
    assert_eq!(c.generation.unwrap()["eos_token_id"], json!([3, 6]));
    let t: Value = serde_json::from_str(&c.tokenizer.tokenizer_json).unwrap();
    assert_eq!(t["model"]["vocab"], json!({ "a": 0, "b": 1, "ab": 2, "<|im_end|>": 3, "<tool>": 4, "<|eot_id|>": 6 }));
    let special: Vec<_> = t["added_tokens"].as_array().unwrap().iter().map(|a| a["special"].clone()).collect();
    assert_eq!(json!(special), json!([true, false, true]));
    let tokenizer = Tokenizer::from_bytes(&c.tokenizer.tokenizer_json).unwrap();
    assert_eq!(tokenizer.encode("ab<|im_end|>b<tool>a<|eot_id|>", true).unwrap().get_ids(), [2, 3, 1, 4, 0, 6]);
    let bos = model("qwen2", 1).u32("tokenizer.ggml.bos_token_id", 6).flag("tokenizer.ggml.add_bos_token", true);
    let bos = bos.flag("tokenizer.ggml.add_eos_token", true);
    let tokenizer = Tokenizer::from_bytes(open(&bos.build()).unwrap().tokenizer.tokenizer_json).unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap().get_ids(), [6, 2, 3]);
}

/// Pieces worked out by hand from what each release documents of its pattern.
#[test]
fn p12_pre_tokenizers_cut_as_their_releases_do() {
    let text = "Hello12345 it's HTMLParser's x==1/\n\n  y";
    for (name, pieces) in [
        ("gpt-2", "Hello|12345| it|'s| HTMLParser|'s| x|==|1|/|\n\n | y"),
        ("smollm", "Hello|1|2|3|4|5| it|'s| HTMLParser|'s| x|==|1|/|\n\n | y"),
        ("qwen2", "Hello|1|2|3|4|5| it|'s| HTMLParser|'s| x|==|1|/\n\n| | y"),
        ("llama-bpe", "Hello|123|45| it|'s| HTMLParser|'s| x|==|1|/\n\n| | y"),
        ("gpt-4o", "Hello|123|45| it's| HTMLParser's| x|==|1|/\n\n| | y"),
        ("tekken", "Hello|1|2|3|4|5| it|'s| HTMLParser|'s| x|==|1|/\n\n| | y"),
        ("default", "Hello|123|45| it|'|s| HTMLParser|'|s| x|==|1|/|\n\n | y"),
    ] {
        let c = open(&model("llama", 1).text("tokenizer.ggml.pre", name).build()).unwrap();
        let tokenizer = Tokenizer::from_bytes(&c.tokenizer.tokenizer_json).unwrap();
        let mut split = PreTokenizedString::from(text);
        tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut split).unwrap();
        let offsets = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let got: Vec<&str> = offsets.into_iter().map(|(_, (a, b), _)| &text[a..b]).collect();
        assert_eq!(got.join("|"), pieces, "{name}");
    }
}

#[test]
fn a_split_set_opens_from_any_part() {
    let dir = TempDir::new().unwrap();
    let u16 = |b: Builder, key: &str, v: u16| b.put(key, 2, &v.to_le_bytes());
    let part = |n: u16, b: Builder| u16(u16(b, "split.no", n), "split.count", 3).u32("split.tensors.count", 3);
    let norm = |name: &str| Builder::default().tensor(name, &[4], &[1.0; 4]);
    let name = |n: usize| format!("m-0000{n}-of-00003.gguf");
    write(&dir, &name(1), &part(0, model("llama", 2)).build());
    write(&dir, &name(2), &part(1, norm("output_norm.weight")).build());
    let third = write(&dir, &name(3), &part(2, norm("blk.1.attn_norm.weight")).build());
    for n in 1..=3 {
        let c = Checkpoint::open(&dir.path().join(name(n))).unwrap();
        let names: Vec<&str> = c.tensors.keys().map(String::as_str).collect();
        assert_eq!(names, ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"]);
        assert!(c.tensors["model.layers.1.input_layernorm.weight"].file.path.ends_with(name(3)));
    }
    let fails = |path: &Path, kind: Kind, text: &str| {
        let e = Checkpoint::open(path).unwrap_err();
        assert!(e.kind == kind && e.message().contains(text), "{e}");
    };
    let renamed = write(&dir, "m.gguf", &std::fs::read(&third).unwrap());
    fails(&renamed, Kind::BadFile, "is one of 3 parts");
    write(&dir, &name(3), &part(1, norm("blk.1.attn_norm.weight")).build());
    fails(&dir.path().join(name(1)), Kind::BadFile, "part 3 of 3");
    write(&dir, &name(3), &part(2, norm("output_norm.weight")).build());
    fails(&dir.path().join(name(1)), Kind::BadFile, "output_norm.weight appears twice");
    std::fs::remove_file(third).unwrap();
    fails(&dir.path().join(name(1)), Kind::NotFound, "m-00003-of-00003.gguf: part 3 of 3 is missing");
}

#[test]
fn every_family_gets_its_hugging_face_config() {
    let c = config(&model("llama", 2).u32("llama.attention.key_length", 32).f32("llama.rope.freq_base", 5e5));
    assert_eq!(c["architectures"], json!(["LlamaForCausalLM"]));
    assert_eq!((&c["head_dim"], &c["rope_theta"], &c["rms_norm_eps"]), (&json!(32), &json!(5e5), &json!(1e-5)));
    let c = config(&model("llama", 2).u32("llama.attention.sliding_window", 1024));
    assert_eq!((&c["model_type"], &c["sliding_window"]), (&json!("mistral"), &json!(1024)));
    let c = config(&model("qwen3", 2).tensor("output.weight", &[4, 8], &[0.0; 32]));
    assert_eq!((&c["model_type"], &c["tie_word_embeddings"]), (&json!("qwen3"), &json!(false)));

    let c = config(&model("gemma2", 46).u32("gemma2.attention.key_length", 128));
    assert_eq!((&c["query_pre_attn_scalar"], &c["attn_logit_softcapping"]), (&json!(16), &json!(50.0)));
    assert_eq!((&c["sliding_window"], &c["layer_types"][0]), (&json!(4096), &json!("sliding_attention")));
    assert_eq!(c["layer_types"][1], "full_attention");
    let b = model("gemma3", 7).u32("gemma3.attention.key_length", 256).u32("gemma3.attention.sliding_window", 512);
    let c = config(&b);
    assert_eq!((&c["query_pre_attn_scalar"], &c["rope_theta"]), (&json!(256), &json!(1e6)));
    let full: Vec<usize> = (0..7).filter(|&i| c["layer_types"][i] == "full_attention").collect();
    assert_eq!((full, &c["rope_local_base_freq"]), (vec![5], &json!(10000.0)));
    assert!(open(&b.build()).unwrap().norms_include_one);
    assert_eq!(
        config(&b.ints("gemma3.attention.sliding_window_pattern", &[1, 0, 1, 1, 1, 1, 1]))["layer_types"][1],
        "full_attention"
    );

    let c = config(&model("smollm3", 5));
    assert_eq!(c["no_rope_layers"], json!([1, 1, 1, 0, 1]));
    let phi = model("phi3", 1).u32("phi3.rope.dimension_count", 12).u32("phi3.attention.sliding_window", 0);
    let phi = phi.tensor("rope_factors_long.weight", &[6], &[1.1; 6]).tensor("rope_factors_short.weight", &[6], &[1.0; 6]);
    let phi = phi.u32("phi3.rope.scaling.original_context_length", 1024).f32("phi3.rope.scaling.attn_factor", 1.19);
    let phi = phi.tensor("blk.0.attn_qkv.weight", &[4, 8], &[0.0; 32]).tensor("blk.0.ffn_up.weight", &[4, 8], &[0.0; 32]);
    let opened = open(&phi.build()).unwrap();
    opened.tensor("model.layers.0.self_attn.qkv_proj.weight").unwrap();
    opened.tensor("model.layers.0.mlp.gate_up_proj.weight").unwrap();
    let c = opened.config;
    assert_eq!((&c["partial_rotary_factor"], &c["sliding_window"]), (&json!(0.75), &Value::Null));
    assert_eq!(c["rope_scaling"]["rope_type"], "longrope");
    assert_eq!(c["rope_scaling"]["long_factor"], json!(vec![1.1; 6]));
    assert_eq!((&c["rope_scaling"]["attention_factor"], &c["original_max_position_embeddings"]), (&json!(1.19), &json!(1024)));
}

#[test]
fn rotary_scaling_takes_its_hugging_face_form() {
    let scaling = |b: Builder| config(&b)["rope_scaling"].clone();
    let base = || model("llama", 1).f32("llama.rope.scaling.factor", 4.0);
    let kind = |b: Builder, t: &str| b.text("llama.rope.scaling.type", t);
    assert_eq!(scaling(model("llama", 1)), Value::Null);
    assert_eq!(scaling(kind(base(), "none")), Value::Null);
    assert_eq!(scaling(kind(base(), "linear")), json!({ "rope_type": "linear", "factor": 4.0 }));
    let yarn = kind(base(), "yarn").u32("llama.rope.scaling.original_context_length", 1024);
    let want = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024 });
    assert_eq!(scaling(yarn.clone()), want);
    fails(&kind(base(), "yarn").build(), &["original_context_length is missing"]);
    fails(&kind(base(), "dynamic").build(), &["dynamic", "supported: none, linear, yarn"]);
    let freqs = |b: Builder, v: &[f32]| b.tensor("rope_freqs.weight", &[v.len() as u64], v);
    let factors: Vec<f32> = (1..=8).map(|i| i as f32 / 2.0 + 0.6).collect();
    let want: Vec<f64> = vec![1.1, 1.6, 2.1, 2.6, 3.1, 3.6, 4.1, 4.6];
    assert_eq!(scaling(freqs(model("llama", 1), &factors)), json!({ "rope_type": "factors", "factors": want }));
    assert_eq!(scaling(freqs(model("llama", 1), &[1.0; 8])), Value::Null);
    fails(&freqs(model("llama", 1), &[2.0; 7]).build(), &["7 rotary frequency factors for 16"]);
    fails(&freqs(model("llama", 1), &[-1.0; 8]).build(), &["not positive"]);
    fails(&freqs(yarn, &factors).build(), &["rope_freqs.weight together"]);
}
