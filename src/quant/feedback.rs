//! Error feedback between columns (LDLQ): what rounding a column got wrong is made up for by the columns
//! that are still to be rounded, in proportion to how inputs move together.
//!
//! With `H` the second moment of the rotated inputs and `H = U D U^T`, `U` unit upper triangular, columns are
//! rounded left to right, each after adding `sum_j E_j U[j][b]` over the errors `E` of those before it. This
//! minimises `tr(E H E^T)` greedily (Chee et al., QuIP, <https://arxiv.org/abs/2307.13304>; the same as GPTQ,
//! <https://arxiv.org/abs/2210.17323>). Trellis codes round the eight columns of a block at once; `U` then has
//! identities for diagonal blocks and `D` is block diagonal.

use super::format::{BLOCK_COLS, Code, CqLayout, GROUP};
use std::ops::Range;

/// Groups of columns that exchange feedback at most; wider matrices are cut into spans, which bounds the
/// memory for second moments to 25 MiB a span.
const SPAN_GROUPS: usize = 20;

/// The groups of each span of a matrix, as even as possible.
pub fn spans(layout: &CqLayout) -> Vec<Range<usize>> {
    let groups = layout.groups();
    let count = groups.div_ceil(SPAN_GROUPS);
    (0..count).map(|i| groups * i / count..groups * (i + 1) / count).collect()
}

/// First column of a group and of the padded columns after it.
pub fn columns(layout: &CqLayout, groups: &Range<usize>) -> Range<usize> {
    let last = groups.end - 1;
    groups.start * GROUP..last * GROUP + layout.group_width(last)
}

/// Columns that are rounded at once.
pub fn block_width(code: Code) -> usize {
    if code == Code::Trellis { BLOCK_COLS } else { 1 }
}

/// Feedback coefficients of one matrix, group by group.
#[derive(Debug, Default)]
pub struct Feedback {
    pub groups: Vec<GroupFeedback>,
}

/// Coefficients from the columns of one group.
#[derive(Debug)]
pub struct GroupFeedback {
    /// `[width, width]`: element `[b][c]` takes the error of column `b` to column `c` of a later block of the group.
    pub inner: Vec<f32>,
    /// `[later columns of the span, width]`: element `[c][b]` takes the error of column `b` to later column `c`.
    pub outer: Vec<f32>,
}

impl Feedback {
    /// Adds the groups of a span from `U`; `u(j, b)` is element `U[j][b]`, columns counted from the start of
    /// the span. Spans come in order.
    pub fn push_span(&mut self, layout: &CqLayout, groups: Range<usize>, u: &dyn Fn(usize, usize) -> f32) {
        let block = block_width(layout.code);
        let span = columns(layout, &groups);
        for group in groups {
            let (first, width) = (group * GROUP - span.start, layout.group_width(group));
            let mut inner = vec![0.0; width * width];
            for b in 0..width {
                for c in (b / block + 1) * block..width {
                    inner[b * width + c] = u(first + b, first + c);
                }
            }
            let later = first + width..span.len();
            let outer = later.flat_map(|c| (0..width).map(move |b| (b, c))).map(|(b, c)| u(first + b, c)).collect();
            self.groups.push(GroupFeedback { inner, outer });
        }
    }
}
