//! Running a plan.

use super::op::Op;
use super::plan::{Buffers, Place, Plan, Size, rotated_parts};
use super::profile::Profile;
use super::state::{Attend, State};
use crate::kernels::matmul_quant::Columns;
use crate::kernels::rotate::Rotated;
use crate::kernels::threads::Pool;
use crate::kernels::{Heads, rope};
use std::ops::Range;

/// What a run starts from.
#[derive(Clone, Copy)]
pub enum Feed<'a> {
    /// Token ids, each below the rows of the embedding table.
    Ids(&'a [u32]),
    /// `[tokens, cols]` for a graph that begins with [`Graph::rows_input`](super::Graph::rows_input).
    Rows { rows: &'a [f32], tokens: usize },
    /// Ids of several texts, one after the other, each ending before the id in `ends`: ascending, the last one the number
    /// of ids. For graphs without a cache.
    Texts { ids: &'a [u32], ends: &'a [usize] },
}

impl Feed<'_> {
    pub fn tokens(&self) -> usize {
        match self {
            Feed::Ids(ids) | Feed::Texts { ids, .. } => ids.len(),
            Feed::Rows { tokens, .. } => *tokens,
        }
    }

    /// The token ids; panics for rows.
    pub(super) fn ids(&self) -> &[u32] {
        match self {
            Feed::Ids(ids) | Feed::Texts { ids, .. } => ids,
            Feed::Rows { .. } => panic!("this graph starts from token ids"),
        }
    }

    /// Where texts end; `tokens` is the number of tokens, for what is one text.
    pub(super) fn ends<'s>(&'s self, tokens: &'s usize) -> &'s [usize] {
        match self {
            Feed::Texts { ends, .. } => ends,
            _ => std::slice::from_ref(tokens),
        }
    }

    /// The place of every token in its text.
    pub(super) fn places<'s>(&'s self, tokens: &'s usize) -> impl Iterator<Item = usize> + 's {
        let ends = self.ends(tokens);
        let starts = std::iter::once(&0).chain(ends);
        starts.zip(ends).flat_map(|(start, end)| 0..end - start)
    }
}

/// Everything a run needs besides the plan.
pub struct Run<'a> {
    /// The bytes that the graph's weights point into.
    pub weights: &'a [u8],
    /// One to `max_tokens` tokens; they follow the filled positions of `state`.
    pub feed: Feed<'a>,
    pub state: &'a mut State,
    pub buffers: &'a mut Buffers,
    pub pool: &'a Pool,
    /// Collects times when given.
    pub profile: Option<&'a mut Profile>,
}

/// A sequence that takes part in a run.
pub struct Sequence<'a> {
    pub state: &'a mut State,
    /// Its tokens in the run, at least one; they follow the filled positions of `state`.
    pub tokens: usize,
}

/// A run of several sequences, which know nothing of each other.
pub struct Batch<'a, 's> {
    /// The bytes that the graph's weights point into.
    pub weights: &'a [u8],
    /// The tokens of the first sequence, then those of the second, and so on.
    pub feed: Feed<'a>,
    pub sequences: &'a mut [Sequence<'s>],
    pub buffers: &'a mut Buffers,
    pub pool: &'a Pool,
    /// Collects times when given.
    pub profile: Option<&'a mut Profile>,
}

impl Attend<'_> {
    /// For the rows `x` of all sequences, one after the other. Those of one token that come first are spread over the
    /// threads, the others use all threads each.
    fn run(&self, sequences: &mut [Sequence], pool: &Pool, alone: &Pool, x: &[f32], out: &mut [f32]) {
        let (stride, tokens) = (self.stride, x.len() / self.stride);
        let width = out.len() / tokens;
        let single = sequences.iter().take_while(|s| s.tokens == 1).count();
        let single = if single > 1 { single } else { 0 };
        let (ones, others) = sequences.split_at_mut(single);
        let (first, mut out) = out.split_at_mut(single * width);
        pool.each_chunk(ones, first, width, &|i, one, out| {
            one.state.attend(self, alone, &x[i * stride..][..stride], out);
        });
        let mut x = &x[single * stride..];
        for sequence in others {
            let (this, rest) = x.split_at(sequence.tokens * stride);
            let (this_out, rest_out) = out.split_at_mut(sequence.tokens * width);
            sequence.state.attend(self, pool, this, this_out);
            (x, out) = (rest, rest_out);
        }
    }
}

impl Plan {
    /// Runs the plan once. Allocates nothing (unless a profile is collected).
    ///
    /// # Panics
    /// When the ids are too many for the plan or the state, or the pool has more threads than were planned.
    pub fn execute(&self, run: Run) {
        self.execute_unless(run, &|| false);
    }

    /// [`Plan::execute`], asking `stopped` before every step. False if it was stopped: then the filled
    /// positions of the state are what they were, and there are no outputs.
    pub fn execute_unless(&self, run: Run, stopped: &dyn Fn() -> bool) -> bool {
        let Run { weights, feed, state, buffers, pool, profile } = run;
        let sequences = &mut [Sequence { state, tokens: feed.tokens() }];
        self.execute_batch(Batch { weights, feed, sequences, buffers, pool, profile }, stopped)
    }

    /// [`Plan::execute_unless`] for several sequences. Weights are read once for all of them; every sequence gets what
    /// it would get alone. A graph that ends with the last row returns the last row of each.
    pub fn execute_batch(&self, mut run: Batch, stopped: &dyn Fn() -> bool) -> bool {
        let size = Size { tokens: run.feed.tokens(), sequences: run.sequences.len() };
        assert!((1..=self.max_tokens()).contains(&size.tokens), "{} tokens in a plan for {}", size.tokens, self.max_tokens());
        assert!((1..=self.max_sequences()).contains(&size.sequences));
        assert!(run.sequences.iter().all(|s| s.tokens > 0));
        assert_eq!(run.sequences.iter().map(|s| s.tokens).sum::<usize>(), size.tokens);
        assert!(run.pool.threads() <= self.threads());
        let fits = |s: &Sequence| s.state.len() + s.tokens <= s.state.capacity();
        assert!(self.graph.caches.is_empty() || run.sequences.iter().all(fits));
        run.buffers.size = size;
        for step in &self.steps {
            if stopped() {
                return false;
            }
            let begin = run.profile.as_ref().map(|_| std::time::Instant::now());
            self.step(step, &mut run);
            if let (Some(begin), Some(profile)) = (begin, run.profile.as_mut()) {
                let kind = match &step.op {
                    Op::MatMul { weight, .. } => {
                        let name = &self.graph.weights[weight.0].name;
                        let part = name.strip_prefix("layers.").and_then(|n| n.split_once('.')).map_or(name.as_str(), |n| n.1);
                        format!("matmul {part}")
                    }
                    _ => step.op.name().to_owned(),
                };
                profile.add(&kind, begin.elapsed());
            }
        }
        run.sequences.iter_mut().for_each(|s| s.state.advance(s.tokens));
        true
    }

    fn step(&self, step: &super::plan::Step, run: &mut Batch) {
        let (weights, pool, kernels) = (run.weights, run.pool, &self.kernels);
        let size = run.buffers.size;
        let weight = |id: super::WeightId| &self.graph.weights[id.0];
        let (arena, scratch, text_scratch) = run.buffers.parts();
        if step.copy_first {
            arena.copy_within(step.inputs[0].range(size), step.output.offset);
        }
        let (out, inputs) = Split::new(arena, step.output.range(size));
        let input = |i: usize| inputs.get(step.inputs[i].range(size));
        let cols = step.output.value.cols;
        match &step.op {
            Op::Embed { parts } => {
                for (id, out) in run.feed.ids().iter().zip(out.chunks_exact_mut(cols)) {
                    let (part, row) = self.graph.row_of(parts, *id as usize);
                    part.row(weights, row, out);
                }
            }
            Op::Rows => {
                let Feed::Rows { rows, .. } = run.feed else { panic!("this graph starts from rows") };
                out.copy_from_slice(rows);
            }
            Op::RmsNorm { weight: w, eps } => kernels.norm.rows(pool, input(0), weight(*w).f32(weights), *eps, out),
            Op::LayerNorm { weight: w, bias, eps } => {
                let (w, bias) = (weight(*w).f32(weights), weight(*bias).f32(weights));
                kernels.layer_norm.rows(pool, input(0), w, bias, *eps, out)
            }
            Op::Positions { table } => {
                for (place, out) in run.feed.places(&size.tokens).zip(out.chunks_exact_mut(cols)) {
                    weight(*table).row(weights, place, out);
                }
            }
            Op::ConstantRow { table, row } => {
                weight(*table).row(weights, *row, &mut out[..cols]);
                let (first, rest) = out.split_at_mut(cols);
                rest.chunks_exact_mut(cols).for_each(|out| out.copy_from_slice(first));
            }
            Op::HeadNorm { weight: w, eps, start, heads } => {
                let w = weight(*w);
                let heads = Heads { stride: cols, start: *start, count: *heads, dim: w.cols };
                kernels.norm.heads(pool, out, heads, w.f32(weights), *eps)
            }
            Op::Rotate { own } => {
                if let Some(layout) = &step.output.value.rotated {
                    let (codes, scales, _) = rotated_parts(layout, step.output.rows(size));
                    let (codes, rest) = out.split_at_mut(codes);
                    let (scales, sums) = rest.split_at_mut(scales - codes.len());
                    let (codes, sums) = (bytemuck::cast_slice_mut(codes), bytemuck::cast_slice_mut(sums));
                    let factors = own.map_or(&[][..], |w| weight(w).factors(weights));
                    kernels.rotate.rows(pool, layout, factors, input(0), codes, scales, sums);
                }
            }
            Op::MatMul { weight: w, bias } => {
                let w = weight(*w);
                let bias = bias.map(|b| weight(b).f32(weights));
                match w.layout() {
                    Some(layout) => {
                        let x = rotated(input(0), &step.inputs[0], size);
                        let out = Columns::all(out, w.rows);
                        kernels.matmul_quant.run(pool, &layout, w.bytes(weights), x, bias, out, scratch)
                    }
                    None => kernels.matmul_float.run(pool, w.float(weights), w.rows, input(0), bias, out),
                }
            }
            Op::MatMulParts { parts } => {
                let x = rotated(input(0), &step.inputs[0], size);
                let mut first = 0;
                for part in parts.iter().map(|part| weight(*part)) {
                    let layout = part.layout().expect("the builder takes quantised parts only");
                    let out = Columns { values: &mut *out, first, stride: cols };
                    kernels.matmul_quant.run(pool, &layout, part.bytes(weights), x, None, out, scratch);
                    first += part.rows;
                }
            }
            Op::RopeAngles { rope } => {
                let table = &self.graph.ropes[*rope];
                let positions = run.sequences.iter().flat_map(|s| s.state.len()..s.state.len() + s.tokens);
                for (position, out) in positions.zip(out.chunks_exact_mut(cols)) {
                    rope::angles(position, &table.frequencies, table.scale, out);
                }
            }
            Op::Rope { start, heads, head_dim } => {
                let heads = Heads { stride: cols, start: *start, count: *heads, dim: *head_dim };
                rope::rotate(pool, out, heads, input(1));
            }
            Op::Attention { cache, .. } => {
                let (x, stride) = (input(0), step.inputs[0].value.cols);
                let job = Attend { cache: *cache, float: &kernels.attention, int8: &kernels.attention_int8, stride };
                job.run(run.sequences, pool, &self.alone, x, out);
            }
            Op::AttentionToAll { shape } => {
                kernels.attention.texts(pool, shape, input(0), run.feed.ends(&size.tokens), text_scratch, out);
            }
            Op::Activate { act } => kernels.elementwise.activate(pool, *act, out),
            Op::Gate { act } => kernels.elementwise.gate(pool, *act, input(0), cols, out),
            Op::Add => kernels.elementwise.add(pool, out, input(1)),
            Op::Scale { factor } => kernels.elementwise.scale(pool, out, *factor),
            Op::SoftCap { cap } => kernels.elementwise.soft_cap(pool, out, *cap),
            Op::LastRow => {
                let (x, mut end) = (input(0), 0);
                for (s, out) in run.sequences.iter().zip(out.chunks_exact_mut(cols)) {
                    end += s.tokens * cols;
                    out.copy_from_slice(&x[end - cols..end]);
                }
            }
        }
    }
}

/// A rotated value as the product kernels take it.
fn rotated<'a>(x: &'a [f32], place: &Place, size: Size) -> Rotated<'a> {
    let layout = place.value.rotated.as_ref().expect("the builder gives quantised products rotated inputs");
    let (codes, scales, sums) = rotated_parts(layout, place.rows(size));
    Rotated { codes: bytemuck::cast_slice(&x[..codes]), scales: &x[codes..scales], sums: bytemuck::cast_slice(&x[scales..sums]) }
}

/// The arena around the part that a step writes.
struct Split<'a> {
    before: &'a [f32],
    after: &'a [f32],
    /// Where `after` begins.
    end: usize,
}

impl<'a> Split<'a> {
    fn new(arena: &'a mut [f32], out: Range<usize>) -> (&'a mut [f32], Self) {
        let (before, rest) = arena.split_at_mut(out.start);
        let (middle, after) = rest.split_at_mut(out.len());
        (middle, Split { before, after, end: out.end })
    }

    fn get(&self, range: Range<usize>) -> &'a [f32] {
        if range.end <= self.before.len() {
            &self.before[range]
        } else {
            &self.after[range.start - self.end..range.end - self.end]
        }
    }
}
