//! From a checkpoint to a bundle: tensor by tensor, a few rows at a time, published by one rename.

use super::bundle::{self, FORMAT_VERSION, Manifest, Provenance, Quantiser, TensorEntry};
use super::calibrate::Calibration;
use super::encoder::{Aim, Encoder};
use super::families::{self, ModelPlan, Role, TensorPlan};
use super::import::Checkpoint;
use super::moments::Factors;
use super::source::{source_shapes, unquantised};
use super::staging::Staging;
use super::survey;
use crate::error::{Error, Result};
use crate::hub::cache::check_room;
use crate::quant::allocate::{DISTORTION, Item, allocate};
use crate::quant::encode::SquareError;
use crate::quant::encode_trellis::BAND_ROWS;
use crate::quant::format::ALIGN;
use crate::quant::{Bits, Code, CqLayout, Format};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
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
    pub source: Provenance,
}

/// What happens while converting. An error from the handler ends the conversion, and nothing is left of it.
pub enum Event<'a> {
    /// Something the user should know.
    Warning(&'a str),
    /// Work begins: weights to convert in all.
    Start { weights: u64 },
    /// What is done before weights are written.
    Stage(&'a str),
    /// So many more weights are done.
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
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Report {
    pub family: &'static str,
    pub tensors: Vec<TensorReport>,
}

impl TensorReport {
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

/// Converts `checkpoint` into a bundle at `target`, which must not exist or be a bundle (it is replaced).
/// The same input gives the same bytes. Until the last moment nothing is visible under the final name.
pub fn convert(
    checkpoint: &Checkpoint,
    target: &Path,
    options: &Options,
    on_event: &mut dyn FnMut(Event) -> Result<()>,
) -> Result<Report> {
    let plan = families::plan(checkpoint)?;
    plan.warnings.iter().try_for_each(|w| on_event(Event::Warning(w)))?;
    if target.exists() && !super::Bundle::is_bundle(target) {
        return Err(Error::usage(format!("{} exists and is no bundle; it will not be overwritten", target.display())));
    }
    let rounded = options.bits < Bits::EIGHT && !options.calibration.is_empty();
    let mut calibration = match rounded {
        true => Some(Calibration::new(checkpoint, &plan, &options.calibration, options.sequential.is_some())?),
        false => None,
    };
    let Choice { formats, expected, mut table } = choose(checkpoint, &plan, options, &mut calibration, on_event)?;
    let sizes = plan.tensors.iter().zip(&formats).map(|(t, f)| f.bytes(t.rows, t.cols).unwrap_or(usize::MAX) as u64);
    check_room(target, sizes.fold(0, u64::saturating_add), "the converted model")?;
    let staging = Staging::create(target)?;
    on_event(Event::Start { weights: plan.tensors.iter().map(|t| (t.rows * t.cols) as u64).sum() })?;

    let path = staging.dir.join(bundle::WEIGHTS);
    let file = File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
    let mut out = Output { file: BufWriter::with_capacity(1 << 20, file), hash: Sha256::new(), path };
    out.write(&header(&plan.tensors, &formats)?)?;
    let mut reports = Vec::new();
    for ((tensor, format), expected_kl) in plan.tensors.iter().zip(formats).zip(expected) {
        let mut factors = None;
        if let (Some(calibration), Some(layout)) = (&mut calibration, CqLayout::new(format, tensor.rows, tensor.cols)) {
            factors = match tensor.role {
                Role::Embedding => table.take(),
                Role::Head => Some(calibration.head(&layout)?),
                _ => calibration.factors(&tensor.name, &layout)?,
            };
        }
        let mut kept = calibration.is_some().then(Vec::new);
        let aim = factors.as_ref().map(|factors| Aim { factors, share: options.sequential });
        let report = write_tensor(checkpoint, tensor, format, aim, &mut out, &mut kept, on_event)?;
        out.write(&vec![0; report.bytes.next_multiple_of(ALIGN) - report.bytes])?;
        if let (Some(calibration), Some(kept)) = (&mut calibration, kept) {
            match tensor.role {
                Role::Embedding => calibration.embedded(format, &kept)?,
                Role::Matrix => calibration.stored(tensor, format, &kept),
                Role::Head | Role::Vector => {}
            }
        }
        reports.push(TensorReport { expected_kl, ..report });
    }
    let weights_sha256 = out.finish()?;
    let report = Report { family: plan.family, tensors: reports };

    let entry = |(t, from): (&TensorReport, &TensorPlan)| TensorEntry {
        format: t.format,
        rows: t.rows,
        cols: t.cols,
        relative_error: t.error.relative(),
        sources: source_shapes(from, checkpoint),
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
            calibration_tokens: if calibration.is_some() { options.calibration.iter().map(Vec::len).sum() } else { 0 },
            calibration_text: calibration.as_ref().map(|_| options.calibration_text.clone()).unwrap_or_default(),
            rotation_signs: bundle::rotation_signs(),
            codebooks: widths.map(|b| (b.to_string(), bundle::codebook_levels(b))).collect(),
        },
        spec: plan.spec,
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
    staging.publish(target)?;
    Ok(report)
}

/// Pretty JSON, with a line feed at the end.
fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

/// What [`choose`] decides, tensor by tensor.
struct Choice {
    formats: Vec<Format>,
    expected: Vec<Option<f64>>,
    /// For a table that is embedding and head in one.
    table: Option<Factors>,
}

/// Decides the formats of all tensors.
fn choose(
    checkpoint: &Checkpoint,
    plan: &ModelPlan,
    options: &Options,
    calibration: &mut Option<Calibration>,
    on_event: &mut dyn FnMut(Event) -> Result<()>,
) -> Result<Choice> {
    let mut choice = Choice { formats: Vec::new(), expected: vec![None; plan.tensors.len()], table: None };
    let uniform = options.bits.uniform();
    if uniform.is_none() && calibration.is_none() {
        return Err(Error::usage(format!("{} bits are a mixture, and finding it needs text to calibrate on", options.bits))
            .with_hint("leave out --calibrate none"));
    }
    let mut gains = BTreeMap::new();
    if let Some(calibration) = calibration.as_mut().filter(|_| plan.spec.tied || uniform.is_none()) {
        on_event(Event::Stage("running the original model"))?;
        let (table, found) = calibration.original_pass(options.code, uniform.is_none())?;
        (choice.table, gains) = (Some(table).filter(|_| plan.spec.tied), found);
    }
    let of_bits = |bits: u32, tensor: &TensorPlan| match bits {
        16 => unquantised(tensor, checkpoint),
        _ => Format::cq(bits, options.code)
            .ok_or_else(|| Error::usage(format!("{bits} bits a matrix (there are 1, 2, 3, 4, 8, 16)"))),
    };
    // Plain rounding of the head costs more than it saves.
    let plain = calibration.is_none() && options.bits < Bits::EIGHT;
    let head = options.head_bits.or(uniform.map(|bits| if plain { 8 } else { bits }));
    let fixed = |tensor: &TensorPlan| match tensor.role {
        Role::Vector => Ok(Some(Format::F32)),
        Role::Matrix => uniform.map(|bits| of_bits(bits, tensor)).transpose(),
        Role::Embedding | Role::Head => head.map(|bits| of_bits(bits, tensor)).transpose(),
    };
    let fixed: Vec<Option<Format>> = plan.tensors.iter().map(fixed).collect::<Result<_>>()?;
    let free: Vec<usize> = (0..fixed.len()).filter(|i| fixed[*i].is_none()).collect();
    choice.formats = fixed.iter().map(|f| f.unwrap_or(Format::F32)).collect();
    if free.is_empty() {
        return Ok(choice);
    }
    on_event(Event::Stage("measuring how much each matrix matters"))?;
    let sensitivities = survey::sensitivities(checkpoint, plan, &options.calibration, &mut || on_event(Event::Advance(0)))?;
    let weights: u64 = plan.tensors.iter().map(|t| (t.rows * t.cols) as u64).sum();
    let taken: usize = plan.tensors.iter().zip(&fixed).filter_map(|(t, f)| f.as_ref()?.bytes(t.rows, t.cols)).sum();
    let budget = (weights as f64 * options.bits.value() / 8.0) as u64;
    let mut items = Vec::new();
    for &i in &free {
        let tensor = &plan.tensors[i];
        let candidates = survey::candidates(options.code, tensor.rows, tensor.cols)?;
        let error = |name: &str| sensitivities.get(name).copied().unwrap_or(0.0) / survey::PROBE_DISTORTION;
        let gain = |name: &str| gains.get(name).copied().unwrap_or(1.0);
        let error = match tensor.role {
            // Looking up is helped by nothing, the output by feedback.
            Role::Embedding if plan.spec.tied => error("embed") + error("head") * gain("head"),
            Role::Embedding => error("embed"),
            _ => error(&tensor.name) * gain(&tensor.name),
        };
        items.push(Item { bytes: candidates.map(|c| c.1), cost: DISTORTION.map(|d| d * error) });
    }
    let widths = allocate(&items, budget.saturating_sub(taken as u64)).ok_or_else(|| {
        let least: u64 = items.iter().map(|item| item.bytes[0]).sum::<u64>() + taken as u64;
        Error::usage(format!(
            "{} bits a weight are too few: this model needs {:.2}",
            options.bits,
            8.0 * least as f64 / weights as f64
        ))
    })?;
    for ((&i, width), item) in free.iter().zip(widths).zip(&items) {
        let tensor = &plan.tensors[i];
        choice.formats[i] = survey::candidates(options.code, tensor.rows, tensor.cols)?[width].0;
        choice.expected[i] = Some(item.cost[width]);
    }
    Ok(choice)
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

/// Writes a tensor; its bytes are added to `kept` as well.
fn write_tensor(
    checkpoint: &Checkpoint,
    tensor: &TensorPlan,
    format: Format,
    aim: Option<Aim>,
    out: &mut Output,
    kept: &mut Option<Vec<u8>>,
    on_event: &mut dyn FnMut(Event) -> Result<()>,
) -> Result<TensorReport> {
    let layout = CqLayout::new(format, tensor.rows, tensor.cols);
    let mut report = TensorReport {
        name: tensor.name.clone(),
        rows: tensor.rows,
        cols: tensor.cols,
        format,
        bytes: 0,
        error: SquareError::default(),
        expected_kl: None,
        padded: layout.is_some_and(|l| l.padded_cols() != l.cols),
    };
    let mut write = |bytes: &[u8]| -> Result<()> {
        report.bytes += bytes.len();
        kept.iter_mut().for_each(|kept| kept.extend_from_slice(bytes));
        out.write(bytes)
    };
    let encoder = Encoder::new(checkpoint, tensor, format, aim)?;
    write(&encoder.header())?;
    // Enough bands at a time to keep all cores busy, few enough to stay small.
    let bands = tensor.rows.div_ceil(BAND_ROWS);
    let batch = (2 * rayon::current_num_threads()).min((64 << 20) / (BAND_ROWS * tensor.cols * 4)).max(1);
    for start in (0..bands).step_by(batch) {
        let band = |band: usize| encoder.rows(band * BAND_ROWS..((band + 1) * BAND_ROWS).min(tensor.rows));
        let done: Vec<(Vec<u8>, SquareError)> =
            (start..bands.min(start + batch)).into_par_iter().map(band).collect::<Result<_>>()?;
        for (band, (bytes, error)) in done.into_iter().enumerate() {
            write(&bytes)?;
            report.error += error;
            let rows = BAND_ROWS.min(tensor.rows - (start + band) * BAND_ROWS);
            on_event(Event::Advance((rows * tensor.cols) as u64))?;
        }
    }
    Ok(report)
}

/// The weights file being written.
struct Output {
    file: BufWriter<File>,
    /// Of everything written.
    hash: Sha256,
    path: PathBuf,
}

impl Output {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, &e))
    }

    /// Gives the SHA-256 of the file in hexadecimal.
    fn finish(self) -> Result<String> {
        let failed = |e: std::io::Error| Error::io("write", &self.path, &e);
        let file = self.file.into_inner().map_err(|e| failed(e.into_error()))?;
        file.sync_all().map_err(|e| Error::io("write", &self.path, &e))?;
        Ok(self.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
