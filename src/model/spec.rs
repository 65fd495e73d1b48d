//! What a network is: sizes and rules, no weights, no family names.

use crate::error::{Error, Result};
use crate::kernels::elementwise::Act;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// A network of any kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Spec {
    /// Continues a text.
    Decoder(Decoder),
    /// Turns a text into a vector.
    Encoder(Encoder),
}

/// An encoder says `"kind": "encoder"`; what says nothing is a decoder.
impl<'de> Deserialize<'de> for Spec {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(from)?;
        match value.get("kind").map(|kind| kind.as_str().unwrap_or_default()) {
            None => Decoder::deserialize(value).map(Spec::Decoder).map_err(D::Error::custom),
            Some("encoder") => Encoder::deserialize(value).map(Spec::Encoder).map_err(D::Error::custom),
            Some(other) => Err(D::Error::custom(format!("a network of the kind {other:?} (supported: encoder)"))),
        }
    }
}

impl Spec {
    /// Checks sizes, so that everything built from the spec can multiply them without care.
    pub fn check(&self) -> Result<()> {
        match self {
            Spec::Decoder(spec) => spec.check(),
            Spec::Encoder(spec) => spec.check(),
        }
    }

    /// Width of the residual stream.
    pub fn dim(&self) -> usize {
        match self {
            Spec::Decoder(spec) => spec.dim,
            Spec::Encoder(spec) => spec.dim,
        }
    }

    /// Rows of the embedding table; token ids are below this.
    pub fn vocab(&self) -> usize {
        match self {
            Spec::Decoder(spec) => spec.vocab,
            Spec::Encoder(spec) => spec.vocab,
        }
    }

    /// Tokens that the model was made for.
    pub fn max_context(&self) -> usize {
        match self {
            Spec::Decoder(spec) => spec.max_context,
            Spec::Encoder(spec) => spec.max_tokens,
        }
    }

    pub fn layers(&self) -> usize {
        match self {
            Spec::Decoder(spec) => spec.layers.len(),
            Spec::Encoder(spec) => spec.layers,
        }
    }

    /// Whether the embedding table is also the output head.
    pub fn tied(&self) -> bool {
        matches!(self, Spec::Decoder(spec) if spec.tied)
    }

    pub fn decoder(&self) -> Option<&Decoder> {
        match self {
            Spec::Decoder(spec) => Some(spec),
            Spec::Encoder(_) => None,
        }
    }
}

/// Always written as `encoder`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EncoderKind {
    #[default]
    Encoder,
}

/// A bidirectional transformer with learned positions, norms of mean and variance after each addition, and plain MLPs
/// (BERT, Devlin et al., <https://arxiv.org/abs/1810.04805>), whose last hidden states become one vector a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Encoder {
    pub kind: EncoderKind,
    /// Width of the residual stream and of the result.
    pub dim: usize,
    /// Rows of the embedding table; token ids are below this.
    pub vocab: usize,
    /// Added to the variance in every norm.
    pub norm_eps: f32,
    /// Rows of the table of positions.
    pub positions: usize,
    /// Rows of the table of token types, of which the first is used.
    pub types: usize,
    /// Tokens that are kept of a text, special tokens included.
    pub max_tokens: usize,
    pub layers: usize,
    pub heads: usize,
    /// Width of the MLPs.
    pub hidden: usize,
    pub act: Act,
    pub pooling: Pooling,
    /// Whether vectors are scaled to length 1.
    pub normalize: bool,
}

/// How the hidden states of a text become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// That of the first token.
    First,
}

impl Encoder {
    fn check(&self) -> Result<()> {
        let sizes = [
            ("dim", self.dim),
            ("vocab", self.vocab),
            ("positions", self.positions),
            ("types", self.types),
            ("layers", self.layers),
            ("heads", self.heads),
            ("hidden", self.hidden),
        ];
        sizes_fit(&sizes)?;
        if !self.dim.is_multiple_of(self.heads) {
            return Err(Error::unsupported(format!("a width of {} does not divide into {} heads", self.dim, self.heads)));
        }
        if !(1..=self.positions).contains(&self.max_tokens) {
            return Err(Error::unsupported(format!("texts of {} tokens with {} positions", self.max_tokens, self.positions)));
        }
        if !self.norm_eps.is_finite() || self.norm_eps < 0.0 {
            return Err(Error::unsupported("norm_eps must be a positive number"));
        }
        Ok(())
    }
}

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decoder {
    /// Width of the residual stream.
    pub dim: usize,
    /// Rows of the embedding table; token ids are below this.
    pub vocab: usize,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Factor on embedding rows.
    pub embed_scale: f32,
    /// Whether the embedding table is also the output head.
    pub tied: bool,
    /// Rows at which parts of the table and the head begin after the first, where they are stored in parts
    /// (`embed.0`, `embed.1`, ...) of different widths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub table_parts: Vec<usize>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
    /// Positions that the model was made for.
    pub max_context: usize,
    /// Rotary tables that layers refer to.
    pub ropes: Vec<Rope>,
    pub layers: Vec<Layer>,
}

/// Rotation frequencies, after all long-context rules have been applied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Radians a position for each rotated pair of dimensions.
    pub frequencies: Vec<f32>,
    /// Factor on cosines and sines.
    pub scale: f32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    pub mixer: Mixer,
    pub mlp: Mlp,
    pub norms: NormPlacement,
}

/// Where a layer normalises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// Before the mixer and before the MLP.
    Pre,
    /// Before and after both (Gemma 2 and 3).
    Sandwich,
}

/// How a layer mixes tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Mixer {
    Attention {
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        /// Index into [`Decoder::ropes`]; `None`: no position embedding in this layer.
        rope: Option<usize>,
        /// A token sees itself and the `window - 1` before it.
        window: Option<usize>,
        /// Norms on every query and key head.
        qk_norm: bool,
        /// Bias of the query, key and value projections.
        qkv_bias: bool,
        out_bias: bool,
        /// Factor on the scores.
        scale: f32,
        /// Soft cap on the scores.
        cap: Option<f32>,
    },
}

/// The position-wise part of a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Mlp {
    /// `down(act(gate x) * up x)`
    Gated { hidden: usize, act: Act, bias: bool },
}

/// Upper bound on every size in a spec; far above any real model, low enough that products cannot overflow.
const SIZE_LIMIT: usize = 1 << 24;

fn sizes_fit(sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| !(1..=SIZE_LIMIT).contains(size)) {
        Some((name, size)) => Err(Error::unsupported(format!("{name} of {size} (1 to {SIZE_LIMIT} are supported)"))),
        None => Ok(()),
    }
}

impl Decoder {
    /// Checks sizes, so that everything built from the spec can multiply them without care.
    pub fn check(&self) -> Result<()> {
        let mut sizes = vec![("dim", self.dim), ("vocab", self.vocab), ("layers", self.layers.len())];
        for layer in &self.layers {
            let Mixer::Attention { heads, kv_heads, head_dim, rope, window, scale, cap, .. } = &layer.mixer;
            let Mlp::Gated { hidden, .. } = &layer.mlp;
            sizes.extend([("heads", *heads), ("kv_heads", *kv_heads), ("head_dim", *head_dim), ("hidden", *hidden)]);
            sizes.push(("window", window.unwrap_or(1).min(SIZE_LIMIT)));
            if heads % kv_heads.max(&1) != 0 {
                return Err(Error::unsupported(format!("{heads} attention heads are no multiple of {kv_heads} key-value heads")));
            }
            if heads.saturating_mul(*head_dim) > SIZE_LIMIT {
                return Err(Error::unsupported(format!("{heads} attention heads of {head_dim} dimensions")));
            }
            if !scale.is_finite() || cap.is_some_and(|c| !c.is_finite() || c <= 0.0) {
                return Err(Error::unsupported("the scale or cap of an attention layer is no usable number"));
            }
            if let Some(rope) = rope {
                match self.ropes.get(*rope) {
                    Some(table) if 2 * table.frequencies.len() <= *head_dim => {}
                    _ => return Err(Error::unsupported("a layer refers to a rotary table that does not fit")),
                }
            }
        }
        let ends = self.table_parts.iter().chain([&self.vocab]);
        if !std::iter::once(&0).chain(&self.table_parts).zip(ends).all(|(start, end)| start < end) {
            return Err(Error::unsupported("the parts of the embedding table are not in order"));
        }
        let positive = |x: f32| x.is_finite() && x > 0.0;
        if !positive(self.norm_eps) || !positive(self.embed_scale) || self.logit_cap.is_some_and(|c| !positive(c)) {
            return Err(Error::unsupported("norm_eps, embed_scale and logit_cap must be positive numbers"));
        }
        sizes_fit(&sizes)
    }
}
