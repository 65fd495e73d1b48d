//! From an [`Encoder`] spec and its weights to a computation graph.

use super::decoder::Find;
use super::spec::Encoder;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::kernels::attention::AttentionShape;

/// Builds the graph. The only output is the hidden states after the last layer, `[tokens, dim]`; tokens of several texts
/// ([`Feed::Texts`](crate::graph::Feed::Texts)) do not see each other.
pub fn graph(spec: &Encoder, find: Find) -> Result<Graph> {
    let g = &mut Graph::default();
    let product = |g: &mut Graph, x: NodeId, name: &str| {
        let (w, b) = (g.weight(find(name)?), g.weight(find(&format!("{name}.bias"))?));
        g.matmul(x, w, Some(b))
    };
    let norm = |g: &mut Graph, x: NodeId, name: &str| {
        let (w, b) = (g.weight(find(name)?), g.weight(find(&format!("{name}.bias"))?));
        g.layer_norm(x, w, b, spec.norm_eps)
    };
    let table = |g: &mut Graph, name: &str, rows: usize| {
        let table = find(name)?;
        match table.rows == rows && table.cols == spec.dim {
            true => Ok(g.weight(table)),
            false => Err(Error::unsupported(format!(
                "tensor {name} is [{}, {}], needed is [{rows}, {}]",
                table.rows, table.cols, spec.dim
            ))),
        }
    };
    let (embed, positions) = (table(g, "embed", spec.vocab)?, table(g, "positions", spec.positions)?);
    let types = table(g, "types", spec.types)?;
    let words = g.embed(&[embed])?;
    let places = g.positions(positions);
    let x = g.add(words, places)?;
    let first_type = g.constant_row(types, 0)?;
    let x = g.add(x, first_type)?;
    let mut x = norm(g, x, "norm")?;
    let head_dim = spec.dim / spec.heads;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape { heads: spec.heads, kv_heads: spec.heads, head_dim, scale, cap: None, window: None };
    for i in 0..spec.layers {
        let part = |name: &str| format!("layers.{i}.{name}");
        let h = product(g, x, &part("attn.qkv"))?;
        let h = g.attention_to_all(h, shape)?;
        let h = product(g, h, &part("attn.out"))?;
        let h = g.add(h, x)?;
        x = norm(g, h, &part("attn.norm"))?;
        let h = product(g, x, &part("mlp.up"))?;
        let h = g.activate(h, spec.act);
        let h = product(g, h, &part("mlp.down"))?;
        let h = g.add(h, x)?;
        x = norm(g, h, &part("mlp.norm"))?;
    }
    g.output(x);
    Ok(std::mem::take(g))
}
