//! Rotary position embedding (Su et al., <https://arxiv.org/abs/2104.09864>), half-split order: dimension
//! `i` pairs with `i + rotary / 2`.

use super::Heads;
use super::threads::{Parts, Pool};

/// Cosines and sines for one position: `out[0..half]` cosines, `out[half..2 * half]` sines, both times
/// `scale` (the attention factor of the long-context variants, otherwise 1).
pub fn angles(position: usize, frequencies: &[f32], scale: f32, out: &mut [f32]) {
    let (cos, sin) = out.split_at_mut(frequencies.len());
    for ((f, c), s) in frequencies.iter().zip(cos).zip(sin) {
        // The product is rounded to f32 because the reference implementations do so.
        let angle = position as f32 * f;
        (*s, *c) = ((angle.sin()) * scale, (angle.cos()) * scale);
    }
}

/// Rotates, in place, the heads of every row of `x`. `table` holds [`angles`] for each row; dimensions past
/// those that have an angle stay as they are.
pub fn rotate(pool: &Pool, x: &mut [f32], heads: Heads, table: &[f32]) {
    let rows = heads.rows(x.len());
    let half = table.len() / rows / 2;
    assert!(table.len() == rows * 2 * half && 2 * half <= heads.dim);
    let x = &Parts::new(x);
    pool.ranges(rows, 8, &|range| {
        for row in range {
            let (cos, sin) = table[row * 2 * half..][..2 * half].split_at(half);
            for head in 0..heads.count {
                let at = row * heads.stride + heads.start + head * heads.dim;
                // SAFETY: rows of different threads are disjoint.
                let (a, b) = unsafe { x.slice(at..at + 2 * half) }.split_at_mut(half);
                for i in 0..half {
                    (a[i], b[i]) = (a[i] * cos[i] - b[i] * sin[i], b[i] * cos[i] + a[i] * sin[i]);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotates_pairs_by_the_angle() {
        let frequencies = [1.0, 0.25];
        let mut table = vec![0.0; 8];
        angles(3, &frequencies, 1.0, &mut table[..4]);
        angles(0, &frequencies, 2.0, &mut table[4..]);
        // Two rows of stride 7: one untouched column, one head of 5 of which 4 rotate, one untouched column.
        let mut x: Vec<f32> = vec![9.0, 1.0, 0.0, 0.0, 1.0, 7.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 7.0, 9.0];
        rotate(&Pool::new(1), &mut x, Heads { stride: 7, start: 1, count: 1, dim: 5 }, &table);
        let truth = [9.0, 3f32.cos(), -(0.75f32.sin()), 3f32.sin(), 0.75f32.cos(), 7.0, 9.0, 9.0, 2.0, 4.0, 6.0, 8.0, 7.0, 9.0];
        for (a, b) in x.iter().zip(truth) {
            assert!((a - b).abs() < 1e-6, "{x:?}");
        }
    }
}
