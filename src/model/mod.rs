//! What a network is: specification, import of foreign checkpoints, conversion, bundles.

pub mod import;
