//! Which matrix gets how many bits: the least expected divergence that fits a number of bytes.
//!
//! Small errors of different matrices add up in the KL divergence of the output (the linearity theorem of
//! HIGGS, <https://arxiv.org/abs/2411.17525>), so this is a knapsack: each matrix has a cost and a size for
//! every width, and one is to be chosen each. Solved with a Lagrange multiplier, then what is left of the
//! budget is spent greedily.

/// Widths to choose from, in bits.
pub const WIDTHS: [u32; 5] = [1, 2, 3, 4, 8];

/// Mean squared error of a unit Gaussian at each of [`WIDTHS`] with trellis codes (8 bits: equal steps up to
/// the largest of 128 values).
pub const DISTORTION: [f64; 5] = [0.276, 0.0735, 0.0193, 0.005_05, 3.8e-5];

/// One matrix.
#[derive(Clone, Debug)]
pub struct Item {
    /// Bytes at each of [`WIDTHS`].
    pub bytes: [u64; 5],
    /// Expected divergence at each of [`WIDTHS`], in nats a token; falling.
    pub cost: [f64; 5],
}

/// For every item the index into [`WIDTHS`]; `None` when even the smallest does not fit `budget` bytes.
pub fn allocate(items: &[Item], budget: u64) -> Option<Vec<usize>> {
    let size = |choice: &[usize]| items.iter().zip(choice).map(|(item, c)| item.bytes[*c]).sum::<u64>();
    // What is cheapest when a byte costs `price`.
    let solve = |price: f64| -> Vec<usize> {
        let best = |item: &Item| {
            let total = |c: &usize| item.cost[*c] + price * item.bytes[*c] as f64;
            (0..WIDTHS.len()).min_by(|a, b| total(a).total_cmp(&total(b))).unwrap_or(0)
        };
        items.iter().map(best).collect()
    };
    let (mut low, mut high) = (1e-30f64, 1e30f64);
    let mut choice = solve(high);
    if size(&choice) > budget {
        return None;
    }
    for _ in 0..200 {
        let price = (low * high).sqrt();
        let candidate = solve(price);
        if size(&candidate) <= budget {
            (high, choice) = (price, candidate);
        } else {
            low = price;
        }
    }
    loop {
        let room = budget - size(&choice);
        let step = |(i, item): (usize, &Item)| {
            let c = choice[i];
            let extra = item.bytes.get(c + 1)?.checked_sub(item.bytes[c])?;
            (extra <= room).then(|| ((item.cost[c] - item.cost[c + 1]) / extra.max(1) as f64, i))
        };
        let best = items.iter().enumerate().filter_map(step).max_by(|a, b| a.0.total_cmp(&b.0));
        match best {
            Some((_, i)) => choice[i] += 1,
            None => return Some(choice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(weights: u64, sensitivity: f64) -> Item {
        Item { bytes: WIDTHS.map(|b| weights * u64::from(b) / 8), cost: DISTORTION.map(|d| d * sensitivity) }
    }

    #[test]
    fn sensitive_matrices_get_more() {
        let items = [item(8000, 1.0), item(8000, 10.0), item(8000, 0.1)];
        assert_eq!(allocate(&items, 9000), Some(vec![2, 3, 1]));
        assert_eq!(allocate(&items, 2999), None);
        assert_eq!(allocate(&items, 3000), Some(vec![0, 0, 0]));
        assert_eq!(allocate(&items, 1 << 40), Some(vec![4, 4, 4]));
    }

    /// Against trying everything.
    #[test]
    fn is_near_the_optimum() {
        let items: Vec<Item> = [(3.0, 900), (0.2, 5000), (1.0, 2500), (0.7, 2600), (5.0, 400)].map(|(s, n)| item(n, s)).to_vec();
        for budget in [2000u64, 3000, 4000, 5000, 8000] {
            let mut best = f64::INFINITY;
            for code in 0..5usize.pow(5) {
                let choice: Vec<usize> = (0..5).map(|i| code / 5usize.pow(i) % 5).collect();
                let bytes: u64 = items.iter().zip(&choice).map(|(i, c)| i.bytes[*c]).sum();
                if bytes <= budget {
                    best = best.min(items.iter().zip(&choice).map(|(i, c)| i.cost[*c]).sum());
                }
            }
            let choice = allocate(&items, budget).unwrap();
            let bytes: u64 = items.iter().zip(&choice).map(|(i, c)| i.bytes[*c]).sum();
            let cost: f64 = items.iter().zip(&choice).map(|(i, c)| i.cost[*c]).sum();
            assert!(bytes <= budget && cost <= best * 1.25, "{budget}: {cost} against {best}");
        }
    }
}
