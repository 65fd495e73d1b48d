//! Sixty-four logical bytes: 8 rows by 8 columns of int8 weights, on every instruction set.

use super::trellis::Register;
use crate::kernels::vector::Lanes;

/// Byte `r * 8 + k` belongs to row `r` and column `k`.
///
/// All functions are unsafe for the reasons given in `kernels/vector`.
#[allow(clippy::missing_safety_doc)]
pub trait Bytes64: Copy {
    /// Sixteen i32: lanes `2r` and `2r + 1` hold partial sums of row `r`.
    type Acc: Copy;
    type Lanes: Lanes;
    /// A table of 16 int8 levels, ready for [`Bytes64::lookup`].
    type Table: Copy;
    /// A native register, for trellis codes.
    type Register: Register;
    /// What [`Bytes64::lookup`] adds to levels, so that weights are unsigned where the multiplier wants that.
    const LOOKUP_BIAS: i32;
    /// The same for [`Bytes64::dot_int8`], which adds it itself.
    const INT8_BIAS: i32;

    unsafe fn table(levels: &[i8; 16]) -> Self::Table;
    unsafe fn load(p: *const u8) -> Self;
    /// Stores two row blocks in a panel, as [`Bytes64::dot_panel`] wants them; `int8` if they were not looked up.
    #[inline(always)]
    unsafe fn store_pair(_int8: bool, pair: [Self; 2], p: *mut u8) {
        unsafe {
            pair[0].store(p);
            pair[1].store(p.add(64));
        }
    }
    unsafe fn store(self, p: *mut u8);
    /// Shifts every byte right by `n` in 0..8; bits that come in from above are arbitrary.
    unsafe fn shift_right(self, n: usize) -> Self;
    /// Shifts every byte left by `n` in 0..8; bits that come in from below are arbitrary.
    unsafe fn shift_left(self, n: usize) -> Self;
    /// The two low bits of `self`, every other bit of `b`.
    unsafe fn low_two_or(self, b: Self) -> Self;
    /// Levels for the low four bits of every byte, plus the bias.
    unsafe fn lookup(self, table: Self::Table) -> Self;
    /// An accumulator whose every row sums to `start`.
    unsafe fn acc(start: i32) -> Self::Acc;
    /// An accumulator from its sixteen lanes, which registers have stored.
    unsafe fn load_acc(p: *const i32) -> Self::Acc;
    /// Adds the products of looked-up weights with eight activations at `x`.
    unsafe fn dot(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc;
    /// Adds the products of int8 weights with eight activations at `x` (not -128).
    unsafe fn dot_int8(acc: Self::Acc, weights: Self, x: *const i8) -> Self::Acc;
    /// Sums of the 8 rows of `a` and the 8 rows of `b`.
    unsafe fn row_sums(a: Self::Acc, b: Self::Acc) -> Self::Lanes;

    /// [`Bytes64::dot_int8`] (`int8`) or [`Bytes64::dot`] for two tokens. Instruction sets that multiply
    /// matrices may mix the accumulators of both tokens; only [`Bytes64::row_sums_two`] can read them.
    #[inline(always)]
    unsafe fn dot_two(int8: bool, acc: [Self::Acc; 2], weights: Self, x: [*const i8; 2]) -> [Self::Acc; 2] {
        let [a, b] = acc;
        unsafe {
            if int8 {
                [Self::dot_int8(a, weights, x[0]), Self::dot_int8(b, weights, x[1])]
            } else {
                [Self::dot(a, weights, x[0]), Self::dot(b, weights, x[1])]
            }
        }
    }
    /// [`Bytes64::row_sums`] for two tokens.
    #[inline(always)]
    unsafe fn row_sums_two(a: [Self::Acc; 2], b: [Self::Acc; 2]) -> [Self::Lanes; 2] {
        unsafe { [Self::row_sums(a[0], b[0]), Self::row_sums(a[1], b[1])] }
    }

    /// Accumulators for `N` tokens and 16 rows of a panel; the rows of token `n` sum to `start[n]`.
    #[inline(always)]
    unsafe fn panel_acc<const N: usize>(start: [i32; N]) -> [[Self::Acc; N]; 2] {
        unsafe { [start.map(|start| Self::acc(start)); 2] }
    }
    /// Adds the products of 16 rows that stand at `w` in a panel with eight activations of each of `N` tokens, `stride` apart.
    #[inline(always)]
    unsafe fn dot_panel<const N: usize>(int8: bool, acc: &mut [[Self::Acc; N]; 2], w: *const u8, x: *const i8, stride: usize) {
        unsafe {
            for (i, acc) in acc.iter_mut().enumerate() {
                let w = Self::load(w.add(64 * i));
                let mut n = 0;
                while n + 1 < N {
                    let two = [x.add(n * stride), x.add((n + 1) * stride)];
                    [acc[n], acc[n + 1]] = Self::dot_two(int8, [acc[n], acc[n + 1]], w, two);
                    n += 2;
                }
                if n < N {
                    let x = x.add(n * stride);
                    acc[n] = if int8 { Self::dot_int8(acc[n], w, x) } else { Self::dot(acc[n], w, x) };
                }
            }
        }
    }
    /// What [`Bytes64::dot_panel`] has summed up.
    #[inline(always)]
    unsafe fn panel_sums<const N: usize>([a, b]: &[[Self::Acc; N]; 2]) -> [Self::Lanes; N] {
        unsafe {
            let mut sums = [Self::Lanes::splat(0.0); N];
            let mut n = 0;
            while n + 1 < N {
                [sums[n], sums[n + 1]] = Self::row_sums_two([a[n], a[n + 1]], [b[n], b[n + 1]]);
                n += 2;
            }
            if n < N {
                sums[n] = Self::row_sums(a[n], b[n]);
            }
            sums
        }
    }
}
