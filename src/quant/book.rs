//! Matrices that a checkpoint has as indices into a codebook already, rotated in groups of 128 columns and with an f16
//! scale a row and group, as official CQ files do. Codes and scales are stored as they are; rounding them again would
//! add an error. What such a tensor does not share with others stands in its header:
//!
//! ```text
//! 0    16 int8 levels; those past `2^bits` repeat the book
//! 16   f32 unit, little endian, then zeros
//! 64   f32 factors, one a column as stored
//! ```
//!
//! With `c` the codes of a row and group, `s` its scale and `f` the factors of the group's columns,
//!
//! ```text
//! w[i] = f[i] (H levels[c])[i] unit s / sqrt(128)
//! ```
//!
//! so an input is multiplied with the factors where other matrices have the signs of [`super::rotate`]. Levels are
//! integers because kernels multiply integers; the codebook itself is met to within [`MAX_ERROR`].

use super::format::{CqLayout, FACTORS, TILE_ROWS};
use super::pack::pack_groups;
use half::f16;

/// Largest error of integer levels, relative to the codebook: root of the sums of squares. The Lloyd-Max books of 1 to
/// 4 bits have 0, 0.0003, 0.001 and 0.0024; as inner levels are more frequent, weights have 0, 0.0003, 0.0012, 0.0036.
pub const MAX_ERROR: f64 = 0.005;
/// Where the unit stands in the header.
const UNIT: usize = 16;
/// Largest magnitude of a level, and the smallest that the outermost one is given.
const LARGEST: i32 = 127;
const SMALLEST: i32 = 40;

/// The header of a book tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Book {
    /// The level of every code, `levels[n - 1 - c] == -levels[c]`.
    pub levels: [i8; 16],
    /// What a level of 1 means, before the scale.
    pub unit: f32,
    /// One a column as stored.
    pub factors: Vec<f32>,
}

impl Book {
    /// Integer levels and a unit for a codebook of 2 to 16 values, ascending and even but for rounding; `None` if there
    /// are none within [`MAX_ERROR`].
    pub fn fit(codebook: &[f32]) -> Option<([i8; 16], f32)> {
        let count = codebook.len();
        if !matches!(count, 2 | 4 | 8 | 16) {
            return None;
        }
        let value = |i: usize| f64::from(codebook[i]);
        let even: Vec<f64> = (count / 2..count).map(|i| (value(i) - value(count - 1 - i)) / 2.0).collect();
        let largest = even.iter().copied().fold(0.0, f64::max);
        if !largest.is_finite() || largest <= 0.0 {
            return None;
        }
        let signal: f64 = codebook.iter().map(|v| f64::from(*v).powi(2)).sum();
        let candidate = |top: i32| {
            let upper: Vec<f64> = even.iter().map(|v| (v / largest * f64::from(top)).round()).collect();
            let unit = even.iter().zip(&upper).map(|(v, l)| v * l).sum::<f64>() / upper.iter().map(|l| l * l).sum::<f64>();
            let level = |i: usize| if i < count / 2 { -upper[count / 2 - 1 - i] } else { upper[i - count / 2] };
            let noise: f64 = (0..count).map(|i| (value(i) - unit * level(i)).powi(2)).sum();
            (noise, std::array::from_fn(|i| level(i % count) as i8), unit as f32)
        };
        let best = (SMALLEST..=LARGEST).map(candidate).min_by(|a, b| a.0.total_cmp(&b.0));
        best.filter(|(noise, ..)| *noise <= signal * MAX_ERROR * MAX_ERROR).map(|(_, levels, unit)| (levels, unit))
    }

    /// The bytes before the first tile.
    pub fn header(&self, layout: &CqLayout) -> Vec<u8> {
        assert_eq!(self.factors.len(), layout.padded_cols());
        let mut bytes: Vec<u8> = self.levels.iter().map(|level| *level as u8).collect();
        bytes.extend(self.unit.to_le_bytes());
        bytes.resize(FACTORS, 0);
        self.factors.iter().for_each(|factor| bytes.extend(factor.to_le_bytes()));
        bytes
    }

    /// The levels in the header of a tensor.
    pub fn levels(data: &[u8]) -> [i8; 16] {
        std::array::from_fn(|i| data[i] as i8)
    }

    /// The unit in the header of a tensor.
    pub fn unit(data: &[u8]) -> f32 {
        float(&data[UNIT..])
    }

    /// The factors in the header of a tensor, one a column as stored.
    pub fn factors<'a>(layout: &CqLayout, data: &'a [u8]) -> impl Iterator<Item = f32> + use<'a> {
        data[FACTORS..layout.header_bytes()].chunks_exact(4).map(float)
    }

    /// Whether the header of a tensor is one that kernels can rely on: no level of -128, numbers that are finite.
    pub fn valid(layout: &CqLayout, data: &[u8]) -> bool {
        Self::levels(data).iter().all(|level| *level != i8::MIN)
            && Self::unit(data).is_finite()
            && Self::factors(layout, data).all(f32::is_finite)
    }
}

fn float(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Writes up to 64 rows as a tile (`layout.tile_bytes()`): `codes [rows, layout.padded_cols()]`, `scales [rows,
/// layout.groups()]`. Rows that are missing get scale zero.
pub fn pack_tile(layout: &CqLayout, codes: &[u8], scales: &[f16], out: &mut [u8]) {
    let (cols, groups) = (layout.padded_cols(), layout.groups());
    let rows = codes.len() / cols;
    assert!(rows <= TILE_ROWS && codes.len() == rows * cols && scales.len() == rows * groups);
    let code = |row: usize, group: usize, k: usize| codes[row * cols + group * layout.group() + k];
    pack_groups(layout, rows, code, |row, group| scales[row * groups + group], out);
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::codebook::lloyd_max;
    use super::super::decode::decode_row;
    use super::*;

    /// The books of official files, as they are and stretched to 127, and what is none.
    #[test]
    fn books_become_integers() {
        for (bits, bound) in [(1, 1e-4), (2, 4e-4), (3, 1.1e-3), (4, 2.5e-3)] {
            let book: Vec<f32> = lloyd_max(128, bits).into_iter().map(|v| v as f32).collect();
            for stretch in [1.0, 127.0 / book[book.len() - 1]] {
                let book: Vec<f32> = book.iter().map(|v| f16::from_f32(v * stretch).to_f32()).collect();
                let (levels, unit) = Book::fit(&book).expect("a book");
                let noise: f32 = book.iter().zip(levels).map(|(v, level)| (v - unit * f32::from(level)).powi(2)).sum();
                let error = (noise / book.iter().map(|v| v * v).sum::<f32>()).sqrt();
                assert!(error <= bound, "{bits} bits: {error:e}");
                assert!((0..16).all(|i| levels[i] == levels[i % book.len()] && levels[i] == -levels[15 - i]));
            }
        }
        for bad in [&[-1.0, 2.0][..], &[0.0, 0.0], &[f32::NAN, 1.0], &[-1.0, 0.0, 1.0], &[-1.0, -0.03, 0.03, 1.0, 2.0]] {
            assert_eq!(Book::fit(bad), None, "{bad:?}");
        }
    }

    /// Every code, scale and factor has its place: rows decode to what the definition says, in double precision.
    #[test]
    fn rows_decode_to_the_definition() {
        for (format, count) in [(Format::Bcq1, 2usize), (Format::Bcq2, 4), (Format::Bcq3, 8), (Format::Bcq4, 16)] {
            for (rows, cols) in [(1, 128), (70, 576)] {
                let layout = CqLayout::new(format, rows, cols).unwrap();
                let (padded, groups) = (layout.padded_cols(), layout.groups());
                assert_eq!(padded, cols.next_multiple_of(128));
                let (levels, unit) =
                    Book::fit(&lloyd_max(128, count.ilog2()).into_iter().map(|v| v as f32).collect::<Vec<_>>()).unwrap();
                let factors = (0..padded).map(|k| (k % 5) as f32 * 0.5 - 0.9).collect();
                let book = Book { levels, unit, factors };
                let codes: Vec<u8> = (0..rows * padded).map(|i| ((i * 31 + i / 7) % count) as u8).collect();
                let scales: Vec<f16> = (0..rows * groups).map(|i| f16::from_f32(0.01 * i as f32)).collect();
                let mut data = book.header(&layout);
                for (codes, scales) in codes.chunks(64 * padded).zip(scales.chunks(64 * groups)) {
                    let mut tile = vec![0xaa; layout.tile_bytes()];
                    pack_tile(&layout, codes, scales, &mut tile);
                    data.extend(tile);
                }
                assert_eq!(Some(data.len()), layout.bytes());
                assert!(Book::valid(&layout, &data));
                let mut out = vec![0.0; cols];
                for row in 0..rows {
                    decode_row(&layout, &data, row, &mut out);
                    for (k, value) in out.iter().enumerate() {
                        let group = k / 128;
                        let sum: f64 = (0..128)
                            .map(|j| {
                                let sign = if ((k % 128) & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
                                sign * f64::from(levels[usize::from(codes[row * padded + group * 128 + j])])
                            })
                            .sum();
                        let scale = scales[row * groups + group].to_f64() * f64::from(unit) / 128f64.sqrt();
                        let truth = f64::from(book.factors[k]) * sum * scale;
                        assert!((f64::from(*value) - truth).abs() < 1e-5 * (1.0 + truth.abs()), "{format} {row} {k}");
                    }
                }
            }
        }
    }
}
