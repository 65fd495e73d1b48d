//! Rows of a checkpoint to the bytes of a bundle tensor, many rows at a time.

use super::families::TensorPlan;
use super::import::Checkpoint;
use super::import::official::Kept;
use super::moments::Factors;
use super::source::{plain, read_blocks, read_codes, read_rows, stored};
use crate::error::Result;
use crate::kernels::matmul_float::{FloatMatrix, MatMulFloat};
use crate::kernels::trellis_search::{Job, TrellisSearch};
use crate::kernels::{Level, Pool};
use crate::quant::blocks::{Block, pack_tile};
use crate::quant::book;
use crate::quant::decode::decode_row;
use crate::quant::encode::{SquareError, encode_tile, rotated_rows};
use crate::quant::encode_trellis::{BAND_ROWS, Header, Tools, encode_band, largest_rms};
use crate::quant::format::TILE_ROWS;
use crate::quant::{Code, CqLayout, Format};
use rayon::prelude::*;
use std::ops::Range;

/// What a matrix is rounded towards.
#[derive(Clone, Copy)]
pub struct Aim<'a> {
    pub factors: &'a Factors,
    /// How far weights make up for changed inputs; `None`: they do not.
    pub share: Option<f32>,
}

/// Encodes one tensor.
pub struct Encoder<'a> {
    checkpoint: &'a Checkpoint,
    tensor: &'a TensorPlan,
    format: Format,
    aim: Option<Aim<'a>>,
    header: Option<Header>,
    /// Header of a matrix whose codes are kept.
    book: Vec<u8>,
    kernel: MatMulFloat,
    search: TrellisSearch,
    /// Rows are encoded in parallel; inside, products run on one thread.
    alone: Pool,
}

impl<'a> Encoder<'a> {
    pub fn new(checkpoint: &'a Checkpoint, tensor: &'a TensorPlan, format: Format, aim: Option<Aim<'a>>) -> Result<Self> {
        let level = Level::best(None);
        let mut encoder = Encoder {
            checkpoint,
            tensor,
            format,
            aim,
            header: None,
            book: Vec::new(),
            kernel: MatMulFloat::select(level),
            search: TrellisSearch::select(level),
            alone: Pool::new(1),
        };
        if let Some(layout) = encoder.layout().filter(|l| l.code == Code::Trellis) {
            let largest = (0..tensor.rows).into_par_iter().step_by(BAND_ROWS).map(|first| {
                let rows = encoder.read(first..(first + BAND_ROWS).min(tensor.rows))?;
                Ok(largest_rms(&layout, &rows))
            });
            let largest = largest.collect::<Result<Vec<f32>>>()?.into_iter().fold(0.0, f32::max);
            encoder.header = Some(Header::new(&layout, largest));
        }
        if let Some(layout) = encoder.layout().filter(|l| l.code == Code::Book)
            && let Ok(Kept::Codes(_, book)) = stored(checkpoint, tensor)?
        {
            encoder.book = book.header(&layout);
        }
        Ok(encoder)
    }

    /// Rows as the checkpoint has them.
    fn kept(&self, layout: &CqLayout, rows: Range<usize>) -> Result<(Vec<u8>, SquareError)> {
        if layout.code == Code::Book {
            return self.kept_codes(layout, rows);
        }
        let blocks = read_blocks(self.checkpoint, self.tensor, rows)?;
        let tile = |blocks: &[Block]| {
            let mut bytes = vec![0; layout.tile_bytes()];
            pack_tile(layout, blocks, &mut bytes);
            bytes
        };
        let bytes = blocks.chunks(TILE_ROWS * layout.groups()).flat_map(tile).collect();
        Ok((bytes, SquareError { signal: blocks.iter().map(Block::square).sum(), noise: 0.0 }))
    }

    /// The same for codes; the error is that of integer levels.
    fn kept_codes(&self, layout: &CqLayout, rows: Range<usize>) -> Result<(Vec<u8>, SquareError)> {
        let (codes, scales) = read_codes(self.checkpoint, self.tensor, rows.clone())?;
        let truth = self.read(rows)?;
        let mut bytes = self.book.clone();
        let tiles = codes.chunks(TILE_ROWS * layout.padded_cols()).zip(scales.chunks(TILE_ROWS * layout.groups()));
        for (codes, scales) in tiles {
            let mut tile = vec![0; layout.tile_bytes()];
            book::pack_tile(layout, codes, scales, &mut tile);
            bytes.extend(tile);
        }
        let part = CqLayout { rows: truth.len() / layout.cols, ..*layout };
        let mut error = SquareError::default();
        let mut out = vec![0.0; layout.cols];
        for (row, truth) in truth.chunks_exact(layout.cols).enumerate() {
            decode_row(&part, &bytes, row, &mut out);
            for (w, stored) in truth.iter().zip(&out) {
                error += SquareError { signal: f64::from(*w).powi(2), noise: f64::from(w - stored).powi(2) };
            }
        }
        Ok((bytes.split_off(self.book.len()), error))
    }

    fn layout(&self) -> Option<CqLayout> {
        CqLayout::new(self.format, self.tensor.rows, self.tensor.cols)
    }

    fn read(&self, rows: Range<usize>) -> Result<Vec<f32>> {
        let mut values = vec![0.0f32; rows.len() * self.tensor.cols];
        read_rows(self.checkpoint, self.tensor, rows, &mut values)?;
        Ok(values)
    }

    /// What comes before the rows.
    pub fn header(&self) -> Vec<u8> {
        self.header.as_ref().map_or(self.book.clone(), |h| h.bytes().to_vec())
    }

    /// Bytes and error of rows; the first is a multiple of [`BAND_ROWS`], and there are at most so many.
    pub fn rows(&self, rows: Range<usize>) -> Result<(Vec<u8>, SquareError)> {
        if let Some(layout) = self.layout().filter(|_| !self.format.is_rounded()) {
            return self.kept(&layout, rows);
        }
        let values = self.read(rows)?;
        let product = |outer: &[f32], errors: &[f32], later: usize, sums: &mut [f32]| {
            self.kernel.run(&self.alone, FloatMatrix::F32(outer), later, errors, None, sums);
        };
        let feedback = self.aim.map(|aim| &aim.factors.feedback);
        let Some(layout) = self.layout() else { return Ok(plain(self.format, &values)) };
        let Some(header) = &self.header else {
            let mut error = SquareError::default();
            let tile = |rows: &[f32]| {
                let mut bytes = vec![0; layout.tile_bytes()];
                error += encode_tile(&layout, rows, feedback.map(|f| (f, &product as _)), &mut bytes);
                bytes
            };
            let bytes = values.chunks(TILE_ROWS * layout.cols).flat_map(tile).collect();
            return Ok((bytes, error));
        };
        let search = |bits: usize, table: &_, targets: &_, scales: &_, choices: &mut _| {
            self.search.run(bits, &Job { table, targets, scales }, choices);
        };
        let weights = rotated_rows(&layout, &values);
        let share = self.aim.and_then(|aim| aim.share.map(|share| (aim.factors, share)));
        let aims = share.map(|(factors, share)| factors.aims(&weights, share, &self.kernel, &self.alone));
        let tiles = weights.len() / layout.padded_cols();
        let mut bytes = vec![0; tiles.div_ceil(TILE_ROWS) * layout.tile_bytes()];
        let tools = Tools { product: &product, search: &search };
        let error = encode_band(&layout, header, &weights, aims.as_ref().unwrap_or(&weights), feedback, tools, &mut bytes);
        Ok((bytes, error))
    }
}
