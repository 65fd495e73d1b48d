//! On-device AI: read a checkpoint, make its weights very small, run it fast on an ordinary CPU.
//!
//! Rooms, left to right; a file uses its own room and rooms to its right:
//! `engine` (load, session, generate) → `model` (what a net is, conversion, bundles) → `graph` (how it is
//! computed) → `kernels` (per CPU) → `quant` (what the bytes mean). `hub` (finding and fetching
//! checkpoints) stands beside `model`.

pub mod engine;
pub mod error;
pub mod graph;
pub mod hub;
pub mod kernels;
pub mod model;
pub mod quant;

/// The example in the README is compiled with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
