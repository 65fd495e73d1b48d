//! Bytes as two 256-bit registers; without VNNI, `vpmaddubsw` and `vpmaddwd` take two steps. Looked-up
//! levels plus bias stay within 127, so the 16-bit sums of the first step cannot saturate.

use super::tile::Bytes64;
use super::trellis::{Register, Shuffles, pairs_by_shuffles};
use crate::kernels::vector::Avx2;
use crate::quant::codebook::LEVEL_MAX;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Bytes(__m256i, __m256i);

impl Bytes {
    #[inline(always)]
    fn map(self, f: impl Fn(__m256i) -> __m256i) -> Self {
        Bytes(f(self.0), f(self.1))
    }
}

/// `acc` plus sums of four products of unsigned `w` with signed `x`.
#[inline(always)]
unsafe fn multiply(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
    unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1))) }
}

impl Bytes64 for Bytes {
    type Acc = (__m256i, __m256i);
    type Lanes = Avx2;
    type Table = __m256i;
    type Register = Half;
    const LOOKUP_BIAS: i32 = LEVEL_MAX as i32 + 1;
    const INT8_BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn table(levels: &[i8; 16]) -> Self::Table {
        unsafe {
            let t = _mm_add_epi8(_mm_loadu_si128(levels.as_ptr().cast()), _mm_set1_epi8(Self::LOOKUP_BIAS as i8));
            _mm256_broadcastsi128_si256(t)
        }
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        unsafe { Bytes(_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        unsafe {
            _mm256_storeu_si256(p.cast(), self.0);
            _mm256_storeu_si256(p.add(32).cast(), self.1);
        }
    }
    #[inline(always)]
    unsafe fn shift_right(self, n: usize) -> Self {
        self.map(|x| unsafe {
            match n {
                0 => x,
                1 => _mm256_srli_epi16::<1>(x),
                2 => _mm256_srli_epi16::<2>(x),
                3 => _mm256_srli_epi16::<3>(x),
                4 => _mm256_srli_epi16::<4>(x),
                5 => _mm256_srli_epi16::<5>(x),
                6 => _mm256_srli_epi16::<6>(x),
                _ => _mm256_srli_epi16::<7>(x),
            }
        })
    }
    #[inline(always)]
    unsafe fn shift_left(self, n: usize) -> Self {
        self.map(|x| unsafe {
            match n {
                0 => x,
                1 => _mm256_slli_epi16::<1>(x),
                2 => _mm256_slli_epi16::<2>(x),
                _ => _mm256_sll_epi16(x, _mm_cvtsi32_si128(n as i32)),
            }
        })
    }
    #[inline(always)]
    unsafe fn low_two_or(self, b: Self) -> Self {
        unsafe {
            let mask = _mm256_set1_epi8(3);
            let pick = |a, b| _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
            Bytes(pick(self.0, b.0), pick(self.1, b.1))
        }
    }
    #[inline(always)]
    unsafe fn lookup(self, table: Self::Table) -> Self {
        self.map(|x| unsafe { _mm256_shuffle_epi8(table, _mm256_and_si256(x, _mm256_set1_epi8(15))) })
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        unsafe { (_mm256_set1_epi64x(i64::from(start as u32)), _mm256_set1_epi64x(i64::from(start as u32))) }
    }
    #[inline(always)]
    unsafe fn load_acc(p: *const i32) -> Self::Acc {
        unsafe { (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())) }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe {
            let x = _mm256_set1_epi64x(x.cast::<i64>().read_unaligned());
            (multiply(acc.0, weights.0, x), multiply(acc.1, weights.1, x))
        }
    }
    #[inline(always)]
    unsafe fn dot_int8(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe {
            // |w| <= 128 (unsigned) times x with the sign of w: 2 * 128 * 127 still fits 16 bits.
            let x = _mm256_set1_epi64x(x.cast::<i64>().read_unaligned());
            let signed = |acc, w| multiply(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            (signed(acc.0, weights.0), signed(acc.1, weights.1))
        }
    }
    #[inline(always)]
    unsafe fn row_sums(a: Self::Acc, b: Self::Acc) -> Avx2 {
        unsafe {
            // hadd works within 128-bit halves: [a0 a1 b0 b1 | a2 a3 b2 b3] in pairs of rows.
            let eight = |x, y| _mm256_cvtepi32_ps(_mm256_permute4x64_epi64::<0xD8>(_mm256_hadd_epi32(x, y)));
            Avx2(eight(a.0, a.1), eight(b.0, b.1))
        }
    }
}

/// Half of the bytes: 4 rows by 8 columns.
#[derive(Clone, Copy)]
pub struct Half(__m256i);

impl Half {
    /// Shifts 16-bit words, so that bit `bit` of every byte becomes its highest.
    #[inline(always)]
    unsafe fn to_highest(self, bit: usize) -> __m256i {
        unsafe { _mm256_sll_epi16(self.0, _mm_cvtsi32_si128(7 - bit as i32)) }
    }
}

impl Shuffles for Half {
    #[inline(always)]
    unsafe fn low_nibbles(self) -> Self {
        unsafe { Half(_mm256_and_si256(self.0, _mm256_set1_epi8(15))) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(self) -> Self {
        unsafe { Half(_mm256_and_si256(_mm256_srli_epi16::<4>(self.0), _mm256_set1_epi8(15))) }
    }
    #[inline(always)]
    unsafe fn previous(self) -> Self {
        unsafe { Half(_mm256_alignr_epi8::<15>(self.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn shuffle(self, table: &'static [u8; 16]) -> Self {
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            Half(_mm256_shuffle_epi8(table, self.0))
        }
    }
    #[inline(always)]
    unsafe fn xor(self, b: Self) -> Self {
        unsafe { Half(_mm256_xor_si256(self.0, b.0)) }
    }
}

impl Register for Half {
    const BYTES: usize = 32;
    type Acc = __m256i;
    /// Sixteen levels each.
    type Levels = [__m256i; 4];

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        unsafe { Half(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        unsafe { _mm256_storeu_si256(p.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn levels<const BITS: usize>(table: *const i8) -> Self::Levels {
        unsafe {
            let mut levels = [_mm256_setzero_si256(); 4];
            for (i, levels) in levels.iter_mut().enumerate() {
                *levels = Bytes::table(&table.add(16 * i).cast::<[i8; 16]>().read_unaligned());
            }
            levels
        }
    }
    #[inline(always)]
    unsafe fn pairs<const BITS: usize>(coded: Self, free: Self, half: usize) -> [Self; 2] {
        unsafe { pairs_by_shuffles::<BITS, Self>(coded, free, half) }
    }
    #[inline(always)]
    unsafe fn high_half(self) -> Self {
        unsafe { Half(_mm256_srli_epi16::<4>(self.0)) }
    }
    #[inline(always)]
    unsafe fn lookup16(self, levels: Self::Levels) -> Self {
        unsafe { Half(_mm256_shuffle_epi8(levels[0], self.low_nibbles().0)) }
    }
    #[inline(always)]
    unsafe fn lookup32(self, plane: Self, bit: usize, levels: Self::Levels) -> Self {
        unsafe {
            let (low, high) = (self.lookup16([levels[0]; 4]), self.lookup16([levels[1]; 4]));
            Half(_mm256_blendv_epi8(low.0, high.0, plane.to_highest(bit)))
        }
    }
    #[inline(always)]
    unsafe fn lookup64(self, plane: Self, bit: usize, levels: Self::Levels) -> Self {
        unsafe {
            let [a, b, c, d] = levels;
            let (low, high) = (self.lookup32(plane, bit, [a, b, a, b]), self.lookup32(plane, bit, [c, d, c, d]));
            Half(_mm256_blendv_epi8(low.0, high.0, plane.to_highest(bit + 1)))
        }
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        unsafe { _mm256_set1_epi64x(i64::from(start as u32)) }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe { multiply(acc, weights.0, _mm256_set1_epi64x(x.cast::<i64>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn store_acc(acc: Self::Acc, p: *mut i32) {
        unsafe { _mm256_storeu_si256(p.cast(), acc) }
    }
}
