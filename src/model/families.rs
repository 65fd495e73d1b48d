//! The table of model families: how a `config.json` becomes a [`Decoder`], and which checkpoint tensors
//! become which bundle tensors. Nothing past this file knows a family's name.

use super::bert;
use super::config::Config;
use super::import::Checkpoint;
use super::spec::{Decoder, Layer, Mixer, Mlp, NormPlacement, Spec};
use crate::error::{Error, Result};

/// When a projection has a bias.
#[derive(Clone, Copy)]
enum Bias {
    Never,
    Always,
    /// As `attention_bias` says.
    Config,
}

/// Which layers see a limited window.
#[derive(Clone, Copy)]
enum Windows {
    /// All, when `sliding_window` is set.
    All,
    /// By `layer_types`; without them the layers from `max_window_layers` on, if `use_sliding_window`.
    Switched,
    /// By `layer_types`; without them every n-th layer is full.
    Every(usize),
}

/// A row of the table.
struct Family {
    name: &'static str,
    architectures: &'static [&'static str],
    qkv_bias: Bias,
    out_bias: Bias,
    /// Query and key heads are normalised.
    qk_norm: bool,
    /// Norm weights are stored as `w` and mean `1 + w`.
    norm_plus_one: bool,
    norms: NormPlacement,
    /// Embedding rows are multiplied by `sqrt(dim)`.
    scaled_embedding: bool,
    windows: Windows,
    /// Layers with a window have rotary settings of their own.
    local_rope: bool,
    /// Query, key and value (and gate and up) are one matrix in the checkpoint.
    fused: bool,
}

const LLAMA: Family = Family {
    name: "llama",
    architectures: &["LlamaForCausalLM"],
    qkv_bias: Bias::Config,
    out_bias: Bias::Config,
    qk_norm: false,
    norm_plus_one: false,
    norms: NormPlacement::Pre,
    scaled_embedding: false,
    windows: Windows::Switched,
    local_rope: false,
    fused: false,
};

const GEMMA2: Family = Family {
    name: "gemma2",
    architectures: &["Gemma2ForCausalLM"],
    norm_plus_one: true,
    norms: NormPlacement::Sandwich,
    scaled_embedding: true,
    windows: Windows::Every(2),
    ..LLAMA
};

const FAMILIES: &[Family] = &[
    LLAMA,
    Family {
        name: "mistral",
        architectures: &["MistralForCausalLM"],
        windows: Windows::All,
        qkv_bias: Bias::Never,
        out_bias: Bias::Never,
        ..LLAMA
    },
    Family { name: "qwen2", architectures: &["Qwen2ForCausalLM"], qkv_bias: Bias::Always, out_bias: Bias::Never, ..LLAMA },
    Family { name: "qwen3", architectures: &["Qwen3ForCausalLM"], qk_norm: true, ..LLAMA },
    GEMMA2,
    Family {
        name: "gemma3",
        architectures: &["Gemma3ForCausalLM"],
        qk_norm: true,
        windows: Windows::Every(6),
        local_rope: true,
        ..GEMMA2
    },
    Family { name: "smollm3", architectures: &["SmolLM3ForCausalLM"], ..LLAMA },
    Family {
        name: "phi3",
        architectures: &["Phi3ForCausalLM"],
        windows: Windows::All,
        qkv_bias: Bias::Never,
        out_bias: Bias::Never,
        fused: true,
        ..LLAMA
    },
];

/// What a bundle tensor is for; decides its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Matrix,
    /// Embedding table, tied or not.
    Embedding,
    /// Output head that is not the embedding table.
    Head,
    /// Norm weights and biases: always f32.
    Vector,
}

/// One bundle tensor and the checkpoint tensors whose rows it stacks.
#[derive(Clone, Debug)]
pub struct TensorPlan {
    pub name: String,
    pub role: Role,
    pub rows: usize,
    pub cols: usize,
    /// Checkpoint names, in row order.
    pub sources: Vec<String>,
    /// The row of their stack that it begins with: a table may be stored in parts.
    pub first_row: usize,
    /// Added to every element.
    pub offset: f32,
    /// What a Hugging Face checkpoint leaves out of every element, whatever this checkpoint does.
    pub left_out: f32,
}

/// What a checkpoint becomes.
#[derive(Debug)]
pub struct ModelPlan {
    pub family: &'static str,
    pub spec: Spec,
    pub tensors: Vec<TensorPlan>,
    /// Things the user should know.
    pub warnings: Vec<String>,
}

impl ModelPlan {
    /// The spec of a model that is calibrated, which only decoders are.
    pub(super) fn decoder(&self) -> &Decoder {
        self.spec.decoder().expect("encoders are rounded plainly")
    }

    /// The same with the embedding table and the head in parts, of which those after the first begin at these rows.
    pub fn in_parts(&self, starts: &[usize]) -> ModelPlan {
        let part = |tensor: &TensorPlan, i: usize| {
            let start = if i == 0 { 0 } else { starts[i - 1] };
            let rows = starts.get(i).copied().unwrap_or(tensor.rows) - start;
            TensorPlan { name: format!("{}.{i}", tensor.name), rows, first_row: start, ..tensor.clone() }
        };
        let split = |tensor: &TensorPlan| match tensor.role {
            Role::Embedding | Role::Head if !starts.is_empty() => (0..=starts.len()).map(|i| part(tensor, i)).collect(),
            _ => vec![tensor.clone()],
        };
        ModelPlan {
            family: self.family,
            spec: match &self.spec {
                Spec::Decoder(spec) => Spec::Decoder(Decoder { table_parts: starts.to_vec(), ..spec.clone() }),
                encoder => encoder.clone(),
            },
            tensors: self.tensors.iter().flat_map(split).collect(),
            warnings: self.warnings.clone(),
        }
    }
}

/// Supported architecture names, for messages.
pub fn architectures() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|f| f.architectures).chain(bert::ARCHITECTURES).copied().collect()
}

/// Whether a `config.json` is that of an embedding model.
pub fn is_embedding(config: &serde_json::Value) -> bool {
    let named = Config(config).get("architectures").and_then(|a| a.get(0)).and_then(|a| a.as_str());
    named.is_some_and(|name| bert::ARCHITECTURES.contains(&name))
}

/// Reads the configuration of a checkpoint and maps its tensors; every tensor must be accounted for.
pub fn plan(checkpoint: &Checkpoint) -> Result<ModelPlan> {
    read(checkpoint).map_err(|e| e.context(checkpoint.path.display()))
}

fn read(checkpoint: &Checkpoint) -> Result<ModelPlan> {
    let config = Config(&checkpoint.config);
    let named = config.get("architectures").and_then(|a| a.get(0)).and_then(|a| a.as_str());
    let architecture = named.ok_or_else(|| Error::unsupported("config.json names no architecture (key architectures)"))?;
    if bert::ARCHITECTURES.contains(&architecture) {
        return bert::plan(checkpoint);
    }
    let family = FAMILIES.iter().find(|f| f.architectures.contains(&architecture)).ok_or_else(|| {
        Error::unsupported(format!("architecture {architecture} is not supported (supported: {})", architectures().join(", ")))
    })?;
    let mut warnings = Vec::new();
    let mut spec = family.decoder(config)?;
    let has_head = checkpoint.tensors.contains_key("lm_head.weight");
    let flag = config.bool("tie_word_embeddings", !has_head)?;
    if flag && has_head {
        warnings
            .push("config.json says that embedding and output head are one, but lm_head.weight is there and is used".to_owned());
    } else if !flag && !has_head {
        warnings.push(
            "config.json says that the output head is a matrix of its own, but there is none: the embedding is used".to_owned(),
        );
    }
    spec.tied = !has_head;
    spec.check()?;
    let tensors = family.tensors(&spec, checkpoint)?;
    Ok(ModelPlan { family: family.name, spec: Spec::Decoder(spec), tensors, warnings })
}

impl Family {
    fn decoder(&self, config: Config) -> Result<Decoder> {
        let (dim, heads, count) =
            (config.usize("hidden_size")?, config.usize("num_attention_heads")?, config.usize("num_hidden_layers")?);
        if heads == 0 || count > 4096 {
            return Err(Error::unsupported(format!("{heads} attention heads, {count} layers")));
        }
        let kv_heads = config.usize_or_none("num_key_value_heads")?.unwrap_or(heads);
        let head_dim = config.usize_or_none("head_dim")?.unwrap_or(dim / heads);
        let rotary = (head_dim as f64 * config.f64_or_none("partial_rotary_factor")?.unwrap_or(1.0)) as usize;
        let windows = self.windows(config, count)?;
        let mut ropes = Vec::new();
        let mut max_context = config.usize("max_position_embeddings")?;
        let full = config.rope(rotary, Some("full_attention"))?;
        max_context = full.max_context.unwrap_or(max_context).min(max_context);
        ropes.push(full.rope);
        if self.local_rope {
            // Older files give the base of the windowed layers under its own key and scale only the others.
            let local = match config.f64_or_none("rope_local_base_freq")? {
                Some(theta) => Config(&serde_json::json!({ "rope_theta": theta })).rope(rotary, None)?,
                None => config.rope(rotary, Some("sliding_attention"))?,
            };
            ropes.push(local.rope);
        }
        let bias = |rule: Bias| match rule {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Config => config.bool("attention_bias", false),
        };
        let scalar = config.f64_or_none("query_pre_attn_scalar")?.unwrap_or(head_dim as f64);
        let cap = |key: &str| config.f64_or_none(key).map(|c| c.map(|c| c as f32));
        let without_rope = without_rope(config, count)?;
        let mlp =
            Mlp::Gated { hidden: config.usize("intermediate_size")?, act: config.act()?, bias: config.bool("mlp_bias", false)? };
        let mut layers = Vec::with_capacity(count);
        for (i, window) in windows.into_iter().enumerate() {
            let rope = if without_rope[i] { None } else { Some(usize::from(self.local_rope && window.is_some())) };
            layers.push(Layer {
                mixer: Mixer::Attention {
                    heads,
                    kv_heads,
                    head_dim,
                    rope,
                    window,
                    qk_norm: self.qk_norm,
                    qkv_bias: bias(self.qkv_bias)?,
                    out_bias: bias(self.out_bias)?,
                    scale: (1.0 / scalar.sqrt()) as f32,
                    cap: cap("attn_logit_softcapping")?,
                },
                mlp: mlp.clone(),
                norms: self.norms,
            });
        }
        Ok(Decoder {
            dim,
            vocab: config.usize("vocab_size")?,
            norm_eps: config.f64_or_none("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            embed_scale: if self.scaled_embedding { (dim as f32).sqrt() } else { 1.0 },
            tied: true,
            logit_cap: cap("final_logit_softcapping")?,
            table_parts: Vec::new(),
            max_context,
            ropes,
            layers,
        })
    }

    /// The window of every layer.
    fn windows(&self, config: Config, count: usize) -> Result<Vec<Option<usize>>> {
        let window = config.usize_or_none("sliding_window")?;
        let all = |window| Ok(vec![window; count]);
        match self.windows {
            Windows::All => return all(window),
            Windows::Switched if !config.bool("use_sliding_window", false)? => return all(None),
            _ => {}
        }
        if let Some(types) = config.layer_strings("layer_types", count)? {
            let of = |kind: &&str| match *kind {
                "full_attention" => Ok(None),
                "sliding_attention" => Ok(window),
                other => Err(Error::unsupported(format!("layer type {other} (supported: full_attention, sliding_attention)"))),
            };
            return types.iter().map(of).collect();
        }
        let full_every = match self.windows {
            Windows::Every(n) => config.usize_or_none("sliding_window_pattern")?.unwrap_or(n).max(1),
            _ => {
                let first = config.usize_or_none("max_window_layers")?.unwrap_or(0);
                return Ok((0..count).map(|i| window.filter(|_| i >= first)).collect());
            }
        };
        Ok((0..count).map(|i| window.filter(|_| (i + 1) % full_every != 0)).collect())
    }

    /// Which bundle tensors there are and what they are made of.
    fn tensors(&self, spec: &Decoder, checkpoint: &Checkpoint) -> Result<Vec<TensorPlan>> {
        // Of norm weights.
        let one = if self.norm_plus_one { 1.0 } else { 0.0 };
        let mut list = Vec::new();
        let mut add = |name: String, role, sources: &[String], rows: usize, cols: usize, left_out: f32| {
            let offset = if checkpoint.norms_include_one { 0.0 } else { left_out };
            list.push(TensorPlan { name, role, rows, cols, sources: sources.to_vec(), first_row: 0, offset, left_out });
        };
        let norm = |s: String| [s];
        add("embed".into(), Role::Embedding, &["model.embed_tokens.weight".into()], spec.vocab, spec.dim, 0.0);
        for (i, layer) in spec.layers.iter().enumerate() {
            let to = |name: &str| format!("layers.{i}.{name}");
            let from = |name: &str| format!("model.layers.{i}.{name}");
            let Mixer::Attention { heads, kv_heads, head_dim, qk_norm, qkv_bias, out_bias, .. } = layer.mixer;
            let Mlp::Gated { hidden, bias: mlp_bias, .. } = layer.mlp;
            let (queries, all) = (heads * head_dim, (heads + 2 * kv_heads) * head_dim);
            let dim = spec.dim;
            let stacked = |kind: &str| -> Vec<String> {
                let names: &[&str] = if self.fused { &["qkv"] } else { &["q", "k", "v"] };
                names.iter().map(|n| from(&format!("self_attn.{n}_proj.{kind}"))).collect()
            };
            let gated = |kind: &str| -> Vec<String> {
                let names: &[&str] = if self.fused { &["gate_up"] } else { &["gate", "up"] };
                names.iter().map(|n| from(&format!("mlp.{n}_proj.{kind}"))).collect()
            };
            add(to("attn.norm"), Role::Vector, &norm(from("input_layernorm.weight")), 1, dim, one);
            add(to("attn.qkv"), Role::Matrix, &stacked("weight"), all, dim, 0.0);
            if qkv_bias {
                add(to("attn.qkv.bias"), Role::Vector, &stacked("bias"), 1, all, 0.0);
            }
            if qk_norm {
                add(to("attn.q_norm"), Role::Vector, &norm(from("self_attn.q_norm.weight")), 1, head_dim, one);
                add(to("attn.k_norm"), Role::Vector, &norm(from("self_attn.k_norm.weight")), 1, head_dim, one);
            }
            add(to("attn.out"), Role::Matrix, &[from("self_attn.o_proj.weight")], dim, queries, 0.0);
            if out_bias {
                add(to("attn.out.bias"), Role::Vector, &[from("self_attn.o_proj.bias")], 1, dim, 0.0);
            }
            let before_mlp = match layer.norms {
                NormPlacement::Pre => "post_attention_layernorm.weight",
                NormPlacement::Sandwich => {
                    add(to("attn.post_norm"), Role::Vector, &norm(from("post_attention_layernorm.weight")), 1, dim, one);
                    add(to("mlp.post_norm"), Role::Vector, &norm(from("post_feedforward_layernorm.weight")), 1, dim, one);
                    "pre_feedforward_layernorm.weight"
                }
            };
            add(to("mlp.norm"), Role::Vector, &norm(from(before_mlp)), 1, dim, one);
            add(to("mlp.gate_up"), Role::Matrix, &gated("weight"), 2 * hidden, dim, 0.0);
            add(to("mlp.down"), Role::Matrix, &[from("mlp.down_proj.weight")], dim, hidden, 0.0);
            if mlp_bias {
                add(to("mlp.gate_up.bias"), Role::Vector, &gated("bias"), 1, 2 * hidden, 0.0);
                add(to("mlp.down.bias"), Role::Vector, &[from("mlp.down_proj.bias")], 1, dim, 0.0);
            }
        }
        add("norm".into(), Role::Vector, &norm("model.norm.weight".into()), 1, spec.dim, one);
        if !spec.tied {
            add("head".into(), Role::Head, &["lm_head.weight".into()], spec.vocab, spec.dim, 0.0);
        }
        check_sources(&list, checkpoint, &[])?;
        Ok(list)
    }
}

/// SmolLM3: `no_rope_layers` has a 1 for every layer **with** rotary embedding.
fn without_rope(config: Config, count: usize) -> Result<Vec<bool>> {
    if let Some(list) = config.get("no_rope_layers").and_then(|v| v.as_array()) {
        if list.len() != count {
            return Err(Error::unsupported(format!("config key no_rope_layers has {} entries for {count} layers", list.len())));
        }
        return Ok(list.iter().map(|v| v.as_u64() == Some(0)).collect());
    }
    match config.usize_or_none("no_rope_layer_interval")? {
        Some(n) if n > 0 => Ok((0..count).map(|i| (i + 1) % n == 0).collect()),
        _ => Ok(vec![false; count]),
    }
}

/// Shapes must be what the plan expects, and no tensor but `unused` ones may be left over.
pub(super) fn check_sources(plan: &[TensorPlan], checkpoint: &Checkpoint, unused: &[&str]) -> Result<()> {
    let mut used = std::collections::BTreeSet::new();
    for tensor in plan {
        let (mut rows, single) = (0, tensor.role == Role::Vector);
        for name in &tensor.sources {
            let source = checkpoint.tensor(name)?;
            let fits = if single { source.shape.len() == 1 } else { source.shape.len() == 2 && source.shape[1] == tensor.cols };
            if !fits {
                let expected = if single { "a vector".to_owned() } else { format!("[.., {}]", tensor.cols) };
                return Err(Error::unsupported(format!("tensor {name} has shape {:?}, expected {expected}", source.shape)));
            }
            rows += source.shape[0];
            used.insert(name.as_str());
        }
        let expected = if single { tensor.cols } else { tensor.rows };
        if rows != expected {
            return Err(Error::unsupported(format!(
                "tensor {} has {rows} rows where config.json means {expected}",
                tensor.sources.join(" + ")
            )));
        }
    }
    match checkpoint.tensors.keys().find(|name| !used.contains(name.as_str()) && !unused.contains(&name.as_str())) {
        Some(name) => Err(Error::unsupported(format!("tensor {name} has no place in this architecture"))
            .with_hint("the checkpoint has parts that this version does not know; refusing to drop them")),
        None => Ok(()),
    }
}
