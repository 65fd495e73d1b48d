//! Lanes as a plain array.

use super::{LANES, Lanes, SCALE_SHIFT};

#[derive(Clone, Copy)]
pub struct Scalar([f32; LANES]);

impl Scalar {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Scalar(self.0.map(f))
    }
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Scalar(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

impl Lanes for Scalar {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Scalar([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Scalar(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        Scalar(bits.map(|b| half::f16::from_bits(b).to_f32_const()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        Scalar(bits.map(|b| f32::from_bits(u32::from(b) << 16)))
    }
    #[inline(always)]
    unsafe fn load_scales(p: *const u8, base: u32) -> Self {
        let codes = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        let value = |code: u8| f32::from_bits(base.wrapping_add(u32::from(code) << SCALE_SHIFT));
        Scalar(codes.map(|code| if code == 0 { 0.0 } else { value(code) }))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        let bits = self.0.map(|x| half::f16::from_f32_const(x).to_bits());
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        Scalar(unsafe { p.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(self.0.map(|x| x as i8)) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Scalar(std::array::from_fn(|i| self.0[i] * b.0[i] + c.0[i]))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn less(self, b: Self) -> u16 {
        (0..LANES).fold(0, |mask, i| mask | u16::from(self.0[i] < b.0[i]) << i)
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        self.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        self.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        self.map(|x| f32::from_bits(((x as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn hadamard16(self) -> Self {
        let mut x = self.0;
        crate::quant::rotate::hadamard(&mut x);
        Scalar(x)
    }
}
