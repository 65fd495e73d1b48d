//! The GGUF container (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>): magic, version, counts,
//! key-value pairs, tensor descriptions, then aligned tensor data. Everything is little-endian. Counts and
//! lengths come from the file, so each is held against the bytes that are left before anything is allocated.

use super::{BlockType, Encoding, SourceFile};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Limits far above any real file; they bound what a crafted header can make us allocate.
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 16;
const MAX_ARRAY: u64 = 1 << 24;
const MAX_STRING: u64 = 1 << 24;
const MAX_NAME: u64 = 1 << 10;
const MAX_ALIGNMENT: i64 = 1 << 20;

/// Bytes read from the file at a time.
const BUFFER: usize = 1 << 16;

/// A metadata value; numbers are widened, arrays are flat.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Meta {
    /// Unsigned numbers beyond `i64::MAX` are held there; no key that is used comes near.
    Int(i64),
    Float(f32),
    Bool(bool),
    Text(String),
    /// Integer and boolean arrays.
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Texts(Vec<String>),
}

impl Meta {
    fn kind(&self) -> &'static str {
        match self {
            Meta::Int(_) => "an integer",
            Meta::Float(_) => "a float",
            Meta::Bool(_) => "a bool",
            Meta::Text(_) => "a string",
            Meta::Ints(_) => "an integer array",
            Meta::Floats(_) => "a float array",
            Meta::Texts(_) => "a string array",
        }
    }
}

/// A tensor as the file describes it; its byte range lies inside the file.
#[derive(Clone, Debug)]
pub(super) struct TensorInfo {
    pub name: String,
    /// Row-major, outermost dimension first (GGUF stores the reverse).
    pub shape: Vec<usize>,
    pub encoding: Encoding,
    /// Absolute byte offset in the file.
    pub offset: u64,
}

/// The parsed front of one GGUF file.
#[derive(Debug)]
pub(super) struct Header {
    pub file: Arc<SourceFile>,
    pub meta: BTreeMap<String, Meta>,
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    pub fn read(file: Arc<SourceFile>) -> Result<Self> {
        let mut r = Reader { file: &file, at: 0, buffer: Vec::new(), buffer_at: 0 };
        r.version()?;
        let tensor_count = r.count("tensors", 24, MAX_TENSORS)?;
        let key_count = r.count("metadata keys", 13, MAX_KEYS)?;
        let mut meta = BTreeMap::new();
        for _ in 0..key_count {
            let key = r.text("metadata key", MAX_NAME)?;
            let kind = r.u32()?;
            let value = r.value(&key, kind)?;
            if meta.contains_key(&key) {
                return Err(r.bad(format!("metadata key {key} appears twice")));
            }
            meta.insert(key, value);
        }
        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            tensors.push(r.tensor()?);
        }
        let alignment = match meta.get("general.alignment") {
            None => 32,
            Some(&Meta::Int(a)) if a > 0 && a <= MAX_ALIGNMENT && a & (a - 1) == 0 => a as u64,
            Some(other) => return Err(r.bad(format!("general.alignment is {other:?}, not a power of two"))),
        };
        // A file of metadata alone (the first part of some split sets) may end before the aligned data.
        let data = r.at.next_multiple_of(alignment);
        place(&file, &mut tensors, data, alignment)?;
        Ok(Header { file, meta, tensors })
    }

    fn wrong(&self, key: &str, value: &Meta, wanted: &str) -> Error {
        Error::bad_file(&self.file.path, format!("metadata key {key} is {}, expected {wanted}", value.kind()))
    }

    fn missing(&self, key: &str) -> Error {
        Error::bad_file(&self.file.path, format!("metadata key {key} is missing"))
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Meta::Text(t)) => Ok(Some(t)),
            Some(v) => Err(self.wrong(key, v, "a string")),
        }
    }

    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Meta::Texts(t)) => Ok(Some(t)),
            Some(v) => Err(self.wrong(key, v, "a string array")),
        }
    }

    pub fn ints(&self, key: &str) -> Result<Option<&[i64]>> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Meta::Ints(t)) => Ok(Some(t)),
            Some(v) => Err(self.wrong(key, v, "an integer array")),
        }
    }

    pub fn floats(&self, key: &str) -> Result<Option<&[f32]>> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Meta::Floats(t)) => Ok(Some(t)),
            Some(v) => Err(self.wrong(key, v, "a float array")),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Meta::Bool(b)) => Ok(Some(*b)),
            Some(v) => Err(self.wrong(key, v, "a bool")),
        }
    }

    /// A count or id: an integer from 0 to 2^32 - 1. An array that gives each layer the same number counts as
    /// that number; layers that differ are not supported.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let n = match self.meta.get(key) {
            None => return Ok(None),
            Some(Meta::Int(n)) => *n,
            Some(Meta::Ints(all)) => match all.first() {
                Some(n) if all.iter().all(|m| m == n) => *n,
                _ => {
                    let what = format!("{}: {key} differs from layer to layer", self.file.path.display());
                    return Err(Error::unsupported(what));
                }
            },
            Some(v) => return Err(self.wrong(key, v, "an integer")),
        };
        match u32::try_from(n) {
            Ok(n) => Ok(Some(n as usize)),
            Err(_) => Err(Error::bad_file(&self.file.path, format!("metadata key {key} is {n}, out of range"))),
        }
    }

    pub fn need_size(&self, key: &str) -> Result<usize> {
        match self.size(key)? {
            Some(0) => Err(Error::bad_file(&self.file.path, format!("metadata key {key} is 0"))),
            Some(n) => Ok(n),
            None => Err(self.missing(key)),
        }
    }

    /// A number that is finite, as the shortest decimal that the stored f32 rounds from (0.000001, not
    /// 9.99999997e-7), which is what somebody once wrote into the config file.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Meta::Float(f)) if f.is_finite() => Ok(Some(decimal(*f))),
            Some(Meta::Int(n)) => Ok(Some(*n as f64)),
            Some(v) => Err(self.wrong(key, v, "a finite number")),
        }
    }

    pub fn need_number(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| self.missing(key))
    }
}

/// The shortest decimal that reads back as this f32.
pub(super) fn decimal(f: f32) -> f64 {
    f.to_string().parse().unwrap_or(f as f64)
}

/// Turns the data-relative offsets into absolute ones and checks every range against the file.
fn place(file: &SourceFile, tensors: &mut [TensorInfo], data: u64, alignment: u64) -> Result<()> {
    let mut end_of_data = 0u64;
    for t in tensors.iter_mut() {
        if t.offset % alignment != 0 {
            return Err(Error::bad_file(&file.path, format!("tensor {}: offset {} is not aligned", t.name, t.offset)));
        }
        // The product was checked when the dimensions were read.
        let bytes = t.encoding.bytes(t.shape.iter().product()).map(|b| b as u64);
        let start = data.checked_add(t.offset);
        let (Some(start), Some(end)) = (start, start.zip(bytes).and_then(|(s, b)| s.checked_add(b))) else {
            return Err(Error::bad_file(&file.path, format!("tensor {}: its size overflows", t.name)));
        };
        t.offset = start;
        end_of_data = end_of_data.max(end);
    }
    if end_of_data > file.len {
        let what = format!("cut short: its tensors need {end_of_data} bytes, the file has {}", file.len);
        return Err(Error::bad_file(&file.path, what).with_hint("download it again"));
    }
    Ok(())
}

/// A buffered reader that knows how many bytes are left.
struct Reader<'a> {
    file: &'a SourceFile,
    /// Offset of the next byte.
    at: u64,
    buffer: Vec<u8>,
    /// Offset of the first byte of `buffer`.
    buffer_at: u64,
}

impl Reader<'_> {
    fn bad(&self, what: String) -> Error {
        Error::bad_file(&self.file.path, what)
    }

    fn left(&self) -> u64 {
        self.file.len.saturating_sub(self.at)
    }

    fn short(&self, need: u64) -> Error {
        let (have, needed) = (self.file.len, self.at.saturating_add(need));
        self.bad(format!("cut short: the header needs at least {needed} bytes, the file has {have}"))
            .with_hint("download it again")
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<()> {
        if (out.len() as u64) > self.left() {
            return Err(self.short(out.len() as u64));
        }
        let mut done = 0;
        while done < out.len() {
            let from = (self.at - self.buffer_at) as usize;
            if from >= self.buffer.len() {
                self.buffer_at = self.at;
                self.buffer.resize(self.left().min(BUFFER as u64) as usize, 0);
                self.file.read_exact_at(self.at, &mut self.buffer)?;
                continue;
            }
            let n = (self.buffer.len() - from).min(out.len() - done);
            out[done..done + n].copy_from_slice(&self.buffer[from..from + n]);
            done += n;
            self.at += n as u64;
        }
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn version(&mut self) -> Result<()> {
        let magic: [u8; 4] = self.bytes()?;
        if &magic != b"GGUF" {
            let older: [&[u8; 4]; 4] = [b"lmgg", b"fmgg", b"tjgg", b"algg"];
            if older.contains(&&magic) {
                let what = format!("{}: an older ggml container", self.file.path.display());
                return Err(Error::unsupported(what).with_hint("GGUF versions 2 and 3 can be read"));
            }
            return Err(self.bad("is not a GGUF file (it does not start with \"GGUF\")".into()));
        }
        let version = self.u32()?;
        let path = self.file.path.display();
        match version {
            2 | 3 => Ok(()),
            v if v.swap_bytes() < 1 << 16 => {
                Err(Error::unsupported(format!("{path}: big-endian GGUF; only little-endian files can be read")))
            }
            v => Err(Error::unsupported(format!("{path}: GGUF version {v}; versions 2 and 3 can be read"))),
        }
    }

    /// A count of things that take at least `smallest` bytes each.
    fn count(&mut self, what: &str, smallest: u64, limit: u64) -> Result<u64> {
        let n = self.u64()?;
        if n > limit {
            return Err(self.bad(format!("{n} {what}; at most {limit} are allowed")));
        }
        if n * smallest > self.left() {
            return Err(self.short(n * smallest));
        }
        Ok(n)
    }

    fn text(&mut self, what: &str, limit: u64) -> Result<String> {
        let n = self.u64()?;
        if n > limit {
            return Err(self.bad(format!("a {what} of {n} bytes; at most {limit} are allowed")));
        }
        if n > self.left() {
            return Err(self.short(n));
        }
        let mut out = vec![0; n as usize];
        self.fill(&mut out)?;
        String::from_utf8(out).map_err(|_| self.bad(format!("a {what} is not UTF-8")))
    }

    /// A scalar that is an integer or a bool, widened.
    fn integer(&mut self, kind: u32) -> Result<i64> {
        Ok(match kind {
            0 | 7 => self.bytes::<1>()?[0] as i64,
            1 => self.bytes::<1>()?[0] as i8 as i64,
            2 => u16::from_le_bytes(self.bytes()?) as i64,
            3 => i16::from_le_bytes(self.bytes()?) as i64,
            4 => self.u32()? as i64,
            5 => i32::from_le_bytes(self.bytes()?) as i64,
            10 => i64::try_from(self.u64()?).unwrap_or(i64::MAX),
            _ => i64::from_le_bytes(self.bytes()?),
        })
    }

    fn float(&mut self, kind: u32) -> Result<f32> {
        Ok(if kind == 6 { f32::from_le_bytes(self.bytes()?) } else { f64::from_le_bytes(self.bytes()?) as f32 })
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<Meta> {
        Ok(match kind {
            7 => match self.bytes::<1>()?[0] {
                0 => Meta::Bool(false),
                1 => Meta::Bool(true),
                b => return Err(self.bad(format!("metadata key {key}: {b} is not a bool"))),
            },
            0..=5 | 10 | 11 => Meta::Int(self.integer(kind)?),
            6 | 12 => Meta::Float(self.float(kind)?),
            8 => Meta::Text(self.text(&format!("value of {key}"), MAX_STRING)?),
            9 => {
                let kind = self.u32()?;
                let width = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    8 | 10..=12 => 8,
                    _ => return Err(self.bad(format!("metadata key {key}: array of unknown type {kind}"))),
                };
                let n = self.count(&format!("elements in {key}"), width, MAX_ARRAY)? as usize;
                match kind {
                    8 => {
                        let what = format!("string in {key}");
                        Meta::Texts((0..n).map(|_| self.text(&what, MAX_STRING)).collect::<Result<_>>()?)
                    }
                    6 | 12 => Meta::Floats((0..n).map(|_| self.float(kind)).collect::<Result<_>>()?),
                    _ => Meta::Ints((0..n).map(|_| self.integer(kind)).collect::<Result<_>>()?),
                }
            }
            _ => return Err(self.bad(format!("metadata key {key} has unknown type {kind}"))),
        })
    }

    /// One tensor description; the offset is still relative to the start of the data.
    fn tensor(&mut self) -> Result<TensorInfo> {
        let name = self.text("tensor name", MAX_NAME)?;
        let n_dims = self.u32()?;
        if !(1..=4).contains(&n_dims) {
            return Err(self.bad(format!("tensor {name} has {n_dims} dimensions; 1 to 4 are allowed")));
        }
        let mut shape = Vec::new();
        for _ in 0..n_dims {
            shape.push(self.u64()?);
        }
        let type_id = self.u32()?;
        let encoding = encoding(type_id).ok_or_else(|| self.unsupported_type(&name, type_id))?;
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).filter(|&n| n > 0 && n < 1 << 48);
        if elements.is_none() {
            return Err(self.bad(format!("tensor {name} has impossible dimensions {shape:?}")));
        }
        if let Encoding::Block(b) = encoding
            && shape[0] % b.elements() as u64 != 0
        {
            let (n, kind) = (shape[0], b.name());
            return Err(self.bad(format!("tensor {name}: rows of {n} weights are not whole {kind} blocks")));
        }
        shape.reverse();
        // Below 2^48, so this fails only where pointers are shorter than that.
        let shape: Option<Vec<usize>> = shape.into_iter().map(|d| usize::try_from(d).ok()).collect();
        let shape = shape.filter(|s| s.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).is_some());
        let Some(shape) = shape else {
            return Err(self.bad(format!("tensor {name} does not fit the address space")));
        };
        Ok(TensorInfo { name, shape, encoding, offset: self.u64()? })
    }

    fn unsupported_type(&self, tensor: &str, type_id: u32) -> Error {
        let name = match type_id {
            9 => "Q8_1",
            15 => "Q8_K",
            16 => "IQ2_XXS",
            17 => "IQ2_XS",
            18 => "IQ3_XXS",
            19 => "IQ1_S",
            21 => "IQ3_S",
            22 => "IQ2_S",
            24 => "I8",
            25 => "I16",
            26 => "I32",
            27 => "I64",
            28 => "F64",
            29 => "IQ1_M",
            34 => "TQ1_0",
            35 => "TQ2_0",
            39 => "MXFP4",
            40 => "NVFP4",
            _ => "unknown",
        };
        let known: Vec<&str> = ["F32", "F16", "BF16"].into_iter().chain(BlockType::ALL.map(BlockType::name)).collect();
        let path = self.file.path.display();
        Error::unsupported(format!("{path}: tensor {tensor} has type {name} ({type_id}); supported: {}", known.join(", ")))
    }
}

fn encoding(type_id: u32) -> Option<Encoding> {
    match type_id {
        0 => Some(Encoding::F32),
        1 => Some(Encoding::F16),
        30 => Some(Encoding::BF16),
        id => BlockType::from_gguf(id).map(Encoding::Block),
    }
}
