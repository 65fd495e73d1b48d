//! Running the network over a sample of text while it is being quantised.
//!
//! All sample tokens are taken from matrix product to matrix product: one stream through the original weights,
//! one through those already rounded. So the inputs of every product are known as they will be and as they
//! were, every product is computed once a stream, and only one layer's weights are in memory at a time. Memory
//! beyond that: a residual stream and the inputs of one product for all tokens, f32, twice.

use super::decoder::{self, Piece};
use super::families::{ModelPlan, TensorPlan};
use super::import::Checkpoint;
use super::moments::{Factors, Moments};
use super::source::{plain, read_rows, unquantised};
use super::work;
use crate::error::{Error, Result};
use crate::graph::{CacheFormat, Feed, Graph, Memory, Plan, Run, Weight};
use crate::kernels::matmul_float::MatMulFloat;
use crate::kernels::{Level, Pool};
use crate::quant::format::TILE_ROWS;
use crate::quant::{Code, CqLayout, Format};
use std::collections::BTreeMap;
use std::ops::Range;

/// Text of many kinds (prose, chat, code, data, twenty languages), pieces separated by lines of `---`; any
/// beginning of it is a mixture.
pub const SAMPLE: &str = include_str!("calibration.txt");

/// Tokens of a run.
const CHUNK: usize = 512;
/// Tokens whose products are summed up at once; long sums are quicker.
const MOMENT_TOKENS: usize = 2048;
/// Added to the diagonal of second moments, in units of its mean.
const DAMPING: f32 = 0.08;
/// The same for a table that is looked up as well, where every direction counts.
const TABLE_DAMPING: f32 = 0.11;
/// Tokens that the moments for a tied head are taken from at most.
const HEAD_TOKENS: usize = 8192;

/// The part of the sample that the original model is run on in advance.
pub fn original_texts(texts: &[Vec<u32>]) -> &[Vec<u32>] {
    let mut tokens = 0;
    let some = texts.iter().take_while(|text| {
        tokens += text.len();
        tokens - text.len() < HEAD_TOKENS
    });
    &texts[..some.count()]
}

/// The sample on its way through the network.
pub struct Calibration<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a ModelPlan,
    /// Token ids of each text.
    texts: &'a [Vec<u32>],
    original: Stream,
    /// `None`: inputs are measured on the original model.
    rounded: Option<Stream>,
    current: Option<Current>,
    machine: Machine,
}

/// All sample tokens on their way through one version of the weights.
#[derive(Clone, Default)]
struct Stream {
    /// Residual stream `[tokens, dim]` at the last addition.
    residual: Vec<f32>,
    /// Inputs of the current matrix product, `[tokens, cols]`.
    inputs: Vec<f32>,
}

/// What products are run with.
struct Machine {
    kernel: MatMulFloat,
    level: Level,
    pool: Pool,
}

/// A layer whose weights are in memory.
struct Current {
    index: usize,
    /// Products that the streams have reached; the last of them is the one that their inputs belong to.
    reached: usize,
    memory: Memory,
    original: BTreeMap<String, Weight>,
    /// The original weights but for those that are rounded.
    rounded: BTreeMap<String, Weight>,
}

/// The matrix products of a layer, and the way to the input of each from that of the one before (for the
/// first: from the residual stream).
const PRODUCTS: [(&str, &[Piece]); 4] = [
    ("attn.qkv", &[Piece::AttentionNorm]),
    ("attn.out", &[Piece::Attention]),
    ("mlp.gate_up", &[Piece::Out, Piece::MlpNorm]),
    ("mlp.down", &[Piece::Gate]),
];

impl<'a> Calibration<'a> {
    /// For texts as token ids. With `sequential`, inputs are those that the already rounded weights give, and
    /// [`embedded`](Self::embedded) and [`stored`](Self::stored) must be told every matrix in plan order.
    pub fn new(checkpoint: &'a Checkpoint, plan: &'a ModelPlan, texts: &'a [Vec<u32>], sequential: bool) -> Result<Self> {
        let vocab = plan.decoder().vocab;
        if let Some(id) = texts.iter().flatten().find(|id| **id as usize >= vocab) {
            return Err(Error::unsupported(format!("the tokenizer gives id {id}, the embedding has {vocab} rows")));
        }
        let level = Level::best(None);
        let machine = Machine { kernel: MatMulFloat::select(level), level, pool: Pool::new(Pool::default_threads()) };
        let rounded = sequential.then(Stream::default);
        let mut calibration =
            Calibration { checkpoint, plan, texts, original: Stream::default(), rounded, current: None, machine };
        let embed = calibration.tensor("embed");
        calibration.original.residual = calibration.embed(|id, row| read_rows(checkpoint, embed, id..id + 1, row))?;
        Ok(calibration)
    }

    /// The residual streams between two layers, the original one first.
    pub fn streams(&mut self) -> Result<Vec<&[f32]>> {
        self.finish_layer()?;
        Ok(std::iter::once(&self.original).chain(&self.rounded).map(|s| s.residual.as_slice()).collect())
    }

    /// Goes on between two layers, with the values of all [`streams`](Self::streams) there.
    pub fn restore(&mut self, mut values: Vec<f32>) -> Result<()> {
        let size = self.original.residual.len();
        if values.len() != size * (1 + usize::from(self.rounded.is_some())) {
            return Err(Error::unsupported("residual streams of another sample"));
        }
        if let Some(rounded) = &mut self.rounded {
            *rounded = Stream { residual: values.split_off(size), inputs: Vec::new() };
        }
        self.original = Stream { residual: values, inputs: Vec::new() };
        Ok(())
    }

    /// Runs the original model on part of the sample, before anything is rounded. Returns what the moments of
    /// the last hidden states say about a table that is embedding and head in one, and with `gains` the gain of
    /// feedback for every matrix by name (that of the head as `head`). `each` is told the work as it is done.
    pub fn original_pass(
        &mut self,
        code: Code,
        gains: bool,
        each: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<(Factors, BTreeMap<String, f64>)> {
        let texts = original_texts(self.texts);
        let tokens = texts.iter().map(Vec::len).sum::<usize>();
        let whole = std::mem::replace(&mut self.texts, texts);
        let mut stream = self.original.clone();
        stream.residual.truncate(tokens * self.plan.decoder().dim);
        let factors = |inputs: &[f32], damping: f32| {
            let cols = inputs.len() / tokens.max(1);
            let format = Format::cq(4, code).unwrap_or(Format::Cq4);
            let layout = CqLayout::new(format, 1, cols).ok_or_else(|| Error::unsupported("a matrix without columns"))?;
            let mut moments = Moments::new(&layout, false);
            self.add(&mut moments, inputs, None);
            Ok(moments.factors(damping, &self.machine.kernel, &self.machine.pool))
        };
        let mut found = BTreeMap::new();
        for i in 0..self.plan.decoder().layers.len() {
            let current = self.load(i)?;
            for product in 0..=PRODUCTS.len() {
                self.follow(&mut stream, &current, &current.original, product)?;
                if let Some((name, _)) = PRODUCTS.get(product).filter(|_| gains) {
                    found.insert(format!("layers.{i}.{name}"), factors(&stream.inputs, DAMPING)?.gain);
                }
                let done = PRODUCTS.get(product).map(|(name, _)| self.tensor(&format!("layers.{i}.{name}")));
                each(done.map_or(0, |tensor| work::original(tensor, tokens, gains)))?;
            }
        }
        let head = factors(&self.hidden(&stream)?, TABLE_DAMPING)?;
        found.insert("head".to_owned(), head.gain);
        self.texts = whole;
        each(work::original_head(self.plan, tokens))?;
        Ok((head, found))
    }

    /// Factors for a head of its own, after all layers.
    pub fn head(&mut self, layout: &CqLayout) -> Result<Factors> {
        self.finish_layer()?;
        let original = self.hidden(&self.original)?;
        let rounded = self.rounded.as_ref().map(|stream| self.hidden(stream)).transpose()?;
        let mut moments = Moments::new(layout, rounded.is_some());
        self.add(&mut moments, &original, rounded.as_deref());
        Ok(moments.factors(DAMPING, &self.machine.kernel, &self.machine.pool))
    }

    /// How the embedding, or a part of it, was stored.
    pub fn embedded(&mut self, part: &TensorPlan, format: Format, data: &[u8]) {
        let (dim, factor) = (self.plan.decoder().dim, self.plan.decoder().embed_scale);
        let Some(rounded) = &mut self.rounded else { return };
        rounded.residual.resize(self.original.residual.len(), 0.0);
        let mut memory = Memory::default();
        let weight = memory.push(&part.name, data, part.rows, part.cols, format);
        for (&id, out) in self.texts.iter().flatten().zip(rounded.residual.chunks_exact_mut(dim)) {
            if let Some(row) = (id as usize).checked_sub(part.first_row).filter(|row| *row < part.rows) {
                weight.row(memory.bytes(), row, out);
                out.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }

    /// Factors for a matrix, `None` for tensors that are not inputs of products in a layer. Matrices come in
    /// plan order.
    pub fn factors(&mut self, name: &str, layout: &CqLayout) -> Result<Option<Factors>> {
        if !self.arrive(name)? {
            return Ok(None);
        }
        let rounded = self.rounded.as_ref().map(|s| s.inputs.as_slice());
        let mut moments = Moments::new(layout, rounded.is_some());
        self.add(&mut moments, &self.original.inputs, rounded);
        Ok(Some(moments.factors(DAMPING, &self.machine.kernel, &self.machine.pool)))
    }

    /// Takes the streams to a matrix; false, and nothing happens, for tensors that are not inputs of products in a
    /// layer. A matrix that is kept as it is has to be arrived at as well.
    pub fn arrive(&mut self, name: &str) -> Result<bool> {
        let Some((layer, part)) = name.strip_prefix("layers.").and_then(|n| n.split_once('.')) else { return Ok(false) };
        let Some(product) = PRODUCTS.iter().position(|(name, _)| *name == part) else { return Ok(false) };
        let layer = layer.parse().unwrap_or(0);
        if self.current.as_ref().is_none_or(|c| c.index != layer) {
            self.finish_layer()?;
            self.current = Some(self.load(layer)?);
        }
        self.reach(product + 1)?;
        Ok(true)
    }

    /// How a matrix of the current layer was stored.
    pub fn stored(&mut self, tensor: &TensorPlan, format: Format, data: &[u8]) {
        if let Some(current) = self.current.as_mut().filter(|_| self.rounded.is_some()) {
            let weight = current.memory.push(&tensor.name, data, tensor.rows, tensor.cols, format);
            current.rounded.insert(tensor.name.clone(), weight);
        }
    }

    fn tensor(&self, name: &str) -> &'a TensorPlan {
        self.plan.tensors.iter().find(|t| t.name == name).expect("every plan has an embedding and a norm")
    }

    /// A residual stream from embedding rows.
    fn embed(&self, row: impl Fn(usize, &mut [f32]) -> Result<()>) -> Result<Vec<f32>> {
        let dim = self.plan.decoder().dim;
        let mut stream = vec![0.0; self.texts.iter().map(Vec::len).sum::<usize>() * dim];
        for (&id, out) in self.texts.iter().flatten().zip(stream.chunks_exact_mut(dim)) {
            row(id as usize, out)?;
            out.iter_mut().for_each(|x| *x *= self.plan.decoder().embed_scale);
        }
        Ok(stream)
    }

    /// Adds the inputs of all tokens to moments.
    fn add(&self, moments: &mut Moments, original: &[f32], rounded: Option<&[f32]>) {
        let cols = original.len() / self.texts.iter().map(Vec::len).sum::<usize>().max(1);
        let Machine { kernel, pool, .. } = &self.machine;
        let chunk = MOMENT_TOKENS * cols;
        for (i, original) in original.chunks(chunk).enumerate() {
            match rounded {
                Some(x) => moments.add(&x[i * chunk..][..original.len()], Some(original), kernel, pool),
                None => moments.add(original, None, kernel, pool),
            }
        }
    }

    /// Takes the streams through what is left of the current layer and forgets its weights.
    fn finish_layer(&mut self) -> Result<()> {
        if self.current.is_some() {
            self.reach(PRODUCTS.len() + 1)?;
        }
        self.current = None;
        Ok(())
    }

    /// Takes the streams on until they have reached so many products of the current layer.
    fn reach(&mut self, products: usize) -> Result<()> {
        let Some(mut current) = self.current.take() else { return Ok(()) };
        while current.reached < products {
            let mut original = std::mem::take(&mut self.original);
            self.follow(&mut original, &current, &current.original, current.reached)?;
            self.original = original;
            if let Some(mut rounded) = self.rounded.take() {
                self.follow(&mut rounded, &current, &current.rounded, current.reached)?;
                self.rounded = Some(rounded);
            }
            current.reached += 1;
        }
        self.current = Some(current);
        Ok(())
    }

    /// Takes a stream to a product, or past the last one.
    fn follow(&self, stream: &mut Stream, current: &Current, weights: &BTreeMap<String, Weight>, product: usize) -> Result<()> {
        let pieces = PRODUCTS.get(product).map_or(&[Piece::Down][..], |(_, pieces)| pieces);
        let find = |name: &str| weights.get(name).cloned().ok_or_else(|| Error::unsupported(format!("tensor {name} is missing")));
        for &piece in pieces {
            let normed = matches!(piece, Piece::AttentionNorm | Piece::MlpNorm);
            let x = if normed { &stream.residual } else { &stream.inputs };
            let cols = x.len() / (stream.residual.len() / self.plan.decoder().dim).max(1);
            let graph = decoder::piece_graph(self.plan.decoder(), current.index, piece, cols, &find)?;
            let y = self.run(&graph, x, cols, current.memory.bytes())?;
            if matches!(piece, Piece::Out | Piece::Down) {
                stream.residual.iter_mut().zip(y).for_each(|(x, y)| *x += y);
                stream.inputs = Vec::new();
            } else {
                stream.inputs = y;
            }
        }
        Ok(())
    }

    /// Inputs of the head.
    fn hidden(&self, stream: &Stream) -> Result<Vec<f32>> {
        let mut memory = Memory::default();
        let norm = self.load_tensor(self.tensor("norm"), &mut memory)?;
        let mut graph = Graph::default();
        let (rows, norm) = (graph.rows_input(self.plan.decoder().dim), graph.weight(norm));
        let normed = graph.rms_norm(rows, norm, self.plan.decoder().norm_eps)?;
        graph.output(normed);
        self.run(&graph, &stream.residual, self.plan.decoder().dim, memory.bytes())
    }

    /// The output of a graph for rows of all tokens, text by text.
    fn run(&self, graph: &Graph, x: &[f32], cols: usize, weights: &[u8]) -> Result<Vec<f32>> {
        let pool = &self.machine.pool;
        let plan = Plan::new(graph, self.machine.level, CHUNK, pool.threads())?;
        let mut buffers = plan.buffers();
        let mut state = plan.state(self.texts.iter().map(Vec::len).max().unwrap_or(0), CacheFormat::F16);
        let mut out = Vec::new();
        let mut rest = x;
        for text in self.texts {
            state.truncate(0);
            let (mut rows, after) = rest.split_at(text.len() * cols);
            while !rows.is_empty() {
                let (now, later) = rows.split_at(rows.len().min(CHUNK * cols));
                let feed = Feed::Rows { rows: now, tokens: now.len() / cols };
                plan.execute(Run { weights, feed, state: &mut state, buffers: &mut buffers, pool, profile: None });
                out.extend_from_slice(plan.output(&buffers, 0));
                rows = later;
            }
            rest = after;
        }
        Ok(out)
    }

    /// Brings a layer's weights into memory.
    fn load(&self, index: usize) -> Result<Current> {
        let prefix = format!("layers.{index}.");
        let mut memory = Memory::default();
        let mut original = BTreeMap::new();
        for tensor in self.plan.tensors.iter().filter(|t| t.name.starts_with(&prefix)) {
            original.insert(tensor.name.clone(), self.load_tensor(tensor, &mut memory)?);
        }
        Ok(Current { index, reached: 0, memory, rounded: original.clone(), original })
    }

    /// Brings a tensor into memory as it is in the checkpoint, at most 16 bits a weight for matrices.
    fn load_tensor(&self, tensor: &TensorPlan, memory: &mut Memory) -> Result<Weight> {
        let format = unquantised(tensor, self.checkpoint)?;
        let mut bytes = Vec::new();
        for start in (0..tensor.rows).step_by(TILE_ROWS) {
            let rows: Range<usize> = start..(start + TILE_ROWS).min(tensor.rows);
            let mut values = vec![0.0; rows.len() * tensor.cols];
            read_rows(self.checkpoint, tensor, rows, &mut values)?;
            bytes.extend(plain(format, &values).0);
        }
        Ok(memory.push(&tensor.name, &bytes, tensor.rows, tensor.cols, format))
    }
}
