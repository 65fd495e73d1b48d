//! Lanes as four 128-bit registers.

use super::{Lanes, SCALE_SHIFT};
use std::arch::aarch64::*;

#[derive(Clone, Copy)]
pub struct Neon(pub [float32x4_t; 4]);

impl Neon {
    #[inline(always)]
    fn map(self, f: impl Fn(float32x4_t) -> float32x4_t) -> Self {
        let [a, b, c, d] = self.0;
        Neon([f(a), f(b), f(c), f(d)])
    }
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Neon([f(self.0[0], b.0[0]), f(self.0[1], b.0[1]), f(self.0[2], b.0[2]), f(self.0[3], b.0[3])])
    }
}

impl Lanes for Neon {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Neon([vdupq_n_f32(x); 4]) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Neon(std::array::from_fn(|i| unsafe { vld1q_f32(p.add(4 * i)) }))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        for (i, x) in self.0.into_iter().enumerate() {
            unsafe { vst1q_f32(p.add(4 * i), x) }
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // The conversion belongs to the base architecture; the f16 vector type is younger than our oldest Rust.
        // Flags are not preserved, because conversions may set the floating-point status (here and below).
        Neon(std::array::from_fn(|i| unsafe {
            let bits = vld1_u16(p.add(4 * i));
            let out: float32x4_t;
            std::arch::asm!("fcvtl {o:v}.4s, {b:v}.4h", o = out(vreg) out, b = in(vreg) bits, options(pure, nomem, nostack));
            out
        }))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        Neon(std::array::from_fn(|i| unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(4 * i)))) }))
    }
    #[inline(always)]
    unsafe fn load_scales(p: *const u8, base: u32) -> Self {
        Neon(std::array::from_fn(|i| unsafe {
            let codes = vld1q_u8(p);
            let codes = if i < 2 { vmovl_u8(vget_low_u8(codes)) } else { vmovl_high_u8(codes) };
            let codes = if i % 2 == 0 { vmovl_u16(vget_low_u16(codes)) } else { vmovl_high_u16(codes) };
            let bits = vaddq_u32(vshlq_n_u32::<{ SCALE_SHIFT as i32 }>(codes), vdupq_n_u32(base));
            vreinterpretq_f32_u32(vandq_u32(bits, vtstq_u32(codes, codes)))
        }))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        for (i, x) in self.0.into_iter().enumerate() {
            unsafe {
                let bits: uint16x4_t;
                std::arch::asm!("fcvtn {o:v}.4h, {b:v}.4s", o = out(vreg) bits, b = in(vreg) x, options(pure, nomem, nostack));
                vst1_u16(p.add(4 * i), bits);
            }
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe {
            let x = vld1q_s8(p);
            let (lo, hi) = (vmovl_s8(vget_low_s8(x)), vmovl_s8(vget_high_s8(x)));
            let f = |x| vcvtq_f32_s32(vmovl_s16(x));
            Neon([f(vget_low_s16(lo)), f(vget_high_s16(lo)), f(vget_low_s16(hi)), f(vget_high_s16(hi))])
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        unsafe {
            let [a, b, c, d] = self.0.map(|x| vqmovn_s32(vcvtnq_s32_f32(x)));
            vst1q_s8(p, vcombine_s8(vqmovn_s16(vcombine_s16(a, b)), vqmovn_s16(vcombine_s16(c, d))));
        }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vsubq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vdivq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Neon(std::array::from_fn(|i| unsafe { vfmaq_f32(c.0[i], self.0[i], b.0[i]) }))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vmaxnmq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vminnmq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn less(self, b: Self) -> u16 {
        unsafe {
            let weights = vld1q_u32([1u32, 2, 4, 8].as_ptr());
            let mut mask = 0;
            for i in 0..4 {
                mask |= vaddvq_u32(vandq_u32(vcltq_f32(self.0[i], b.0[i]), weights)) << (4 * i);
            }
            mask as u16
        }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        self.map(|x| unsafe { vabsq_f32(x) })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        self.map(|x| unsafe { vrndnq_f32(x) })
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        self.map(|x| unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)))) })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let [a, b, c, d] = self.0;
            let x = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let x = vadd_f32(vget_low_f32(x), vget_high_f32(x));
            vget_lane_f32::<0>(x) + vget_lane_f32::<1>(x)
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let [a, b, c, d] = self.0;
            vmaxvq_f32(vmaxq_f32(vmaxq_f32(a, c), vmaxq_f32(b, d)))
        }
    }
    #[inline(always)]
    unsafe fn hadamard16(self) -> Self {
        unsafe {
            let odd = [1.0f32, -1.0, 1.0, -1.0];
            let high = [1.0f32, 1.0, -1.0, -1.0];
            let (odd, high) = (vld1q_f32(odd.as_ptr()), vld1q_f32(high.as_ptr()));
            let [a, b, c, d] = self.0.map(|x| {
                let x = vfmaq_f32(vrev64q_f32(x), x, odd);
                vfmaq_f32(vextq_f32::<2>(x, x), x, high)
            });
            let (a, b, c, d) = (vaddq_f32(a, b), vsubq_f32(a, b), vaddq_f32(c, d), vsubq_f32(c, d));
            Neon([vaddq_f32(a, c), vaddq_f32(b, d), vsubq_f32(a, c), vsubq_f32(b, d)])
        }
    }
}
