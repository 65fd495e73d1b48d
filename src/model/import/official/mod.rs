//! Folders of `.weights` files, the format in which official CQ bundles are published: one tensor a file,
//! beside `config.txt` and a tokenizer.
//!
//! [`WeightsFile`] reads a file of any precision as f32. Of a CQ matrix, [`CqMatrix`] also gives what is stored:
//! codes, norms, codebook, input scale and rotation. [`open`] shows a folder as a [`Checkpoint`](super::Checkpoint).
//! What a bundle can hold as it is stored, [`Tensor::kept`] tells.

mod container;
mod cq;
mod folder;
mod kept;
mod names;
#[cfg(test)]
mod tests;
mod values;

pub use container::{Header, Precision};
pub use cq::{CqMatrix, Rotation};
pub use kept::Kept;
pub use values::{Plain, WeightsFile};

pub(super) use folder::{holds, open};

use crate::error::Result;
use std::ops::Range;

/// A file as the tensor of the checkpoint that it was made from.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub file: WeightsFile,
    pub undo: Undo,
    /// Elements of a row without padding.
    width: usize,
    /// Elements of a stored row.
    stored_width: usize,
}

/// How stored values become the checkpoint's: `(value + offset) * factor - offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Undo {
    pub offset: f32,
    pub factor: f32,
}

impl Undo {
    pub const NOTHING: Undo = Undo { offset: 0.0, factor: 1.0 };

    fn apply(self, value: f32) -> f32 {
        (value + self.offset) * self.factor - self.offset
    }
}

impl Tensor {
    /// Values of `rows`; a row is everything inside the first dimension, a vector is one row.
    pub fn read_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let mut stored = vec![0.0; rows.len() * self.stored_width];
        self.file.read_rows(rows, &mut stored)?;
        for (stored, out) in stored.chunks_exact(self.stored_width).zip(out.chunks_exact_mut(self.width)) {
            out.iter_mut().zip(stored).for_each(|(out, value)| *out = self.undo.apply(*value));
        }
        Ok(())
    }
}
