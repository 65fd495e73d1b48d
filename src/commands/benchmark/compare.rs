//! A result against an earlier one.

use super::report::Report;
use serde::{Deserialize, Serialize};

/// How a result relates to an earlier one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Of the earlier result.
    pub date: String,
    pub ratios: Vec<Ratio>,
    /// What was not alike, a sentence each.
    pub differences: Vec<String>,
}

/// New median by old median of one measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    pub name: String,
    pub unit: String,
    pub old: f64,
    pub new: f64,
    pub ratio: f64,
}

impl Comparison {
    pub fn of(old: &Report, new: &Report) -> Comparison {
        let mut ratios = Vec::new();
        let mut differences = conditions(old, new);
        for measurement in &new.llm.measurements {
            let name = &measurement.name;
            match old.llm.measurements.iter().find(|m| m.name == *name) {
                Some(before) => ratios.push(Ratio {
                    name: name.clone(),
                    unit: measurement.unit.clone(),
                    old: before.spread.median,
                    new: measurement.spread.median,
                    ratio: measurement.spread.median / before.spread.median,
                }),
                None => differences.push(format!("{name} was not measured then")),
            }
        }
        for before in &old.llm.measurements {
            if !new.llm.measurements.iter().any(|m| m.name == before.name) {
                differences.push(format!("{} was measured only then", before.name));
            }
        }
        Comparison { date: old.date.clone(), ratios, differences }
    }
}

/// What may explain a ratio besides the program.
fn conditions(old: &Report, new: &Report) -> Vec<String> {
    let mut differences = Vec::new();
    let mut hold = |what: &str, old: String, new: String| {
        if old != new {
            differences.push(format!("{what}: {old} then, {new} now"));
        }
    };
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let this = |device: &Option<String>| device.clone().unwrap_or_else(|| "this computer".to_owned());
    hold("device", this(&old.machine.device), this(&new.machine.device));
    hold("CPU", or_unknown(&old.machine.cpu), or_unknown(&new.machine.cpu));
    hold("kernels", old.machine.kernels.clone(), new.machine.kernels.clone());
    hold("cores", old.machine.cores.clone(), new.machine.cores.clone());
    hold("governor", or_unknown(&old.machine.governor), or_unknown(&new.machine.governor));
    hold("threads", old.conditions.threads.to_string(), new.conditions.threads.to_string());
    let pinned = |report: &Report| report.conditions.pinned_cpus.as_ref().map_or("none".to_owned(), |cpus| format!("{cpus:?}"));
    hold("pinned CPUs", pinned(old), pinned(new));
    hold("family", old.model.family.clone(), new.model.family.clone());
    let stored = |report: &Report| {
        let formats: Vec<String> = report.model.formats.iter().map(|(name, count)| format!("{count} {name}")).collect();
        format!("{:.3} bits a weight ({})", report.model.bits_per_weight, formats.join(", "))
    };
    hold("quantisation", stored(old), stored(new));
    hold("context", old.conditions.context.to_string(), new.conditions.context.to_string());
    hold("keys and values", old.conditions.kv.clone(), new.conditions.kv.clone());
    hold("runs", old.conditions.runs.to_string(), new.conditions.runs.to_string());
    hold("pause", format!("{} s", old.conditions.pause_s), format!("{} s", new.conditions.pause_s));
    hold("version", old.build.version.clone(), new.build.version.clone());
    hold("build", old.build.profile.clone(), new.build.profile.clone());
    hold("target", old.build.target.clone(), new.build.target.clone());
    if stored(old) == stored(new) && old.model.weights_sha256 != new.model.weights_sha256 {
        differences.push("the weights have other values".to_owned());
    }
    differences
}
