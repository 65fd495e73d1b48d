//! Laying a graph out: order, lifetimes, one arena, kernels chosen.

use super::build::{Graph, Node, Rows, Value};
use super::op::{NodeId, Op};
use crate::error::Result;
use crate::kernels::attention::Attention;
use crate::kernels::attention_int8::AttentionInt8;
use crate::kernels::elementwise::Elementwise;
use crate::kernels::layer_norm::LayerNorm;
use crate::kernels::matmul_float::MatMulFloat;
use crate::kernels::matmul_quant::MatMulQuant;
use crate::kernels::norm::RmsNorm;
use crate::kernels::rotate::Rotate;
use crate::kernels::threads::Pool;
use crate::kernels::variant::Level;
use crate::quant::CqLayout;
use std::fmt::Write;
use std::ops::Range;

/// f32 elements of a cache line; every value starts on one.
const LINE: usize = 16;

/// How much runs at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    /// Tokens of all sequences together.
    pub tokens: usize,
    pub sequences: usize,
}

/// Where a node's value lies in the arena, in f32 elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub offset: usize,
    pub value: Value,
}

impl Place {
    /// Rows of the value in a run of this size.
    pub fn rows(&self, size: Size) -> usize {
        match self.value.rows {
            Rows::Tokens => size.tokens,
            Rows::Last => size.sequences,
        }
    }

    /// Elements in use in a run of this size.
    pub fn range(&self, size: Size) -> Range<usize> {
        self.offset..self.offset + elements(&self.value, self.rows(size))
    }
}

/// f32 elements of a value with `rows` rows. Rotated values: codes, then scales, then sums.
fn elements(value: &Value, rows: usize) -> usize {
    match &value.rotated {
        None => rows * value.cols,
        Some(layout) => rotated_parts(layout, rows).2,
    }
}

/// Ends, in f32 elements, of the codes, the scales and the sums of a rotated value.
pub(super) fn rotated_parts(layout: &CqLayout, rows: usize) -> (usize, usize, usize) {
    let codes = rows * layout.padded_cols() / 4;
    let scales = rows * layout.groups();
    (codes, codes + scales, codes + 2 * scales)
}

/// One operation to run.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub op: Op,
    pub inputs: Vec<Place>,
    pub output: Place,
    /// The first input must be copied to the output before the operation works in place there.
    pub copy_first: bool,
}

/// The kernels of one level.
pub(super) struct Kernels {
    pub elementwise: Elementwise,
    pub norm: RmsNorm,
    pub layer_norm: LayerNorm,
    pub rotate: Rotate,
    pub matmul_quant: MatMulQuant,
    pub matmul_float: MatMulFloat,
    pub attention: Attention,
    pub attention_int8: AttentionInt8,
}

/// A graph laid out for at most so many tokens and sequences at a time.
pub struct Plan {
    pub(super) graph: Graph,
    pub(super) steps: Vec<Step>,
    pub(super) outputs: Vec<Place>,
    pub(super) kernels: Kernels,
    level: Level,
    most: Size,
    threads: usize,
    /// Runs what is given to one thread as a whole.
    pub(super) alone: Pool,
    /// f32 elements of the arena.
    arena: usize,
    /// Scratch bytes over all threads.
    scratch: usize,
    /// f16 elements over all threads, for attention to whole texts.
    text_scratch: usize,
}

/// The memory that a plan runs in; one for each sequence that runs at the same time.
pub struct Buffers {
    arena: Vec<f32>,
    /// Elements before the first cache-line boundary.
    skew: usize,
    scratch: Vec<u8>,
    text_scratch: Vec<u16>,
    /// The last run.
    pub(super) size: Size,
}

impl Buffers {
    /// Arena and both kinds of scratch at once.
    pub(super) fn parts(&mut self) -> (&mut [f32], &mut [u8], &mut [u16]) {
        (&mut self.arena[self.skew..], &mut self.scratch, &mut self.text_scratch)
    }
}

impl Plan {
    /// Plans `graph` for runs of 1 to `max_tokens` tokens of one sequence on a pool of `threads`.
    pub fn new(graph: &Graph, level: Level, max_tokens: usize, threads: usize) -> Result<Self> {
        Plan::for_sequences(graph, level, max_tokens, 1, threads)
    }

    /// The same for runs of up to `sequences` sequences together, see [`Plan::execute_batch`].
    pub fn for_sequences(graph: &Graph, level: Level, max_tokens: usize, sequences: usize, threads: usize) -> Result<Self> {
        let most = Size { tokens: max_tokens, sequences };
        let nodes = &graph.nodes;
        // `home[n]`: the node whose storage n uses; `dies[n]`: the last step that needs the storage of home n.
        let mut last_use = vec![0; nodes.len()];
        for (i, node) in nodes.iter().enumerate() {
            node.inputs.iter().for_each(|input| last_use[input.0] = i);
        }
        graph.outputs.iter().for_each(|output| last_use[output.0] = usize::MAX);
        let mut home: Vec<usize> = (0..nodes.len()).collect();
        let mut dies = last_use.clone();
        for (i, node) in nodes.iter().enumerate() {
            if let Some(input) = node.inputs.first().filter(|_| node.op.in_place()) {
                let owner = home[input.0];
                if dies[owner] == i && last_use[input.0] == i {
                    home[i] = owner;
                    dies[owner] = last_use[i].max(i);
                }
            }
        }
        let mut arena = Arena::default();
        let mut offsets = vec![0; nodes.len()];
        for (i, node) in nodes.iter().enumerate() {
            offsets[i] = if home[i] == i {
                let rows = Place { offset: 0, value: node.value }.rows(most);
                arena.place(i, dies[i].max(i), elements(&node.value, rows))
            } else {
                offsets[home[i]]
            };
        }
        let place = |id: NodeId| Place { offset: offsets[id.0], value: nodes[id.0].value };
        let step = |(i, node): (usize, &Node)| Step {
            op: node.op.clone(),
            inputs: node.inputs.iter().map(|&input| place(input)).collect(),
            output: place(NodeId(i)),
            copy_first: node.op.in_place() && home[i] == i,
        };
        let panel = |w: &super::Weight| w.layout().map_or(0, |l| MatMulQuant::panel_bytes(&l));
        let panel = if max_tokens > 1 { graph.weights.iter().map(panel).max().unwrap_or(0) } else { 0 };
        let text_scratch = nodes.iter().map(|node| match &node.op {
            Op::AttentionToAll { shape } => Attention::text_scratch(shape, max_tokens),
            _ => 0,
        });
        let text_scratch = text_scratch.max().unwrap_or(0) * threads;
        Ok(Plan {
            steps: nodes.iter().enumerate().map(step).collect(),
            outputs: graph.outputs.iter().map(|&output| place(output)).collect(),
            kernels: Kernels {
                elementwise: Elementwise::select(level),
                norm: RmsNorm::select(level),
                layer_norm: LayerNorm::select(level),
                rotate: Rotate::select(level),
                matmul_quant: MatMulQuant::select(level),
                matmul_float: MatMulFloat::select(level),
                attention: Attention::select(level),
                attention_int8: AttentionInt8::select(level),
            },
            graph: graph.clone(),
            level,
            most,
            threads,
            alone: Pool::new(1),
            arena: arena.size,
            scratch: panel * threads,
            text_scratch,
        })
    }

    /// Memory to run in.
    pub fn buffers(&self) -> Buffers {
        let arena = vec![0.0f32; self.arena + LINE];
        let skew = arena.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        Buffers { arena, skew, scratch: vec![0; self.scratch], text_scratch: vec![0; self.text_scratch], size: Size::default() }
    }

    /// An empty state for up to `positions` positions; see [`Graph::state`].
    pub fn state(&self, positions: usize, format: super::CacheFormat) -> super::State {
        self.graph.state(positions, format)
    }

    /// Bytes that a position takes in a state, over all layers.
    pub fn position_bytes(&self, format: super::CacheFormat) -> usize {
        self.graph.caches.iter().map(|shape| format.position_bytes(shape)).sum()
    }

    /// Bytes of [`buffers`](Self::buffers).
    pub fn bytes(&self) -> usize {
        self.arena * size_of::<f32>() + self.scratch + self.text_scratch * size_of::<u16>()
    }

    pub fn max_tokens(&self) -> usize {
        self.most.tokens
    }

    /// Sequences that can run together.
    pub fn max_sequences(&self) -> usize {
        self.most.sequences
    }

    /// Threads that the scratch memory was planned for.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Result `index` of the last run in `buffers`, row after row.
    pub fn output<'a>(&self, buffers: &'a Buffers, index: usize) -> &'a [f32] {
        &buffers.arena[buffers.skew..][self.outputs[index].range(buffers.size)]
    }

    /// The same for writing (samplers work in place).
    pub fn output_mut<'a>(&self, buffers: &'a mut Buffers, index: usize) -> &'a mut [f32] {
        let range = self.outputs[index].range(buffers.size);
        &mut buffers.arena[buffers.skew..][range]
    }

    /// A line a step: operation, weight and its format, shape, place in the arena, weight bytes.
    pub fn describe(&self) -> String {
        let mut text = format!(
            "{} steps, at most {} tokens, {} threads, {} kernels, arena {} KiB, scratch {} KiB\n",
            self.steps.len(),
            self.most.tokens,
            self.threads,
            self.level,
            self.arena * 4 / 1024,
            self.scratch / 1024
        );
        for (i, step) in self.steps.iter().enumerate() {
            let weights = match &step.op {
                Op::MatMul { weight, .. } | Op::RmsNorm { weight, .. } | Op::HeadNorm { weight, .. } => {
                    std::slice::from_ref(weight)
                }
                Op::LayerNorm { weight, .. } | Op::Positions { table: weight } | Op::ConstantRow { table: weight, .. } => {
                    std::slice::from_ref(weight)
                }
                Op::Embed { parts } | Op::MatMulParts { parts } => parts,
                _ => &[],
            };
            let weights = weights.iter().map(|weight| &self.graph.weights[weight.0]);
            let weights: Vec<String> = weights.map(|w| format!("{} {} {} bytes", w.name, w.format, w.range.len())).collect();
            let weight = weights.join(", ");
            let rows = if step.output.value.rows == Rows::Tokens { "T" } else { "1" };
            let place = step.output.offset * 4;
            let _ = writeln!(text, "{i:4} {:11} [{rows}, {:5}] @{place:<8} {weight}", step.op.name(), step.output.value.cols);
        }
        text
    }
}

/// First-fit placement of values with known lifetimes.
#[derive(Default)]
struct Arena {
    /// Offset, elements, last step of the values placed so far.
    placed: Vec<(usize, usize, usize)>,
    size: usize,
}

impl Arena {
    fn place(&mut self, born: usize, dies: usize, elements: usize) -> usize {
        let elements = elements.next_multiple_of(LINE);
        let mut alive: Vec<(usize, usize)> = self.placed.iter().filter(|p| p.2 >= born).map(|p| (p.0, p.1)).collect();
        alive.sort_unstable();
        let mut offset = 0;
        for (start, length) in alive {
            if offset + elements <= start {
                break;
            }
            offset = offset.max(start + length);
        }
        self.placed.push((offset, elements, dies));
        self.size = self.size.max(offset + elements);
        offset
    }
}
