//! Weights as the graph sees them: a name, a shape, a format, and a place in one block of bytes.

use crate::error::{Error, Result};
use crate::kernels::matmul_float::FloatMatrix;
use crate::quant::decode::decode_row;
use crate::quant::format::{ALIGN, FACTORS};
use crate::quant::{CqLayout, Format};
use std::ops::Range;

/// A matrix `[rows, cols]` (a vector: one row) inside the weight bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    pub name: String,
    pub rows: usize,
    pub cols: usize,
    pub format: Format,
    /// Where it lies in the weight bytes; the start is 64-byte aligned.
    pub range: Range<usize>,
}

impl Weight {
    /// Checks that the range has the size of the shape, is aligned, and lies within `total` bytes.
    pub fn check(&self, total: usize) -> Result<()> {
        let wrong = |what: &str| Err(Error::unsupported(format!("tensor {}: {what}", self.name)));
        match self.format.bytes(self.rows, self.cols) {
            None | Some(0) => wrong("empty or too large"),
            Some(n) if self.range.len() != n => wrong(&format!("has {} bytes where its shape needs {n}", self.range.len())),
            _ if self.range.end > total => wrong("reaches past the end of the weights"),
            _ if !self.range.start.is_multiple_of(ALIGN) => wrong("is not aligned"),
            _ => Ok(()),
        }
    }

    pub fn layout(&self) -> Option<CqLayout> {
        CqLayout::new(self.format, self.rows, self.cols)
    }

    pub(super) fn bytes<'a>(&self, data: &'a [u8]) -> &'a [u8] {
        &data[self.range.clone()]
    }

    /// The values of an f32 tensor.
    pub(super) fn f32<'a>(&self, data: &'a [u8]) -> &'a [f32] {
        bytemuck::cast_slice(self.bytes(data))
    }

    /// The factors of the inputs of a matrix with a rotation of its own, one a column as stored.
    pub(super) fn factors<'a>(&self, data: &'a [u8]) -> &'a [f32] {
        let end = self.layout().map_or(FACTORS, |layout| layout.header_bytes());
        bytemuck::cast_slice(&self.bytes(data)[FACTORS..end])
    }

    /// An unquantised matrix.
    pub(super) fn float<'a>(&self, data: &'a [u8]) -> FloatMatrix<'a> {
        match self.format {
            Format::F32 => FloatMatrix::F32(self.f32(data)),
            Format::F16 => FloatMatrix::F16(bytemuck::cast_slice(self.bytes(data))),
            _ => FloatMatrix::BF16(bytemuck::cast_slice(self.bytes(data))),
        }
    }

    /// Decodes one row to f32; `out` has `cols` elements.
    pub fn row(&self, data: &[u8], row: usize, out: &mut [f32]) {
        match self.layout() {
            Some(layout) => decode_row(&layout, self.bytes(data), row, out),
            None => {
                let matrix = self.float(data);
                for (i, o) in out.iter_mut().enumerate() {
                    *o = matrix.get(row * self.cols + i);
                }
            }
        }
    }
}

/// Weights built in memory, for small graphs that come from no bundle.
#[derive(Default)]
pub struct Memory {
    bytes: Vec<Chunk>,
}

/// Keeps the block 64-byte aligned.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Chunk([u8; ALIGN]);

impl Memory {
    /// Adds an f32 matrix with `cols` columns.
    pub fn push_f32(&mut self, name: &str, values: &[f32], cols: usize) -> Weight {
        self.push(name, bytemuck::cast_slice(values), values.len() / cols, cols, Format::F32)
    }

    /// Adds a matrix that is already in `format`.
    pub fn push(&mut self, name: &str, bytes: &[u8], rows: usize, cols: usize, format: Format) -> Weight {
        let start = self.bytes.len() * ALIGN;
        // Exactly what is needed: doubling would cost as much again as a layer's weights.
        self.bytes.reserve_exact(bytes.len().div_ceil(ALIGN));
        for chunk in bytes.chunks(ALIGN) {
            let mut padded = [0; ALIGN];
            padded[..chunk.len()].copy_from_slice(chunk);
            self.bytes.push(Chunk(padded));
        }
        Weight { name: name.to_owned(), rows, cols, format, range: start..start + bytes.len() }
    }

    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.bytes)
    }
}
