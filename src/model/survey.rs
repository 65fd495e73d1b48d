//! How much each matrix matters: measured before anything is rounded, for the choice of bits.
//!
//! A few hundred sample tokens are run through an 8-bit version of the model, and once more for every matrix
//! with that matrix alone rounded to 3 bits; the divergence of the output from the 8-bit one is its
//! sensitivity. All versions are taken through the layers together, so a layer's weights are in memory once.

use super::decoder;
use super::encoder::Encoder;
use super::families::{ModelPlan, Role, TensorPlan};
use super::import::Checkpoint;
use super::work;
use crate::error::{Error, Result};
use crate::graph::{CacheFormat, Feed, Graph, Memory, Plan, Run, Weight};
use crate::kernels::{Level, Pool};
use crate::quant::Format;
use crate::quant::encode_trellis::BAND_ROWS;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Tokens that are run, and positions whose output is compared.
const TOKENS: usize = 1024;
pub const SCORED: usize = 128;
/// Bytes that the versions of the residual stream may take together.
const STREAM_BYTES: usize = 1 << 30;
/// Rows of the output that are computed at once.
const OUTPUT_ROWS: usize = 16;
/// How matrices are rounded to be compared, and the mean squared error of a Gaussian that way.
const PROBE: Format = Format::Cq3;
pub const PROBE_DISTORTION: f64 = 0.0345;
/// How they are stored otherwise.
const BASE: Format = Format::Cq8;

/// Divergence in nats a token with one matrix alone at 3 bits, plainly rounded, by name. An embedding that
/// is the head as well counts as both: `embed` for look-ups, `head` for the output.
pub type Sensitivities = BTreeMap<String, f64>;

/// What is measured.
pub struct Found {
    pub sensitivities: Sensitivities,
    /// Mean probability of every token.
    pub likely: Vec<f64>,
}

/// Called with work that is done.
type Each<'a> = &'a mut dyn FnMut(u64) -> Result<()>;

struct Survey<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a ModelPlan,
    level: Level,
    pool: Pool,
    /// Tokens of each text.
    lengths: Vec<usize>,
}

/// The sample texts that are used.
pub fn sample<'a>(plan: &ModelPlan, texts: &'a [Vec<u32>]) -> Vec<&'a [u32]> {
    let versions = work::survey_versions(plan.decoder().layers.len());
    let mut room = TOKENS.min(STREAM_BYTES / (versions * plan.decoder().dim * 4)).max(64);
    let mut ids: Vec<&[u32]> = Vec::new();
    for text in texts {
        let part = &text[..text.len().min(room)];
        if !part.is_empty() {
            ids.push(part);
            room -= part.len();
        }
    }
    ids
}

/// Measures all matrices of a model on sample texts. `each` is told the work as it is done.
pub fn survey(checkpoint: &Checkpoint, plan: &ModelPlan, texts: &[Vec<u32>], each: Each) -> Result<Found> {
    let (level, pool) = (Level::best(None), Pool::new(Pool::default_threads()));
    let dim = plan.decoder().dim;
    let ids = sample(plan, texts);
    let survey = Survey { checkpoint, plan, level, pool, lengths: ids.iter().map(|t| t.len()).collect() };
    let ids: Vec<u32> = ids.concat();

    let table = survey.tensor("embed")?;
    let embed = |format: Format| -> Result<Vec<f32>> {
        let mut memory = Memory::default();
        let weight = survey.stored(table, format, &mut memory)?;
        let mut stream = vec![0.0; ids.len() * dim];
        for (id, row) in ids.iter().zip(stream.chunks_exact_mut(dim)) {
            weight.row(memory.bytes(), *id as usize, row);
            row.iter_mut().for_each(|x| *x *= plan.decoder().embed_scale);
        }
        Ok(stream)
    };
    let mut names = vec![String::new(), "embed".to_owned()];
    let mut streams = vec![embed(BASE)?, embed(PROBE)?];
    for i in 0..plan.decoder().layers.len() {
        survey.layer(i, &mut names, &mut streams, each)?;
    }
    survey.compare(&names, &streams, each)
}

impl Survey<'_> {
    fn tensor(&self, name: &str) -> Result<&TensorPlan> {
        let missing = || Error::unsupported(format!("tensor {name} is missing"));
        self.plan.tensors.iter().find(|t| t.name == name).ok_or_else(missing)
    }

    /// A tensor, plainly rounded to `format` if it is a matrix.
    fn stored(&self, tensor: &TensorPlan, format: Format, memory: &mut Memory) -> Result<Weight> {
        let format = if tensor.role == Role::Vector { Format::F32 } else { format };
        let encoder = Encoder::new(self.checkpoint, tensor, format, None)?;
        let band = |first: usize| Ok(encoder.rows(first..(first + BAND_ROWS).min(tensor.rows))?.0);
        let bands: Vec<Vec<u8>> = (0..tensor.rows).into_par_iter().step_by(BAND_ROWS).map(band).collect::<Result<_>>()?;
        let bytes = [encoder.header(), bands.concat()].concat();
        Ok(memory.push(&tensor.name, &bytes, tensor.rows, tensor.cols, format))
    }

    /// Takes all streams through a layer and adds those in which one of its matrices is rounded.
    fn layer(&self, i: usize, names: &mut Vec<String>, streams: &mut Vec<Vec<f32>>, each: Each) -> Result<()> {
        let prefix = format!("layers.{i}.");
        let tensors: Vec<&TensorPlan> = self.plan.tensors.iter().filter(|t| t.name.starts_with(&prefix)).collect();
        let mut memory = Memory::default();
        let mut weights = BTreeMap::new();
        for tensor in &tensors {
            weights.insert(tensor.name.as_str(), self.stored(tensor, BASE, &mut memory)?);
        }
        let run = work::survey_run(self.plan, i, self.lengths.iter().sum());
        let graph = |weights: &BTreeMap<&str, Weight>| {
            let missing = |name: &str| Error::unsupported(format!("tensor {name} is missing"));
            decoder::layer_graph(self.plan.decoder(), i, &|name| weights.get(name).cloned().ok_or_else(|| missing(name)))
        };
        for tensor in tensors.iter().filter(|t| t.role == Role::Matrix) {
            let probe = self.stored(tensor, PROBE, &mut memory)?;
            let mut weights = weights.clone();
            weights.insert(&tensor.name, probe);
            names.push(tensor.name.clone());
            streams.push(self.run(&graph(&weights)?, &streams[0], memory.bytes())?);
            each(run)?;
        }
        let graph = graph(&weights)?;
        let known = streams.len() - tensors.iter().filter(|t| t.role == Role::Matrix).count();
        for stream in &mut streams[..known] {
            *stream = self.run(&graph, stream, memory.bytes())?;
            each(run)?;
        }
        Ok(())
    }

    /// The output of a graph for a residual stream, text by text.
    fn run(&self, graph: &Graph, x: &[f32], weights: &[u8]) -> Result<Vec<f32>> {
        let most = self.lengths.iter().copied().max().unwrap_or(1);
        let plan = Plan::new(graph, self.level, most, self.pool.threads())?;
        let (mut buffers, mut state) = (plan.buffers(), plan.state(most, CacheFormat::F16));
        let mut out = Vec::with_capacity(x.len());
        let mut rest = x;
        for &tokens in &self.lengths {
            let (rows, after) = rest.split_at(tokens * self.plan.decoder().dim);
            state.truncate(0);
            let feed = Feed::Rows { rows, tokens };
            plan.execute(Run { weights, feed, state: &mut state, buffers: &mut buffers, pool: &self.pool, profile: None });
            out.extend_from_slice(plan.output(&buffers, 0));
            rest = after;
        }
        Ok(out)
    }

    /// Divergences of the outputs from that of the first stream, and that of the first stream through a
    /// rounded head.
    fn compare(&self, names: &[String], streams: &[Vec<f32>], each: Each) -> Result<Found> {
        let mut memory = Memory::default();
        let table = self.tensor(if self.plan.decoder().tied { "embed" } else { "head" })?;
        let norm = self.stored(self.tensor("norm")?, BASE, &mut memory)?;
        let heads = [self.stored(table, BASE, &mut memory)?, self.stored(table, PROBE, &mut memory)?];
        let rows = self.scored();
        let output = |head: &Weight, stream: &[f32]| -> Result<Vec<f32>> {
            let find = |name: &str| Ok(if name == "norm" { norm.clone() } else { head.clone() });
            let graph = decoder::head_graph(self.plan.decoder(), &find)?;
            let plan = Plan::new(&graph, self.level, OUTPUT_ROWS, self.pool.threads())?;
            let (mut buffers, mut state) = (plan.buffers(), plan.state(OUTPUT_ROWS, CacheFormat::F16));
            let mut out = Vec::with_capacity(rows.len() * self.plan.decoder().vocab);
            for rows in rows.chunks(OUTPUT_ROWS) {
                let x: Vec<f32> = rows
                    .iter()
                    .flat_map(|r| &stream[r * self.plan.decoder().dim..][..self.plan.decoder().dim])
                    .copied()
                    .collect();
                let (feed, weights) = (Feed::Rows { rows: &x, tokens: rows.len() }, memory.bytes());
                plan.execute(Run { weights, feed, state: &mut state, buffers: &mut buffers, pool: &self.pool, profile: None });
                out.extend_from_slice(plan.output(&buffers, 0));
            }
            Ok(out)
        };
        // Probabilities of the reference, and the mean of the logarithm of each under itself. Sums are taken in
        // order, so that they do not depend on the threads.
        let mut reference = output(&heads[0], &streams[0])?;
        let vocab = self.plan.decoder().vocab;
        let entropy = |row: &mut [f32]| {
            let total = log_sum(row);
            let mut sum = 0.0f64;
            for x in row.iter_mut() {
                let log = *x - total;
                *x = log.exp();
                sum += f64::from(*x * log);
            }
            sum
        };
        let entropy: f64 = reference.par_chunks_exact_mut(vocab).map(entropy).collect::<Vec<f64>>().iter().sum();
        let divergence = |logits: &[f32]| -> f64 {
            let cross = |(p, z): (&[f32], &[f32])| {
                let sum: f64 = p.iter().zip(z).map(|(p, z)| f64::from(p * z)).sum();
                sum - f64::from(log_sum(z))
            };
            let rows_of = reference.par_chunks_exact(vocab).zip(logits.par_chunks_exact(vocab));
            let cross: f64 = rows_of.map(cross).collect::<Vec<f64>>().iter().sum();
            ((entropy - cross) / rows.len() as f64).max(0.0)
        };
        let mut likely = vec![0.0; vocab];
        for row in reference.chunks_exact(vocab) {
            likely.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p) / rows.len() as f64);
        }
        let mut found = Sensitivities::new();
        for (name, stream) in names.iter().zip(streams).skip(1) {
            found.insert(name.clone(), divergence(&output(&heads[0], stream)?));
            each(work::survey_output(self.plan))?;
        }
        found.insert("head".to_owned(), divergence(&output(&heads[1], &streams[0])?));
        each(work::survey_output(self.plan))?;
        Ok(Found { sensitivities: found, likely })
    }

    /// Evenly spread positions from the second half of every text, as rows of the streams.
    fn scored(&self) -> Vec<usize> {
        let mut first = 0;
        let mut rows = Vec::new();
        for &length in &self.lengths {
            rows.extend(first + length / 2..first + length);
            first += length;
        }
        let step = rows.len().div_ceil(SCORED).max(1);
        rows.into_iter().step_by(step).collect()
    }
}

/// `ln sum e^x`
fn log_sum(x: &[f32]) -> f32 {
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    largest + (x.iter().map(|x| f64::from((x - largest).exp())).sum::<f64>().ln() as f32)
}
