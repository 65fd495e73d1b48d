//! Products of f32 activations with unquantised weights (f32, f16, bf16), `[rows, cols]` row-major.

use super::threads::{Parts, Pool};
use super::variant::{Level, variants};
use super::vector::{LANES, Lanes};

/// An unquantised matrix.
#[derive(Clone, Copy, Debug)]
pub enum FloatMatrix<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    BF16(&'a [u16]),
}

impl FloatMatrix<'_> {
    pub fn len(&self) -> usize {
        match self {
            FloatMatrix::F32(w) => w.len(),
            FloatMatrix::F16(w) | FloatMatrix::BF16(w) => w.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `i` as f32.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            FloatMatrix::F32(w) => w[i],
            FloatMatrix::F16(w) => half::f16::from_bits(w[i]).to_f32(),
            FloatMatrix::BF16(w) => half::bf16::from_bits(w[i]).to_f32(),
        }
    }
}

const F32: usize = 0;
const F16: usize = 1;
const BF16: usize = 2;

/// Some rows of a matrix and everything they are multiplied with.
pub struct RowsJob<'a> {
    /// First element of the first row, `cols` elements a row.
    weights: *const u8,
    rows: usize,
    cols: usize,
    /// `[tokens, cols]`
    x: &'a [f32],
    tokens: usize,
    bias: Option<&'a [f32]>,
    /// Element `token * stride + row` receives the result.
    out: *mut f32,
    stride: usize,
}

#[inline(always)]
unsafe fn load<const KIND: usize, L: Lanes>(w: *const u8, element: usize) -> L {
    unsafe {
        match KIND {
            F32 => L::load(w.cast::<f32>().add(element)),
            F16 => L::load_f16(w.cast::<u16>().add(element)),
            _ => L::load_bf16(w.cast::<u16>().add(element)),
        }
    }
}

/// The last `count` elements of a row, the missing lanes zero.
#[inline(always)]
unsafe fn load_end<const KIND: usize, L: Lanes>(w: *const u8, element: usize, count: usize) -> L {
    unsafe {
        let size = if KIND == F32 { 4 } else { 2 };
        let mut buffer = [0u32; LANES];
        std::ptr::copy_nonoverlapping(w.add(element * size), buffer.as_mut_ptr().cast::<u8>(), count * size);
        load::<KIND, L>(buffer.as_ptr().cast(), 0)
    }
}

/// `R` rows times `N` tokens. Every result adds its own products in column order, 16 partial sums.
#[inline(always)]
unsafe fn block<const KIND: usize, const R: usize, const N: usize, L: Lanes>(job: &RowsJob, row: usize, token: usize) {
    unsafe {
        let (cols, x) = (job.cols, job.x.as_ptr().add(token * job.cols));
        let mut acc = [[L::splat(0.0); N]; R];
        let whole = cols - cols % LANES;
        let mut k = 0;
        while k < whole {
            let mut xs = [L::splat(0.0); N];
            for (n, xs) in xs.iter_mut().enumerate() {
                *xs = L::load(x.add(n * cols + k));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let w: L = load::<KIND, L>(job.weights, (row + r) * cols + k);
                for (n, acc) in acc.iter_mut().enumerate() {
                    *acc = w.fma(xs[n], *acc);
                }
            }
            k += LANES;
        }
        if whole < cols {
            for (r, acc) in acc.iter_mut().enumerate() {
                let w: L = load_end::<KIND, L>(job.weights, (row + r) * cols + whole, cols - whole);
                for (n, acc) in acc.iter_mut().enumerate() {
                    let x: L = load_end::<F32, L>(x.cast(), n * cols + whole, cols - whole);
                    *acc = w.fma(x, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                let bias = job.bias.map_or(0.0, |b| b[row + r]);
                *job.out.add((token + n) * job.stride + row + r) = acc.sum() + bias;
            }
        }
    }
}

/// `N` tokens from `token` on: tiles of `R` rows, the rows that are left one by one.
#[inline(always)]
unsafe fn all_rows<const KIND: usize, const R: usize, const N: usize, L: Lanes>(job: &RowsJob, token: usize) {
    unsafe {
        let mut row = 0;
        while job.rows - row >= R {
            block::<KIND, R, N, L>(job, row, token);
            row += R;
        }
        while row < job.rows {
            block::<KIND, 1, N, L>(job, row, token);
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn rows_product<const KIND: usize, L: Lanes>(job: &RowsJob) {
    unsafe {
        let mut token = 0;
        while L::WIDE && job.tokens - token >= 4 {
            all_rows::<KIND, 4, 4, L>(job, token);
            token += 4;
        }
        while job.tokens - token >= 2 {
            all_rows::<KIND, 2, 2, L>(job, token);
            token += 2;
        }
        if token < job.tokens {
            all_rows::<KIND, 4, 1, L>(job, token);
        }
    }
}

variants!(f32_rows = rows_product[F32] as fn(job: &RowsJob));
variants!(f16_rows = rows_product[F16] as fn(job: &RowsJob));
variants!(bf16_rows = rows_product[BF16] as fn(job: &RowsJob));

/// Rows handed to a thread at a time.
const CHUNK: usize = 32;

/// The kernels of one level.
#[derive(Clone, Copy)]
pub struct MatMulFloat {
    f32: f32_rows::Run,
    f16: f16_rows::Run,
    bf16: bf16_rows::Run,
}

impl MatMulFloat {
    pub fn select(level: Level) -> Self {
        MatMulFloat { f32: f32_rows::select(level), f16: f16_rows::select(level), bf16: bf16_rows::select(level) }
    }

    /// `out [tokens, rows] = x W^T (+ bias)` for `W [rows, cols]` and `x [tokens, cols]`.
    pub fn run(&self, pool: &Pool, weights: FloatMatrix, rows: usize, x: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
        let tokens = out.len() / rows;
        let cols = weights.len() / rows;
        assert!(weights.len() == rows * cols && out.len() == tokens * rows && x.len() == tokens * cols);
        assert!(bias.is_none_or(|b| b.len() == rows));
        let (run, start, size) = match weights {
            FloatMatrix::F32(w) => (self.f32, w.as_ptr().cast::<u8>(), 4),
            FloatMatrix::F16(w) => (self.f16, w.as_ptr().cast(), 2),
            FloatMatrix::BF16(w) => (self.bf16, w.as_ptr().cast(), 2),
        };
        let start = Start(start);
        let out = &Parts::new(out);
        pool.each(rows.div_ceil(CHUNK), &|_, chunk| {
            let first = chunk * CHUNK;
            let count = CHUNK.min(rows - first);
            // SAFETY: sizes were asserted above and the level by `select`; chunks write disjoint columns.
            unsafe {
                run(&RowsJob {
                    weights: start.get().add(first * cols * size),
                    rows: count,
                    cols,
                    x,
                    tokens,
                    bias: bias.map(|b| &b[first..first + count]),
                    out: out.start().add(first),
                    stride: rows,
                })
            }
        });
    }
}

/// Start of weights that threads only read.
struct Start(*const u8);
// SAFETY: the weights are borrowed for the whole call and nobody writes them.
unsafe impl Sync for Start {}

impl Start {
    fn get(&self) -> *const u8 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn against_f64_at_every_level_and_shape() {
        let pool = Pool::new(2);
        for (rows, cols) in [(1, 1), (5, 17), (70, 96), (33, 200)] {
            let most = 9;
            let w: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 512.0).collect();
            let f16: Vec<u16> = w.iter().map(|w| half::f16::from_f32(*w).to_bits()).collect();
            let bf16: Vec<u16> = w.iter().map(|w| half::bf16::from_f32(*w).to_bits()).collect();
            let x: Vec<f32> = (0..most * cols).map(|i| ((i * 31 % 257) as f32 - 128.0) / 40.0).collect();
            let bias: Vec<f32> = (0..rows).map(|r| r as f32).collect();
            for level in Level::supported() {
                for m in [FloatMatrix::F32(&w), FloatMatrix::F16(&f16), FloatMatrix::BF16(&bf16)] {
                    let mut alone = Vec::new();
                    for tokens in [1, 3, 4, 9] {
                        let mut out = vec![f32::NAN; tokens * rows];
                        MatMulFloat::select(level).run(&pool, m, rows, &x[..tokens * cols], Some(&bias), &mut out);
                        for t in 0..tokens {
                            for r in 0..rows {
                                let truth: f64 =
                                    (0..cols).map(|k| f64::from(m.get(r * cols + k)) * f64::from(x[t * cols + k])).sum::<f64>()
                                        + r as f64;
                                assert!((f64::from(out[t * rows + r]) - truth).abs() < 1e-4, "{level} {rows}x{cols}");
                            }
                        }
                        if tokens == 1 {
                            alone = out;
                        } else {
                            assert_eq!(alone, out[..rows], "{level}: a token depends on its neighbours");
                        }
                    }
                }
            }
        }
    }
}
