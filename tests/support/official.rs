//! An official folder made from a Hugging Face one: a writer of `.weights` files of its own, after the description
//! of the format, and what its lossy files decode to.

use cactus::model::import::Checkpoint;
use half::f16;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const GROUP: usize = 128;
/// Lloyd-Max levels of a coordinate of a unit vector in 128 dimensions, without their signs, for 1 to 4 bits.
const LEVELS: [&[f32]; 4] = [
    &[0.07066],
    &[0.03999, 0.13304],
    &[0.0216, 0.06657, 0.11811, 0.18837],
    &[0.01128, 0.0341, 0.05769, 0.08273, 0.11017, 0.14169, 0.18073, 0.23757],
];

/// The name of a tensor's file, without its ending.
fn stem(name: &str) -> String {
    let name = name.strip_suffix(".weight").or(name.strip_suffix(".bias")).expect("a weight or a bias");
    match name {
        "model.embed_tokens" => return "token_embeddings".into(),
        "model.norm" => return "output_norm".into(),
        "lm_head" => return "output_weight".into(),
        _ => {}
    }
    let (layer, role) = name.strip_prefix("model.layers.").and_then(|r| r.split_once('.')).expect("a layer");
    let own = match role {
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "input_layernorm" => "input_norm",
        "post_attention_layernorm" => "post_attn_norm",
        "pre_feedforward_layernorm" => "pre_ffn_norm",
        "post_feedforward_layernorm" => "post_ffn_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        other => return format!("layer_{layer}_{}", other.replace('.', "_")),
    };
    format!("layer_{layer}_{own}")
}

/// What the makers multiply by 16, and what they put on norms of Gemma 3.
fn scaled(gemma: bool, stem: &str, value: f32) -> (f32, f32) {
    let role = stem.split_once('_').and_then(|(_, r)| r.split_once('_')).map_or(stem, |(_, r)| r);
    match (gemma, stem, role) {
        (true, _, "ffn_gate" | "ffn_up") => (value * 16.0, 16.0),
        (true, "token_embeddings", _) => (value / 16.0, 1.0 / 16.0),
        (true, "output_norm", _) => ((value + 1.0) * 16.0 - 1.0, 1.0),
        (true, _, "input_norm" | "post_attn_norm" | "pre_ffn_norm" | "post_ffn_norm") => ((value + 1.0) / 16.0 - 1.0, 1.0),
        _ => (value, 1.0),
    }
}

fn file(flags: u32, dims: &[usize], precision: u32, groups: [usize; 2], metadata: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = b"CACT".to_vec();
    for v in [flags, 32, dims.len() as u32] {
        bytes.extend(v.to_le_bytes());
    }
    for i in 0..4 {
        bytes.extend((dims.get(i).copied().unwrap_or(0) as u64).to_le_bytes());
    }
    bytes.extend(precision.to_le_bytes());
    bytes.extend((data.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    groups.iter().for_each(|n| bytes.extend((*n as u32).to_le_bytes()));
    bytes.extend((dims[0] as u64).to_le_bytes());
    for part in [metadata, data] {
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(part);
    }
    bytes
}

fn halves(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()
}

/// A CQ file, at 4 bits interleaved where the rows allow it, and the matrix that it means. Columns are padded to groups;
/// `scale` are the factors on columns, over and over.
fn cq(values: &[f32], [rows, cols]: [usize; 2], bits: usize, scale: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let width = cols.next_multiple_of(GROUP);
    let groups = width / GROUP;
    let negative = |n: usize| n.wrapping_mul(2654435761) >> 7 & 1 == 1;
    let sign = |n: usize| if negative(n) { -1.0f32 } else { 1.0 };
    let (left, right): (Vec<f32>, Vec<f32>) = (0..GROUP).map(|i| (sign(i), sign(i + 1000))).unzip();
    // 45 and 128 have no common factor.
    let permutation: Vec<usize> = (0..GROUP).map(|j| (j * 45 + 7) % GROUP).collect();
    let rotation = |i: usize, j: usize| {
        let p = permutation[j];
        let hadamard = if (i & p).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
        left[i] * hadamard * right[p] / (GROUP as f32).sqrt()
    };
    let scale: Vec<f32> = (0..width).map(|k| f16::from_f32(scale[k % scale.len()]).to_f32()).collect();
    let levels = LEVELS[bits - 1];
    let signed = levels.iter().rev().map(|v| -v).chain(levels.iter().copied());
    let book: Vec<f32> = signed.map(|v| f16::from_f32(v).to_f32()).collect();
    let interleaved = bits == 4 && rows.is_multiple_of(4);
    let (mut norms, mut data) = (vec![0.0f32; rows * groups], vec![0u8; rows * width * bits / 8]);
    let mut decoded = vec![0.0; rows * cols];
    for row in 0..rows {
        for group in 0..groups {
            let at = |i: usize| group * GROUP + i;
            let work: Vec<f32> =
                (0..GROUP).map(|i| if at(i) < cols { values[row * cols + at(i)] * scale[at(i)] } else { 0.0 }).collect();
            let norm = f16::from_f32(work.iter().map(|v| v * v).sum::<f32>().sqrt().max(1e-6)).to_f32();
            let place = if interleaved { (row / 4 * groups + group) * 4 + row % 4 } else { row * groups + group };
            norms[place] = norm;
            let mut codes = [0usize; GROUP];
            for (j, code) in codes.iter_mut().enumerate() {
                let r: f32 = (0..GROUP).map(|i| work[i] * rotation(i, j)).sum::<f32>() / norm;
                let distance = |c: &usize| (book[*c] - r).abs();
                *code = (0..book.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("a level");
                let first = if interleaved {
                    let panel = (row / 4 * groups + group) * 4 * GROUP / 2;
                    8 * (panel + j / 8 * 16 + row % 4 * 4 + j % 4) + j % 8 / 4 * 4
                } else {
                    (row * width + at(j)) * bits
                };
                (0..bits).for_each(|bit| data[(first + bit) / 8] |= (*code as u8 >> bit & 1) << ((first + bit) % 8));
            }
            for i in (0..GROUP).filter(|i| at(*i) < cols) {
                let u: f32 = (0..GROUP).map(|j| rotation(i, j) * book[codes[j]]).sum();
                decoded[row * cols + at(i)] = u * norm / scale[at(i)];
            }
        }
    }
    let reciprocal: Vec<f32> = scale.iter().map(|s| 1.0 / s).collect();
    let mut metadata = [halves(&book), halves(&scale), halves(&reciprocal), halves(&norms)].concat();
    metadata.extend(left.iter().chain(&right).map(|s| *s as i8 as u8));
    permutation.iter().for_each(|p| metadata.extend((*p as u32).to_le_bytes()));
    let flags = if interleaved { 4 } else { 0 };
    (file(flags, &[rows, width], 2 + bits as u32, [GROUP, groups], &metadata, &data), decoded)
}

/// Writes `checkpoint` as an official folder to `target`: everything as F16 at 16 bits, otherwise matrices of layers as
/// CQ with so many bits. Gives the values that a reader should find, by Hugging Face name.
pub fn as_official(checkpoint: &Path, target: &Path, bits: usize) -> BTreeMap<String, Vec<f32>> {
    const SCALE: [f32; 7] = [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0];
    as_official_of(checkpoint, target, |name| if name.contains(".layers.") { (bits, &SCALE) } else { (16, &[]) })
}

/// The same with the bits and the factors of columns for each matrix.
pub fn as_official_of<'a>(
    checkpoint: &Path,
    target: &Path,
    kind: impl Fn(&str) -> (usize, &'a [f32]),
) -> BTreeMap<String, Vec<f32>> {
    let source = Checkpoint::open(checkpoint).expect("a sound checkpoint");
    let gemma = source.config["model_type"].as_str().is_some_and(|kind| kind.starts_with("gemma3"));
    fs::create_dir_all(target).expect("a folder");
    let mut rows = Vec::new();
    let mut values_of = BTreeMap::new();
    for (name, tensor) in &source.tensors {
        let mut values = vec![0.0; tensor.elements()];
        tensor.read_rows(0..tensor.rows(), &mut values).expect("values");
        let stem = stem(name);
        let factor = scaled(gemma, &stem, 0.0).1;
        let stored: Vec<f32> = values.iter().map(|v| scaled(gemma, &stem, *v).0).collect();
        let (bits, scale) = kind(name);
        let (bytes, found) = if let ([rows, cols], 1..=4) = (&tensor.shape[..], bits) {
            let (bytes, decoded) = cq(&stored, [*rows, *cols], bits, scale);
            (bytes, decoded.into_iter().map(|v| v / factor).collect())
        } else {
            (file(0, &tensor.shape, 1, [0, 0], &[], &halves(&stored)), values)
        };
        let path = format!("{stem}.{}", if name.ends_with(".bias") { "bias" } else { "weights" });
        fs::write(target.join(&path), bytes).expect("written");
        rows.push(json!({ "hf_name": name, "output_file": path, "shape": tensor.shape, "scale_factor": factor }));
        values_of.insert(name.clone(), found);
    }
    fs::write(target.join("conversion_manifest.json"), Value::from(rows).to_string()).expect("written");
    let family = if gemma { "gemma3" } else { "qwen" };
    fs::write(target.join("config.txt"), format!("bits=4\nmodel_type={family}\n")).expect("written");
    let mut config = source.config.clone();
    config["model_type"] = json!(family);
    fs::write(target.join("hf_config.json"), config.to_string()).expect("written");
    fs::write(target.join("tokenizer.json"), &source.tokenizer.tokenizer_json).expect("written");
    let id = |token: &str| source.config[format!("{token}_token_id")].clone();
    let special = json!({ "eos_token_id": id("eos"), "bos_token_id": id("bos"), "special_tokens": { "1": "<s>", "2": "</s>" } });
    fs::write(target.join("special_tokens.json"), special.to_string()).expect("written");
    let template = source.tokenizer.chat_template.unwrap_or_default();
    fs::write(target.join("chat_template.jinja2"), template).expect("written");
    values_of
}
