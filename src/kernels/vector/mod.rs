//! Sixteen logical f32 lanes, on every instruction set.
//!
//! All functions are unsafe for two reasons: pointers must be valid for the lanes that are read or written
//! (unaligned is fine), and the CPU must have the instruction set. Callers are the kernels of this room,
//! which check lengths first and are reached only through a level that was detected.

mod scalar;
pub use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;

/// Number of logical lanes.
pub const LANES: usize = 16;

/// Where the code of a one-byte scale is added to the bits of an f32, see `quant::trellis::ScaleCode`.
const SCALE_SHIFT: u32 = 19;

/// Asks for the cache line at `p`, which may be anywhere, so that it is there when it is read.
#[inline(always)]
pub fn prefetch(p: *const u8) {
    // SAFETY: these have no effect but on caches.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast())
    }
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags))
    }
}

/// Sixteen f32 values.
#[allow(clippy::missing_safety_doc)] // the module text is the contract
pub trait Lanes: Copy {
    /// Whether the lanes are one register and there are 32 of those, room for a 4 by 4 tile of sums.
    const WIDE: bool = false;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    unsafe fn load_f16(p: *const u16) -> Self;
    unsafe fn load_bf16(p: *const u16) -> Self;
    /// The values with the bits `base + (code << 19)`, and zero for code 0.
    unsafe fn load_scales(p: *const u8, base: u32) -> Self;
    /// Rounds to nearest even, as `half` does.
    unsafe fn store_f16(self, p: *mut u16);
    unsafe fn load_i8(p: *const i8) -> Self;
    /// Integers in -128..=127 to bytes.
    unsafe fn store_i8(self, p: *mut i8);
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn div(self, b: Self) -> Self;
    /// `self * b + c`, fused where the instruction set fuses.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    unsafe fn max(self, b: Self) -> Self;
    unsafe fn min(self, b: Self) -> Self;
    /// Bit `i` is set where lane `i` is less than that of `b`.
    unsafe fn less(self, b: Self) -> u16;
    unsafe fn abs(self) -> Self;
    /// Nearest integer, halves to even.
    unsafe fn round(self) -> Self;
    /// `2^self` for integers in -126..=127.
    unsafe fn exp2_int(self) -> Self;
    /// Unnormalised Walsh-Hadamard transform of the 16 lanes.
    unsafe fn hadamard16(self) -> Self;

    /// Sum of the lanes, in one fixed order: halves, quarters, pairs.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let mut x = [0.0f32; LANES];
            self.store(x.as_mut_ptr());
            let mut n = LANES / 2;
            while n > 0 {
                for i in 0..n {
                    x[i] += x[i + n];
                }
                n /= 2;
            }
            x[0]
        }
    }

    /// Largest lane.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let mut x = [0.0f32; LANES];
            self.store(x.as_mut_ptr());
            x.into_iter().fold(f32::NEG_INFINITY, f32::max)
        }
    }

    /// `e^self`; relative error below 2e-7, 0 below -87.3.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        unsafe {
            // Range reduction with a two-part ln 2 (Cody and Waite), then a polynomial on [-ln2/2, ln2/2].
            let x = self.max(Self::splat(-87.33)).min(Self::splat(88.0));
            let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
            let r = n.fma(Self::splat(-0.693_359_4), x);
            let r = n.fma(Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.0 / 5040.0);
            for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
                p = p.fma(r, Self::splat(c));
            }
            p.mul(n.exp2_int())
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The checks every implementation must pass; run for each level by its own test.
    pub fn check<L: Lanes>() {
        let x: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.3) * 3.7);
        let y: [f32; 16] = std::array::from_fn(|i| 1.5 - i as f32 * 0.25);
        let run = |f: &dyn Fn(L, L) -> L| unsafe {
            let mut out = [0.0f32; 16];
            f(L::load(x.as_ptr()), L::load(y.as_ptr())).store(out.as_mut_ptr());
            out
        };
        unsafe {
            assert_eq!(run(&|a, b| a.add(b)), std::array::from_fn(|i| x[i] + y[i]));
            assert_eq!(run(&|a, b| a.sub(b)), std::array::from_fn(|i| x[i] - y[i]));
            assert_eq!(run(&|a, b| a.mul(b)), std::array::from_fn(|i| x[i] * y[i]));
            assert_eq!(run(&|a, b| b.div(a)), std::array::from_fn(|i| y[i] / x[i]));
            assert_eq!(run(&|a, b| a.max(b)), std::array::from_fn(|i| x[i].max(y[i])));
            assert_eq!(run(&|a, b| a.min(b)), std::array::from_fn(|i| x[i].min(y[i])));
            let less = L::load(x.as_ptr()).less(L::load(y.as_ptr()));
            assert_eq!(less, (0..16).fold(0, |m, i| m | u16::from(x[i] < y[i]) << i));
            assert_eq!(run(&|a, _| a.abs()), std::array::from_fn(|i| x[i].abs()));
            assert_eq!(run(&|a, _| a.round()), std::array::from_fn(|i| x[i].round_ties_even()));
            assert_eq!(run(&|a, _| a.round().exp2_int()), std::array::from_fn(|i| x[i].round_ties_even().exp2()));
            for (got, i) in run(&|a, b| a.fma(b, a)).into_iter().zip(0..) {
                assert!((got - (x[i] * y[i] + x[i])).abs() < 1e-4);
            }
            for (got, i) in run(&|a, _| a.exp()).into_iter().zip(0..) {
                let exact = f64::from(x[i]).exp();
                assert!((f64::from(got) / exact - 1.0).abs() < 3e-7, "exp({}) = {got}", x[i]);
            }
            for v in [-1000.0f32, 200.0, 0.0] {
                let got = L::splat(v).exp().largest();
                assert!(got.is_finite() && (v != 0.0 || got == 1.0) && (v > -100.0 || got < 2e-38), "exp({v}) = {got}");
            }
            let mut truth = x;
            crate::quant::rotate::hadamard(&mut truth);
            for (a, b) in run(&|a, _| a.hadamard16()).into_iter().zip(truth) {
                assert!((a - b).abs() < 1e-3, "{a} {b}");
            }
            assert!((L::load(x.as_ptr()).sum() - x.iter().sum::<f32>()).abs() < 1e-3);
            assert_eq!(L::load(x.as_ptr()).largest(), x[15]);
            let bits: [u16; 16] = std::array::from_fn(|i| half::f16::from_f32(x[i]).to_bits());
            let mut out = [0u16; 16];
            L::load(x.as_ptr()).store_f16(out.as_mut_ptr());
            assert_eq!(out, bits);
            let mut back = [0.0f32; 16];
            L::load_f16(bits.as_ptr()).store(back.as_mut_ptr());
            assert_eq!(back, bits.map(|b| half::f16::from_bits(b).to_f32()));
            let bits: [u16; 16] = std::array::from_fn(|i| half::bf16::from_f32(x[i]).to_bits());
            L::load_bf16(bits.as_ptr()).store(back.as_mut_ptr());
            assert_eq!(back, bits.map(|b| half::bf16::from_bits(b).to_f32()));
            let scales = crate::quant::trellis::ScaleCode::for_largest(0.37);
            for first in 0..=240u8 {
                let bytes: [u8; 16] = std::array::from_fn(|i| first + i as u8);
                L::load_scales(bytes.as_ptr(), scales.base).store(back.as_mut_ptr());
                assert_eq!(back, bytes.map(|b| scales.value(b)));
            }
            let bytes: [i8; 16] = std::array::from_fn(|i| (i as i8 - 8) * 16);
            L::load_i8(bytes.as_ptr()).store(back.as_mut_ptr());
            assert_eq!(back, bytes.map(f32::from));
            let mut out = [0i8; 16];
            L::load(back.as_ptr()).store_i8(out.as_mut_ptr());
            assert_eq!(out, bytes);
        }
    }

    #[test]
    fn scalar() {
        check::<Scalar>();
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx2() {
        if crate::kernels::Level::Avx2.available() {
            check::<Avx2>();
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx512() {
        if crate::kernels::Level::Avx512.available() {
            check::<Avx512>();
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[test]
    fn neon() {
        check::<Neon>();
    }
}
