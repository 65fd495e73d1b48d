//! CQ weight formats: what the bytes mean, how they are made and how they are read back slowly.
//!
//! A matrix `W [rows, cols]` is cut into groups of 128 input channels. Every group is rotated by a fixed
//! randomised Hadamard transform, divided by a scale and rounded to a small codebook. Grids that a checkpoint has
//! already can be kept instead ([`blocks`], [`book`]). Nothing here knows
//! about instruction sets: [`decode`] is the truth that the kernels are judged by.

pub mod allocate;
pub mod bits;
pub mod blocks;
pub mod book;
pub mod codebook;
pub mod decode;
pub mod encode;
pub mod encode_trellis;
pub mod feedback;
pub mod format;
pub mod pack;
pub mod rotate;
pub mod trellis;

pub use bits::Bits;
pub use format::{Code, CqLayout, Format, Rotation};
