//! What a network is: specification, import of foreign checkpoints, conversion, bundles.

mod bert;
pub mod bundle;
pub mod calibrate;
mod choice;
mod config;
pub mod convert;
pub mod decoder;
mod encoder;
pub mod export;
pub mod families;
pub mod import;
mod moments;
mod record;
mod source;
pub mod spec;
pub(crate) mod staging;
mod survey;
pub mod text_encoder;
mod usage;
mod work;

pub use bundle::Bundle;
