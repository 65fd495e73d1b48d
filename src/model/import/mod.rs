//! Reading foreign checkpoints. Whatever the source, the outside sees one [`Checkpoint`]: a Hugging Face
//! style `config.json`, tensors under Hugging Face names, and the tokenizer files. Families, naming and
//! scale conventions end in [`super::families`]; nothing past the import knows where weights came from.

mod folder;
mod folder_tokenizer;
mod gguf;
mod gguf_blocks;
mod gguf_config;
mod gguf_header;
#[cfg(test)]
mod gguf_tests;
mod gguf_tokenizer;
pub mod official;
mod safetensors;
mod sentence;
mod sentencepiece;
mod sentencepiece_model;

pub use gguf_blocks::BlockType;
pub use sentence::SentenceFiles;

use crate::error::{Error, Result};
use crate::quant::blocks::Block;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How the elements of a source tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    F32,
    F16,
    BF16,
    /// A GGUF block format; rows are whole blocks.
    Block(BlockType),
    /// A file of an official bundle that decodes itself, so many bits a weight.
    Official(u8),
}

impl Encoding {
    /// Bytes of `elements` consecutive elements (a whole number of blocks), or `None` on overflow.
    pub fn bytes(self, elements: usize) -> Option<usize> {
        match self {
            Encoding::F32 => elements.checked_mul(4),
            Encoding::F16 | Encoding::BF16 => elements.checked_mul(2),
            Encoding::Block(b) => (elements / b.elements()).checked_mul(b.bytes()),
            Encoding::Official(bits) => elements.checked_mul(usize::from(bits)).map(|bits| bits / 8),
        }
    }
}

/// How rows of the stored tensor map to the rows that callers see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    Plain,
    /// GGUF stores the rotary rows of llama-type `q` and `k` projections interleaved per head; callers see
    /// the Hugging Face order (first halves, then second halves).
    RopePairs {
        heads: usize,
    },
}

impl RowOrder {
    /// Stored row that holds the caller's `row` of a tensor with `rows` rows.
    fn stored(self, row: usize, rows: usize) -> usize {
        match self {
            RowOrder::Plain => row,
            RowOrder::RopePairs { heads } => {
                let head_dim = rows / heads;
                let (head, within) = (row / head_dim, row % head_dim);
                let (half, pair) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * pair + half
            }
        }
    }
}

/// One tensor of a checkpoint: shape (row-major, outermost first) and where its bytes lie.
#[derive(Clone, Debug)]
pub struct SourceTensor {
    pub shape: Vec<usize>,
    pub encoding: Encoding,
    pub order: RowOrder,
    pub file: Arc<SourceFile>,
    /// Byte offset of the first element in the file. The range has been checked against the file size.
    pub offset: u64,
    /// The decoder of a file of an official bundle.
    pub official: Option<Arc<official::Tensor>>,
}

/// An open checkpoint file; reads are positioned, so threads share it.
#[derive(Debug)]
pub struct SourceFile {
    pub path: PathBuf,
    pub file: File,
    pub len: u64,
}

impl SourceFile {
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        // Asked before opening, because opening a pipe waits for a writer.
        let meta = std::fs::metadata(path).map_err(|e| Error::io("open", path, &e))?;
        if !meta.is_file() {
            return Err(Error::bad_file(path, "is not a regular file"));
        }
        let file = File::open(path).map_err(|e| Error::io("open", path, &e))?;
        Ok(Arc::new(SourceFile { path: path.to_path_buf(), file, len: meta.len() }))
    }

    /// Fills `out` from `offset`; a file that ends early is a [`BadFile`](crate::error::Kind::BadFile) error.
    pub fn read_exact_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        #[cfg(unix)]
        let done = std::os::unix::fs::FileExt::read_exact_at(&self.file, out, offset);
        #[cfg(windows)]
        let done = {
            let (mut at, mut rest) = (offset, &mut out[..]);
            loop {
                if rest.is_empty() {
                    break Ok(());
                }
                match std::os::windows::fs::FileExt::seek_read(&self.file, rest, at) {
                    Ok(0) => break Err(std::io::ErrorKind::UnexpectedEof.into()),
                    Ok(n) => (at, rest) = (at + n as u64, &mut rest[n..]),
                    Err(e) => break Err(e),
                }
            }
        };
        done.map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                Error::bad_file(&self.path, "the file ends early").with_hint("download it again")
            }
            _ => Error::io("read", &self.path, &e),
        })
    }
}

impl SourceTensor {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
    /// Rows: the outermost dimension (1 for a vector).
    pub fn rows(&self) -> usize {
        if self.shape.len() < 2 { 1 } else { self.shape[0] }
    }
    /// Elements in a row: everything inside the outermost dimension.
    pub fn width(&self) -> usize {
        self.elements() / self.rows().max(1)
    }

    /// Decodes `rows` to f32, row after row, into `out` (`rows.len() * width` elements).
    pub fn read_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let width = self.width();
        assert!(rows.end <= self.rows() && out.len() == rows.len() * width);
        if let Some(official) = &self.official {
            return official.read_rows(rows, out);
        }
        decode(self.encoding, &self.read_bytes(rows)?, out);
        Ok(())
    }

    /// The blocks of `rows`, row after row. Only for a format with a [`BlockType::grid`] and
    /// [`official::Kept::Blocks`].
    pub fn read_blocks(&self, rows: Range<usize>) -> Result<Vec<Block>> {
        assert!(rows.end <= self.rows());
        if let Some(official) = &self.official {
            return official.read_blocks(rows);
        }
        let Encoding::Block(block) = self.encoding else { unreachable!("not made of blocks") };
        Ok(self.read_bytes(rows)?.chunks_exact(block.bytes()).map(|bytes| block.block(bytes)).collect())
    }

    /// The stored bytes of `rows`, row after row.
    fn read_bytes(&self, rows: Range<usize>) -> Result<Vec<u8>> {
        let row_bytes = self.encoding.bytes(self.width()).expect("checked when opened");
        let mut bytes = vec![0u8; row_bytes * rows.len()];
        if self.order == RowOrder::Plain {
            self.file.read_exact_at(self.offset + (rows.start * row_bytes) as u64, &mut bytes)?;
        } else {
            for (row, out) in rows.zip(bytes.chunks_exact_mut(row_bytes)) {
                let stored = self.order.stored(row, self.rows());
                self.file.read_exact_at(self.offset + (stored * row_bytes) as u64, out)?;
            }
        }
        Ok(bytes)
    }
}

/// Decodes stored elements to f32. `bytes` holds exactly `out.len()` elements.
fn decode(encoding: Encoding, bytes: &[u8], out: &mut [f32]) {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match encoding {
        Encoding::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Encoding::F16 => {
            for (o, b) in out.iter_mut().zip(pairs()) {
                *o = half::f16::from_bits(b).to_f32();
            }
        }
        Encoding::BF16 => {
            for (o, b) in out.iter_mut().zip(pairs()) {
                *o = half::bf16::from_bits(b).to_f32();
            }
        }
        Encoding::Block(block) => block.dequantize(bytes, out),
        Encoding::Official(_) => unreachable!("has a decoder of its own"),
    }
}

/// Checks the header of a safetensors file and that the file is as long as it should be.
pub(super) fn check_safetensors(path: &Path) -> Result<()> {
    safetensors::open(path).map(drop)
}

/// The tokenizer side of a checkpoint, ready to be written into a bundle.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// Text of a `tokenizer.json` that the `tokenizers` crate reads.
    pub tokenizer_json: String,
    /// `tokenizer_config.json` (may be an empty object).
    pub config: Value,
    /// Jinja source of the chat template, when the model has one.
    pub chat_template: Option<String>,
}

/// An opened checkpoint. Opening checks every tensor range against its file.
#[derive(Debug)]
pub struct Checkpoint {
    pub path: PathBuf,
    /// Hugging Face style `config.json`.
    pub config: Value,
    /// `generation_config.json`, when there is one.
    pub generation: Option<Value>,
    pub tokenizer: TokenizerFiles,
    /// Tensors by Hugging Face name.
    pub tensors: BTreeMap<String, SourceTensor>,
    /// Gemma-type norms are stored as `w` in Hugging Face checkpoints and as `1 + w` in GGUF.
    pub norms_include_one: bool,
    /// What an embedding model says about the way from hidden states to vectors.
    pub sentence: SentenceFiles,
}

impl Checkpoint {
    /// Opens a Hugging Face folder, one `.safetensors` file of such a folder, a `.gguf` file, or a folder of
    /// official `.weights` files.
    pub fn open(path: &Path) -> Result<Self> {
        let meta = std::fs::metadata(path).map_err(|e| Error::io("open", path, &e))?;
        if meta.is_dir() {
            return if official::holds(path) { official::open(path) } else { folder::open(path) };
        }
        match path.extension().and_then(|e| e.to_str()) {
            Some("gguf") => gguf::open(path),
            Some("safetensors") => folder::open(path.parent().unwrap_or(Path::new("."))),
            _ => Err(Error::unsupported(format!("{}: neither a folder, a .gguf nor a .safetensors file", path.display()))),
        }
    }

    pub fn tensor(&self, name: &str) -> Result<&SourceTensor> {
        self.tensors.get(name).ok_or_else(|| Error::bad_file(&self.path, format!("tensor {name} is missing")))
    }
}
