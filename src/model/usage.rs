//! How often the rows of an embedding table and a head are used, and the parts that follow from it.
//!
//! A tenth of a vocabulary makes up four fifths of a text. Errors in a row matter as often as the row is looked up, or
//! its token likely, so rows of the rare tokens can do with fewer bits. Vocabularies are more or less ordered by
//! frequency; so a table is cut into a few parts, each of rows that are about equally frequent, and every part gets bits
//! as a matrix of its own.

use crate::quant::format::TILE_ROWS;

/// Parts at most.
const PARTS: usize = 8;
/// A further part must explain so much of the variation.
const WORTH: f64 = 0.01;
/// Variance below which values are the same.
const SAME: f64 = 1e-6;
/// Of the use, this share is spread over all rows: a sample of text is small.
const SPREAD: f64 = 0.1;

/// Shares of the use of all rows; they add up to 1.
pub struct Usage {
    /// As inputs.
    looked_up: Vec<f64>,
    /// As outputs.
    given: Vec<f64>,
}

impl Usage {
    /// From how often every row was looked up, and how likely its token was.
    pub fn new(looked_up: &[f64], given: &[f64]) -> Self {
        let shares = |counts: &[f64]| -> Vec<f64> {
            let total = counts.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            counts.iter().map(|count| (1.0 - SPREAD) * count / total + SPREAD / counts.len() as f64).collect()
        };
        Usage { looked_up: shares(looked_up), given: shares(given) }
    }

    /// Share of `rows` rows from `first` on as inputs.
    pub fn looked_up(&self, first: usize, rows: usize) -> f64 {
        self.looked_up[first..first + rows].iter().sum()
    }

    /// The same as outputs.
    pub fn given(&self, first: usize, rows: usize) -> f64 {
        self.given[first..first + rows].iter().sum()
    }

    /// Rows at which parts after the first begin: the cuts that leave the least variation of the logarithm of the use
    /// inside of parts. Multiples of a tile.
    pub fn parts(&self) -> Vec<usize> {
        let bands: Vec<f64> = self.looked_up.chunks(TILE_ROWS).zip(self.given.chunks(TILE_ROWS)).map(density).collect();
        cuts(&bands).into_iter().map(|band| band * TILE_ROWS).collect()
    }
}

/// Logarithm of the use of a row.
fn density((looked_up, given): (&[f64], &[f64])) -> f64 {
    let sum: f64 = looked_up.iter().chain(given).sum();
    (sum / looked_up.len() as f64).ln()
}

/// Cuts a sequence into pieces that vary little; gives where those after the first begin. By dynamic programming:
/// the best cut into `k + 1` pieces of a beginning is the best into `k` of a shorter one, and a piece.
fn cuts(values: &[f64]) -> Vec<usize> {
    let n = values.len();
    let (mut sums, mut squares) = (vec![0.0], vec![0.0]);
    for v in values {
        sums.push(sums[sums.len() - 1] + v);
        squares.push(squares[squares.len() - 1] + v * v);
    }
    let variation = |start: usize, end: usize| {
        let (sum, square) = (sums[end] - sums[start], squares[end] - squares[start]);
        (square - sum * sum / (end - start) as f64).max(0.0)
    };
    // Of the first `end` values in so many pieces.
    let mut best: Vec<f64> = (0..=n).map(|end| if end == 0 { 0.0 } else { variation(0, end) }).collect();
    let whole = best[n];
    let mut begins: Vec<Vec<usize>> = Vec::new();
    while begins.len() + 1 < PARTS.min(n) {
        let pieces = begins.len() + 1;
        let mut next = vec![f64::INFINITY; n + 1];
        let mut begin = vec![0; n + 1];
        for end in pieces + 1..=n {
            let cost = |start: &usize| best[*start] + variation(*start, end);
            let start = (pieces..end).min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(pieces);
            (next[end], begin[end]) = (cost(&start), start);
        }
        if best[n] - next[n] <= WORTH * whole.max(n as f64 * SAME) {
            break;
        }
        best = next;
        begins.push(begin);
    }
    let mut found = Vec::new();
    let mut end = n;
    for begin in begins.iter().rev() {
        end = begin[end];
        found.push(end);
    }
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_found() {
        assert_eq!(cuts(&[5.0, 5.0, 5.0, 1.0, 1.0, 9.0]), [3, 5]);
        assert_eq!(cuts(&[2.0; 9]), [0; 0]);
        assert_eq!(cuts(&[1.0]), [0; 0]);
        assert_eq!(cuts(&[]), [0; 0]);
        let falling: Vec<f64> = (1..500).map(|i| -f64::from(i).ln()).collect();
        let found = cuts(&falling);
        assert!((5..PARTS).contains(&found.len()) && found.is_sorted() && found[0] < 10, "{found:?}");
        assert!(found[found.len() - 1] > 200, "{found:?}");
    }

    /// Frequent rows at the beginning, control tokens at the end.
    #[test]
    fn parts_are_of_rows_that_are_used_alike() {
        let mut counts: Vec<f64> = (0..1280).map(|row| if row < 320 { 10.0 } else { 0.0 }).collect();
        counts[1270] = 2000.0;
        let usage = Usage::new(&counts, &counts);
        assert_eq!(usage.parts(), [320, 1216]);
        let shares = [(0, 320), (320, 896), (1216, 64)].map(|(first, rows)| usage.looked_up(first, rows));
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9 && shares[0] == usage.given(0, 320));
        assert!(shares[1] < 0.1 && shares[0] > 0.5, "{shares:?}");
        // Text that was never seen leaves the table whole.
        assert_eq!(Usage::new(&[0.0; 1280], &[0.0; 1280]).parts(), [0; 0]);
    }
}
