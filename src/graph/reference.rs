//! The slow truth: the same graph in plain f64 loops, without plan, arena, cache or rounded activations.

use super::build::Graph;
use super::execute::Feed;
use super::op::{Op, WeightId};
use crate::kernels::attention::AttentionShape;
use crate::kernels::elementwise::Act;
use std::ops::Range;

/// `x W^T (+ bias)` for a matrix in parts.
fn product(graph: &Graph, weights: &[u8], parts: &[WeightId], x: &[f64], bias: Option<&[f32]>) -> Vec<f64> {
    let parts = || parts.iter().map(|part| &graph.weights[part.0]);
    let (rows, width) = (parts().map(|w| w.rows).sum::<usize>(), parts().next().map_or(1, |w| w.cols));
    let mut out = vec![0.0; x.len() / width * rows];
    let mut row = vec![0.0f32; width];
    for (i, (w, r)) in parts().flat_map(|w| (0..w.rows).map(move |r| (w, r))).enumerate() {
        w.row(weights, r, &mut row);
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(rows)) {
            let sum: f64 = x.iter().zip(&row).map(|(x, w)| x * f64::from(*w)).sum();
            out[i] = sum + bias.map_or(0.0, |b| f64::from(b[i]));
        }
    }
    out
}

/// Runs `graph` over a whole sequence from position 0 and returns every output, row after row.
pub fn run(graph: &Graph, weights: &[u8], feed: Feed) -> Vec<Vec<f64>> {
    let tokens = feed.tokens();
    let mut values: Vec<Vec<f64>> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let cols = node.value.cols;
        let input = |i: usize| values[node.inputs[i].0].as_slice();
        let vector = |id: WeightId| graph.weights[id.0].f32(weights);
        let value: Vec<f64> = match &node.op {
            Op::Embed { parts } => {
                let mut row = vec![0.0f32; cols];
                let mut out = Vec::new();
                for id in feed.ids() {
                    let (part, at) = graph.row_of(parts, *id as usize);
                    part.row(weights, at, &mut row);
                    out.extend(row.iter().map(|x| f64::from(*x)));
                }
                out
            }
            Op::Rows => {
                let Feed::Rows { rows, .. } = feed else { panic!("this graph starts from rows") };
                rows.iter().map(|x| f64::from(*x)).collect()
            }
            Op::RmsNorm { weight, eps } => input(0).chunks_exact(cols).flat_map(|x| rms(x, vector(*weight), *eps)).collect(),
            Op::LayerNorm { weight, bias, eps } => {
                let (weight, bias) = (vector(*weight), vector(*bias));
                input(0).chunks_exact(cols).flat_map(|x| layer_norm(x, weight, bias, *eps)).collect()
            }
            Op::Positions { table } => feed.places(&tokens).flat_map(|place| table_row(graph, weights, *table, place)).collect(),
            Op::ConstantRow { table, row } => (0..tokens).flat_map(|_| table_row(graph, weights, *table, *row)).collect(),
            Op::HeadNorm { weight, eps, start, heads } => {
                let mut out = input(0).to_vec();
                let w = vector(*weight);
                for row in out.chunks_exact_mut(cols) {
                    for head in row[*start..*start + heads * w.len()].chunks_exact_mut(w.len()) {
                        let normed = rms(head, w, *eps);
                        head.copy_from_slice(&normed);
                    }
                }
                out
            }
            // Only a storage form of its input.
            Op::Rotate { .. } => input(0).to_vec(),
            Op::MatMul { weight, bias } => product(graph, weights, &[*weight], input(0), bias.map(vector)),
            Op::MatMulParts { parts } => product(graph, weights, parts, input(0), None),
            Op::RopeAngles { rope } => {
                let table = &graph.ropes[*rope];
                let scale = f64::from(table.scale);
                (0..tokens)
                    .flat_map(|t| {
                        let angle = move |f: &f32| f64::from(t as f32 * f);
                        let cos = table.frequencies.iter().map(move |f| angle(f).cos() * scale);
                        cos.chain(table.frequencies.iter().map(move |f| angle(f).sin() * scale))
                    })
                    .collect()
            }
            Op::Rope { start, heads, head_dim } => {
                let mut out = input(0).to_vec();
                let width = graph.nodes[node.inputs[1].0].value.cols;
                for (row, table) in out.chunks_exact_mut(cols).zip(input(1).chunks_exact(width)) {
                    let (cos, sin) = table.split_at(width / 2);
                    for head in row[*start..*start + heads * head_dim].chunks_exact_mut(*head_dim) {
                        for i in 0..width / 2 {
                            let (a, b) = (head[i], head[i + width / 2]);
                            (head[i], head[i + width / 2]) = (a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]);
                        }
                    }
                }
                out
            }
            Op::Attention { shape, .. } => {
                attention(shape, input(0), |t| shape.window.map_or(0, |w| (t + 1).saturating_sub(w))..t + 1)
            }
            Op::AttentionToAll { shape } => {
                let ends = feed.ends(&tokens);
                let end = |t: usize| ends.partition_point(|end| *end <= t);
                attention(shape, input(0), |t| if end(t) == 0 { 0 } else { ends[end(t) - 1] }..ends[end(t)])
            }
            Op::Activate { act } => input(0).iter().map(|x| activation(*act, *x)).collect(),
            Op::Gate { act } => {
                input(0).chunks_exact(2 * cols).flat_map(|x| (0..cols).map(|i| activation(*act, x[i]) * x[cols + i])).collect()
            }
            Op::Add => input(0).iter().zip(input(1)).map(|(a, b)| a + b).collect(),
            Op::Scale { factor } => input(0).iter().map(|x| x * f64::from(*factor)).collect(),
            Op::SoftCap { cap } => input(0).iter().map(|x| f64::from(*cap) * (x / f64::from(*cap)).tanh()).collect(),
            Op::LastRow => input(0)[input(0).len() - cols..].to_vec(),
        };
        values.push(value);
    }
    graph.outputs.iter().map(|output| values[output.0].clone()).collect()
}

fn rms(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * factor * f64::from(*w)).collect()
}

fn layer_norm(x: &[f64], weight: &[f32], bias: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    x.iter().zip(weight).zip(bias).map(|((x, w), b)| (x - mean) * factor * f64::from(*w) + f64::from(*b)).collect()
}

fn table_row(graph: &Graph, weights: &[u8], table: WeightId, row: usize) -> Vec<f64> {
    let table = &graph.weights[table.0];
    let mut out = vec![0.0f32; table.cols];
    table.row(weights, row, &mut out);
    out.into_iter().map(f64::from).collect()
}

/// Error function by a series of positive terms (Abramowitz and Stegun, 7.1.6).
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, 0.0);
    for n in 0..200 {
        sum += term;
        term *= 2.0 * x * x / f64::from(2 * n + 3);
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

fn activation(act: Act, x: f64) -> f64 {
    match act {
        Act::Silu => x / (1.0 + (-x).exp()),
        Act::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Act::GeluTanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
    }
}

/// `seen`: the positions that the one at a position sees.
fn attention(shape: &AttentionShape, x: &[f64], seen: impl Fn(usize) -> Range<usize>) -> Vec<f64> {
    let (dim, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let stride = (shape.heads + 2 * shape.kv_heads) * dim;
    let tokens = x.len() / stride;
    let mut out = vec![0.0; tokens * shape.heads * dim];
    for t in 0..tokens {
        for head in 0..shape.heads {
            let key = (shape.heads + head / group) * dim;
            let value = key + shape.kv_heads * dim;
            let scores: Vec<f64> = seen(t)
                .map(|p| {
                    let dot: f64 = (0..dim).map(|d| x[t * stride + head * dim + d] * x[p * stride + key + d]).sum();
                    let score = dot * f64::from(shape.scale);
                    shape.cap.map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh())
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            for (p, score) in seen(t).zip(&scores) {
                let weight = (score - top).exp() / total;
                for d in 0..dim {
                    out[(t * shape.heads + head) * dim + d] += weight * x[p * stride + value + d];
                }
            }
        }
    }
    out
}
