//! From a [`Decoder`] spec and its weights to a computation graph.

use super::spec::{Decoder, Mixer, Mlp, NormPlacement};
use crate::error::Result;
use crate::graph::{Graph, RopeTable, Weight, WeightId};
use crate::kernels::attention::AttentionShape;

/// Which positions get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Only the last token of a run: `[1, vocab]`.
    Last,
    /// Every token: `[tokens, vocab]`.
    All,
}

/// Builds the graph; `weight` finds a bundle tensor by name. The only output is the logits.
pub fn graph(spec: &Decoder, logits: Logits, weight: &dyn Fn(&str) -> Result<Weight>) -> Result<Graph> {
    let mut g = Graph::default();
    let rope_tables: Vec<usize> =
        spec.ropes.iter().map(|r| g.rope_table(RopeTable { frequencies: r.frequencies.clone(), scale: r.scale })).collect();
    let angles: Vec<_> = rope_tables.iter().map(|&table| g.rope_angles(table)).collect();
    let find = |g: &mut Graph, name: &str| -> Result<WeightId> { Ok(g.weight(weight(name)?)) };
    let eps = spec.norm_eps;

    let embed = find(&mut g, "embed")?;
    let mut x = g.embed(embed)?;
    if spec.embed_scale != 1.0 {
        x = g.scale(x, spec.embed_scale);
    }
    for (i, layer) in spec.layers.iter().enumerate() {
        let name = |part: &str| format!("layers.{i}.{part}");
        let part = |g: &mut Graph, part: &str| find(g, &name(part));
        let optional = |g: &mut Graph, wanted: bool, part: &str| if wanted { find(g, &name(part)).map(Some) } else { Ok(None) };
        let sandwich = layer.norms == NormPlacement::Sandwich;

        let Mixer::Attention { heads, kv_heads, head_dim, rope, window, qk_norm, qkv_bias, out_bias, scale, cap } = layer.mixer;
        let norm = part(&mut g, "attn.norm")?;
        let h = g.rms_norm(x, norm, eps)?;
        let (w, b) = (part(&mut g, "attn.qkv")?, optional(&mut g, qkv_bias, "attn.qkv.bias")?);
        let mut h = g.matmul(h, w, b)?;
        let keys = heads * head_dim;
        if qk_norm {
            let (q, k) = (part(&mut g, "attn.q_norm")?, part(&mut g, "attn.k_norm")?);
            h = g.head_norm(h, q, eps, 0, heads)?;
            h = g.head_norm(h, k, eps, keys, kv_heads)?;
        }
        if let Some(rope) = rope {
            // Query and key heads stand side by side, so one step turns both.
            h = g.rope(h, angles[rope], 0, heads + kv_heads, head_dim)?;
        }
        h = g.attention(h, AttentionShape { heads, kv_heads, head_dim, scale, cap, window })?;
        let (w, b) = (part(&mut g, "attn.out")?, optional(&mut g, out_bias, "attn.out.bias")?);
        h = g.matmul(h, w, b)?;
        if sandwich {
            let norm = part(&mut g, "attn.post_norm")?;
            h = g.rms_norm(h, norm, eps)?;
        }
        x = g.add(x, h)?;

        let Mlp::Gated { act, bias, .. } = layer.mlp;
        let norm = part(&mut g, "mlp.norm")?;
        let h = g.rms_norm(x, norm, eps)?;
        let (w, b) = (part(&mut g, "mlp.gate_up")?, optional(&mut g, bias, "mlp.gate_up.bias")?);
        let h = g.matmul(h, w, b)?;
        let h = g.gate(h, act)?;
        let (w, b) = (part(&mut g, "mlp.down")?, optional(&mut g, bias, "mlp.down.bias")?);
        let mut h = g.matmul(h, w, b)?;
        if sandwich {
            let norm = part(&mut g, "mlp.post_norm")?;
            h = g.rms_norm(h, norm, eps)?;
        }
        x = g.add(x, h)?;
    }
    if logits == Logits::Last {
        x = g.last_row(x);
    }
    let norm = find(&mut g, "norm")?;
    let x = g.rms_norm(x, norm, eps)?;
    let head = if spec.tied { embed } else { find(&mut g, "head")? };
    let mut x = g.matmul(x, head, None)?;
    if let Some(cap) = spec.logit_cap {
        x = g.soft_cap(x, cap);
    }
    g.output(x);
    Ok(g)
}
