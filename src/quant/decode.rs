//! Slow, plain decoding of CQ matrices: the truth that kernels are judged by, and the row look-up of
//! embedding tables.

use super::blocks::OFFSET;
use super::book::Book;
use super::codebook::{Codebook, LEVEL_MAX};
use super::format::{Code, CqLayout, GROUP, Rotation, SCALE_BASE, TILE_ROWS};
use super::pack::row_indices;
use super::rotate::{unrotate, unrotate_by};
use super::trellis::{ScaleCode, TABLE};

/// Decodes one row of a CQ matrix into `out` (`layout.cols` values), undoing the rotation.
pub fn decode_row(layout: &CqLayout, data: &[u8], row: usize, out: &mut [f32]) {
    assert!(row < layout.rows && out.len() == layout.cols);
    let mut x = [0.0f32; GROUP];
    for group in 0..layout.groups() {
        let x = &mut x[..layout.group_width(group)];
        rotated_group(layout, data, row, group, x);
        match layout.rotation() {
            Rotation::None => {}
            Rotation::Common => unrotate(x),
            Rotation::Own => unrotate_by(x, Book::factors(layout, data).skip(group * GROUP)),
        }
        let out = &mut out[group * layout.group()..];
        let n = out.len().min(x.len());
        out[..n].copy_from_slice(&x[..n]);
    }
}

/// The stored values of one row of one group, still rotated if the layout is: level times scale.
pub fn rotated_group(layout: &CqLayout, data: &[u8], row: usize, group: usize, out: &mut [f32]) {
    let levels = Levels::of(layout, data);
    let tile = &data[layout.tile(row / TILE_ROWS)];
    let row = row % TILE_ROWS;
    let scale = levels.scale(&tile[layout.scale_offset(group)..], row);
    let blocks = tile[layout.group_offset(group)..].chunks_exact(layout.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(8)) {
        for (o, index) in out.iter_mut().zip(row_indices(layout, block, row)) {
            *o = levels.level(index) * scale;
        }
    }
}

/// What indices and stored scales of a tensor mean.
enum Levels<'a> {
    Linear,
    Book(&'static Codebook),
    Trellis { table: &'a [u8], scales: ScaleCode },
    Block4,
    Block8,
    Own { levels: [i8; 16], unit: f32 },
}

impl<'a> Levels<'a> {
    fn of(layout: &CqLayout, data: &'a [u8]) -> Self {
        match (layout.code, layout.bits) {
            (Code::Scalar, 8) => Levels::Linear,
            (Code::Scalar, bits) => Levels::Book(Codebook::get(bits)),
            (Code::Trellis, _) => Levels::Trellis { table: &data[..TABLE], scales: scale_code(data) },
            (Code::Block, 8) => Levels::Block8,
            (Code::Block, _) => Levels::Block4,
            (Code::Book, _) => Levels::Own { levels: Book::levels(data), unit: Book::unit(data) },
        }
    }

    fn level(&self, index: u8) -> f32 {
        f32::from(match self {
            Levels::Linear | Levels::Block8 => index as i8,
            Levels::Book(book) => book.levels[index as usize],
            Levels::Trellis { table, .. } => table[index as usize] as i8,
            Levels::Block4 => index as i8 - OFFSET,
            Levels::Own { levels, .. } => levels[index as usize],
        })
    }

    /// Scale of row `row` of a tile.
    fn scale(&self, scales: &[u8], row: usize) -> f32 {
        let word = || u16::from_le_bytes([scales[2 * row], scales[2 * row + 1]]);
        match self {
            Levels::Trellis { scales: code, .. } => code.value(scales[row]),
            Levels::Block4 | Levels::Block8 => half::f16::from_bits(word()).to_f32(),
            Levels::Own { unit, .. } => half::f16::from_bits(word()).to_f32() * unit,
            _ => half::bf16::from_bits(word()).to_f32(),
        }
    }
}

/// The scale code in the header of a trellis tensor.
pub fn scale_code(data: &[u8]) -> ScaleCode {
    let base = data[SCALE_BASE..].first_chunk().copied().unwrap_or_default();
    ScaleCode { base: u32::from_le_bytes(base) }
}

/// Whether the header of a trellis tensor is one that kernels can rely on: small levels, finite scales.
pub fn valid_header(data: &[u8]) -> bool {
    let code = scale_code(data);
    let scales = [code.value(1), code.value(255)];
    let levels = data[..TABLE].iter().all(|level| (*level as i8).unsigned_abs() <= LEVEL_MAX.unsigned_abs());
    levels && scales.iter().all(|s| s.is_normal() && *s > 0.0) && scales[0] < scales[1]
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::encode::encode_tile;
    use super::*;

    /// Every width and row count comes back within the error that encoding reported.
    #[test]
    fn decodes_to_the_reported_error_at_any_shape() {
        for format in [Format::Cq1, Format::Cq2, Format::Cq3, Format::Cq4, Format::Cq8] {
            for (rows, cols) in [(1, 1), (1, 640), (65, 104), (130, 576), (7, 200)] {
                let layout = CqLayout::new(format, rows, cols).unwrap();
                let weights: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919 % 1009) as f32 / 504.5 - 1.0) * 0.1).collect();
                let mut data = vec![0; layout.bytes().unwrap()];
                let (mut signal, mut noise, mut reported) = (0.0f64, 0.0f64, 0.0f64);
                for (tile, out) in data.chunks_exact_mut(layout.tile_bytes()).enumerate() {
                    let end = ((tile + 1) * TILE_ROWS).min(rows);
                    reported += encode_tile(&layout, &weights[tile * TILE_ROWS * cols..end * cols], None, out).noise;
                }
                let mut out = vec![0.0; cols];
                for row in 0..rows {
                    decode_row(&layout, &data, row, &mut out);
                    for (a, b) in out.iter().zip(&weights[row * cols..]) {
                        noise += f64::from(a - b).powi(2);
                        signal += f64::from(*b).powi(2);
                    }
                }
                assert!((noise - reported).abs() <= reported * 0.001 + 1e-9, "{format} {rows}x{cols}: {noise} {reported}");
                let bound = [0.65, 0.4, 0.25, 0.14, 0.0, 0.0, 0.0, 0.012][layout.bits - 1];
                assert!(
                    (noise / signal).sqrt() < bound || rows * cols == 1,
                    "{format} {rows}x{cols}: {}",
                    (noise / signal).sqrt()
                );
            }
        }
    }
}
