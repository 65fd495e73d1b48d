//! The randomised Hadamard rotation of a group: `y = H D x / sqrt(n)`, `D` a fixed diagonal of signs.
//!
//! The matrix is orthogonal, so weights and activations are rotated alike and products stay what they were,
//! while outliers are spread over the group (Ashkboos et al., QuaRot, <https://arxiv.org/abs/2404.00456>).

use super::format::GROUP;

/// Signs of the diagonal, one bit a channel (set: negative), lowest channel first.
pub const SIGN_BITS: [u64; 2] = [splitmix(0x6361_6374_7573_0001), splitmix(0x6361_6374_7573_0002)];

/// One output of the SplitMix64 generator (Steele, Lea, Flood, OOPSLA 2014).
const fn splitmix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The diagonal as factors +1 and -1. Shorter groups use its beginning.
pub const SIGNS: [f32; GROUP] = {
    let mut signs = [1.0; GROUP];
    let mut i = 0;
    while i < GROUP {
        if SIGN_BITS[i / 64] >> (i % 64) & 1 == 1 {
            signs[i] = -1.0;
        }
        i += 1;
    }
    signs
};

/// Unnormalised Walsh-Hadamard transform in natural order; the length is a power of two.
pub fn hadamard(x: &mut [f32]) {
    debug_assert!(x.len().is_power_of_two());
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (a, b) = pair.split_at_mut(half);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

/// Rotates one group in place.
pub fn rotate(x: &mut [f32]) {
    for (x, s) in x.iter_mut().zip(SIGNS) {
        *x *= s;
    }
    hadamard(x);
    let norm = 1.0 / (x.len() as f32).sqrt();
    x.iter_mut().for_each(|x| *x *= norm);
}

/// Undoes [`rotate`].
pub fn unrotate(x: &mut [f32]) {
    unrotate_by(x, SIGNS);
}

/// Turns a group back and multiplies it with `factors`, which stand in place of the signs.
pub fn unrotate_by(x: &mut [f32], factors: impl IntoIterator<Item = f32>) {
    hadamard(x);
    let norm = 1.0 / (x.len() as f32).sqrt();
    for (x, factor) in x.iter_mut().zip(factors) {
        *x *= factor * norm;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_sylvester_matrix_and_orthogonal() {
        for n in [16usize, 64, 128] {
            for j in [0, 1, n / 2 + 3] {
                let mut x = vec![0.0f32; n];
                x[j] = 1.0;
                rotate(&mut x);
                for (i, v) in x.iter().enumerate() {
                    let sign = if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                    assert!((v - sign * SIGNS[j] / (n as f32).sqrt()).abs() < 1e-6);
                }
                unrotate(&mut x);
                assert!((x[j] - 1.0).abs() < 1e-6 && x.iter().map(|v| v.abs()).sum::<f32>() < 1.0 + 1e-4);
            }
        }
    }

    #[test]
    fn signs_are_mixed() {
        let negative = SIGNS.iter().filter(|s| **s < 0.0).count();
        assert!((44..=84).contains(&negative), "{negative}");
    }
}
