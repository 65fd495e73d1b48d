//! Bytes as one 512-bit register; `vpdpbusd` multiplies unsigned weights with signed activations.

use super::tile::Bytes64;
use super::trellis::{Register, coded_tap, free_tap};
use crate::kernels::vector::Avx512;
use crate::quant::codebook::LEVEL_MAX;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Bytes(__m512i);

/// Stores two row blocks as 16 rows by 4 columns, twice: every lane of an accumulator is a row then.
#[inline(always)]
unsafe fn store_pair([a, b]: [__m512i; 2], p: *mut u8) {
    unsafe {
        let even = even_lanes();
        _mm512_storeu_si512(p.cast(), _mm512_permutex2var_epi32(a, even, b));
        _mm512_storeu_si512(p.add(64).cast(), _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b));
    }
}

#[inline(always)]
unsafe fn even_lanes() -> __m512i {
    unsafe { _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) }
}

impl Bytes64 for Bytes {
    type Acc = __m512i;
    type Lanes = Avx512;
    type Table = __m512i;
    type Register = Whole;
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
        // Six bits of an index count, and the table stands there four times.
        unsafe { Bytes(_mm512_permutexvar_epi8(self.0, table)) }
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        unsafe { _mm512_set1_epi64(i64::from(start as u32)) }
    }
    #[inline(always)]
    unsafe fn load_acc(p: *const i32) -> Self::Acc {
        unsafe { _mm512_loadu_si512(p.cast()) }
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
            let even = even_lanes();
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            let sum = _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
            Avx512(_mm512_cvtepi32_ps(sum))
        }
    }
    #[inline(always)]
    unsafe fn store_pair(int8: bool, pair: [Self; 2], p: *mut u8) {
        unsafe { store_pair(pair.map(|w| if int8 { _mm512_xor_si512(w.0, _mm512_set1_epi8(-128)) } else { w.0 }), p) }
    }
    /// The second accumulator is not used.
    #[inline(always)]
    unsafe fn panel_acc<const N: usize>(start: [i32; N]) -> [[Self::Acc; N]; 2] {
        unsafe { [start.map(|start| _mm512_set1_epi32(start)), [_mm512_setzero_si512(); N]] }
    }
    #[inline(always)]
    unsafe fn dot_panel<const N: usize>(_int8: bool, acc: &mut [[Self::Acc; N]; 2], w: *const u8, x: *const i8, stride: usize) {
        unsafe {
            for i in 0..2 {
                let w = _mm512_loadu_si512(w.add(64 * i).cast());
                for (n, acc) in acc[0].iter_mut().enumerate() {
                    let x = x.add(n * stride + 4 * i).cast::<i32>().read_unaligned();
                    *acc = _mm512_dpbusd_epi32(*acc, w, _mm512_set1_epi32(x));
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn panel_sums<const N: usize>([sums, _]: &[[Self::Acc; N]; 2]) -> [Avx512; N] {
        unsafe { sums.map(|sums| Avx512(_mm512_cvtepi32_ps(sums))) }
    }
}

/// All of the bytes, as trellis codes. `vpermb` looks at six bits of an index and ignores the rest.
#[derive(Clone, Copy)]
pub struct Whole(__m512i);

impl Register for Whole {
    const BYTES: usize = 64;
    type Acc = __m512i;
    /// At 3 bits the fifth index bit is bit 4 of a byte for the first table and bit 5 for the second.
    type Levels = [__m512i; 2];

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        unsafe { Whole(_mm512_loadu_si512(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        unsafe { _mm512_storeu_si512(p.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn store_pair(pair: [Self; 2], p: *mut u8) {
        unsafe { store_pair(pair.map(|w| w.0), p) }
    }
    #[inline(always)]
    unsafe fn levels<const BITS: usize>(table: *const i8) -> Self::Levels {
        unsafe {
            let all = _mm512_add_epi8(_mm512_loadu_si512(table.cast()), _mm512_set1_epi8(Bytes::LOOKUP_BIAS as i8));
            match BITS {
                1 | 2 => [_mm512_broadcast_i32x4(_mm512_castsi512_si128(all)); 2],
                3 => [_mm512_shuffle_i64x2::<0x44>(all, all), _mm512_shuffle_i64x2::<0x50>(all, all)],
                _ => [all; 2],
            }
        }
    }
    #[inline(always)]
    unsafe fn pairs<const BITS: usize>(coded: Self, free: Self, half: usize) -> [Self; 2] {
        unsafe {
            let matrices = &MATRICES[BITS - 1];
            let before = _mm512_alignr_epi8::<15>(coded.0, coded.0);
            let mut pairs = [coded; 2];
            for (pair, out) in pairs.iter_mut().enumerate() {
                let at = 2 * half + pair;
                let a = _mm512_gf2p8affine_epi64_epi8::<0>(coded.0, _mm512_set1_epi64(matrices.coded[at] as i64));
                let b = _mm512_gf2p8affine_epi64_epi8::<0>(before, _mm512_set1_epi64(matrices.before[at] as i64));
                *out = Whole(if BITS == 1 {
                    _mm512_xor_si512(a, b)
                } else {
                    let c = _mm512_gf2p8affine_epi64_epi8::<0>(free.0, _mm512_set1_epi64(matrices.free[at] as i64));
                    // 0x96: exclusive or of all three.
                    _mm512_ternarylogic_epi32::<0x96>(a, b, c)
                });
            }
            pairs
        }
    }
    #[inline(always)]
    unsafe fn high_half(self) -> Self {
        unsafe { Whole(_mm512_srli_epi16::<4>(self.0)) }
    }
    #[inline(always)]
    unsafe fn lookup16(self, levels: Self::Levels) -> Self {
        unsafe { Whole(_mm512_permutexvar_epi8(self.0, levels[0])) }
    }
    #[inline(always)]
    unsafe fn lookup32(self, plane: Self, bit: usize, levels: Self::Levels) -> Self {
        unsafe { self.lookup64(plane, bit / 2 * 2, [levels[bit % 2]; 2]) }
    }
    #[inline(always)]
    unsafe fn lookup64(self, plane: Self, bit: usize, levels: Self::Levels) -> Self {
        unsafe {
            let plane = Bytes(plane.0);
            let high = if bit < 4 { plane.shift_left(4 - bit) } else { plane.shift_right(bit - 4) };
            // 0xCA: where the first operand is set take the second, else the third.
            let index = _mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi8(15), self.0, high.0);
            Whole(_mm512_permutexvar_epi8(index, levels[0]))
        }
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        unsafe { Bytes::acc(start) }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe { Bytes::dot(acc, Bytes(weights.0), x) }
    }
    #[inline(always)]
    unsafe fn store_acc(acc: Self::Acc, p: *mut i32) {
        unsafe { _mm512_storeu_si512(p.cast(), acc) }
    }
}

/// The linear function as matrices for `gf2p8affineqb`, one a pair: the row of output bit `b` is byte `7 - b`.
struct Matrices {
    coded: [u64; 4],
    /// For the byte before.
    before: [u64; 4],
    free: [u64; 4],
}

/// By bits, from 1.
static MATRICES: [Matrices; 4] = [matrices(1), matrices(2), matrices(3), matrices(4)];

const fn matrices(bits: usize) -> Matrices {
    let mut matrices = Matrices { coded: [0; 4], before: [0; 4], free: [0; 4] };
    let mut at = 0;
    while at < 4 * 8 {
        let (pair, bit) = (at / 8, at % 8);
        let later = 2 * pair as isize - bit as isize;
        matrices.coded[pair] |= column(coded_tap(bits, later), bit);
        matrices.before[pair] |= column(coded_tap(bits, later + 8), bit);
        matrices.free[pair] |= column(free_tap(bits, bit, pair), bit);
        at += 1;
    }
    matrices
}

/// A matrix with `output` for input bit `bit` and nothing for others.
const fn column(output: u8, bit: usize) -> u64 {
    let mut matrix = 0;
    let mut b = 0;
    while b < 8 {
        matrix |= ((output >> b & 1) as u64) << (8 * (7 - b) + bit);
        b += 1;
    }
    matrix
}
