//! Storage formats of a weight matrix and the byte layout of the quantised ones.
//!
//! Layout of a CQ matrix with `b` bits a weight: rows in tiles of [`TILE_ROWS`] (the last one padded with
//! zero scales), columns in groups of [`GROUP`] (see [`CqLayout::group_width`] for the last one). For each
//! tile, for each group: the group's column blocks of [`BLOCK_COLS`] columns, `64 * b` bytes each, then one
//! bf16 scale per row of the tile. So a tile is one contiguous stream and every part starts 64-byte aligned.
//!
//! A trellis matrix is the same but for a header of [`HEADER`] bytes before the first tile, scales of one byte,
//! and the meaning of the bits inside a column block.
//!
//! A block matrix (`q4_0`, `q8_0`) is the same but for groups of [`BLOCK_GROUP`] columns, f16 scales, and no rotation.
//!
//! A book matrix (`bcq1` to `bcq4`) is the same but for a header before the first tile (see [`super::book`]), f16
//! scales, and a last group that is as wide as the others.
//!
//! Inside a column block, byte `r * 8 + k` (`r, k` in 0..8) of a 64-byte chunk belongs to rows `8t + r` and
//! column `k`; which `t` sit in which chunk, and at which bits, is told by [`super::pack`]. The same bytes
//! feed `vpdpbusd` (8 rows x 8 columns a register), NEON `sdot` (2 rows x 8) and `smmla` (2 rows x 8).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Input channels that share one rotation and one scale per row.
pub const GROUP: usize = 128;
/// The same where nothing is rotated: the blocks of GGUF files.
pub const BLOCK_GROUP: usize = 32;
/// Rows of a tile.
pub const TILE_ROWS: usize = 64;
/// Columns of a column block.
pub const BLOCK_COLS: usize = 8;
/// Alignment in bytes of every tensor in a bundle.
pub const ALIGN: usize = 64;
/// Bytes of the header of a trellis tensor: 64 int8 levels, then the base of the scales
/// ([`super::trellis::ScaleCode`], little endian), then zeros.
pub const HEADER: usize = 128;
/// Where the base of the scales stands in the header.
pub const SCALE_BASE: usize = 64;
/// Where the factors of the inputs stand in the header of a book tensor: f32, one a column as stored.
pub const FACTORS: usize = 64;
/// Smallest width of the last group; widths are powers of two.
const MIN_GROUP: usize = 16;

/// How the elements of a stored matrix or vector are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(non_camel_case_types)]
pub enum Format {
    F32,
    F16,
    BF16,
    /// One to four bits: rotation, per-group scale, Lloyd-Max codebook.
    Cq1,
    Cq2,
    Cq3,
    Cq4,
    /// One to four bits: rotation, per-group one-byte scale, trellis code with a table of its own.
    Tcq1,
    Tcq2,
    Tcq3,
    Tcq4,
    /// Eight bits: rotation, per-group scale, linear codes -127..=127.
    Cq8,
    /// Four and eight bits as GGUF files have them: no rotation, f16 scale for 32 columns, levels -8..=7 and
    /// -128..=127.
    Q4_0,
    Q8_0,
    /// One to four bits as official CQ files have them: codebook, unit and factors of the inputs of its own, f16
    /// scale for 128 rotated columns.
    Bcq1,
    Bcq2,
    Bcq3,
    Bcq4,
}

/// How the stored bits of a quantised weight become a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// Each weight's bits are the index of its level.
    Scalar,
    /// Weights share coded bits, see [`super::trellis`].
    Trellis,
    /// Each weight's bits are its level, an integer; nothing is rotated. See [`super::blocks`].
    Block,
    /// Each weight's bits are the index of its level in a codebook of the tensor's own. See [`super::book`].
    Book,
}

/// What happens to the columns of a group before they are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rotation {
    /// Nothing.
    None,
    /// The rotation of [`super::rotate`], the same for all tensors.
    Common,
    /// The same with factors of the tensor's own in place of the signs.
    Own,
}

impl Format {
    /// The quantised format with `bits` a weight, if there is one; 8 bits are scalar with either code.
    pub fn cq(bits: u32, code: Code) -> Option<Self> {
        Some(match (bits, code) {
            (1, Code::Scalar) => Format::Cq1,
            (2, Code::Scalar) => Format::Cq2,
            (3, Code::Scalar) => Format::Cq3,
            (4, Code::Scalar) => Format::Cq4,
            (1, Code::Trellis) => Format::Tcq1,
            (2, Code::Trellis) => Format::Tcq2,
            (3, Code::Trellis) => Format::Tcq3,
            (4, Code::Trellis) => Format::Tcq4,
            (8, Code::Scalar | Code::Trellis) => Format::Cq8,
            (1, Code::Book) => Format::Bcq1,
            (2, Code::Book) => Format::Bcq2,
            (3, Code::Book) => Format::Bcq3,
            (4, Code::Book) => Format::Bcq4,
            _ => return None,
        })
    }

    /// How codes become levels; scalar for what is not quantised.
    pub fn code(self) -> Code {
        match self {
            Format::Tcq1 | Format::Tcq2 | Format::Tcq3 | Format::Tcq4 => Code::Trellis,
            Format::Q4_0 | Format::Q8_0 => Code::Block,
            Format::Bcq1 | Format::Bcq2 | Format::Bcq3 | Format::Bcq4 => Code::Book,
            _ => Code::Scalar,
        }
    }

    /// Bits of one stored weight, scales not counted.
    pub fn bits(self) -> usize {
        match self {
            Format::F32 => 32,
            Format::F16 | Format::BF16 => 16,
            Format::Cq1 | Format::Tcq1 | Format::Bcq1 => 1,
            Format::Cq2 | Format::Tcq2 | Format::Bcq2 => 2,
            Format::Cq3 | Format::Tcq3 | Format::Bcq3 => 3,
            Format::Cq4 | Format::Tcq4 | Format::Bcq4 | Format::Q4_0 => 4,
            Format::Cq8 | Format::Q8_0 => 8,
        }
    }

    pub fn is_quantised(self) -> bool {
        self.bits() <= 8
    }

    /// Whether weights are rounded for it; what is only quantised is in a checkpoint already and kept.
    pub fn is_rounded(self) -> bool {
        self.is_quantised() && !matches!(self.code(), Code::Block | Code::Book)
    }

    /// Bytes of a `[rows, cols]` matrix, or `None` when that overflows.
    pub fn bytes(self, rows: usize, cols: usize) -> Option<usize> {
        if self.is_quantised() {
            CqLayout::new(self, rows, cols)?.bytes()
        } else {
            rows.checked_mul(cols)?.checked_mul(self.bits() / 8)
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::BF16 => "bf16",
            Format::Cq1 => "cq1",
            Format::Tcq1 => "tcq1",
            Format::Cq2 => "cq2",
            Format::Tcq2 => "tcq2",
            Format::Cq3 => "cq3",
            Format::Tcq3 => "tcq3",
            Format::Cq4 => "cq4",
            Format::Tcq4 => "tcq4",
            Format::Cq8 => "cq8",
            Format::Q4_0 => "q4_0",
            Format::Q8_0 => "q8_0",
            Format::Bcq1 => "bcq1",
            Format::Bcq2 => "bcq2",
            Format::Bcq3 => "bcq3",
            Format::Bcq4 => "bcq4",
        })
    }
}

/// Where everything lies in a quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqLayout {
    pub rows: usize,
    pub cols: usize,
    pub bits: usize,
    pub code: Code,
}

impl CqLayout {
    /// `None` for a format that is not quantised, an empty matrix, sizes that overflow, or a block format and a
    /// width that is not whole blocks.
    pub fn new(format: Format, rows: usize, cols: usize) -> Option<Self> {
        (format.is_quantised()
            && rows > 0
            && cols > 0
            && (format.code() != Code::Block || cols.is_multiple_of(BLOCK_GROUP))
            && rows.checked_add(TILE_ROWS)?.checked_mul(cols.checked_add(GROUP)?).is_some())
        .then_some(CqLayout { rows, cols, bits: format.bits(), code: format.code() })
    }

    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    pub fn rotation(&self) -> Rotation {
        match self.code {
            Code::Block => Rotation::None,
            Code::Book => Rotation::Own,
            Code::Scalar | Code::Trellis => Rotation::Common,
        }
    }

    /// Columns of every group but the last.
    pub fn group(&self) -> usize {
        if self.code == Code::Block { BLOCK_GROUP } else { GROUP }
    }

    pub fn groups(&self) -> usize {
        self.cols.div_ceil(self.group())
    }

    /// Columns of group `group` as stored: those of [`group`](Self::group), and for a shorter last group the next power of two (at
    /// least 16), the missing columns being zero before the rotation. Groups of a book matrix are all of one width.
    pub fn group_width(&self, group: usize) -> usize {
        let left = self.cols - group * self.group();
        if left >= self.group() || self.code == Code::Book { self.group() } else { left.next_power_of_two().max(MIN_GROUP) }
    }

    /// Columns as stored, the padding of the last group included.
    pub fn padded_cols(&self) -> usize {
        (self.groups() - 1) * self.group() + self.group_width(self.groups() - 1)
    }

    /// Bytes of one column block.
    pub fn block_bytes(&self) -> usize {
        TILE_ROWS * BLOCK_COLS / 8 * self.bits
    }

    /// Bytes before the first tile: the levels and the scale base of a trellis tensor, the [`Book`](super::book::Book)
    /// of a book tensor.
    pub fn header_bytes(&self) -> usize {
        match self.code {
            Code::Trellis => HEADER,
            Code::Book => FACTORS + 4 * self.padded_cols(),
            Code::Scalar | Code::Block => 0,
        }
    }

    /// Bytes of the scale of one row and group.
    pub fn scale_bytes(&self) -> usize {
        if self.code == Code::Trellis { 1 } else { 2 }
    }

    /// Byte offset of `group` inside a tile.
    pub fn group_offset(&self, group: usize) -> usize {
        group * (self.group() / BLOCK_COLS * self.block_bytes() + TILE_ROWS * self.scale_bytes())
    }

    /// Byte offset, inside a tile, of the 64 scales of `group`.
    pub fn scale_offset(&self, group: usize) -> usize {
        self.group_offset(group) + self.group_width(group) / BLOCK_COLS * self.block_bytes()
    }

    pub fn tile_bytes(&self) -> usize {
        let last = self.groups() - 1;
        self.scale_offset(last) + TILE_ROWS * self.scale_bytes()
    }

    /// Where tile `tile` lies in the tensor.
    pub fn tile(&self, tile: usize) -> Range<usize> {
        let start = self.header_bytes() + tile * self.tile_bytes();
        start..start + self.tile_bytes()
    }

    pub fn bytes(&self) -> Option<usize> {
        self.tiles().checked_mul(self.tile_bytes())?.checked_add(self.header_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_by_hand() {
        // 64 x 128 at 4 bits: 16 blocks of 256 bytes and 128 bytes of scales.
        assert_eq!(Format::Cq4.bytes(64, 128), Some(16 * 256 + 128));
        // The same with a trellis: half the scales, and a header.
        assert_eq!(Format::Tcq4.bytes(64, 128), Some(128 + 16 * 256 + 64));
        // Four blocks of 32 columns: the codes of four bits, and four scales of two bytes a row.
        assert_eq!(Format::Q4_0.bytes(64, 128), Some(4 * (4 * 256 + 128)));
        assert_eq!(Format::Q8_0.bytes(1, 32), Some(4 * 512 + 128));
        assert_eq!(Format::Q4_0.bytes(64, 104), None);
        // Levels and unit, 256 factors, and two groups, though the second has columns for half of it only.
        assert_eq!(Format::Bcq3.bytes(64, 192), Some(64 + 4 * 256 + 2 * (16 * 192 + 128)));
        // A second, half group (576 = 4 * 128 + 64) costs exactly half the codes.
        let l = CqLayout::new(Format::Cq3, 65, 576).unwrap();
        assert_eq!((l.groups(), l.group_width(4), l.padded_cols(), l.tiles()), (5, 64, 576, 2));
        assert_eq!(l.tile_bytes(), 72 * 192 + 5 * 128);
        // Any width: 104 is padded to 128, 1 to 16, 4304 to 33 * 128 + 128.
        assert_eq!(CqLayout::new(Format::Cq1, 1, 104).unwrap().padded_cols(), 128);
        assert_eq!(CqLayout::new(Format::Cq1, 1, 1).unwrap().padded_cols(), 16);
        assert_eq!(CqLayout::new(Format::Cq1, 1, 4304).unwrap().padded_cols(), 34 * 128);
        assert_eq!(Format::Cq4.bytes(usize::MAX, 2), None);
        assert_eq!(Format::F32.bytes(usize::MAX, 2), None);
        assert_eq!(Format::Cq2.bytes(0, 2), None);
    }
}
