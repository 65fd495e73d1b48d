//! GGUF metadata as a Hugging Face `config.json`. Where a family has numbers that GGUF does not record, they
//! are those of the released models, named beside the line that sets them.

use super::SourceTensor;
use super::gguf::Family;
use super::gguf_header::{Header, Meta};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Divisors of the rotary frequencies that come as tensors.
#[derive(Debug, Default)]
pub(super) struct RopeFactors {
    /// `rope_freqs.weight`: Llama 3.1 and later.
    pub plain: Option<Vec<f64>>,
    /// `rope_factors_long.weight` and `rope_factors_short.weight`: Phi-3 and Phi-4-mini.
    pub long: Option<Vec<f64>>,
    pub short: Option<Vec<f64>>,
}

/// Metadata of one model, by the part of the key after the architecture.
struct Keys<'a> {
    header: &'a Header,
    family: &'static str,
}

impl Keys<'_> {
    fn size(&self, key: &str) -> Result<Option<usize>> {
        self.header.size(&format!("{}.{key}", self.family))
    }
    fn need_size(&self, key: &str) -> Result<usize> {
        self.header.need_size(&format!("{}.{key}", self.family))
    }
    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.header.number(&format!("{}.{key}", self.family))
    }
    fn unsupported(&self, what: String) -> Error {
        Error::unsupported(format!("{}: {what}", self.header.file.path.display()))
    }
    fn bad(&self, what: String) -> Error {
        Error::bad_file(&self.header.file.path, what)
    }
}

/// Keys that change the arithmetic of a layer in models of other families.
const FOREIGN_SCALES: [&str; 5] = ["attention.scale", "attention.clamp_kqv", "logit_scale", "residual_scale", "embedding_scale"];

pub(super) fn config(
    header: &Header,
    family: &Family,
    factors: &RopeFactors,
    tensors: &BTreeMap<String, SourceTensor>,
) -> Result<Value> {
    let k = Keys { header, family: family.name };
    for key in FOREIGN_SCALES {
        if k.number(key)?.is_some_and(|v| v != 0.0 && v != 1.0) {
            return Err(k.unsupported(format!("metadata key {}.{key} is not supported", family.name)));
        }
    }
    let hidden = k.need_size("embedding_length")?;
    let layers = k.need_size("block_count")?;
    let heads = k.need_size("attention.head_count")?;
    let kv_heads = match k.size("attention.head_count_kv")? {
        Some(0) => return Err(k.bad(format!("metadata key {}.attention.head_count_kv is 0", family.name))),
        other => other.unwrap_or(heads),
    };
    let head_dim = match k.size("attention.key_length")? {
        Some(n) if n > 0 => n,
        _ if hidden % heads == 0 => hidden / heads,
        _ => return Err(k.bad(format!("{heads} heads do not divide an embedding of {hidden}"))),
    };
    if heads % kv_heads != 0 {
        return Err(k.bad(format!("{heads} heads do not divide into {kv_heads} key and value heads")));
    }
    if k.size("attention.value_length")?.is_some_and(|v| v != head_dim) {
        return Err(k.unsupported("value heads of another size than key heads are not supported".into()));
    }
    let Some(embedding) = tensors.get("model.embed_tokens.weight").filter(|t| t.shape.len() == 2) else {
        return Err(k.bad("tensor token_embd.weight is missing".into()));
    };
    let context = k.need_size("context_length")?;
    let tokens = "tokenizer.ggml.";
    let mut c = json!({
        "architectures": [family.class],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": k.need_size("feed_forward_length")?,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": header.need_number(&format!("{}.attention.layer_norm_rms_epsilon", family.name))?,
        "rope_theta": k.number("rope.freq_base")?.unwrap_or(if family.name == "gemma3" { 1e6 } else { 1e4 }),
        "rope_scaling": null,
        "max_position_embeddings": context,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": !tensors.contains_key("lm_head.weight"),
        "attention_bias": false,
        "mlp_bias": false,
        "sliding_window": null,
        "bos_token_id": header.size(&format!("{tokens}bos_token_id"))?,
        "eos_token_id": header.size(&format!("{tokens}eos_token_id"))?,
        "pad_token_id": header.size(&format!("{tokens}padding_token_id"))?,
    });
    let rotary = k.size("rope.dimension_count")?.filter(|&n| n > 0).unwrap_or(head_dim);
    if rotary > head_dim || rotary % 2 != 0 {
        return Err(k.bad(format!("{rotary} rotary dimensions in heads of {head_dim}")));
    }
    if rotary != head_dim && family.name != "phi3" {
        return Err(k.unsupported(format!("rotary embedding of {rotary} of {head_dim} dimensions is not supported")));
    }
    let scaling = rope_scaling(&k, factors, rotary)?;
    if scaling["rope_type"] == "longrope" {
        c["original_max_position_embeddings"] = scaling["original_max_position_embeddings"].clone();
    }
    c["rope_scaling"] = scaling;
    let Value::Object(map) = &mut c else { unreachable!("built as an object") };
    family_keys(&k, map, Shape { hidden, layers, heads, head_dim, rotary, context })?;
    Ok(c)
}

/// Sizes that the family's own keys are derived from.
struct Shape {
    hidden: usize,
    layers: usize,
    heads: usize,
    head_dim: usize,
    /// Rotary dimensions of a head.
    rotary: usize,
    context: usize,
}

fn family_keys(k: &Keys, c: &mut Map<String, Value>, s: Shape) -> Result<()> {
    let window = k.size("attention.sliding_window")?.filter(|&w| w > 0);
    let mut set = |key: &str, value: Value| {
        c.insert(key.to_string(), value);
    };
    // Where each layer looks: every `period`-th layer at everything, the others at the window.
    let layer_types = |period: Option<usize>| {
        let full = |i: usize| period.is_none_or(|p| (i + 1).is_multiple_of(p));
        (0..s.layers).map(|i| if full(i) { "full_attention" } else { "sliding_attention" }).collect::<Vec<_>>()
    };
    match k.family {
        "llama" => {
            if let Some(window) = window {
                set("architectures", json!(["MistralForCausalLM"]));
                set("model_type", json!("mistral"));
                set("sliding_window", json!(window));
            }
        }
        "qwen2" | "qwen3" => {
            if window.is_some_and(|w| w < s.context) {
                return Err(k.unsupported(format!("{} with a sliding window is not supported", k.family)));
            }
            set("use_sliding_window", json!(false));
        }
        "phi3" => {
            set("partial_rotary_factor", json!(s.rotary as f64 / s.head_dim as f64));
            set("sliding_window", json!(window));
        }
        "smollm3" => {
            // SmolLM3: every fourth layer has no rotary embedding; 1 means that a layer has it.
            let rope: Vec<u8> = (0..s.layers).map(|i| u8::from((i + 1) % 4 != 0)).collect();
            set("no_rope_layers", json!(rope));
            set("no_rope_layer_interval", json!(4));
            set("use_sliding_window", json!(false));
            set("layer_types", json!(layer_types(None)));
        }
        "gemma2" => {
            // The 27B model (46 layers) scales queries by the mean head share of the width, not by head_dim:
            // https://huggingface.co/google/gemma-2-27b/blob/main/config.json
            let scalar = if s.layers == 46 { s.hidden / s.heads } else { s.head_dim };
            gemma_keys(&mut set, scalar);
            set("attn_logit_softcapping", json!(k.number("attn_logit_softcapping")?.unwrap_or(50.0)));
            set("final_logit_softcapping", json!(k.number("final_logit_softcapping")?.unwrap_or(30.0)));
            set("sliding_window", json!(window.unwrap_or(4096)));
            set("layer_types", json!(layer_types(Some(2))));
        }
        "gemma3" => {
            // The 27B model (62 layers): https://huggingface.co/google/gemma-3-27b-it/blob/main/config.json
            let scalar = if s.layers == 62 { s.hidden / s.heads } else { s.head_dim };
            gemma_keys(&mut set, scalar);
            set("attn_logit_softcapping", Value::Null);
            set("final_logit_softcapping", json!(k.number("final_logit_softcapping")?));
            set("rope_local_base_freq", json!(k.number("rope.freq_base_swa")?.unwrap_or(10000.0)));
            set("sliding_window", json!(window));
            // A period, or one flag (1 for a window) a layer; the released models have period 6.
            let pattern = format!("{}.attention.sliding_window_pattern", k.family);
            let types = match k.header.meta.get(&pattern) {
                Some(Meta::Ints(flags)) if flags.len() == s.layers && window.is_some() => {
                    let name = |&f: &i64| if f == 0 { "full_attention" } else { "sliding_attention" };
                    flags.iter().map(name).collect()
                }
                _ => {
                    let period = k.header.size(&pattern)?.filter(|&p| p > 0).unwrap_or(6);
                    layer_types(window.map(|_| period))
                }
            };
            set("layer_types", json!(types));
        }
        other => return Err(k.unsupported(format!("architecture {other} has no configuration"))),
    }
    Ok(())
}

fn gemma_keys(set: &mut impl FnMut(&str, Value), query_pre_attn_scalar: usize) {
    set("hidden_act", json!("gelu_pytorch_tanh"));
    set("hidden_activation", json!("gelu_pytorch_tanh"));
    set("query_pre_attn_scalar", json!(query_pre_attn_scalar));
}

fn rope_scaling(k: &Keys, factors: &RopeFactors, rotary: usize) -> Result<Value> {
    for list in [&factors.plain, &factors.long, &factors.short].into_iter().flatten() {
        if list.len() != rotary / 2 {
            let n = list.len();
            return Err(k.bad(format!("{n} rotary frequency factors for {rotary} rotary dimensions")));
        }
    }
    let kind = k.header.text(&format!("{}.rope.scaling.type", k.family))?;
    let factor = match k.number("rope.scaling.factor")? {
        Some(f) => Some(f),
        None => k.number("rope.scale_linear")?,
    };
    let factor = factor.filter(|&f| f != 0.0 && f != 1.0);
    if factor.is_some_and(|f| f < 0.0) {
        return Err(k.bad("the rotary scaling factor is negative".into()));
    }
    let original = k.size("rope.scaling.original_context_length")?;
    let attention = k.number("rope.scaling.attn_factor")?;

    if let (Some(long), Some(short)) = (&factors.long, &factors.short) {
        if kind.is_some_and(|t| t != "longrope" && t != "none") {
            return Err(k.unsupported(format!("rotary scaling {} with long and short factors", kind.unwrap_or(""))));
        }
        let original = original
            .ok_or_else(|| k.bad(format!("metadata key {}.rope.scaling.original_context_length is missing", k.family)))?;
        let mut scaling = json!({
            "rope_type": "longrope", "long_factor": long, "short_factor": short,
            "original_max_position_embeddings": original,
        });
        if let Some(attention) = attention {
            scaling["attention_factor"] = json!(attention);
        }
        return Ok(scaling);
    }
    if factors.long.is_some() != factors.short.is_some() {
        return Err(k.bad("of rope_factors_long and rope_factors_short only one is there".into()));
    }
    let plain = factors.plain.as_ref().filter(|f| f.iter().any(|&x| x != 1.0));
    if let Some(list) = plain {
        if factor.is_some() {
            return Err(k.unsupported("rope_freqs.weight together with a rotary scaling factor".into()));
        }
        return Ok(json!({ "rope_type": "factors", "factors": list }));
    }
    match (kind.unwrap_or("linear"), factor) {
        (_, None) | ("none", _) => Ok(Value::Null),
        ("linear", Some(f)) => Ok(json!({ "rope_type": "linear", "factor": f })),
        ("yarn", Some(f)) => {
            for (key, plain) in [("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)] {
                if k.number(&format!("rope.scaling.{key}"))?.is_some_and(|v| v != plain) {
                    return Err(k.unsupported(format!("{}.rope.scaling.{key} is not supported", k.family)));
                }
            }
            let original = original
                .ok_or_else(|| k.bad(format!("metadata key {}.rope.scaling.original_context_length is missing", k.family)))?;
            let mut scaling = json!({ "rope_type": "yarn", "factor": f, "original_max_position_embeddings": original });
            for key in ["beta_fast", "beta_slow"] {
                if let Some(v) = k.number(&format!("rope.scaling.yarn_{key}"))? {
                    scaling[key] = json!(v);
                }
            }
            // GGUF's number multiplies the usual attention factor; Hugging Face's replaces it.
            let given = match attention {
                Some(a) => Some(a),
                None => k.number("rope.scaling.yarn_attn_factor")?,
            };
            if let Some(a) = given.filter(|&a| a != 1.0) {
                scaling["attention_factor"] = json!(a * (1.0 + 0.1 * f.ln()));
            }
            Ok(scaling)
        }
        (other, _) => {
            Err(k.unsupported(format!("rotary scaling {other} is not supported; supported: none, linear, yarn, longrope")))
        }
    }
}
