//! The formats of all tensors: one width for all, or what each matrix is measured to need; and the grids of the
//! checkpoint that are kept.

use super::calibrate::Calibration;
use super::convert::{Event, Options};
use super::families::{ModelPlan, Role, TensorPlan};
use super::import::Checkpoint;
use super::import::official::Kept;
use super::moments::Factors;
use super::source::{grid, stored, unquantised};
use super::survey;
use super::usage::Usage;
use crate::error::{Error, Result};
use crate::quant::allocate::{DISTORTION, Item, WIDTHS, allocate};
use crate::quant::{Bits, Code, CqLayout, Format};
use std::collections::BTreeMap;

/// Rows of one bit in a table do worse than their error lets expect, as small errors add up and large ones do not.
const ONE_BIT: f64 = 3.0;

/// What [`choose`] decides, tensor by tensor.
pub struct Choice {
    /// See [`ModelPlan::in_parts`]; the rest is of the plan with these parts.
    pub parts: Vec<usize>,
    pub formats: Vec<Format>,
    /// Divergence that is expected from the tensor, where its bits were chosen by it; nats a token.
    pub expected: Vec<Option<f64>>,
    /// For a table that is embedding and head in one.
    pub table: Option<Factors>,
}

/// The bits that one width for all means for a matrix; `None` where they are to be found, and for vectors. Plain
/// rounding of the head costs more than it saves.
fn uniform_bits(tensor: &TensorPlan, options: &Options, calibrated: bool) -> Option<u32> {
    let uniform = options.bits.uniform();
    let plain = !calibrated && options.bits < Bits::EIGHT;
    match tensor.role {
        Role::Vector => None,
        Role::Matrix => uniform,
        Role::Embedding | Role::Head => options.head_bits.or(uniform.map(|bits| if plain { 8 } else { bits })),
    }
}

/// For every tensor the grid that it has in the checkpoint, if that is kept: where 1 to 8 bits are asked for and
/// it has no more, or where the makers of an official folder left it at 16. Blocks cost 0.4 bits a weight beyond those of a
/// rotated matrix and save all of the error.
pub fn kept(checkpoint: &Checkpoint, plan: &ModelPlan, options: &Options, calibrated: bool) -> Result<Vec<Option<Format>>> {
    let of = |tensor: &TensorPlan| match uniform_bits(tensor, options, calibrated) {
        Some(bits) if options.keep && bits < 16 => {
            let asked = tensor.role != Role::Matrix && options.head_bits.is_some();
            let fits = |grid: &Format| grid.bits() <= bits as usize || !grid.is_quantised() && !asked;
            Ok(grid(checkpoint, tensor)?.filter(fits))
        }
        _ => Ok(None),
    };
    plan.tensors.iter().map(of).collect()
}

/// Matrices of official folders that will be rounded again though they might have been [`kept`], and what stands in the
/// way.
pub fn rounded_again(
    checkpoint: &Checkpoint,
    plan: &ModelPlan,
    options: &Options,
    kept: &[Option<Format>],
) -> Result<Vec<String>> {
    let mut again = Vec::new();
    let bits = options.bits.uniform().filter(|bits| options.keep && *bits < 16);
    for (tensor, _) in
        plan.tensors.iter().zip(kept).filter(|(t, kept)| bits.is_some() && t.role != Role::Vector && kept.is_none())
    {
        let why = match stored(checkpoint, tensor)? {
            Err("") => continue,
            Err(why) => why,
            Ok(Kept::Floats) => continue,
            Ok(_) => "more bits than are asked for",
        };
        again.push(format!("{} ({why})", tensor.name));
    }
    Ok(again)
}

/// Decides the formats of all tensors, those that are [`kept`] given.
pub fn choose(
    checkpoint: &Checkpoint,
    plan: &ModelPlan,
    options: &Options,
    kept: &[Option<Format>],
    calibration: &mut Option<Calibration>,
    on_event: &mut dyn FnMut(Event) -> Result<()>,
) -> Result<Choice> {
    let mut choice = Choice { parts: Vec::new(), formats: Vec::new(), expected: vec![None; plan.tensors.len()], table: None };
    let uniform = options.bits.uniform();
    if uniform.is_none() && plan.spec.decoder().is_none() {
        return Err(Error::unsupported(format!("{} bits are a mixture, which embedding models cannot have yet", options.bits))
            .with_hint("give 2, 3, 4, 8 or 16 bits"));
    }
    if uniform.is_none() && calibration.is_none() {
        return Err(Error::usage(format!("{} bits are a mixture, and finding it needs text to calibrate on", options.bits))
            .with_hint("leave out --calibrate none"));
    }
    let mut gains = BTreeMap::new();
    let tied = plan.spec.tied() && plan.tensors.iter().zip(kept).any(|(t, kept)| t.role == Role::Embedding && kept.is_none());
    if let Some(calibration) = calibration.as_mut().filter(|_| tied || uniform.is_none()) {
        on_event(Event::Stage("running the original model"))?;
        let mut each = |work| on_event(Event::Advance(work));
        let (table, found) = calibration.original_pass(options.code, uniform.is_none(), &mut each)?;
        (choice.table, gains) = (Some(table).filter(|_| tied), found);
    }
    let of_bits = |bits: u32, tensor: &TensorPlan| match bits {
        16 => unquantised(tensor, checkpoint),
        _ => Format::cq(bits, options.code)
            .ok_or_else(|| Error::usage(format!("{bits} bits a matrix (there are 1, 2, 3, 4, 8, 16)"))),
    };
    let fixed = |(tensor, kept): (&TensorPlan, &Option<Format>)| match (tensor.role, kept) {
        (Role::Vector, _) => Ok(Some(Format::F32)),
        (_, Some(_)) => Ok(*kept),
        _ => uniform_bits(tensor, options, calibration.is_some()).map(|bits| of_bits(bits, tensor)).transpose(),
    };
    let fixed: Vec<Option<Format>> = plan.tensors.iter().zip(kept).map(fixed).collect::<Result<_>>()?;
    choice.formats = fixed.iter().map(|f| f.unwrap_or(Format::F32)).collect();
    if fixed.iter().all(Option::is_some) {
        return Ok(choice);
    }
    on_event(Event::Stage("measuring how much each matrix matters"))?;
    let mut each = |work| on_event(Event::Advance(work));
    let survey::Found { sensitivities, likely } = survey::survey(checkpoint, plan, &options.calibration, &mut each)?;
    let mut looked_up = vec![0.0; plan.spec.vocab()];
    options.calibration.iter().flatten().for_each(|id| looked_up[*id as usize] += 1.0);
    let usage = Usage::new(&looked_up, &likely);
    let table = |tensor: &TensorPlan| matches!(tensor.role, Role::Embedding | Role::Head);
    if plan.tensors.iter().zip(&fixed).all(|(tensor, fixed)| !table(tensor) || fixed.is_none()) {
        choice.parts = usage.parts();
    }
    let whole = plan;
    let plan = &whole.in_parts(&choice.parts);
    let parts_of = |tensor: &TensorPlan| if table(tensor) { choice.parts.len() + 1 } else { 1 };
    let fixed: Vec<Option<Format>> =
        whole.tensors.iter().zip(fixed).flat_map(|(tensor, fixed)| std::iter::repeat_n(fixed, parts_of(tensor))).collect();
    choice.formats = fixed.iter().map(|f| f.unwrap_or(Format::F32)).collect();
    choice.expected = vec![None; plan.tensors.len()];
    let free: Vec<usize> = (0..fixed.len()).filter(|i| fixed[*i].is_none()).collect();
    let weights: u64 = plan.tensors.iter().map(|t| (t.rows * t.cols) as u64).sum();
    let taken: usize = plan.tensors.iter().zip(&fixed).filter_map(|(t, f)| f.as_ref()?.bytes(t.rows, t.cols)).sum();
    let budget = (weights as f64 * options.bits.value() / 8.0) as u64;
    let (mut items, mut formats) = (Vec::new(), Vec::new());
    for &i in &free {
        let tensor = &plan.tensors[i];
        let candidates = candidates(options.code, tensor.rows, tensor.cols)?;
        let error = |name: &str| sensitivities.get(name).copied().unwrap_or(0.0) / survey::PROBE_DISTORTION;
        let gain = |name: &str| gains.get(name).copied().unwrap_or(1.0);
        // Looking up is helped by nothing, the output by feedback.
        let looked_up = || error("embed") * usage.looked_up(tensor.first_row, tensor.rows);
        let given = || error("head") * gain("head") * usage.given(tensor.first_row, tensor.rows);
        let error = match tensor.role {
            Role::Embedding if plan.spec.tied() => looked_up() + given(),
            Role::Embedding => looked_up(),
            Role::Head => given(),
            _ => error(&tensor.name) * gain(&tensor.name),
        };
        formats.push(candidates.map(|c| c.0));
        let mut cost = DISTORTION.map(|d| d * error);
        if table(tensor) {
            cost[0] *= ONE_BIT;
        }
        items.push(Item { bytes: candidates.map(|c| c.1), cost });
    }
    let widths = allocate(&items, budget.saturating_sub(taken as u64)).ok_or_else(|| {
        let least: u64 = items.iter().map(|item| item.bytes[0]).sum::<u64>() + taken as u64;
        Error::usage(format!(
            "{} bits a weight are too few: this model needs {:.2}",
            options.bits,
            8.0 * least as f64 / weights as f64
        ))
    })?;
    for (((i, width), item), formats) in free.into_iter().zip(widths).zip(&items).zip(&formats) {
        choice.formats[i] = formats[width];
        choice.expected[i] = Some(item.cost[width]);
    }
    Ok(choice)
}

/// The formats a quantised tensor may have, by index into [`WIDTHS`].
fn candidates(code: Code, rows: usize, cols: usize) -> Result<[(Format, u64); 5]> {
    let mut out = [(Format::Cq8, 0); 5];
    for (out, bits) in out.iter_mut().zip(WIDTHS) {
        let format = Format::cq(bits, code).unwrap_or(Format::Cq8);
        let bytes = CqLayout::new(format, rows, cols).and_then(|l| l.bytes());
        *out = (format, bytes.ok_or_else(|| Error::unsupported(format!("a matrix of {rows} x {cols} is too large")))? as u64);
    }
    Ok(out)
}
