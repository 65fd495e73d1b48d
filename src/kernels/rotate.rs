//! Rotating activations like the weights, and rounding them to int8.
//!
//! After the Hadamard rotation the values of a group are close to Gaussian, so one int8 scale per group of
//! 128 loses about 4e-5 of the energy. Where weights are not rotated, there is a
//! scale for every 32 values instead. This is done once per distinct input of matrix products, twice where some
//! are rotated and some are not, and for every matrix that has a rotation of its own.

use super::threads::{Parts, Pool};
use super::variant::{Level, variants};
use super::vector::{LANES, Lanes};
use crate::quant::format::GROUP;
use crate::quant::rotate::SIGNS;
use crate::quant::{CqLayout, Rotation};

/// One group, multiplied with `factors` (as many as `codes`) and transformed if `ROTATED`: codes to `codes` (as many as
/// `x` is wide once padded), the scale and the sum of codes.
///
/// # Safety
/// There are 16, 32, 64 or 128 codes and at least `x.len()`, and as many factors if `ROTATED`.
#[inline(always)]
unsafe fn group_lanes<const ROTATED: bool, L: Lanes>(
    x: &[f32],
    factors: &[f32],
    codes: &mut [i8],
    scale: &mut f32,
    sum: &mut i32,
) {
    unsafe {
        let (width, codes) = (codes.len(), codes.as_mut_ptr());
        let mut padded = [0.0f32; GROUP];
        let source = if x.len() < width {
            padded[..x.len()].copy_from_slice(x);
            padded.as_ptr()
        } else {
            x.as_ptr()
        };
        let n = width / LANES;
        let mut v = [L::splat(0.0); GROUP / LANES];
        for (i, v) in v[..n].iter_mut().enumerate() {
            *v = L::load(source.add(i * LANES));
            if ROTATED {
                *v = v.mul(L::load(factors.as_ptr().add(i * LANES))).hadamard16();
            }
        }
        let mut half = 1;
        while ROTATED && half < n {
            for i in 0..n {
                if i & half == 0 {
                    (v[i], v[i + half]) = (v[i].add(v[i + half]), v[i].sub(v[i + half]));
                }
            }
            half *= 2;
        }
        let mut largest = L::splat(0.0);
        for v in &v[..n] {
            largest = largest.max(v.abs());
        }
        let largest = largest.largest();
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let mut total = L::splat(0.0);
        for (i, v) in v[..n].iter().enumerate() {
            let q = v.mul(L::splat(inverse)).round();
            q.store_i8(codes.add(i * LANES));
            total = total.add(q);
        }
        *scale = largest / 127.0 / if ROTATED { (width as f32).sqrt() } else { 1.0 };
        *sum = total.sum() as i32;
    }
}

variants!(group = group_lanes[true] as fn(x: &[f32], factors: &[f32], codes: &mut [i8], scale: &mut f32, sum: &mut i32));
variants!(plain = group_lanes[false] as fn(x: &[f32], factors: &[f32], codes: &mut [i8], scale: &mut f32, sum: &mut i32));

/// Int8 activations of `rows` inputs, rotated where weights are.
#[derive(Clone, Copy)]
pub struct Rotated<'a> {
    /// `[rows, padded_cols]`
    pub codes: &'a [i8],
    /// `[rows, groups]`
    pub scales: &'a [f32],
    /// Sums of the codes, `[rows, groups]`.
    pub sums: &'a [i32],
}

/// The activation kernel of one level.
#[derive(Clone, Copy)]
pub struct Rotate {
    rotated: group::Run,
    plain: plain::Run,
}

impl Rotate {
    pub fn select(level: Level) -> Self {
        Rotate { rotated: group::select(level), plain: plain::select(level) }
    }

    /// One row, without threads: `layout.cols` values to codes, scales and sums.
    pub(super) fn one(&self, layout: &CqLayout, x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
        assert!(x.len() == layout.cols && codes.len() >= layout.padded_cols());
        for g in 0..layout.groups() {
            let (start, width) = (g * GROUP, layout.group_width(g));
            let x = &x[start..(start + width).min(x.len())];
            // SAFETY: the level was checked by `select`, the width just now.
            unsafe { (self.rotated)(x, &SIGNS, &mut codes[start..start + width], &mut scales[g], &mut sums[g]) }
        }
    }

    /// `x [rows, layout.cols]` to codes, scales and sums as in [`Rotated`]. `factors [layout.padded_cols()]` are those
    /// of a matrix with a rotation of its own, and nothing for others.
    #[allow(clippy::too_many_arguments)]
    pub fn rows(
        &self,
        pool: &Pool,
        layout: &CqLayout,
        factors: &[f32],
        x: &[f32],
        codes: &mut [i8],
        scales: &mut [f32],
        sums: &mut [i32],
    ) {
        let (cols, padded, groups) = (layout.cols, layout.padded_cols(), layout.groups());
        let rows = x.len() / cols;
        assert!(
            x.len() == rows * cols
                && codes.len() == rows * padded
                && scales.len() == rows * groups
                && sums.len() == rows * groups
        );
        let own = layout.rotation() == Rotation::Own;
        assert_eq!(factors.len(), if own { padded } else { 0 });
        let run = if layout.rotation() == Rotation::None { self.plain } else { self.rotated };
        let (codes, scales, sums) = (&Parts::new(codes), &Parts::new(scales), &Parts::new(sums));
        pool.ranges(rows * groups, 64, &|range| {
            for at in range {
                let (row, g) = (at / groups, at % groups);
                let first = g * layout.group();
                let start = row * padded + first;
                let width = layout.group_width(g);
                let x = &x[row * cols + first..row * cols + (first + width).min(cols)];
                let factors = if own { &factors[first..first + width] } else { &SIGNS[..] };
                // SAFETY: the level was checked by `select`; every index is written by one thread.
                unsafe {
                    let codes = codes.slice(start..start + width);
                    run(x, factors, codes, &mut scales.slice(at..at + 1)[0], &mut sums.slice(at..at + 1)[0]);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{Format, rotate};

    #[test]
    fn equals_the_plain_rotation_at_every_level() {
        let pool = Pool::new(2);
        let rotated = [1, 16, 104, 128, 576, 600].map(|cols| (Format::Cq4, cols));
        let others = [(Format::Q4_0, 32), (Format::Q4_0, 576), (Format::Bcq2, 128), (Format::Bcq2, 192)];
        for (format, cols) in rotated.into_iter().chain(others) {
            let layout = CqLayout::new(format, 1, cols).unwrap();
            let rows = 30;
            let x: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919 % 1009) as f32 - 500.0) / 99.0).collect();
            let (padded, groups) = (layout.padded_cols(), layout.groups());
            let own = layout.rotation() == Rotation::Own;
            let factors: Vec<f32> = (0..if own { padded } else { 0 }).map(|k| (k % 7) as f32 * 0.25 - 0.6).collect();
            let mut first: Option<(Vec<i8>, Vec<f32>)> = None;
            for level in Level::supported() {
                let (mut codes, mut scales, mut sums) =
                    (vec![0i8; rows * padded], vec![0.0; rows * groups], vec![0; rows * groups]);
                Rotate::select(level).rows(&pool, &layout, &factors, &x, &mut codes, &mut scales, &mut sums);
                for row in 0..rows {
                    for g in 0..groups {
                        let width = layout.group_width(g);
                        let mut truth = vec![0.0f32; width];
                        let first = g * layout.group();
                        let piece = &x[row * cols + first..row * cols + (first + width).min(cols)];
                        truth[..piece.len()].copy_from_slice(piece);
                        match layout.rotation() {
                            Rotation::None => {}
                            Rotation::Common => rotate::rotate(&mut truth),
                            Rotation::Own => {
                                truth.iter_mut().zip(&factors[first..]).for_each(|(x, factor)| *x *= factor);
                                rotate::hadamard(&mut truth);
                                truth.iter_mut().for_each(|x| *x /= (width as f32).sqrt());
                            }
                        }
                        let codes = &codes[row * padded + first..][..width];
                        let scale = scales[row * groups + g];
                        for (c, t) in codes.iter().zip(&truth) {
                            assert!((f32::from(*c) * scale - t).abs() <= scale * 0.501 + 1e-6, "{level} {format} {cols}");
                        }
                        assert_eq!(sums[row * groups + g], codes.iter().map(|c| i32::from(*c)).sum::<i32>());
                    }
                }
                match &first {
                    None => first = Some((codes, scales)),
                    Some((c, s)) => assert!(*c == codes && *s == scales, "{level} differs from scalar"),
                }
            }
        }
    }
}
