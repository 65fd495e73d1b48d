//! Bytes as four 128-bit registers (2 rows by 8 columns each), with or without the dot-product instruction.

use super::tile::Bytes64;
use crate::kernels::vector::Neon;
use std::arch::aarch64::*;

/// `DOT`: use `sdot` (Armv8.2 dot product); otherwise widening multiplies.
#[derive(Clone, Copy)]
pub struct Bytes<const DOT: bool>([uint8x16_t; 4]);

impl<const DOT: bool> Bytes<DOT> {
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

/// `acc` plus sums of four products of `w` (2 rows by 8 columns) with `x`, which holds its 8 values twice.
#[inline(always)]
unsafe fn multiply<const DOT: bool>(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    unsafe {
        if DOT {
            sdot(acc, w, x)
        } else {
            // Sums of two products are taken in 16 bits: 2 * 127 * 127 fits.
            let (low, high) = (vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
            vpadalq_s16(acc, vpaddq_s16(low, high))
        }
    }
}

impl<const DOT: bool> Bytes64 for Bytes<DOT> {
    type Acc = [int32x4_t; 4];
    type Lanes = Neon;
    type Table = int8x16_t;
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
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe {
            let x = vcombine_s8(vld1_s8(x), vld1_s8(x));
            let [mut a, mut b, mut c, mut d] = acc;
            a = multiply::<DOT>(a, vreinterpretq_s8_u8(weights.0[0]), x);
            b = multiply::<DOT>(b, vreinterpretq_s8_u8(weights.0[1]), x);
            c = multiply::<DOT>(c, vreinterpretq_s8_u8(weights.0[2]), x);
            d = multiply::<DOT>(d, vreinterpretq_s8_u8(weights.0[3]), x);
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
}
