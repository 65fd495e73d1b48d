//! The GGUF block formats: a fixed number of weights packed with their scales into a fixed number of bytes.
//! Layouts follow the ggml reference (<https://github.com/ggml-org/ggml>, `ggml-common.h`); the order of
//! multiplications follows the dequantiser of the `gguf` Python package, so results are equal bit for bit.

use crate::quant::Format;
use crate::quant::blocks::{Block, OFFSET};

/// A block format that can be read. The names are those that GGUF tools print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
}

use BlockType::*;

/// The sixteen levels of the non-linear 4-bit formats (IQ4_NL and IQ4_XS).
const NONLINEAR_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

impl BlockType {
    pub const ALL: [BlockType; 12] = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS];

    /// The format with this GGUF tensor type number, if it is one of ours.
    pub fn from_gguf(type_id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|b| b.gguf_id() == type_id)
    }

    fn gguf_id(self) -> u32 {
        match self {
            Q4_0 => 2,
            Q4_1 => 3,
            Q5_0 => 6,
            Q5_1 => 7,
            Q8_0 => 8,
            Q2_K => 10,
            Q3_K => 11,
            Q4_K => 12,
            Q5_K => 13,
            Q6_K => 14,
            IQ4_NL => 20,
            IQ4_XS => 23,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Q4_0 => "Q4_0",
            Q4_1 => "Q4_1",
            Q5_0 => "Q5_0",
            Q5_1 => "Q5_1",
            Q8_0 => "Q8_0",
            Q2_K => "Q2_K",
            Q3_K => "Q3_K",
            Q4_K => "Q4_K",
            Q5_K => "Q5_K",
            Q6_K => "Q6_K",
            IQ4_NL => "IQ4_NL",
            IQ4_XS => "IQ4_XS",
        }
    }

    /// Weights in a block.
    pub fn elements(self) -> usize {
        match self {
            Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | IQ4_NL => 32,
            Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS => 256,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Q4_0 | IQ4_NL => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q8_0 => 34,
            Q2_K => 84,
            Q3_K => 110,
            Q4_K => 144,
            Q5_K => 176,
            Q6_K => 210,
            IQ4_XS => 136,
        }
    }

    /// The storage format that holds blocks of this one as they are, if there is one.
    pub fn grid(self) -> Option<Format> {
        match self {
            Q4_0 => Some(Format::Q4_0),
            Q8_0 => Some(Format::Q8_0),
            _ => None,
        }
    }

    /// A block of a format that has a [`grid`](Self::grid).
    pub fn block(self, bytes: &[u8]) -> Block {
        let level = |i: usize| if self == Q8_0 { bytes[2 + i] as i8 } else { nibble(&bytes[2..18], i) as i8 - OFFSET };
        Block { scale: half::f16::from_le_bytes([bytes[0], bytes[1]]), levels: std::array::from_fn(level) }
    }

    /// Decodes whole blocks; `bytes` and `out` hold the same number of them.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        assert!(bytes.len().is_multiple_of(self.bytes()) && out.len().is_multiple_of(self.elements()));
        assert!(bytes.len() / self.bytes() == out.len() / self.elements());
        let decode = match self {
            Q4_0 => q4_0,
            Q4_1 => q4_1,
            Q5_0 => q5_0,
            Q5_1 => q5_1,
            Q8_0 => q8_0,
            Q2_K => q2_k,
            Q3_K => q3_k,
            Q4_K => q4_k,
            Q5_K => q5_k,
            Q6_K => q6_k,
            IQ4_NL => iq4_nl,
            IQ4_XS => iq4_xs,
        };
        for (block, out) in bytes.chunks_exact(self.bytes()).zip(out.chunks_exact_mut(self.elements())) {
            decode(block, out);
        }
    }
}

/// The half-precision number at byte `at`.
fn half(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Nibble `i` of `packed`, where the low nibbles hold the first half and the high ones the second.
fn nibble(packed: &[u8], i: usize) -> u8 {
    let n = packed.len();
    if i < n { packed[i] & 15 } else { packed[i - n] >> 4 }
}

/// Weights are `d * (q - 8)`. Block: d f16, 16 bytes of nibbles.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * (nibble(&block[2..18], i) as i32 - 8) as f32;
    }
}

/// Weights are `d * q + m`. Block: d f16, m f16, 16 bytes of nibbles.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * nibble(&block[4..20], i) as f32 + m;
    }
}

/// Five-bit value `i`: a nibble, and bit `i` of the four bytes `high`.
fn five_bits(high: &[u8], packed: &[u8], i: usize) -> u8 {
    nibble(packed, i) | (high[i / 8] >> (i % 8) & 1) << 4
}

/// Weights are `d * (q - 16)`. Block: d f16, 4 bytes of high bits, 16 bytes of nibbles.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * (five_bits(&block[2..6], &block[6..22], i) as i32 - 16) as f32;
    }
}

/// Weights are `d * q + m`. Block: d f16, m f16, 4 bytes of high bits, 16 bytes of nibbles.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * five_bits(&block[4..8], &block[8..24], i) as f32 + m;
    }
}

/// Weights are `d * q`. Block: d f16, 32 signed bytes.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (o, &q) in out.iter_mut().zip(&block[2..34]) {
        *o = d * (q as i8) as f32;
    }
}

/// Two-bit value `i` of 256: each run of 32 bytes holds four planes of 32 values.
fn two_bits(packed: &[u8], i: usize) -> u8 {
    packed[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

/// Weights are `d * scale * q - dmin * min` per 16. Block: 16 bytes (scale low nibble, min high nibble),
/// 64 bytes of two-bit values, d f16, dmin f16.
fn q2_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(block, 80), half(block, 82));
    for (i, o) in out.iter_mut().enumerate() {
        let s = block[i / 16];
        *o = (d * (s & 15) as f32) * two_bits(&block[16..80], i) as f32 - dmin * (s >> 4) as f32;
    }
}

/// Weights are `d * (scale - 32) * (q - 4 + 4 * high)` per 16. Block: 32 bytes of high bits (bit plane k is
/// for values 32k..32k+32), 64 bytes of two-bit values, 12 bytes of sixteen six-bit scales, d f16.
fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, low, scales) = (&block[0..32], &block[32..96], &block[96..108]);
    let d = half(block, 108);
    for (i, o) in out.iter_mut().enumerate() {
        let g = i / 16;
        let scale = nibble(&scales[0..8], g) | (scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4;
        let lift = if high[i % 32] >> (i / 32) & 1 == 1 { 0 } else { 4 };
        *o = (d * (scale as i32 - 32) as f32) * (two_bits(low, i) as i32 - lift) as f32;
    }
}

/// Six-bit scale and min of group `g` (of 8) from the 12 packed bytes of Q4_K and Q5_K.
fn scale_and_min(packed: &[u8], g: usize) -> (u8, u8) {
    if g < 4 {
        (packed[g] & 63, packed[4 + g] & 63)
    } else {
        let low = packed[4 + g];
        (low & 15 | packed[g - 4] >> 2 & 48, low >> 4 | packed[g] >> 2 & 48)
    }
}

/// Weights are `d * scale * q - dmin * min` per 32. Block: d f16, dmin f16, 12 bytes of scales and mins,
/// 128 bytes of nibbles (each run of 32 bytes: 32 low nibbles, then 32 high ones).
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], g);
        let (dl, ml) = (d * scale as f32, dmin * min as f32);
        let run = &block[16 + g / 2 * 32..][..32];
        for (o, &q) in out.iter_mut().zip(run) {
            *o = dl * (q >> (g % 2 * 4) & 15) as f32 - ml;
        }
    }
}

/// As Q4_K with a fifth bit. Block: d f16, dmin f16, 12 bytes of scales and mins, 32 bytes of high bits
/// (bit plane g is for group g), 128 bytes of nibbles.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], g);
        let (dl, ml) = (d * scale as f32, dmin * min as f32);
        let run = &block[48 + g / 2 * 32..][..32];
        for ((o, &q), &high) in out.iter_mut().zip(run).zip(&block[16..48]) {
            *o = dl * (q >> (g % 2 * 4) & 15 | (high >> g & 1) << 4) as f32 - ml;
        }
    }
}

/// Weights are `d * scale * (q - 32)` per 16. Block: 128 bytes of low nibbles (each run of 64 bytes: 64 low
/// nibbles, then 64 high ones), 64 bytes of two high bits, 16 signed scales, d f16.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[0..128], &block[128..192], &block[192..208]);
    let d = half(block, 208);
    for (i, o) in out.iter_mut().enumerate() {
        let q = nibble(&low[i / 128 * 64..][..64], i % 128) | two_bits(high, i) << 4;
        *o = (d * (scales[i / 16] as i8) as f32) * (q as i32 - 32) as f32;
    }
}

/// Weights are `d * level[q]`. Block: d f16, 16 bytes of nibbles.
fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * NONLINEAR_LEVELS[nibble(&block[2..18], i) as usize] as f32;
    }
}

/// Weights are `d * (scale - 32) * level[q]` per 32. Block: d f16, 16 bits with the two high bits of eight
/// scales, 4 bytes with their low nibbles, 128 bytes of nibbles (runs of 16 bytes).
fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let scale = block[4 + g / 2] >> (g % 2 * 4) & 15 | ((high >> (2 * g) & 3) as u8) << 4;
        let dl = d * (scale as i32 - 32) as f32;
        let run = &block[8 + g * 16..][..16];
        for (i, o) in out.iter_mut().enumerate() {
            *o = dl * NONLINEAR_LEVELS[nibble(run, i) as usize] as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by `make_blocks.py`: for each format a type number (u32), a block count (u32), the blocks, and
    /// the f32 that the `gguf` Python package decodes them to.
    const FIXTURE: &[u8] = include_bytes!("../../../tests/fixtures/gguf/blocks.bin");

    #[test]
    fn every_format_decodes_as_the_python_package_does() {
        let mut rest = FIXTURE;
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at(n);
            rest = tail;
            head
        };
        for format in BlockType::ALL {
            let id = u32::from_le_bytes(take(4).try_into().unwrap());
            let count = u32::from_le_bytes(take(4).try_into().unwrap()) as usize;
            assert_eq!(BlockType::from_gguf(id), Some(format));
            let mut out = vec![0f32; count * format.elements()];
            format.dequantize(take(count * format.bytes()), &mut out);
            for (i, (got, want)) in out.iter().zip(take(out.len() * 4).chunks_exact(4)).enumerate() {
                let want = f32::from_le_bytes(want.try_into().unwrap());
                assert_eq!(got.to_bits(), want.to_bits(), "{} element {i}: {got} is not {want}", format.name());
            }
        }
        assert!(take(0).is_empty());
        assert!(rest.is_empty());
    }

    /// Scale times level is what decoding gives, bit for bit.
    #[test]
    fn grids_hold_all_that_blocks_hold() {
        let mut kept = Vec::new();
        for format in BlockType::ALL.into_iter().filter(|b| b.grid().is_some()) {
            kept.push(format.name());
            let bytes: Vec<u8> = (0..format.bytes()).map(|i| if i == 1 { 0xb4 } else { (i * 151 + 128) as u8 }).collect();
            let mut out = vec![0f32; format.elements()];
            format.dequantize(&bytes, &mut out);
            let block = format.block(&bytes);
            let values = block.levels.map(|level| f32::from(level) * block.scale.to_f32());
            assert_eq!(out.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), values.map(f32::to_bits), "{}", format.name());
        }
        assert_eq!(kept, ["Q4_0", "Q8_0"]);
    }

    #[test]
    fn other_type_numbers_are_not_ours() {
        for id in [0, 1, 4, 9, 16, 30, 39, u32::MAX] {
            assert_eq!(BlockType::from_gguf(id), None);
        }
    }
}
