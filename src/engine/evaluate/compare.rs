//! A model against the cached words of a reference, or by itself.

use super::super::load::Engine;
use super::metrics::{Interval, Softmax, bootstrap, mean, quantile};
use super::reference::{Key, Reader, Row, VERSION, Writer};
use super::score::{Scorer, Sequence};
use crate::error::{Error, Kind, Result};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::path::Path;

/// Whether to stop, and what to tell of the progress: tokens that were scored since the last call.
pub struct Progress<'a> {
    pub stopped: &'a dyn Fn() -> bool,
    pub advance: &'a mut dyn FnMut(u64),
}

/// The key of a reference: its weights, how they are run, and what was scored.
pub fn reference_key(engine: &Engine, sequences: &[Sequence]) -> Key {
    let mut hash = Sha256::new();
    hash.update(VERSION.to_le_bytes());
    hash.update(env!("CARGO_PKG_VERSION"));
    hash.update(engine.bundle.identity());
    let mut number = |n: usize| hash.update((n as u64).to_le_bytes());
    for sequence in sequences {
        number(sequence.ids.len());
        sequence.ids.iter().for_each(|id| number(*id as usize));
        number(sequence.targets.len());
        sequence.targets.iter().for_each(|range| [range.start, range.end].into_iter().for_each(&mut number));
    }
    hash.finalize().into()
}

/// Tokens that are scored.
pub fn scored(sequences: &[Sequence]) -> u64 {
    sequences.iter().map(|sequence| sequence.scored() as u64).sum()
}

fn longest(sequences: &[Sequence]) -> usize {
    sequences.iter().map(|sequence| sequence.ids.len()).max().unwrap_or(0)
}

fn survey(row: &[f32]) -> Result<Softmax> {
    Softmax::of(row).ok_or_else(|| Error::new(Kind::BadFile, "the model gives logits that are no numbers"))
}

/// Runs the reference over `sequences` and writes what it says to `path`, replacing what is there when all is
/// done. Gives the size in bytes.
pub fn write_reference(engine: &Engine, sequences: &[Sequence], path: &Path, progress: &mut Progress) -> Result<u64> {
    let mut writer = Writer::create(path, &reference_key(engine, sequences), scored(sequences))?;
    let mut scorer = Scorer::new(engine, longest(sequences))?;
    for sequence in sequences {
        scorer.run(sequence, progress.stopped, &mut |targets, rows| {
            let row = |(target, logits): (&u32, &[f32])| Ok(Row::new(logits, &survey(logits)?, *target).to_bytes());
            let rows: Vec<Vec<u8>> =
                targets.par_iter().zip(rows.par_chunks_exact(engine.vocab())).map(row).collect::<Result<_>>()?;
            rows.iter().try_for_each(|row| writer.row(row))?;
            (progress.advance)(targets.len() as u64);
            Ok(())
        })?;
    }
    writer.finish()
}

/// What was measured at one token.
#[derive(Clone, Copy, Debug)]
struct Token {
    /// Of the model, natural.
    log_prob: f64,
    against: Option<Against>,
}

#[derive(Clone, Copy, Debug)]
struct Against {
    log_prob: f64,
    divergence: f64,
    same_top: bool,
}

/// Tokens by document.
#[derive(Debug, Default)]
pub struct Scores {
    documents: Vec<Vec<Token>>,
}

/// Runs a model over `sequences`, beside the reference if there is one, which must be that of these sequences.
pub fn score(engine: &Engine, sequences: &[Sequence], mut reference: Option<Reader>, progress: &mut Progress) -> Result<Scores> {
    let mut scores = Scores::default();
    let mut scorer = Scorer::new(engine, longest(sequences))?;
    let mut last = None;
    for sequence in sequences {
        if last != Some(sequence.document) {
            scores.documents.push(Vec::new());
            last = Some(sequence.document);
        }
        scorer.run(sequence, progress.stopped, &mut |targets, rows| {
            let said: Vec<Option<Row>> =
                targets.iter().map(|_| reference.as_mut().map(Reader::row).transpose()).collect::<Result<_>>()?;
            let token = |((target, logits), said): ((&u32, &[f32]), &Option<Row>)| {
                let softmax = survey(logits)?;
                let against = said.as_ref().map(|row| Against {
                    log_prob: row.log_prob,
                    divergence: row.divergence(logits, &softmax),
                    same_top: row.top == softmax.top,
                });
                Ok(Token { log_prob: softmax.log_prob(logits[*target as usize]), against })
            };
            let pairs = targets.par_iter().zip(rows.par_chunks_exact(engine.vocab())).zip(&said);
            let tokens: Vec<Token> = pairs.map(token).collect::<Result<_>>()?;
            if let Some(document) = scores.documents.last_mut() {
                document.extend(tokens);
            }
            (progress.advance)(targets.len() as u64);
            Ok(())
        })?;
    }
    Ok(scores)
}

/// The figures of a model; see `docs/evaluation.md` for the formulas.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Summary {
    pub tokens: usize,
    /// Chunks of a text, or chats.
    pub chunks: usize,
    pub ppl: f64,
    pub ppl_ci: Option<Interval>,
    #[serde(flatten)]
    pub divergence: Option<Divergence>,
}

/// The part that needs a reference. KL is KL(reference || model) in nats a token.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Divergence {
    pub ppl_ref: f64,
    /// Mean of `ln p_ref(token) - ln p(token)`, that is `ln(ppl / ppl_ref)`.
    pub mean_ln_ppl_ratio: f64,
    pub mean_kl: f64,
    pub mean_kl_ci: Option<Interval>,
    pub median_kl: f64,
    pub kl_p99: f64,
    pub kl_p999: f64,
    pub kl_max: f64,
    /// Share of tokens at which both find the same id likeliest.
    pub top1: f64,
    pub top1_ci: Option<Interval>,
    /// Root of the mean square of `p(token) - p_ref(token)`.
    pub rms_dp: f64,
}

impl Scores {
    pub fn summary(&self) -> Summary {
        let tokens = || self.documents.iter().flatten();
        let count = tokens().count();
        // Sums of each document, for the mean of a value that every token has.
        let interval = |value: &dyn Fn(&Token) -> f64| {
            let sums: Vec<_> = self.documents.iter().map(|d| (d.iter().map(value).sum(), d.len() as f64)).collect();
            bootstrap(&sums)
        };
        let average = |value: &dyn Fn(&Token) -> f64| mean(&tokens().map(value).collect::<Vec<_>>());
        let against = |value: fn(&Token, &Against) -> f64| {
            move |token: &Token| token.against.as_ref().map_or(f64::NAN, |against| value(token, against))
        };
        let loss = |token: &Token| -token.log_prob;
        let divergence = tokens().any(|token| token.against.is_some()).then(|| {
            let kl = against(|_, a| a.divergence);
            let top1 = against(|_, a| f64::from(u8::from(a.same_top)));
            let mut sorted: Vec<f64> = tokens().map(kl).collect();
            sorted.sort_by(f64::total_cmp);
            Divergence {
                ppl_ref: average(&against(|_, a| -a.log_prob)).exp(),
                mean_ln_ppl_ratio: average(&against(|t, a| a.log_prob - t.log_prob)),
                mean_kl: average(&kl),
                mean_kl_ci: interval(&kl),
                median_kl: quantile(&sorted, 0.5),
                kl_p99: quantile(&sorted, 0.99),
                kl_p999: quantile(&sorted, 0.999),
                kl_max: quantile(&sorted, 1.0),
                top1: average(&top1),
                top1_ci: interval(&top1),
                rms_dp: average(&against(|t, a| (t.log_prob.exp() - a.log_prob.exp()).powi(2))).sqrt(),
            }
        });
        Summary {
            tokens: count,
            chunks: self.documents.len(),
            ppl: average(&loss).exp(),
            ppl_ci: interval(&loss).map(|Interval(low, high)| Interval(low.exp(), high.exp())),
            divergence,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(p: f64, q: f64, divergence: f64, same_top: bool) -> Token {
        Token { log_prob: q.ln(), against: Some(Against { log_prob: p.ln(), divergence, same_top }) }
    }

    /// Two documents by hand.
    #[test]
    fn figures_by_hand() {
        let documents = vec![vec![token(0.5, 0.25, 0.4, true), token(0.5, 0.5, 0.0, true)], vec![token(0.125, 0.5, 0.2, false)]];
        let summary = Scores { documents }.summary();
        assert_eq!((summary.tokens, summary.chunks), (3, 2));
        // (1/4 * 1/2 * 1/2)^(-1/3) and (1/2 * 1/2 * 1/8)^(-1/3).
        assert!((summary.ppl - 16f64.cbrt()).abs() < 1e-9);
        let d = summary.divergence.unwrap();
        assert!((d.ppl_ref - 32f64.cbrt()).abs() < 1e-9);
        assert!((d.mean_ln_ppl_ratio - (summary.ppl / d.ppl_ref).ln()).abs() < 1e-9);
        assert!((d.mean_kl - 0.2).abs() < 1e-9 && (d.median_kl - 0.2).abs() < 1e-9 && (d.kl_max - 0.4).abs() < 1e-9);
        assert!((d.top1 - 2.0 / 3.0).abs() < 1e-9);
        // Differences -1/4, 0, 3/8.
        assert!((d.rms_dp - ((0.0625 + 0.140625) / 3f64).sqrt()).abs() < 1e-9);
        // Means of the resamples are those of one document or of both.
        assert_eq!(d.top1_ci, Some(Interval(0.0, 1.0)));
    }

    #[test]
    fn without_a_reference_there_is_only_the_perplexity() {
        let token = Token { log_prob: 0.25f64.ln(), against: None };
        let summary = Scores { documents: vec![vec![token, token]] }.summary();
        assert!((summary.ppl - 4.0).abs() < 1e-9 && summary.divergence.is_none() && summary.ppl_ci.is_none());
    }
}
