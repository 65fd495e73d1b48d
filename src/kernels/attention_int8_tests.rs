use super::*;

struct Owned {
    keys: Vec<i8>,
    key_scales: Vec<f32>,
    values: Vec<i8>,
    value_scales: Vec<f32>,
}

impl Owned {
    fn new(shape: &AttentionShape, capacity: usize) -> Self {
        let sizes = sizes(shape, capacity);
        // Whatever stands in positions that are not filled must not matter.
        Owned {
            keys: vec![77; sizes.keys],
            key_scales: vec![9.0; sizes.key_scales],
            values: vec![-99; sizes.values],
            value_scales: vec![5.0; sizes.value_scales],
        }
    }
    fn cache(&mut self, capacity: usize) -> Cache<'_> {
        let Owned { keys, key_scales, values, value_scales } = self;
        Cache { keys, key_scales, values, value_scales, capacity }
    }
}

/// Against f64 on unrounded inputs: errors must be those of rounding to 8 bits. And bit by bit against every
/// query alone, other numbers of threads, and the scalar level where sums are integers.
fn check(shape: AttentionShape, tokens: usize, split: usize) {
    let capacity = 704;
    let (qw, kw) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let stride = qw + 2 * kw;
    // A few channels are much larger than others, as in real keys.
    let x: Vec<f32> = (0..tokens * stride)
        .map(|i| {
            let value = ((i * 7919 % 1013) as f32 / 1013.0 - 0.5) * 3.0;
            if i % stride % shape.head_dim == 3 && i % stride < qw + kw { value * 8.0 } else { value }
        })
        .collect();
    for level in Level::supported() {
        let kernel = AttentionInt8::select(level);
        let mut owned = Owned::new(&shape, capacity);
        let mut cache = owned.cache(capacity);
        kernel.store(&Pool::new(2), &shape, &x[..split * stride], stride, qw, qw + kw, 0, &mut cache);
        kernel.store(&Pool::new(2), &shape, &x[split * stride..], stride, qw, qw + kw, split, &mut cache);
        let mut scratch = vec![0.0; partials(&shape, capacity)];
        let mut run = |threads: usize, first: usize, count: usize| {
            let mut out = vec![f32::NAN; count * qw];
            let x = &x[first * stride..(first + count) * stride];
            kernel.run(&Pool::new(threads), &shape, x, stride, 0, first, &cache, &mut scratch, &mut out);
            out
        };
        let out = run(2, 0, tokens);
        assert_eq!(out, run(1, 0, tokens));
        let (mut error, mut signal) = (0.0f64, 0.0f64);
        for t in [0, 1, 63, 64, 255, 256, 300, 511, 512, tokens - 1].into_iter().filter(|t| *t < tokens) {
            assert_eq!(out[t * qw..][..qw], run(3, t, 1), "{level}: token {t} alone differs");
            for head in 0..shape.heads {
                let kv = head / (shape.heads / shape.kv_heads);
                let at = |p: usize, d: usize| f64::from(x[p * stride + d]);
                let from = shape.window.map_or(0, |w| (t + 1).saturating_sub(w));
                let score = |p: usize| {
                    let products =
                        (0..shape.head_dim).map(|d| at(t, head * shape.head_dim + d) * at(p, qw + kv * shape.head_dim + d));
                    let s = products.sum::<f64>() * f64::from(shape.scale);
                    shape.cap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
                };
                let scores: Vec<f64> = (from..=t).map(score).collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                for d in 0..shape.head_dim {
                    let value = |(p, s): (usize, &f64)| (s - top).exp() / total * at(p, qw + kw + kv * shape.head_dim + d);
                    let truth: f64 = (from..=t).zip(&scores).map(value).sum();
                    let got = f64::from(out[t * qw + head * shape.head_dim + d]);
                    error += (got - truth).powi(2);
                    signal += truth.powi(2);
                }
            }
        }
        let relative = (error / signal).sqrt();
        assert!(relative < 0.02, "{level} {shape:?}: {relative}");
    }
}

#[test]
fn near_f64_at_every_level() {
    let plain = AttentionShape { heads: 4, kv_heads: 2, head_dim: 32, scale: 0.05, cap: None, window: None };
    check(plain, 600, 100);
    check(AttentionShape { heads: 7, kv_heads: 1, head_dim: 64, ..plain }, 300, 1);
    check(AttentionShape { window: Some(90), cap: Some(5.0), ..plain }, 400, 64);
    check(AttentionShape { heads: 3, kv_heads: 3, head_dim: 20, window: Some(300), ..plain }, 600, 599);
    check(AttentionShape { heads: 2, kv_heads: 1, head_dim: 256, scale: 0.02, ..plain }, 130, 129);
}
