//! A Hugging Face folder of any size, with made-up weights.

use super::source;
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

const DIM: usize = 2048;
const HIDDEN: usize = 8192;
const VOCAB: usize = 8192;

/// Bytes of the largest tensor.
pub const LARGEST: u64 = (DIM * HIDDEN * 2) as u64;

/// Writes a Llama-type BF16 checkpoint of `layers` layers, about 134 MB each, a shard a layer.
pub fn synthetic(folder: &Path, layers: usize) {
    fs::create_dir_all(folder).expect("a folder");
    let golden = source("tests/golden/llama-tied");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden.join(name), folder.join(name)).expect("a copy");
    }
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": HIDDEN,
        "num_attention_heads": DIM / 64, "num_key_value_heads": DIM / 64, "num_hidden_layers": layers, "vocab_size": VOCAB,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    });
    fs::write(folder.join("config.json"), config.to_string()).expect("written");

    let noise = noise();
    let shards = layers + 1;
    let mut map = Map::new();
    for shard in 0..shards {
        let tensors = if shard == 0 {
            vec![("model.embed_tokens.weight".to_owned(), vec![VOCAB, DIM]), ("model.norm.weight".to_owned(), vec![DIM])]
        } else {
            layer(shard - 1)
        };
        let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        write(&folder.join(&file), &tensors, &noise);
        map.extend(tensors.into_iter().map(|(name, _)| (name, Value::from(file.clone()))));
    }
    let index = json!({ "metadata": {}, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("written");
}

fn layer(n: usize) -> Vec<(String, Vec<usize>)> {
    let part = |name: &str, shape: &[usize]| (format!("model.layers.{n}.{name}.weight"), shape.to_vec());
    vec![
        part("input_layernorm", &[DIM]),
        part("post_attention_layernorm", &[DIM]),
        part("self_attn.q_proj", &[DIM, DIM]),
        part("self_attn.k_proj", &[DIM, DIM]),
        part("self_attn.v_proj", &[DIM, DIM]),
        part("self_attn.o_proj", &[DIM, DIM]),
        part("mlp.gate_proj", &[HIDDEN, DIM]),
        part("mlp.up_proj", &[HIDDEN, DIM]),
        part("mlp.down_proj", &[DIM, HIDDEN]),
    ]
}

/// A megabyte of BF16 values between -1/16 and 1/16.
fn noise() -> Vec<u8> {
    let mut state = 1u32;
    let value = |_| {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        half::bf16::from_f32((state >> 8) as f32 / (1 << 27) as f32 - 0.0625).to_le_bytes()
    };
    (0..1 << 19).flat_map(value).collect()
}

fn write(path: &Path, tensors: &[(String, Vec<usize>)], noise: &[u8]) {
    let (mut header, mut offset) = (Map::new(), 0);
    for (name, shape) in tensors {
        let bytes = 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + bytes] }));
        offset += bytes;
    }
    let header = Value::Object(header).to_string();
    let mut file = BufWriter::new(File::create(path).expect("a file"));
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("written");
    file.write_all(header.as_bytes()).expect("written");
    while offset > 0 {
        let piece = offset.min(noise.len());
        file.write_all(&noise[..piece]).expect("written");
        offset -= piece;
    }
    file.flush().expect("written");
}
