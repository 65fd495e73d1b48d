//! Operations of the graph.

use crate::kernels::attention::AttentionShape;
use crate::kernels::elementwise::Act;

/// A node of a [`Graph`](super::Graph).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(super) usize);

/// A weight of a [`Graph`](super::Graph).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightId(pub(super) usize);

/// Rotation frequencies of a rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians a position, one per rotated pair of dimensions.
    pub frequencies: Vec<f32>,
    /// Factor on cosines and sines (long-context variants; otherwise 1).
    pub scale: f32,
}

/// What a node computes. All values are `[rows, cols]`, one row a token, or one a sequence if [`Op::LastRow`] came before.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Rows of a table for the token ids; its parts stand one below the other.
    Embed {
        parts: Vec<WeightId>,
    },
    /// Rows that the caller gives instead of token ids.
    Rows,
    /// Root-mean-square norm of every row.
    RmsNorm {
        weight: WeightId,
        eps: f32,
    },
    /// Norm of mean and variance of every row.
    LayerNorm {
        weight: WeightId,
        bias: WeightId,
        eps: f32,
    },
    /// Rows of a table for the places of the tokens in their texts.
    Positions {
        table: WeightId,
    },
    /// One row of a table for every token.
    ConstantRow {
        table: WeightId,
        row: usize,
    },
    /// The same for each of `heads` pieces from column `start`, other columns unchanged.
    HeadNorm {
        weight: WeightId,
        eps: f32,
        start: usize,
        heads: usize,
    },
    /// Int8 form of the input for products with quantised matrices, rotated as they are. With `own` it is for that
    /// matrix alone, whose rotation no other has.
    Rotate {
        own: Option<WeightId>,
    },
    /// `x W^T (+ bias)`.
    MatMul {
        weight: WeightId,
        bias: Option<WeightId>,
    },
    /// `x W^T` for a matrix in parts, one below the other.
    MatMulParts {
        parts: Vec<WeightId>,
    },
    /// Cosines and sines of the positions of the tokens, for rotary table `rope`.
    RopeAngles {
        rope: usize,
    },
    /// Rotary embedding of `heads` heads from column `start`; the second input is [`Op::RopeAngles`].
    Rope {
        start: usize,
        heads: usize,
        head_dim: usize,
    },
    /// Stores keys and values of the input in cache `cache`, then attends. Columns of the input: queries,
    /// keys, values.
    Attention {
        cache: usize,
        shape: AttentionShape,
    },
    /// Every token attends to all tokens of its text; nothing is kept. Columns of the input as for [`Op::Attention`].
    AttentionToAll {
        shape: AttentionShape,
    },
    /// `act(x)`
    Activate {
        act: Act,
    },
    /// `act(first half of the columns) * second half`.
    Gate {
        act: Act,
    },
    Add,
    Scale {
        factor: f32,
    },
    SoftCap {
        cap: f32,
    },
    /// Only the row of the last token.
    LastRow,
}

impl Op {
    /// Short name for listings.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::Rows => "rows",
            Op::RmsNorm { .. } => "rms_norm",
            Op::LayerNorm { .. } => "layer_norm",
            Op::Positions { .. } => "positions",
            Op::ConstantRow { .. } => "constant",
            Op::HeadNorm { .. } => "head_norm",
            Op::Rotate { .. } => "rotate",
            Op::MatMul { .. } | Op::MatMulParts { .. } => "matmul",
            Op::RopeAngles { .. } => "rope_angles",
            Op::Rope { .. } => "rope",
            Op::Attention { .. } | Op::AttentionToAll { .. } => "attention",
            Op::Activate { .. } => "activate",
            Op::Gate { .. } => "gate",
            Op::Add => "add",
            Op::Scale { .. } => "scale",
            Op::SoftCap { .. } => "soft_cap",
            Op::LastRow => "last_row",
        }
    }

    /// Whether the result may overwrite the first input.
    pub(super) fn in_place(&self) -> bool {
        matches!(
            self,
            Op::HeadNorm { .. } | Op::Rope { .. } | Op::Activate { .. } | Op::Add | Op::Scale { .. } | Op::SoftCap { .. }
        )
    }
}
