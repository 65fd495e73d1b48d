//! Lanes as one 512-bit register.

use super::{Lanes, SCALE_SHIFT};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Avx512(pub __m512);

/// Lanes `i` with `i & d` set get the factor -1.
#[inline(always)]
fn signs(d: usize) -> [f32; 16] {
    std::array::from_fn(|i| if i & d == 0 { 1.0 } else { -1.0 })
}

impl Lanes for Avx512 {
    const WIDE: bool = true;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Avx512(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Avx512(_mm512_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        unsafe { Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))) }
    }
    #[inline(always)]
    unsafe fn load_scales(p: *const u8, base: u32) -> Self {
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let bits = _mm512_add_epi32(_mm512_slli_epi32::<SCALE_SHIFT>(codes), _mm512_set1_epi32(base as i32));
            Avx512(_mm512_castsi512_ps(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(codes, codes), bits)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0))) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        unsafe { Avx512(_mm512_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        unsafe { Avx512(_mm512_sub_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        unsafe { Avx512(_mm512_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        unsafe { Avx512(_mm512_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        unsafe { Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        unsafe { Avx512(_mm512_max_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        unsafe { Avx512(_mm512_min_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn less(self, b: Self) -> u16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, b.0) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { Avx512(_mm512_abs_ps(self.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { Avx512(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)) }
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let high = _mm512_castps512_ps256(_mm512_shuffle_f32x4::<0x4E>(self.0, self.0));
            super::avx2::sum8(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let high = _mm512_castps512_ps256(_mm512_shuffle_f32x4::<0x4E>(self.0, self.0));
            super::avx2::largest8(_mm256_max_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
    #[inline(always)]
    unsafe fn hadamard16(self) -> Self {
        unsafe {
            let x = self.0;
            let x = _mm512_fmadd_ps(x, _mm512_loadu_ps(signs(1).as_ptr()), _mm512_permute_ps::<0xB1>(x));
            let x = _mm512_fmadd_ps(x, _mm512_loadu_ps(signs(2).as_ptr()), _mm512_permute_ps::<0x4E>(x));
            let x = _mm512_fmadd_ps(x, _mm512_loadu_ps(signs(4).as_ptr()), _mm512_shuffle_f32x4::<0xB1>(x, x));
            let x = _mm512_fmadd_ps(x, _mm512_loadu_ps(signs(8).as_ptr()), _mm512_shuffle_f32x4::<0x4E>(x, x));
            Avx512(x)
        }
    }
}
