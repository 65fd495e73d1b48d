//! Attention over keys and values in 16 bits, block by block with a running softmax (FlashAttention, Dao et
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

/// Attention where every token sees its whole text and nothing else.
impl Attention {
    /// f16 elements that a thread needs for texts of at most `tokens` tokens.
    pub fn text_scratch(shape: &AttentionShape, tokens: usize) -> usize {
        tokens.next_multiple_of(LANES) * (shape.head_dim + shape.value_width())
    }

    /// Rows of `x [tokens, (heads + 2 * kv_heads) * head_dim]` are queries, keys and values of texts that follow one
    /// another, each ending before the row in `ends`; results to `out [tokens, heads * head_dim]`. `scratch` holds
    /// [`text_scratch`](Self::text_scratch) elements for every thread. A text gives the same whatever stands beside it.
    pub fn texts(&self, pool: &Pool, shape: &AttentionShape, x: &[f32], ends: &[usize], scratch: &mut [u16], out: &mut [f32]) {
        let (dim, width) = (shape.head_dim, shape.heads * shape.head_dim);
        let (group, stride) = (shape.heads / shape.kv_heads, (shape.heads + 2 * shape.kv_heads) * dim);
        let tokens = shape.tokens(x, stride, 0, 0, (x.len() / stride).next_multiple_of(BLOCK), out.len());
        assert!(shape.window.is_none() && ends.is_sorted() && ends.last() == Some(&tokens));
        let start_of = |text: usize| if text == 0 { 0 } else { ends[text - 1] };
        let longest = (0..ends.len()).map(|text| ends[text] - start_of(text)).max().unwrap_or(0);
        let room = Self::text_scratch(shape, longest);
        assert!(scratch.len() >= room * pool.threads());
        let (out, scratch) = (&Parts::new(out), &Parts::new(scratch));
        pool.each(ends.len() * shape.kv_heads, &|thread, task| {
            let (text, kv_head) = (task / shape.kv_heads, task % shape.kv_heads);
            let (start, length) = (start_of(text), ends[text] - start_of(text));
            let x = &x[start * stride..ends[text] * stride];
            let capacity = length.next_multiple_of(LANES);
            // SAFETY: every thread has a part of its own.
            let scratch = unsafe { scratch.slice(thread * room..(thread + 1) * room) };
            let (keys, values) = scratch.split_at_mut(capacity * dim);
            let one_head = AttentionShape { heads: group, kv_heads: 1, ..*shape };
            let key_column = width + kv_head * dim;
            store(&one_head, x, stride, key_column, key_column + shape.kv_heads * dim, 0, keys, values, capacity);
            let rows = length * group;
            for first in (0..rows).step_by(QUERIES) {
                let mut job = Queries {
                    q: [x.as_ptr(); QUERIES],
                    out: [out.start(); QUERIES],
                    from: [0; QUERIES],
                    to: [0; QUERIES],
                    keys: keys.as_ptr(),
                    values: values.as_ptr(),
                };
                for r in 0..QUERIES.min(rows - first) {
                    let (token, head) = ((first + r) / group, kv_head * group + (first + r) % group);
                    job.q[r] = x[token * stride + head * dim..].as_ptr();
                    job.to[r] = length;
                    // SAFETY: inside `out` by the asserted sizes; every (token, head) is written once.
                    job.out[r] = unsafe { out.start().add((start + token) * width + head * dim) };
                }
                // SAFETY: sizes were asserted above, the level by `select`. Of the last sixteen keys some may be left from
                // another text; their scores are dropped.
                unsafe { (self.run)(shape, &job) }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_texts_against_f64_at_every_level() {
        let pool = Pool::new(2);
        let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 20, scale: 0.3, cap: None, window: None };
        let ends = [1, 71, 74, 90];
        let (qw, kw) = (80, 40);
        let (stride, tokens) = (qw + 2 * kw, 90);
        let half = |i: usize| half::f16::from_f32((i * 7919 % 1013) as f32 / 300.0 - 1.7).to_f32();
        let x: Vec<f32> = (0..tokens * stride).map(half).collect();
        for level in Level::supported() {
            let kernel = Attention::select(level);
            // What a run before may have left there.
            let mut scratch = vec![half::f16::NAN.to_bits(); 2 * Attention::text_scratch(&shape, 70)];
            let mut out = vec![f32::NAN; tokens * qw];
            kernel.texts(&pool, &shape, &x, &ends, &mut scratch, &mut out);
            let mut start = 0;
            for end in ends {
                let mut alone = vec![f32::NAN; (end - start) * qw];
                kernel.texts(&pool, &shape, &x[start * stride..end * stride], &[end - start], &mut scratch, &mut alone);
                assert_eq!(alone, out[start * qw..end * qw], "{level}: a text depends on its neighbours");
                for (t, head) in (start..end).flat_map(|t| (0..4).map(move |head| (t, head))) {
                    let at = |p: usize, column: usize| f64::from(x[p * stride + column]);
                    let (query, key) = (head * 20, qw + head / 2 * 20);
                    let dot = |p: usize| (0..20).map(|d| at(t, query + d) * at(p, key + d)).sum::<f64>() * 0.3f32 as f64;
                    let scores: Vec<f64> = (start..end).map(dot).collect();
                    let top = scores.iter().copied().fold(f64::MIN, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                    for d in 0..20 {
                        let weighted = |(p, s): (usize, &f64)| (s - top).exp() / total * at(p, key + kw + d);
                        let truth: f64 = (start..end).zip(&scores).map(weighted).sum();
                        let got = f64::from(out[t * qw + query + d]);
                        assert!((got - truth).abs() < 2e-5, "{level} token {t}: {got} {truth}");
                    }
                }
                start = end;
            }
        }
    }

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
