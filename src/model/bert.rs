//! The family of BERT encoders: how `config.json` and the files of sentence-transformers become an [`Encoder`], and
//! which checkpoint tensors become which bundle tensors.

use super::config::Config;
use super::families::{ModelPlan, Role, TensorPlan, check_sources};
use super::import::{Checkpoint, SentenceFiles};
use super::spec::{Encoder, EncoderKind, Pooling, Spec};
use crate::error::{Error, Result};

pub const ARCHITECTURES: &[&str] = &["BertModel"];

/// Tensors that embedding models carry along and never use: the classifier of the training run, and a list of numbers.
const UNUSED: &[&str] = &["pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"];

/// The two vectors of a norm: what follows its name here, and in the checkpoint.
const NORM: [(&str, &str); 2] = [("", "weight"), (".bias", "bias")];

/// Reads the configuration of a checkpoint and maps its tensors.
pub fn plan(checkpoint: &Checkpoint) -> Result<ModelPlan> {
    let mut warnings = Vec::new();
    let spec = encoder(Config(&checkpoint.config), &checkpoint.sentence, &mut warnings)?;
    let tensors = tensors(&spec);
    check_sources(&tensors, checkpoint, UNUSED)?;
    let spec = Spec::Encoder(spec);
    spec.check()?;
    Ok(ModelPlan { family: "bert", spec, tensors, warnings })
}

fn encoder(config: Config, sentence: &SentenceFiles, warnings: &mut Vec<String>) -> Result<Encoder> {
    let kind = config.str("position_embedding_type").unwrap_or("absolute");
    if kind != "absolute" {
        return Err(Error::unsupported(format!("config key position_embedding_type is {kind} (supported: absolute)")));
    }
    for key in ["is_decoder", "add_cross_attention"] {
        if config.bool(key, false)? {
            return Err(Error::unsupported(format!("config key {key} is true: this BERT model is no encoder")));
        }
    }
    if sentence.lower_case {
        return Err(Error::unsupported("sentence_bert_config.json has do_lower_case, which is left to the tokenizer here"));
    }
    let (pooling, normalize) = pooling(sentence, warnings)?;
    let positions = config.usize("max_position_embeddings")?;
    Ok(Encoder {
        kind: EncoderKind::Encoder,
        dim: config.usize("hidden_size")?,
        vocab: config.usize("vocab_size")?,
        norm_eps: config.f64_or_none("layer_norm_eps")?.unwrap_or(1e-12) as f32,
        positions,
        types: config.usize_or_none("type_vocab_size")?.unwrap_or(2),
        max_tokens: sentence.max_tokens.unwrap_or(positions).min(positions),
        layers: config.usize("num_hidden_layers")?,
        heads: config.usize("num_attention_heads")?,
        hidden: config.usize("intermediate_size")?,
        act: config.act()?,
        pooling,
        normalize,
    })
}

/// How vectors are made of hidden states, and whether they get length 1.
fn pooling(sentence: &SentenceFiles, warnings: &mut Vec<String>) -> Result<(Pooling, bool)> {
    let normalize = match &sentence.steps {
        None => true,
        Some(steps) => {
            let known = ["Transformer", "Pooling", "Normalize"];
            if let Some(step) = steps.iter().find(|step| !known.contains(&step.as_str())) {
                let known = known.join(", ");
                return Err(Error::unsupported(format!("modules.json has the step {step} (supported: {known})")));
            }
            steps.iter().any(|step| step == "Normalize")
        }
    };
    let Some(config) = &sentence.pooling else {
        warnings
            .push("no pooling settings (1_Pooling/config.json): vectors are means of the hidden states, of length 1".to_owned());
        return Ok((Pooling::Mean, normalize));
    };
    let modes = config.as_object().into_iter().flatten().filter(|(key, on)| key.starts_with("pooling_mode") && **on == true);
    match modes.map(|(key, _)| key.as_str()).collect::<Vec<_>>()[..] {
        ["pooling_mode_mean_tokens"] => Ok((Pooling::Mean, normalize)),
        ["pooling_mode_cls_token"] => Ok((Pooling::First, normalize)),
        ref modes => Err(Error::unsupported(format!(
            "pooling by [{}] (supported: pooling_mode_mean_tokens or pooling_mode_cls_token)",
            modes.join(", ")
        ))),
    }
}

/// Which bundle tensors there are and what they are made of.
fn tensors(spec: &Encoder) -> Vec<TensorPlan> {
    let mut list = Vec::new();
    let mut add = |name: String, role, sources: &[String], rows: usize, cols: usize| {
        let sources = sources.to_vec();
        list.push(TensorPlan { name, role, rows, cols, sources, first_row: 0, offset: 0.0, left_out: 0.0 });
    };
    let (dim, hidden) = (spec.dim, spec.hidden);
    for (name, from, rows) in
        [("embed", "word", spec.vocab), ("positions", "position", spec.positions), ("types", "token_type", spec.types)]
    {
        add(name.to_owned(), Role::Embedding, &[format!("embeddings.{from}_embeddings.weight")], rows, dim);
    }
    for (suffix, kind) in NORM {
        add(format!("norm{suffix}"), Role::Vector, &[format!("embeddings.LayerNorm.{kind}")], 1, dim);
    }
    for i in 0..spec.layers {
        let from = |name: &str, kind: &str| format!("encoder.layer.{i}.{name}.{kind}");
        let products: [(&str, &[&str], usize, usize); 4] = [
            ("attn.qkv", &["attention.self.query", "attention.self.key", "attention.self.value"], 3 * dim, dim),
            ("attn.out", &["attention.output.dense"], dim, dim),
            ("mlp.up", &["intermediate.dense"], hidden, dim),
            ("mlp.down", &["output.dense"], dim, hidden),
        ];
        for (name, sources, rows, cols) in products {
            let of = |kind: &str| sources.iter().map(|source| from(source, kind)).collect::<Vec<_>>();
            add(format!("layers.{i}.{name}"), Role::Matrix, &of("weight"), rows, cols);
            add(format!("layers.{i}.{name}.bias"), Role::Vector, &of("bias"), 1, rows);
        }
        for (to, from) in [("attn", "attention.output"), ("mlp", "output")] {
            for (suffix, kind) in NORM {
                let source = format!("encoder.layer.{i}.{from}.LayerNorm.{kind}");
                add(format!("layers.{i}.{to}.norm{suffix}"), Role::Vector, &[source], 1, dim);
            }
        }
    }
    list
}
