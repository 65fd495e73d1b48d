//! A result as text for people, as Markdown and as CSV.

use super::report::{Measurement, Report};
use crate::commands::machine::{Sensors, size};
use crate::commands::terminal;
use std::fmt::Write;

/// Lines of facts, then tables.
pub fn text(report: &Report) -> String {
    let mut text = String::new();
    for (name, value) in facts(report) {
        let _ = writeln!(text, "{name:12} {value}");
    }
    for table in tables(report) {
        text.push('\n');
        text += &terminal::columns(&table);
    }
    text
}

/// The same as Markdown.
pub fn markdown(report: &Report) -> String {
    let mut text = String::new();
    for (name, value) in facts(report) {
        let _ = writeln!(text, "- {name}: {}", value.replace('|', "/"));
    }
    for table in tables(report) {
        text.push('\n');
        for (at, line) in table.iter().enumerate() {
            let _ = writeln!(text, "| {} |", line.iter().map(|cell| cell.replace('|', "/")).collect::<Vec<_>>().join(" | "));
            if at == 0 {
                let _ = writeln!(text, "|---|{}", "---:|".repeat(line.len().saturating_sub(1)));
            }
        }
    }
    text
}

/// A line a measurement; conditions are repeated, so that files can be joined.
pub fn csv(report: &Report) -> String {
    let mut text = String::from(
        "name,unit,median,min,max,mad,runs,prompt_tokens,depth,generated_tokens,finish_reason,samples,theirs,old,\
         model,bits_per_weight,threads,cpu,device,kernels,version,profile,target,date\n",
    );
    let old = |m: &Measurement| report.compared.as_ref()?.ratios.iter().find(|r| r.name == m.name).map(|r| r.old);
    let theirs = |m: &Measurement| report.against.as_ref()?.results.iter().find(|r| r.name == m.name).map(|r| r.theirs);
    let number = |x: Option<f64>| x.map_or_else(String::new, |x| x.to_string());
    for m in &report.llm.measurements {
        let s = &m.spread;
        let samples: Vec<String> = s.samples.iter().map(f64::to_string).collect();
        let cells = [
            m.name.clone(),
            m.unit.clone(),
            s.median.to_string(),
            s.min.to_string(),
            s.max.to_string(),
            s.mad.to_string(),
            s.samples.len().to_string(),
            m.prompt_tokens.to_string(),
            m.depth.to_string(),
            m.generated_tokens.to_string(),
            m.finish_reason.clone().unwrap_or_default(),
            samples.join(" "),
            number(theirs(m)),
            number(old(m)),
            report.model.name.clone(),
            report.model.bits_per_weight.to_string(),
            report.conditions.threads.to_string(),
            report.machine.cpu.clone().unwrap_or_default(),
            report.machine.device.clone().unwrap_or_default(),
            report.machine.kernels.clone(),
            report.build.version.clone(),
            report.build.profile.clone(),
            report.build.target.clone(),
            report.date.clone(),
        ];
        let _ = writeln!(text, "{}", cells.map(|cell| quoted(&cell)).join(","));
    }
    text
}

/// A cell as RFC 4180 writes it.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.to_owned() }
}

fn facts(report: &Report) -> Vec<(&'static str, String)> {
    let Report { model, conditions, machine, build, .. } = report;
    let mut facts = Vec::new();
    let formats: Vec<String> = model.formats.iter().map(|(name, count)| format!("{count} {name}")).collect();
    facts.push((
        "model",
        format!(
            "{}: {:.2} bits a weight, {} ({})",
            model.name,
            model.bits_per_weight,
            size(model.weights_bytes),
            formats.join(", ")
        ),
    ));
    if let Some(device) = &machine.device {
        facts.push(("device", device.clone()));
    }
    let cpu = machine.cpu.as_deref().unwrap_or("unknown");
    facts.push(("cpu", format!("{cpu}, {}, {} kernels", machine.os, machine.kernels)));
    let mut threads = format!("{} ({}), {} keys and values", conditions.threads, machine.cores, conditions.kv);
    if let Some(cpus) = &conditions.pinned_cpus {
        let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
        let _ = write!(threads, ", pinned to CPU {}", cpus.join(", "));
    }
    facts.push(("threads", threads));
    facts.push(("program", format!("cactus {}, {} build for {}, {}", build.version, build.profile, build.target, report.date)));
    let pause = if conditions.pause_s > 0.0 { format!(", pauses of {} s", conditions.pause_s) } else { String::new() };
    facts.push((
        "method",
        format!(
            "{} after a warm-up{pause}; forced tokens (seed {}), no sampling, ended by {}",
            counted(conditions.runs, "run"),
            conditions.seed,
            report.llm.finish_reason
        ),
    ));
    if let Some(memory) = report.memory {
        facts.push((
            "memory",
            format!(
                "{} at most, {} steady, with {} positions filled",
                size(memory.peak_bytes),
                size(memory.steady_bytes),
                memory.positions
            ),
        ));
    }
    if let Some(read) = report.read {
        facts.push((
            "read limit",
            format!("{:.1} GB/s, {} threads over {}", read.bytes_per_second / 1e9, read.threads, size(read.buffer_bytes)),
        ));
    }
    if let Some(governor) = &machine.governor {
        facts.push(("governor", governor.clone()));
    }
    let (before, after) = (&machine.before, &machine.after);
    let both = |name, read: &dyn Fn(&Sensors) -> Option<String>| Some((name, format!("{} to {}", read(before)?, read(after)?)));
    facts.extend(both("temperature", &|sensors| Some(format!("{:.1} C", sensors.hottest_c()?))));
    facts.extend(both("frequency", &|sensors| Some(format!("{:.0} MHz", sensors.frequency_mhz?))));
    if let (Some(before), Some(after)) = (before.throttle_count, after.throttle_count) {
        facts.push(("throttled", format!("{} times", after.saturating_sub(before))));
    }
    facts
}

/// Tables, each with a line of titles.
fn tables(report: &Report) -> Vec<Vec<Vec<String>>> {
    let titles = |titles: &[&str]| titles.iter().map(|title| (*title).to_owned()).collect::<Vec<_>>();
    let mut all = Vec::new();
    let mut table = vec![titles(&["measurement", "median", "min", "max", "MAD", "unit"])];
    for m in &report.llm.measurements {
        let s = &m.spread;
        let cells = [s.median, s.min, s.max, s.mad].map(number);
        table.push([m.name.clone()].into_iter().chain(cells).chain([m.unit.clone()]).collect());
    }
    all.push(table);
    let mut table = vec![titles(&["reads", "weights/token", "cache/token", "GB/s", "of limit"])];
    for m in &report.llm.measurements {
        let Some(read) = m.read else { continue };
        let share = read.share_of_limit.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", 100.0 * share));
        let bytes = |bytes: f64| format!("{:.2} MB", bytes / 1e6);
        let rate = format!("{:.2}", read.bytes_per_second / 1e9);
        table.push(vec![m.name.clone(), bytes(read.weight_bytes_per_token), bytes(read.cache_bytes_per_token), rate, share]);
    }
    all.push(table);
    if let Some(against) = &report.against {
        let bits = against.bits_per_weight.map_or_else(String::new, |bits| format!(" ({bits:.2} bits)"));
        let title = format!("against {} {}{bits}", against.program, against.model);
        let mut table = vec![vec![title, "ours".into(), "theirs".into(), "MAD".into(), "ours/theirs".into()]];
        for r in &against.results {
            let ratio = format!("{:.3}", r.ratio);
            table.push(vec![r.name.clone(), number(r.ours), number(r.theirs), number(r.spread.mad), ratio]);
        }
        all.push(table);
    }
    if let Some(compared) = &report.compared {
        let title = format!("against the result of {}", compared.date);
        let mut table = vec![vec![title, "old".into(), "new".into(), "new/old".into(), "unit".into()]];
        for r in &compared.ratios {
            table.push(vec![r.name.clone(), number(r.old), number(r.new), format!("{:.3}", r.ratio), r.unit.clone()]);
        }
        all.push(table);
    }
    all
}

/// `1 run`, `2 runs`.
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Four digits, or all before the point.
fn number(x: f64) -> String {
    let digits = match x.abs() {
        x if x >= 1000.0 => 0,
        x if x >= 100.0 => 1,
        x if x >= 10.0 => 2,
        _ => 3,
    };
    format!("{x:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_cells_are_written() {
        assert_eq!([1234.56, 123.456, 12.3456, 0.12345].map(number), ["1235", "123.5", "12.35", "0.123"]);
        assert_eq!(quoted("a"), "a");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
