//! From a checkpoint to a bundle: tensor by tensor, a few rows at a time, published by one rename.

use super::bundle::{self, FORMAT_VERSION, Manifest, Provenance, Quantiser, TensorEntry};
use super::calibrate::Calibration;
use super::families::{self, Role, TensorPlan};
use super::import::Checkpoint;
use super::source::{plain, read_rows, source_shapes, unquantised};
use super::staging::Staging;
use crate::error::{Error, Result};
use crate::hub::cache::check_room;
use crate::kernels::matmul_float::{FloatMatrix, MatMulFloat};
use crate::kernels::{Level, Pool};
use crate::quant::encode::{Product, SquareError, encode_tile};
use crate::quant::feedback::Feedback;
use crate::quant::format::{ALIGN, TILE_ROWS};
use crate::quant::{CqLayout, Format};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// What to convert to.
#[derive(Clone, Debug)]
pub struct Options {
    /// 1, 2, 3, 4 or 8: quantised; 16: stored as it is (f32 sources as f16).
    pub bits: u32,
    /// The same choice for embedding table and output head; `None`: see [`head_bits`].
    pub head_bits: Option<u32>,
    /// Token ids of sample texts to measure inputs on; empty: plain rounding. Has no effect from 8 bits on.
    pub calibration: Vec<Vec<u32>>,
    pub source: Provenance,
}

/// Bits of embedding and head when nothing else is asked for: the head sees every error of the layers
/// below once more, and plain rounding there costs more than it saves.
pub fn head_bits(bits: u32) -> u32 {
    if bits < 8 { 8 } else { bits }
}

/// What happens while converting. An error from the handler ends the conversion, and nothing is left of it.
pub enum Event<'a> {
    /// Something the user should know.
    Warning(&'a str),
    /// Work begins: weights to convert in all.
    Start { weights: u64 },
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
    let formats: Vec<Format> = plan.tensors.iter().map(|t| format(t, checkpoint, options)).collect::<Result<_>>()?;
    let sizes = plan.tensors.iter().zip(&formats).map(|(t, f)| f.bytes(t.rows, t.cols).unwrap_or(usize::MAX) as u64);
    check_room(target, sizes.fold(0, u64::saturating_add), "the converted model")?;
    let staging = Staging::create(target)?;
    on_event(Event::Start { weights: plan.tensors.iter().map(|t| (t.rows * t.cols) as u64).sum() })?;

    let path = staging.dir.join(bundle::WEIGHTS);
    let file = File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
    let mut out = Output { file: BufWriter::with_capacity(1 << 20, file), hash: Sha256::new(), path };
    out.write(&header(&plan.tensors, &formats)?)?;
    let mut reports = Vec::new();
    let mut calibration = match options.bits {
        1..=4 if !options.calibration.is_empty() => Some(Calibration::start(checkpoint, &plan, &options.calibration)?),
        _ => None,
    };
    let mut layers = 0;
    let mut feedback = BTreeMap::new();
    for (tensor, format) in plan.tensors.iter().zip(formats) {
        if let Some(calibration) = calibration.as_mut().filter(|_| tensor.name.starts_with(&format!("layers.{layers}."))) {
            feedback = calibration.layer(layers)?;
            layers += 1;
        }
        let report = write_tensor(checkpoint, tensor, format, feedback.get(&tensor.name), &mut out, on_event)?;
        out.write(&vec![0; report.bytes.next_multiple_of(ALIGN) - report.bytes])?;
        reports.push(report);
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
    let widths = report.tensors.iter().filter(|t| t.format.is_quantised() && t.format.bits() <= 4).map(|t| t.format.bits());
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        written_by: format!("cactus {}", env!("CARGO_PKG_VERSION")),
        family: plan.family.to_owned(),
        source: options.source.clone(),
        quantiser: Quantiser {
            bits: options.bits,
            bits_per_weight: report.bits_per_weight(),
            calibration_tokens: if layers > 0 { options.calibration.iter().map(Vec::len).sum() } else { 0 },
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

/// The format of a bundle tensor.
fn format(tensor: &TensorPlan, checkpoint: &Checkpoint, options: &Options) -> Result<Format> {
    let head = options.head_bits.unwrap_or_else(|| head_bits(options.bits));
    let bits = match tensor.role {
        Role::Vector => return Ok(Format::F32),
        Role::Matrix => options.bits,
        Role::Embedding | Role::Head => head,
    };
    if bits == 16 {
        return unquantised(tensor, checkpoint);
    }
    Format::cq(bits).ok_or_else(|| Error::usage(format!("{bits} bits are not supported (supported: 1, 2, 3, 4, 8, 16)")))
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

fn write_tensor(
    checkpoint: &Checkpoint,
    tensor: &TensorPlan,
    format: Format,
    feedback: Option<&Feedback>,
    out: &mut Output,
    on_event: &mut dyn FnMut(Event) -> Result<()>,
) -> Result<TensorReport> {
    let (kernel, alone) = (MatMulFloat::select(Level::best(None)), Pool::new(1));
    let product = |outer: &[f32], errors: &[f32], later: usize, sums: &mut [f32]| {
        kernel.run(&alone, FloatMatrix::F32(outer), later, errors, None, sums);
    };
    let layout = CqLayout::new(format, tensor.rows, tensor.cols);
    let tiles = tensor.rows.div_ceil(TILE_ROWS);
    let mut report = TensorReport {
        name: tensor.name.clone(),
        rows: tensor.rows,
        cols: tensor.cols,
        format,
        bytes: 0,
        error: SquareError::default(),
        padded: layout.is_some_and(|l| l.padded_cols() != l.cols),
    };
    // Enough tiles at a time to keep all cores busy, few enough to stay small.
    let batch = (4 * rayon::current_num_threads()).min((64 << 20) / (TILE_ROWS * tensor.cols * 4)).max(1);
    for start in (0..tiles).step_by(batch) {
        let one = |tile: usize| -> Result<(Vec<u8>, SquareError)> {
            let rows = tile * TILE_ROWS..((tile + 1) * TILE_ROWS).min(tensor.rows);
            let mut values = vec![0.0f32; rows.len() * tensor.cols];
            read_rows(checkpoint, tensor, rows, &mut values)?;
            Ok(match &layout {
                Some(layout) => {
                    let mut bytes = vec![0; layout.tile_bytes()];
                    let error = encode_tile(layout, &values, feedback.map(|f| (f, &product as Product)), &mut bytes);
                    (bytes, error)
                }
                None => plain(format, &values),
            })
        };
        let done: Vec<(Vec<u8>, SquareError)> =
            (start..tiles.min(start + batch)).into_par_iter().map(one).collect::<Result<_>>()?;
        for (tile, (bytes, error)) in done.into_iter().enumerate() {
            out.write(&bytes)?;
            report.bytes += bytes.len();
            report.error += error;
            let rows = TILE_ROWS.min(tensor.rows - (start + tile) * TILE_ROWS);
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
