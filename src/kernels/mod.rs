//! Compute kernels per instruction set, chosen at run time.
//!
//! Kernels take slices and `quant` layouts, nothing else. The arithmetic is written once, over 16 logical
//! f32 lanes ([`vector::Lanes`]) and 64 logical bytes ([`matmul_quant::tile::Bytes64`]); each instruction set supplies
//! those two types. So every set adds in the same order, and a result does not depend on the number of
//! threads or on how tokens are grouped.

// The only room besides the mapping of bundles that may use `unsafe`.
#![allow(unsafe_code)]

pub mod attention;
pub mod attention_int8;
pub mod elementwise;
mod huge_pages;
pub mod layer_norm;
pub mod matmul_float;
pub mod matmul_quant;
pub mod norm;
pub mod rope;
pub mod rotate;
pub mod threads;
pub mod topology;
pub mod trellis_search;
pub mod variant;
mod vector;

pub use huge_pages::HugePages;
pub use threads::Pool;
pub use topology::Topology;
pub use variant::Level;

/// Heads side by side in the columns of a matrix whose rows have `stride` columns.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub stride: usize,
    /// First column of the first head.
    pub start: usize,
    pub count: usize,
    /// Columns of a head.
    pub dim: usize,
}

impl Heads {
    /// Rows of a matrix of `elements`; panics when the heads do not fit.
    fn rows(&self, elements: usize) -> usize {
        assert!(elements.is_multiple_of(self.stride) && self.start + self.count * self.dim <= self.stride);
        elements / self.stride
    }
}

/// The types that generic kernels are compiled for, by the names that `variants!` uses.
mod kinds {
    pub use super::matmul_quant::kinds::*;
    #[cfg(target_arch = "aarch64")]
    pub use super::vector::Neon;
    pub use super::vector::Scalar;
    #[cfg(target_arch = "x86_64")]
    pub use super::vector::{Avx2, Avx512};
}
