//! Several measurements of one thing.

use serde::{Deserialize, Serialize};

/// Samples in the order they were taken, and what is told of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// Median of the distances from the median.
    pub mad: f64,
    pub samples: Vec<f64>,
}

impl Spread {
    /// `None` without samples.
    pub fn of(samples: Vec<f64>) -> Option<Spread> {
        let middle = median(&samples)?;
        let distances: Vec<f64> = samples.iter().map(|sample| (sample - middle).abs()).collect();
        Some(Spread {
            median: middle,
            min: samples.iter().copied().fold(f64::INFINITY, f64::min),
            max: samples.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            mad: median(&distances)?,
            samples,
        })
    }
}

/// The mean of the two middle values where there is no middle one.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[sorted.len() / 2 - 1] + upper) / 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outlier_moves_neither_median_nor_deviation() {
        let spread = Spread::of(vec![10.0, 12.0, 11.0, 100.0, 9.0]).unwrap();
        // Sorted 9 10 11 12 100; distances 0 1 1 2 89.
        assert_eq!((spread.median, spread.min, spread.max, spread.mad), (11.0, 9.0, 100.0, 1.0));
        assert_eq!(spread.samples, [10.0, 12.0, 11.0, 100.0, 9.0], "the order is kept");
        let even = Spread::of(vec![4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((even.median, even.mad), (2.5, 1.0));
        let one = Spread::of(vec![7.0]).unwrap();
        assert_eq!((one.median, one.min, one.max, one.mad), (7.0, 7.0, 7.0, 0.0));
        assert_eq!(Spread::of(Vec::new()), None);
    }
}
