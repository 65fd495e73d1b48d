//! What a reference model said, kept in a file so that many models are held against one run of it.
//!
//! A full row is 4 bytes times the vocabulary. Kept instead, for every predicted token: the log-probability of
//! the token itself and the likeliest id, both exact; the likeliest ids, until at most [`REST`] of the
//! probability is left, each with its log-probability, exact above 1/64, else in 16 bits (steps of 2^-11 nat);
//! the sum of the others, and [`SAMPLES`] of them.
//!
//! The samples are drawn in proportion to probability, at equal distances along the running sum (systematic
//! sampling, Madow 1949). So the share of the others in the divergence, `rest * E[ln p/q]`, is estimated by
//! `rest` times a mean over samples, with a standard error below `REST * sd(ln p/q) / sqrt(SAMPLES)`, about
//! 6e-5 sd a token and, over a thousand tokens, 2e-6 sd. Rounding moves the divergence by the sum of
//! `p * step * ln p/q` with steps of random sign and at most 2^-12, where p is below 1/64. Both errors vanish with `ln p/q`: a model
//! held against itself gives 0. See `docs/evaluation.md`.
//!
//! File: magic, key, number of rows, rows, CRC-32 of all that. Integers and floats are little-endian.
//! A row: f32 log-probability of the token, u32 likeliest id, f32 rest, u32 number of likeliest ids, u32 number
//! of samples, u32 bytes of gaps; gaps between ids, LEB128, first those of the likeliest ids (less one), then
//! those of the samples, each list ascending; u16 codes of `-ln p` in the same order; f32 log-probabilities of
//! the ids that are exact, those with codes below [`EXACT`].

use super::metrics::Softmax;
use crate::error::{Error, Result};
use flate2::Crc;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Probability outside the likeliest ids, at most.
const REST: f64 = 0.002;
/// Samples of the others.
const SAMPLES: usize = 1024;
/// Below this the others are not sampled but taken as one outcome.
const NOTHING: f64 = 1e-9;
/// Codes a nat.
const SCALE: f64 = 2048.0;
/// Codes below this are of probabilities above about 1/64: `ln 64 * SCALE`.
const EXACT: u16 = 8517;
/// Codes of a bucket when looking for the least probability that is kept.
const BUCKET: usize = 64;
const BUCKETS: usize = (u16::MAX as usize + 1) / BUCKET;

const MAGIC: [u8; 16] = *b"cactus-reference";
/// Changes when the form changes; part of every key.
pub const VERSION: u32 = 3;

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
    likeliest: Vec<Kept>,
    /// Ascending; an id may be there several times.
    samples: Vec<Kept>,
}

/// An id and its natural log-probability, rounded as a file rounds it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kept {
    id: u32,
    log_prob: f32,
}

/// The code of a log-probability.
fn code(log_prob: f64) -> u16 {
    (-log_prob * SCALE).round().clamp(0.0, 65535.0) as u16
}

/// The log-probability of a code.
fn decoded(code: u16) -> f32 {
    (-f64::from(code) / SCALE) as f32
}

impl Row {
    /// From a row of logits and its survey; `target` is the token that follows.
    pub fn new(logits: &[f32], softmax: &Softmax, target: u32) -> Row {
        let log_weights = f64::from(softmax.best) + softmax.total.ln();
        let log_p = |logit: f32| f64::from(logit) - log_weights;
        let mut mass = [0f64; BUCKETS];
        for &logit in logits {
            mass[usize::from(code(log_p(logit))) / BUCKET] += softmax.weight(logit);
        }
        // The last bucket, where codes saturate, holds less than e^-31 an id.
        let (mut rest, mut cut) = (mass[BUCKETS - 1], BUCKETS - 1);
        // A small vocabulary is kept whole.
        while logits.len() > 4 * SAMPLES && cut > 0 && rest + mass[cut - 1] <= REST * softmax.total {
            cut -= 1;
            rest += mass[cut];
        }
        let sampled = if rest > NOTHING * softmax.total { SAMPLES } else { 0 };
        let step = rest / sampled as f64;
        let (mut likeliest, mut samples, mut sum) = (Vec::new(), Vec::with_capacity(sampled), 0.0);
        for (id, &logit) in (0..).zip(logits) {
            let code = code(log_p(logit));
            let kept = Kept { id, log_prob: if code < EXACT { log_p(logit).min(0.0) as f32 } else { decoded(code) } };
            if usize::from(code) / BUCKET < cut {
                likeliest.push(kept);
                continue;
            }
            sum += softmax.weight(logit);
            while samples.len() < sampled && sum > step * (samples.len() as f64 + 0.5) {
                samples.push(kept);
            }
        }
        let log_prob = logits.get(target as usize).map_or(f64::NEG_INFINITY, |&l| softmax.log_prob(l));
        Row { log_prob, top: softmax.top, rest: rest / softmax.total, likeliest, samples }
    }

    /// KL(reference || model) in nats; `logits` are the model's, with their survey.
    pub fn divergence(&self, logits: &[f32], softmax: &Softmax) -> f64 {
        let total = self.likeliest.iter().map(|kept| f64::from(kept.log_prob).exp()).sum::<f64>() + self.rest;
        let (log_total, log_weights) = (total.ln(), f64::from(softmax.best) + softmax.total.ln());
        let model = |kept: &Kept| f64::from(logits[kept.id as usize]) - log_weights;
        let (mut sum, mut seen) = (0.0, 0.0);
        for kept in &self.likeliest {
            let log_p = f64::from(kept.log_prob);
            sum += log_p.exp() * (log_p - log_total - model(kept));
            seen += softmax.weight(logits[kept.id as usize]);
        }
        if !self.samples.is_empty() {
            let ratios = self.samples.iter().map(|kept| f64::from(kept.log_prob) - log_total - model(kept));
            sum += self.rest * ratios.sum::<f64>() / self.samples.len() as f64;
        } else if self.rest > 0.0 {
            let others = ((softmax.total - seen) / softmax.total).max(f64::from(f32::MIN_POSITIVE));
            sum += self.rest * ((self.rest / total).ln() - others.ln());
        }
        // What an error puts below zero is nearer to the truth at zero.
        (sum / total).max(0.0)
    }

    /// The row as it stands in a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let lists = [(&self.likeliest, 1), (&self.samples, 0)];
        let mut gaps = Vec::with_capacity(2 * (self.likeliest.len() + self.samples.len()));
        for (list, least) in lists {
            let mut next = 0;
            for kept in list {
                let mut gap = kept.id - next;
                next = kept.id + least;
                while gap >= 0x80 {
                    gaps.push(gap as u8 | 0x80);
                    gap >>= 7;
                }
                gaps.push(gap as u8);
            }
        }
        let mut bytes = Vec::with_capacity(24 + 2 * gaps.len());
        bytes.extend((self.log_prob as f32).to_le_bytes());
        bytes.extend(self.top.to_le_bytes());
        bytes.extend((self.rest as f32).to_le_bytes());
        for length in [self.likeliest.len(), self.samples.len(), gaps.len()] {
            bytes.extend((length as u32).to_le_bytes());
        }
        bytes.extend(gaps);
        let codes = || lists.iter().flat_map(|(list, _)| list.iter()).map(|kept| (code(kept.log_prob.into()), kept.log_prob));
        bytes.extend(codes().flat_map(|(code, _)| code.to_le_bytes()));
        bytes.extend(codes().filter(|(code, _)| *code < EXACT).flat_map(|(_, log_prob)| log_prob.to_le_bytes()));
        bytes
    }

    /// Reads a row of a vocabulary; `Err` holds what is wrong.
    fn read(from: &mut dyn Read, vocab: usize) -> Result<Row, String> {
        let mut fields = [[0u8; 4]; 6];
        fields.iter_mut().try_for_each(|field| from.read_exact(field)).map_err(|e| e.to_string())?;
        let [log_prob, top, rest, ..] = fields;
        let [_, _, _, likeliest, samples, gap_bytes] = fields.map(|field| u32::from_le_bytes(field) as usize);
        let (log_prob, rest) = (f64::from(f32::from_le_bytes(log_prob)), f64::from(f32::from_le_bytes(rest)));
        let sound = (1..=vocab).contains(&likeliest)
            && samples <= SAMPLES
            && gap_bytes <= 5 * (likeliest + samples)
            && (0.0..=1.0).contains(&rest)
            && !log_prob.is_nan();
        if !sound {
            return Err("a row is not as it should be".into());
        }
        let mut gaps = vec![0; gap_bytes];
        let mut codes = vec![0; 2 * (likeliest + samples)];
        from.read_exact(&mut gaps).and_then(|()| from.read_exact(&mut codes)).map_err(|e| e.to_string())?;
        let (mut gaps, mut codes) = (gaps.into_iter(), codes.chunks_exact(2));
        let mut list = |length: usize, least: u64| -> Result<Vec<(u32, u16)>, String> {
            let mut next = 0u64;
            let kept = |_| {
                let id = next + gap(&mut gaps).ok_or("a gap is broken")?;
                next = id + least;
                let id = u32::try_from(id).ok().filter(|id| (*id as usize) < vocab).ok_or("an id is outside the vocabulary")?;
                let code = codes.next().map_or(0, |pair| u16::from_le_bytes([pair[0], pair[1]]));
                Ok((id, code))
            };
            (0..length).map(kept).collect()
        };
        let mut exact = |(id, code): (u32, u16)| -> Result<Kept, String> {
            if code >= EXACT {
                return Ok(Kept { id, log_prob: decoded(code) });
            }
            let mut bytes = [0; 4];
            from.read_exact(&mut bytes).map_err(|e| e.to_string())?;
            let log_prob = f32::from_le_bytes(bytes);
            if log_prob > 0.0 || !log_prob.is_finite() { Err("a probability is none".into()) } else { Ok(Kept { id, log_prob }) }
        };
        let (likeliest, samples) = (list(likeliest, 1)?, list(samples, 0)?);
        let likeliest = likeliest.into_iter().map(&mut exact).collect::<Result<_, _>>()?;
        let samples = samples.into_iter().map(exact).collect::<Result<_, _>>()?;
        if gaps.next().is_some() {
            return Err("there are more gaps than ids".into());
        }
        Ok(Row { log_prob, top: u32::from_le_bytes(top), rest, likeliest, samples })
    }
}

/// The next LEB128 number below 2^35.
fn gap(bytes: &mut impl Iterator<Item = u8>) -> Option<u64> {
    let mut value = 0;
    for shift in [0, 7, 14, 21, 28] {
        let byte = bytes.next()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
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
