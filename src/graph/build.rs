//! Building a graph; shapes are checked as nodes are added.

use super::op::{NodeId, Op, RopeTable, WeightId};
use super::tensor::Weight;
use crate::error::{Error, Result};
use crate::kernels::attention::{AttentionShape, MAX_HEAD_DIM};
use crate::kernels::elementwise::Act;
use crate::quant::{CqLayout, Rotation};
use std::collections::HashMap;

/// How many rows a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// One a token.
    Tokens,
    /// One a sequence.
    Last,
}

/// Kind and shape of a node's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Value {
    pub rows: Rows,
    pub cols: usize,
    /// Set for int8 values: the layout (of any matrix with these columns) that tells rotation, groups and padding.
    pub rotated: Option<CqLayout>,
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub op: Op,
    pub inputs: Vec<NodeId>,
    pub value: Value,
}

/// A computation from token ids to outputs.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(super) weights: Vec<Weight>,
    pub(super) ropes: Vec<RopeTable>,
    pub(super) caches: Vec<AttentionShape>,
    pub(super) outputs: Vec<NodeId>,
    /// Int8 form of a node, by how it is rotated, so that products with the same input share it.
    rotated: HashMap<(NodeId, Rotation), NodeId>,
}

impl Graph {
    /// Makes a weight known to the graph.
    pub fn weight(&mut self, weight: Weight) -> WeightId {
        self.weights.push(weight);
        WeightId(self.weights.len() - 1)
    }

    /// Makes a rotary table known to the graph.
    pub fn rope_table(&mut self, table: RopeTable) -> usize {
        self.ropes.push(table);
        self.ropes.len() - 1
    }

    /// Declares a result of the graph.
    pub fn output(&mut self, node: NodeId) {
        self.outputs.push(node);
    }

    /// Columns of a node's value.
    pub fn cols(&self, node: NodeId) -> usize {
        self.nodes[node.0].value.cols
    }

    fn push(&mut self, op: Op, inputs: &[NodeId], rows: Rows, cols: usize) -> NodeId {
        self.nodes.push(Node { op, inputs: inputs.to_vec(), value: Value { rows, cols, rotated: None } });
        NodeId(self.nodes.len() - 1)
    }

    /// The part of a matrix in parts that holds a row, and its number there.
    pub(super) fn row_of(&self, parts: &[WeightId], mut row: usize) -> (&Weight, usize) {
        for part in parts.iter().map(|part| &self.weights[part.0]) {
            if row < part.rows {
                return (part, row);
            }
            row -= part.rows;
        }
        panic!("a row past the end of a table")
    }

    fn rows(&self, node: NodeId) -> Rows {
        self.nodes[node.0].value.rows
    }

    /// A weight that must be one f32 row of `cols` columns.
    fn vector(&self, weight: WeightId, cols: usize) -> Result<()> {
        let w = &self.weights[weight.0];
        if w.format == crate::quant::Format::F32 && w.rows == 1 && w.cols == cols {
            return Ok(());
        }
        Err(mismatch(&format!("{} is {} [{}, {}], needed is f32 [1, {cols}]", w.name, w.format, w.rows, w.cols)))
    }

    pub fn embed(&mut self, parts: &[WeightId]) -> Result<NodeId> {
        let cols = self.parts(parts)?.1;
        Ok(self.push(Op::Embed { parts: parts.to_vec() }, &[], Rows::Tokens, cols))
    }

    /// Rows and columns of a matrix in parts.
    fn parts(&self, parts: &[WeightId]) -> Result<(usize, usize)> {
        let weights = || parts.iter().map(|part| &self.weights[part.0]);
        let cols = weights().next().map_or(0, |w| w.cols);
        match weights().find(|w| w.cols != cols) {
            Some(other) => Err(mismatch(&format!("{} has {} columns, the part before it {cols}", other.name, other.cols))),
            None => Ok((weights().map(|w| w.rows).sum(), cols)),
        }
    }

    /// Rows of `cols` values that every run gets as [`Feed::Rows`](super::Feed::Rows).
    pub fn rows_input(&mut self, cols: usize) -> NodeId {
        self.push(Op::Rows, &[], Rows::Tokens, cols)
    }

    pub fn rms_norm(&mut self, x: NodeId, weight: WeightId, eps: f32) -> Result<NodeId> {
        self.vector(weight, self.cols(x))?;
        Ok(self.push(Op::RmsNorm { weight, eps }, &[x], self.rows(x), self.cols(x)))
    }

    /// Norm of mean and variance.
    pub fn layer_norm(&mut self, x: NodeId, weight: WeightId, bias: WeightId, eps: f32) -> Result<NodeId> {
        self.vector(weight, self.cols(x))?;
        self.vector(bias, self.cols(x))?;
        Ok(self.push(Op::LayerNorm { weight, bias, eps }, &[x], self.rows(x), self.cols(x)))
    }

    /// Rows of `table` for the places of the tokens in their texts; texts must not be longer than the table.
    pub fn positions(&mut self, table: WeightId) -> NodeId {
        let cols = self.weights[table.0].cols;
        self.push(Op::Positions { table }, &[], Rows::Tokens, cols)
    }

    /// Row `row` of `table` for every token.
    pub fn constant_row(&mut self, table: WeightId, row: usize) -> Result<NodeId> {
        let w = &self.weights[table.0];
        if row >= w.rows {
            return Err(mismatch(&format!("row {row} of {}, which has {}", w.name, w.rows)));
        }
        Ok(self.push(Op::ConstantRow { table, row }, &[], Rows::Tokens, self.weights[table.0].cols))
    }

    pub fn head_norm(&mut self, x: NodeId, weight: WeightId, eps: f32, start: usize, heads: usize) -> Result<NodeId> {
        let dim = self.weights[weight.0].cols;
        self.vector(weight, dim)?;
        self.heads_fit(x, start, heads, dim)?;
        Ok(self.push(Op::HeadNorm { weight, eps, start, heads }, &[x], self.rows(x), self.cols(x)))
    }

    fn heads_fit(&self, x: NodeId, start: usize, heads: usize, dim: usize) -> Result<()> {
        if heads.checked_mul(dim).and_then(|n| n.checked_add(start)).is_some_and(|end| end <= self.cols(x)) {
            return Ok(());
        }
        Err(mismatch(&format!("{heads} heads of {dim} from column {start} do not fit {} columns", self.cols(x))))
    }

    /// `x W^T (+ bias)`; the input of a quantised matrix is first rotated as the matrix is and rounded, once for
    /// all products that want it the same way.
    pub fn matmul(&mut self, x: NodeId, weight: WeightId, bias: Option<WeightId>) -> Result<NodeId> {
        let w = &self.weights[weight.0];
        let (out, layout) = (w.rows, w.layout());
        if w.cols != self.cols(x) {
            return Err(mismatch(&format!("{} has {} columns, its input {}", w.name, w.cols, self.cols(x))));
        }
        if let Some(bias) = bias {
            self.vector(bias, out)?;
        }
        let input = layout.map_or(x, |layout| self.rotate(x, layout, weight));
        Ok(self.push(Op::MatMul { weight, bias }, &[input], self.rows(x), out))
    }

    /// The int8 form of a value for matrices like this one, or for this one alone if its rotation is its own.
    fn rotate(&mut self, x: NodeId, layout: CqLayout, weight: WeightId) -> NodeId {
        let rotation = layout.rotation();
        if let Some(&rotated) = self.rotated.get(&(x, rotation)) {
            return rotated;
        }
        let own = (rotation == Rotation::Own).then_some(weight);
        let rotated = self.push(Op::Rotate { own }, &[x], self.rows(x), layout.cols);
        self.nodes[rotated.0].value.rotated = Some(layout);
        if own.is_none() {
            self.rotated.insert((x, rotation), rotated);
        }
        rotated
    }

    /// `x W^T` for a matrix in parts, one below the other. Several parts must be quantised and rotated, and not each in
    /// its own way.
    pub fn matmul_parts(&mut self, x: NodeId, parts: &[WeightId]) -> Result<NodeId> {
        if let [whole] = parts {
            return self.matmul(x, *whole, None);
        }
        let (rows, cols) = self.parts(parts)?;
        let layouts: Option<Vec<CqLayout>> =
            parts.iter().map(|part| self.weights[part.0].layout().filter(|l| l.rotation() == Rotation::Common)).collect();
        let Some(layout) = layouts.and_then(|all| all.first().copied()).filter(|_| cols == self.cols(x)) else {
            return Err(mismatch(&format!("a matrix in {} parts and {} columns of input", parts.len(), self.cols(x))));
        };
        let input = self.rotate(x, layout, parts[0]);
        Ok(self.push(Op::MatMulParts { parts: parts.to_vec() }, &[input], self.rows(x), rows))
    }

    /// Cosines and sines for the current positions.
    pub fn rope_angles(&mut self, rope: usize) -> NodeId {
        let cols = 2 * self.ropes[rope].frequencies.len();
        self.push(Op::RopeAngles { rope }, &[], Rows::Tokens, cols)
    }

    pub fn rope(&mut self, x: NodeId, angles: NodeId, start: usize, heads: usize, head_dim: usize) -> Result<NodeId> {
        self.heads_fit(x, start, heads, head_dim)?;
        if self.cols(angles) > head_dim {
            return Err(mismatch(&format!("{} rotary dimensions in heads of {head_dim}", self.cols(angles))));
        }
        Ok(self.push(Op::Rope { start, heads, head_dim }, &[x, angles], self.rows(x), self.cols(x)))
    }

    /// Attention with a cache of its own. The columns of `qkv` are queries, keys, values.
    pub fn attention(&mut self, qkv: NodeId, shape: AttentionShape) -> Result<NodeId> {
        let AttentionShape { heads, head_dim, .. } = shape;
        self.attention_fits(qkv, &shape)?;
        self.caches.push(shape);
        let cache = self.caches.len() - 1;
        Ok(self.push(Op::Attention { cache, shape }, &[qkv], self.rows(qkv), heads * head_dim))
    }

    /// Attention of every token to all of its text, without a cache.
    pub fn attention_to_all(&mut self, qkv: NodeId, shape: AttentionShape) -> Result<NodeId> {
        self.attention_fits(qkv, &shape)?;
        if shape.window.is_some() || self.rows(qkv) != Rows::Tokens {
            return Err(Error::unsupported("attention to all tokens, but within a window or of one token"));
        }
        Ok(self.push(Op::AttentionToAll { shape }, &[qkv], Rows::Tokens, shape.heads * shape.head_dim))
    }

    fn attention_fits(&self, qkv: NodeId, shape: &AttentionShape) -> Result<()> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = *shape;
        if head_dim == 0 || head_dim > MAX_HEAD_DIM || kv_heads == 0 || heads % kv_heads != 0 || shape.window == Some(0) {
            return Err(Error::unsupported(format!("attention with {heads} heads, {kv_heads} key-value heads of {head_dim}")));
        }
        if (heads + 2 * kv_heads) * head_dim != self.cols(qkv) {
            return Err(mismatch(&format!("{heads} + 2 * {kv_heads} heads of {head_dim} against {} columns", self.cols(qkv))));
        }
        Ok(())
    }

    pub fn activate(&mut self, x: NodeId, act: Act) -> NodeId {
        self.push(Op::Activate { act }, &[x], self.rows(x), self.cols(x))
    }

    /// Gated activation of `x [.., 2 * width]`, gate columns first.
    pub fn gate(&mut self, x: NodeId, act: Act) -> Result<NodeId> {
        if !self.cols(x).is_multiple_of(2) {
            return Err(mismatch(&format!("a gated activation of {} columns", self.cols(x))));
        }
        Ok(self.push(Op::Gate { act }, &[x], self.rows(x), self.cols(x) / 2))
    }

    pub fn add(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        if self.cols(a) != self.cols(b) || self.rows(a) != self.rows(b) {
            return Err(mismatch(&format!("adding {} and {} columns", self.cols(a), self.cols(b))));
        }
        Ok(self.push(Op::Add, &[a, b], self.rows(a), self.cols(a)))
    }

    pub fn scale(&mut self, x: NodeId, factor: f32) -> NodeId {
        self.push(Op::Scale { factor }, &[x], self.rows(x), self.cols(x))
    }

    /// `cap * tanh(x / cap)`
    pub fn soft_cap(&mut self, x: NodeId, cap: f32) -> NodeId {
        self.push(Op::SoftCap { cap }, &[x], self.rows(x), self.cols(x))
    }

    pub fn last_row(&mut self, x: NodeId) -> NodeId {
        self.push(Op::LastRow, &[x], Rows::Last, self.cols(x))
    }
}

fn mismatch(what: &str) -> Error {
    Error::unsupported(format!("shapes do not fit: {what}"))
}
