//! From a [`Decoder`] spec and its weights to a computation graph.

use super::spec::{Decoder, Layer, Mixer, Mlp, NormPlacement};
use crate::error::Result;
use crate::graph::{Graph, NodeId, RopeTable, Weight, WeightId};
use crate::kernels::attention::AttentionShape;

/// Which positions get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Only the last token of a run: `[1, vocab]`.
    Last,
    /// Every token: `[tokens, vocab]`.
    All,
}

/// Finds a bundle tensor by name.
pub type Find<'a> = &'a dyn Fn(&str) -> Result<Weight>;

/// Builds the graph. The only output is the logits.
pub fn graph(spec: &Decoder, logits: Logits, find: Find) -> Result<Graph> {
    let mut g = Graph::default();
    let angles = angles(&mut g, spec);
    let embed = g.weight(find("embed")?);
    let mut x = g.embed(embed)?;
    if spec.embed_scale != 1.0 {
        x = g.scale(x, spec.embed_scale);
    }
    for (i, layer) in spec.layers.iter().enumerate() {
        x = add_layer(&mut g, spec, i, layer, x, &angles, find)?.0;
    }
    if logits == Logits::Last {
        x = g.last_row(x);
    }
    let norm = g.weight(find("norm")?);
    let x = g.rms_norm(x, norm, spec.norm_eps)?;
    let head = if spec.tied { embed } else { g.weight(find("head")?) };
    let mut x = g.matmul(x, head, None)?;
    if let Some(cap) = spec.logit_cap {
        x = g.soft_cap(x, cap);
    }
    g.output(x);
    Ok(g)
}

/// What the matrix products of a layer are applied to.
#[derive(Clone, Copy, Debug)]
pub struct ProductInputs {
    pub qkv: NodeId,
    pub out: NodeId,
    pub gate_up: NodeId,
    pub down: NodeId,
}

/// Layer `i` alone, from rows of the residual stream. Outputs: the stream after the layer, then the inputs
/// of its products in the order of [`ProductInputs`].
pub fn layer_graph(spec: &Decoder, i: usize, find: Find) -> Result<Graph> {
    let mut g = Graph::default();
    let angles = angles(&mut g, spec);
    let x = g.rows_input(spec.dim);
    let (x, inputs) = add_layer(&mut g, spec, i, &spec.layers[i], x, &angles, find)?;
    for node in [x, inputs.qkv, inputs.out, inputs.gate_up, inputs.down] {
        g.output(node);
    }
    Ok(g)
}

fn angles(g: &mut Graph, spec: &Decoder) -> Vec<NodeId> {
    let tables: Vec<usize> =
        spec.ropes.iter().map(|r| g.rope_table(RopeTable { frequencies: r.frequencies.clone(), scale: r.scale })).collect();
    tables.iter().map(|&table| g.rope_angles(table)).collect()
}

fn add_layer(
    g: &mut Graph,
    spec: &Decoder,
    i: usize,
    layer: &Layer,
    x: NodeId,
    angles: &[NodeId],
    find: Find,
) -> Result<(NodeId, ProductInputs)> {
    let eps = spec.norm_eps;
    let part = |g: &mut Graph, part: &str| -> Result<WeightId> { Ok(g.weight(find(&format!("layers.{i}.{part}"))?)) };
    let optional = |g: &mut Graph, wanted: bool, name: &str| if wanted { part(g, name).map(Some) } else { Ok(None) };
    let sandwich = layer.norms == NormPlacement::Sandwich;

    let Mixer::Attention { heads, kv_heads, head_dim, rope, window, qk_norm, qkv_bias, out_bias, scale, cap } = layer.mixer;
    let norm = part(g, "attn.norm")?;
    let qkv = g.rms_norm(x, norm, eps)?;
    let (w, b) = (part(g, "attn.qkv")?, optional(g, qkv_bias, "attn.qkv.bias")?);
    let mut h = g.matmul(qkv, w, b)?;
    let keys = heads * head_dim;
    if qk_norm {
        let (q, k) = (part(g, "attn.q_norm")?, part(g, "attn.k_norm")?);
        h = g.head_norm(h, q, eps, 0, heads)?;
        h = g.head_norm(h, k, eps, keys, kv_heads)?;
    }
    if let Some(rope) = rope {
        // Query and key heads stand side by side, so one step turns both.
        h = g.rope(h, angles[rope], 0, heads + kv_heads, head_dim)?;
    }
    let out = g.attention(h, AttentionShape { heads, kv_heads, head_dim, scale, cap, window })?;
    let (w, b) = (part(g, "attn.out")?, optional(g, out_bias, "attn.out.bias")?);
    h = g.matmul(out, w, b)?;
    if sandwich {
        let norm = part(g, "attn.post_norm")?;
        h = g.rms_norm(h, norm, eps)?;
    }
    let x = g.add(x, h)?;

    let Mlp::Gated { act, bias, .. } = layer.mlp;
    let norm = part(g, "mlp.norm")?;
    let gate_up = g.rms_norm(x, norm, eps)?;
    let (w, b) = (part(g, "mlp.gate_up")?, optional(g, bias, "mlp.gate_up.bias")?);
    let h = g.matmul(gate_up, w, b)?;
    let down = g.gate(h, act)?;
    let (w, b) = (part(g, "mlp.down")?, optional(g, bias, "mlp.down.bias")?);
    let mut h = g.matmul(down, w, b)?;
    if sandwich {
        let norm = part(g, "mlp.post_norm")?;
        h = g.rms_norm(h, norm, eps)?;
    }
    Ok((g.add(x, h)?, ProductInputs { qkv, out, gate_up, down }))
}
