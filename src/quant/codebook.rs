//! Lloyd-Max codebooks of one coordinate of a random unit vector.
//!
//! After the rotation the 128 values of a group, divided by their norm, look like a random point on the
//! unit sphere. One coordinate `t` of such a point in `d` dimensions has the density
//! `p(t) ~ (1 - t^2)^((d-3)/2)` on [-1, 1]; the codebook is the least-mean-square scalar quantiser of that
//! density (S. Lloyd, "Least squares quantization in PCM", IEEE Trans. IT 28(2), 1982).

use std::sync::OnceLock;

/// Largest magnitude of an integer level: `level + 64` fits seven bits, so that a sum of two products
/// with int8 activations cannot saturate `vpmaddubsw` on CPUs without VNNI.
pub const LEVEL_MAX: i8 = 63;

/// The `2^bits` centroids for dimension `dim`, ascending.
///
/// The density is sampled at 200 001 points; centroids start at the quantiles `i / (2^bits + 1)` and at
/// most 200 rounds follow, until nothing moves by 1e-8 (the numbers published for this method).
pub fn lloyd_max(dim: usize, bits: u32) -> Vec<f64> {
    const POINTS: usize = 200_001;
    let at = |i: usize| -1.0 + 2.0 * i as f64 / (POINTS - 1) as f64;
    let exponent = (dim as f64 - 3.0) / 2.0;
    // Prefix sums of weight and of weight times position, so that a cell's mean is two subtractions.
    let mut weight = vec![0.0f64; POINTS + 1];
    let mut moment = vec![0.0f64; POINTS + 1];
    for i in 0..POINTS {
        let t = at(i);
        let p = (1.0 - t * t).max(0.0).powf(exponent);
        weight[i + 1] = weight[i] + p;
        moment[i + 1] = moment[i] + p * t;
    }
    let total = weight[POINTS];
    let levels = 1usize << bits;
    let mut centroids: Vec<f64> = (1..=levels)
        .map(|i| {
            let target = total * i as f64 / (levels + 1) as f64;
            let j = weight.partition_point(|&w| w < target).max(1);
            let (below, above) = (weight[j - 1], weight[j]);
            let fraction = if above > below { (target - below) / (above - below) } else { 0.0 };
            at(j - 1) + (fraction - 1.0) * 2.0 / (POINTS - 1) as f64
        })
        .collect();
    for _ in 0..200 {
        let mut moved = 0.0f64;
        let mut start = 0;
        let old = centroids.clone();
        for (i, c) in centroids.iter_mut().enumerate() {
            let end = match old.get(i + 1) {
                Some(next) => {
                    ((((old[i] + next) / 2.0 + 1.0) / 2.0 * (POINTS - 1) as f64).ceil().max(0.0) as usize).clamp(start, POINTS)
                }
                None => POINTS,
            };
            let w = weight[end] - weight[start];
            if w > 0.0 {
                let mean = (moment[end] - moment[start]) / w;
                moved = moved.max((mean - *c).abs());
                *c = mean;
            }
            start = end;
        }
        if moved < 1e-8 {
            break;
        }
    }
    centroids
}

/// An integer codebook: what the kernels multiply with.
#[derive(Debug)]
pub struct Codebook {
    /// Level of every code, ascending; codes past `2^bits` repeat the book, so that any four bits are a valid index.
    pub levels: [i8; 16],
    /// Code of the level nearest to `i / 2 - 64` for `i` in 0..256 (midpoints of integers are halves).
    nearest: [u8; 256],
    /// Root mean square of a source coordinate, in units of integer levels.
    pub unit: f32,
}

impl Codebook {
    fn new(bits: u32) -> Self {
        let dim = super::format::GROUP;
        let centroids = lloyd_max(dim, bits);
        let largest = centroids.iter().fold(0.0f64, |m, c| m.max(c.abs()));
        let count = 1usize << bits;
        // The density is even: mirror the upper half, which removes the tiny asymmetry of the grid.
        let mut levels = [0i8; 16];
        for i in 0..count / 2 {
            let size = (centroids[count - 1 - i] - centroids[i]) / 2.0 / largest * f64::from(LEVEL_MAX);
            levels[i] = -(size.round().min(f64::from(LEVEL_MAX)) as i8);
            levels[count - 1 - i] = -levels[i];
        }
        for i in count..16 {
            levels[i] = levels[i % count];
        }
        let mut nearest = [0u8; 256];
        for (i, code) in nearest.iter_mut().enumerate() {
            // The cell [i/2 - 64, i/2 - 63.5) lies on one side of every midpoint.
            let x = i as f64 / 2.0 - 64.0 + 0.25;
            let by_distance =
                |a: &usize, b: &usize| (x - f64::from(levels[*a])).abs().total_cmp(&(x - f64::from(levels[*b])).abs());
            *code = (0..count).min_by(by_distance).unwrap_or(0) as u8;
        }
        let unit = f64::from(LEVEL_MAX) / largest / (dim as f64).sqrt();
        Codebook { levels, nearest, unit: unit as f32 }
    }

    /// The book for 1 to 4 bits.
    pub fn get(bits: usize) -> &'static Codebook {
        static BOOKS: [OnceLock<Codebook>; 4] = [const { OnceLock::new() }; 4];
        BOOKS[bits - 1].get_or_init(|| Codebook::new(bits as u32))
    }

    /// Code of the level nearest to `x`, which is in units of levels. Midpoints go to the upper level.
    #[inline]
    pub fn code(&self, x: f32) -> u8 {
        self.nearest[((x + 64.0) * 2.0).clamp(0.0, 255.0) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the existing system's converter for d = 128 (fp32, grid of 200 001 points).
    #[test]
    fn equals_the_published_books() {
        let books: [&[f64]; 4] = [
            &[-0.070_664_74, 0.070_658_40],
            &[-0.133_040_28, -0.039_993_67, 0.039_984_42, 0.133_032_37],
            &[-0.188_368_37, -0.118_111_22, -0.066_568_43, -0.021_602_18, 0.021_592_38, 0.066_562_88, 0.118_111_22, 0.188_368_37],
            &[
                -0.237_569_75,
                -0.180_726_51,
                -0.141_687_45,
                -0.110_172_44,
                -0.082_725_64,
                -0.057_692_48,
                -0.034_102_94,
                -0.011_289_25,
                0.011_279_30,
                0.034_097_81,
                0.057_692_48,
                0.082_725_64,
                0.110_172_44,
                0.141_687_45,
                0.180_726_51,
                0.237_569_75,
            ],
        ];
        for (bits, book) in (1..).zip(books) {
            let ours = lloyd_max(128, bits);
            for (a, b) in ours.iter().zip(book) {
                assert!((a - b).abs() < 2e-5, "{bits} bits: {a} against {b}");
            }
        }
    }

    /// The published books for a whole row of 256 or 1024 columns (largest and smallest positive entry).
    #[test]
    fn equals_the_published_books_of_other_dimensions() {
        for (dim, top, bottom) in [(256, 0.169_325_4, 0.007_981_5), (1024, 0.085_122_6, 0.003_988_0)] {
            let ours = lloyd_max(dim, 4);
            assert!((ours[15] - top).abs() < 3e-5 && (ours[8] - bottom).abs() < 3e-5, "{dim}: {} {}", ours[15], ours[8]);
        }
    }

    #[test]
    fn codes_are_nearest_levels() {
        for bits in 1..=4 {
            let book = Codebook::get(bits);
            assert_eq!(book.levels[0], -LEVEL_MAX);
            for i in -700..700 {
                let x = i as f32 / 10.0 + 0.01;
                let code = book.code(x);
                let best = book.levels[..1 << bits].iter().map(|l| (x - f32::from(*l)).abs()).fold(f32::MAX, f32::min);
                assert!((x - f32::from(book.levels[code as usize])).abs() <= best + 1e-4, "{bits} bits, {x}");
            }
        }
    }
}
