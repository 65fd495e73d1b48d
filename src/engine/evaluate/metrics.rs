//! The mathematics of comparing two models: softmax surveys, quantiles, bootstrap intervals, exact tests.
//! Nothing here knows of models or files.

/// What a row of logits says about its softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Softmax {
    /// The likeliest id, the lowest among equals.
    pub top: u32,
    /// Its logit.
    pub best: f32,
    /// Sum of `exp(logit - best)`.
    pub total: f64,
}

impl Softmax {
    /// Surveys a row; `None` if it is empty or holds anything that is no finite number.
    pub fn of(row: &[f32]) -> Option<Softmax> {
        let (mut top, mut best) = (0, f32::NEG_INFINITY);
        for (id, &logit) in (0..).zip(row) {
            if logit > best {
                (top, best) = (id, logit);
            }
        }
        let total: f64 = row.chunks(256).map(|part| part.iter().map(|&l| f64::from((l - best).exp())).sum::<f64>()).sum();
        let finite = best.is_finite() && total.is_finite() && row.iter().all(|l| l.is_finite());
        finite.then_some(Softmax { top, best, total })
    }

    /// Weight of a logit beside the best one, before division by [`total`](Self::total).
    pub fn weight(&self, logit: f32) -> f64 {
        f64::from((logit - self.best).exp())
    }

    /// Natural logarithm of the probability of a logit of the row.
    pub fn log_prob(&self, logit: f32) -> f64 {
        f64::from(logit) - f64::from(self.best) - self.total.ln()
    }
}

/// Arithmetic mean; NaN of nothing.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Quantile `q` of sorted values, linear between neighbours (as numpy's default); NaN of nothing.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = q.clamp(0.0, 1.0) * last as f64;
    let low = place.floor() as usize;
    let high = (low + 1).min(last);
    sorted[low] + (sorted[high] - sorted[low]) * (place - low as f64)
}

/// A 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Interval(pub f64, pub f64);

/// Resamples of a bootstrap, and the seed that makes it repeatable.
const RESAMPLES: usize = 1000;
const SEED: u64 = 0x5eed;

/// Percentile bootstrap (Efron 1979) of a ratio of sums over groups (documents, chunks, questions): groups are
/// drawn with replacement, `sums` holds the numerator and the denominator of each. `None` with fewer than two
/// groups, of which no spread can be seen.
pub fn bootstrap(sums: &[(f64, f64)]) -> Option<Interval> {
    if sums.len() < 2 {
        return None;
    }
    let mut random = SplitMix(SEED);
    let mut values: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let (mut above, mut below) = (0.0, 0.0);
            for _ in 0..sums.len() {
                let (a, b) = sums[random.below(sums.len())];
                above += a;
                below += b;
            }
            above / below
        })
        .filter(|value| value.is_finite())
        .collect();
    values.sort_by(f64::total_cmp);
    (!values.is_empty()).then(|| Interval(quantile(&values, 0.025), quantile(&values, 0.975)))
}

/// Two-sided exact McNemar test (McNemar 1947, with the binomial distribution in place of chi-squared): how
/// likely at least so uneven a split of the flips would be if both directions were equally likely.
pub fn mcnemar(one_way: usize, other_way: usize) -> f64 {
    let n = one_way + other_way;
    let mut log_choose = 0.0;
    let mut tail = 0.0;
    for i in 0..=one_way.min(other_way) {
        if i > 0 {
            log_choose += ((n - i + 1) as f64).ln() - (i as f64).ln();
        }
        tail += (log_choose - n as f64 * std::f64::consts::LN_2).exp();
    }
    (2.0 * tail).min(1.0)
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform below `n`; the bias of n / 2^64 is of no account.
    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn softmax_by_hand() {
        // Weights 1, 2, 5 of 8.
        let row = [0.0, 2f32.ln(), 5f32.ln()];
        let s = Softmax::of(&row).unwrap();
        assert_eq!(s.top, 2);
        for (logit, p) in row.iter().zip([0.125f64, 0.25, 0.625]) {
            assert!((s.log_prob(*logit) - p.ln()).abs() < 1e-6);
        }
        assert_eq!(Softmax::of(&[1.0, 1.0]).unwrap().top, 0);
        for bad in [&[][..], &[f32::NAN, 1.0], &[f32::INFINITY], &[f32::NEG_INFINITY, 0.0]] {
            assert_eq!(Softmax::of(bad), None);
        }
    }

    /// numpy: np.quantile([1, 2, 4, 8], [0, .5, .99, 1]) is [1, 3, 7.88, 8].
    #[test]
    fn quantiles_are_those_of_numpy() {
        let values = [1.0, 2.0, 4.0, 8.0];
        for (q, expected) in [(0.0, 1.0), (0.5, 3.0), (0.99, 7.88), (1.0, 8.0)] {
            assert!(near(quantile(&values, q), expected), "{q}");
        }
        assert!(quantile(&[], 0.5).is_nan());
    }

    /// 100 groups of which 30 hit: the standard error of the mean is sqrt(.3 * .7 / 100) = 0.0458, so the
    /// interval is about 0.3 -+ 0.09.
    #[test]
    fn bootstrap_gives_the_interval_of_a_share() {
        let sums: Vec<(f64, f64)> = (0..100).map(|i| (f64::from(u8::from(i % 10 < 3)), 1.0)).collect();
        let Interval(low, high) = bootstrap(&sums).unwrap();
        assert!((0.19..=0.24).contains(&low) && (0.36..=0.41).contains(&high), "{low} {high}");
        assert_eq!(bootstrap(&sums), Some(Interval(low, high)));
        assert_eq!(bootstrap(&sums[..1]), None);
        assert_eq!(bootstrap(&[(2.0, 4.0), (3.0, 6.0)]), Some(Interval(0.5, 0.5)));
    }

    /// Binomial tails by hand: 2 * 1/8, 2 * (1 + 6)/64, and scipy.stats.binomtest(5, 20).pvalue.
    #[test]
    fn mcnemar_by_hand() {
        assert!(near(mcnemar(0, 3), 0.25) && near(mcnemar(3, 0), 0.25));
        assert!(near(mcnemar(1, 5), 0.21875));
        assert!(near(mcnemar(5, 15), 0.04138946533203125));
        assert!(near(mcnemar(0, 0), 1.0) && near(mcnemar(4, 4), 1.0));
        assert!(mcnemar(1000, 1500) < 1e-20);
    }
}
