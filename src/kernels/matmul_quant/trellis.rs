//! Decoding of trellis codes (see [`crate::quant::trellis`]) in registers, and the product for few tokens.
//!
//! Every 16-byte lane of a plane is a sequence of its own: 2 rows by 8 columns by all 8 row blocks, a row block
//! being a bit of every byte. So an instruction set works with registers of any whole number of lanes.
//!
//! Indices are a linear function (modulo 2) of a byte of coded bits, the byte before it on the circle of its
//! lane, and a byte of free bits. They come in *pairs*: byte `q` of pair `i` is the low four index bits of row
//! block `2i` in its low half and of row block `2i + 1` in its high half. Two ways to evaluate the function are
//! derived here from the masks: matrices of 8 by 8 bits for `gf2p8affineqb`, and tables indexed by four bits of
//! input for byte shuffles. The memory is 8 steps, so the four indices of half a byte depend on that half and the
//! two halves before it, and the same tables serve both halves.

use super::tile::Bytes64;
use super::{BLOCKS, TRELLIS, TileJob, WIDE, finish, scales};
use crate::kernels::vector::{LANES, Lanes};
use crate::quant::format::{BLOCK_COLS, GROUP};
use crate::quant::trellis::{MEMORY, masks, parities};

/// A native register of weights: a whole number of 16-byte lanes of the 64 bytes of [`Bytes64`].
///
/// All functions are unsafe for the reasons given in `kernels/vector`.
#[allow(clippy::missing_safety_doc)]
pub trait Register: Copy {
    const BYTES: usize;
    /// One i32 for four bytes; pairs of lanes are partial sums of a row.
    type Acc: Copy;
    /// The tensor's levels, ready for look-ups, with [`Bytes64::LOOKUP_BIAS`] added.
    type Levels: Copy;

    unsafe fn load(p: *const u8) -> Self;
    unsafe fn store(self, p: *mut u8);
    /// Stores two row blocks in a panel as [`Bytes64::store_pair`] does.
    #[inline(always)]
    unsafe fn store_pair(pair: [Self; 2], p: *mut u8) {
        unsafe {
            pair[0].store(p);
            pair[1].store(p.add(64));
        }
    }
    /// Prepares the first `levels(BITS)` of 64 levels.
    unsafe fn levels<const BITS: usize>(table: *const i8) -> Self::Levels;
    /// Pairs `2 * half` and `2 * half + 1` of coded and first free bits (at 1 bit there are none).
    unsafe fn pairs<const BITS: usize>(coded: Self, free: Self, half: usize) -> [Self; 2];
    /// Moves the high half of every byte to the low half; what is then in the high half is arbitrary.
    unsafe fn high_half(self) -> Self;
    /// Levels of the low four bits of every byte.
    unsafe fn lookup16(self, levels: Self::Levels) -> Self;
    /// The same with bit `bit` of `plane` as the fifth index bit.
    unsafe fn lookup32(self, plane: Self, bit: usize, levels: Self::Levels) -> Self;
    /// The same with bits `bit` and `bit + 1` of `plane` (`bit` is even) as the fifth and sixth.
    unsafe fn lookup64(self, plane: Self, bit: usize, levels: Self::Levels) -> Self;
    /// An accumulator whose every row sums to `start`.
    unsafe fn acc(start: i32) -> Self::Acc;
    /// Adds the products of looked-up weights with eight activations at `x`.
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc;
    unsafe fn store_acc(acc: Self::Acc, p: *mut i32);
}

/// What [`pairs_by_shuffles`] needs.
#[allow(clippy::missing_safety_doc)]
pub trait Shuffles: Copy {
    /// The low half of every byte, zero above.
    unsafe fn low_nibbles(self) -> Self;
    /// The high half of every byte, zero above.
    unsafe fn high_nibbles(self) -> Self;
    /// Bytes rotated by one within 16-byte lanes: each becomes the one before it.
    unsafe fn previous(self) -> Self;
    /// Entries of `table` for bytes below 16.
    unsafe fn shuffle(self, table: &'static [u8; 16]) -> Self;
    unsafe fn xor(self, b: Self) -> Self;
}

/// What a coded bit adds to the parities of the weight `later` steps on.
const fn tap(bits: usize, later: isize) -> u8 {
    let mut parity = 0;
    if later >= 0 && later <= MEMORY as isize {
        let mut i = 0;
        while i < parities(bits) {
            parity |= ((masks(bits)[i] >> later & 1) as u8) << i;
            i += 1;
        }
    }
    parity
}

/// What a coded bit adds to the pair of row blocks `later` and `later + 1` steps on.
pub(super) const fn coded_tap(bits: usize, later: isize) -> u8 {
    tap(bits, later) | tap(bits, later + 1) << 4
}

/// What free bit `bit` adds to pair `pair`.
pub(super) const fn free_tap(bits: usize, bit: usize, pair: usize) -> u8 {
    if bits == 1 || bit / 2 != pair { 0 } else { 8 << (bit % 2 * 4) }
}

/// The linear function as tables for half a byte of input.
pub struct Tables {
    /// `[distance in halves][pair of the half][input]`
    coded: [[[u8; 16]; 2]; 3],
    free: [[u8; 16]; 2],
}

/// By bits, from 1.
static TABLES: [Tables; 4] = [tables(1), tables(2), tables(3), tables(4)];

const fn tables(bits: usize) -> Tables {
    let mut tables = Tables { coded: [[[0; 16]; 2]; 3], free: [[0; 16]; 2] };
    let mut at = 0;
    while at < 16 * 4 * 2 {
        let (input, bit, pair) = (at / 8, at / 2 % 4, at % 2);
        if input >> bit & 1 == 1 {
            let mut distance = 0;
            while distance < 3 {
                tables.coded[distance][pair][input] ^= coded_tap(bits, (2 * pair + 4 * distance) as isize - bit as isize);
                distance += 1;
            }
            tables.free[pair][input] ^= free_tap(bits, bit, pair);
        }
        at += 1;
    }
    tables
}

/// [`Register::pairs`] with tables.
#[inline(always)]
pub unsafe fn pairs_by_shuffles<const BITS: usize, S: Shuffles>(coded: S, free: S, half: usize) -> [S; 2] {
    unsafe {
        let tables = &TABLES[BITS - 1];
        let (low, high) = (coded.low_nibbles(), coded.high_nibbles());
        let [now, last, older] = if half == 0 { [low, high.previous(), low.previous()] } else { [high, low, high.previous()] };
        let mut pairs = [coded; 2];
        for (pair, out) in pairs.iter_mut().enumerate() {
            let sum = now.shuffle(&tables.coded[0][pair]).xor(last.shuffle(&tables.coded[1][pair]));
            *out = sum.xor(older.shuffle(&tables.coded[2][pair]));
            if BITS > 1 {
                let free = if half == 0 { free.low_nibbles() } else { free.high_nibbles() };
                *out = out.xor(free.shuffle(&tables.free[pair]));
            }
        }
        pairs
    }
}

/// Weights of row blocks `4 * half` to `4 * half + 3` in the register that starts at `block`.
#[inline(always)]
unsafe fn weights<const BITS: usize, R: Register>(block: *const u8, half: usize, levels: R::Levels) -> [R; 4] {
    unsafe {
        let coded = R::load(block);
        let free = if BITS > 1 { R::load(block.add(64)) } else { coded };
        let [a, b] = R::pairs::<BITS>(coded, free, half);
        let mut weights = [a, a.high_half(), b, b.high_half()];
        for (i, w) in weights.iter_mut().enumerate() {
            let t = 4 * half + i;
            *w = match BITS {
                1 | 2 => w.lookup16(levels),
                3 => w.lookup32(R::load(block.add(128)), t, levels),
                _ => w.lookup64(R::load(block.add(128 + 64 * (t % 2))), t / 2 * 2, levels),
            };
        }
        weights
    }
}

/// Sums over a group for `T` tokens, `stride` activations apart, and `4 * HALVES` row blocks from `4 * FIRST` on, in
/// the register at `block`.
#[inline(always)]
unsafe fn group_sums<const BITS: usize, const FIRST: usize, const HALVES: usize, const T: usize, R: Register>(
    mut block: *const u8,
    (mut x, stride): (*const i8, usize),
    width: usize,
    start: [i32; T],
    levels: R::Levels,
) -> [[[R::Acc; 4]; HALVES]; T] {
    unsafe {
        let mut acc = start.map(|start| [[R::acc(start); 4]; HALVES]);
        for _ in 0..width / BLOCK_COLS {
            for half in 0..HALVES {
                let weights = weights::<BITS, R>(block, FIRST + half, levels);
                for (token, acc) in acc.iter_mut().enumerate() {
                    for (acc, w) in acc[half].iter_mut().zip(weights) {
                        *acc = R::dot(*acc, w, x.add(token * stride));
                    }
                }
            }
            block = block.add(64 * BITS);
            x = x.add(BLOCK_COLS);
        }
        acc
    }
}

/// `T` tokens from `token` on, the row blocks of [`group_sums`].
#[inline(always)]
unsafe fn rows<const BITS: usize, const FIRST: usize, const HALVES: usize, const T: usize, B: Bytes64>(
    job: &TileJob,
    token: usize,
) {
    unsafe {
        let layout = job.layout;
        let (padded, groups) = (layout.padded_cols(), layout.groups());
        let levels = B::Register::levels::<BITS>(job.header.as_ptr().cast());
        let mut sums = [[[B::Lanes::splat(0.0); 2]; HALVES]; T];
        for g in 0..groups {
            // A row's lanes of several registers meet here.
            let mut whole = [[[[0i32; 16]; 4]; HALVES]; T];
            let start = std::array::from_fn(|t| -B::LOOKUP_BIAS * job.x.sums[(token + t) * groups + g]);
            let x = (job.x.codes.as_ptr().add(token * padded + g * GROUP), padded);
            for at in (0..64).step_by(B::Register::BYTES) {
                let block = job.tile.as_ptr().add(layout.group_offset(g) + at);
                let width = layout.group_width(g);
                let acc = group_sums::<BITS, FIRST, HALVES, T, B::Register>(block, x, width, start, levels);
                let acc = acc.as_flattened().as_flattened();
                for (whole, acc) in whole.as_flattened_mut().as_flattened_mut().iter_mut().zip(acc) {
                    B::Register::store_acc(*acc, whole.as_mut_ptr().add(at / 4));
                }
            }
            for i in 0..2 * HALVES {
                let scale = scales::<TRELLIS, B::Lanes>(job, g, 32 * FIRST + LANES * i);
                for (t, (sums, whole)) in sums.iter_mut().zip(&whole).enumerate() {
                    let [a, b] = [2 * i, 2 * i + 1].map(|block| whole.as_flattened()[block].as_ptr());
                    let scale = scale.mul(B::Lanes::splat(job.x.scales[(token + t) * groups + g]));
                    let sum = &mut sums.as_flattened_mut()[i];
                    *sum = B::row_sums(B::load_acc(a), B::load_acc(b)).fma(scale, *sum);
                }
            }
        }
        for (t, sums) in sums.iter().enumerate() {
            for (i, sums) in sums.as_flattened().iter().enumerate() {
                finish(job, token + t, 32 * FIRST + LANES * i, *sums);
            }
        }
    }
}

/// `T` tokens from `token` on; `row_blocks` (8, or any less for 4) are accumulated at once.
#[inline(always)]
pub unsafe fn few_tokens<const BITS: usize, const T: usize, B: Bytes64>(job: &TileJob, token: usize, row_blocks: usize) {
    unsafe {
        if row_blocks >= 8 {
            rows::<BITS, 0, 2, T, B>(job, token);
        } else {
            rows::<BITS, 0, 1, T, B>(job, token);
            rows::<BITS, 1, 1, T, B>(job, token);
        }
    }
}

/// Looks up the blocks of one group into `out`.
#[inline(always)]
pub unsafe fn fill_group<const BITS: usize, B: Bytes64>(job: &TileJob, group: usize, mut out: *mut u8) {
    unsafe {
        type R<B> = <B as Bytes64>::Register;
        let levels = R::<B>::levels::<BITS>(job.header.as_ptr().cast());
        let mut block = job.tile.as_ptr().add(job.layout.group_offset(group));
        for _ in 0..job.layout.group_width(group) / BLOCK_COLS {
            for at in (0..64).step_by(B::Register::BYTES) {
                for half in 0..2 {
                    let weights = weights::<BITS, B::Register>(block.add(at), half, levels);
                    for (i, pair) in weights.as_chunks::<2>().0.iter().enumerate() {
                        R::<B>::store_pair(*pair, out.add(64 * (BLOCKS / 2 * half + 2 * i) + at));
                    }
                }
            }
            block = block.add(64 * BITS);
            out = out.add(WIDE);
        }
    }
}
