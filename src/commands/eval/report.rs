//! Figures as a table or as JSON.

use super::Subject;
use super::tasks::{Flips, Habits, Score};
use crate::commands::terminal;
use cactus::engine::evaluate::Summary;
use cactus::engine::evaluate::metrics::Interval;
use cactus::error::{Error, Result};
use cactus::model::{Bundle, bundle};
use cactus::quant::Bits;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::Path;

/// The figures of one model.
pub struct Row {
    model: Stored,
    reference: Option<Stored>,
    pub summary: Option<Summary>,
    pub score: Option<Score>,
}

/// A model as it is stored.
struct Stored {
    name: String,
    bits: Bits,
    bytes: u64,
    bits_per_weight: f64,
    sha256: String,
}

impl Stored {
    fn of(subject: &Subject) -> Result<Stored> {
        let manifest = Bundle::read_manifest(&subject.bundle)?;
        let weights = subject.bundle.join(bundle::WEIGHTS);
        let bytes = weights.metadata().map_err(|e| Error::io("read", &weights, &e))?.len();
        let (bits, bits_per_weight) = (manifest.quantiser.bits, manifest.quantiser.bits_per_weight);
        Ok(Stored { name: subject.name.clone(), bits, bytes, bits_per_weight, sha256: manifest.weights_sha256 })
    }
}

impl Row {
    pub fn new(model: &Subject, reference: Option<&Subject>) -> Result<Row> {
        Ok(Row { model: Stored::of(model)?, reference: reference.map(Stored::of).transpose()?, summary: None, score: None })
    }

    fn to_json(&self) -> Value {
        let mut object = Map::new();
        let mut add = |value: Value| {
            if let Value::Object(fields) = value {
                object.extend(fields);
            }
        };
        let model = &self.model;
        add(json!({
            "model": model.name, "bits": model.bits, "bytes": model.bytes,
            "bits_per_weight": model.bits_per_weight, "weights_sha256": model.sha256,
        }));
        if let Some(reference) = &self.reference {
            add(json!({
                "reference": reference.name, "reference_bits": reference.bits, "reference_bytes": reference.bytes,
                "reference_bits_per_weight": reference.bits_per_weight, "reference_weights_sha256": reference.sha256,
            }));
        }
        if let Some(summary) = &self.summary {
            add(serde_json::to_value(summary).unwrap_or_default());
        }
        if let Some(score) = &self.score {
            add(score.to_json());
        }
        add(json!({ "version": env!("CARGO_PKG_VERSION") }));
        Value::Object(object)
    }
}

/// An object, or an array of them.
pub fn json(rows: &[Row]) -> String {
    match rows {
        [row] => format!("{}\n", row.to_json()),
        rows => format!("{}\n", Value::Array(rows.iter().map(Row::to_json).collect())),
    }
}

/// A line a model.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    if let Some(reference) = rows.first().and_then(|row| row.reference.as_ref()) {
        let _ = writeln!(text, "against {} ({:.2} bits a weight)", reference.name, reference.bits_per_weight);
    }
    if rows.iter().any(|row| row.summary.is_some()) {
        text += &terminal::columns(&likeness(rows));
    }
    for (is_there, lines) in [
        (rows.iter().any(|row| row.score.as_ref().is_some_and(|score| score.accuracy.is_some())), answers(rows)),
        (rows.iter().any(|row| row.score.as_ref().is_some_and(|score| score.written.is_some())), habits(rows)),
    ] {
        if is_there {
            if text.contains("model") {
                text.push('\n');
            }
            text += &terminal::columns(&lines);
        }
    }
    text
}

fn likeness(rows: &[Row]) -> Vec<Vec<String>> {
    let titles =
        ["model", "bits/w", "MB", "mean KL", "95 %", "median", "99 %", "99.9 %", "top-1", "95 %", "rms dp", "PPL", "PPL ref"];
    let without = ["model", "bits/w", "MB", "PPL", "95 %", "tokens"];
    let compared = rows.iter().any(|row| row.reference.is_some());
    let titles: &[&str] = if compared { &titles } else { &without };
    let mut lines = vec![self::titles(titles)];
    for row in rows {
        let Some(summary) = &row.summary else { continue };
        let mut line = stored(&row.model);
        match &summary.divergence {
            Some(d) => line.extend([
                format!("{:.5}", d.mean_kl),
                interval(d.mean_kl_ci, |x| format!("{x:.5}")),
                format!("{:.5}", d.median_kl),
                format!("{:.4}", d.kl_p99),
                format!("{:.4}", d.kl_p999),
                percent(d.top1),
                interval(d.top1_ci, percent),
                percent(d.rms_dp),
                format!("{:.4}", summary.ppl),
                format!("{:.4}", d.ppl_ref),
            ]),
            None => line.extend([
                format!("{:.4}", summary.ppl),
                interval(summary.ppl_ci, |x| format!("{x:.2}")),
                summary.tokens.to_string(),
            ]),
        }
        lines.push(line);
    }
    lines
}

fn titles(titles: &[&str]) -> Vec<String> {
    titles.iter().map(|&title| title.to_owned()).collect()
}

fn answers(rows: &[Row]) -> Vec<Vec<String>> {
    let mut lines =
        vec![titles(&["model", "bits/w", "MB", "right", "accuracy", "95 %", "reference", "lost", "won", "p", "timeouts"])];
    for row in rows {
        let Some(score) = &row.score else { continue };
        let Some(accuracy) = &score.accuracy else { continue };
        let mut line = stored(&row.model);
        let flips = |text: &dyn Fn(&Flips) -> String| score.flips.as_ref().map_or_else(|| "-".to_owned(), text);
        line.extend([
            format!("{}/{}", accuracy.right, accuracy.questions),
            percent(accuracy.share()),
            interval(accuracy.interval, percent),
            score.accuracy_ref.map_or_else(|| "-".to_owned(), percent),
            flips(&|flips| flips.lost.len().to_string()),
            flips(&|flips| flips.won.len().to_string()),
            flips(&|flips| format!("{:.3}", flips.p())),
            accuracy.timeouts.to_string(),
        ]);
        lines.push(line);
    }
    lines
}

fn habits(rows: &[Row]) -> Vec<Vec<String>> {
    let mut lines = vec![titles(&["model", "bits/w", "MB", "answers", "short", "looping", "cut"])];
    let shares = |h: &Habits| {
        let share = |count: usize| percent(count as f64 / h.answers as f64);
        [h.answers.to_string(), share(h.short), share(h.looping), share(h.cut)]
    };
    for row in rows {
        if let Some(written) = row.score.as_ref().and_then(|score| score.written.as_ref()) {
            lines.push(stored(&row.model).into_iter().chain(shares(written)).collect());
        }
    }
    let first = rows.first().and_then(|row| Some((row.reference.as_ref()?, row.score.as_ref()?.written_ref.as_ref()?)));
    if let Some((reference, written)) = first {
        lines.push(stored(reference).into_iter().chain(shares(written)).collect());
    }
    lines
}

/// The first columns of every table.
fn stored(model: &Stored) -> Vec<String> {
    let name = if Bundle::is_bundle(Path::new(&model.name)) {
        Path::new(&model.name).file_name().map_or_else(|| model.name.clone(), |name| name.to_string_lossy().into_owned())
    } else {
        model.name.clone()
    };
    vec![name, format!("{:.2}", model.bits_per_weight), format!("{:.1}", model.bytes as f64 / 1e6)]
}

fn interval(interval: Option<Interval>, number: impl Fn(f64) -> String) -> String {
    interval.map_or_else(|| "-".to_owned(), |Interval(low, high)| format!("{}..{}", number(low), number(high)))
}

fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}
