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
        Bytes(self.0.map(f))
    }
}

#[inline(always)]
unsafe fn multiply<const DOT: bool>(acc: int32x4_t, w: int8x16_t, x: int8x8_t) -> int32x4_t {
    unsafe {
        if DOT {
            // The intrinsic is not stable yet; the instruction has the meaning of `vdotq_s32`.
            let (mut acc, x) = (acc, vcombine_s8(x, x));
            std::arch::asm!("sdot {a:v}.4s, {w:v}.16b, {x:v}.16b", a = inout(vreg) acc, w = in(vreg) w, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags));
            acc
        } else {
            // Pair sums of 16-bit products per half row: 2 * 127 * 127 fits.
            let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), x));
            let high = vpaddlq_s16(vmull_s8(vget_high_s8(w), x));
            vaddq_s32(acc, vpaddq_s32(low, high))
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
        let x = unsafe { vld1_s8(x) };
        std::array::from_fn(|i| unsafe { multiply::<DOT>(acc[i], vreinterpretq_s8_u8(weights.0[i]), x) })
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
