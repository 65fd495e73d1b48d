//! Grids that a checkpoint has already: blocks of 32 columns with equal steps and an f16 scale, as the GGUF types
//! Q4_0 and Q8_0 have them. They are stored as they are. Rounding them again would add an error, and a rotation would
//! take the weights off the grid on which they lie exactly.

use super::format::{BLOCK_GROUP, Code, CqLayout, TILE_ROWS};
use super::pack::pack_groups;

/// What is added to a level of four bits, so that stored codes are 0 to 15.
pub const OFFSET: i8 = 8;
/// Levels of the stored codes of four bits.
pub const LEVELS: [i8; 16] = [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7];

/// One row of one group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    pub scale: half::f16,
    /// -8 to 7 at four bits.
    pub levels: [i8; BLOCK_GROUP],
}

impl Block {
    /// Sum of the squares of the values.
    pub fn square(&self) -> f64 {
        let value = |level: &i8| f64::from(f32::from(*level) * self.scale.to_f32());
        self.levels.iter().map(|level| value(level) * value(level)).sum()
    }
}

/// Writes up to 64 rows of [`CqLayout::groups`] blocks each as a tile (`layout.tile_bytes()`); rows that are missing
/// get scale zero.
pub fn pack_tile(layout: &CqLayout, blocks: &[Block], out: &mut [u8]) {
    let groups = layout.groups();
    assert!(layout.code == Code::Block && blocks.len().is_multiple_of(groups) && blocks.len() <= TILE_ROWS * groups);
    let offset = if layout.bits == 8 { 0 } else { OFFSET };
    let block = |row: usize, group: usize| &blocks[row * groups + group];
    let code = |row: usize, group: usize, k: usize| (block(row, group).levels[k] + offset) as u8;
    pack_groups(layout, blocks.len() / groups, code, |row, group| block(row, group).scale, out);
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::decode::decode_row;
    use super::*;

    /// Every level and any scale decode to their product, bit by bit, in rows and columns that are theirs.
    #[test]
    fn values_come_back_bit_for_bit() {
        for (format, count) in [(Format::Q4_0, 16), (Format::Q8_0, 256)] {
            for (rows, cols) in [(1, 32), (70, 576)] {
                let layout = CqLayout::new(format, rows, cols).unwrap();
                let groups = layout.groups();
                let level = |row: usize, col: usize| ((row * 31 + col * 7) % count) as i32 - count as i32 / 2;
                // Negative, subnormal and zero scales among them.
                let scale = |row: usize, group: usize| {
                    half::f16::from_bits(((row * 977 + group * 8191) % 0x7c00) as u16 | (row as u16 & 1) << 15)
                };
                let block = |(row, group): (usize, usize)| Block {
                    scale: scale(row, group),
                    levels: std::array::from_fn(|k| level(row, 32 * group + k) as i8),
                };
                let blocks: Vec<Block> = (0..rows).flat_map(|r| (0..groups).map(move |g| (r, g))).map(block).collect();
                let mut data = vec![0xaa; layout.bytes().unwrap()];
                for (blocks, out) in blocks.chunks(64 * groups).zip(data.chunks_exact_mut(layout.tile_bytes())) {
                    pack_tile(&layout, blocks, out);
                }
                let mut out = vec![0.0; cols];
                for row in 0..rows {
                    decode_row(&layout, &data, row, &mut out);
                    for (col, value) in out.iter().enumerate() {
                        let truth = scale(row, col / 32).to_f32() * level(row, col) as f32;
                        assert_eq!(value.to_bits(), truth.to_bits(), "{format} row {row}, column {col}");
                    }
                }
            }
        }
    }
}
