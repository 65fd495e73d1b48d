//! Lanes as two 256-bit registers.

use super::{Lanes, SCALE_SHIFT};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Avx2(pub __m256, pub __m256);

impl Avx2 {
    #[inline(always)]
    fn map(self, f: impl Fn(__m256) -> __m256) -> Self {
        Avx2(f(self.0), f(self.1))
    }
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(__m256, __m256) -> __m256) -> Self {
        Avx2(f(self.0, b.0), f(self.1, b.1))
    }
}

/// Sum of eight lanes: halves, quarters, pairs.
#[inline(always)]
pub(super) unsafe fn sum8(x: __m256) -> f32 {
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

/// The largest of eight lanes.
#[inline(always)]
pub(super) unsafe fn largest8(x: __m256) -> f32 {
    unsafe {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }
}

/// The transform of eight lanes. No closure, so that it is compiled for the caller's instruction set.
#[inline(always)]
unsafe fn hadamard8(x: __m256) -> __m256 {
    unsafe {
        let s = _mm256_setr_ps(1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0);
        let x = _mm256_fmadd_ps(x, s, _mm256_permute_ps::<0xB1>(x));
        let s = _mm256_setr_ps(1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0);
        let x = _mm256_fmadd_ps(x, s, _mm256_permute_ps::<0x4E>(x));
        let s = _mm256_setr_ps(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0);
        _mm256_fmadd_ps(x, s, _mm256_permute2f128_ps::<1>(x, x))
    }
}

/// [`Lanes::load_scales`] for eight.
#[inline(always)]
unsafe fn scales8(p: *const u8, base: u32) -> __m256 {
    unsafe {
        let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
        let bits = _mm256_add_epi32(_mm256_slli_epi32::<{ SCALE_SHIFT as i32 }>(codes), _mm256_set1_epi32(base as i32));
        _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_cmpgt_epi32(codes, _mm256_setzero_si256())))
    }
}

impl Lanes for Avx2 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Avx2(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe { Avx2(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        unsafe {
            let half =
                |p: *const u16| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))));
            Avx2(half(p), half(p.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_scales(p: *const u8, base: u32) -> Self {
        unsafe { Avx2(scales8(p, base), scales8(p.add(8), base)) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1));
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe {
            let x = _mm_loadu_si128(p.cast());
            let half = |x| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
            Avx2(half(x), half(_mm_srli_si128::<8>(x)))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        unsafe {
            // Packing works within 128-bit halves; the permutation restores the order.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let words = _mm256_permute4x64_epi64::<0xD8>(words);
            let bytes = _mm256_permute4x64_epi64::<0xD8>(_mm256_packs_epi16(words, words));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(bytes));
        }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { _mm256_add_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { _mm256_sub_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { _mm256_mul_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { _mm256_div_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        unsafe { Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { _mm256_max_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { _mm256_min_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn less(self, b: Self) -> u16 {
        unsafe {
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, b.0));
            let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.1, b.1));
            (low | high << 8) as u16
        }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        self.map(|x| unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), x) })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        self.map(|x| unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) })
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        self.map(|x| unsafe {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe { sum8(_mm256_add_ps(self.0, self.1)) }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe { largest8(_mm256_max_ps(self.0, self.1)) }
    }
    #[inline(always)]
    unsafe fn hadamard16(self) -> Self {
        unsafe {
            let x = Avx2(hadamard8(self.0), hadamard8(self.1));
            Avx2(_mm256_add_ps(x.0, x.1), _mm256_sub_ps(x.0, x.1))
        }
    }
}
