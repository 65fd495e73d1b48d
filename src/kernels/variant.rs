//! Instruction-set levels, detection, and the choice of a kernel variant.

use std::fmt;

/// Instruction-set levels, from the plainest to the best of each architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Plain Rust; the truth for every other variant.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VNNI and VBMI, and with GFNI: Ice Lake, Zen 4 and later. CPUs with only
    /// a part of that (Skylake, Cascade Lake) run [`Level::Avx2`].
    Avx512,
    /// AArch64 with Advanced SIMD.
    Neon,
    /// AArch64 with the dot-product instructions.
    NeonDot,
    /// AArch64 with the int8 matrix-product instructions as well.
    NeonI8mm,
}

impl Level {
    pub const ALL: [Level; 6] = [Level::Scalar, Level::Avx2, Level::Avx512, Level::Neon, Level::NeonDot, Level::NeonI8mm];

    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
            Level::NeonDot => "neon-dotprod",
            Level::NeonI8mm => "neon-i8mm",
        }
    }

    /// Whether this CPU can run the level.
    pub fn available(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("gfni")
            }
            #[cfg(target_arch = "aarch64")]
            Level::Neon => true,
            #[cfg(target_arch = "aarch64")]
            Level::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Level::NeonI8mm => Level::NeonDot.available() && std::arch::is_aarch64_feature_detected!("i8mm"),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The levels that this CPU can run, plainest first.
    pub fn supported() -> impl Iterator<Item = Level> {
        Self::ALL.into_iter().filter(|l| l.available())
    }

    /// The best level of this CPU that is not above `ceiling` (`None`: no ceiling).
    pub fn best(ceiling: Option<Level>) -> Level {
        Self::supported().filter(|l| ceiling.is_none_or(|c| *l <= c)).last().unwrap_or(Level::Scalar)
    }

    /// Reads a ceiling as in `CACTUS_CPU`; `Err` lists the names.
    pub fn parse(name: &str) -> Result<Level, String> {
        Self::ALL
            .into_iter()
            .find(|l| l.name() == name)
            .ok_or_else(|| format!("{name} is no instruction-set level; known: {}", Self::ALL.map(Level::name).join(", ")))
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Compiles one generic kernel for every level and makes `$name::select(level)` return the function for it.
///
/// The generic function takes the level's type as its last type parameter. The returned function is unsafe:
/// the CPU must have the level, which [`Level::best`] guarantees.
macro_rules! variants {
    ($(#[$doc:meta])* $name:ident = $generic:ident $([$($const:expr),+])? as fn($($arg:ident : $ty:ty),* $(,)?); $scalar:ident $avx2:ident $avx512:ident $neon:ident $dot:ident $i8mm:ident) => {
        $(#[$doc])*
        pub(super) mod $name {
            #[allow(unused_imports)]
            use super::*;
            use $crate::kernels::variant::Level;

            pub type Run = unsafe fn($($ty),*);

            unsafe fn scalar($($arg: $ty),*) {
                unsafe { $generic::<$($($const,)+)? $crate::kernels::kinds::$scalar>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                unsafe { $generic::<$($($const,)+)? $crate::kernels::kinds::$avx2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni")]
            unsafe fn avx512($($arg: $ty),*) {
                unsafe { $generic::<$($($const,)+)? $crate::kernels::kinds::$avx512>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon")]
            unsafe fn neon($($arg: $ty),*) {
                unsafe { $generic::<$($($const,)+)? $crate::kernels::kinds::$neon>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            unsafe fn dot($($arg: $ty),*) {
                unsafe { $generic::<$($($const,)+)? $crate::kernels::kinds::$dot>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod,i8mm")]
            unsafe fn i8mm($($arg: $ty),*) {
                unsafe { $generic::<$($($const,)+)? $crate::kernels::kinds::$i8mm>($($arg),*) }
            }

            /// Variants of this kernel, plainest first.
            const VARIANTS: &[(Level, Run)] = &[
                (Level::Scalar, scalar),
                #[cfg(target_arch = "x86_64")]
                (Level::Avx2, avx2),
                #[cfg(target_arch = "x86_64")]
                (Level::Avx512, avx512),
                #[cfg(target_arch = "aarch64")]
                (Level::Neon, neon),
                #[cfg(target_arch = "aarch64")]
                (Level::NeonDot, dot),
                #[cfg(target_arch = "aarch64")]
                (Level::NeonI8mm, i8mm),
            ];

            pub fn select(level: Level) -> Run {
                assert!(level.available(), "this CPU has no {level}");
                VARIANTS.iter().rev().find(|(l, _)| *l <= level).map_or(scalar as Run, |(_, run)| *run)
            }
        }
    };
    ($(#[$doc:meta])* $name:ident = $generic:ident $([$($const:expr),+])? as fn($($arg:ident : $ty:ty),* $(,)?)) => {
        $crate::kernels::variant::variants! { $(#[$doc])* $name = $generic $([$($const),+])? as fn($($arg: $ty),*); Scalar Avx2 Avx512 Neon Neon Neon }
    };
}
pub(super) use variants;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ceilings() {
        assert_eq!(Level::best(Some(Level::Scalar)), Level::Scalar);
        assert!(Level::best(None).available());
        assert!(Level::parse("sse9").unwrap_err().contains("avx2"));
        assert_eq!(Level::parse("neon-dotprod"), Ok(Level::NeonDot));
    }

    /// `tests/aarch64.sh` names the level that the emulated CPU must reach, or the others would go untested.
    #[test]
    fn reaches_the_level_under_test() {
        if let Some(name) = std::env::var("CACTUS_TEST_BEST_LEVEL").ok().filter(|n| !n.is_empty()) {
            assert_eq!(Level::best(None).name(), name);
        }
    }
}
