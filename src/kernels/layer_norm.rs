//! Layer normalisation (Ba et al., <https://arxiv.org/abs/1607.06450>).

use super::threads::{Parts, Pool};
use super::variant::{Level, variants};
use super::vector::{LANES, Lanes};

/// `out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias`; all of one length, `out` may be `x`.
///
/// # Safety
/// `x` and `out` are valid for `weight.len()` elements, and `bias` has as many.
#[inline(always)]
unsafe fn layer_norm_lanes<L: Lanes>(x: *const f32, weight: &[f32], bias: &[f32], eps: f32, out: *mut f32) {
    unsafe {
        let n = weight.len();
        let whole = n - n % LANES;
        let mut sums = L::splat(0.0);
        let mut i = 0;
        while i < whole {
            sums = sums.add(L::load(x.add(i)));
            i += LANES;
        }
        let mut sum = sums.sum();
        for i in whole..n {
            sum += *x.add(i);
        }
        let mean = sum / n as f32;
        // A second pass over the differences: the mean of squares less the square of the mean would cancel.
        let mut squares = L::splat(0.0);
        let mut i = 0;
        while i < whole {
            let d = L::load(x.add(i)).sub(L::splat(mean));
            squares = d.fma(d, squares);
            i += LANES;
        }
        let mut square = squares.sum();
        for i in whole..n {
            let d = *x.add(i) - mean;
            square += d * d;
        }
        let factor = 1.0 / (square / n as f32 + eps).sqrt();
        let mut i = 0;
        while i < whole {
            let d = L::load(x.add(i)).sub(L::splat(mean)).mul(L::splat(factor));
            d.fma(L::load(weight.as_ptr().add(i)), L::load(bias.as_ptr().add(i))).store(out.add(i));
            i += LANES;
        }
        for i in whole..n {
            *out.add(i) = (*x.add(i) - mean) * factor * weight[i] + bias[i];
        }
    }
}

variants!(layer_norm = layer_norm_lanes as fn(x: *const f32, weight: &[f32], bias: &[f32], eps: f32, out: *mut f32));

/// The kernel of one level.
#[derive(Clone, Copy)]
pub struct LayerNorm {
    run: layer_norm::Run,
}

impl LayerNorm {
    pub fn select(level: Level) -> Self {
        LayerNorm { run: layer_norm::select(level) }
    }

    /// Every row of `x [rows, weight.len()]` to `out` of the same shape.
    pub fn rows(&self, pool: &Pool, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        assert!(x.len() == out.len() && x.len().is_multiple_of(width) && bias.len() == width);
        let out = &Parts::new(out);
        pool.ranges(x.len() / width, 16, &|range| {
            for row in range {
                let at = row * width..(row + 1) * width;
                // SAFETY: the level was checked by `select`; rows of different threads are disjoint.
                unsafe { (self.run)(x[at.clone()].as_ptr(), weight, bias, eps, out.slice(at).as_mut_ptr()) }
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
            for width in [1, 17, 48, 384] {
                let rows = 40;
                // A mean far from zero, which a sum of squares would not survive.
                let x: Vec<f32> = (0..rows * width).map(|i| 300.0 + ((i * 31 % 97) as f32 - 50.0) / 9.0).collect();
                let weight: Vec<f32> = (0..width).map(|i| 0.5 + i as f32 / width as f32).collect();
                let bias: Vec<f32> = (0..width).map(|i| (i % 7) as f32 - 3.0).collect();
                let mut out = vec![0.0; x.len()];
                LayerNorm::select(level).rows(&pool, &x, &weight, &bias, 1e-5, &mut out);
                for (x, out) in x.chunks(width).zip(out.chunks(width)) {
                    let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
                    let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / width as f64;
                    for i in 0..width {
                        let normed = (f64::from(x[i]) - mean) / (variance + 1e-5).sqrt();
                        let truth = normed * f64::from(weight[i]) + f64::from(bias[i]);
                        assert!((f64::from(out[i]) - truth).abs() < 1e-4, "{level} {width}: {} {truth}", out[i]);
                    }
                }
            }
        }
    }
}
