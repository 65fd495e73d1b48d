//! Opening a GGUF checkpoint: one file or a split set becomes a [`Checkpoint`] under Hugging Face names.
//! The names on the left are those of llama.cpp's converter
//! (<https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py>).

use super::gguf_config::{self, RopeFactors};
use super::gguf_header::{Header, TensorInfo, decimal};
use super::gguf_tokenizer;
use super::{Checkpoint, RowOrder, SourceFile, SourceTensor};
use crate::error::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model family that GGUF files of ours may hold.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Family {
    /// `general.architecture`.
    pub name: &'static str,
    pub class: &'static str,
    pub model_type: &'static str,
    /// The converter interleaved the rotary rows of q and k (those that derive from its Llama converter).
    interleaved: bool,
}

impl Family {
    /// Gemma: norms as `1 + w`, four norms a layer, tokenizer without a leading space.
    pub fn is_gemma(&self) -> bool {
        self.name.starts_with("gemma")
    }
}

const FAMILIES: [Family; 7] = [
    Family { name: "llama", class: "LlamaForCausalLM", model_type: "llama", interleaved: true },
    Family { name: "qwen2", class: "Qwen2ForCausalLM", model_type: "qwen2", interleaved: false },
    Family { name: "qwen3", class: "Qwen3ForCausalLM", model_type: "qwen3", interleaved: false },
    Family { name: "gemma2", class: "Gemma2ForCausalLM", model_type: "gemma2", interleaved: false },
    Family { name: "gemma3", class: "Gemma3ForCausalLM", model_type: "gemma3_text", interleaved: false },
    Family { name: "smollm3", class: "SmolLM3ForCausalLM", model_type: "smollm3", interleaved: true },
    Family { name: "phi3", class: "Phi3ForCausalLM", model_type: "phi3", interleaved: false },
];

/// The Hugging Face `model_type` of an architecture, if it is in the table.
pub(super) fn model_type(class: &str) -> Option<&'static str> {
    FAMILIES.iter().find(|family| family.class == class).map(|family| family.model_type)
}

/// Far above any real model; bounds the per-layer lists of the config.
const MAX_LAYERS: usize = 1024;

/// Opens a `.gguf` file; any part of a split set opens the whole set.
pub(super) fn open(path: &Path) -> Result<Checkpoint> {
    let parts = open_parts(path)?;
    let first = &parts[0];
    let family = family(first)?;
    let layers = first.need_size(&format!("{}.block_count", family.name))?;
    if layers > MAX_LAYERS {
        let what = format!("says it has {layers} layers; at most {MAX_LAYERS} are allowed");
        return Err(Error::bad_file(&first.file.path, what));
    }

    let mut tensors = BTreeMap::new();
    let mut factors = RopeFactors::default();
    for part in &parts {
        for info in &part.tensors {
            let tensor = source(part, info);
            let slot = match info.name.as_str() {
                "rope_freqs.weight" => &mut factors.plain,
                "rope_factors_long.weight" if family.name == "phi3" => &mut factors.long,
                "rope_factors_short.weight" if family.name == "phi3" => &mut factors.short,
                _ => {
                    let name = hugging_face_name(part, family, layers, &info.name)?;
                    if tensors.insert(name, tensor).is_some() {
                        let what = format!("tensor {} appears twice", info.name);
                        return Err(Error::bad_file(&part.file.path, what));
                    }
                    continue;
                }
            };
            *slot = Some(read_factors(&info.name, &tensor)?);
        }
    }
    let config = gguf_config::config(first, family, &factors, &tensors)?;
    if family.interleaved {
        for (suffix, heads) in [(".q_proj.weight", "num_attention_heads"), (".k_proj.weight", "num_key_value_heads")] {
            let heads = config[heads].as_u64().unwrap_or(0) as usize;
            for (name, tensor) in tensors.iter_mut().filter(|(name, _)| name.ends_with(suffix)) {
                if heads == 0 || tensor.shape.len() != 2 || tensor.shape[0] % (2 * heads) != 0 {
                    let what = format!("tensor {name} of shape {:?} does not split into {heads} heads", tensor.shape);
                    return Err(Error::bad_file(&tensor.file.path, what));
                }
                tensor.order = RowOrder::RopePairs { heads };
            }
        }
    }
    let tokens = first.texts("tokenizer.ggml.tokens")?.map_or(0, <[String]>::len);
    let rows = config["vocab_size"].as_u64().unwrap_or(0);
    if tokens as u64 > rows {
        let what = format!("has {tokens} tokens, but token_embd.weight has {rows} rows");
        return Err(Error::bad_file(&first.file.path, what));
    }
    let tokenizer = gguf_tokenizer::tokenizer(first, family)?;
    let generation = gguf_tokenizer::generation(first)?;
    Ok(Checkpoint {
        path: path.to_path_buf(),
        config,
        generation: Some(generation),
        tokenizer,
        tensors,
        norms_include_one: family.is_gemma(),
        sentence: Default::default(),
    })
}

fn source(part: &Header, info: &TensorInfo) -> SourceTensor {
    SourceTensor {
        shape: info.shape.clone(),
        encoding: info.encoding,
        order: RowOrder::Plain,
        file: Arc::clone(&part.file),
        offset: info.offset,
        official: None,
    }
}

fn family(header: &Header) -> Result<&'static Family> {
    let path = header.file.path.display();
    let Some(name) = header.text("general.architecture")? else {
        return Err(Error::bad_file(&header.file.path, "metadata key general.architecture is missing"));
    };
    if let Some(kind) = header.text("general.type")?
        && kind != "model"
    {
        return Err(Error::unsupported(format!("{path}: holds a {kind}; only models can be opened")));
    }
    let experts = header.size(&format!("{name}.expert_count"))?.unwrap_or(0);
    let known = FAMILIES.iter().find(|f| f.name == name);
    match known {
        Some(family) if experts == 0 => Ok(family),
        Some(_) => Err(Error::unsupported(format!("{path}: {name} as a mixture of {experts} experts is not supported"))),
        None => {
            let known: Vec<&str> = FAMILIES.iter().map(|f| f.name).collect();
            let moe = if experts > 0 { " (a mixture of experts)" } else { "" };
            let known = known.join(", ");
            Err(Error::unsupported(format!("{path}: architecture {name}{moe} is not supported; supported: {known}")))
        }
    }
}

fn hugging_face_name(part: &Header, family: &Family, layers: usize, name: &str) -> Result<String> {
    let path = part.file.path.display();
    let top = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(top) = top {
        return Ok(top.to_string());
    }
    if name.contains("_exps.") || name.contains("_shexp.") || name.contains("ffn_gate_inp") {
        return Err(Error::unsupported(format!("{path}: tensor {name}: mixtures of experts are not supported")));
    }
    let block = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let block = block.and_then(|(n, role)| Some((n.parse::<usize>().ok()?, layer_role(family, role)?)));
    let Some((n, role)) = block else {
        let what = format!("{path}: tensor {name} is not known in a {} model", family.name);
        return Err(Error::unsupported(what));
    };
    if n >= layers {
        return Err(Error::bad_file(&part.file.path, format!("tensor {name}, but the model has {layers} layers")));
    }
    Ok(format!("model.layers.{n}.{role}"))
}

/// The Hugging Face name of a tensor inside a layer. Biases of interleaved q and k are left out on purpose:
/// converters of different age disagree on their order.
fn layer_role(family: &Family, role: &str) -> Option<&'static str> {
    let gemma = family.is_gemma();
    Some(match (role, family.name) {
        ("attn_norm.weight", _) => "input_layernorm.weight",
        ("post_attention_norm.weight", _) if gemma => "post_attention_layernorm.weight",
        ("ffn_norm.weight", _) if gemma => "pre_feedforward_layernorm.weight",
        ("post_ffw_norm.weight", _) if gemma => "post_feedforward_layernorm.weight",
        ("ffn_norm.weight", _) => "post_attention_layernorm.weight",
        ("attn_output.weight", _) => "self_attn.o_proj.weight",
        ("ffn_down.weight", _) => "mlp.down_proj.weight",
        ("attn_qkv.weight", "phi3") => "self_attn.qkv_proj.weight",
        ("ffn_up.weight", "phi3") => "mlp.gate_up_proj.weight",
        (_, "phi3") => return None,
        ("attn_q.weight", _) => "self_attn.q_proj.weight",
        ("attn_k.weight", _) => "self_attn.k_proj.weight",
        ("attn_v.weight", _) => "self_attn.v_proj.weight",
        ("ffn_gate.weight", _) => "mlp.gate_proj.weight",
        ("ffn_up.weight", _) => "mlp.up_proj.weight",
        ("attn_q.bias", "qwen2") => "self_attn.q_proj.bias",
        ("attn_k.bias", "qwen2") => "self_attn.k_proj.bias",
        ("attn_v.bias", "qwen2") => "self_attn.v_proj.bias",
        ("attn_q_norm.weight", "qwen3" | "gemma3") => "self_attn.q_norm.weight",
        ("attn_k_norm.weight", "qwen3" | "gemma3") => "self_attn.k_norm.weight",
        _ => return None,
    })
}

/// The factors by which rotary frequencies are divided, one for each pair of a head.
fn read_factors(name: &str, tensor: &SourceTensor) -> Result<Vec<f64>> {
    let bad = |what: &str| Error::bad_file(&tensor.file.path, format!("tensor {name} {what}"));
    if tensor.rows() != 1 || tensor.width() > 4096 {
        return Err(bad("is not a short vector"));
    }
    let mut factors = vec![0f32; tensor.width()];
    tensor.read_rows(0..1, &mut factors)?;
    if !factors.iter().all(|f| f.is_finite() && *f > 0.0) {
        return Err(bad("holds values that are not positive"));
    }
    Ok(factors.into_iter().map(decimal).collect())
}

/// All parts in order; a file that is not split is its own only part.
fn open_parts(path: &Path) -> Result<Vec<Header>> {
    let given = Header::read(SourceFile::open(path)?)?;
    let count = given.size("split.count")?.unwrap_or(0);
    let Some((stem, total)) = split_name(path) else {
        if count > 1 {
            let what = format!("is one of {count} parts, but its name does not end in -00001-of-0000N.gguf");
            return Err(Error::bad_file(path, what).with_hint("give the parts the names they were published under"));
        }
        return Ok(vec![given]);
    };
    if total == 1 && count <= 1 {
        return Ok(vec![given]);
    }
    if count != total {
        let what = format!("its name says {total} parts, its metadata {}", count.max(1));
        return Err(Error::bad_file(path, what));
    }
    let mut parts = Vec::new();
    for n in 1..=total {
        let name = part_path(path, stem, n, total);
        let file = SourceFile::open(&name).map_err(|e| match e.kind {
            Kind::NotFound => Error::not_found(format!("{}: part {n} of {total} is missing", name.display()))
                .with_hint("download every part into one folder"),
            _ => e,
        })?;
        let part = Header::read(file)?;
        if part.size("split.count")? != Some(total) || part.size("split.no")? != Some(n - 1) {
            return Err(Error::bad_file(&name, format!("its metadata does not say that it is part {n} of {total}")));
        }
        parts.push(part);
    }
    let held: usize = parts.iter().map(|p| p.tensors.len()).sum();
    if let Some(expected) = parts[0].size("split.tensors.count")?
        && expected != held
    {
        return Err(Error::bad_file(path, format!("the parts hold {held} tensors, {expected} were split")));
    }
    Ok(parts)
}

/// Takes `stem-00002-of-00005.gguf` apart: the stem and the number of parts.
fn split_name(path: &Path) -> Option<(&str, usize)> {
    let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (front, total) = name.rsplit_once("-of-")?;
    let (stem, n) = front.rsplit_once('-')?;
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    let total: usize = Some(total).filter(|t| digits(t) && digits(n))?.parse().ok()?;
    (total > 0).then_some((stem, total))
}

fn part_path(path: &Path, stem: &str, n: usize, total: usize) -> PathBuf {
    path.with_file_name(format!("{stem}-{n:05}-of-{total:05}.gguf"))
}
