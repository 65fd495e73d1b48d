//! File names of official folders, and what their makers did to the values of each.

use super::Undo;

/// Endings of tensor files, the ones to take first when a tensor has several.
const ENDS: [(&str, Kind); 4] =
    [(".cq4.weights", Kind::Weight), (".cq2.weights", Kind::Weight), (".weights", Kind::Weight), (".bias", Kind::Bias)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Weight,
    Bias,
}

/// Names outside layers.
const GLOBAL: [(&str, &str); 3] =
    [("token_embeddings", "model.embed_tokens"), ("output_weight", "lm_head"), ("output_norm", "model.norm")];

/// Names behind `layer_N_`, and behind `model.layers.N.` in the checkpoint.
const LAYER: [(&str, &str); 22] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("input_norm", "input_layernorm"),
    ("post_attn_norm", "post_attention_layernorm"),
    ("pre_ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffn_norm", "post_feedforward_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    // What has no name of its own keeps the checkpoint's, with underscores for dots: biases, and fused matrices.
    ("self_attn_q_proj", "self_attn.q_proj"),
    ("self_attn_k_proj", "self_attn.k_proj"),
    ("self_attn_v_proj", "self_attn.v_proj"),
    ("self_attn_o_proj", "self_attn.o_proj"),
    ("self_attn_qkv_proj", "self_attn.qkv_proj"),
    ("mlp_gate_up_proj", "mlp.gate_up_proj"),
    ("mlp_gate_proj", "mlp.gate_proj"),
    ("mlp_up_proj", "mlp.up_proj"),
    ("mlp_down_proj", "mlp.down_proj"),
];

/// A file name taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileName<'a> {
    /// Without the ending.
    pub stem: &'a str,
    /// Of several files with one stem and kind, that with the lowest rank counts.
    pub rank: usize,
    kind: Kind,
}

impl<'a> FileName<'a> {
    /// `None` for files that hold no tensor.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (rank, (stem, kind)) =
            ENDS.iter().enumerate().find_map(|(rank, (end, kind))| Some((rank, (name.strip_suffix(end)?, *kind))))?;
        Some(FileName { stem, rank, kind })
    }

    /// The part behind `layer_N_`, and `N`.
    fn layer(&self) -> Option<(usize, &'a str)> {
        let (number, role) = self.stem.strip_prefix("layer_")?.split_once('_')?;
        // Only the usual spelling of a number, so that no two files mean one tensor.
        let n: usize = number.parse().ok()?;
        (n.to_string() == number).then_some((n, role))
    }

    /// The Hugging Face name; a file that no table has keeps its own, which no architecture has a place for.
    pub fn hugging_face(&self) -> String {
        let end = match self.kind {
            Kind::Weight => "weight",
            Kind::Bias => "bias",
        };
        if let Some((_, name)) = GLOBAL.iter().find(|(file, _)| *file == self.stem) {
            return format!("{name}.{end}");
        }
        let layer = self.layer();
        let role = layer.and_then(|(_, role)| LAYER.iter().find(|(file, _)| *file == role));
        match (layer, role) {
            (Some((n, _)), Some((_, name))) => format!("model.layers.{n}.{name}.{end}"),
            _ => format!("{}.{end}", self.stem),
        }
    }

    /// How to undo what the makers do to tensors of Gemma 3, to keep its residual stream within f16: it runs at a
    /// sixteenth. `factor` is what the manifest says about scaling; it leaves norms out, which mean `1 + w`.
    pub fn undo_gemma3(&self, factor: Option<f32>) -> Undo {
        const SCALE: f32 = 16.0;
        let norm = |factor| Undo { offset: 1.0, factor };
        let scaled = |by: f32| Undo { offset: 0.0, factor: 1.0 / factor.unwrap_or(by) };
        match (self.layer().map(|(_, role)| role), self.stem) {
            (Some("input_norm" | "post_attn_norm" | "pre_ffn_norm" | "post_ffn_norm"), _) => norm(SCALE),
            (None, "output_norm") => norm(1.0 / SCALE),
            (Some("ffn_gate" | "ffn_up"), _) => scaled(SCALE),
            (None, "token_embeddings") => scaled(1.0 / SCALE),
            _ => scaled(1.0),
        }
    }
}
