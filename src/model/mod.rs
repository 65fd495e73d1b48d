//! What a network is: specification, import of foreign checkpoints, conversion, bundles.

pub mod bundle;
pub mod calibrate;
mod config;
pub mod convert;
pub mod decoder;
pub mod export;
pub mod families;
pub mod import;
mod source;
pub mod spec;
mod staging;

pub use bundle::Bundle;
