//! Bytes as a plain array.

use super::tile::Bytes64;
use crate::kernels::vector::{Lanes, Scalar};

#[derive(Clone, Copy)]
pub struct Bytes([u8; 64]);

impl Bytes64 for Bytes {
    type Acc = [i32; 16];
    type Lanes = Scalar;
    type Table = [i8; 16];
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
