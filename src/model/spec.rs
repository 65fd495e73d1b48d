//! What a decoder-only network is: sizes and rules, no weights, no family names.

use crate::error::{Error, Result};
use crate::kernels::elementwise::Act;
use serde::{Deserialize, Serialize};

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
        for (name, size) in sizes {
            if size == 0 || size > SIZE_LIMIT {
                return Err(Error::unsupported(format!("{name} of {size} (1 to {SIZE_LIMIT} are supported)")));
            }
        }
        Ok(())
    }
}
