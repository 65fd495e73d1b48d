//! A `.weights` file of any precision as rows of f32.

use super::container::{Header, Precision};
use super::cq::CqMatrix;
use crate::error::Result;
use crate::quant::blocks::Block;
use crate::quant::format::BLOCK_GROUP;
use half::f16;
use std::ops::Range;
use std::path::Path;

/// An open file.
#[derive(Clone, Debug)]
pub enum WeightsFile {
    Cq(Box<CqMatrix>),
    Plain(Plain),
}

/// Floats, or integers with a scale for each group of a row.
#[derive(Clone, Debug)]
pub struct Plain {
    pub header: Header,
    /// f16 scales, in the order of the file.
    scales: Vec<f32>,
    /// Elements of a row.
    width: usize,
}

/// Integers of old INT4 files that are packed together.
const RUN: usize = 32;

/// A stored value.
enum Stored {
    Float(f32),
    /// An integer and its scale.
    Integer(i8, f32),
}

impl WeightsFile {
    pub fn open(path: &Path) -> Result<Self> {
        let header = Header::read(super::super::SourceFile::open(path)?)?;
        match header.precision {
            Precision::Cq { .. } => CqMatrix::open(header).map(|matrix| WeightsFile::Cq(Box::new(matrix))),
            _ => Plain::open(header).map(WeightsFile::Plain),
        }
    }

    /// The shape as stored: columns may be padded, rows are not.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            WeightsFile::Cq(matrix) => vec![matrix.rows, matrix.cols],
            WeightsFile::Plain(plain) => {
                let mut shape = plain.header.dims.clone();
                if plain.header.interleaved {
                    shape[0] = plain.header.original_rows;
                }
                shape
            }
        }
    }

    pub fn header(&self) -> &Header {
        match self {
            WeightsFile::Cq(matrix) => matrix.header(),
            WeightsFile::Plain(plain) => &plain.header,
        }
    }

    /// Values of `rows`; a row is everything inside the first dimension, a vector is one row.
    pub fn read_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        match self {
            WeightsFile::Cq(matrix) => matrix.read_rows(rows, out),
            WeightsFile::Plain(plain) => plain.read_rows(rows, out),
        }
    }
}

impl Plain {
    fn open(header: Header) -> Result<Self> {
        let elements: usize = header.dims.iter().product();
        let rows = if header.dims.len() == 1 { 1 } else { header.dims[0] };
        let width = elements / rows;
        let (groups, size) = (header.groups, header.group_size);
        let mut scale_count = rows.checked_mul(groups).and_then(|n| n.checked_mul(2));
        let data = match header.precision {
            Precision::F32 => elements.checked_mul(4),
            Precision::F16 => elements.checked_mul(2),
            Precision::Int4 => Some(elements / 2),
            _ => Some(elements),
        };
        match header.precision {
            Precision::F32 | Precision::F16 => scale_count = Some(0),
            precision => {
                if groups.checked_mul(size) != Some(width) {
                    return Err(header.bad(format!("{groups} groups of {size} are not {width} values")));
                }
                let panels = header.dims.len() == 2 && rows.is_multiple_of(4) && width.is_multiple_of(4);
                if header.interleaved && !panels {
                    return Err(header.bad(format!("a shape of {:?} cannot be interleaved", header.dims)));
                }
                if precision == Precision::Int4 && !(header.interleaved && width.is_multiple_of(RUN)) {
                    return Err(header.bad(format!("INT4 with a shape of {:?}", header.dims)));
                }
            }
        }
        header.expect(scale_count, data)?;
        let mut bytes = vec![0; scale_count.unwrap_or(0)];
        header.file.read_exact_at(header.metadata.start, &mut bytes)?;
        let scales = bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        Ok(Plain { header, scales, width })
    }

    fn read_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        assert!(out.len() == rows.len() * self.width);
        self.visit(rows, |i, stored| {
            out[i] = match stored {
                Stored::Float(value) => value,
                Stored::Integer(integer, scale) => f32::from(integer) * scale,
            }
        })
    }

    /// Integers of `rows` in groups of 32 with their scales; floats are left out.
    pub(super) fn read_blocks(&self, rows: Range<usize>) -> Result<Vec<Block>> {
        let empty = Block { scale: f16::ZERO, levels: [0; BLOCK_GROUP] };
        let mut blocks = vec![empty; rows.len() * self.width / BLOCK_GROUP];
        self.visit(rows, |i, stored| {
            if let Stored::Integer(integer, scale) = stored {
                let block = &mut blocks[i / BLOCK_GROUP];
                block.levels[i % BLOCK_GROUP] = integer;
                block.scale = f16::from_f32(scale);
            }
        })?;
        Ok(blocks)
    }

    /// Calls `each` with every stored value of `rows` and its place among them.
    fn visit(&self, rows: Range<usize>, mut each: impl FnMut(usize, Stored)) -> Result<()> {
        let (width, groups, precision) = (self.width, self.header.groups, self.header.precision);
        let interleaved = self.header.interleaved;
        // Rows that are stored together, and bytes of a row times 2.
        let step = if interleaved { 4 } else { 1 };
        let half_bytes = match precision {
            Precision::F32 => 8,
            Precision::F16 => 4,
            Precision::Int4 => 1,
            _ => 2,
        };
        let first = rows.start / step * step;
        let mut bytes = vec![0; (rows.end.next_multiple_of(step) - first) * width * half_bytes / 2];
        let skip = first as u64 * width as u64 * half_bytes as u64 / 2;
        self.header.file.read_exact_at(self.header.data.start + skip, &mut bytes)?;
        for (i, row) in rows.enumerate() {
            for k in 0..width {
                let r = row - first;
                // Interleaved: four columns of four rows after one another.
                let at = if interleaved { r / 4 * 4 * width + k / 4 * 16 + r % 4 * 4 + k % 4 } else { r * width + k };
                let integer = match precision {
                    Precision::F32 => {
                        let b = &bytes[4 * at..][..4];
                        each(i * width + k, Stored::Float(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
                        continue;
                    }
                    Precision::F16 => {
                        let value = f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32();
                        each(i * width + k, Stored::Float(value));
                        continue;
                    }
                    Precision::Int4 => {
                        // The first half of a run is in the low nibbles.
                        let byte = bytes[at / RUN * (RUN / 2) + at % (RUN / 2)];
                        let nibble = if at % RUN < RUN / 2 { byte << 4 } else { byte & 0xf0 };
                        nibble as i8 >> 4
                    }
                    _ => bytes[at] as i8,
                };
                let group = k / self.header.group_size;
                let scale = if interleaved { (row / 4 * groups + group) * 4 + row % 4 } else { row * groups + group };
                each(i * width + k, Stored::Integer(integer, self.scales[scale]));
            }
        }
        Ok(())
    }
}
