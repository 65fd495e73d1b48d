//! A golden Llama folder as a GGUF file, written after the format's description
//! (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>).

use safetensors::{SafeTensors, tensor::Dtype};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// GGUF numbers of value types.
const U32: u32 = 4;
const I32: u32 = 5;
const F32_VALUE: u32 = 6;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const ALIGN: usize = 32;
/// Token types.
const NORMAL: u32 = 1;
const CONTROL: u32 = 3;
const USER: u32 = 4;

/// How the values of a tensor are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32,
    Q4_0,
    Q8_0,
}

impl Kind {
    fn number(self) -> u32 {
        match self {
            Kind::F32 => 0,
            Kind::Q4_0 => 2,
            Kind::Q8_0 => 8,
        }
    }

    /// Scale and levels of a block, rounded as llama.cpp does it.
    fn block(self, values: &[f32]) -> (half::f16, Vec<i8>) {
        let largest = values.iter().fold(0.0f32, |a, b| if b.abs() > a.abs() { *b } else { a });
        let (step, range) =
            if self == Kind::Q4_0 { (largest / -8.0, -8.0..=7.0) } else { (largest.abs() / 127.0, -127.0..=127.0) };
        let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
        let level = |v: &f32| (v * inverse).round().clamp(*range.start(), *range.end()) as i8;
        (half::f16::from_f32(step), values.iter().map(level).collect())
    }

    fn write(self, values: &[f32], out: &mut Vec<u8>) {
        if self == Kind::F32 {
            return values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
        for values in values.chunks_exact(32) {
            let (scale, levels) = self.block(values);
            out.extend(scale.to_le_bytes());
            let nibble = |i: usize| (levels[i] + 8) as u8;
            match self {
                Kind::Q4_0 => out.extend((0..16).map(|i| nibble(i) | nibble(i + 16) << 4)),
                _ => out.extend(levels.iter().map(|level| *level as u8)),
            }
        }
    }

    /// What is read back.
    pub fn rounded(self, values: &[f32]) -> Vec<f32> {
        if self == Kind::F32 {
            return values.to_vec();
        }
        let blocks = values.chunks_exact(32).map(|values| self.block(values));
        blocks.flat_map(|(scale, levels)| levels.into_iter().map(move |level| scale.to_f32() * f32::from(level))).collect()
    }
}

/// Bytes being put together.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u32(&mut self, v: u32) {
        self.0.extend(v.to_le_bytes());
    }
    fn u64(&mut self, v: usize) {
        self.0.extend((v as u64).to_le_bytes());
    }
    fn text(&mut self, v: &str) {
        self.u64(v.len());
        self.0.extend(v.as_bytes());
    }
    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(ALIGN), 0);
    }
}

/// Metadata entries, counted.
#[derive(Default)]
struct Metadata {
    bytes: Bytes,
    count: usize,
}

impl Metadata {
    fn key(&mut self, key: &str, kind: u32) -> &mut Bytes {
        self.count += 1;
        self.bytes.text(key);
        self.bytes.u32(kind);
        &mut self.bytes
    }
    fn size(&mut self, key: &str, v: &Value) {
        self.key(key, U32).u32(v.as_u64().expect(key) as u32);
    }
    fn float(&mut self, key: &str, v: &Value) {
        self.key(key, F32_VALUE).u32((v.as_f64().expect(key) as f32).to_bits());
    }
    fn text(&mut self, key: &str, v: &str) {
        self.key(key, STRING).text(v);
    }
    fn texts(&mut self, key: &str, list: &[String]) {
        let bytes = self.key(key, ARRAY);
        bytes.u32(STRING);
        bytes.u64(list.len());
        list.iter().for_each(|text| bytes.text(text));
    }
    fn kinds(&mut self, key: &str, tokens: &[Token]) {
        let bytes = self.key(key, ARRAY);
        bytes.u32(I32);
        bytes.u64(tokens.len());
        tokens.iter().for_each(|t| bytes.u32(t.kind));
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Token {
    id: u64,
    text: String,
    kind: u32,
}

/// The bytes of a GGUF file with what `folder` (of the Llama family) holds, in 32-bit floats. Its pre-tokenizer is
/// GPT-2's.
pub fn as_gguf(folder: &Path) -> Vec<u8> {
    write(folder, "gpt-2", |_| Kind::F32)
}

/// The same with another name of a pre-tokenizer.
pub fn as_gguf_cut_by(folder: &Path, pre_tokenizer: &str) -> Vec<u8> {
    write(folder, pre_tokenizer, |_| Kind::F32)
}

/// The same with matrices rounded as `kind` says by their Hugging Face names.
pub fn as_gguf_of_kinds(folder: &Path, kind: impl Fn(&str) -> Kind) -> Vec<u8> {
    write(folder, "gpt-2", |name| if name.contains("norm") { Kind::F32 } else { kind(name) })
}

fn write(folder: &Path, pre_tokenizer: &str, kind: impl Fn(&str) -> Kind) -> Vec<u8> {
    let json = |name: &str| -> Value { serde_json::from_slice(&fs::read(folder.join(name)).expect(name)).expect(name) };
    let (config, tokenizer) = (json("config.json"), json("tokenizer.json"));
    let heads = |key: &str| config[key].as_u64().expect(key) as usize;
    let mut meta = Metadata::default();
    meta.text("general.architecture", "llama");
    for (key, name) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("rope.dimension_count", "head_dim"),
    ] {
        meta.size(&format!("llama.{key}"), &config[name]);
    }
    meta.float("llama.rope.freq_base", &config["rope_theta"]);
    meta.float("llama.attention.layer_norm_rms_epsilon", &config["rms_norm_eps"]);
    meta.text("tokenizer.ggml.model", "gpt2");
    meta.text("tokenizer.ggml.pre", pre_tokenizer);
    let tokens = tokens(&tokenizer);
    meta.texts("tokenizer.ggml.tokens", &tokens.iter().map(|t| t.text.clone()).collect::<Vec<_>>());
    meta.kinds("tokenizer.ggml.token_type", &tokens);
    let pair = |m: &Value| m.as_str().map_or_else(|| format!("{} {}", text(&m[0]), text(&m[1])), str::to_owned);
    meta.texts(
        "tokenizer.ggml.merges",
        &tokenizer["model"]["merges"].as_array().expect("merges").iter().map(pair).collect::<Vec<_>>(),
    );
    meta.size("tokenizer.ggml.eos_token_id", &config["eos_token_id"]);

    let file = fs::read(folder.join("model.safetensors")).expect("weights");
    let weights = SafeTensors::deserialize(&file).expect("safetensors");
    let (mut infos, mut data) = (Bytes::default(), Bytes::default());
    for (name, tensor) in weights.tensors() {
        let shape = tensor.shape().to_vec();
        let mut values = floats(tensor.dtype(), tensor.data());
        for (part, key) in [("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")] {
            if name.contains(part) {
                values = interleave(&values, shape[1], heads(key));
            }
        }
        infos.text(&gguf_name(&name));
        infos.u32(shape.len() as u32);
        shape.iter().rev().for_each(|n| infos.u64(*n));
        infos.u32(kind(&name).number());
        infos.u64(data.0.len());
        kind(&name).write(&values, &mut data.0);
        data.pad();
    }
    let mut out = Bytes(b"GGUF".to_vec());
    out.u32(3);
    out.u64(weights.len());
    out.u64(meta.count);
    out.0.extend(meta.bytes.0);
    out.0.extend(infos.0);
    out.pad();
    out.0.extend(data.0);
    out.0
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

/// All tokens in order of their ids.
fn tokens(tokenizer: &Value) -> Vec<Token> {
    let added = tokenizer["added_tokens"].as_array().expect("added tokens");
    let kind = |id: u64| match added.iter().find(|t| t["id"] == id) {
        Some(token) if token["special"] == true => CONTROL,
        Some(_) => USER,
        None => NORMAL,
    };
    let token = |id: &Value, text: &str| {
        let id = id.as_u64().expect("an id");
        Token { id, text: text.to_owned(), kind: kind(id) }
    };
    let vocab = tokenizer["model"]["vocab"].as_object().expect("a vocabulary");
    let mut tokens: Vec<Token> = vocab.iter().map(|(text, id)| token(id, text)).collect();
    tokens.extend(added.iter().map(|t| token(&t["id"], text(&t["content"]))));
    tokens.sort();
    tokens.dedup();
    tokens
}

fn gguf_name(name: &str) -> String {
    let name = name.trim_start_matches("model.");
    let Some(rest) = name.strip_prefix("layers.") else {
        return match name {
            "embed_tokens.weight" => "token_embd.weight".into(),
            "norm.weight" => "output_norm.weight".into(),
            _ => "output.weight".into(),
        };
    };
    let (layer, role) = rest.split_once('.').expect("a layer number");
    let role = match role.trim_end_matches(".weight") {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        other => panic!("{other} is not known"),
    };
    format!("blk.{layer}.{role}.weight")
}

fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::BF16 => halves().map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        other => panic!("{other:?}"),
    }
}

/// Puts the two rows of each rotary pair side by side, as GGUF files of this family have them.
fn interleave(values: &[f32], width: usize, heads: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = values.chunks_exact(width).collect();
    let (size, half) = (rows.len() / heads, rows.len() / heads / 2);
    let pairs = (0..heads).flat_map(|h| (0..half).flat_map(move |i| [h * size + i, h * size + i + half]));
    pairs.flat_map(|row| rows[row].iter().copied()).collect()
}
