//! Causal attention over an int8 key-value cache with int8 products.
//!
//! Keys and queries are rotated like weights and activations ([`super::rotate`]), which leaves their products as
//! they were and spreads the few large channels that some models have, so one scale a head and position is
//! enough ([QuaRot](https://arxiv.org/abs/2404.00456)). Values have one scale a head and position; it is multiplied into the
//! probabilities, which are rounded to int8 for every 64 positions.
//!
//! Cache layout for one layer, in tiles of 8 by 8 bytes ([`Bytes64`]):
//! - keys `[kv_heads, capacity / 16, padded head_dim / 8, 2]` tiles of 8 positions by 8 dimensions, scales
//!   `[kv_heads, capacity / 16, groups, 16]` ([`CqLayout::groups`] of a head);
//! - values `[kv_heads, capacity / 64, width / 16, 8, 2]` tiles of 8 dimensions by 8 positions, scales
//!   `[kv_heads, capacity]`.
//!
//! Positions are taken in spans of [`SPAN`]; each is summed up by itself (with a running softmax over its blocks of 64)
//! and spans are joined in order. So the spans of one query may run on several threads ("flash decoding",
//! <https://pytorch.org/blog/flash-decoding/>), and a result depends neither on threads nor on neighbours.

use super::attention::{AttentionShape, BLOCK, MAX_HEAD_DIM};
use super::elementwise::tanh;
use super::matmul_quant::tile::Bytes64;
use super::rotate::Rotate;
use super::threads::{Parts, Pool};
use super::variant::{Level, variants};
use super::vector::{LANES, Lanes, prefetch};
use crate::quant::format::GROUP;
use crate::quant::{CqLayout, Format};

/// Positions that are summed up by themselves; a multiple of [`BLOCK`].
pub const SPAN: usize = 256;
/// Queries that share loads of keys and values.
const QUERIES: usize = 4;
/// Times as many are a task where there are many.
const BUNDLES: usize = 4;
/// Rotated groups of the widest head.
const GROUPS: usize = MAX_HEAD_DIM / GROUP;
/// Tokens up to which the spans of a query are spread over the threads.
const FEW: usize = 4;
/// Bytes of a tile of 8 by 8.
const TILE: usize = 64;

/// Sizes of the cache of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of keys.
    pub keys: usize,
    /// Bytes of values.
    pub values: usize,
    pub key_scales: usize,
    pub value_scales: usize,
}

/// The rotated form of one head.
fn head_layout(shape: &AttentionShape) -> CqLayout {
    CqLayout::new(Format::Cq8, 1, shape.head_dim).expect("heads are not empty")
}

/// Sizes for `capacity` positions, a multiple of [`BLOCK`].
pub fn sizes(shape: &AttentionShape, capacity: usize) -> Sizes {
    let (layout, positions) = (head_layout(shape), shape.kv_heads * capacity);
    Sizes {
        keys: positions * layout.padded_cols(),
        values: positions * shape.value_width(),
        key_scales: positions * layout.groups(),
        value_scales: positions,
    }
}

/// f32 elements for the spans of a token: for each head and span the largest score, the sum, and the weighted values.
pub fn partials(shape: &AttentionShape, capacity: usize) -> usize {
    FEW * shape.heads * capacity.div_ceil(SPAN) * (2 + shape.value_width())
}

/// Keys and values of one layer.
pub struct Cache<'a> {
    pub keys: &'a mut [i8],
    pub key_scales: &'a mut [f32],
    pub values: &'a mut [i8],
    pub value_scales: &'a mut [f32],
    /// Positions that fit, a multiple of [`BLOCK`].
    pub capacity: usize,
}

/// Up to [`QUERIES`] rotated queries of one key-value head, and where its keys and values begin.
pub struct Queries {
    codes: [[i8; MAX_HEAD_DIM]; QUERIES],
    /// Scale of a group times that of the scores.
    scales: [[f32; GROUPS]; QUERIES],
    sums: [[i32; GROUPS]; QUERIES],
    /// Positions that each query sees, `from..to`; empty for a place that holds no query.
    from: [usize; QUERIES],
    to: [usize; QUERIES],
    keys: *const i8,
    key_scales: *const f32,
    values: *const i8,
    value_scales: *const f32,
}

/// What a query has seen of some positions.
pub struct Partial {
    largest: f32,
    total: f32,
    values: [f32; MAX_HEAD_DIM],
}

impl Partial {
    const EMPTY: Partial = Partial { largest: f32::NEG_INFINITY, total: 0.0, values: [0.0; MAX_HEAD_DIM] };

    /// Forgets what was seen in the first `width` values.
    fn clear(&mut self, width: usize) {
        (self.largest, self.total) = (f32::NEG_INFINITY, 0.0);
        self.values[..width].fill(0.0);
    }

    /// Adds later positions.
    fn join(&mut self, largest: f32, total: f32, values: &[f32]) {
        if total == 0.0 {
            return;
        }
        let top = self.largest.max(largest);
        let [old, new] = [self.largest, largest].map(|x| if x == f32::NEG_INFINITY { 0.0 } else { (x - top).exp() });
        self.largest = top;
        self.total = self.total * old + total * new;
        for (a, b) in self.values.iter_mut().zip(values) {
            *a = *a * old + b * new;
        }
    }
}

/// Sums up positions `span..span + SPAN`, and no others, for the first `N` queries.
///
/// # Safety
/// The CPU has the level of `B`; all pointers are valid for `shape` and the positions that are seen.
#[inline(always)]
unsafe fn span_of<const N: usize, B: Bytes64>(
    shape: &AttentionShape,
    layout: &CqLayout,
    job: &Queries,
    span: usize,
    out: &mut [Partial; QUERIES],
) {
    unsafe {
        type L<B> = <B as Bytes64>::Lanes;
        let (width, padded, groups) = (shape.value_width(), layout.padded_cols(), layout.groups());
        let first = (0..N).map(|r| job.from[r].max(span)).min().unwrap_or(span);
        let last = (0..N).map(|r| job.to[r].min(span + SPAN)).max().unwrap_or(span);
        out[..N].iter_mut().for_each(|out| out.clear(width));
        let mut block = first - first % BLOCK;
        while block < last {
            let mut p = [[0.0f32; BLOCK]; N];
            let key_block: *const u8 = job.keys.add(block * padded).cast();
            let value_block: *const u8 = job.values.add(block * width).cast();
            for sixteen in (0..BLOCK.min(last - block)).step_by(LANES) {
                let position = block + sixteen;
                let mut tile = key_block.add(sixteen * padded);
                let key_scales = job.key_scales.add(position * groups);
                let mut scores = [L::<B>::splat(0.0); N];
                for g in 0..groups {
                    let mut acc = [[B::acc(0); 2]; N];
                    for (acc, sums) in acc.iter_mut().zip(&job.sums) {
                        *acc = [B::acc(-B::INT8_BIAS * sums[g]); 2];
                    }
                    for k in (g * GROUP..g * GROUP + layout.group_width(g)).step_by(8) {
                        let (a, b) = (B::load(tile), B::load(tile.add(TILE)));
                        // Keys of the next block, and the values of this one.
                        let value = value_block.wrapping_add(tile.offset_from_unsigned(key_block));
                        for line in [tile.wrapping_add(BLOCK * padded), value] {
                            prefetch(line);
                            prefetch(line.wrapping_add(TILE));
                        }
                        for (acc, codes) in acc.iter_mut().zip(&job.codes) {
                            let x = codes.as_ptr().add(k);
                            *acc = [B::dot_int8(acc[0], a, x), B::dot_int8(acc[1], b, x)];
                        }
                        tile = tile.add(2 * TILE);
                    }
                    let key_scale = L::<B>::load(key_scales.add(g * LANES));
                    for ((s, acc), scales) in scores.iter_mut().zip(acc).zip(&job.scales) {
                        *s = B::row_sums(acc[0], acc[1]).fma(key_scale.mul(L::<B>::splat(scales[g])), *s);
                    }
                }
                for (s, p) in scores.iter().zip(&mut p) {
                    let s = match shape.cap {
                        Some(cap) => tanh(s.mul(L::<B>::splat(1.0 / cap))).mul(L::<B>::splat(cap)),
                        None => *s,
                    };
                    s.store(p.as_mut_ptr().add(sixteen));
                }
            }
            // Probabilities as int8, what a step of theirs is worth, and how much less earlier blocks count.
            let mut codes = [[0i8; BLOCK]; N];
            let (mut steps, mut shrinks, mut sums) = ([0.0f32; N], [1.0f32; N], [0i32; N]);
            for r in 0..N {
                let from = job.from[r].clamp(block, block + BLOCK) - block;
                let to = job.to[r].clamp(block, block + BLOCK) - block;
                if from >= to {
                    continue;
                }
                let (p, seen) = (&mut p[r], &mut out[r]);
                let masked = from > 0 || to < BLOCK;
                if masked {
                    p[..from].fill(f32::NEG_INFINITY);
                    p[to..].fill(f32::NEG_INFINITY);
                }
                let mut v: [L<B>; BLOCK / LANES] = std::array::from_fn(|i| L::<B>::load(p.as_ptr().add(i * LANES)));
                let top = v[0].max(v[1]).max(v[2].max(v[3])).largest().max(seen.largest);
                if top > seen.largest {
                    let shrink = L::<B>::splat(seen.largest - top).exp().largest();
                    shrinks[r] = if seen.largest == f32::NEG_INFINITY { 0.0 } else { shrink };
                    seen.largest = top;
                }
                for v in &mut v {
                    *v = v.sub(L::<B>::splat(top)).exp();
                }
                if masked {
                    for (i, v) in v.iter().enumerate() {
                        v.store(p.as_mut_ptr().add(i * LANES));
                    }
                    p[..from].fill(0.0);
                    p[to..].fill(0.0);
                    for (i, v) in v.iter_mut().enumerate() {
                        *v = L::<B>::load(p.as_ptr().add(i * LANES));
                    }
                }
                let mut total = L::<B>::splat(0.0);
                let mut weights = [L::<B>::splat(0.0); BLOCK / LANES];
                for (i, (w, p)) in weights.iter_mut().zip(v).enumerate() {
                    total = total.add(p);
                    *w = p.mul(L::<B>::load(job.value_scales.add(block + i * LANES)));
                }
                seen.total = seen.total * shrinks[r] + total.sum();
                let most = weights[0].max(weights[1]).max(weights[2].max(weights[3])).largest();
                if most <= 0.0 {
                    continue;
                }
                steps[r] = most / 127.0;
                let mut sum = L::<B>::splat(0.0);
                for (i, w) in weights.into_iter().enumerate() {
                    let code = w.mul(L::<B>::splat(127.0 / most)).round().min(L::<B>::splat(127.0));
                    code.store_i8(codes[r].as_mut_ptr().add(i * LANES));
                    sum = sum.add(code);
                }
                sums[r] = sum.sum() as i32;
            }
            for column in (0..width).step_by(LANES) {
                let mut tile = value_block.add(column * BLOCK);
                let mut acc = [[B::acc(0); 2]; N];
                for (acc, sum) in acc.iter_mut().zip(sums) {
                    *acc = [B::acc(-B::INT8_BIAS * sum); 2];
                }
                for k in (0..BLOCK).step_by(8) {
                    let (a, b) = (B::load(tile), B::load(tile.add(TILE)));
                    for (acc, codes) in acc.iter_mut().zip(&codes) {
                        let x = codes.as_ptr().add(k);
                        *acc = [B::dot_int8(acc[0], a, x), B::dot_int8(acc[1], b, x)];
                    }
                    tile = tile.add(2 * TILE);
                }
                for (r, acc) in acc.into_iter().enumerate() {
                    let at = out[r].values.as_mut_ptr().add(column);
                    let old = L::<B>::load(at).mul(L::<B>::splat(shrinks[r]));
                    B::row_sums(acc[0], acc[1]).fma(L::<B>::splat(steps[r]), old).store(at);
                }
            }
            block += BLOCK;
        }
    }
}

/// As [`span_of`], for the first `count` queries.
#[inline(always)]
unsafe fn span_lanes<B: Bytes64>(
    shape: &AttentionShape,
    layout: &CqLayout,
    job: &Queries,
    count: usize,
    span: usize,
    out: &mut [Partial; QUERIES],
) {
    unsafe {
        match count {
            1 => span_of::<1, B>(shape, layout, job, span, out),
            2 => span_of::<2, B>(shape, layout, job, span, out),
            3 => span_of::<3, B>(shape, layout, job, span, out),
            _ => span_of::<QUERIES, B>(shape, layout, job, span, out),
        }
    }
}

variants!(attend = span_lanes as fn(shape: &AttentionShape, layout: &CqLayout, job: &Queries, count: usize, span: usize, out: &mut [Partial; QUERIES]);
    ScalarBytes Avx2Bytes Avx512Bytes NeonBytes NeonDotBytes NeonI8mmBytes);

/// The attention kernel of one level.
#[derive(Clone, Copy)]
pub struct AttentionInt8 {
    run: attend::Run,
    rotate: Rotate,
}

impl AttentionInt8 {
    pub fn select(level: Level) -> Self {
        AttentionInt8 { run: attend::select(level), rotate: Rotate::select(level) }
    }

    /// Writes keys and values of new positions. Row `t` of `x [tokens, stride]` holds position `start + t`: keys
    /// from column `key_column`, values from `value_column`, `[kv_heads, head_dim]` each.
    #[allow(clippy::too_many_arguments)]
    pub fn store(
        &self,
        pool: &Pool,
        shape: &AttentionShape,
        x: &[f32],
        stride: usize,
        key_column: usize,
        value_column: usize,
        start: usize,
        cache: &mut Cache,
    ) {
        let (layout, dim, width, capacity) = (head_layout(shape), shape.head_dim, shape.value_width(), cache.capacity);
        let (padded, groups) = (layout.padded_cols(), layout.groups());
        let end = start + x.len() / stride;
        assert!(end <= capacity);
        let (keys, key_scales) = (&Parts::new(cache.keys), &Parts::new(cache.key_scales));
        let (values, value_scales) = (&Parts::new(cache.values), &Parts::new(cache.value_scales));
        let first = start / BLOCK;
        // A head and a block of positions, whose places nobody else writes to.
        let job = |_, task: usize| {
            let (head, block) = (task % shape.kv_heads, first + task / shape.kv_heads);
            let at = head * capacity + block * BLOCK;
            // SAFETY: see above.
            let (keys, key_scales, values, value_scales) = unsafe {
                (
                    keys.slice(at * padded..(at + BLOCK) * padded),
                    key_scales.slice(at * groups..(at + BLOCK) * groups),
                    values.slice(at * width..(at + BLOCK) * width),
                    value_scales.slice(at..at + BLOCK),
                )
            };
            let (mut codes, mut scales, mut sums) = ([0i8; MAX_HEAD_DIM], [0.0f32; GROUPS], [0i32; GROUPS]);
            for position in start.max(block * BLOCK)..end.min((block + 1) * BLOCK) {
                let row = &x[(position - start) * stride..][..stride];
                let position = position % BLOCK;
                self.rotate.one(&layout, &row[key_column + head * dim..][..dim], &mut codes, &mut scales, &mut sums);
                let sixteen = position / LANES * LANES;
                let tiles = &mut keys[sixteen * padded..][..LANES * padded];
                let place = position % LANES / 8 * TILE + position % 8 * 8;
                for (eight, codes) in codes[..padded].chunks_exact(8).enumerate() {
                    tiles[2 * TILE * eight + place..][..8].copy_from_slice(codes);
                }
                for (g, scale) in scales[..groups].iter().enumerate() {
                    key_scales[sixteen * groups + g * LANES + position % LANES] = *scale;
                }

                let v = &row[value_column + head * dim..][..dim];
                let largest = v.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
                value_scales[position] = largest / 127.0;
                let place = position / 8 * 2 * TILE + position % 8;
                for (d, v) in v.iter().enumerate() {
                    let tile = d / LANES * 8 * 2 * TILE + d % LANES / 8 * TILE;
                    // The sum is 1.5 * 2^23 and an integer, which its lowest bits hold in two's complement.
                    values[tile + place + d % 8 * 8] = (v * inverse + 12_582_912.0).to_bits() as i8;
                }
            }
        };
        let tasks = (end.div_ceil(BLOCK) - first) * shape.kv_heads;
        // Few are stored before threads could have met.
        if end - start <= FEW { (0..tasks).for_each(|task| job(0, task)) } else { pool.each(tasks, &job) }
    }

    /// Queries in row `t` of `q [tokens, stride]`, columns `query_column..` as `[heads, head_dim]`, at
    /// position `start + t`; results to `out [tokens, heads * head_dim]`. `scratch` holds [`partials`].
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &self,
        pool: &Pool,
        shape: &AttentionShape,
        q: &[f32],
        stride: usize,
        query_column: usize,
        start: usize,
        cache: &Cache,
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let (layout, dim, width) = (head_layout(shape), shape.head_dim, shape.heads * shape.head_dim);
        let capacity = cache.capacity;
        let tokens = shape.tokens(q, stride, query_column, start, capacity, out.len());
        let sizes = sizes(shape, capacity);
        assert!(scratch.len() >= partials(shape, capacity));
        assert!(cache.keys.len() == sizes.keys && cache.values.len() == sizes.values);
        assert!(cache.key_scales.len() == sizes.key_scales && cache.value_scales.len() == sizes.value_scales);
        let group = shape.heads / shape.kv_heads;
        let rows = tokens * group;
        let bundles = rows.div_ceil(QUERIES);
        // The queries of bundle `bundle` of a key-value head, and how many they are.
        let queries = |kv_head: usize, bundle: usize| {
            let at = kv_head * capacity;
            let mut job = Queries {
                codes: [[0; MAX_HEAD_DIM]; QUERIES],
                scales: [[0.0; GROUPS]; QUERIES],
                sums: [[0; GROUPS]; QUERIES],
                from: [0; QUERIES],
                to: [0; QUERIES],
                keys: cache.keys[at * layout.padded_cols()..].as_ptr(),
                key_scales: cache.key_scales[at * layout.groups()..].as_ptr(),
                values: cache.values[at * shape.value_width()..].as_ptr(),
                value_scales: cache.value_scales[at..].as_ptr(),
            };
            let count = QUERIES.min(rows - bundle * QUERIES);
            for r in 0..count {
                let (token, head) = place(kv_head, bundle, r, group);
                let x = &q[token * stride + query_column + head * dim..][..dim];
                self.rotate.one(&layout, x, &mut job.codes[r], &mut job.scales[r], &mut job.sums[r]);
                job.scales[r].iter_mut().for_each(|s| *s *= shape.scale);
                job.to[r] = start + token + 1;
                job.from[r] = shape.window.map_or(0, |w| job.to[r].saturating_sub(w));
            }
            (job, count)
        };
        let spans = (start + tokens).div_ceil(SPAN);
        let out = &Parts::new(out);
        let write = |kv_head: usize, bundle: usize, r: usize, seen: &Partial| {
            let (token, head) = place(kv_head, bundle, r, group);
            let at = token * width + head * dim;
            // SAFETY: every (token, head) is written once.
            let out = unsafe { out.slice(at..at + dim) };
            out.iter_mut().zip(&seen.values).for_each(|(o, v)| *o = v / seen.total);
        };
        if tokens > FEW || spans == 1 {
            pool.each(shape.kv_heads * bundles.div_ceil(BUNDLES), &|_, task| {
                // Late queries see most keys; starting with them keeps the threads even.
                let (kv_head, last) = (task % shape.kv_heads, bundles - task / shape.kv_heads * BUNDLES);
                let (mut seen, mut new) = ([Partial::EMPTY; QUERIES], [Partial::EMPTY; QUERIES]);
                for bundle in last.saturating_sub(BUNDLES)..last {
                    let (job, count) = queries(kv_head, bundle);
                    seen.iter_mut().for_each(|seen| seen.clear(dim));
                    for span in first_span(&job, count)..spans {
                        // SAFETY: sizes were asserted above, the level by `select`.
                        unsafe { (self.run)(shape, &layout, &job, count, span * SPAN, &mut new) };
                        for (seen, new) in seen[..count].iter_mut().zip(&new) {
                            seen.join(new.largest, new.total, &new.values[..dim]);
                        }
                    }
                    (0..count).for_each(|r| write(kv_head, bundle, r, &seen[r]));
                }
            });
            return;
        }
        let entry = 2 + shape.value_width();
        let parts = &Parts::new(scratch);
        // Entry of a query and span, for all of both.
        let entry_of = |kv_head: usize, row: usize, span: usize| {
            let at = ((kv_head * rows + row) * spans + span) * entry;
            at..at + entry
        };
        pool.each(shape.kv_heads * bundles * spans, &|_, task| {
            let (kv_head, bundle, span) = (task / (bundles * spans), task / spans % bundles, task % spans);
            let (job, count) = queries(kv_head, bundle);
            let mut new = [Partial::EMPTY; QUERIES];
            // SAFETY: sizes were asserted above, the level by `select`; tasks have entries of their own.
            unsafe { (self.run)(shape, &layout, &job, count, span * SPAN, &mut new) };
            for (r, new) in new[..count].iter().enumerate() {
                let out = unsafe { parts.slice(entry_of(kv_head, bundle * QUERIES + r, span)) };
                out[0] = new.largest;
                out[1] = new.total;
                out[2..].copy_from_slice(&new.values[..entry - 2]);
            }
        });
        for kv_head in 0..shape.kv_heads {
            for row in 0..rows {
                let mut seen = Partial::EMPTY;
                for span in 0..spans {
                    // SAFETY: the tasks have ended.
                    let new = unsafe { parts.slice(entry_of(kv_head, row, span)) };
                    seen.join(new[0], new[1], &new[2..2 + dim]);
                }
                write(kv_head, row / QUERIES, row % QUERIES, &seen);
            }
        }
    }
}

/// Token and head of query `r` of a bundle.
fn place(kv_head: usize, bundle: usize, r: usize, group: usize) -> (usize, usize) {
    let row = bundle * QUERIES + r;
    (row / group, kv_head * group + row % group)
}

/// The first span that any of the queries sees.
fn first_span(job: &Queries, count: usize) -> usize {
    job.from[..count].iter().min().map_or(0, |from| from / SPAN)
}

#[cfg(test)]
#[path = "attention_int8_tests.rs"]
mod tests;
