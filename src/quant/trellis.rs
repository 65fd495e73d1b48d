//! The trellis code: weights share a memory of coded bits, which buys about a third to half of a bit.
//!
//! Every weight has one *coded* bit `c` and `bits - 1` *free* bits `u`. The coded bits of a sequence of
//! [`STEPS`] weights form a circle (tail-biting); the window of a weight is its own coded bit and the
//! [`MEMORY`] before it, `w = sum_j c[(s - j) mod 128] 2^j`. Parities of the window under fixed masks and the
//! free bits choose one of the tensor's int8 levels:
//!
//! `index = sum_i parity(MASK_i & w) 2^i + sum_j u_j 2^(3 + j)`
//!
//! with three parities; at 1 bit there are no free bits and a fourth parity takes their place. Choosing
//! another coded bit moves nine weights between subsets of levels, so a search over whole sequences (Viterbi)
//! finds a closer fit than rounding weight by weight. Trellis coded quantisation: Marcellin and Fischer, IEEE
//! Trans. Communications 38(1), 1990; tail-biting and computed levels as in QTIP, <https://arxiv.org/abs/2406.11235>.
//! The first two masks are Ungerboeck's 256-state code (IEEE Trans. IT 28(1), 1982) in feed-forward form.
//!
//! A sequence is one 16-byte lane of a column block's planes: step `s` is bit `s % 8` of byte `s / 8`, so the
//! circle runs through the lane's bits in memory order, and instruction sets need nothing but shifts by a few
//! bits and a swap of lane halves. See [`super::format`] for which weight that is.

/// Weights of a sequence.
pub const STEPS: usize = 128;
/// Earlier coded bits in a window.
pub const MEMORY: usize = 8;
/// States of the search: the last [`MEMORY`] coded bits.
pub const STATES: usize = 1 << MEMORY;
/// Sequences of a column block.
pub const SEQUENCES: usize = 4;
/// Entries of a stored table of levels; shorter ones are repeated.
pub const TABLE: usize = 64;

/// Masks of the parities, lowest index bit first; the last is for 1 bit only.
const MASKS: [[u16; 4]; 2] = [[0x0f2, 0x14d, 0x078, 0], [0x0f2, 0x14d, 0x170, 0x085]];

/// The parity masks for `bits` a weight.
pub const fn masks(bits: usize) -> &'static [u16; 4] {
    &MASKS[if bits == 1 { 1 } else { 0 }]
}

/// Parities in an index.
pub const fn parities(bits: usize) -> usize {
    if bits == 1 { 4 } else { 3 }
}

/// Levels of a table: `2^(parities + free bits)`.
pub const fn levels(bits: usize) -> usize {
    1 << (parities(bits) + bits - 1)
}

/// Index bits that the window alone decides.
pub fn window_index(bits: usize, window: u16) -> u8 {
    masks(bits).iter().enumerate().fold(0, |index, (i, mask)| index | (((mask & window).count_ones() & 1) as u8) << i)
}

/// Levels trained on a Gaussian source (alternating search and averages), and how many integer steps the
/// source's standard deviation is.
#[derive(Debug)]
pub struct Book {
    pub levels: [i8; TABLE],
    pub unit: f32,
}

/// The start book for `bits` a weight; distortions of a unit Gaussian: 0.276, 0.0735, 0.0193, 0.00505.
pub fn book(bits: usize) -> &'static Book {
    &BOOKS[bits - 1]
}

const BOOKS: [Book; 4] = [
    repeat([-63, -13, 13, 35, -39, -9, 10, 31, -33, -10, 9, 37, -33, -14, 13, 63], 36.0528),
    repeat([-63, -33, -19, -7, -42, -24, -13, -2, 2, 14, 24, 42, 7, 19, 33, 63], 29.5309),
    repeat(
        [
            -63, -39, -29, -22, -48, -33, -25, -19, -17, -12, -8, -3, -14, -9, -5, -1, 0, 5, 9, 14, 3, 8, 12, 17, 19, 25, 33, 48,
            22, 29, 39, 63,
        ],
        23.0375,
    ),
    repeat(
        [
            -62, -45, -36, -31, -52, -40, -33, -28, -27, -23, -21, -18, -25, -21, -19, -16, -16, -13, -12, -9, -14, -11, -9, -7,
            -8, -6, -4, -2, -5, -3, -2, 0, 0, 2, 3, 5, 2, 4, 6, 8, 7, 9, 11, 14, 10, 12, 14, 16, 16, 19, 21, 25, 18, 21, 23, 26,
            28, 33, 40, 52, 31, 36, 45, 63,
        ],
        18.7922,
    ),
];

const fn repeat<const N: usize>(levels: [i8; N], unit: f32) -> Book {
    let mut table = [0; TABLE];
    let mut i = 0;
    while i < TABLE {
        table[i] = levels[i % N];
        i += 1;
    }
    Book { levels: table, unit }
}

/// Scales of a trellis tensor are one byte each: `0` is zero, `q` the f32 whose bits are `base + (q << 19)`,
/// so sixteen steps an octave over sixteen octaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleCode {
    pub base: u32,
}

/// Bits of an f32 below the four mantissa bits that a code keeps.
const SCALE_SHIFT: u32 = 19;

impl ScaleCode {
    /// The code in which `largest` (not negative) is the top value or just below.
    pub fn for_largest(largest: f32) -> Self {
        // The smallest value, sixteen octaves below, must stay a normal number.
        let largest = largest.clamp(1e-30, 1e30);
        let top = (largest.to_bits() >> SCALE_SHIFT) + u32::from(largest.to_bits() & ((1 << SCALE_SHIFT) - 1) != 0);
        ScaleCode { base: (top - 255) << SCALE_SHIFT }
    }

    pub fn value(self, code: u8) -> f32 {
        if code == 0 { 0.0 } else { f32::from_bits(self.base.wrapping_add(u32::from(code) << SCALE_SHIFT)) }
    }

    /// The nearest code; 0 only for what is nearer to zero than to the smallest value.
    pub fn code(self, scale: f32) -> u8 {
        if scale < self.value(1) / 2.0 || scale.is_nan() {
            return 0;
        }
        // Midpoints between neighbours are midpoints of their bit patterns, also across octaves.
        let steps = (scale.to_bits().saturating_sub(self.base) + (1 << (SCALE_SHIFT - 1))) >> SCALE_SHIFT;
        steps.clamp(1, 255) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_codes_are_within_half_a_step() {
        let code = ScaleCode::for_largest(0.37);
        assert!(code.value(255) >= 0.37 && code.value(254) < 0.37);
        assert_eq!((code.code(0.0), code.value(0)), (0, 0.0));
        let mut scale = 0.37;
        while scale > code.value(1) {
            let near = code.value(code.code(scale));
            assert!((near / scale - 1.0).abs() < 1.0 / 31.9, "{scale} {near}");
            scale *= 0.97;
        }
        assert_eq!(code.code(code.value(1) * 0.6), 1);
        assert_eq!(code.code(1.0), 255);
        // Any size of weights has a code.
        for largest in [0.0, 1e-38, 1e38, f32::MAX] {
            let code = ScaleCode::for_largest(largest);
            assert!(code.value(255).is_finite() && code.value(1) > 0.0);
        }
    }

    #[test]
    fn indices_by_hand() {
        // Window 1: only masks with bit 0 (0x14d) see it. 0x14d & 0x145 = 0x145: four bits, even.
        assert_eq!(window_index(2, 1), 0b010);
        assert_eq!(window_index(2, 0x145), window_index(2, 0x144) ^ 0b010);
        assert_eq!(window_index(1, 0x100), 0b0110);
        assert_eq!([1, 2, 3, 4].map(levels), [16, 16, 32, 64]);
    }
}
