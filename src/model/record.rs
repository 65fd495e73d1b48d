//! What a conversion needs to go on after it was stopped: a record beside the weights file that it has begun.
//!
//! The record is written between layers and covers everything before it. It carries hashes of itself, of the
//! weights and of the streams, so what a crash left incomplete is found and not used.

use super::convert::Options;
use super::families::ModelPlan;
use super::import::Checkpoint;
use super::staging::RECORD;
use crate::error::{Error, Result};
use crate::kernels::Level;
use crate::quant::Format;
use crate::quant::encode::SquareError;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

/// How far a conversion has come.
#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    /// See [`key`].
    key: String,
    /// See [`ModelPlan::in_parts`]; the rest is of the plan with these parts.
    pub parts: Vec<usize>,
    /// Of every tensor.
    pub formats: Vec<Format>,
    /// What the choice of formats expects every tensor to add to the divergence of the output.
    expected: Vec<Option<ExactF64>>,
    /// Of every finished tensor: sums of squares of weights and of errors.
    errors: Vec<[ExactF64; 2]>,
    /// Bytes of the weights file that hold the finished tensors, and their SHA-256.
    bytes: u64,
    sha256: String,
    streams: Option<Streams>,
}

/// The file that holds the residual streams as f32, one after the other.
#[derive(Debug, Serialize, Deserialize)]
struct Streams {
    file: String,
    sha256: String,
}

/// A number by its bits: as text it could come back another one.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct ExactF64(u64);

impl From<f64> for ExactF64 {
    fn from(x: f64) -> Self {
        ExactF64(x.to_bits())
    }
}

/// A sound record and what it refers to.
pub struct Found {
    pub record: Record,
    /// Bytes of the weights file that are good, and the state of their hash.
    pub bytes: u64,
    pub hash: Sha256,
    /// `None`: no tensor is finished.
    pub streams: Option<Vec<f32>>,
}

impl Found {
    /// Nothing yet.
    pub fn new(record: Record) -> Self {
        Found { record, bytes: 0, hash: Sha256::new(), streams: None }
    }
}

impl Record {
    /// For work that has only been planned.
    pub fn new(key: &str, parts: Vec<usize>, formats: Vec<Format>, expected: Vec<Option<f64>>) -> Self {
        let expected = expected.into_iter().map(|x| x.map(ExactF64::from)).collect();
        let (errors, sha256) = (Vec::new(), String::new());
        Record { key: key.to_owned(), parts, formats, expected, errors, bytes: 0, sha256, streams: None }
    }

    /// Tensors that are finished.
    pub fn finished(&self) -> usize {
        self.errors.len()
    }

    /// Another tensor is finished.
    pub fn push(&mut self, error: SquareError) {
        self.errors.push([error.signal.into(), error.noise.into()]);
    }

    /// Error of a finished tensor.
    pub fn error(&self, tensor: usize) -> SquareError {
        let [signal, noise] = self.errors[tensor].map(|x| f64::from_bits(x.0));
        SquareError { signal, noise }
    }

    pub fn expected(&self, tensor: usize) -> Option<f64> {
        self.expected[tensor].map(|x| f64::from_bits(x.0))
    }

    /// Writes the record to `dir`, where `bytes` bytes of the weights file with this hash are finished, and
    /// the residual streams of that moment.
    pub fn write(&mut self, dir: &Path, bytes: u64, hash: &Sha256, streams: &[&[f32]]) -> Result<()> {
        (self.bytes, self.sha256) = (bytes, hex(hash.clone()));
        self.streams = None;
        if !streams.is_empty() {
            let file = format!("{RECORD}.streams-{}", self.errors.len());
            let path = dir.join(&file);
            let mut hash = Sha256::new();
            let mut out = File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
            for stream in streams {
                let bytes: &[u8] = bytemuck::cast_slice(stream);
                hash.update(bytes);
                out.write_all(bytes).map_err(|e| Error::io("write", &path, &e))?;
            }
            self.streams = Some(Streams { file, sha256: hex(hash) });
        }
        let text = serde_json::to_string(self).map_err(|e| Error::unsupported(format!("the record of a conversion: {e}")))?;
        let (path, next) = (dir.join(RECORD), dir.join(format!("{RECORD}.next")));
        fs::write(&next, format!("{}\n{text}", hex(Sha256::new_with_prefix(&text))))
            .map_err(|e| Error::io("write", &next, &e))?;
        fs::rename(&next, &path).map_err(|e| Error::io("write", &path, &e))?;
        remove_files(dir, |name| name != RECORD && self.streams.as_ref().is_none_or(|s| s.file != name));
        Ok(())
    }

    /// Reads the record in `dir` for work of this key, and checks everything that it says; `None` when there
    /// is none or something is wrong with it. `weights` is the name of the weights file.
    pub fn read(dir: &Path, key: &str, weights: &str) -> Option<Found> {
        let text = fs::read_to_string(dir.join(RECORD)).ok()?;
        let (sum, text) = text.split_once('\n')?;
        if sum != hex(Sha256::new_with_prefix(text)) {
            return None;
        }
        let record: Record = serde_json::from_str(text).ok()?;
        if record.key != key || record.errors.len() > record.formats.len() || record.expected.len() != record.formats.len() {
            return None;
        }
        let mut hash = Sha256::new();
        if record.bytes > 0 {
            let mut file = File::open(dir.join(weights)).ok()?.take(record.bytes);
            let mut part = vec![0; 1 << 20];
            loop {
                match file.read(&mut part).ok()? {
                    0 => break,
                    n => hash.update(&part[..n]),
                }
            }
            if file.limit() > 0 || hex(hash.clone()) != record.sha256 {
                return None;
            }
        }
        let streams = match &record.streams {
            Some(Streams { file, sha256 }) => {
                let mut file = File::open(dir.join(file)).ok()?;
                let mut values = vec![0.0f32; usize::try_from(file.metadata().ok()?.len()).ok()? / 4];
                file.read_exact(bytemuck::cast_slice_mut(&mut values)).ok()?;
                let bytes: &[u8] = bytemuck::cast_slice(&values);
                if hex(Sha256::new_with_prefix(bytes)) != *sha256 {
                    return None;
                }
                Some(values)
            }
            None if record.errors.is_empty() => None,
            None => return None,
        };
        Some(Found { bytes: record.bytes, record, hash, streams })
    }
}

/// Removes the record from a folder whose bundle is complete.
pub fn remove(dir: &Path) {
    remove_files(dir, |_| true);
}

/// Removes files of the record, also such as a killed process has left.
fn remove_files(dir: &Path, which: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(RECORD) && which(&name) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Identifies work: the same key, the same bytes. From the checkpoint (shapes, sizes and times of its files), the
/// options with all sample tokens, the instruction set and the program.
pub fn key(checkpoint: &Checkpoint, plan: &ModelPlan, options: &Options) -> String {
    let file = |data: std::io::Result<fs::Metadata>| data.ok().map(|data| (data.len(), data.modified().ok()));
    let mut hash = Sha256::new();
    let mut add = |text: String| hash.update(text + "\n");
    // While a version is in the making, builds of it differ.
    let program = file(std::env::current_exe().and_then(fs::metadata));
    add(format!("{} {program:?} {:?}", env!("CARGO_PKG_VERSION"), Level::best(None)));
    add(format!("{options:?} {:?} {:?}", plan.spec, plan.tensors));
    for (name, tensor) in &checkpoint.tensors {
        let data = file(tensor.file.file.metadata());
        add(format!("{name} {:?} {:?} {:?} {} {data:?}", tensor.shape, tensor.encoding, tensor.order, tensor.offset));
    }
    hex(hash)
}

/// The hash in hexadecimal.
pub fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
