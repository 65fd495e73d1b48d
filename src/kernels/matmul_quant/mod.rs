//! Products of int8 activations with CQ weights.
//!
//! Few tokens: codes are looked up and multiplied in registers, nothing is written but the result. Many
//! tokens: each tile of 64 rows is looked up once into a small int8 panel that all tokens use. Both ways
//! add in the same order, so a token's result does not depend on its neighbours.
//!
//! Scalar codes, trellis codes, blocks and books differ in how weights are looked up ([`trellis`]), in how scales are
//! stored and in how many columns share one. Levels of books take a whole int8, as weights of 8 bits do.

mod scalar;
#[cfg(test)]
mod tests;
pub mod tile;
mod trellis;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use super::rotate::Rotated;
use super::threads::{Parts, Pool};
use super::variant::{Level, variants};
use super::vector::{LANES, Lanes};
use crate::quant::blocks;
use crate::quant::book::Book;
use crate::quant::codebook::Codebook;
use crate::quant::decode::scale_code;
use crate::quant::format::{BLOCK_COLS, BLOCK_GROUP, GROUP, TILE_ROWS};
use crate::quant::{Code, CqLayout};
use tile::Bytes64;

/// Row blocks of 8 in a tile.
const BLOCKS: usize = TILE_ROWS / 8;
/// Bytes of a column block once looked up to int8.
const WIDE: usize = TILE_ROWS * BLOCK_COLS;

/// Values of the `CODE` parameter of kernels: [`Code`] as constants.
const SCALAR: u8 = 0;
const TRELLIS: u8 = 1;
const BLOCK: u8 = 2;
const BOOK: u8 = 3;

/// Columns of every group but the last.
const fn group(code: u8) -> usize {
    if code == BLOCK { BLOCK_GROUP } else { GROUP }
}

/// Column blocks of a group.
#[inline(always)]
fn column_blocks<const CODE: u8>(layout: &CqLayout, g: usize) -> usize {
    // Blocks are never shorter.
    (if CODE == BLOCK { BLOCK_GROUP } else { layout.group_width(g) }) / BLOCK_COLS
}

/// One tile of weights and everything it is multiplied with.
pub struct TileJob<'a> {
    layout: &'a CqLayout,
    /// Levels of scalar codes, of blocks and of books, below 8 bits.
    levels: [i8; 16],
    /// What scales of a book are in units of.
    unit: f32,
    /// Levels of a trellis tensor; empty for others.
    header: &'a [u8],
    /// Base of the one-byte scales of a trellis tensor.
    scale_base: u32,
    tile: &'a [u8],
    x: Rotated<'a>,
    tokens: usize,
    /// Rows of this tile that exist (64 except in the last one).
    rows: usize,
    /// Bias of those rows.
    bias: Option<&'a [f32]>,
    /// Element `token * stride + row` receives the result.
    out: *mut f32,
    stride: usize,
}

/// Weights of row block `t` in a stored column block, looked up.
#[inline(always)]
unsafe fn weights<const BITS: usize, B: Bytes64>(block: *const u8, t: usize, table: B::Table) -> B {
    unsafe {
        match BITS {
            8 => B::load(block.add(64 * t)),
            4 => B::load(block.add(64 * (t / 2))).shift_right(4 * (t % 2)).lookup(table),
            3 => {
                let low = B::load(block.add(64 * (t / 4))).shift_right(2 * (t % 4));
                let high = B::load(block.add(128));
                let high = if t < 2 { high.shift_left(2 - t) } else { high.shift_right(t - 2) };
                low.low_two_or(high).lookup(table)
            }
            2 => B::load(block.add(64 * (t / 4))).shift_right(2 * (t % 4)).lookup(table),
            _ => B::load(block).shift_right(t).lookup(table),
        }
    }
}

/// Whether weights are any int8; if not, they are at most [`LEVEL_MAX`](crate::quant::codebook::LEVEL_MAX) and have
/// [`Bytes64::LOOKUP_BIAS`] added.
const fn is_int8(bits: usize, code: u8) -> bool {
    bits == 8 || code == BOOK
}

/// The levels of a job, ready for look-ups.
#[inline(always)]
unsafe fn table<const CODE: u8, B: Bytes64>(job: &TileJob) -> B::Table {
    // Look-ups add a bias that int8 weights do not have.
    let bias = if CODE == BOOK { B::LOOKUP_BIAS as i8 } else { 0 };
    unsafe { B::table(&job.levels.map(|level| level.wrapping_sub(bias))) }
}

/// The bias that `dot` functions add to weights, times the sum of activations, must be taken off again.
#[inline(always)]
fn bias<const BITS: usize, const CODE: u8, B: Bytes64>() -> i32 {
    if is_int8(BITS, CODE) { B::INT8_BIAS } else { B::LOOKUP_BIAS }
}

#[inline(always)]
unsafe fn dot<const BITS: usize, const CODE: u8, B: Bytes64>(acc: B::Acc, w: B, x: *const i8) -> B::Acc {
    unsafe { if is_int8(BITS, CODE) { B::dot_int8(acc, w, x) } else { B::dot(acc, w, x) } }
}

/// Scales of a group for 16 rows from `row` on.
#[inline(always)]
unsafe fn scales<const CODE: u8, L: Lanes>(job: &TileJob, group: usize, row: usize) -> L {
    unsafe {
        let scales = job.tile.as_ptr().add(job.layout.scale_offset(group));
        match CODE {
            TRELLIS => L::load_scales(scales.add(row), job.scale_base),
            BLOCK => L::load_f16(scales.cast::<u16>().add(row)),
            BOOK => L::load_f16(scales.cast::<u16>().add(row)).mul(L::splat(job.unit)),
            _ => L::load_bf16(scales.cast::<u16>().add(row)),
        }
    }
}

/// Adds the bias and writes 16 rows of one token.
#[inline(always)]
unsafe fn finish<L: Lanes>(job: &TileJob, token: usize, row: usize, sums: L) {
    unsafe {
        let left = job.rows.saturating_sub(row);
        let out = job.out.add(token * job.stride + row);
        if left >= LANES {
            match job.bias {
                Some(b) => sums.add(L::load(b.as_ptr().add(row))).store(out),
                None => sums.store(out),
            }
        } else {
            let mut buffer = [0.0f32; LANES];
            sums.store(buffer.as_mut_ptr());
            for (i, v) in buffer[..left].iter().enumerate() {
                *out.add(i) = v + job.bias.map_or(0.0, |b| b[row + i]);
            }
        }
    }
}

/// `T` tokens from `token` on; `N` row blocks are accumulated at once.
#[inline(always)]
unsafe fn few_tokens<const BITS: usize, const CODE: u8, const N: usize, const T: usize, B: Bytes64>(job: &TileJob, token: usize) {
    unsafe {
        let table = table::<CODE, B>(job);
        let layout = job.layout;
        let (padded, groups) = (layout.padded_cols(), layout.groups());
        for first in (0..BLOCKS).step_by(N) {
            let mut sums = [[B::Lanes::splat(0.0); BLOCKS / 2]; T];
            for g in 0..groups {
                let mut acc = [[B::acc(0); N]; T];
                for (t, acc) in acc.iter_mut().enumerate() {
                    *acc = [B::acc(-bias::<BITS, CODE, B>() * job.x.sums[(token + t) * groups + g]); N];
                }
                let mut block = job.tile.as_ptr().add(layout.group_offset(g));
                let mut x = job.x.codes.as_ptr().add(token * padded + g * group(CODE));
                for _ in 0..column_blocks::<CODE>(layout, g) {
                    for n in 0..N {
                        let w = weights::<BITS, B>(block, first + n, table);
                        for (t, acc) in acc.iter_mut().enumerate() {
                            acc[n] = dot::<BITS, CODE, B>(acc[n], w, x.add(t * padded));
                        }
                    }
                    block = block.add(64 * BITS);
                    x = x.add(BLOCK_COLS);
                }
                for i in 0..N / 2 {
                    let scale = scales::<CODE, B::Lanes>(job, g, 8 * first + LANES * i);
                    for (t, (sums, acc)) in sums.iter_mut().zip(&acc).enumerate() {
                        let scale = scale.mul(B::Lanes::splat(job.x.scales[(token + t) * groups + g]));
                        sums[i] = B::row_sums(acc[2 * i], acc[2 * i + 1]).fma(scale, sums[i]);
                    }
                }
            }
            for (t, sums) in sums.iter().enumerate() {
                for (i, sums) in sums[..N / 2].iter().enumerate() {
                    finish(job, token + t, 8 * first + LANES * i, *sums);
                }
            }
        }
    }
}

/// `T` tokens from `token` on without a panel.
#[inline(always)]
unsafe fn direct<const BITS: usize, const CODE: u8, const T: usize, B: Bytes64 + Shape>(job: &TileJob, token: usize) {
    unsafe {
        if CODE == TRELLIS {
            return trellis::few_tokens::<BITS, T, B>(job, token, B::TRELLIS_ACCUMULATORS / T);
        }
        match B::ACCUMULATORS / T {
            8.. => few_tokens::<BITS, CODE, 8, T, B>(job, token),
            4.. => few_tokens::<BITS, CODE, 4, T, B>(job, token),
            _ => few_tokens::<BITS, CODE, 2, T, B>(job, token),
        }
    }
}

/// `N` tokens from `token` on, 16 rows at a time, weights already looked up in `panel`.
#[inline(always)]
unsafe fn tokens<const BITS: usize, const CODE: u8, const N: usize, B: Bytes64>(job: &TileJob, panel: *const u8, token: usize) {
    unsafe {
        let layout = job.layout;
        let (padded, groups) = (layout.padded_cols(), layout.groups());
        for pair in 0..BLOCKS / 2 {
            let mut sums = [B::Lanes::splat(0.0); N];
            for g in 0..groups {
                let start = std::array::from_fn(|n| -bias::<BITS, CODE, B>() * job.x.sums[(token + n) * groups + g]);
                let mut acc = B::panel_acc::<N>(start);
                let mut w = panel.add(g * (group(CODE) / BLOCK_COLS) * WIDE + 128 * pair);
                let mut x = job.x.codes.as_ptr().add(token * padded + g * group(CODE));
                for _ in 0..column_blocks::<CODE>(layout, g) {
                    B::dot_panel::<N>(is_int8(BITS, CODE), &mut acc, w, x, padded);
                    w = w.add(WIDE);
                    x = x.add(BLOCK_COLS);
                }
                let scale = scales::<CODE, B::Lanes>(job, g, LANES * pair);
                for (n, product) in B::panel_sums::<N>(&acc).into_iter().enumerate() {
                    let scale = scale.mul(B::Lanes::splat(job.x.scales[(token + n) * groups + g]));
                    sums[n] = product.fma(scale, sums[n]);
                }
            }
            for (n, sums) in sums.iter().enumerate() {
                finish(job, token + n, LANES * pair, *sums);
            }
        }
    }
}

/// Looks up a whole tile.
#[inline(always)]
unsafe fn fill_panel<const BITS: usize, const CODE: u8, B: Bytes64>(job: &TileJob, panel: *mut u8) {
    unsafe {
        let table = table::<CODE, B>(job);
        for g in 0..job.layout.groups() {
            let mut block = job.tile.as_ptr().add(job.layout.group_offset(g));
            let mut out = panel.add(g * (group(CODE) / BLOCK_COLS) * WIDE);
            if CODE == TRELLIS {
                trellis::fill_group::<BITS, B>(job, g, out);
                continue;
            }
            for _ in 0..column_blocks::<CODE>(job.layout, g) {
                for t in (0..BLOCKS).step_by(2) {
                    let pair = [weights::<BITS, B>(block, t, table), weights::<BITS, B>(block, t + 1, table)];
                    B::store_pair(is_int8(BITS, CODE), pair, out.add(64 * t));
                }
                block = block.add(64 * BITS);
                out = out.add(WIDE);
            }
        }
    }
}

/// # Safety
/// The CPU has the level of `B`; `job.tile` and the activations have the sizes of `job.layout`; `job.out` is
/// valid for `tokens` rows of `stride`; `panel` is valid for [`panel_bytes`].
#[inline(always)]
unsafe fn tile_product<const BITS: usize, const CODE: u8, B: Bytes64 + Shape>(job: &TileJob, panel: *mut u8) {
    unsafe {
        if job.tokens == 1 {
            return direct::<BITS, CODE, 1, B>(job, 0);
        }
        if job.tokens <= B::DIRECT {
            for token in (0..job.tokens).step_by(4) {
                match job.tokens - token {
                    1 => direct::<BITS, CODE, 1, B>(job, token),
                    2 => direct::<BITS, CODE, 2, B>(job, token),
                    3 => direct::<BITS, CODE, 3, B>(job, token),
                    _ => direct::<BITS, CODE, 4, B>(job, token),
                }
            }
            return;
        }
        fill_panel::<BITS, CODE, B>(job, panel);
        let panel = panel.cast_const();
        let mut token = 0;
        if B::TOKENS >= 8 {
            while job.tokens - token >= 8 {
                tokens::<BITS, CODE, 8, B>(job, panel, token);
                token += 8;
            }
        }
        if B::TOKENS >= 4 {
            while job.tokens - token >= 4 {
                tokens::<BITS, CODE, 4, B>(job, panel, token);
                token += 4;
            }
        }
        while job.tokens - token >= 2 {
            tokens::<BITS, CODE, 2, B>(job, panel, token);
            token += 2;
        }
        if token < job.tokens {
            tokens::<BITS, CODE, 1, B>(job, panel, token);
        }
    }
}

/// How much of a product fits the registers of an instruction set.
pub trait Shape {
    /// Row blocks times tokens at once where codes are looked up in registers.
    const ACCUMULATORS: usize;
    /// The same for one native register of trellis codes.
    const TRELLIS_ACCUMULATORS: usize;
    /// Up to as many tokens a panel does not pay.
    const DIRECT: usize;
    /// Tokens at once with a panel.
    const TOKENS: usize;
}

impl Shape for scalar::Bytes {
    const ACCUMULATORS: usize = 4;
    const TRELLIS_ACCUMULATORS: usize = 4;
    const DIRECT: usize = 1;
    const TOKENS: usize = 2;
}
#[cfg(target_arch = "x86_64")]
impl Shape for avx2::Bytes {
    const ACCUMULATORS: usize = 4;
    const TRELLIS_ACCUMULATORS: usize = 8;
    const DIRECT: usize = 2;
    const TOKENS: usize = 2;
}
#[cfg(target_arch = "x86_64")]
impl Shape for avx512::Bytes {
    const ACCUMULATORS: usize = 16;
    const TRELLIS_ACCUMULATORS: usize = 16;
    const DIRECT: usize = 8;
    const TOKENS: usize = 8;
}
#[cfg(target_arch = "aarch64")]
impl<const MUL: u8> Shape for neon::Bytes<MUL> {
    const ACCUMULATORS: usize = 4;
    const TRELLIS_ACCUMULATORS: usize = 16;
    const DIRECT: usize = 4;
    const TOKENS: usize = if MUL == neon::I8MM { 4 } else { 2 };
}

macro_rules! per_bits {
    ($($name:ident $bits:literal $code:ident),*) => {
        $(variants!($name = tile_product[$bits, { $code }] as fn(job: &TileJob, panel: *mut u8);
            ScalarBytes Avx2Bytes Avx512Bytes NeonBytes NeonDotBytes NeonI8mmBytes);)*
    };
}
per_bits!(cq1 1 SCALAR, cq2 2 SCALAR, cq3 3 SCALAR, cq4 4 SCALAR, cq8 8 SCALAR);
per_bits!(tcq1 1 TRELLIS, tcq2 2 TRELLIS, tcq3 3 TRELLIS, tcq4 4 TRELLIS);
per_bits!(q4_0 4 BLOCK, q8_0 8 BLOCK);
per_bits!(bcq1 1 BOOK, bcq2 2 BOOK, bcq3 3 BOOK, bcq4 4 BOOK);

pub(super) mod kinds {
    pub use super::scalar::Bytes as ScalarBytes;
    #[cfg(target_arch = "x86_64")]
    pub use super::{avx2::Bytes as Avx2Bytes, avx512::Bytes as Avx512Bytes};
    #[cfg(target_arch = "aarch64")]
    pub type NeonBytes = super::neon::Bytes<{ super::neon::PLAIN }>;
    #[cfg(target_arch = "aarch64")]
    pub type NeonDotBytes = super::neon::Bytes<{ super::neon::DOT }>;
    #[cfg(target_arch = "aarch64")]
    pub type NeonI8mmBytes = super::neon::Bytes<{ super::neon::I8MM }>;
}

/// The kernels of one level, per code and bit width.
#[derive(Clone, Copy)]
pub struct MatMulQuant {
    /// By bits from 1 to 4, then 8 bits.
    scalar: [cq1::Run; 5],
    trellis: [tcq1::Run; 4],
    /// 4 bits, 8 bits.
    block: [q4_0::Run; 2],
    /// By bits from 1 to 4.
    book: [bcq1::Run; 4],
}

/// Where a product goes: the columns from `first` on, as many as the matrix has rows, of `values [tokens, stride]`.
pub struct Columns<'a> {
    pub values: &'a mut [f32],
    pub first: usize,
    pub stride: usize,
}

impl<'a> Columns<'a> {
    /// All columns of `values [tokens, rows]`.
    pub fn all(values: &'a mut [f32], rows: usize) -> Self {
        Columns { values, first: 0, stride: rows }
    }
}

impl MatMulQuant {
    pub fn select(level: Level) -> Self {
        MatMulQuant {
            scalar: [cq1::select(level), cq2::select(level), cq3::select(level), cq4::select(level), cq8::select(level)],
            trellis: [tcq1::select(level), tcq2::select(level), tcq3::select(level), tcq4::select(level)],
            block: [q4_0::select(level), q8_0::select(level)],
            book: [bcq1::select(level), bcq2::select(level), bcq3::select(level), bcq4::select(level)],
        }
    }

    /// Scratch bytes that [`run`](Self::run) needs a thread when there are several tokens.
    pub fn panel_bytes(layout: &CqLayout) -> usize {
        layout.padded_cols() * TILE_ROWS
    }

    /// `out [tokens, rows] = x W^T (+ bias)`. `scratch` holds [`panel_bytes`](Self::panel_bytes) for each
    /// thread of the pool.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &self,
        pool: &Pool,
        layout: &CqLayout,
        data: &[u8],
        x: Rotated,
        bias: Option<&[f32]>,
        out: Columns,
        scratch: &mut [u8],
    ) {
        let Columns { values: out, first: column, stride } = out;
        let (tokens, rows) = (out.len() / stride, layout.rows);
        let panel = if tokens == 1 { 0 } else { Self::panel_bytes(layout) };
        assert_eq!(Some(data.len()), layout.bytes());
        assert!(out.len() == tokens * stride && column + rows <= stride && bias.is_none_or(|b| b.len() == rows));
        assert!(x.codes.len() == tokens * layout.padded_cols());
        assert!(x.scales.len() == tokens * layout.groups() && x.sums.len() == x.scales.len());
        assert!(scratch.len() >= panel * pool.threads());
        let (run, scale_base) = match layout.code {
            Code::Scalar => (self.scalar[if layout.bits == 8 { 4 } else { layout.bits - 1 }], 0),
            Code::Trellis => (self.trellis[layout.bits - 1], scale_code(data).base),
            Code::Block => (self.block[usize::from(layout.bits == 8)], 0),
            Code::Book => (self.book[layout.bits - 1], 0),
        };
        let (levels, unit) = match layout.code {
            Code::Block => (blocks::LEVELS, 1.0),
            Code::Book => (Book::levels(data), Book::unit(data)),
            Code::Scalar | Code::Trellis => (Codebook::get(layout.bits.min(4)).levels, 1.0),
        };
        let (out, scratch) = (&Parts::new(out), &Parts::new(scratch));
        pool.each(layout.tiles(), &|thread, tile| {
            let first = tile * TILE_ROWS;
            let count = TILE_ROWS.min(rows - first);
            // SAFETY: sizes were asserted above and the level by `select`; tiles write disjoint columns of
            // `out`, and every thread has its own part of `scratch`.
            unsafe {
                let job = TileJob {
                    layout,
                    levels,
                    unit,
                    header: &data[..layout.header_bytes()],
                    scale_base,
                    tile: &data[layout.tile(tile)],
                    x,
                    tokens,
                    rows: count,
                    bias: bias.map(|b| &b[first..first + count]),
                    out: out.start().add(column + first),
                    stride,
                };
                run(&job, scratch.slice(thread * panel..(thread + 1) * panel).as_mut_ptr());
            }
        });
    }
}
