//! Second moments of what matrix products are applied to, measured layer by layer on a sample of text.
//!
//! Only one layer's weights are in memory at a time: the residual stream of all sample tokens is kept and
//! taken from layer to layer.

use super::decoder;
use super::families::{ModelPlan, TensorPlan};
use super::import::Checkpoint;
use super::source::{plain, read_rows, unquantised};
use crate::error::{Error, Result};
use crate::graph::{Feed, Memory, Plan, Run, Weight};
use crate::kernels::matmul_float::{FloatMatrix, MatMulFloat};
use crate::kernels::{Level, Pool};
use crate::quant::CqLayout;
use crate::quant::feedback::{self, Feedback};
use crate::quant::format::{GROUP, TILE_ROWS};
use crate::quant::rotate::rotate;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Text of many kinds (prose, chat, code, data, twenty languages), pieces separated by lines of `---`; any
/// beginning of it is a mixture.
pub const SAMPLE: &str = include_str!("calibration.txt");

/// Tokens of a run.
const CHUNK: usize = 512;
/// Added to the diagonal of second moments, in units of its mean; doubled until the factorisation succeeds.
const DAMPING: f32 = 0.01;

/// The sample on its way through the network.
pub struct Calibration<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a ModelPlan,
    /// Tokens of each text.
    lengths: Vec<usize>,
    /// Residual stream `[all tokens, dim]` before the next layer.
    stream: Vec<f32>,
    kernel: MatMulFloat,
    level: Level,
    pool: Pool,
}

impl<'a> Calibration<'a> {
    /// Embeds the texts.
    pub fn start(checkpoint: &'a Checkpoint, plan: &'a ModelPlan, texts: &[Vec<u32>]) -> Result<Self> {
        let (dim, vocab) = (plan.spec.dim, plan.spec.vocab);
        let embed = plan.tensors.iter().find(|t| t.name == "embed").expect("every plan has an embedding");
        let mut stream = vec![0.0; texts.iter().map(Vec::len).sum::<usize>() * dim];
        for (&id, row) in texts.iter().flatten().zip(stream.chunks_exact_mut(dim)) {
            let id = id as usize;
            if id >= vocab {
                return Err(Error::unsupported(format!("the tokenizer gives id {id}, the embedding has {vocab} rows")));
            }
            read_rows(checkpoint, embed, id..id + 1, row)?;
            row.iter_mut().for_each(|x| *x *= plan.spec.embed_scale);
        }
        let level = Level::best(None);
        let lengths = texts.iter().map(Vec::len).collect();
        let kernel = MatMulFloat::select(level);
        Ok(Calibration { checkpoint, plan, lengths, stream, kernel, level, pool: Pool::new(Pool::default_threads()) })
    }

    /// Runs layer `i`, which must be the next one, and returns the feedback for its matrices by name.
    pub fn layer(&mut self, i: usize) -> Result<BTreeMap<String, Feedback>> {
        let prefix = format!("layers.{i}.");
        let mut memory = Memory::default();
        let mut weights: BTreeMap<String, Weight> = BTreeMap::new();
        for tensor in self.plan.tensors.iter().filter(|t| t.name.starts_with(&prefix)) {
            weights.insert(tensor.name.clone(), self.load(tensor, &mut memory)?);
        }
        let find = |name: &str| weights.get(name).cloned().ok_or_else(|| Error::unsupported(format!("tensor {name} is missing")));
        let graph = decoder::layer_graph(&self.plan.spec, i, &find)?;
        let plan = Plan::new(&graph, self.level, CHUNK, self.pool.threads())?;
        let mut buffers = plan.buffers();
        let dim = self.plan.spec.dim;
        let products = ["attn.qkv", "attn.out", "mlp.gate_up", "mlp.down"].map(|p| format!("{prefix}{p}"));
        let mut moments: Vec<Moments> = products.iter().map(|p| Moments::new(weights[p].cols)).collect();
        let mut first = 0;
        for &length in &self.lengths {
            let mut state = graph.state(length);
            for start in (0..length).step_by(CHUNK) {
                let tokens = CHUNK.min(length - start);
                let at = (first + start) * dim..(first + start + tokens) * dim;
                let feed = Feed::Rows { rows: &self.stream[at.clone()], tokens };
                plan.execute(Run {
                    weights: memory.bytes(),
                    feed,
                    state: &mut state,
                    buffers: &mut buffers,
                    pool: &self.pool,
                    profile: None,
                });
                self.stream[at].copy_from_slice(plan.output(&buffers, 0));
                for (k, moments) in moments.iter_mut().enumerate() {
                    moments.add(plan.output(&buffers, k + 1), &self.kernel, &self.pool);
                }
            }
            first += length;
        }
        drop((memory, buffers));
        Ok(products.into_iter().zip(moments).map(|(p, m)| (p, m.feedback(&self.kernel, &self.pool))).collect())
    }

    /// Brings a tensor into memory as it is in the checkpoint, at most 16 bits a weight for matrices.
    fn load(&self, tensor: &TensorPlan, memory: &mut Memory) -> Result<Weight> {
        let format = unquantised(tensor, self.checkpoint)?;
        let mut bytes = Vec::new();
        for start in (0..tensor.rows).step_by(TILE_ROWS) {
            let rows = start..(start + TILE_ROWS).min(tensor.rows);
            let mut values = vec![0.0; rows.len() * tensor.cols];
            read_rows(self.checkpoint, tensor, rows, &mut values)?;
            bytes.extend(plain(format, &values).0);
        }
        Ok(memory.push(&tensor.name, &bytes, tensor.rows, tensor.cols, format))
    }
}

/// Second moments of rotated inputs, span by span; only the upper triangle (in blocks of 64) is kept up.
struct Moments {
    layout: CqLayout,
    /// One `[columns, columns]` matrix a span.
    spans: Vec<Vec<f32>>,
}

impl Moments {
    fn new(cols: usize) -> Self {
        // Any quantised format has the same groups.
        let layout = CqLayout::new(crate::quant::Format::Cq4, 1, cols).expect("specs have no empty sizes");
        let square = |groups| feedback::columns(&layout, &groups).len().pow(2);
        Moments { layout, spans: feedback::spans(&layout).into_iter().map(|groups| vec![0.0; square(groups)]).collect() }
    }

    /// Adds inputs `[tokens, cols]`.
    fn add(&mut self, x: &[f32], kernel: &MatMulFloat, pool: &Pool) {
        let (cols, padded) = (self.layout.cols, self.layout.padded_cols());
        let tokens = x.len() / cols;
        let mut rotated = vec![0.0f32; tokens * padded];
        rotated.par_chunks_exact_mut(padded).zip(x.par_chunks_exact(cols)).for_each(|(out, x)| {
            out[..cols].copy_from_slice(x);
            out.chunks_mut(GROUP).for_each(rotate);
        });
        for (groups, moments) in feedback::spans(&self.layout).into_iter().zip(&mut self.spans) {
            let span = feedback::columns(&self.layout, &groups);
            let n = span.len();
            // Channels as rows, so that products run along the tokens.
            let mut channels = vec![0.0f32; n * tokens];
            for (t, row) in rotated.chunks_exact(padded).enumerate() {
                for (c, x) in row[span.clone()].iter().enumerate() {
                    channels[c * tokens + t] = *x;
                }
            }
            let mut product = vec![0.0f32; TILE_ROWS * n];
            for first in (0..n).step_by(TILE_ROWS) {
                let rows = TILE_ROWS.min(n - first);
                let product = &mut product[..rows * (n - first)];
                let (right, left) = (&channels[first * tokens..], &channels[first * tokens..(first + rows) * tokens]);
                kernel.run(pool, FloatMatrix::F32(right), n - first, left, None, product);
                for (r, product) in product.chunks_exact(n - first).enumerate() {
                    for (m, p) in moments[(first + r) * n + first..][..n - first].iter_mut().zip(product) {
                        *m += p;
                    }
                }
            }
        }
    }

    /// Factors the moments and returns the feedback coefficients.
    fn feedback(self, kernel: &MatMulFloat, pool: &Pool) -> Feedback {
        let mut feedback = Feedback::default();
        for (groups, moments) in feedback::spans(&self.layout).into_iter().zip(self.spans) {
            let n = feedback::columns(&self.layout, &groups).len();
            let mean = (0..n).map(|i| moments[i * n + i]).sum::<f32>() / n as f32;
            let mut damping = DAMPING;
            // Columns are reversed, because the factor that is wanted is upper triangular.
            let lower = loop {
                let mut a = vec![0.0f32; n * n];
                a.par_chunks_exact_mut(n).enumerate().for_each(|(r, row)| {
                    for (c, out) in row[..=r].iter_mut().enumerate() {
                        *out = moments[(n - 1 - r) * n + n - 1 - c];
                    }
                    row[r] += (damping * mean).max(f32::MIN_POSITIVE);
                });
                if cholesky(&mut a, n, kernel, pool) {
                    break Some(a);
                }
                damping *= 2.0;
                if damping > 1e6 {
                    break None;
                }
            };
            // An input that is always zero gives no moments; its columns simply take no part.
            feedback.push_span(&self.layout, groups, &|j, b| {
                lower.as_ref().map_or(0.0, |l| l[(n - 1 - j) * n + n - 1 - b] / l[(n - 1 - b) * n + n - 1 - b])
            });
        }
        feedback
    }
}

/// Cholesky factor of the symmetric matrix whose lower triangle is in `a [n, n]`, in place, by blocks of
/// columns; false when the matrix is not positive definite. Pivots in f64, the bulk in f32.
fn cholesky(a: &mut [f32], n: usize, kernel: &MatMulFloat, pool: &Pool) -> bool {
    for first in (0..n).step_by(GROUP) {
        let width = GROUP.min(n - first);
        let mut pivot = vec![0.0f64; width * width];
        for r in 0..width {
            for c in 0..=r {
                let dot: f64 = (0..c).map(|k| pivot[r * width + k] * pivot[c * width + k]).sum();
                let rest = f64::from(a[(first + r) * n + first + c]) - dot;
                if r == c {
                    if rest.is_nan() || rest <= 0.0 {
                        return false;
                    }
                    pivot[r * width + r] = rest.sqrt();
                } else {
                    pivot[r * width + c] = rest / pivot[c * width + c];
                }
            }
            for c in 0..=r {
                a[(first + r) * n + first + c] = pivot[r * width + c] as f32;
            }
        }
        let next = first + width;
        // Below the pivot: forward substitution, row by row.
        let mut panel = vec![0.0f32; (n - next) * width];
        panel.par_chunks_exact_mut(width).zip(a[next * n..].par_chunks_exact_mut(n)).for_each(|(panel, row)| {
            let mut solved = [0.0f64; GROUP];
            for c in 0..width {
                let dot: f64 = solved[..c].iter().zip(&pivot[c * width..]).map(|(x, p)| x * p).sum();
                solved[c] = (f64::from(row[first + c]) - dot) / pivot[c * width + c];
                panel[c] = solved[c] as f32;
            }
            row[first..next].copy_from_slice(panel);
        });
        // What is left, in blocks of rows.
        let mut product = vec![0.0f32; TILE_ROWS * (n - next)];
        for block in (next..n).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(n - block);
            let cols = block + rows - next;
            let product = &mut product[..rows * cols];
            let left = &panel[(block - next) * width..][..rows * width];
            kernel.run(pool, FloatMatrix::F32(&panel[..cols * width]), cols, left, None, product);
            for (r, product) in product.chunks_exact(cols).enumerate() {
                for (a, p) in a[(block + r) * n + next..][..cols].iter_mut().zip(product) {
                    *a -= p;
                }
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::Format;
    use crate::quant::decode::decode_row;
    use crate::quant::encode::encode_tile;

    fn random(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..count).map(|_| (next() + next() + next() + next()) * 1.7).collect()
    }

    #[test]
    fn cholesky_times_its_transpose_is_the_matrix() {
        let (kernel, pool) = (MatMulFloat::select(Level::best(None)), Pool::new(2));
        for n in [5, 128, 300] {
            let x = random(n * 400, 3);
            let mut a: Vec<f32> = vec![0.0; n * n];
            for r in 0..n {
                for c in 0..n {
                    a[r * n + c] = (0..400).map(|k| x[r * 400 + k] * x[c * 400 + k]).sum::<f32>() / 400.0;
                }
            }
            let matrix = a.clone();
            assert!(cholesky(&mut a, n, &kernel, &pool));
            for r in 0..n {
                for c in 0..=r {
                    let product: f64 = (0..=c).map(|k| f64::from(a[r * n + k]) * f64::from(a[c * n + k])).sum();
                    assert!((product - f64::from(matrix[r * n + c])).abs() < 1e-4, "{n}: {r} {c}");
                }
            }
        }
        assert!(!cholesky(&mut [1.0, 0.0, 2.0, 1.0], 2, &kernel, &pool), "not positive definite");
    }

    /// On correlated inputs, rounding with feedback must make products much better although the weights
    /// themselves are further off: the published gain at 2 to 4 bits is 2 to 4 times.
    #[test]
    fn feedback_improves_products() {
        let (kernel, pool) = (MatMulFloat::select(Level::best(None)), Pool::new(1));
        let (rows, cols, tokens) = (64, 320, 600);
        let weights = random(rows * cols, 1);
        // A few common factors, unequal channels.
        let (factors, mix, noise) = (random(tokens * 12, 2), random(12 * cols, 5), random(tokens * cols, 7));
        let x: Vec<f32> = (0..tokens * cols)
            .map(|i| {
                let (t, c) = (i / cols, i % cols);
                let common: f32 = (0..12).map(|f| factors[t * 12 + f] * mix[f * cols + c]).sum();
                (common + 0.5 * noise[i]) * if c % 50 == 0 { 8.0 } else { 1.0 }
            })
            .collect();
        let mut moments = Moments::new(cols);
        x.chunks(100 * cols).for_each(|x| moments.add(x, &kernel, &pool));
        let feedback = moments.feedback(&kernel, &pool);
        let product = |outer: &[f32], errors: &[f32], later: usize, out: &mut [f32]| {
            kernel.run(&pool, FloatMatrix::F32(outer), later, errors, None, out);
        };
        for (format, gain) in [(Format::Cq4, 2.0), (Format::Cq2, 2.0)] {
            let layout = CqLayout::new(format, rows, cols).unwrap();
            let loss = |feedback: Option<(&Feedback, crate::quant::encode::Product)>| -> f64 {
                let mut tile = vec![0; layout.tile_bytes()];
                encode_tile(&layout, &weights, feedback, &mut tile);
                let mut decoded = vec![0.0; cols];
                let mut sum = 0.0;
                for r in 0..rows {
                    decode_row(&layout, &tile, r, &mut decoded);
                    for x in x.chunks_exact(cols) {
                        let wrong: f32 = (0..cols).map(|c| (decoded[c] - weights[r * cols + c]) * x[c]).sum();
                        sum += f64::from(wrong).powi(2);
                    }
                }
                sum
            };
            let (plain, with) = (loss(None), loss(Some((&feedback, &product))));
            assert!(plain / with > gain, "{format}: {plain} to {with}");
        }
    }
}
