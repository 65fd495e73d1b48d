//! A CQ matrix of a `.weights` file: rotated rows as indices into a codebook.
//!
//! Columns are cut into groups of `group_size`. With `q` the indices of a row in a group, `cb` the codebook, `R`
//! the rotation, `s` the input scale and `norm` the number of that row and group,
//!
//! ```text
//! w[group * group_size + i] = (R cb[q])[i] * norm / s[group * group_size + i]
//! ```
//!
//! Everything that small is read and checked when the file is opened; codes and norms are read row by row.

use super::container::{Header, Precision};
use crate::error::Result;
use crate::kernels::matmul_float::{FloatMatrix, MatMulFloat};
use crate::kernels::{Level, Pool};
use crate::quant::rotate::hadamard;
use half::f16;
use std::ops::Range;

/// The orthogonal matrix that takes codebook values back to weights.
#[derive(Clone, Debug, PartialEq)]
pub enum Rotation {
    /// `R[i][j] = left[i] H[i][p] right[p] / sqrt(n)` with `p = permutation[j]` and `H` in Sylvester's order.
    Hadamard { left: Vec<i8>, right: Vec<i8>, permutation: Vec<u32> },
    /// Bits of an f16 matrix `[group_size, group_size]`, row-major.
    Orthogonal(Vec<u16>),
}

/// An open CQ matrix `[rows, cols]`.
#[derive(Clone, Debug)]
pub struct CqMatrix {
    header: Header,
    /// Bits of an index, 1 to 4.
    pub bits: usize,
    pub rows: usize,
    /// Columns as stored, padding included.
    pub cols: usize,
    pub group_size: usize,
    /// Values by index.
    pub codebook: Vec<f32>,
    /// Factors that were on the columns when they were encoded; positive.
    pub input_scale: Vec<f32>,
    pub rotation: Rotation,
    /// Offset in the file of the norms.
    norms_at: u64,
}

/// Widest group of a Hadamard rotation.
const MAX_HADAMARD: usize = 1024;
/// Widest orthogonal rotation; its matrix is held in memory.
const MAX_ORTHOGONAL: usize = 1 << 14;

impl CqMatrix {
    pub fn open(header: Header) -> Result<Self> {
        let Precision::Cq { bits } = header.precision else { return Err(header.bad("is no CQ matrix")) };
        let bits = usize::from(bits);
        let &[rows, cols] = &header.dims[..] else { return Err(header.bad("a CQ matrix without two dimensions")) };
        let (size, groups) = (header.group_size, header.groups);
        if size.checked_mul(groups) != Some(cols) {
            return Err(header.bad(format!("{groups} groups of {size} are not {cols} columns")));
        }
        if header.original_rows != rows {
            return Err(header.bad(format!("{rows} rows, of which {} are real", header.original_rows)));
        }
        if header.orthogonal && (groups != 1 || size > MAX_ORTHOGONAL) {
            return Err(header.bad(format!("{groups} groups of {size} columns with an orthogonal rotation")));
        }
        let transforms = size.is_power_of_two() && (8..=MAX_HADAMARD).contains(&size);
        if !header.orthogonal && !transforms {
            return Err(header.bad(format!("groups of {size} columns with a Hadamard rotation")));
        }
        let chunk = chunk_cols(bits);
        if header.interleaved && (!rows.is_multiple_of(4) || !size.is_multiple_of(chunk)) {
            return Err(header.bad(format!("{rows} rows with groups of {size} columns cannot be interleaved")));
        }
        if !(cols * bits).is_multiple_of(8) {
            return Err(header.bad(format!("rows of {cols} columns at {bits} bits are no whole bytes")));
        }
        let rotation_bytes =
            if header.orthogonal { size.checked_mul(size).and_then(|n| n.checked_mul(2)) } else { Some(6 * size) };
        let before_norms = 2 * (1 << bits) + 4 * cols;
        let norm_bytes = rows.checked_mul(groups).and_then(|n| n.checked_mul(2));
        let all = norm_bytes.and_then(|n| n.checked_add(before_norms)?.checked_add(rotation_bytes?));
        // In this order nothing overflows: a row has whole bytes.
        header.expect(all, rows.checked_mul(cols * bits / 8))?;

        let halves = |at: u64, count: usize| -> Result<Vec<u16>> {
            let mut bytes = vec![0; 2 * count];
            header.file.read_exact_at(at, &mut bytes)?;
            Ok(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect())
        };
        let floats = |bits: Vec<u16>| -> Vec<f32> { bits.into_iter().map(|b| f16::from_bits(b).to_f32()).collect() };
        let at = header.metadata.start;
        let codebook = floats(halves(at, 1 << bits)?);
        if codebook.iter().any(|v| !v.is_finite()) {
            return Err(header.bad("the codebook holds a value that is no number"));
        }
        let input_scale = floats(halves(at + (2 << bits), cols)?);
        if let Some(bad) = input_scale.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
            return Err(header.bad(format!("the input scale holds {bad}")));
        }
        // Between input scale and norms stand the reciprocals of the scale, which add nothing.
        let norms_at = at + before_norms as u64;
        let rotation_at = header.metadata.end - rotation_bytes.unwrap_or(0) as u64;
        let rotation = if header.orthogonal {
            let matrix = halves(rotation_at, size * size)?;
            if matrix.iter().any(|b| !f16::from_bits(*b).is_finite()) {
                return Err(header.bad("the rotation holds a value that is no number"));
            }
            Rotation::Orthogonal(matrix)
        } else {
            let mut bytes = vec![0; 6 * size];
            header.file.read_exact_at(rotation_at, &mut bytes)?;
            hadamard_rotation(&bytes, size).map_err(|what| header.bad(what))?
        };
        Ok(CqMatrix { bits, rows, cols, group_size: size, codebook, input_scale, rotation, norms_at, header })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.cols / self.group_size
    }

    /// Rows that are stored together.
    fn step(&self) -> usize {
        if self.header.interleaved { 4 } else { 1 }
    }

    /// Reads what is stored of `rows`, `per_row` bytes each, from `start`; gives also the first stored row.
    fn read(&self, start: u64, per_row: usize, rows: &Range<usize>) -> Result<(Vec<u8>, usize)> {
        let first = rows.start / self.step() * self.step();
        let mut bytes = vec![0; (rows.end.next_multiple_of(self.step()) - first) * per_row];
        self.header.file.read_exact_at(start + first as u64 * per_row as u64, &mut bytes)?;
        Ok((bytes, first))
    }

    /// Codebook indices of `rows`, `cols` a row.
    pub fn read_codes(&self, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        assert!(rows.end <= self.rows && out.len() == rows.len() * self.cols);
        let row_bytes = self.cols * self.bits / 8;
        let (bytes, first) = self.read(self.header.data.start, row_bytes, &rows)?;
        for (row, out) in rows.zip(out.chunks_exact_mut(self.cols)) {
            let row = row - first;
            if !self.header.interleaved {
                let stored = &bytes[row * row_bytes..][..row_bytes];
                out.iter_mut().enumerate().for_each(|(k, code)| *code = bits_at(stored, k * self.bits, self.bits));
                continue;
            }
            // A panel holds four rows of one group.
            let panel_bytes = self.group_size * self.bits / 2;
            let panels = bytes[row / 4 * 4 * row_bytes..].chunks_exact(panel_bytes);
            for (panel, out) in panels.zip(out.chunks_exact_mut(self.group_size)) {
                out.iter_mut().enumerate().for_each(|(c, code)| *code = panel_code(panel, self.bits, row % 4, c));
            }
        }
        Ok(())
    }

    /// Norms of `rows`, [`groups`](Self::groups) a row.
    pub fn read_norms(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let groups = self.groups();
        assert!(rows.end <= self.rows && out.len() == rows.len() * groups);
        let (bytes, first) = self.read(self.norms_at, 2 * groups, &rows)?;
        for (row, out) in rows.zip(out.chunks_exact_mut(groups)) {
            let row = row - first;
            for (group, norm) in out.iter_mut().enumerate() {
                let at = if self.header.interleaved { (row / 4 * groups + group) * 4 + row % 4 } else { row * groups + group };
                *norm = f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32();
            }
        }
        Ok(())
    }

    /// Weights of `rows`, `cols` a row.
    pub fn read_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let count = rows.len();
        let mut codes = vec![0; count * self.cols];
        let mut norms = vec![0.0; count * self.groups()];
        self.read_codes(rows.clone(), &mut codes)?;
        self.read_norms(rows, &mut norms)?;
        match &self.rotation {
            Rotation::Hadamard { left, right, permutation } => {
                let shrink = 1.0 / (self.group_size as f32).sqrt();
                for (codes, out) in codes.chunks_exact(self.group_size).zip(out.chunks_exact_mut(self.group_size)) {
                    for (code, p) in codes.iter().zip(permutation) {
                        let p = *p as usize;
                        out[p] = self.codebook[usize::from(*code)] * f32::from(right[p]);
                    }
                    hadamard(out);
                    out.iter_mut().zip(left).for_each(|(u, left)| *u *= f32::from(*left) * shrink);
                }
            }
            Rotation::Orthogonal(matrix) => {
                let values: Vec<f32> = codes.iter().map(|code| self.codebook[usize::from(*code)]).collect();
                let product = MatMulFloat::select(Level::best(None));
                product.run(&Pool::new(1), FloatMatrix::F16(matrix), self.cols, &values, None, out);
            }
        }
        for (row, out) in out.chunks_exact_mut(self.cols).enumerate() {
            for (k, w) in out.iter_mut().enumerate() {
                *w *= norms[row * self.groups() + k / self.group_size] / self.input_scale[k];
            }
        }
        Ok(())
    }
}

/// Reads signs and permutation and checks that they are.
fn hadamard_rotation(bytes: &[u8], size: usize) -> std::result::Result<Rotation, String> {
    let signs = |bytes: &[u8]| -> Vec<i8> { bytes.iter().map(|b| *b as i8).collect() };
    let (left, right) = (signs(&bytes[..size]), signs(&bytes[size..2 * size]));
    if let Some(bad) = left.iter().chain(&right).find(|s| s.abs_diff(0) != 1) {
        return Err(format!("a sign of the rotation is {bad}"));
    }
    let permutation: Vec<u32> = bytes[2 * size..].chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let mut seen = vec![false; size];
    for p in &permutation {
        match seen.get_mut(*p as usize) {
            Some(seen) if !*seen => *seen = true,
            _ => return Err(format!("the permutation of the rotation has {p} twice or out of range")),
        }
    }
    Ok(Rotation::Hadamard { left, right, permutation })
}

/// Columns of a row that an interleaved panel keeps together.
fn chunk_cols(bits: usize) -> usize {
    [32, 16, 4, 8][bits - 1]
}

/// `bits` bits from bit `start` of a stream that begins with the lowest bit of the first byte.
fn bits_at(stream: &[u8], start: usize, bits: usize) -> u8 {
    let low = u16::from(stream[start / 8]);
    let high = stream.get(start / 8 + 1).map_or(0, |b| u16::from(*b));
    ((low | high << 8) >> (start % 8)) as u8 & ((1 << bits) - 1)
}

/// The index of row `r` (0 to 3) and column `c` in a panel.
fn panel_code(panel: &[u8], bits: usize, r: usize, c: usize) -> u8 {
    let (chunk, within) = (c / chunk_cols(bits), c % chunk_cols(bits));
    match bits {
        4 => panel[chunk * 16 + r * 4 + within % 4] >> (within / 4 * 4) & 15,
        // 48-bit words: four columns of row 0, then of rows 1, 2 and 3.
        3 => bits_at(&panel[chunk * 6..][..6], 3 * (4 * r + within), 3),
        2 => panel[chunk * 16 + within / 4 * 4 + r] >> (2 * (within % 4)) & 3,
        _ => panel[chunk * 16 + within / 8 * 4 + r] >> (within % 8) & 1,
    }
}
