use super::super::safetensors::tests::file;
use super::*;
use std::fs;

const CONFIG: &str = r#"{"model_type":"llama","hidden_size":4}"#;
const TOKENIZER: &str = r#"{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}"#;

/// A safetensors file with one F32 vector per name; element `i` of tensor number `n` is `10 n + i`.
fn weights(names: &[&str]) -> Vec<u8> {
    let mut header = Vec::new();
    let mut data = Vec::new();
    for (n, name) in names.iter().enumerate() {
        header.push(format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":[{},{}]}}"#, n * 8, n * 8 + 8));
        data.extend((0..2).flat_map(|i| (10.0 * n as f32 + i as f32).to_le_bytes()));
    }
    file(&format!("{{{}}}", header.join(",")), &data)
}

/// One tensor of 8 bytes with this dtype.
fn typed(name: &str, dtype: &str, count: usize) -> Vec<u8> {
    file(&format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[0,8]}}}}"#), &[0; 8])
}

/// A folder with these files beside a sound config and tokenizer.
fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in [("config.json", CONFIG.as_bytes()), ("tokenizer.json", TOKENIZER.as_bytes())].iter().chain(files) {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    dir
}

/// The message and hint of the one-line failure that opening the folder must give.
fn failure(dir: &tempfile::TempDir) -> (Kind, String) {
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(!error.message().contains('\n') && error.message().contains(dir.path().to_str().unwrap()), "{error}");
    (error.kind, format!("{error} / {}", error.hint().unwrap_or_default()))
}

fn expect(files: &[(&str, &[u8])], kind: Kind, text: &str) {
    let found = failure(&folder(files));
    assert!(found.0 == kind && found.1.contains(text), "{found:?}\nexpected {text}");
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors.keys().map(String::as_str).collect()
}

#[test]
fn one_file_by_folder_and_by_path() {
    let dir = folder(&[("model.safetensors", &weights(&["a.weight", "b.weight"])), ("generation_config.json", b"{\"top_k\":3}")]);
    for path in [dir.path().to_path_buf(), dir.path().join("model.safetensors")] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(names(&checkpoint), ["a.weight", "b.weight"]);
        assert_eq!(
            (&checkpoint.config["hidden_size"], &checkpoint.generation.as_ref().unwrap()["top_k"]),
            (&4.into(), &3.into())
        );
        assert_eq!(checkpoint.tokenizer.tokenizer_json, TOKENIZER);
        assert!(checkpoint.tokenizer.chat_template.is_none() && checkpoint.tokenizer.config.is_object());
        let mut out = [0.0; 2];
        checkpoint.tensor("b.weight").unwrap().read_rows(0..1, &mut out).unwrap();
        assert_eq!(out, [10.0, 11.0]);
    }
    let other_name = folder(&[("weights.safetensors", &weights(&["a"]))]);
    assert_eq!(names(&Checkpoint::open(other_name.path()).unwrap()), ["a"]);
}

#[test]
fn shards_by_index_also_in_sub_folders() {
    let index =
        br#"{"metadata":{},"weight_map":{"a":"x/y/model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
    let files: [(&str, &[u8]); 3] = [
        ("x/y/model-00001-of-00002.safetensors", &weights(&["a"])),
        ("model-00002-of-00002.safetensors", &weights(&["b"])),
        ("model.safetensors.index.json", index),
    ];
    let dir = folder(&files);
    for path in [dir.path().to_path_buf(), dir.path().join("model-00002-of-00002.safetensors")] {
        assert_eq!(names(&Checkpoint::open(&path).unwrap()), ["a", "b"]);
    }
    expect(&files[1..], Kind::NotFound, "x/y/model-00001-of-00002.safetensors: this weight file is missing (1 of 2 are)");
    let twice = weights(&["a", "b"]);
    expect(&[files[0], ("model-00002-of-00002.safetensors", &twice), files[2]], Kind::BadFile, "tensor a is also in");
    let without = weights(&["c"]);
    expect(&[files[0], ("model-00002-of-00002.safetensors", &without), files[2]], Kind::BadFile, "tensor b is listed in");
    let whole = weights(&["b"]);
    let cut = &whole[..whole.len() - 3];
    expect(
        &[files[0], ("model-00002-of-00002.safetensors", cut), files[2]],
        Kind::BadFile,
        "model-00002-of-00002.safetensors: the file is short by 3 bytes",
    );
}

#[test]
fn bad_indexes_are_refused() {
    let cases: [(&[u8], &str); 8] = [
        (br#"{"weight_map":{"a":"../secret.safetensors"}}"#, "leads out of the folder"),
        (br#"{"weight_map":{"a":"/etc/passwd"}}"#, "leads out of the folder"),
        (br#"{"weight_map":{"a":"x\\..\\..\\y"}}"#, "leads out of the folder"),
        (br#"{"weight_map":{"a":""}}"#, "leads out of the folder"),
        (br#"{"weight_map":{}}"#, "names no tensors"),
        (br#"{"weight_map":{"a":"x","a":"y"}}"#, "a comes twice"),
        (br#"{"weight_map":{"a":7}}"#, "invalid JSON: a: invalid type"),
        (b"{", "invalid JSON: EOF while parsing an object at line 1 column 1"),
    ];
    for (index, text) in cases {
        expect(&[("model.safetensors.index.json", index)], Kind::BadFile, text);
    }
}

#[test]
fn numbered_shards_without_an_index() {
    let (a, b) = (weights(&["a"]), weights(&["b"]));
    let files: [(&str, &[u8]); 2] = [("m-00001-of-00002.safetensors", &a), ("m-00002-of-00002.safetensors", &b)];
    assert_eq!(names(&Checkpoint::open(folder(&files).path()).unwrap()), ["a", "b"]);
    expect(&files[1..], Kind::NotFound, "m-00001-of-00002.safetensors: this weight file is missing (1 of 2 are)");
    expect(&[("m-00001-of-99999.safetensors", &a)], Kind::NotFound, "(99998 of 99999 are)");
    expect(&[files[0], ("other.safetensors", &b)], Kind::BadFile, "m-00001-of-00002.safetensors, other.safetensors");
}

#[test]
fn folders_without_safetensors() {
    expect(&[], Kind::NotFound, "no weights (looked for model.safetensors");
    expect(&[("pytorch_model.bin", b"PK\x03\x04")], Kind::Unsupported, "pytorch_model.bin; safetensors and GGUF");
    expect(&[("a.gguf", b"GGUF"), ("b.gguf", b"GGUF")], Kind::Usage, "several GGUF files: a.gguf, b.gguf");
    let adapter = weights(&["a"]);
    expect(&[("adapter_config.json", b"{}"), ("adapter_model.safetensors", &adapter)], Kind::Unsupported, "an adapter (LoRA)");
    expect(
        &[("model.safetensors", b"<!DOCTYPE html><html>")],
        Kind::BadFile,
        "model.safetensors: not a safetensors file but a web page",
    );
}

#[test]
fn bad_json_files_are_named() {
    let model = weights(&["a"]);
    let dir = folder(&[("model.safetensors", &model)]);
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert_eq!(failure(&dir).0, Kind::NotFound);
    let lfs: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
    let cases: [(&str, &[u8], &str); 9] = [
        ("config.json", b"{\n \"a\": 1,\n}", "config.json: invalid JSON: trailing comma at line 3 column 1"),
        ("config.json", b"[1]", "config.json: not a JSON object"),
        ("config.json", b"", "config.json: this is an empty file"),
        ("config.json", lfs, "config.json: this is a Git-LFS pointer"),
        ("config.json", b"{\"a\": \"\xff\"}", "config.json: not UTF-8 text"),
        ("tokenizer.json", lfs, "tokenizer.json: this is a Git-LFS pointer"),
        ("tokenizer.json", b"{}", "tokenizer.json: invalid JSON: missing field `model`"),
        ("tokenizer_config.json", b"<html>", "tokenizer_config.json: this is a web page"),
        ("generation_config.json", b"{", "generation_config.json: invalid JSON"),
    ];
    for (name, bytes, text) in cases {
        expect(&[("model.safetensors", &model), (name, bytes)], Kind::BadFile, text);
    }
}

#[test]
fn p48_quantised_checkpoints_are_refused_by_method() {
    let plain = weights(&["a.weight"]);
    let configs = [
        (r#"{"quantization_config":{"quant_method":"gptq","bits":4}}"#, "gptq (quantization_config"),
        (r#"{"quantization_config":{"load_in_4bit":true}}"#, "bitsandbytes"),
        (r#"{"text_config":{"quantization_config":{"quant_method":"awq"}}}"#, "awq"),
        (r#"{"quantization":{"group_size":64,"bits":4}}"#, "mlx"),
        (r#"{"compression_config":{}}"#, "compressed-tensors"),
        (r#"{"quantization_config":{}}"#, "an unnamed method"),
    ];
    for (config, text) in configs {
        expect(&[("model.safetensors", &plain), ("config.json", config.as_bytes())], Kind::Unsupported, text);
    }
    let tensors = [
        (typed("m.q_proj.qweight", "I32", 2), "gptq or awq (tensor m.q_proj.qweight)"),
        (typed("m.weight_scale_inv", "F32", 2), "fp8"),
        (typed("m.weight.absmax", "F32", 2), "bitsandbytes"),
        (typed("m.weight", "F8_E4M3", 8), "fp8 (tensor m.weight is F8_E4M3)"),
        (typed("m.weight", "U32", 2), "packed integers"),
    ];
    for (bytes, text) in &tensors {
        expect(&[("model.safetensors", bytes)], Kind::Unsupported, text);
    }
    let null = folder(&[("model.safetensors", &plain), ("config.json", b"{\"quantization_config\":null}")]);
    assert!(Checkpoint::open(null.path()).is_ok());
}

#[test]
fn buffers_are_left_out_and_unusable_weights_named() {
    for (name, dtype, count) in [
        ("m.rotary_emb.inv_freq", "F32", 2),
        ("m.position_ids", "I64", 1),
        ("h.0.attn.masked_bias", "F32", 2),
        ("conv.norm.num_batches_tracked", "I64", 1),
        ("m.mask", "BOOL", 8),
    ] {
        let dir = folder(&[("model.safetensors", &typed(name, dtype, count))]);
        assert!(Checkpoint::open(dir.path()).unwrap().tensors.is_empty(), "{name}");
    }
    // A causal mask is not a bias.
    let dir = folder(&[("model.safetensors", &weights(&["h.0.attn.bias"]))]);
    assert_eq!(names(&Checkpoint::open(dir.path()).unwrap()), ["h.0.attn.bias"]);
    let f64 = typed("m.weight", "F64", 1);
    expect(&[("model.safetensors", &f64)], Kind::Unsupported, "tensor m.weight is stored as F64; F32, F16 and BF16");
    let i64 = typed("m.weight", "I64", 1);
    expect(&[("model.safetensors", &i64)], Kind::Unsupported, "tensor m.weight is stored as I64");
}

#[test]
fn chat_templates_from_all_places() {
    let model = weights(&["a"]);
    let template = |files: &[(&str, &[u8])]| {
        let dir = folder(&[&[("model.safetensors", &model[..])], files].concat());
        Checkpoint::open(dir.path()).unwrap().tokenizer.chat_template
    };
    let config: (&str, &[u8]) = ("tokenizer_config.json", br#"{"chat_template":"from config"}"#);
    let named: (&str, &[u8]) = (
        "tokenizer_config.json",
        br#"{"chat_template":[{"name":"rag","template":"r"},{"name":"default","template":"from list"}]}"#,
    );
    let processor: (&str, &[u8]) = ("chat_template.json", br#"{"chat_template":"from processor"}"#);
    assert_eq!(template(&[("chat_template.jinja", b"from file\n"), config, processor]).unwrap(), "from file\n");
    assert_eq!(template(&[config, processor]).unwrap(), "from config");
    assert_eq!(template(&[named]).unwrap(), "from list");
    assert_eq!(template(&[processor]).unwrap(), "from processor");
    assert_eq!(template(&[]), None);
}

#[test]
fn tokenizers_in_older_forms() {
    let model = weights(&["a"]);
    let with = |files: &[(&str, &[u8])]| {
        let dir = folder(&[&[("model.safetensors", &model[..])], files].concat());
        fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
        dir
    };
    assert!(
        failure(&with(&[])).1.contains("no tokenizer (looked for tokenizer.json, tokenizer.model, vocab.json with merges.txt)")
    );

    let spm: &[u8] = include_bytes!("../../../tests/fixtures/folder/llama.model");
    let dir = with(&[("tokenizer.model", spm), ("added_tokens.json", br#"{"<pad>":700}"#)]);
    let json = Checkpoint::open(dir.path()).unwrap().tokenizer.tokenizer_json;
    let tokenizer: tokenizers::Tokenizer = json.parse().unwrap();
    assert_eq!(tokenizer.token_to_id("<pad>"), Some(700));

    let vocab = br#"{"l":0,"o":1,"w":2,"lo":3,"low":4,"\u0120":5,"\u0120low":6,"<|endoftext|>":7}"#;
    let merges = "#version: 0.2\nl o\nlo w\n\u{120} low\n".as_bytes();
    let class = br#"{"tokenizer_class":"GPT2Tokenizer","eos_token":"<|endoftext|>"}"#;
    let files: [(&str, &[u8]); 3] = [("vocab.json", vocab), ("merges.txt", merges), ("tokenizer_config.json", class)];
    let json = Checkpoint::open(with(&files).path()).unwrap().tokenizer.tokenizer_json;
    let tokenizer: tokenizers::Tokenizer = json.parse().unwrap();
    let ids = |text: &str| tokenizer.encode_fast(text, true).unwrap().get_ids().to_vec();
    assert_eq!(ids("low low<|endoftext|>lo"), [4, 6, 7, 3]);
    assert_eq!(tokenizer.decode(&[4, 6], false).unwrap(), "low low");

    let (kind, text) = failure(&with(&files[..2]));
    assert!(kind == Kind::Unsupported && text.contains("tokenizer class none named"), "{text}");
    let qwen: (&str, &[u8]) = ("tokenizer_config.json", br#"{"tokenizer_class":"Qwen2Tokenizer"}"#);
    assert!(failure(&with(&[files[0], files[1], qwen])).1.contains("Qwen2Tokenizer"));
    let bad = failure(&with(&[files[0], ("merges.txt", b"l o\nl w\n"), files[2]]));
    assert!(bad.1.contains("merges.txt: line 2 does not join"), "{bad:?}");
    let twice: (&str, &[u8]) = ("vocab.json", br#"{"l":0,"o":0}"#);
    assert!(failure(&with(&[twice, files[1], files[2]])).1.contains("gap or repetition"));
}
