//! From a checkpoint to a bundle: tensor by tensor, a few rows at a time, published by one rename.

use super::bundle::{self, FORMAT_VERSION, Manifest, Provenance, Quantiser, TensorEntry};
use super::calibrate::Calibration;
use super::choice::{self, Choice, choose};
use super::encoder::{Aim, Encoder};
use super::families::{self, ModelPlan, Role, TensorPlan};
use super::import::Checkpoint;
use super::moments::Factors;
use super::record::{self, Found, Record};
use super::source::source_shapes;
use super::staging::Staging;
use super::work::Work;
use crate::error::{Error, Kind, Result};
use crate::hub::cache::check_room;
use crate::quant::encode::SquareError;
use crate::quant::encode_trellis::BAND_ROWS;
use crate::quant::format::ALIGN;
use crate::quant::{Bits, Code, CqLayout, Format};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// What to convert to.
#[derive(Clone, Debug)]
pub struct Options {
    /// 1, 2, 3, 4 or 8: every matrix has so many; 16: stored as it is (f32 sources as f16); other numbers: so
    /// many bits a weight in all, everything counted, each matrix by what it needs.
    pub bits: Bits,
    /// 1, 2, 3, 4, 8 or 16 for embedding table and output head; `None`: as other matrices, but 8 where
    /// rounding is plain.
    pub head_bits: Option<u32>,
    /// How codes of 1 to 4 bits become levels.
    pub code: Code,
    /// Token ids of sample texts to measure inputs on; empty: plain rounding. Has no effect from 8 bits on.
    pub calibration: Vec<Vec<u32>>,
    /// What these are, for the manifest.
    pub calibration_text: String,
    /// How far weights make up for the errors of layers before them, 0 to 1; `None`: not at all, and inputs are
    /// measured on the original model.
    pub sequential: Option<f32>,
    /// Grids of the checkpoint are kept where they have no more than the 4 or 8 bits that are asked for.
    pub keep: bool,
    pub source: Provenance,
}

impl Options {
    /// Every matrix rounded by itself to `bits`, not fitted to text.
    pub fn plain(bits: Bits, source: Provenance) -> Self {
        Options {
            bits,
            head_bits: None,
            code: Code::Trellis,
            calibration: Vec::new(),
            calibration_text: String::new(),
            sequential: None,
            keep: true,
            source,
        }
    }

    /// Whether rounding is fitted to sample text.
    pub fn calibrated(&self) -> bool {
        self.bits < Bits::EIGHT && !self.calibration.is_empty()
    }
}

/// What happens while converting. An error from the handler ends the conversion, and nothing is left of it but,
/// if it is [`Kind::Interrupted`] and the conversion is calibrated, what the next one needs to go on.
pub enum Event<'a> {
    /// Something the user should know.
    Warning(&'a str),
    /// The same, with nothing wrong.
    Note(&'a str),
    /// Work begins: how much in all, and how much an earlier conversion has done. The unit takes about equally
    /// long in all stages.
    Start { work: u64, done: u64 },
    /// What is done now.
    Stage(&'a str),
    /// So much more work is done.
    Advance(u64),
}

/// A line of the report.
#[derive(Clone, Debug)]
pub struct TensorReport {
    pub name: String,
    pub rows: usize,
    pub cols: usize,
    pub format: Format,
    pub bytes: usize,
    pub error: SquareError,
    /// Expected divergence that the tensor adds to the output, where bits were chosen by it; nats a token.
    pub expected_kl: Option<f64>,
    /// Columns were padded to a group width.
    pub padded: bool,
    /// The weights are stored as the checkpoint has them.
    pub kept: bool,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Report {
    pub family: &'static str,
    pub tensors: Vec<TensorReport>,
    /// Matrices of an official folder that were rounded again, and why.
    pub rounded_again: Vec<String>,
}

impl TensorReport {
    /// Of the finished tensor number `i`.
    fn new(tensor: &TensorPlan, record: &Record, i: usize) -> Self {
        let TensorPlan { name, rows, cols, .. } = tensor;
        let (rows, cols, format) = (*rows, *cols, record.formats[i]);
        TensorReport {
            name: name.clone(),
            rows,
            cols,
            format,
            bytes: format.bytes(rows, cols).unwrap_or(0),
            error: record.error(i),
            expected_kl: record.expected(i),
            padded: CqLayout::new(format, rows, cols).is_some_and(|l| l.padded_cols() != cols),
            kept: false,
        }
    }

    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.bytes as f64 / (self.rows * self.cols) as f64
    }
}

impl Report {
    pub fn weights(&self) -> u64 {
        self.tensors.iter().map(|t| (t.rows * t.cols) as u64).sum()
    }
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes as u64).sum()
    }
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.bytes() as f64 / self.weights().max(1) as f64
    }
    pub fn relative_error(&self) -> f64 {
        let mut sum = SquareError::default();
        self.tensors.iter().for_each(|t| sum += t.error);
        sum.relative()
    }
}

/// Whether there is anything in a conversion with these options that rounding could fit to sample text.
pub fn needs_text(checkpoint: &Checkpoint, options: &Options) -> Result<bool> {
    let plan = families::plan(checkpoint)?;
    Ok(options.bits < Bits::EIGHT
        && plan.spec.decoder().is_some()
        && any_rounded(&plan, &choice::kept(checkpoint, &plan, options, true)?))
}

fn any_rounded(plan: &ModelPlan, kept: &[Option<Format>]) -> bool {
    plan.tensors.iter().zip(kept).any(|(tensor, kept)| tensor.role != Role::Vector && kept.is_none())
}

/// Converts `checkpoint` into a bundle at `target`, which must not exist or be a bundle (it is replaced).
/// The same input gives the same bytes, also when it goes on where an interrupted or killed conversion stopped.
/// Until the last moment nothing is visible under the final name.
pub fn convert(
    checkpoint: &Checkpoint,
    target: &Path,
    options: &Options,
    on_event: &mut dyn FnMut(Event) -> Result<()>,
) -> Result<Report> {
    let whole = families::plan(checkpoint)?;
    whole.warnings.iter().try_for_each(|w| on_event(Event::Warning(w)))?;
    if target.exists() && !super::Bundle::is_bundle(target) {
        return Err(Error::usage(format!("{} exists and is no bundle; it will not be overwritten", target.display())));
    }
    // Rounding is fitted to what a decoder reads; encoders are rounded plainly.
    let options = &match whole.spec.decoder() {
        Some(_) => options.clone(),
        None => Options { calibration: Vec::new(), calibration_text: String::new(), ..options.clone() },
    };
    let kept = choice::kept(checkpoint, &whole, options, options.calibrated())?;
    let rounded = options.calibrated() && any_rounded(&whole, &kept);
    let mut calibration = match rounded {
        true => Some(Calibration::new(checkpoint, &whole, &options.calibration, options.sequential.is_some())?),
        false => None,
    };
    let key = rounded.then(|| record::key(checkpoint, &whole, options));
    let resumed = match &key {
        Some(key) => Staging::take_over(target, |dir| Record::read(dir, key, bundle::WEIGHTS))?,
        None => None,
    };
    let work = Work::new(&whole, options, &kept);
    let (plan, work, staging, found, table) = match resumed {
        Some((staging, found)) => {
            let plan = whole.in_parts(&found.record.parts);
            let work = work.in_parts(&whole, &plan);
            on_event(Event::Start { work: work.total(), done: work.before(found.record.finished()) })?;
            (plan, work, staging, found, None)
        }
        None => {
            on_event(Event::Start { work: work.total(), done: 0 })?;
            let Choice { parts, formats, expected, table } =
                choose(checkpoint, &whole, options, &kept, &mut calibration, on_event)?;
            let plan = whole.in_parts(&parts);
            let work = work.in_parts(&whole, &plan);
            let sizes = plan.tensors.iter().zip(&formats).map(|(t, f)| f.bytes(t.rows, t.cols).unwrap_or(usize::MAX) as u64);
            check_room(target, sizes.fold(0, u64::saturating_add), "the converted model")?;
            let record = Record::new(key.as_deref().unwrap_or(""), parts, formats, expected);
            (plan, work, Staging::create(target)?, Found::new(record), table)
        }
    };
    let rounded_again = choice::rounded_again(checkpoint, &whole, options, &kept)?;
    let job = Job { checkpoint, plan: &plan, options, work: &work, staging: &staging };
    match job.write(found, calibration, table, on_event) {
        Ok(mut report) => {
            let kept = |t: &TensorReport| whole.tensors.iter().zip(&kept).any(|(w, kept)| w.name == t.name && kept.is_some());
            report.tensors.iter_mut().for_each(|t| t.kept = kept(t));
            report.rounded_again = rounded_again;
            staging.publish(target)?;
            Ok(report)
        }
        Err(e) if rounded && e.kind == Kind::Interrupted => {
            staging.keep();
            Err(e.with_hint("what is done is kept: the same conversion will go on from there"))
        }
        Err(e) => Err(e),
    }
}

/// The writing of a bundle whose formats are chosen.
struct Job<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a ModelPlan,
    options: &'a Options,
    work: &'a Work,
    staging: &'a Staging,
}

impl Job<'_> {
    /// Writes all files, the weights from where `found` ends.
    fn write(
        &self,
        found: Found,
        mut calibration: Option<Calibration>,
        mut table: Option<Factors>,
        on_event: &mut dyn FnMut(Event) -> Result<()>,
    ) -> Result<Report> {
        let Job { checkpoint, plan, options, work, staging } = *self;
        let dir = &staging.dir;
        let Found { mut record, bytes, hash, streams } = found;
        let mut out = Output::open(dir.join(bundle::WEIGHTS), bytes, hash)?;
        if let (Some(calibration), Some(streams)) = (&mut calibration, streams) {
            calibration.restore(streams)?;
            on_event(Event::Note(&format!("going on with {}", self.part(record.finished()))))?;
        } else if calibration.is_some() {
            record.write(dir, 0, &out.hash, &[])?;
        }
        let calibrated = calibration.is_some();
        let last_rounded = record.formats.iter().rposition(|format| format.is_rounded());
        let tied = plan.spec.tied() && record.formats.first().is_some_and(|embed| embed.is_rounded());
        if let Some(calibration) = calibration.as_mut().filter(|_| record.finished() == 0 && tied && table.is_none()) {
            on_event(Event::Note("going on with the embedding table"))?;
            table = Some(calibration.original_pass(options.code, false, &mut |_| on_event(Event::Advance(0)))?.0);
        }
        if out.bytes == 0 {
            out.write(&header(&plan.tensors, &record.formats)?)?;
        }
        let mut factors = None;
        for (i, tensor) in plan.tensors.iter().enumerate().skip(record.finished()) {
            let (format, (to_calibrate, to_round)) = (record.formats[i], work.tensors[i]);
            if last_rounded.is_none_or(|last| i > last) {
                calibration = None;
            }
            let begins = i == 0 || self.part(i) != self.part(i - 1);
            if begins {
                on_event(Event::Stage(&self.part(i)))?;
            }
            if let Some(calibration) = calibration.as_mut().filter(|_| begins && i > 0) {
                out.flush()?;
                record.write(dir, out.bytes, &out.hash, &calibration.streams()?)?;
            }
            // Those of a table serve all of its parts.
            if tensor.role != Role::Embedding && tensor.first_row == 0 {
                factors = None;
            }
            if let Some(calibration) = &mut calibration
                && tensor.first_row == 0
            {
                let layout = CqLayout::new(format, tensor.rows, tensor.cols).filter(|_| format.is_rounded());
                factors = match (tensor.role, layout) {
                    (Role::Embedding, _) => table.take(),
                    (Role::Head, Some(layout)) => Some(calibration.head(&layout)?),
                    (Role::Matrix, Some(layout)) => calibration.factors(&tensor.name, &layout)?,
                    _ => calibration.arrive(&tensor.name).map(|_| None)?,
                };
            }
            on_event(Event::Advance(to_calibrate))?;
            let mut kept = calibration.is_some().then(Vec::new);
            let aim = factors.as_ref().map(|factors| Aim { factors, share: options.sequential });
            let mut each = |rows: Range<usize>| {
                let until = |row: usize| (u128::from(to_round) * row as u128 / tensor.rows as u128) as u64;
                on_event(Event::Advance(until(rows.end) - until(rows.start)))
            };
            let error = write_tensor(checkpoint, tensor, format, aim, &mut out, &mut kept, &mut each)?;
            out.align()?;
            if let (Some(calibration), Some(kept)) = (&mut calibration, kept) {
                match tensor.role {
                    Role::Embedding => calibration.embedded(tensor, format, &kept),
                    Role::Matrix => calibration.stored(tensor, format, &kept),
                    Role::Head | Role::Vector => {}
                }
            }
            record.push(error);
        }
        let weights_sha256 = out.finish()?;
        let tensors = plan.tensors.iter().enumerate().map(|(i, tensor)| TensorReport::new(tensor, &record, i)).collect();
        let report = Report { family: plan.family, tensors, rounded_again: Vec::new() };
        self.write_texts(&report, weights_sha256, calibrated)?;
        record::remove(dir);
        Ok(report)
    }

    /// What a tensor is part of, for people. Where a part begins, a conversion can go on.
    fn part(&self, tensor: usize) -> String {
        let TensorPlan { name, role, .. } = &self.plan.tensors[tensor];
        let layer = name.strip_prefix("layers.").and_then(|n| n.split('.').next()?.parse::<usize>().ok());
        match layer {
            Some(layer) => format!("layer {} of {}", layer + 1, self.plan.spec.layers()),
            None if *role == Role::Embedding => "the embedding table".to_owned(),
            None => "the output".to_owned(),
        }
    }

    /// Writes everything but the weights.
    fn write_texts(&self, report: &Report, weights_sha256: String, calibrated: bool) -> Result<()> {
        let Job { checkpoint, plan, options, staging, .. } = *self;
        let entry = |(t, from): (&TensorReport, &TensorPlan)| TensorEntry {
            format: t.format,
            rows: t.rows,
            cols: t.cols,
            relative_error: t.error.relative(),
            sources: source_shapes(from, checkpoint),
            first_row: from.first_row,
            left_out: from.left_out,
        };
        let scalar = |f: Format| f.is_quantised() && f.bits() <= 4 && f.code() == Code::Scalar;
        let widths = report.tensors.iter().map(|t| t.format).filter(|f| scalar(*f)).map(Format::bits);
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            written_by: format!("cactus {}", env!("CARGO_PKG_VERSION")),
            family: plan.family.to_owned(),
            source: options.source.clone(),
            quantiser: Quantiser {
                bits: options.bits,
                bits_per_weight: report.bits_per_weight(),
                calibration_tokens: if calibrated { options.calibration.iter().map(Vec::len).sum() } else { 0 },
                calibration_text: if calibrated { options.calibration_text.clone() } else { String::new() },
                rotation_signs: bundle::rotation_signs(),
                codebooks: widths.map(|b| (b.to_string(), bundle::codebook_levels(b))).collect(),
            },
            spec: plan.spec.clone(),
            weights_sha256,
            tensors: report.tensors.iter().zip(&plan.tensors).map(|t| (t.0.name.clone(), entry(t))).collect(),
        };
        staging.write(bundle::MANIFEST, &json(&manifest))?;
        staging.write(bundle::SOURCE_CONFIG, &json(&checkpoint.config))?;
        staging.write(bundle::TOKENIZER, &checkpoint.tokenizer.tokenizer_json)?;
        staging.write(bundle::TOKENIZER_CONFIG, &json(&checkpoint.tokenizer.config))?;
        if let Some(template) = &checkpoint.tokenizer.chat_template {
            staging.write(bundle::CHAT_TEMPLATE, template)?;
        }
        if let Some(generation) = &checkpoint.generation {
            staging.write(bundle::GENERATION_CONFIG, &json(generation))?;
        }
        Ok(())
    }
}

/// Pretty JSON, with a line feed at the end.
fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

/// The safetensors header. Tensors must follow one another without gaps, so the bytes that align the next
/// one are a tensor of their own, `pad.N`.
fn header(tensors: &[TensorPlan], formats: &[Format]) -> Result<Vec<u8>> {
    let mut map = serde_json::Map::new();
    let mut offset = 0usize;
    for (i, (tensor, format)) in tensors.iter().zip(formats).enumerate() {
        let bytes = format
            .bytes(tensor.rows, tensor.cols)
            .ok_or_else(|| Error::unsupported(format!("tensor {} is too large", tensor.name)))?;
        let (dtype, shape) = match format {
            Format::F32 => ("F32", vec![tensor.rows, tensor.cols]),
            Format::F16 => ("F16", vec![tensor.rows, tensor.cols]),
            Format::BF16 => ("BF16", vec![tensor.rows, tensor.cols]),
            _ => ("U8", vec![bytes]),
        };
        let mut put = |name: String, dtype: &str, shape: Vec<usize>, bytes: usize| {
            map.insert(name, serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bytes] }));
            offset += bytes;
        };
        put(tensor.name.clone(), dtype, shape, bytes);
        let pad = bytes.next_multiple_of(ALIGN) - bytes;
        if pad > 0 {
            put(format!("pad.{i}"), "U8", vec![pad], pad);
        }
    }
    let mut text = serde_json::Value::Object(map).to_string().into_bytes();
    text.resize((text.len() + 8).next_multiple_of(ALIGN) - 8, b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    Ok(header)
}

/// Writes a tensor and gives its error; its bytes are added to `kept` as well. `each` is called with rows that
/// are done.
fn write_tensor(
    checkpoint: &Checkpoint,
    tensor: &TensorPlan,
    format: Format,
    aim: Option<Aim>,
    out: &mut Output,
    kept: &mut Option<Vec<u8>>,
    each: &mut dyn FnMut(Range<usize>) -> Result<()>,
) -> Result<SquareError> {
    let mut sum = SquareError::default();
    let mut write = |bytes: &[u8]| -> Result<()> {
        kept.iter_mut().for_each(|kept| kept.extend_from_slice(bytes));
        out.write(bytes)
    };
    let encoder = Encoder::new(checkpoint, tensor, format, aim)?;
    write(&encoder.header())?;
    // Enough bands at a time to keep all cores busy, few enough to stay small.
    let bands = tensor.rows.div_ceil(BAND_ROWS);
    let batch = (2 * rayon::current_num_threads()).min((64 << 20) / (BAND_ROWS * tensor.cols * 4)).max(1);
    let rows = |band: usize| band * BAND_ROWS..((band + 1) * BAND_ROWS).min(tensor.rows);
    for start in (0..bands).step_by(batch) {
        let done: Vec<(Vec<u8>, SquareError)> =
            (start..bands.min(start + batch)).into_par_iter().map(|band| encoder.rows(rows(band))).collect::<Result<_>>()?;
        for (band, (bytes, error)) in done.into_iter().enumerate() {
            write(&bytes)?;
            sum += error;
            each(rows(start + band))?;
        }
    }
    Ok(sum)
}

/// The weights file being written.
struct Output {
    file: BufWriter<File>,
    path: PathBuf,
    /// Bytes of the file, and their hash.
    bytes: u64,
    hash: Sha256,
}

impl Output {
    /// Goes on with a file after its first `bytes`, whose hash is known.
    fn open(path: PathBuf, bytes: u64, hash: Sha256) -> Result<Self> {
        let open = || {
            let mut file = File::options().write(true).create(true).truncate(false).open(&path)?;
            file.set_len(bytes)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        let file = open().map_err(|e| Error::io("create", &path, &e))?;
        Ok(Output { file: BufWriter::with_capacity(1 << 20, file), path, bytes, hash })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, &e))
    }

    /// Fills up to where a tensor may begin.
    fn align(&mut self) -> Result<()> {
        let missing = self.bytes.next_multiple_of(ALIGN as u64) - self.bytes;
        self.write(&vec![0; missing as usize])
    }

    fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(|e| Error::io("write", &self.path, &e))
    }

    /// Gives the SHA-256 of the file in hexadecimal.
    fn finish(self) -> Result<String> {
        let failed = |e: std::io::Error| Error::io("write", &self.path, &e);
        let file = self.file.into_inner().map_err(|e| failed(e.into_error()))?;
        file.sync_all().map_err(|e| Error::io("write", &self.path, &e))?;
        Ok(record::hex(self.hash))
    }
}
