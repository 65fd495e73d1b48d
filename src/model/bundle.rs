//! The bundle: a converted model on disk, mapped and used as it is.
//!
//! A folder with `cactus.json` (everything but the weights), `weights.safetensors` (mapped; every tensor
//! 64-byte aligned) and the tokenizer files. See `docs/bundle-format.md`.

use super::spec::{Decoder, Spec};
use crate::error::{Error, Result};
use crate::graph::Weight;
use crate::kernels::HugePages;
use crate::quant::book::Book;
use crate::quant::codebook::Codebook;
use crate::quant::decode::valid_header;
use crate::quant::rotate::SIGN_BITS;
use crate::quant::{Bits, Code, Format};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Version of the format; a reader refuses others.
pub const FORMAT_VERSION: u32 = 1;
pub const MANIFEST: &str = "cactus.json";
pub const WEIGHTS: &str = "weights.safetensors";
pub const TOKENIZER: &str = "tokenizer.json";
/// Made when a bundle is first opened; see `engine/bpe.rs`.
pub const TOKENIZER_IMAGE: &str = "tokenizer.image";
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
pub const GENERATION_CONFIG: &str = "generation_config.json";
/// The checkpoint's `config.json` as it was, or one made from the metadata of a GGUF file.
pub const SOURCE_CONFIG: &str = "source_config.json";

/// What `cactus.json` holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    pub format_version: u32,
    /// Version of the program that wrote the bundle.
    pub written_by: String,
    /// Name of the family that the checkpoint was read as; informative.
    pub family: String,
    pub source: Provenance,
    pub quantiser: Quantiser,
    pub spec: Spec,
    /// SHA-256 of `weights.safetensors` in hexadecimal; empty in bundles that were written without.
    #[serde(default)]
    pub weights_sha256: String,
    pub tensors: BTreeMap<String, TensorEntry>,
}

impl Manifest {
    /// What continues a text.
    ///
    /// # Errors
    /// `Unsupported` when the model only turns texts into vectors.
    pub fn decoder(&self) -> Result<&Decoder> {
        self.spec.decoder().ok_or_else(|| {
            Error::unsupported(format!("{} is an embedding model and writes no text", self.source.name))
                .with_hint("use it with `cactus embed`")
        })
    }
}

/// Where the weights came from.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Provenance {
    /// Hub name or file name.
    pub name: String,
    /// Commit on the hub.
    pub revision: Option<String>,
}

/// How the weights were made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Quantiser {
    /// Bits asked for.
    pub bits: Bits,
    /// Everything stored, in bits, by the number of weights.
    pub bits_per_weight: f64,
    /// Tokens of sample text that the rounding was fitted to; 0: plain rounding.
    pub calibration_tokens: usize,
    /// What text that was: `shipped`, `generated` (by the model itself) or `file`, each with its tokens, such as
    /// `generated 2048, shipped 2048`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub calibration_text: String,
    /// Signs of the rotation, 128 bits, lowest channel in the lowest bit, as two hexadecimal words.
    pub rotation_signs: [String; 2],
    /// Integer levels by bits, for the widths that are used.
    pub codebooks: BTreeMap<String, Vec<i8>>,
}

/// Shape and format of a tensor of `weights.safetensors`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    /// Relative Frobenius error of the stored values.
    pub relative_error: f64,
    /// Checkpoint tensors whose rows it stacks, in row order; empty in bundles written without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceShape>,
    /// The row of the stack that it begins with, where it is a part of a table.
    #[serde(default, skip_serializing_if = "is_default")]
    pub first_row: usize,
    /// What Hugging Face checkpoints leave out of every value: 1 where they store `w` and mean `1 + w`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub left_out: f32,
}

/// A tensor of the checkpoint: its Hugging Face name and its shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceShape {
    pub name: String,
    pub shape: Vec<usize>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The rotation signs as the manifest spells them.
pub fn rotation_signs() -> [String; 2] {
    SIGN_BITS.map(|w| format!("{w:016x}"))
}

/// The codebook levels for `bits` as the manifest spells them.
pub fn codebook_levels(bits: usize) -> Vec<i8> {
    Codebook::get(bits).levels[..1 << bits].to_vec()
}

/// An opened bundle.
#[derive(Debug)]
pub struct Bundle {
    pub path: PathBuf,
    pub manifest: Manifest,
    pub tokenizer_config: Value,
    pub generation_config: Option<Value>,
    pub chat_template: Option<String>,
    weights: memmap2::Mmap,
    huge_pages: HugePages,
    places: BTreeMap<String, std::ops::Range<usize>>,
}

impl Bundle {
    /// Whether `path` looks like a bundle.
    pub fn is_bundle(path: &Path) -> bool {
        path.join(MANIFEST).is_file()
    }

    /// Opens and checks a bundle; weights are mapped, not read.
    pub fn open(path: &Path) -> Result<Self> {
        let manifest = Self::read_manifest(path)?;
        let manifest_path = path.join(MANIFEST);
        manifest.spec.check().map_err(|e| e.context(manifest_path.display()))?;
        for (bits, levels) in &manifest.quantiser.codebooks {
            let known = bits.parse().ok().filter(|b| (1..=4).contains(b)).map(codebook_levels);
            if known.as_ref() != Some(levels) {
                return Err(Error::unsupported(format!(
                    "{}: a codebook for {bits} bits that this version does not know",
                    manifest_path.display()
                )));
            }
        }
        if manifest.quantiser.rotation_signs != rotation_signs() {
            return Err(Error::unsupported(format!("{}: a rotation that this version does not know", manifest_path.display())));
        }
        let weights_path = path.join(WEIGHTS);
        let weights = map(&weights_path)?;
        let places = places(&weights).map_err(|what| {
            // The reader for checkpoints says more about a file that is cut or is none.
            let error = super::import::check_safetensors(&weights_path).err();
            error.unwrap_or_else(|| Error::bad_file(&weights_path, what)).with_hint("convert the model again")
        })?;
        let bundle = Bundle {
            huge_pages: HugePages::new(&weights),
            path: path.to_path_buf(),
            tokenizer_config: read_json(&path.join(TOKENIZER_CONFIG))?.unwrap_or(Value::Object(Default::default())),
            generation_config: read_json(&path.join(GENERATION_CONFIG))?,
            chat_template: read_text(&path.join(CHAT_TEMPLATE))?,
            manifest,
            weights,
            places,
        };
        for name in bundle.manifest.tensors.keys() {
            bundle.weight(name)?;
        }
        Ok(bundle)
    }

    /// Reads only `cactus.json`.
    pub fn read_manifest(path: &Path) -> Result<Manifest> {
        let manifest_path = path.join(MANIFEST);
        let value = read_json(&manifest_path)?
            .ok_or_else(|| Error::not_found(format!("{} is no bundle: it has no {MANIFEST}", path.display())))?;
        match value.get("format_version").and_then(Value::as_u64) {
            Some(v) if v == u64::from(FORMAT_VERSION) => {}
            v => {
                let v = v.map_or("none".to_owned(), |v| v.to_string());
                return Err(Error::unsupported(format!(
                    "{}: bundle format version {v}, this program reads {FORMAT_VERSION}",
                    manifest_path.display()
                ))
                .with_hint("convert the model again with this version"));
            }
        }
        serde_json::from_value(value).map_err(|e| Error::bad_file(&manifest_path, e))
    }

    /// The configuration of the checkpoint; `None` in bundles written without.
    pub fn source_config(&self) -> Result<Option<Value>> {
        read_json(&self.path.join(SOURCE_CONFIG))
    }

    /// A tensor by name, checked against the manifest and the mapped file.
    pub fn weight(&self, name: &str) -> Result<Weight> {
        let weights_path = self.path.join(WEIGHTS);
        let missing = || Error::bad_file(&weights_path, format!("tensor {name} is missing"));
        let entry = self.manifest.tensors.get(name).ok_or_else(missing)?;
        let range = self.places.get(name).ok_or_else(missing)?.clone();
        let weight = Weight { name: name.to_owned(), rows: entry.rows, cols: entry.cols, format: entry.format, range };
        weight.check(self.weights.len()).map_err(|e| e.context(weights_path.display()))?;
        let bytes = &self.weights[weight.range.clone()];
        let valid = match weight.layout() {
            Some(layout) if layout.code == Code::Book => Book::valid(&layout, bytes),
            Some(layout) if layout.code == Code::Trellis => valid_header(bytes),
            _ => true,
        };
        if !valid {
            return Err(Error::bad_file(&weights_path, format!("tensor {name} has levels or scales out of range")));
        }
        Ok(weight)
    }

    /// The mapped file that weights point into.
    pub fn bytes(&self) -> &[u8] {
        &self.weights
    }

    /// Tells this model from others: the SHA-256 of the weights and the architecture.
    pub fn identity(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        if self.manifest.weights_sha256.is_empty() {
            hash.update(Sha256::digest(self.bytes()));
        } else {
            hash.update(&self.manifest.weights_sha256);
        }
        hash.update(serde_json::to_vec(&self.manifest.spec).unwrap_or_default());
        hash.finalize().into()
    }

    /// Moves 2 MB of the mapped file to a huge page; false when none are left, see [`HugePages`].
    pub fn move_to_huge_page(&self) -> bool {
        self.huge_pages.advance(&self.weights)
    }
}

/// Maps a file for reading.
#[allow(unsafe_code)]
fn map(path: &Path) -> Result<memmap2::Mmap> {
    let file = File::open(path).map_err(|e| Error::io("open", path, &e))?;
    // SAFETY: bundles are published by one rename and never written in place, so the mapped bytes stay as
    // they are; a file that someone truncates under us is outside what a program can guard against.
    unsafe { memmap2::Mmap::map(&file) }.map_err(|e| Error::io("map", path, &e))
}

/// Byte ranges of the tensors in a safetensors file.
fn places(file: &[u8]) -> Result<BTreeMap<String, std::ops::Range<usize>>, String> {
    let (header, metadata) = safetensors::SafeTensors::read_metadata(file).map_err(|e| e.to_string())?;
    // `header` is the length of the JSON text; eight bytes come before it.
    let start = header + 8;
    let end = metadata.data_len() + start;
    if end != file.len() {
        return Err(format!("has {} bytes where its header needs {end}", file.len()));
    }
    let range = |(a, b): (usize, usize)| start + a..start + b;
    Ok(metadata.tensors().into_iter().map(|(name, info)| (name, range(info.data_offsets))).collect())
}

/// Reads a JSON file; `None` when it does not exist.
fn read_json(path: &Path) -> Result<Option<Value>> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|e| Error::bad_file(path, e))
}

fn read_text(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => Err(Error::bad_file(path, "is not UTF-8 text")),
        Err(e) => Err(Error::io("read", path, &e)),
    }
}
