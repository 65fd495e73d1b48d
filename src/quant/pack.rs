//! Bits of one column block: 64 rows by 8 columns of codes in `64 * bits` bytes.
//!
//! | bits | chunk of row block `t` (rows `8t..8t+8`) | position in the byte |
//! |---|---|---|
//! | 8 | `t` | the whole byte, two's complement |
//! | 4 | `t / 2` | bits `4 (t % 2)` and up |
//! | 3 | low two bits as for 2; the third bit in chunk 2, bit `t` | |
//! | 2 | `t / 4` | bits `2 (t % 4)` and up |
//! | 1 | 0 | bit `t` |
//!
//! Trellis codes (see [`super::trellis`]) have the coded bit of row block `t` in chunk 0, bit `t`; the first
//! free bit in chunk 1, bit `t`; at 3 bits the second in chunk 2, bit `t`; at 4 bits the second and third at
//! bits `2 (t / 2)` and up of chunk `2 + t % 2`.
//!
//! In every 64-byte chunk, byte `r * 8 + k` is row `r` of its row block and column `k`.

use super::format::{BLOCK_COLS, Code, CqLayout, TILE_ROWS};
use super::trellis::{MEMORY, STEPS, parities, window_index};

/// Codes of a block, `codes[row][column]`.
pub type Codes = [[u8; BLOCK_COLS]; TILE_ROWS];

/// Writes `codes` (each below `2^bits`) into `out`, which holds `64 * bits` bytes.
pub fn pack(codes: &Codes, bits: usize, out: &mut [u8]) {
    assert_eq!(out.len(), 64 * bits);
    out.fill(0);
    for (row, codes) in codes.iter().enumerate() {
        let (t, r) = (row / 8, row % 8);
        for (k, &code) in codes.iter().enumerate() {
            let at = r * 8 + k;
            match bits {
                8 => out[t * 64 + at] = code,
                4 => out[t / 2 * 64 + at] |= code << (4 * (t % 2)),
                3 => {
                    out[t / 4 * 64 + at] |= (code & 3) << (2 * (t % 4));
                    out[128 + at] |= (code >> 2) << t;
                }
                2 => out[t / 4 * 64 + at] |= code << (2 * (t % 4)),
                1 => out[at] |= code << t,
                _ => unreachable!("no format has {bits} bits"),
            }
        }
    }
}

/// Writes the first `rows` rows of a tile (`layout.tile_bytes()`) with f16 scales: `code` gives the code of a row, a
/// group and a column in it, `scale` the scale of a row and a group. Rows that are missing get code and scale zero.
pub fn pack_groups(
    layout: &CqLayout,
    rows: usize,
    code: impl Fn(usize, usize, usize) -> u8,
    scale: impl Fn(usize, usize) -> half::f16,
    out: &mut [u8],
) {
    assert!(rows <= TILE_ROWS && out.len() == layout.tile_bytes());
    for group in 0..layout.groups() {
        let blocks = layout.group_width(group) / BLOCK_COLS;
        let at = layout.group_offset(group);
        for (block, out) in out[at..].chunks_exact_mut(layout.block_bytes()).take(blocks).enumerate() {
            let mut codes: Codes = [[0; BLOCK_COLS]; TILE_ROWS];
            for (row, codes) in codes[..rows].iter_mut().enumerate() {
                codes.iter_mut().enumerate().for_each(|(k, c)| *c = code(row, group, block * BLOCK_COLS + k));
            }
            pack(&codes, layout.bits, out);
        }
        let scales = &mut out[layout.scale_offset(group)..][..2 * TILE_ROWS];
        for (row, out) in scales.chunks_exact_mut(2).enumerate() {
            let scale = if row < rows { scale(row, group) } else { half::f16::ZERO };
            out.copy_from_slice(&scale.to_le_bytes());
        }
    }
}

/// Writes the trellis codes of a block: the coded bit lowest, then the free bits.
pub fn pack_trellis(codes: &Codes, bits: usize, out: &mut [u8]) {
    assert_eq!(out.len(), 64 * bits);
    out.fill(0);
    for (row, codes) in codes.iter().enumerate() {
        let (t, r) = (row / 8, row % 8);
        for (k, &code) in codes.iter().enumerate() {
            let at = r * 8 + k;
            out[at] |= (code & 1) << t;
            if bits > 1 {
                out[64 + at] |= (code >> 1 & 1) << t;
            }
            match bits {
                3 => out[128 + at] |= (code >> 2 & 1) << t,
                4 => out[128 + 64 * (t % 2) + at] |= (code >> 2 & 3) << (t / 2 * 2),
                _ => {}
            }
        }
    }
}

/// The indices of one row of a block in the table of levels.
pub fn row_indices(layout: &CqLayout, block: &[u8], row: usize) -> [u8; BLOCK_COLS] {
    match layout.code {
        Code::Scalar | Code::Block | Code::Book => unpack_row(block, layout.bits, row),
        Code::Trellis => trellis_row(block, layout.bits, row),
    }
}

fn trellis_row(block: &[u8], bits: usize, row: usize) -> [u8; BLOCK_COLS] {
    let (t, r) = (row / 8, row % 8);
    std::array::from_fn(|k| {
        let at = r * 8 + k;
        let lane = &block[at / 16 * 16..][..STEPS / 8];
        let step = at % 16 * 8 + t;
        let window = (0..=MEMORY).fold(0u16, |w, j| {
            let s = (step + STEPS - j) % STEPS;
            w | u16::from(lane[s / 8] >> (s % 8) & 1) << j
        });
        let free = match bits {
            1 => 0,
            2 => block[64 + at] >> t & 1,
            3 => (block[64 + at] >> t & 1) | (block[128 + at] >> t & 1) << 1,
            _ => (block[64 + at] >> t & 1) | (block[128 + 64 * (t % 2) + at] >> (t / 2 * 2) & 3) << 1,
        };
        window_index(bits, window) | free << parities(bits)
    })
}

/// The codes of one row of a block, the inverse of [`pack`].
pub fn unpack_row(block: &[u8], bits: usize, row: usize) -> [u8; BLOCK_COLS] {
    let (t, r) = (row / 8, row % 8);
    std::array::from_fn(|k| {
        let at = r * 8 + k;
        match bits {
            8 => block[t * 64 + at],
            4 => block[t / 2 * 64 + at] >> (4 * (t % 2)) & 15,
            3 => (block[t / 4 * 64 + at] >> (2 * (t % 4)) & 3) | (block[128 + at] >> t & 1) << 2,
            2 => block[t / 4 * 64 + at] >> (2 * (t % 4)) & 3,
            1 => block[at] >> t & 1,
            _ => unreachable!("no format has {bits} bits"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_comes_back() {
        for bits in [1, 2, 3, 4, 8] {
            let mask = ((1u16 << bits) - 1) as u8;
            let codes: Codes =
                std::array::from_fn(|r| std::array::from_fn(|k| (r as u8).wrapping_mul(37).wrapping_add(k as u8 * 11) & mask));
            let mut block = vec![0xaa; 64 * bits];
            pack(&codes, bits, &mut block);
            for (row, codes) in codes.iter().enumerate() {
                assert_eq!(unpack_row(&block, bits, row), *codes, "{bits} bits, row {row}");
            }
        }
    }

    #[test]
    fn documented_places() {
        let mut codes: Codes = [[0; 8]; 64];
        codes[8 * 5 + 2][3] = 0b101; // row block 5, row 2, column 3
        let mut block = vec![0; 192];
        pack(&codes, 3, &mut block);
        assert_eq!(block[64 + 2 * 8 + 3], 0b01 << 2);
        assert_eq!(block[128 + 2 * 8 + 3], 1 << 5);
    }
}
