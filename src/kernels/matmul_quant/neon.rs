//! Bytes as four 128-bit registers (2 rows by 8 columns each), with the multiplier that the CPU has.

use super::tile::Bytes64;
use super::trellis::{Register, Shuffles, pairs_by_shuffles};
use crate::kernels::vector::Neon;
use std::arch::aarch64::*;

/// Widening multiplies only.
pub const PLAIN: u8 = 0;
/// `sdot`: sums of four products (Armv8.2, optional).
pub const DOT: u8 = 1;
/// `sdot` for one token, `smmla` for two: 2 rows times 2 tokens, sums of eight products (Armv8.6).
pub const I8MM: u8 = 2;

/// `MUL`: one of the multipliers above.
#[derive(Clone, Copy)]
pub struct Bytes<const MUL: u8>([uint8x16_t; 4]);

impl<const MUL: u8> Bytes<MUL> {
    #[inline(always)]
    fn map(self, f: impl Fn(uint8x16_t) -> uint8x16_t) -> Self {
        let [a, b, c, d] = self.0;
        Bytes([f(a), f(b), f(c), f(d)])
    }
}

/// The meaning of `vdotq_s32`, which is not stable in Rust yet. A function of its own, because the assembler
/// accepts the instruction only where the feature is enabled; callers that have it inline this.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sdot(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    unsafe {
        std::arch::asm!("sdot {a:v}.4s, {w:v}.16b, {x:v}.16b", a = inout(vreg) acc, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// The meaning of `vmmlaq_s32`: `acc` (row 0 token 0, row 0 token 1, row 1 token 0, row 1 token 1) plus sums of
/// products of 2 rows and 2 tokens, 8 columns each.
#[inline]
#[target_feature(enable = "neon,i8mm")]
unsafe fn smmla(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    unsafe {
        std::arch::asm!("smmla {a:v}.4s, {w:v}.16b, {x:v}.16b", a = inout(vreg) acc, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// `acc` plus sums of four products of `w` (2 rows by 8 columns) with `x`, which holds its 8 values twice.
#[inline(always)]
unsafe fn multiply<const MUL: u8>(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    unsafe {
        if MUL != PLAIN {
            sdot(acc, w, x)
        } else {
            // Sums of two products are taken in 16 bits: 2 * 128 * 127 fits.
            let (low, high) = (vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
            vpadalq_s16(acc, vpaddq_s16(low, high))
        }
    }
}

impl<const MUL: u8> Bytes64 for Bytes<MUL> {
    type Acc = [int32x4_t; 4];
    type Lanes = Neon;
    type Table = int8x16_t;
    type Register = Quarter<MUL>;
    const LOOKUP_BIAS: i32 = 0;
    const INT8_BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn table(levels: &[i8; 16]) -> Self::Table {
        unsafe { vld1q_s8(levels.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        Bytes(std::array::from_fn(|i| unsafe { vld1q_u8(p.add(16 * i)) }))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        for (i, x) in self.0.into_iter().enumerate() {
            unsafe { vst1q_u8(p.add(16 * i), x) }
        }
    }
    #[inline(always)]
    unsafe fn shift_right(self, n: usize) -> Self {
        self.map(|x| unsafe { vshlq_u8(x, vdupq_n_s8(-(n as i8))) })
    }
    #[inline(always)]
    unsafe fn shift_left(self, n: usize) -> Self {
        self.map(|x| unsafe { vshlq_u8(x, vdupq_n_s8(n as i8)) })
    }
    #[inline(always)]
    unsafe fn low_two_or(self, b: Self) -> Self {
        Bytes(std::array::from_fn(|i| unsafe { vbslq_u8(vdupq_n_u8(3), self.0[i], b.0[i]) }))
    }
    #[inline(always)]
    unsafe fn lookup(self, table: Self::Table) -> Self {
        self.map(|x| unsafe { vreinterpretq_u8_s8(vqtbl1q_s8(table, vandq_u8(x, vdupq_n_u8(15)))) })
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        unsafe { [vreinterpretq_s32_s64(vdupq_n_s64(i64::from(start as u32))); 4] }
    }
    #[inline(always)]
    unsafe fn load_acc(p: *const i32) -> Self::Acc {
        unsafe { [vld1q_s32(p), vld1q_s32(p.add(4)), vld1q_s32(p.add(8)), vld1q_s32(p.add(12))] }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe {
            let x = vcombine_s8(vld1_s8(x), vld1_s8(x));
            let [mut a, mut b, mut c, mut d] = acc;
            a = multiply::<MUL>(a, vreinterpretq_s8_u8(weights.0[0]), x);
            b = multiply::<MUL>(b, vreinterpretq_s8_u8(weights.0[1]), x);
            c = multiply::<MUL>(c, vreinterpretq_s8_u8(weights.0[2]), x);
            d = multiply::<MUL>(d, vreinterpretq_s8_u8(weights.0[3]), x);
            [a, b, c, d]
        }
    }
    #[inline(always)]
    unsafe fn dot_int8(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe { Self::dot(acc, weights, x) }
    }
    #[inline(always)]
    unsafe fn row_sums(a: Self::Acc, b: Self::Acc) -> Neon {
        unsafe {
            let four = |x, y| vcvtq_f32_s32(vpaddq_s32(x, y));
            Neon([four(a[0], a[1]), four(a[2], a[3]), four(b[0], b[1]), four(b[2], b[3])])
        }
    }
    /// With `smmla` the first accumulator holds the sums of both tokens and the second stays as it was. No bias
    /// is ever taken off here, so both start at zero.
    #[inline(always)]
    unsafe fn dot_two(_int8: bool, acc: [Self::Acc; 2], weights: Self, x: [*const i8; 2]) -> [Self::Acc; 2] {
        unsafe {
            let [mut a, mut b] = acc;
            if MUL == I8MM {
                let x = vcombine_s8(vld1_s8(x[0]), vld1_s8(x[1]));
                a[0] = smmla(a[0], vreinterpretq_s8_u8(weights.0[0]), x);
                a[1] = smmla(a[1], vreinterpretq_s8_u8(weights.0[1]), x);
                a[2] = smmla(a[2], vreinterpretq_s8_u8(weights.0[2]), x);
                a[3] = smmla(a[3], vreinterpretq_s8_u8(weights.0[3]), x);
            } else {
                a = Self::dot(a, weights, x[0]);
                b = Self::dot(b, weights, x[1]);
            }
            [a, b]
        }
    }
    #[inline(always)]
    unsafe fn row_sums_two(a: [Self::Acc; 2], b: [Self::Acc; 2]) -> [Neon; 2] {
        unsafe {
            if MUL == I8MM {
                let ([a, _], [b, _]) = (a, b);
                let first = |x, y| vcvtq_f32_s32(vuzp1q_s32(x, y));
                let second = |x, y| vcvtq_f32_s32(vuzp2q_s32(x, y));
                [
                    Neon([first(a[0], a[1]), first(a[2], a[3]), first(b[0], b[1]), first(b[2], b[3])]),
                    Neon([second(a[0], a[1]), second(a[2], a[3]), second(b[0], b[1]), second(b[2], b[3])]),
                ]
            } else {
                [Self::row_sums(a[0], b[0]), Self::row_sums(a[1], b[1])]
            }
        }
    }
}

/// A quarter of the bytes: 2 rows by 8 columns.
#[derive(Clone, Copy)]
pub struct Quarter<const MUL: u8>(uint8x16_t);

impl<const MUL: u8> Quarter<MUL> {
    /// The low four bits, and above them the bits of `plane` from `bit` on that are in `mask`.
    #[inline(always)]
    unsafe fn index(self, plane: Self, bit: usize, mask: u8) -> uint8x16_t {
        unsafe {
            let high = vshlq_u8(plane.0, vdupq_n_s8(4 - bit as i8));
            vandq_u8(vbslq_u8(vdupq_n_u8(15), self.0, high), vdupq_n_u8(mask))
        }
    }
}

impl<const MUL: u8> Shuffles for Quarter<MUL> {
    #[inline(always)]
    unsafe fn low_nibbles(self) -> Self {
        unsafe { Quarter(vandq_u8(self.0, vdupq_n_u8(15))) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(self) -> Self {
        unsafe { Quarter(vshrq_n_u8::<4>(self.0)) }
    }
    #[inline(always)]
    unsafe fn previous(self) -> Self {
        unsafe { Quarter(vextq_u8::<15>(self.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn shuffle(self, table: &'static [u8; 16]) -> Self {
        unsafe { Quarter(vqtbl1q_u8(vld1q_u8(table.as_ptr()), self.0)) }
    }
    #[inline(always)]
    unsafe fn xor(self, b: Self) -> Self {
        unsafe { Quarter(veorq_u8(self.0, b.0)) }
    }
}

impl<const MUL: u8> Register for Quarter<MUL> {
    const BYTES: usize = 16;
    type Acc = int32x4_t;
    type Levels = uint8x16x4_t;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        unsafe { Quarter(vld1q_u8(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        unsafe { vst1q_u8(p, self.0) }
    }
    #[inline(always)]
    unsafe fn levels<const BITS: usize>(table: *const i8) -> Self::Levels {
        let p = table.cast::<u8>();
        unsafe { uint8x16x4_t(vld1q_u8(p), vld1q_u8(p.add(16)), vld1q_u8(p.add(32)), vld1q_u8(p.add(48))) }
    }
    #[inline(always)]
    unsafe fn pairs<const BITS: usize>(coded: Self, free: Self, half: usize) -> [Self; 2] {
        unsafe { pairs_by_shuffles::<BITS, Self>(coded, free, half) }
    }
    #[inline(always)]
    unsafe fn high_half(self) -> Self {
        unsafe { Quarter(vshrq_n_u8::<4>(self.0)) }
    }
    #[inline(always)]
    unsafe fn lookup16(self, levels: Self::Levels) -> Self {
        unsafe { Quarter(vqtbl1q_u8(levels.0, self.low_nibbles().0)) }
    }
    #[inline(always)]
    unsafe fn lookup32(self, plane: Self, bit: usize, levels: Self::Levels) -> Self {
        unsafe { Quarter(vqtbl2q_u8(uint8x16x2_t(levels.0, levels.1), self.index(plane, bit, 31))) }
    }
    #[inline(always)]
    unsafe fn lookup64(self, plane: Self, bit: usize, levels: Self::Levels) -> Self {
        unsafe { Quarter(vqtbl4q_u8(levels, self.index(plane, bit, 63))) }
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        unsafe { vreinterpretq_s32_s64(vdupq_n_s64(i64::from(start as u32))) }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe { multiply::<MUL>(acc, vreinterpretq_s8_u8(weights.0), vcombine_s8(vld1_s8(x), vld1_s8(x))) }
    }
    #[inline(always)]
    unsafe fn store_acc(acc: Self::Acc, p: *mut i32) {
        unsafe { vst1q_s32(p, acc) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Level;
    use crate::kernels::vector::Lanes;

    /// Four column blocks at the ends of the range (-128 is for weights alone), where 16-bit sums come closest to
    /// overflow, in every combination of signs over rows and tokens, against integers.
    fn check<const MUL: u8>() {
        let weights: [[[i8; 8]; 8]; 4] = std::array::from_fn(|block| {
            std::array::from_fn(|row| {
                std::array::from_fn(|k| if (block * 37 + row * 5) >> (k / 2) & 1 == 0 { 127 } else { -128 })
            })
        });
        let x: [[[i8; 8]; 4]; 2] = std::array::from_fn(|token| {
            std::array::from_fn(|block| std::array::from_fn(|k| if token == 0 || (block + k) % 3 > 0 { -127 } else { 127 }))
        });
        let truth = |token: usize, row: usize| -> f32 {
            (0..4)
                .flat_map(|block| (0..8).map(move |k| (block, k)))
                .map(|(block, k)| i32::from(weights[block][row % 8][k]) * i32::from(x[token][block][k]))
                .sum::<i32>() as f32
        };
        unsafe {
            let mut one = [Bytes::<MUL>::acc(1000), Bytes::<MUL>::acc(-3)];
            let mut two = [Bytes::<MUL>::acc(0); 2];
            for block in 0..4 {
                let w = Bytes::<MUL>::load(weights[block].as_ptr().cast());
                let x = [x[0][block].as_ptr(), x[1][block].as_ptr()];
                one = [Bytes::<MUL>::dot(one[0], w, x[0]), Bytes::<MUL>::dot_int8(one[1], w, x[1])];
                two = Bytes::<MUL>::dot_two(true, two, w, x);
            }
            let mut out = [0.0f32; 16];
            Bytes::<MUL>::row_sums(one[0], one[1]).store(out.as_mut_ptr());
            assert_eq!(out, std::array::from_fn(|i| if i < 8 { truth(0, i) + 1000.0 } else { truth(1, i) - 3.0 }));
            for (token, sums) in Bytes::<MUL>::row_sums_two(two, two).into_iter().enumerate() {
                sums.store(out.as_mut_ptr());
                assert_eq!(out, std::array::from_fn(|i| truth(token, i)));
            }
        }
    }

    #[test]
    fn extremes_for_every_multiplier() {
        check::<PLAIN>();
        if Level::NeonDot.available() {
            check::<DOT>();
        }
        if Level::NeonI8mm.available() {
            check::<I8MM>();
        }
    }
}
