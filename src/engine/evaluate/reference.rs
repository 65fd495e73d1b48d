//! What a reference model said, kept in a file so that many models are held against one run of it.
//!
//! A full row is 4 bytes times the vocabulary. Kept instead, for every predicted token: the log-probability of
//! the token itself and the likeliest id, both exact; the ids whose probabilities matter, each with its
//! log-probability in 16 bits (steps of 2^-11 nat); and the sum of the others, at most [`REST`].
//!
//! The divergence is then that of the rounded distribution with the others taken as one outcome. Rounding
//! moves it by the sum of `p * step * ln(p/q)` with steps of random sign and |step| <= 2^-12, that is by far
//! less than itself. Taking outcomes together can only lower it (data-processing inequality), by REST times
//! the divergence within the others: a few nats times 5e-7. See `docs/evaluation.md`.
//!
//! File: magic, key, number of rows, rows, CRC-32 of all that. Integers and floats are little-endian.
//! A row: f32 log-probability of the token, u32 likeliest id, f32 rest, u32 number of ids, u32 bytes of gaps;
//! gaps between ids, LEB128; u16 codes.

use super::metrics::Softmax;
use crate::error::{Error, Result};
use flate2::Crc;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Probability that is kept only as a sum, at most.
const REST: f64 = 5e-7;
/// Codes a nat.
const SCALE: f64 = 2048.0;
/// Codes of a bucket when looking for the least probability that is kept.
const BUCKET: usize = 64;
const BUCKETS: usize = (u16::MAX as usize + 1) / BUCKET;

const MAGIC: [u8; 16] = *b"cactus-reference";
/// Changes when the form changes; part of every key.
pub const VERSION: u32 = 1;

/// Tells references apart; see [`super::reference_key`].
pub type Key = [u8; 32];

/// What the reference says about one token.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Natural log-probability of the token that follows.
    pub log_prob: f64,
    /// The likeliest id.
    pub top: u32,
    rest: f64,
    /// Ascending.
    ids: Vec<u32>,
    /// Of `-ln p`.
    codes: Vec<u16>,
}

impl Row {
    /// From a row of logits and its survey; `target` is the token that follows.
    pub fn new(logits: &[f32], softmax: &Softmax, target: u32) -> Row {
        let log_total = softmax.total.ln();
        let code = |logit: f32| ((f64::from(softmax.best) - f64::from(logit) + log_total) * SCALE).round().min(65535.0) as u16;
        let mut mass = [0f64; BUCKETS];
        for &logit in logits {
            mass[usize::from(code(logit)) / BUCKET] += softmax.weight(logit);
        }
        // The last bucket, where codes saturate, holds less than e^-31 an id.
        let (mut rest, mut cut) = (mass[BUCKETS - 1], BUCKETS - 1);
        while cut > 0 && rest + mass[cut - 1] <= REST * softmax.total {
            cut -= 1;
            rest += mass[cut];
        }
        let (mut ids, mut codes) = (Vec::new(), Vec::new());
        for (id, &logit) in (0..).zip(logits) {
            let code = code(logit);
            if usize::from(code) / BUCKET < cut {
                ids.push(id);
                codes.push(code);
            }
        }
        let log_prob = logits.get(target as usize).map_or(f64::NEG_INFINITY, |&l| softmax.log_prob(l));
        Row { log_prob, top: softmax.top, rest: rest / softmax.total, ids, codes }
    }

    /// KL(reference || model) in nats; `logits` are the model's, with their survey.
    pub fn divergence(&self, logits: &[f32], softmax: &Softmax) -> f64 {
        let log_prob = |code: u16| -f64::from(code) / SCALE;
        let kept: f64 = self.codes.iter().map(|&code| log_prob(code).exp()).sum();
        let total = kept + self.rest;
        let (log_total, log_weights) = (total.ln(), f64::from(softmax.best) + softmax.total.ln());
        let (mut sum, mut seen) = (0.0, 0.0);
        for (&id, &code) in self.ids.iter().zip(&self.codes) {
            let logit = logits[id as usize];
            let log_p = log_prob(code);
            sum += log_p.exp() * (log_p - log_total - (f64::from(logit) - log_weights));
            seen += softmax.weight(logit);
        }
        if self.rest > 0.0 {
            let others = ((softmax.total - seen) / softmax.total).max(f64::from(f32::MIN_POSITIVE));
            sum += self.rest * ((self.rest / total).ln() - others.ln());
        }
        // What rounding puts below zero is nearer to the truth at zero.
        (sum / total).max(0.0)
    }

    /// The row as it stands in a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut gaps = Vec::with_capacity(self.ids.len() + self.ids.len() / 8);
        let mut next = 0;
        for &id in &self.ids {
            let mut gap = id - next;
            next = id + 1;
            while gap >= 0x80 {
                gaps.push(gap as u8 | 0x80);
                gap >>= 7;
            }
            gaps.push(gap as u8);
        }
        let mut bytes = Vec::with_capacity(20 + gaps.len() + 2 * self.codes.len());
        bytes.extend((self.log_prob as f32).to_le_bytes());
        bytes.extend(self.top.to_le_bytes());
        bytes.extend((self.rest as f32).to_le_bytes());
        bytes.extend((self.ids.len() as u32).to_le_bytes());
        bytes.extend((gaps.len() as u32).to_le_bytes());
        bytes.extend(gaps);
        bytes.extend(self.codes.iter().flat_map(|code| code.to_le_bytes()));
        bytes
    }

    /// Reads a row of a vocabulary; `Err` holds what is wrong.
    fn read(from: &mut dyn Read, vocab: usize) -> Result<Row, String> {
        let mut fields = [[0u8; 4]; 5];
        fields.iter_mut().try_for_each(|field| from.read_exact(field)).map_err(|e| e.to_string())?;
        let [log_prob, top, rest, count, gap_bytes] = fields;
        let (count, gap_bytes) = (u32::from_le_bytes(count) as usize, u32::from_le_bytes(gap_bytes) as usize);
        let (log_prob, rest) = (f64::from(f32::from_le_bytes(log_prob)), f64::from(f32::from_le_bytes(rest)));
        if count == 0 || count > vocab || gap_bytes > 5 * count || !(0.0..=1.0).contains(&rest) || log_prob.is_nan() {
            return Err("a row is not as it should be".into());
        }
        let mut gaps = vec![0; gap_bytes];
        let mut code_bytes = vec![0; 2 * count];
        from.read_exact(&mut gaps).and_then(|()| from.read_exact(&mut code_bytes)).map_err(|e| e.to_string())?;
        let (mut ids, mut next, mut gap, mut shift) = (Vec::with_capacity(count), 0u64, 0u64, 0);
        for byte in gaps {
            gap |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                let id = next + gap;
                ids.push(u32::try_from(id).ok().filter(|id| (*id as usize) < vocab).ok_or("an id is outside the vocabulary")?);
                (next, gap, shift) = (id + 1, 0, 0);
            } else if shift > 28 {
                return Err("a gap is too long".into());
            }
        }
        if ids.len() != count {
            return Err("ids are missing".into());
        }
        let codes = code_bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        Ok(Row { log_prob, top: u32::from_le_bytes(top), rest, ids, codes })
    }
}

/// Writes a reference beside its final name, which it gets when it is complete.
pub struct Writer {
    file: BufWriter<File>,
    crc: Crc,
    left: u64,
    bytes: u64,
    path: PathBuf,
    partial: Option<PathBuf>,
}

impl Writer {
    /// For `rows` rows.
    pub fn create(path: &Path, key: &Key, rows: u64) -> Result<Writer> {
        let failed = |e: &std::io::Error| Error::io("write", path, e);
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, &e))?;
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".partial-{}", std::process::id()));
        let partial = PathBuf::from(partial);
        let file = BufWriter::with_capacity(1 << 20, File::create(&partial).map_err(|e| failed(&e))?);
        let mut writer = Writer { file, crc: Crc::new(), left: rows, bytes: 0, path: path.to_path_buf(), partial: Some(partial) };
        for part in [&MAGIC[..], &key[..], &rows.to_le_bytes()] {
            writer.write(part)?;
        }
        Ok(writer)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.crc.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, &e))
    }

    /// Adds a row in the form of [`Row::to_bytes`].
    pub fn row(&mut self, bytes: &[u8]) -> Result<()> {
        self.left = self.left.checked_sub(1).ok_or_else(|| Error::usage("more rows than were announced"))?;
        self.write(bytes)
    }

    /// Everything has been written; gives the size of the file in bytes.
    pub fn finish(mut self) -> Result<u64> {
        if self.left > 0 {
            return Err(Error::usage(format!("{} rows are missing", self.left)));
        }
        let crc = self.crc.sum().to_le_bytes();
        self.write(&crc)?;
        let Some(partial) = self.partial.take() else { return Ok(self.bytes) };
        let kept = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        kept.and_then(|()| std::fs::rename(&partial, &self.path)).map_err(|e| {
            let _ = std::fs::remove_file(&partial);
            Error::io("write", &self.path, &e)
        })?;
        Ok(self.bytes)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(partial) = self.partial.take() {
            let _ = std::fs::remove_file(partial);
        }
    }
}

/// Reads a reference row by row.
pub struct Reader {
    file: BufReader<File>,
    path: PathBuf,
    vocab: usize,
    left: u64,
    bytes: u64,
}

impl Reader {
    /// Opens the reference at `path`; `None` if there is none with this key that is whole, which the checksum
    /// of the file tells.
    pub fn open(path: &Path, key: &Key, rows: u64, vocab: usize) -> Option<Reader> {
        let mut file = File::open(path).ok()?;
        let bytes = file.metadata().ok()?.len();
        let body = bytes.checked_sub(4)?;
        let mut start = [[0u8; 8]; 7];
        start.iter_mut().try_for_each(|part| file.read_exact(part)).ok()?;
        let expected: Vec<u8> = [&MAGIC[..], &key[..], &rows.to_le_bytes()].concat();
        if start.concat() != expected {
            return None;
        }
        let mut crc = Crc::new();
        crc.update(&expected);
        let (mut left, mut buffer) = (body.checked_sub(expected.len() as u64)?, vec![0; 1 << 20]);
        while left > 0 {
            let part = left.min(buffer.len() as u64) as usize;
            file.read_exact(&mut buffer[..part]).ok()?;
            crc.update(&buffer[..part]);
            left -= part as u64;
        }
        let mut sum = [0; 4];
        file.read_exact(&mut sum).ok()?;
        if u32::from_le_bytes(sum) != crc.sum() {
            return None;
        }
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(expected.len() as u64)).ok()?;
        let file = BufReader::with_capacity(1 << 20, file);
        Some(Reader { file, path: path.to_path_buf(), vocab, left: rows, bytes })
    }

    /// The next row.
    pub fn row(&mut self) -> Result<Row> {
        self.left = self.left.checked_sub(1).ok_or_else(|| Error::bad_file(&self.path, "has no more rows"))?;
        Row::read(&mut self.file, self.vocab).map_err(|what| Error::bad_file(&self.path, what))
    }

    /// Size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
#[path = "reference_tests.rs"]
mod tests;
