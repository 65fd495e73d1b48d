//! How much work the parts of a conversion are, in one measure, so that progress can be shown and the time left
//! be estimated. The unit is a thousand multiply-adds of a float product; all else is weighed by how long it
//! takes beside that, as measured with a small model on AVX-512. Estimates only: nothing depends on them.

use super::calibrate::original_texts;
use super::convert::Options;
use super::families::{ModelPlan, Role, TensorPlan};
use super::survey;
use crate::quant::feedback;
use crate::quant::{Code, CqLayout, Format};

/// Multiply-adds that a weight is worth: searching its trellis code, rounding it to a scalar code, copying it.
const TRELLIS: f64 = 3000.0;
const SCALAR: f64 = 100.0;
const COPY: f64 = 10.0;
/// The same for a row and an element of the matrices in the factorisation of moments.
const FACTOR: f64 = 0.2;
/// What a multiply-add with 8-bit weights costs, as in the survey.
const QUANTISED: f64 = 0.4;

/// The work of one conversion.
pub struct Work {
    /// Runs of the original model before anything is rounded.
    pub original: u64,
    /// Measuring what each matrix matters.
    pub survey: u64,
    /// For every tensor: getting its inputs and what follows from them, and rounding it.
    pub tensors: Vec<(u64, u64)>,
}

impl Work {
    /// `kept`: formats of tensors that are stored as they are.
    pub fn new(plan: &ModelPlan, options: &Options, kept: &[Option<Format>]) -> Self {
        let calibrated = options.calibrated();
        let mixed = options.bits.uniform().is_none();
        let mut work = Work { original: 0, survey: 0, tensors: Vec::new() };
        let tokens: usize = options.calibration.iter().map(Vec::len).sum();
        let tied = plan.spec.tied() && kept.first().is_some_and(Option::is_none);
        if calibrated && (tied || mixed) {
            let tokens = original_texts(&options.calibration).iter().map(Vec::len).sum();
            work.original = plan.tensors.iter().map(|t| original(t, tokens, mixed)).sum::<u64>() + original_head(plan, tokens);
        }
        if calibrated && mixed {
            let tokens = survey::sample(plan, &options.calibration).iter().map(|t| t.len()).sum();
            let layers = plan.spec.layers();
            let runs = (0..layers).map(|i| survey_run(plan, i, tokens) * survey_versions(i + 1) as u64).sum::<u64>();
            work.survey = runs + survey_output(plan) * survey_versions(layers) as u64;
        }
        for (tensor, kept) in plan.tensors.iter().zip(kept) {
            let layout = CqLayout::new(likely(tensor, options), tensor.rows, tensor.cols).filter(|_| kept.is_none());
            let crossed = options.sequential.is_some();
            let inputs = match tensor.role {
                Role::Matrix if calibrated => {
                    let streams = if crossed { 2.0 } else { 1.0 };
                    products(tensor, tokens) * streams + moments(layout, tokens, crossed)
                }
                Role::Head if calibrated => moments(layout, tokens, crossed),
                _ => 0.0,
            };
            let feedback = calibrated && kept.is_none() && (tensor.role != Role::Embedding || plan.spec.tied());
            let aims = feedback && crossed && tensor.role != Role::Embedding;
            work.tensors.push((thousands(inputs), thousands(rounding(tensor, layout, feedback, aims))));
        }
        work
    }

    /// The same for the plan in parts: each takes its share of the rows.
    pub fn in_parts(&self, whole: &ModelPlan, plan: &ModelPlan) -> Self {
        let mut of_whole = whole.tensors.iter().zip(&self.tensors);
        let mut now = None;
        let mut share = |tensor: &TensorPlan| {
            if tensor.first_row == 0 {
                now = of_whole.next();
            }
            let Some((whole, (inputs, rounding))) = now else { return (0, 0) };
            let until = |row: usize| (u128::from(*rounding) * row as u128 / whole.rows as u128) as u64;
            let rounding = until(tensor.first_row + tensor.rows) - until(tensor.first_row);
            (if tensor.first_row == 0 { *inputs } else { 0 }, rounding)
        };
        let tensors = plan.tensors.iter().map(&mut share).collect();
        Work { original: self.original, survey: self.survey, tensors }
    }

    /// All before the tensor with this index.
    pub fn before(&self, tensor: usize) -> u64 {
        self.original + self.survey + self.tensors[..tensor].iter().map(|(inputs, rounding)| inputs + rounding).sum::<u64>()
    }

    pub fn total(&self) -> u64 {
        self.before(self.tensors.len())
    }
}

fn thousands(work: f64) -> u64 {
    (work / 1000.0) as u64
}

/// The format that a tensor probably gets: a mixture is not known yet.
fn likely(tensor: &TensorPlan, options: &Options) -> Format {
    let bits = match tensor.role {
        Role::Vector => return Format::F32,
        Role::Matrix => options.bits.uniform(),
        Role::Embedding | Role::Head => options.head_bits.or(options.bits.uniform()),
    };
    Format::cq(bits.unwrap_or(3), options.code).unwrap_or(Format::F16)
}

/// Products of a matrix with the inputs of all tokens.
fn products(tensor: &TensorPlan, tokens: usize) -> f64 {
    (tensor.rows * tensor.cols) as f64 * tokens as f64
}

/// Widths of the spans of a matrix.
fn spans(layout: CqLayout) -> impl Iterator<Item = f64> {
    feedback::spans(&layout).into_iter().map(move |groups| feedback::columns(&layout, &groups).len() as f64)
}

/// Second moments of inputs, and their factorisation.
fn moments(layout: Option<CqLayout>, tokens: usize, crossed: bool) -> f64 {
    let sums = if crossed { 1.5 } else { 0.5 };
    layout.map_or(0.0, |layout| spans(layout).map(|n| n * n * (sums * tokens as f64 + FACTOR * n)).sum())
}

/// Rounding a tensor, with feedback and towards aims.
fn rounding(tensor: &TensorPlan, layout: Option<CqLayout>, feedback: bool, aims: bool) -> f64 {
    let (rows, weights) = (tensor.rows as f64, (tensor.rows * tensor.cols) as f64);
    let Some(layout) = layout else { return weights * COPY };
    let search = weights * if layout.code == Code::Trellis { TRELLIS } else { SCALAR };
    let a_row = if feedback { 0.5 } else { 0.0 } + if aims { 2.0 } else { 0.0 };
    search + spans(layout).map(|n| rows * n * n * a_row).sum::<f64>()
}

/// Taking the original model to and past a matrix, with the gain of feedback for it if it is wanted.
pub fn original(tensor: &TensorPlan, tokens: usize, gains: bool) -> u64 {
    if tensor.role != Role::Matrix {
        return 0;
    }
    let layout = CqLayout::new(Format::Tcq4, tensor.rows, tensor.cols).filter(|_| gains);
    thousands(products(tensor, tokens) + moments(layout, tokens, false))
}

/// Moments of the last hidden states.
pub fn original_head(plan: &ModelPlan, tokens: usize) -> u64 {
    thousands(moments(CqLayout::new(Format::Tcq4, 1, plan.spec.dim()), tokens, false))
}

/// Versions of the model that the survey takes through a layer: one a matrix so far, one with a rounded
/// embedding, and the reference.
pub fn survey_versions(layers: usize) -> usize {
    4 * layers + 2
}

/// One version through layer `i`.
pub fn survey_run(plan: &ModelPlan, i: usize, tokens: usize) -> u64 {
    let prefix = format!("layers.{i}.");
    let matrices = plan.tensors.iter().filter(|t| t.role == Role::Matrix && t.name.starts_with(&prefix));
    thousands(matrices.map(|t| products(t, tokens) * QUANTISED).sum())
}

/// The output of one version.
pub fn survey_output(plan: &ModelPlan) -> u64 {
    thousands((plan.spec.vocab() * plan.spec.dim() * survey::SCORED) as f64 * QUANTISED)
}
