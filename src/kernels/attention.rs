//! Causal attention over a key-value cache, block by block with a running softmax (FlashAttention, Dao et
//! al., <https://arxiv.org/abs/2205.14135>).
//!
//! Cache layout for one layer, f16:
//! - keys `[kv_heads, capacity / 16, head_dim, 16]`: sixteen positions side by side, so that scores of 16
//!   keys are one vector and need no horizontal sums;
//! - values `[kv_heads, capacity, padded head_dim]`.
//!
//! Keys are taken in blocks of 64 absolute positions and every query is treated on its own, so results do
//! not depend on which queries run together.

use super::elementwise::tanh;
use super::threads::{Parts, Pool};
use super::variant::{Level, variants};
use super::vector::{LANES, Lanes};

/// Positions of one softmax block; capacities are multiples of it.
pub const BLOCK: usize = 64;
/// Largest supported head dimension.
pub const MAX_HEAD_DIM: usize = 512;
/// Queries that share loads of keys and values.
const QUERIES: usize = 4;

/// Shape and rules of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
    /// A query sees itself and the `window - 1` positions before it; `None`: all.
    pub window: Option<usize>,
}

impl AttentionShape {
    pub(super) fn value_width(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }
    /// Rows of `q [tokens, stride]` from position `start` on, after checks that queries from column `query_column`,
    /// results of `out` elements and the positions up to the last one fit.
    pub(super) fn tokens(
        &self,
        q: &[f32],
        stride: usize,
        query_column: usize,
        start: usize,
        capacity: usize,
        out: usize,
    ) -> usize {
        let (tokens, width) = (q.len() / stride, self.heads * self.head_dim);
        assert!(self.head_dim <= MAX_HEAD_DIM && self.heads.is_multiple_of(self.kv_heads) && capacity.is_multiple_of(BLOCK));
        assert!(q.len() == tokens * stride && query_column + width <= stride && out == tokens * width);
        assert!(start + tokens <= capacity);
        tokens
    }
    /// f16 elements of the keys of one layer.
    pub fn key_elements(&self, capacity: usize) -> usize {
        self.kv_heads * capacity * self.head_dim
    }
    /// f16 elements of the values of one layer.
    pub fn value_elements(&self, capacity: usize) -> usize {
        self.kv_heads * capacity * self.value_width()
    }
}

/// Keys and values of one layer.
#[derive(Clone, Copy)]
pub struct Cache<'a> {
    pub keys: &'a [u16],
    pub values: &'a [u16],
    /// Positions that fit, a multiple of [`BLOCK`].
    pub capacity: usize,
}

/// Writes keys and values of new positions. Row `t` of `x [tokens, stride]` holds position `start + t`: keys
/// from column `key_column`, values from `value_column`, `[kv_heads, head_dim]` each.
#[allow(clippy::too_many_arguments)]
pub fn store(
    shape: &AttentionShape,
    x: &[f32],
    stride: usize,
    key_column: usize,
    value_column: usize,
    start: usize,
    keys: &mut [u16],
    values: &mut [u16],
    capacity: usize,
) {
    let (dim, width) = (shape.head_dim, shape.value_width());
    for (t, row) in x.chunks_exact(stride).enumerate() {
        let position = start + t;
        assert!(position < capacity);
        for head in 0..shape.kv_heads {
            let k = &row[key_column + head * dim..][..dim];
            let block = &mut keys[(head * capacity + position / LANES * LANES) * dim..];
            for (d, k) in k.iter().enumerate() {
                block[d * LANES + position % LANES] = half::f16::from_f32(*k).to_bits();
            }
            let v = &row[value_column + head * dim..][..dim];
            let out = &mut values[(head * capacity + position) * width..];
            for (o, v) in out.iter_mut().zip(v) {
                *o = half::f16::from_f32(*v).to_bits();
            }
        }
    }
}

/// Up to [`QUERIES`] queries of one key-value head.
pub struct Queries {
    q: [*const f32; QUERIES],
    out: [*mut f32; QUERIES],
    /// Positions that each query sees, `from..to`; empty for a place that holds no query.
    from: [usize; QUERIES],
    to: [usize; QUERIES],
    keys: *const u16,
    values: *const u16,
}

/// # Safety
/// The CPU has the level of `L`; all pointers are valid for `shape` and the positions that are seen.
#[inline(always)]
unsafe fn attend_lanes<L: Lanes>(shape: &AttentionShape, job: &Queries) {
    unsafe {
        let (dim, width) = (shape.head_dim, shape.value_width());
        let mut q = [[0.0f32; MAX_HEAD_DIM]; QUERIES];
        let mut acc = [[0.0f32; MAX_HEAD_DIM]; QUERIES];
        for (q, source) in q.iter_mut().zip(job.q) {
            for (d, q) in q[..dim].iter_mut().enumerate() {
                *q = *source.add(d) * shape.scale;
            }
        }
        let mut largest = [f32::NEG_INFINITY; QUERIES];
        let mut total = [0.0f32; QUERIES];
        let used = |r: &usize| job.to[*r] > job.from[*r];
        let first = (0..QUERIES).filter(used).map(|r| job.from[r]).min().unwrap_or(0);
        let last = job.to.iter().copied().max().unwrap_or(0);
        let mut block = first - first % BLOCK;
        while block < last {
            let count = BLOCK.min(last - block);
            let mut p = [[0.0f32; BLOCK]; QUERIES];
            for sixteen in (0..count).step_by(LANES) {
                let keys = job.keys.add((block + sixteen) * dim);
                let mut s = [L::splat(0.0); QUERIES];
                for d in 0..dim {
                    let k = L::load_f16(keys.add(d * LANES));
                    for (s, q) in s.iter_mut().zip(&q) {
                        *s = L::splat(q[d]).fma(k, *s);
                    }
                }
                for (s, p) in s.iter().zip(&mut p) {
                    let s = match shape.cap {
                        Some(cap) => tanh(s.mul(L::splat(1.0 / cap))).mul(L::splat(cap)),
                        None => *s,
                    };
                    s.store(p.as_mut_ptr().add(sixteen));
                }
            }
            for r in 0..QUERIES {
                let from = job.from[r].clamp(block, block + BLOCK) - block;
                let to = job.to[r].clamp(block, block + BLOCK) - block;
                let p = &mut p[r];
                if from >= to {
                    p.fill(0.0);
                    continue;
                }
                p[..from].fill(f32::NEG_INFINITY);
                p[to..].fill(f32::NEG_INFINITY);
                let v: [L; BLOCK / LANES] = std::array::from_fn(|i| L::load(p.as_ptr().add(i * LANES)));
                let top = v[0].max(v[1]).max(v[2].max(v[3])).largest().max(largest[r]);
                let shrink = if largest[r] == f32::NEG_INFINITY { 0.0 } else { (largest[r] - top).exp() };
                largest[r] = top;
                let mut sum = L::splat(0.0);
                for (i, v) in v.into_iter().enumerate() {
                    v.sub(L::splat(top)).exp().store(p.as_mut_ptr().add(i * LANES));
                }
                p[..from].fill(0.0);
                p[to..].fill(0.0);
                for i in 0..BLOCK / LANES {
                    sum = sum.add(L::load(p.as_ptr().add(i * LANES)));
                }
                total[r] = total[r] * shrink + sum.sum();
                if shrink != 1.0 {
                    for a in &mut acc[r][..width] {
                        *a *= shrink;
                    }
                }
            }
            for column in (0..width).step_by(LANES) {
                let mut a: [L; QUERIES] = std::array::from_fn(|r| L::load(acc[r].as_ptr().add(column)));
                let mut v = job.values.add(block * width + column);
                for j in 0..count {
                    let value = L::load_f16(v);
                    for (a, p) in a.iter_mut().zip(&p) {
                        *a = L::splat(p[j]).fma(value, *a);
                    }
                    v = v.add(width);
                }
                for (a, acc) in a.iter().zip(&mut acc) {
                    a.store(acc.as_mut_ptr().add(column));
                }
            }
            block += BLOCK;
        }
        for r in (0..QUERIES).filter(used) {
            for (d, a) in acc[r][..dim].iter().enumerate() {
                *job.out[r].add(d) = a / total[r];
            }
        }
    }
}

variants!(attend = attend_lanes as fn(shape: &AttentionShape, job: &Queries));

/// The attention kernel of one level.
#[derive(Clone, Copy)]
pub struct Attention {
    run: attend::Run,
}

impl Attention {
    pub fn select(level: Level) -> Self {
        Attention { run: attend::select(level) }
    }

    /// Queries in row `t` of `q [tokens, stride]`, columns `query_column..` as `[heads, head_dim]`, at
    /// position `start + t`; results to `out [tokens, heads * head_dim]`.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &self,
        pool: &Pool,
        shape: &AttentionShape,
        q: &[f32],
        stride: usize,
        query_column: usize,
        start: usize,
        cache: Cache,
        out: &mut [f32],
    ) {
        let (dim, width) = (shape.head_dim, shape.heads * shape.head_dim);
        let tokens = shape.tokens(q, stride, query_column, start, cache.capacity, out.len());
        assert!(
            cache.keys.len() == shape.key_elements(cache.capacity) && cache.values.len() == shape.value_elements(cache.capacity)
        );
        let group = shape.heads / shape.kv_heads;
        let rows = tokens * group;
        let tasks = rows.div_ceil(QUERIES);
        let out = &Parts::new(out);
        pool.each(shape.kv_heads * tasks, &|_, task| {
            // Late queries see most keys; starting with them keeps the threads even.
            let (kv_head, first) = (task % shape.kv_heads, (tasks - 1 - task / shape.kv_heads) * QUERIES);
            let mut job = Queries {
                q: [q.as_ptr(); QUERIES],
                out: [out.start(); QUERIES],
                from: [0; QUERIES],
                to: [0; QUERIES],
                keys: cache.keys[kv_head * cache.capacity * dim..].as_ptr(),
                values: cache.values[kv_head * cache.capacity * shape.value_width()..].as_ptr(),
            };
            for r in 0..QUERIES.min(rows - first) {
                let (token, head) = ((first + r) / group, kv_head * group + (first + r) % group);
                job.q[r] = q[token * stride + query_column + head * dim..].as_ptr();
                job.to[r] = start + token + 1;
                job.from[r] = shape.window.map_or(0, |w| job.to[r].saturating_sub(w));
                // SAFETY: inside `out` by the asserted sizes; every (token, head) is written once.
                job.out[r] = unsafe { out.start().add(token * width + head * dim) };
            }
            // SAFETY: sizes were asserted above, the level by `select`.
            unsafe { (self.run)(shape, &job) }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(shape: AttentionShape, tokens: usize, split: usize) {
        let pool = Pool::new(2);
        let capacity = 192;
        let (qw, kw) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let stride = qw + 2 * kw;
        let half = |i: usize, m: usize| half::f16::from_f32(((i * 7919 % m) as f32 / m as f32 - 0.5) * 3.0).to_f32();
        let x: Vec<f32> = (0..tokens * stride).map(|i| half(i, 1013)).collect();
        let mut keys = vec![0u16; shape.key_elements(capacity)];
        let mut values = vec![0u16; shape.value_elements(capacity)];
        store(&shape, &x[..split * stride], stride, qw, qw + kw, 0, &mut keys, &mut values, capacity);
        store(&shape, &x[split * stride..], stride, qw, qw + kw, split, &mut keys, &mut values, capacity);
        let cache = Cache { keys: &keys, values: &values, capacity };
        for level in Level::supported() {
            let kernel = Attention::select(level);
            let mut out = vec![f32::NAN; tokens * qw];
            kernel.run(&pool, &shape, &x, stride, 0, 0, cache, &mut out);
            for t in 0..tokens {
                let mut alone = vec![f32::NAN; qw];
                kernel.run(&pool, &shape, &x[t * stride..][..stride], stride, 0, t, cache, &mut alone);
                assert_eq!(alone, out[t * qw..][..qw], "{level}: a query depends on its neighbours");
                for head in 0..shape.heads {
                    let kv = head / (shape.heads / shape.kv_heads);
                    let at = |p: usize, d: usize| f64::from(x[p * stride + d]);
                    let from = shape.window.map_or(0, |w| (t + 1).saturating_sub(w));
                    let scores: Vec<f64> = (from..=t)
                        .map(|p| {
                            let dot: f64 = (0..shape.head_dim)
                                .map(|d| at(t, head * shape.head_dim + d) * at(p, qw + kv * shape.head_dim + d))
                                .sum();
                            let s = dot * f64::from(shape.scale);
                            shape.cap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
                        })
                        .collect();
                    let top = scores.iter().copied().fold(f64::MIN, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                    for d in 0..shape.head_dim {
                        let truth: f64 = (from..=t)
                            .zip(&scores)
                            .map(|(p, s)| (s - top).exp() / total * at(p, qw + kw + kv * shape.head_dim + d))
                            .sum();
                        let got = f64::from(out[t * qw + head * shape.head_dim + d]);
                        assert!((got - truth).abs() < 2e-5, "{level} {shape:?} token {t}: {got} {truth}");
                    }
                }
            }
        }
    }

    #[test]
    fn against_f64_at_every_level() {
        let plain = AttentionShape { heads: 4, kv_heads: 2, head_dim: 32, scale: 0.2, cap: None, window: None };
        check(plain, 150, 100);
        check(AttentionShape { heads: 7, kv_heads: 1, head_dim: 48, ..plain }, 70, 1);
        check(AttentionShape { window: Some(9), cap: Some(5.0), ..plain }, 150, 64);
        check(AttentionShape { heads: 3, kv_heads: 3, head_dim: 20, window: Some(70), ..plain }, 150, 149);
    }
}
