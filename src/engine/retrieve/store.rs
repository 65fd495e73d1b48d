//! What is kept of a folder from one time to the next.
//!
//! A file: eight bytes `CACTUSP1`, the length of the header as a little-endian u64, the header (JSON: key, and for every file
//! its stamp, hash and passages), then the vectors as little-endian f32 in the same order. It is a cache: what does not fit
//! is made again.

use super::super::embed::Embedder;
use super::super::own_file;
use super::Passage;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;

const MAGIC: &[u8; 8] = b"CACTUSP1";

/// Whose index it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Key {
    folder: String,
    model: String,
    dim: usize,
}

impl Key {
    pub fn new(dir: &Path, embedder: &Embedder) -> Result<Self> {
        let folder = dir.canonicalize().map_err(|e| Error::io("find", dir, &e))?.to_string_lossy().into_owned();
        let model = embedder.bundle().identity().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Key { folder, model, dim: embedder.dim() })
    }

    pub fn file_name(&self) -> String {
        format!("{}.passages", &hash(&format!("{}\n{}", self.folder, self.model))[..32])
    }
}

/// What is known of a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    pub stamp: String,
    /// SHA-256 of the text.
    pub hash: String,
    pub passages: Vec<Passage>,
    /// `[passages, dim]`
    #[serde(skip)]
    pub vectors: Vec<f32>,
}

#[derive(Serialize, Deserialize)]
struct Header<K, E> {
    key: K,
    files: Vec<(String, E)>,
}

/// SHA-256 in hexadecimal.
pub fn hash(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is kept under this key; `None` when there is nothing sound.
pub fn read(path: &Path, key: &Key) -> Option<HashMap<String, Entry>> {
    let bytes = std::fs::read(path).ok()?;
    let (length, rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok().filter(|length| *length <= rest.len())?;
    let (header, vectors) = rest.split_at(length);
    let header: Header<Key, Entry> = serde_json::from_slice(header).ok()?;
    if header.key != *key {
        return None;
    }
    let mut values = vectors.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let mut files = HashMap::new();
    for (name, mut entry) in header.files {
        let count = entry.passages.len().checked_mul(key.dim)?;
        entry.vectors = values.by_ref().take(count).collect();
        if entry.vectors.len() != count || entry.vectors.iter().any(|x| !x.is_finite()) {
            return None;
        }
        files.insert(name, entry);
    }
    Some(files)
}

/// Writes the index beside its name and renames it.
pub fn write(path: &Path, key: &Key, files: &[(String, Entry)]) -> Result<()> {
    let entries: Vec<(String, &Entry)> = files.iter().map(|(name, entry)| (name.clone(), entry)).collect();
    let header = serde_json::to_vec(&Header { key, files: entries }).unwrap_or_default();
    own_file::replace(path, |file| {
        let mut out = std::io::BufWriter::new(file);
        out.write_all(MAGIC)?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for value in files.iter().flat_map(|(_, entry)| &entry.vectors) {
            out.write_all(&value.to_le_bytes())?;
        }
        out.flush()
    })
}
