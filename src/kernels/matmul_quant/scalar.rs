//! Bytes as a plain array.

use super::tile::Bytes64;
use super::trellis::Register;
use crate::kernels::vector::{Lanes, Scalar};
use crate::quant::trellis::{MEMORY, TABLE, levels, masks, parities};

#[derive(Clone, Copy)]
pub struct Bytes([u8; 64]);

impl Bytes64 for Bytes {
    type Acc = [i32; 16];
    type Lanes = Scalar;
    type Table = [i8; 16];
    type Register = Quarter;
    const LOOKUP_BIAS: i32 = 0;
    const INT8_BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn table(levels: &[i8; 16]) -> Self::Table {
        *levels
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        Bytes(unsafe { p.cast::<[u8; 64]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        unsafe { p.cast::<[u8; 64]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn shift_right(self, n: usize) -> Self {
        Bytes(self.0.map(|b| b >> n))
    }
    #[inline(always)]
    unsafe fn shift_left(self, n: usize) -> Self {
        Bytes(self.0.map(|b| b << n))
    }
    #[inline(always)]
    unsafe fn low_two_or(self, b: Self) -> Self {
        Bytes(std::array::from_fn(|i| (self.0[i] & 3) | (b.0[i] & !3)))
    }
    #[inline(always)]
    unsafe fn lookup(self, table: Self::Table) -> Self {
        Bytes(self.0.map(|b| table[usize::from(b & 15)] as u8))
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        std::array::from_fn(|i| if i % 2 == 0 { start } else { 0 })
    }
    #[inline(always)]
    unsafe fn load_acc(p: *const i32) -> Self::Acc {
        unsafe { p.cast::<[i32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        let x = unsafe { x.cast::<[i8; 8]>().read_unaligned() };
        std::array::from_fn(|lane| {
            let product = |k: usize| i32::from(weights.0[lane * 4 + k] as i8) * i32::from(x[lane % 2 * 4 + k]);
            acc[lane] + product(0) + product(1) + product(2) + product(3)
        })
    }
    #[inline(always)]
    unsafe fn dot_int8(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        unsafe { Self::dot(acc, weights, x) }
    }
    #[inline(always)]
    unsafe fn row_sums(a: Self::Acc, b: Self::Acc) -> Scalar {
        let sums: [f32; 16] = std::array::from_fn(|i| {
            let (acc, r) = if i < 8 { (&a, i) } else { (&b, i - 8) };
            (acc[2 * r] + acc[2 * r + 1]) as f32
        });
        unsafe { Scalar::load(sums.as_ptr()) }
    }
}

/// One sequence of trellis codes, 2 rows by 8 columns: step `s` of a plane is bit `s`.
#[derive(Clone, Copy)]
pub struct Quarter(u128);

/// The lowest bit of every byte.
const ONES: u128 = u128::from_le_bytes([1; 16]);

impl Quarter {
    #[inline(always)]
    fn map(self, f: impl Fn(u8) -> u8) -> Self {
        Quarter(u128::from_le_bytes(self.0.to_le_bytes().map(f)))
    }
    /// Levels of the low four bits and of `high`, whose lowest `bits` bits count.
    #[inline(always)]
    fn lookup(self, high: u128, bits: usize, levels: [i8; TABLE]) -> Self {
        let mask = ONES * ((1 << bits) - 1);
        Quarter(self.0 & (ONES * 15) | (high & mask) << 4).map(|index| levels[usize::from(index) % TABLE] as u8)
    }
}

impl Register for Quarter {
    const BYTES: usize = 16;
    type Acc = [i32; 4];
    type Levels = [i8; TABLE];

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        Quarter(u128::from_le_bytes(unsafe { p.cast::<[u8; 16]>().read_unaligned() }))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        unsafe { p.cast::<[u8; 16]>().write_unaligned(self.0.to_le_bytes()) }
    }
    #[inline(always)]
    unsafe fn levels<const BITS: usize>(table: *const i8) -> Self::Levels {
        std::array::from_fn(|i| unsafe { *table.add(i % levels(BITS)) })
    }
    #[inline(always)]
    unsafe fn pairs<const BITS: usize>(coded: Self, free: Self, half: usize) -> [Self; 2] {
        let mut planes = [free.0; 4];
        for (plane, mask) in planes.iter_mut().zip(masks(BITS)).take(parities(BITS)) {
            *plane = (0..=MEMORY as u32).filter(|j| mask >> j & 1 == 1).fold(0, |p, j| p ^ coded.0.rotate_left(j));
        }
        std::array::from_fn(|pair| {
            let t = 4 * half + 2 * pair;
            let bit = |i: usize| (planes[i] >> t & ONES) << i | (planes[i] >> (t + 1) & ONES) << (4 + i);
            Quarter(bit(0) | bit(1) | bit(2) | bit(3))
        })
    }
    #[inline(always)]
    unsafe fn high_half(self) -> Self {
        Quarter(self.0 >> 4)
    }
    #[inline(always)]
    unsafe fn lookup16(self, levels: Self::Levels) -> Self {
        self.lookup(0, 0, levels)
    }
    #[inline(always)]
    unsafe fn lookup32(self, plane: Self, bit: usize, levels: Self::Levels) -> Self {
        self.lookup(plane.0 >> bit, 1, levels)
    }
    #[inline(always)]
    unsafe fn lookup64(self, plane: Self, bit: usize, levels: Self::Levels) -> Self {
        self.lookup(plane.0 >> bit, 2, levels)
    }
    #[inline(always)]
    unsafe fn acc(start: i32) -> Self::Acc {
        [start, 0, start, 0]
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc {
        let (w, x) = (weights.0.to_le_bytes(), unsafe { x.cast::<[i8; 8]>().read_unaligned() });
        std::array::from_fn(|lane| {
            let product = |k: usize| i32::from(w[lane * 4 + k] as i8) * i32::from(x[lane % 2 * 4 + k]);
            acc[lane] + product(0) + product(1) + product(2) + product(3)
        })
    }
    #[inline(always)]
    unsafe fn store_acc(acc: Self::Acc, p: *mut i32) {
        unsafe { p.cast::<[i32; 4]>().write_unaligned(acc) }
    }
}
