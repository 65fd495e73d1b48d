//! Root-mean-square normalisation (Zhang and Sennrich, <https://arxiv.org/abs/1910.07467>).

use super::Heads;
use super::threads::{Parts, Pool};
use super::variant::{Level, variants};
use super::vector::{LANES, Lanes};

/// `out = x / sqrt(mean(x^2) + eps) * weight`; `out` may be `x`.
///
/// # Safety
/// `x` and `out` are valid for `weight.len()` elements.
#[inline(always)]
unsafe fn rms_lanes<L: Lanes>(x: *const f32, weight: &[f32], eps: f32, out: *mut f32) {
    unsafe {
        let n = weight.len();
        let whole = n - n % LANES;
        let mut squares = L::splat(0.0);
        let mut i = 0;
        while i < whole {
            let v = L::load(x.add(i));
            squares = v.fma(v, squares);
            i += LANES;
        }
        let mut sum = squares.sum();
        for i in whole..n {
            sum += *x.add(i) * *x.add(i);
        }
        let factor = 1.0 / (sum / n as f32 + eps).sqrt();
        let mut i = 0;
        while i < whole {
            L::load(x.add(i)).mul(L::splat(factor)).mul(L::load(weight.as_ptr().add(i))).store(out.add(i));
            i += LANES;
        }
        for (i, weight) in weight.iter().enumerate().skip(whole) {
            *out.add(i) = *x.add(i) * factor * weight;
        }
    }
}

variants!(rms = rms_lanes as fn(x: *const f32, weight: &[f32], eps: f32, out: *mut f32));

/// The norm kernel of one level.
#[derive(Clone, Copy)]
pub struct RmsNorm {
    run: rms::Run,
}

impl RmsNorm {
    pub fn select(level: Level) -> Self {
        RmsNorm { run: rms::select(level) }
    }

    /// Every row of `x [rows, weight.len()]` to `out` of the same shape.
    pub fn rows(&self, pool: &Pool, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        assert!(x.len() == out.len() && x.len().is_multiple_of(width));
        let rows = x.len() / width;
        let out = &Parts::new(out);
        pool.ranges(rows, 16, &|range| {
            for row in range {
                let at = row * width..(row + 1) * width;
                // SAFETY: the level was checked by `select`; rows of different threads are disjoint.
                unsafe { (self.run)(x[at.clone()].as_ptr(), weight, eps, out.slice(at).as_mut_ptr()) }
            }
        });
    }

    /// In place, for every head (of `weight.len()` columns) of every row of `x`.
    pub fn heads(&self, pool: &Pool, x: &mut [f32], heads: Heads, weight: &[f32], eps: f32) {
        assert_eq!(heads.dim, weight.len());
        let rows = heads.rows(x.len());
        let x = &Parts::new(x);
        pool.ranges(rows, 16, &|range| {
            for row in range {
                for head in 0..heads.count {
                    let at = row * heads.stride + heads.start + head * heads.dim;
                    // SAFETY: as above.
                    unsafe {
                        let piece = x.slice(at..at + heads.dim).as_mut_ptr();
                        (self.run)(piece, weight, eps, piece)
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn against_f64_at_every_level() {
        let pool = Pool::new(2);
        for level in Level::supported() {
            for width in [1, 17, 48, 640] {
                let rows = 40;
                let x: Vec<f32> = (0..rows * width).map(|i| ((i * 31 % 97) as f32 - 50.0) / 9.0).collect();
                let weight: Vec<f32> = (0..width).map(|i| 0.5 + i as f32 / width as f32).collect();
                let mut out = vec![0.0; x.len()];
                RmsNorm::select(level).rows(&pool, &x, &weight, 1e-5, &mut out);
                let mut in_place = x.clone();
                let heads = Heads { stride: 4 * width, start: width, count: 2, dim: width };
                RmsNorm::select(level).heads(&pool, &mut in_place, heads, &weight, 1e-5);
                for row in 0..rows {
                    let x = &x[row * width..][..width];
                    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                    for i in 0..width {
                        let truth = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                        assert!((f64::from(out[row * width + i]) - truth).abs() < 1e-5, "{level} {width}");
                        let expected = if (1..3).contains(&(row % 4)) { out[row * width + i] } else { x[i] };
                        assert_eq!(in_place[row * width + i], expected);
                    }
                }
            }
        }
    }
}
