use super::*;

/// Logits that fall like those of a language model: normal with a standard deviation of `spread`.
fn logits(seed: u64, vocab: usize, spread: f64) -> Vec<f32> {
    let mut state = seed;
    let mut unit = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    (0..vocab).map(|_| ((-2.0 * unit().ln()).sqrt() * (std::f64::consts::TAU * unit()).cos() * spread) as f32).collect()
}

/// KL in f64 from the definition.
fn exact(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |row: &[f32]| {
        let best = row.iter().fold(f64::NEG_INFINITY, |a, b| a.max(f64::from(*b)));
        let total: f64 = row.iter().map(|l| (f64::from(*l) - best).exp()).sum();
        row.iter().map(|l| f64::from(*l) - best - total.ln()).collect::<Vec<f64>>()
    };
    log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum()
}

fn row(logits: &[f32], target: u32) -> Row {
    Row::new(logits, &Softmax::of(logits).unwrap(), target)
}

/// ln 2 of [1/2, 1/4, 1/4] against [1/4, 1/2, 1/4]: 1/2 ln 2 - 1/4 ln 2.
#[test]
fn two_distributions_by_hand() {
    let (p, q) = ([2f32.ln(), 0.0, 0.0], [0.0, 2f32.ln(), 0.0]);
    let divergence = row(&p, 1).divergence(&q, &Softmax::of(&q).unwrap());
    assert!((divergence - 0.25 * std::f64::consts::LN_2).abs() < 1e-3, "{divergence}");
    assert!((row(&p, 1).log_prob - 0.25f64.ln()).abs() < 1e-6);
}

/// The mean is within 1e-5 of the exact one, for small and large divergences, narrow and flat distributions.
#[test]
fn the_kept_form_is_exact_enough() {
    for (vocab, spread, noise) in
        [(32000, 1.0, 0.02), (32000, 2.5, 0.1), (32000, 2.5, 0.5), (150000, 3.0, 0.3), (262144, 3.0, 1.0), (100, 4.0, 0.5)]
    {
        let (mut difference, mut worst, mut bytes, mut sum) = (0.0, 0f64, 0, 0.0);
        const ROWS: u64 = 40;
        for seed in 0..ROWS {
            let p = logits(seed, vocab, spread);
            let q: Vec<f32> = p.iter().zip(logits(seed + 1000, vocab, noise)).map(|(p, n)| p + n).collect();
            let row = row(&p, 0);
            let one = row.divergence(&q, &Softmax::of(&q).unwrap()) - exact(&p, &q);
            bytes += row.to_bytes().len();
            (difference, worst, sum) = (difference + one, worst.max(one.abs()), sum + exact(&p, &q));
            let own = row.divergence(&p, &Softmax::of(&p).unwrap());
            assert!(own < 2e-7, "{own}");
        }
        let mean = difference / ROWS as f64;
        let (kl, bytes) = (sum / ROWS as f64, bytes / ROWS as usize);
        println!("{vocab} {spread} {noise}: mean {mean:.2e}, worst {worst:.2e}, KL {kl}, {bytes} bytes");
        assert!(mean.abs() < 1e-5 && worst < 3e-4, "{vocab} {spread} {noise}: mean {mean}, worst {worst}, KL {kl}");
    }
}

#[test]
fn bytes_hold_the_row() {
    for (seed, vocab) in [(1, 3), (2, 1000), (3, 50000)] {
        let row = row(&logits(seed, vocab, 6.0), 2);
        let bytes = row.to_bytes();
        let read = Row::read(&mut &bytes[..], vocab).unwrap();
        assert_eq!((&read.likeliest, &read.samples, read.top), (&row.likeliest, &row.samples, row.top));
        assert!((read.log_prob - row.log_prob).abs() < 1e-5);
        assert!(Row::read(&mut &bytes[..bytes.len() - 1], vocab).is_err());
        assert!(Row::read(&mut &bytes[..], row.likeliest.last().unwrap().id as usize).is_err());
    }
    assert_eq!(row(&logits(3, 50000, 2.0), 2).samples.len(), SAMPLES);
}

#[test]
fn a_reference_that_is_other_or_broken_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deeper/reference");
    let (key, other) = ([7; 32], [8; 32]);
    let rows: Vec<Row> = (0..3).map(|seed| row(&logits(seed, 500, 2.0), 1)).collect();
    assert!(Reader::open(&path, &key, 3, 500).is_none());
    let mut writer = Writer::create(&path, &key, 3).unwrap();
    rows.iter().for_each(|row| writer.row(&row.to_bytes()).unwrap());
    assert!(!path.exists());
    let bytes = writer.finish().unwrap();
    assert_eq!(bytes, path.metadata().unwrap().len());
    let mut reader = Reader::open(&path, &key, 3, 500).unwrap();
    for row in &rows {
        assert_eq!(reader.row().unwrap().likeliest, row.likeliest);
    }
    assert!(reader.row().is_err());
    assert!(Reader::open(&path, &other, 3, 500).is_none());
    assert!(Reader::open(&path, &key, 4, 500).is_none());
    let good = std::fs::read(&path).unwrap();
    for at in [0, 20, 50, 60, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&path, bad).unwrap();
        assert!(Reader::open(&path, &key, 3, 500).is_none(), "{at}");
    }
    for length in [0, 3, 55, 59, good.len() - 1] {
        std::fs::write(&path, &good[..length]).unwrap();
        assert!(Reader::open(&path, &key, 3, 500).is_none(), "{length}");
    }
    drop(Writer::create(&path, &key, 3).unwrap());
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "an abandoned file is gone");
}
