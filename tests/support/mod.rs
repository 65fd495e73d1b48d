//! What several test modules need: places, commands, conversion, checkpoints made on the fly.

mod checkpoint;
mod command;
mod gguf;
pub mod hub;
mod official;
pub mod proxy;
pub mod server;

pub use checkpoint::{LARGEST, synthetic};
pub use command::{Finished, Home, finish};
pub use gguf::{Kind, as_gguf, as_gguf_cut_by, as_gguf_of_kinds};
pub use official::{as_official, as_official_of};

use cactus::engine::{Engine, LoadOptions};
use cactus::kernels::Level;
use cactus::model::bundle::Provenance;
use cactus::model::convert::{Options, convert};
use cactus::model::import::Checkpoint;
use cactus::quant::Bits;
use std::path::{Path, PathBuf};

/// A file or folder of the repository.
pub fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Converts a checkpoint in this process.
pub fn bundle(checkpoint: &Path, target: &Path, bits: u32) {
    let options = plain_options(bits);
    let checkpoint = Checkpoint::open(checkpoint).expect("a sound checkpoint");
    convert(&checkpoint, target, &options, &mut |_| Ok(())).expect("a conversion");
}

/// Conversion to so many bits without calibration.
pub fn plain_options(bits: u32) -> Options {
    let bits = Bits::new(f64::from(bits)).expect("a number of bits");
    Options::plain(bits, Provenance { name: "test".into(), revision: None })
}

/// Opens a bundle at an instruction-set level.
pub fn engine(bundle: &Path, level: Level) -> Engine {
    Engine::load(bundle, &LoadOptions { threads: Some(2), ceiling: Some(level), ..Default::default() }).expect("a sound bundle")
}

/// Converts a golden checkpoint to a mixture of widths. Few ids make up the text, so tables are stored in parts.
pub fn mixture(checkpoint: &Path, target: &Path) {
    let checkpoint = Checkpoint::open(checkpoint).expect("a sound checkpoint");
    let text: Vec<u32> = (0..400u32).map(|i| i.wrapping_mul(2_654_435_761) >> 20 & if i % 8 == 0 { 511 } else { 63 }).collect();
    let plain = Options::plain(Bits::new(3.3).expect("bits"), Provenance::default());
    let options = Options { calibration: vec![text], sequential: Some(0.5), ..plain };
    convert(&checkpoint, target, &options, &mut |_| Ok(())).expect("a conversion");
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

/// Largest difference over the largest expected value; infinite when something is not a number.
pub fn relative(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest =
        |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, |a: f32, b| if b.is_nan() { f32::INFINITY } else { a.max(b) });
    let difference = largest(&mut got.iter().zip(expected).map(|(a, b)| (a - b).abs()));
    difference / largest(&mut expected.iter().map(|v| v.abs()))
}
