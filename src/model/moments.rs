//! Second moments of the inputs of a matrix product, and what follows from them: feedback between columns,
//! and weights that make up for inputs which are not what they were.

use crate::kernels::Pool;
use crate::kernels::matmul_float::{FloatMatrix, MatMulFloat};
use crate::quant::CqLayout;
use crate::quant::feedback::{self, Feedback, block_width};
use crate::quant::format::{GROUP, TILE_ROWS};
use crate::quant::rotate::rotate;
use rayon::prelude::*;
use std::ops::Range;

/// Sums over the tokens of a sample, in the rotated basis, span by span.
pub struct Moments {
    layout: CqLayout,
    spans: Vec<Span>,
    tokens: usize,
}

struct Span {
    /// Columns of the span.
    columns: Range<usize>,
    /// `sum x x^T [n, n]` of the inputs as they will be; the upper triangle (in blocks of 64) is kept up.
    square: Vec<f32>,
    /// `sum x y^T [n, n]` with `y` the inputs as they were in the original model.
    cross: Option<Vec<f32>>,
}

impl Moments {
    /// For the inputs of a matrix of this layout; `crossed`: with the original inputs beside the real ones.
    pub fn new(layout: &CqLayout, crossed: bool) -> Self {
        let span = |groups| {
            let columns = feedback::columns(layout, &groups);
            let n = columns.len();
            Span { columns, square: vec![0.0; n * n], cross: crossed.then(|| vec![0.0; n * n]) }
        };
        Moments { layout: *layout, spans: feedback::spans(layout).into_iter().map(span).collect(), tokens: 0 }
    }

    /// Adds inputs `x [tokens, cols]`, and `original` ones of the same tokens if they are crossed.
    pub fn add(&mut self, x: &[f32], original: Option<&[f32]>, kernel: &MatMulFloat, pool: &Pool) {
        let tokens = x.len() / self.layout.cols;
        self.tokens += tokens;
        let rotated = self.rotated(x);
        let original = original.map(|x| self.rotated(x));
        for span in &mut self.spans {
            let n = span.columns.len();
            let right = channels(&rotated, self.layout.padded_cols(), &span.columns);
            add_products(&mut span.square, &right, &right, n, true, kernel, pool);
            if let (Some(cross), Some(original)) = (&mut span.cross, &original) {
                let original = channels(original, self.layout.padded_cols(), &span.columns);
                add_products(cross, &right, &original, n, false, kernel, pool);
            }
        }
    }

    fn rotated(&self, x: &[f32]) -> Vec<f32> {
        let (cols, padded) = (self.layout.cols, self.layout.padded_cols());
        let mut rotated = vec![0.0f32; x.len() / cols * padded];
        rotated.par_chunks_exact_mut(padded).zip(x.par_chunks_exact(cols)).for_each(|(out, x)| {
            out[..cols].copy_from_slice(x);
            out.chunks_mut(GROUP).for_each(rotate);
        });
        rotated
    }

    /// Factors the moments. `damping` is added to the diagonal in units of its mean, doubled until the
    /// factorisation succeeds.
    pub fn factors(self, damping: f32, kernel: &MatMulFloat, pool: &Pool) -> Factors {
        let mut factors = Factors { layout: self.layout, feedback: Feedback::default(), solvers: Vec::new(), gain: 1.0 };
        let (mut left, mut whole) = (0.0f64, 0.0f64);
        for (groups, span) in feedback::spans(&self.layout).into_iter().zip(self.spans) {
            let n = span.columns.len();
            let mean = (0..n).map(|i| span.square[i * n + i]).sum::<f32>() / n as f32;
            let mut damping = damping;
            // Columns are reversed, because the factor that is wanted is upper triangular.
            let lower = loop {
                let mut a = vec![0.0f32; n * n];
                a.par_chunks_exact_mut(n).enumerate().for_each(|(r, row)| {
                    for (c, out) in row[..=r].iter_mut().enumerate() {
                        *out = span.square[(n - 1 - r) * n + n - 1 - c];
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
            drop(span.square);
            let (Some(lower), true) = (lower, mean > 0.0) else {
                // An input that is always zero gives no moments; its columns simply take no part.
                factors.feedback.push_span(&self.layout, groups, &|_, _| 0.0);
                continue;
            };
            let block = block_width(self.layout.code);
            for (r, row) in lower.chunks_exact(n).enumerate() {
                let squares = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
                left += squares(&row[r / block * block..=r]);
                whole += squares(&row[..=r]);
            }
            let unit = unit_blocks(&lower, n, block);
            factors.feedback.push_span(&self.layout, groups, &|j, b| unit[(n - 1 - j) * n + n - 1 - b]);
            if let Some(mut cross) = span.cross {
                (0..n).for_each(|i| cross[i * n + i] += damping * mean);
                factors.solvers.push(Solver { columns: span.columns, cross, lower: Lower::new(&lower, n) });
            }
        }
        factors.gain = if whole > 0.0 { left / whole } else { 1.0 };
        factors
    }
}

/// The span's columns of `[tokens, padded]` as rows, so that products run along the tokens.
fn channels(x: &[f32], padded: usize, columns: &Range<usize>) -> Vec<f32> {
    let tokens = x.len() / padded;
    let mut out = vec![0.0f32; columns.len() * tokens];
    out.par_chunks_exact_mut(tokens * 16).enumerate().for_each(|(i, out)| {
        for (t, row) in x.chunks_exact(padded).enumerate() {
            for (k, x) in row[columns.start + 16 * i..][..16].iter().enumerate() {
                out[k * tokens + t] = *x;
            }
        }
    });
    out
}

/// `sums [n, n] += left right^T` for `[n, tokens]`; `upper`: only from the diagonal on, in blocks of 64 rows.
fn add_products(sums: &mut [f32], left: &[f32], right: &[f32], n: usize, upper: bool, kernel: &MatMulFloat, pool: &Pool) {
    let tokens = left.len() / n;
    let mut product = vec![0.0f32; TILE_ROWS * n];
    for first in (0..n).step_by(TILE_ROWS) {
        let rows = TILE_ROWS.min(n - first);
        let start = if upper { first } else { 0 };
        let product = &mut product[..rows * (n - start)];
        let (left, right) = (&left[first * tokens..(first + rows) * tokens], &right[start * tokens..]);
        kernel.run(pool, FloatMatrix::F32(right), n - start, left, None, product);
        for (r, product) in product.chunks_exact(n - start).enumerate() {
            for (m, p) in sums[(first + r) * n + start..][..n - start].iter_mut().zip(product) {
                *m += p;
            }
        }
    }
}

/// `L` with every diagonal block of `width` columns made an identity: `L[:, b] L[b, b]^-1`.
fn unit_blocks(lower: &[f32], n: usize, width: usize) -> Vec<f32> {
    let mut out = vec![0.0f32; n * n];
    out.par_chunks_exact_mut(n).enumerate().for_each(|(r, out)| {
        for first in (0..r / width * width).step_by(width) {
            for c in (first..first + width).rev() {
                let known: f32 = (c + 1..first + width).map(|k| out[k] * lower[k * n + c]).sum();
                out[c] = (lower[r * n + c] - known) / lower[c * n + c];
            }
        }
    });
    out
}

/// What moments say about a matrix.
pub struct Factors {
    layout: CqLayout,
    pub feedback: Feedback,
    /// Error of the product with feedback, as a part of that without: `tr D / tr H`.
    pub gain: f64,
    solvers: Vec<Solver>,
}

struct Solver {
    columns: Range<usize>,
    /// Damped `sum x y^T [n, n]`.
    cross: Vec<f32>,
    lower: Lower,
}

impl Factors {
    /// The weights that on the inputs as they will be come closest to what `weights [rows, padded]` (rotated)
    /// give on the original ones, `W (Y X^T) (X X^T)^-1` (GPTAQ, <https://arxiv.org/abs/2504.02692>), `share`
    /// of the way: the whole way overfits a small sample.
    pub fn aims(&self, weights: &[f32], share: f32, kernel: &MatMulFloat, pool: &Pool) -> Vec<f32> {
        let padded = self.layout.padded_cols();
        let mut aims = weights.to_vec();
        for solver in &self.solvers {
            let n = solver.columns.len();
            let part: Vec<f32> = weights.chunks_exact(padded).flat_map(|w| &w[solver.columns.clone()]).copied().collect();
            let mut solved = vec![0.0f32; part.len()];
            kernel.run(pool, FloatMatrix::F32(&solver.cross), n, &part, None, &mut solved);
            solved.chunks_exact_mut(n).for_each(<[f32]>::reverse);
            solver.lower.solve(&mut solved, kernel, pool);
            for (aims, solved) in aims.chunks_exact_mut(padded).zip(solved.chunks_exact(n)) {
                for (a, s) in aims[solver.columns.clone()].iter_mut().zip(solved.iter().rev()) {
                    *a += share * (s - *a);
                }
            }
        }
        aims
    }
}

/// A Cholesky factor cut into the panels that solving needs.
struct Lower {
    n: usize,
    blocks: Vec<Block>,
}

struct Block {
    columns: Range<usize>,
    /// Inverse of the diagonal block, `[width, width]`, and its transpose.
    inverse: [Vec<f32>; 2],
    /// What is below the diagonal block, `[n - end, width]`.
    below: Vec<f32>,
    /// What is left of it, transposed: `[start, width]`.
    before: Vec<f32>,
}

impl Lower {
    fn new(lower: &[f32], n: usize) -> Self {
        let block = |start: usize| {
            let columns = start..(start + GROUP).min(n);
            let below = (columns.end..n).flat_map(|r| &lower[r * n + columns.start..r * n + columns.end]).copied().collect();
            let before = (0..start).flat_map(|c| columns.clone().map(move |r| lower[r * n + c])).collect();
            Block { inverse: inverse(lower, n, &columns), below, before, columns }
        };
        Lower { n, blocks: (0..n).step_by(GROUP).map(block).collect() }
    }

    /// Replaces every row `b` of `[rows, n]` by the `y` with `y L L^T = b`.
    fn solve(&self, b: &mut [f32], kernel: &MatMulFloat, pool: &Pool) {
        for block in &self.blocks {
            self.eliminate(b, block, &block.inverse[0], &block.below, block.columns.end..self.n, kernel, pool);
        }
        for block in self.blocks.iter().rev() {
            self.eliminate(b, block, &block.inverse[1], &block.before, 0..block.columns.start, kernel, pool);
        }
    }

    /// Solves the columns of a block in place and takes what they explain off the columns `rest`.
    #[allow(clippy::too_many_arguments)]
    fn eliminate(
        &self,
        b: &mut [f32],
        block: &Block,
        inverse: &[f32],
        panel: &[f32],
        rest: Range<usize>,
        kernel: &MatMulFloat,
        pool: &Pool,
    ) {
        let (rows, width) = (b.len() / self.n, block.columns.len());
        let part: Vec<f32> = b.chunks_exact(self.n).flat_map(|row| &row[block.columns.clone()]).copied().collect();
        let mut solved = vec![0.0f32; rows * width];
        kernel.run(pool, FloatMatrix::F32(inverse), width, &part, None, &mut solved);
        for (row, solved) in b.chunks_exact_mut(self.n).zip(solved.chunks_exact(width)) {
            row[block.columns.clone()].copy_from_slice(solved);
        }
        if rest.is_empty() {
            return;
        }
        let mut product = vec![0.0f32; rows * rest.len()];
        kernel.run(pool, FloatMatrix::F32(panel), rest.len(), &solved, None, &mut product);
        for (row, product) in b.chunks_exact_mut(self.n).zip(product.chunks_exact(rest.len())) {
            row[rest.clone()].iter_mut().zip(product).for_each(|(b, p)| *b -= p);
        }
    }
}

/// Inverse of a diagonal block of a lower triangular matrix, and its transpose; computed in f64.
fn inverse(lower: &[f32], n: usize, columns: &Range<usize>) -> [Vec<f32>; 2] {
    let width = columns.len();
    let at = |r: usize, c: usize| f64::from(lower[(columns.start + r) * n + columns.start + c]);
    let mut inverse = vec![0.0f64; width * width];
    for c in 0..width {
        inverse[c * width + c] = 1.0 / at(c, c);
        for r in c + 1..width {
            let known: f64 = (c..r).map(|k| at(r, k) * inverse[k * width + c]).sum();
            inverse[r * width + c] = -known / at(r, r);
        }
    }
    let mut both = [vec![0.0f32; width * width], vec![0.0f32; width * width]];
    for r in 0..width {
        for c in 0..=r {
            both[0][r * width + c] = inverse[r * width + c] as f32;
            both[1][c * width + r] = inverse[r * width + c] as f32;
        }
    }
    both
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
    use crate::kernels::Level;
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
        let product = |outer: &[f32], errors: &[f32], later: usize, out: &mut [f32]| {
            kernel.run(&pool, FloatMatrix::F32(outer), later, errors, None, out);
        };
        for (format, gain) in [(Format::Cq8, 2.0), (Format::Cq4, 2.0), (Format::Cq2, 2.0)] {
            let layout = CqLayout::new(format, rows, cols).unwrap();
            let mut moments = Moments::new(&layout, false);
            x.chunks(100 * cols).for_each(|x| moments.add(x, None, &kernel, &pool));
            let feedback = moments.factors(0.01, &kernel, &pool).feedback;
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

    /// Inputs that are the original ones after a known mixing: the weights that undo it are found.
    #[test]
    fn aims_undo_a_change_of_inputs() {
        let (kernel, pool) = (MatMulFloat::select(Level::best(None)), Pool::new(1));
        let (rows, cols, tokens) = (3, 200, 1000);
        let layout = CqLayout::new(Format::Tcq4, rows, cols).unwrap();
        let (weights, y) = (random(rows * cols, 1), random(tokens * cols, 2));
        // Every channel leaks a third of itself into the next one.
        let x: Vec<f32> = (0..tokens * cols).map(|i| y[i] + if i % cols > 0 { y[i - 1] / 3.0 } else { 0.0 }).collect();
        let mut moments = Moments::new(&layout, true);
        for (x, y) in x.chunks(250 * cols).zip(y.chunks(250 * cols)) {
            moments.add(x, Some(y), &kernel, &pool);
        }
        let rotated = crate::quant::encode::rotated_rows(&layout, &weights);
        let aims = moments.factors(1e-5, &kernel, &pool).aims(&rotated, 1.0, &kernel, &pool);
        for (aims, weights) in aims.chunks_exact(layout.padded_cols()).zip(weights.chunks_exact(cols)) {
            let mut aims = aims.to_vec();
            aims.chunks_mut(GROUP).for_each(crate::quant::rotate::unrotate);
            for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact(cols)).take(20) {
                let wanted: f32 = weights.iter().zip(y).map(|(w, y)| w * y).sum();
                let got: f32 = aims.iter().zip(x).map(|(w, x)| w * x).sum();
                assert!((wanted - got).abs() < 0.02 * wanted.abs().max(1.0), "{wanted} {got}");
            }
        }
    }
}
