//! Rounding one tile of rows to a CQ format.

use super::codebook::Codebook;
use super::feedback::Feedback;
use super::format::{BLOCK_COLS, CqLayout, GROUP, TILE_ROWS};
use super::pack::{Codes, pack};
use super::rotate::{rotate, unrotate};

/// Sums of squares over encoded weights; their ratio is the relative error.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SquareError {
    /// Sum of squares of the weights.
    pub signal: f64,
    /// Sum of squares of the differences to what decodes.
    pub noise: f64,
}

impl SquareError {
    /// Of a rotated group `x` and its `difference` to what decodes; only the first `filled` columns in the
    /// unrotated order count, the rest is padding.
    pub(super) fn of_group(x: &[f32], difference: &mut [f32], filled: usize) -> Self {
        if filled < x.len() {
            unrotate(difference);
        }
        let squares = |x: &[f32]| x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        // Padding is zero, so the rotation keeps all of the signal.
        SquareError { signal: squares(x), noise: squares(&difference[..filled]) }
    }

    /// Relative Frobenius error; 0 for an all-zero tensor.
    pub fn relative(&self) -> f64 {
        if self.signal > 0.0 { (self.noise / self.signal).sqrt() } else { 0.0 }
    }
}

impl std::ops::AddAssign for SquareError {
    fn add_assign(&mut self, other: Self) {
        self.signal += other.signal;
        self.noise += other.noise;
    }
}

/// Rows rotated group by group, `[rows, padded_cols]`.
pub fn rotated_rows(layout: &CqLayout, rows: &[f32]) -> Vec<f32> {
    let padded = layout.padded_cols();
    let mut out = vec![0.0f32; rows.len() / layout.cols * padded];
    for (row, out) in rows.chunks_exact(layout.cols).zip(out.chunks_exact_mut(padded)) {
        out[..layout.cols].copy_from_slice(row);
        out.chunks_mut(GROUP).for_each(rotate);
    }
    out
}

/// `out [rows, later] = errors [rows, width] * outer^T` for `outer [later, width]`; handed in because the fast
/// products live elsewhere.
pub type Product<'a> = &'a (dyn Fn(&[f32], &[f32], usize, &mut [f32]) + Sync);

/// Encodes rows of a tile. `rows` holds up to 64 rows of `layout.cols` values; rows that are missing get
/// scale zero. `out` is the tile (`layout.tile_bytes()`). With feedback, columns make up for the errors of
/// those before them; the reported error is still that of the weights themselves.
pub fn encode_tile(layout: &CqLayout, rows: &[f32], feedback: Option<(&Feedback, Product)>, out: &mut [u8]) -> SquareError {
    assert_eq!(out.len(), layout.tile_bytes());
    assert_eq!(rows.len() % layout.cols, 0);
    let (count, padded) = (rows.len() / layout.cols, layout.padded_cols());
    assert!(count <= TILE_ROWS);
    let weights = rotated_rows(layout, rows);
    // What is rounded: the weights, and with feedback what earlier columns left over.
    let mut targets = weights.clone();
    let mut error = SquareError::default();
    let mut codes: Vec<Codes> = vec![[[0; BLOCK_COLS]; TILE_ROWS]; GROUP / BLOCK_COLS];
    for group in 0..layout.groups() {
        let width = layout.group_width(group);
        let start = group * GROUP;
        let filled = width.min(layout.cols - start);
        let mut scales = [0u8; 2 * TILE_ROWS];
        let mut errors = vec![0.0f32; count * width];
        for r in 0..count {
            let at = r * padded + start..r * padded + start + width;
            let (w, t) = (&weights[at.clone()], &mut targets[at]);
            let mut q = [0u8; GROUP];
            let q = &mut q[..width];
            let scale = quantise_group(layout.bits, t, q);
            if let Some((feedback, _)) = feedback {
                let inner = &feedback.groups[group].inner;
                round_in_turn(layout.bits, w, t, scale.to_f32(), inner, q, &mut errors[r * width..(r + 1) * width]);
            }
            error += stored_error(layout.bits, w, q, scale, filled);
            scales[2 * r..2 * r + 2].copy_from_slice(&scale.to_bits().to_le_bytes());
            for (k, q) in q.iter().enumerate() {
                codes[k / BLOCK_COLS][r][k % BLOCK_COLS] = *q;
            }
        }
        if let Some((feedback, product)) = feedback {
            let outer = &feedback.groups[group].outer;
            let later = outer.len() / width;
            let mut sums = vec![0.0f32; count * later];
            if later > 0 {
                product(outer, &errors, later, &mut sums);
            }
            for (t, sums) in targets.chunks_exact_mut(padded).zip(sums.chunks_exact(later.max(1))) {
                for (t, s) in t[start + width..].iter_mut().zip(sums) {
                    *t += s;
                }
            }
        }
        let block = layout.block_bytes();
        let at = layout.group_offset(group);
        for (codes, out) in codes.iter().zip(out[at..at + width / BLOCK_COLS * block].chunks_exact_mut(block)) {
            pack(codes, layout.bits, out);
        }
        let at = layout.scale_offset(group);
        out[at..at + scales.len()].copy_from_slice(&scales);
    }
    error
}

/// Rounds the columns of a group one after the other, each error taken on to the next ones.
fn round_in_turn(
    bits: usize,
    weights: &[f32],
    targets: &mut [f32],
    scale: f32,
    inner: &[f32],
    codes: &mut [u8],
    errors: &mut [f32],
) {
    let width = weights.len();
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    for b in 0..width {
        codes[b] = nearest(bits, targets[b] * inverse);
        errors[b] = weights[b] - level(bits, codes[b]) * scale;
        let e = errors[b];
        for (t, u) in targets[b + 1..].iter_mut().zip(&inner[b * width + b + 1..(b + 1) * width]) {
            *t += e * u;
        }
    }
}

/// Codes and scale of one rotated group; the scale is the least-squares one for the codes that were chosen.
fn quantise_group(bits: usize, x: &[f32], codes: &mut [u8]) -> half::bf16 {
    if bits == 8 {
        let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        // bf16 may round the scale down; the clamp then costs less than half a step.
        let scale = half::bf16::from_f32(largest / 127.0);
        let step = scale.to_f32();
        let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
        for (x, c) in x.iter().zip(codes.iter_mut()) {
            *c = nearest(bits, x * inverse);
        }
        return scale;
    }
    let book = Codebook::get(bits);
    let rms = (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
    let mut scale = rms / book.unit;
    let round = |scale: f32, codes: &mut [u8]| -> f32 {
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let (mut product, mut square) = (0.0f32, 0.0f32);
        for (x, c) in x.iter().zip(codes.iter_mut()) {
            *c = book.code(x * inverse);
            let level = f32::from(book.levels[*c as usize]);
            product += x * level;
            square += level * level;
        }
        (product / square).max(0.0)
    };
    // Alternate rounding and least squares; more rounds change the third digit of the error only.
    for _ in 0..3 {
        scale = round(scale, codes);
    }
    half::bf16::from_f32(scale)
}

/// The code whose level is nearest to `x`, which is in units of levels.
fn nearest(bits: usize, x: f32) -> u8 {
    if bits == 8 { x.round().clamp(-127.0, 127.0) as i8 as u8 } else { Codebook::get(bits).code(x) }
}

/// The integer level of a code.
pub fn level(bits: usize, code: u8) -> f32 {
    f32::from(if bits == 8 { code as i8 } else { Codebook::get(bits).levels[code as usize] })
}

/// Error of a rotated group over its first `filled` columns in the unrotated order; the rest is padding.
fn stored_error(bits: usize, x: &[f32], codes: &[u8], scale: half::bf16, filled: usize) -> SquareError {
    let mut difference = [0.0f32; GROUP];
    let difference = &mut difference[..x.len()];
    for ((d, x), c) in difference.iter_mut().zip(x).zip(codes) {
        *d = x - level(bits, *c) * scale.to_f32();
    }
    SquareError::of_group(x, difference, filled)
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;

    /// Relative error on Gaussian weights: the square roots of the Lloyd-Max distortions of a normal
    /// variable (0.3634, 0.1175, 0.03454, 0.009497: J. Max, "Quantizing for minimum distortion", 1960).
    #[test]
    fn error_on_gaussian_weights_is_the_known_distortion() {
        let mut state = 7u64;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) as f32 + 0.5) / (1u64 << 24) as f32
        };
        let cols = 512;
        let rows: Vec<f32> =
            (0..64 * cols).map(|_| 0.02 * (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos()).collect();
        for (format, expected) in [(Format::Cq1, 0.603), (Format::Cq2, 0.343), (Format::Cq3, 0.186), (Format::Cq4, 0.0975)] {
            let layout = CqLayout::new(format, 64, cols).unwrap();
            let error = encode_tile(&layout, &rows, None, &mut vec![0; layout.tile_bytes()]).relative();
            // A fitted scale per group gains a few percent over one scale for the whole source.
            assert!((0.95..1.005).contains(&(error / expected)), "{format}: {error} against {expected}");
        }
        let layout = CqLayout::new(Format::Cq8, 64, cols).unwrap();
        assert!(encode_tile(&layout, &rows, None, &mut vec![0; layout.tile_bytes()]).relative() < 0.008);
    }
}
