//! Bytes as one 512-bit register; `vpdpbusd` multiplies unsigned weights with signed activations.

use super::tile::Bytes64;
use crate::kernels::vector::Avx512;
use crate::quant::codebook::LEVEL_MAX;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Bytes(__m512i);

impl Bytes64 for Bytes {
    type Acc = __m512i;
    type Lanes = Avx512;
    type Table = __m512i;
    const LOOKUP_BIAS: i32 = LEVEL_MAX as i32 + 1;
    const INT8_BIAS: i32 = 128;

    #[inline(always)]
    unsafe fn table(levels: &[i8; 16]) -> Self::Table {
        unsafe {
            let t = _mm_add_epi8(_mm_loadu_si128(levels.as_ptr().cast()), _mm_set1_epi8(Self::LOOKUP_BIAS as i8));
            _mm512_broadcast_i32x4(t)
        }
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        unsafe { Bytes(_mm512_loadu_si512(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        unsafe { _mm512_storeu_si512(p.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn shift_right(self, n: usize) -> Self {
        unsafe {
            Bytes(match n {
                0 => self.0,
                1 => _mm512_srli_epi16::<1>(self.0),
                2 => _mm512_srli_epi16::<2>(self.0),
                3 => _mm512_srli_epi16::<3>(self.0),
                4 => _mm512_srli_epi16::<4>(self.0),
                5 => _mm512_srli_epi16::<5>(self.0),
                6 => _mm512_srli_epi16::<6>(self.0),
                _ => _mm512_srli_epi16::<7>(self.0),
            })
        }
    }
    #[inline(always)]
    unsafe fn shift_left(self, n: usize) -> Self {
        unsafe {
            Bytes(match n {
                0 => self.0,
                1 => _mm512_slli_epi16::<1>(self.0),
                2 => _mm512_slli_epi16::<2>(self.0),
                _ => _mm512_sll_epi16(self.0, _mm_cvtsi32_si128(n as i32)),
            })
        }
    }
    #[inline(always)]
    unsafe fn low_two_or(self, b: Self) -> Self {
        // 0xCA: where the first operand is set take the second, else the third.
        unsafe { Bytes(_mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi8(3), self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn lookup(self, table: Self::Table) -> Self {
        unsafe { Bytes(_mm512_shuffle_epi8(table, _mm512_and_si512(self.0, _mm512_set1_epi8(15)))) }
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        unsafe { _mm512_set1_epi64(i64::from(start as u32)) }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe { _mm512_dpbusd_epi32(acc, weights.0, _mm512_set1_epi64(x.cast::<i64>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn dot_int8(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe { Self::dot(acc, Bytes(_mm512_xor_si512(weights.0, _mm512_set1_epi8(-128))), x) }
    }
    #[inline(always)]
    unsafe fn row_sums(a: Self::Acc, b: Self::Acc) -> Avx512 {
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            let sum = _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
            Avx512(_mm512_cvtepi32_ps(sum))
        }
    }
}
