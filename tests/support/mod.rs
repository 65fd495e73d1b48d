//! What several test modules need: places, conversion, a net that runs token ids.

mod net;

pub use net::Net;

use cactus::model::Bundle;
use cactus::model::bundle::Provenance;
use cactus::model::convert::{Options, convert};
use cactus::model::import::Checkpoint;
use std::path::{Path, PathBuf};

/// A file or folder of the repository.
pub fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Converts a checkpoint in this process, embedding and head at `bits` too.
pub fn bundle(checkpoint: &Path, target: &Path, bits: u32) -> Bundle {
    let options = Options { bits, head_bits: Some(bits), source: Provenance { name: "test".into(), revision: None } };
    let checkpoint = Checkpoint::open(checkpoint).expect("a sound checkpoint");
    convert(&checkpoint, target, &options, &mut |_| {}).expect("a conversion");
    Bundle::open(target).expect("a sound bundle")
}

/// Index of the largest value; the first of equals.
pub fn argmax(values: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best as u32
}
