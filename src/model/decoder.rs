//! From a [`Decoder`] spec and its weights to a computation graph.

use super::spec::{Decoder, Mixer, Mlp, NormPlacement};
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
    let (embed, mut x) = add_body(&mut g, spec, find)?;
    if logits == Logits::Last {
        x = g.last_row(x);
    }
    let head = if spec.tied { embed } else { table(&mut g, spec, "head", find)? };
    add_head(&mut g, spec, x, &head, find)?;
    Ok(g)
}

/// From token ids to the hidden states after the last norm, `[tokens, dim]`: what the head would get.
pub fn states_graph(spec: &Decoder, find: Find) -> Result<Graph> {
    let mut g = Graph::default();
    let (_, x) = add_body(&mut g, spec, find)?;
    let norm = g.weight(find("norm")?);
    let x = g.rms_norm(x, norm, spec.norm_eps)?;
    g.output(x);
    Ok(g)
}

/// From token ids to the residual stream after the last layer; also the parts of the embedding table.
fn add_body(g: &mut Graph, spec: &Decoder, find: Find) -> Result<(Vec<WeightId>, NodeId)> {
    let angles = angles(g, spec);
    let embed = table(g, spec, "embed", find)?;
    let mut x = g.embed(&embed)?;
    if spec.embed_scale != 1.0 {
        x = g.scale(x, spec.embed_scale);
    }
    for i in 0..spec.layers.len() {
        x = add_layer(g, spec, i, x, &angles, find)?;
    }
    Ok((embed, x))
}

/// The parts of the embedding table or of the head.
fn table(g: &mut Graph, spec: &Decoder, name: &str, find: Find) -> Result<Vec<WeightId>> {
    if spec.table_parts.is_empty() {
        return Ok(vec![g.weight(find(name)?)]);
    }
    (0..=spec.table_parts.len()).map(|i| Ok(g.weight(find(&format!("{name}.{i}"))?))).collect()
}

/// Part of a layer. In order: the residual stream goes through [`Piece::AttentionNorm`] to [`Piece::Out`] and
/// the result is added to it; then the same with [`Piece::MlpNorm`] to [`Piece::Down`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Stream to the input of the query, key and value product.
    AttentionNorm,
    /// That product and attention: to the input of the output product.
    Attention,
    /// To what is added to the stream.
    Out,
    /// Stream to the input of the gate and up product.
    MlpNorm,
    /// To the input of the down product.
    Gate,
    /// To what is added to the stream.
    Down,
}

/// Layer `i` alone, from the residual stream before it to the one after.
pub fn layer_graph(spec: &Decoder, i: usize, find: Find) -> Result<Graph> {
    let mut g = Graph::default();
    let angles = angles(&mut g, spec);
    let x = g.rows_input(spec.dim);
    let out = add_layer(&mut g, spec, i, x, &angles, find)?;
    g.output(out);
    Ok(g)
}

/// From the residual stream after the last layer to logits; the head is looked up as `head` or `embed`.
pub fn head_graph(spec: &Decoder, find: Find) -> Result<Graph> {
    let mut g = Graph::default();
    let x = g.rows_input(spec.dim);
    let head = table(&mut g, spec, if spec.tied { "embed" } else { "head" }, find)?;
    add_head(&mut g, spec, x, &head, find)?;
    Ok(g)
}

/// Ends a graph with the logits.
fn add_head(g: &mut Graph, spec: &Decoder, x: NodeId, head: &[WeightId], find: Find) -> Result<()> {
    let norm = g.weight(find("norm")?);
    let x = g.rms_norm(x, norm, spec.norm_eps)?;
    let mut x = g.matmul_parts(x, head)?;
    if let Some(cap) = spec.logit_cap {
        x = g.soft_cap(x, cap);
    }
    g.output(x);
    Ok(())
}

/// A piece alone; `cols` is the width of its input.
pub fn piece_graph(spec: &Decoder, i: usize, piece: Piece, cols: usize, find: Find) -> Result<Graph> {
    let mut g = Graph::default();
    let angles = angles(&mut g, spec);
    let x = g.rows_input(cols);
    let out = add_piece(&mut g, spec, i, piece, x, &angles, find)?;
    g.output(out);
    Ok(g)
}

fn angles(g: &mut Graph, spec: &Decoder) -> Vec<NodeId> {
    let tables: Vec<usize> =
        spec.ropes.iter().map(|r| g.rope_table(RopeTable { frequencies: r.frequencies.clone(), scale: r.scale })).collect();
    tables.iter().map(|&table| g.rope_angles(table)).collect()
}

fn add_layer(g: &mut Graph, spec: &Decoder, i: usize, x: NodeId, angles: &[NodeId], find: Find) -> Result<NodeId> {
    let mut stream = x;
    for half in [[Piece::AttentionNorm, Piece::Attention, Piece::Out], [Piece::MlpNorm, Piece::Gate, Piece::Down]] {
        let mut x = stream;
        for piece in half {
            x = add_piece(g, spec, i, piece, x, angles, find)?;
        }
        stream = g.add(stream, x)?;
    }
    Ok(stream)
}

fn add_piece(g: &mut Graph, spec: &Decoder, i: usize, piece: Piece, x: NodeId, angles: &[NodeId], find: Find) -> Result<NodeId> {
    let (layer, eps) = (&spec.layers[i], spec.norm_eps);
    let part = |g: &mut Graph, part: &str| -> Result<WeightId> { Ok(g.weight(find(&format!("layers.{i}.{part}"))?)) };
    let product = |g: &mut Graph, x: NodeId, bias: bool, name: &str| {
        let w = part(g, name)?;
        let b = if bias { Some(part(g, &format!("{name}.bias"))?) } else { None };
        g.matmul(x, w, b)
    };
    let norm = |g: &mut Graph, x: NodeId, name: &str| {
        let w = part(g, name)?;
        g.rms_norm(x, w, eps)
    };
    let after = |g: &mut Graph, x: NodeId, name: &str| match layer.norms {
        NormPlacement::Pre => Ok(x),
        NormPlacement::Sandwich => norm(g, x, name),
    };
    let Mixer::Attention { heads, kv_heads, head_dim, rope, window, qk_norm, qkv_bias, out_bias, scale, cap } = layer.mixer;
    let Mlp::Gated { act, bias, .. } = layer.mlp;
    match piece {
        Piece::AttentionNorm => norm(g, x, "attn.norm"),
        Piece::Attention => {
            let mut h = product(g, x, qkv_bias, "attn.qkv")?;
            if qk_norm {
                let (q, k) = (part(g, "attn.q_norm")?, part(g, "attn.k_norm")?);
                h = g.head_norm(h, q, eps, 0, heads)?;
                h = g.head_norm(h, k, eps, heads * head_dim, kv_heads)?;
            }
            if let Some(rope) = rope {
                // Query and key heads stand side by side, so one step turns both.
                h = g.rope(h, angles[rope], 0, heads + kv_heads, head_dim)?;
            }
            g.attention(h, AttentionShape { heads, kv_heads, head_dim, scale, cap, window })
        }
        Piece::Out => {
            let h = product(g, x, out_bias, "attn.out")?;
            after(g, h, "attn.post_norm")
        }
        Piece::MlpNorm => norm(g, x, "mlp.norm"),
        Piece::Gate => {
            let h = product(g, x, bias, "mlp.gate_up")?;
            g.gate(h, act)
        }
        Piece::Down => {
            let h = product(g, x, bias, "mlp.down")?;
            after(g, h, "mlp.post_norm")
        }
    }
}
