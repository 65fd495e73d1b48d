//! The header of a `.weights` file: what it holds and where its parts lie, checked against the file.
//!
//! ```text
//! 0                       header, 84 bytes; 116 with the extended shape
//! aligned end of header   metadata: scales, or what decoding a CQ matrix takes
//! aligned end of metadata data, up to the end of the file
//! ```
//!
//! All numbers are little-endian.

use super::super::SourceFile;
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

const MAGIC: &[u8; 4] = b"CACT";
const HEADER_BYTES: usize = 84;
const EXTENDED_BYTES: usize = 116;
/// What an alignment of 0 means.
const ALIGNMENT: u32 = 32;
const MAX_ALIGNMENT: u32 = 1 << 16;

/// Meanings of the flag bits; bits 1 and 2 mean one thing on CQ matrices and another elsewhere.
const SCALES: u32 = 1;
const ORTHOGONAL: u32 = 2;
const INTERLEAVED_CQ_OR_TRANSPOSED: u32 = 4;
const INTERLEAVED: u32 = 8;
const EXTENDED: u32 = 16;
const KNOWN: u32 = 31;

/// How the values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    F32,
    F16,
    /// A byte a value, an f16 scale for each group of a row.
    Int8,
    /// Half a byte a value, scales as for `Int8`; only old writers made it.
    Int4,
    /// Rotated codebook indices of so many bits, 1 to 4.
    Cq {
        bits: u8,
    },
}

impl Precision {
    /// Bits of a stored value, scales not counted.
    pub fn bits(self) -> u8 {
        match self {
            Precision::F32 => 32,
            Precision::F16 => 16,
            Precision::Int8 => 8,
            Precision::Int4 => 4,
            Precision::Cq { bits } => bits,
        }
    }
}

/// A checked header.
#[derive(Clone, Debug)]
pub struct Header {
    pub file: Arc<SourceFile>,
    pub precision: Precision,
    /// 1 to 8 sizes, none of them 0; their product fits a `usize`.
    pub dims: Vec<usize>,
    /// The rotation of a CQ matrix is a stored matrix, not a Hadamard transform.
    pub orthogonal: bool,
    /// Rows are interleaved by four.
    pub interleaved: bool,
    /// `dims` are those of the transposed tensor.
    pub transposed: bool,
    /// Columns that share a scale.
    pub group_size: usize,
    /// Groups of a row.
    pub groups: usize,
    /// Rows without those that pad the matrix.
    pub original_rows: usize,
    pub metadata: Range<u64>,
    pub data: Range<u64>,
}

impl Header {
    pub fn read(file: Arc<SourceFile>) -> Result<Self> {
        let bad = |what: String| Error::bad_file(&file.path, what);
        let mut bytes = [0u8; EXTENDED_BYTES];
        let held = file.len.min(EXTENDED_BYTES as u64) as usize;
        file.read_exact_at(0, &mut bytes[..held])?;
        if held < HEADER_BYTES || bytes[..4] != *MAGIC {
            return Err(bad("is no .weights file".into()));
        }
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let flags = u32_at(4);
        if flags & !KNOWN != 0 {
            return Err(Error::unsupported(format!("{}: unknown flags {flags:#x}", file.path.display())));
        }
        let extended = flags & EXTENDED != 0;
        let header_bytes = if extended { EXTENDED_BYTES } else { HEADER_BYTES };
        if held < header_bytes {
            return Err(bad("the file ends within its header".into()));
        }
        let alignment = if u32_at(8) == 0 { ALIGNMENT } else { u32_at(8) };
        if alignment > MAX_ALIGNMENT {
            return Err(bad(format!("an alignment of {alignment} bytes")));
        }

        let rank = u32_at(12) as usize;
        if rank == 0 || rank > if extended { 8 } else { 4 } {
            return Err(bad(format!("{rank} dimensions")));
        }
        let places = [16, 24, 32, 40, 84, 92, 100, 108];
        let sizes: Vec<u64> = places[..rank].iter().map(|at| u64_at(*at)).collect();
        let dims: Vec<usize> = sizes.iter().filter_map(|d| usize::try_from(*d).ok().filter(|d| *d > 0)).collect();
        // What is multiplied below stays under 64 times the number of elements.
        let elements = dims.iter().try_fold(64usize, |all, d| all.checked_mul(*d));
        if dims.len() != rank || elements.is_none() {
            return Err(bad(format!("a shape of {sizes:?}")));
        }
        let precision = match u32_at(48) {
            0 => Precision::Int8,
            1 => Precision::F16,
            2 => Precision::F32,
            // The two that share this number differ in having scales.
            3 if flags & SCALES != 0 => Precision::Int4,
            code @ 3..=6 => Precision::Cq { bits: code as u8 - 2 },
            code => return Err(Error::unsupported(format!("{}: unknown precision {code}", file.path.display()))),
        };
        let is_cq = matches!(precision, Precision::Cq { .. });
        if is_cq && flags & SCALES != 0 {
            return Err(bad("a CQ matrix with the flag of scales".into()));
        }

        let (data_bytes, metadata_bytes) = (u64_at(52), u64_at(60));
        let up = |n: u64| n.checked_next_multiple_of(u64::from(alignment));
        let metadata_at = up(header_bytes as u64);
        let data_at = metadata_at.and_then(|at| up(at.checked_add(metadata_bytes)?));
        let end = data_at.and_then(|at| at.checked_add(data_bytes));
        let (Some(metadata_at), Some(data_at), Some(end)) = (metadata_at, data_at, end) else {
            return Err(bad(format!("{metadata_bytes} bytes of metadata and {data_bytes} of data")));
        };
        if end != file.len {
            return Err(bad(format!("the file has {} bytes where its header means {end}", file.len)).with_hint("fetch it again"));
        }
        let original_rows = usize::try_from(u64_at(76)).ok().filter(|n| *n > 0 && *n <= dims[0]);
        Ok(Header {
            precision,
            orthogonal: is_cq && flags & ORTHOGONAL != 0,
            interleaved: flags & if is_cq { INTERLEAVED_CQ_OR_TRANSPOSED } else { INTERLEAVED } != 0,
            transposed: !is_cq && flags & INTERLEAVED_CQ_OR_TRANSPOSED != 0,
            group_size: u32_at(68) as usize,
            groups: u32_at(72) as usize,
            original_rows: original_rows.ok_or_else(|| bad(format!("{} of {} rows are real", u64_at(76), dims[0])))?,
            metadata: metadata_at..metadata_at + metadata_bytes,
            data: data_at..end,
            dims,
            file,
        })
    }

    /// An error about this file.
    pub fn bad(&self, what: impl std::fmt::Display) -> Error {
        Error::bad_file(&self.file.path, what)
    }

    /// Checks the lengths of metadata and data. `None`: a product that overflowed.
    pub fn expect(&self, metadata: Option<usize>, data: Option<usize>) -> Result<()> {
        for (what, range, expected) in [("metadata", &self.metadata, metadata), ("data", &self.data, data)] {
            let held = range.end - range.start;
            if expected.map(|n| n as u64) != Some(held) {
                let expected = expected.map_or("more than any file has".to_owned(), |n| n.to_string());
                return Err(self.bad(format!("has {held} bytes of {what} where its shape needs {expected}")));
            }
        }
        Ok(())
    }
}
