//! The values of a bundle tensor: rows of the checkpoint tensors that it stacks.

use super::bundle::SourceShape;
use super::families::{Role, TensorPlan};
use super::import::official::Kept;
use super::import::{Checkpoint, Encoding, SourceTensor};
use crate::error::{Error, Kind, Result};
use crate::quant::blocks::Block;
use crate::quant::encode::SquareError;
use crate::quant::format::TILE_ROWS;
use crate::quant::{CqLayout, Format};
use rayon::prelude::*;
use std::ops::Range;

/// 16-bit sources keep their format; anything else becomes f16, or bf16 when a value is too large for f16.
/// Vectors are f32.
pub fn unquantised(tensor: &TensorPlan, checkpoint: &Checkpoint) -> Result<Format> {
    if tensor.role == Role::Vector {
        return Ok(Format::F32);
    }
    let mut encodings = Vec::new();
    for name in &tensor.sources {
        encodings.push(checkpoint.tensor(name)?.encoding);
    }
    if encodings.iter().all(|e| *e == Encoding::BF16) {
        return Ok(Format::BF16);
    }
    if encodings.iter().all(|e| *e == Encoding::F16) {
        return Ok(Format::F16);
    }
    for name in &tensor.sources {
        let source = checkpoint.tensor(name)?;
        let fits = (0..source.rows()).into_par_iter().step_by(TILE_ROWS).map(|first| -> Result<bool> {
            let rows = first..(first + TILE_ROWS).min(source.rows());
            let mut values = vec![0.0; rows.len() * source.width()];
            source.read_rows(rows, &mut values)?;
            Ok(values.iter().all(|v| v.abs() <= half::f16::MAX.to_f32()))
        });
        if !fits.collect::<Result<Vec<bool>>>()?.into_iter().all(|fits| fits) {
            return Ok(Format::BF16);
        }
    }
    Ok(Format::F16)
}

/// Names and shapes of the checkpoint tensors that a bundle tensor stacks.
pub fn source_shapes(tensor: &TensorPlan, checkpoint: &Checkpoint) -> Vec<SourceShape> {
    let shape = |name: &String| Some(SourceShape { name: name.clone(), shape: checkpoint.tensors.get(name)?.shape.clone() });
    tensor.sources.iter().filter_map(shape).collect()
}

/// Visits the source tensors that `rows` of a bundle tensor lie in: each with its rows, and how many rows were before.
fn stacked(
    checkpoint: &Checkpoint,
    tensor: &TensorPlan,
    rows: Range<usize>,
    mut visit: impl FnMut(&SourceTensor, Range<usize>, usize) -> Result<()>,
) -> Result<()> {
    let rows = tensor.first_row + rows.start..tensor.first_row + rows.end;
    let mut first = 0;
    for name in &tensor.sources {
        let source = checkpoint.tensor(name)?;
        let count = source.shape[0];
        let (start, end) = (rows.start.max(first), rows.end.min(first + count));
        if start < end {
            visit(source, start - first..end - first, start - rows.start).map_err(|e| e.context(format!("tensor {name}")))?;
        }
        first += count;
    }
    Ok(())
}

/// Reads rows of the stacked source tensors of a bundle tensor.
pub fn read_rows(checkpoint: &Checkpoint, tensor: &TensorPlan, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
    let vector = tensor.role == Role::Vector;
    // A vector is one row here, but its sources are stacked element by element.
    let (rows, width) = if vector { (0..tensor.cols, 1) } else { (rows, tensor.cols) };
    stacked(checkpoint, tensor, rows, |source, part, before| {
        let out = &mut out[before * width..(before + part.len()) * width];
        source.read_rows(if vector { 0..1 } else { part }, out)
    })?;
    if let Some(bad) = out.iter().find(|v| !v.is_finite()) {
        return Err(Error::new(Kind::BadFile, format!("tensor {} holds the value {bad}", tensor.sources.join(" + "))));
    }
    out.iter_mut().for_each(|v| *v += tensor.offset);
    Ok(())
}

/// How a bundle can hold all source tensors of a matrix as they are stored, or what stands in the way (nothing that is
/// worth telling: empty).
pub fn stored(checkpoint: &Checkpoint, tensor: &TensorPlan) -> Result<std::result::Result<Kept, &'static str>> {
    let mut all: Option<Kept> = None;
    for name in &tensor.sources {
        let source = checkpoint.tensor(name)?;
        let kept = match (&source.official, source.encoding) {
            (Some(official), _) => official.kept(),
            (None, Encoding::Block(block)) => block.grid().map(Kept::Blocks).ok_or(""),
            _ => Err(""),
        };
        let kept = match kept {
            Ok(kept) => kept,
            Err(why) => return Ok(Err(why)),
        };
        all = Some(match (all, kept) {
            (None, kept) => kept,
            // Eight bits hold four as well.
            (Some(Kept::Blocks(a)), Kept::Blocks(b)) => Kept::Blocks(if a.bits() >= b.bits() { a } else { b }),
            (Some(all), kept) if all == kept => all,
            _ => return Ok(Err("parts that are stored in different ways")),
        });
    }
    let fits = |kept: &Kept| match kept {
        Kept::Floats => true,
        Kept::Blocks(format) | Kept::Codes(format, _) => CqLayout::new(*format, tensor.rows, tensor.cols).is_some(),
    };
    Ok(all.filter(|kept| fits(kept) && tensor.role != Role::Vector && tensor.offset == 0.0).ok_or(""))
}

/// The format of [`stored`], if there is one.
pub fn grid(checkpoint: &Checkpoint, tensor: &TensorPlan) -> Result<Option<Format>> {
    Ok(match stored(checkpoint, tensor)?.ok() {
        Some(Kept::Floats) => Some(unquantised(tensor, checkpoint)?),
        Some(Kept::Blocks(format) | Kept::Codes(format, _)) => Some(format),
        None => None,
    })
}

/// Reads rows of the stacked source tensors of a matrix that has a [`grid`], as blocks.
pub fn read_blocks(checkpoint: &Checkpoint, tensor: &TensorPlan, rows: Range<usize>) -> Result<Vec<Block>> {
    let mut blocks = Vec::new();
    stacked(checkpoint, tensor, rows, |source, part, _| {
        blocks.extend(source.read_blocks(part)?);
        Ok(())
    })?;
    finite(tensor, blocks.iter().map(|block| block.scale))?;
    Ok(blocks)
}

/// Reads rows of the stacked source tensors of a matrix whose codes are kept: codes `[rows, cols as stored]`, scales
/// `[rows, groups]`.
pub fn read_codes(checkpoint: &Checkpoint, tensor: &TensorPlan, rows: Range<usize>) -> Result<(Vec<u8>, Vec<half::f16>)> {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    stacked(checkpoint, tensor, rows, |source, part, _| {
        let Some(official) = &source.official else { unreachable!("not made of codes") };
        let read = official.read_codes(part)?;
        codes.extend(read.0);
        scales.extend(read.1);
        Ok(())
    })?;
    finite(tensor, scales.iter().copied())?;
    Ok((codes, scales))
}

fn finite(tensor: &TensorPlan, mut scales: impl Iterator<Item = half::f16>) -> Result<()> {
    match scales.find(|scale| !scale.is_finite()) {
        None => Ok(()),
        Some(bad) => Err(Error::new(Kind::BadFile, format!("tensor {} holds the scale {bad}", tensor.sources.join(" + ")))),
    }
}

/// Unquantised values as bytes.
pub fn plain(format: Format, values: &[f32]) -> (Vec<u8>, SquareError) {
    let mut bytes = Vec::with_capacity(values.len() * format.bits() / 8);
    let mut error = SquareError::default();
    for v in values {
        let stored = match format {
            Format::F16 => {
                let h = half::f16::from_f32(*v);
                bytes.extend(h.to_bits().to_le_bytes());
                h.to_f32()
            }
            Format::BF16 => {
                let h = half::bf16::from_f32(*v);
                bytes.extend(h.to_bits().to_le_bytes());
                h.to_f32()
            }
            _ => {
                bytes.extend(v.to_le_bytes());
                *v
            }
        };
        error += SquareError { signal: f64::from(*v).powi(2), noise: f64::from(v - stored).powi(2) };
    }
    (bytes, error)
}
