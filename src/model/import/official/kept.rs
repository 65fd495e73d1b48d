//! Official matrices as bundles can hold them without rounding them again.
//!
//! The rotation of a CQ matrix with the Hadamard transform is `diag(left) H P`, where `P` puts codebook values to their
//! places and gives them signs. Codes take `P` on themselves, as the codebook is even. What is left is a transform of
//! the inputs that begins with a factor each, `left / input_scale`: see [`Book`].

use super::container::Precision;
use super::{CqMatrix, Rotation, Tensor, Undo, WeightsFile};
use crate::error::Result;
use crate::quant::blocks::Block;
use crate::quant::book::Book;
use crate::quant::format::{BLOCK_GROUP, GROUP};
use crate::quant::{Code, Format};
use half::f16;
use std::ops::Range;

/// How a bundle can hold a matrix as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub enum Kept {
    /// As 16-bit floats.
    Floats,
    /// In a block format; [`Tensor::read_blocks`] gives the rows.
    Blocks(Format),
    /// In a book format with this header; [`Tensor::read_codes`] gives the rows.
    Codes(Format, Book),
}

impl Tensor {
    /// How a bundle can hold the matrix as it is stored, or what stands in the way.
    pub fn kept(&self) -> std::result::Result<Kept, &'static str> {
        let plain = match &self.file {
            WeightsFile::Cq(matrix) => return self.codes(matrix),
            WeightsFile::Plain(plain) => plain,
        };
        let blocks = plain.header.group_size == BLOCK_GROUP && self.undo == Undo::NOTHING;
        match plain.header.precision {
            Precision::F16 => Ok(Kept::Floats),
            Precision::Int4 if blocks => Ok(Kept::Blocks(Format::Q4_0)),
            Precision::Int8 if blocks => Ok(Kept::Blocks(Format::Q8_0)),
            Precision::F32 => Err("32-bit floats"),
            _ => Err("scaled integers, or groups that are not of 32 columns"),
        }
    }

    fn codes(&self, matrix: &CqMatrix) -> std::result::Result<Kept, &'static str> {
        let Rotation::Hadamard { left, .. } = &matrix.rotation else { return Err("an orthogonal rotation") };
        if matrix.group_size != GROUP || self.width.next_multiple_of(GROUP) != self.stored_width {
            return Err("groups that are not of 128 columns");
        }
        let book = Book::fit(&matrix.codebook).filter(|_| self.undo.offset == 0.0);
        let (levels, unit) = book.ok_or("a codebook that integers do not meet")?;
        let format = Format::cq(matrix.bits as u32, Code::Book).ok_or("an unknown number of bits")?;
        let factor = |(k, scale): (usize, &f32)| f32::from(left[k % GROUP]) / scale;
        let factors = matrix.input_scale.iter().enumerate().map(factor).collect();
        Ok(Kept::Codes(format, Book { levels, unit: unit * self.undo.factor, factors }))
    }

    /// The blocks of `rows`, row after row. Only for [`Kept::Blocks`].
    pub fn read_blocks(&self, rows: Range<usize>) -> Result<Vec<Block>> {
        match &self.file {
            WeightsFile::Plain(plain) => plain.read_blocks(rows),
            WeightsFile::Cq(_) => unreachable!("not made of blocks"),
        }
    }

    /// Codes of `rows` in the order of the transform, padding included, and the scale of every group. Only for
    /// [`Kept::Codes`].
    pub fn read_codes(&self, rows: Range<usize>) -> Result<(Vec<u8>, Vec<f16>)> {
        let WeightsFile::Cq(matrix) = &self.file else { unreachable!("not made of codes") };
        let Rotation::Hadamard { right, permutation, .. } = &matrix.rotation else { unreachable!("not transformed") };
        let mut stored = vec![0; rows.len() * matrix.cols];
        let mut norms = vec![0.0; rows.len() * matrix.groups()];
        matrix.read_codes(rows.clone(), &mut stored)?;
        matrix.read_norms(rows, &mut norms)?;
        let last = matrix.codebook.len() as u8 - 1;
        let mut codes = vec![0; stored.len()];
        for (stored, codes) in stored.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)) {
            for (code, p) in stored.iter().zip(permutation) {
                let p = *p as usize;
                codes[p] = if right[p] < 0 { last - code } else { *code };
            }
        }
        Ok((codes, norms.into_iter().map(f16::from_f32).collect()))
    }
}
