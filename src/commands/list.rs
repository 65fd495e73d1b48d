//! `cactus list`: the converted models in the cache.

use super::Outcome;
use super::terminal::{self, Terminal};
use cactus::error::Error;
use cactus::hub::cache;
use cactus::model::Bundle;
use cactus::quant::Bits;
use jiff::Timestamp;
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

struct Row {
    name: String,
    family: String,
    bits: Bits,
    bits_per_weight: f64,
    bytes: u64,
    revision: Option<String>,
    last_used: Option<Timestamp>,
    path: PathBuf,
}

pub fn run(args: &Args) -> Outcome {
    let folder = cache::bundles()?;
    let mut rows = Vec::new();
    match std::fs::read_dir(&folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(Error::io("read", &folder, &e).into()),
        Ok(entries) => {
            for path in entries.flatten().map(|e| e.path()).filter(|p| is_visible(p) && Bundle::is_bundle(p)) {
                match row(path) {
                    Ok(row) => rows.push(row),
                    Err(e) => Terminal::new(false).note(&format!("warning: {e}")),
                }
            }
        }
    }
    rows.sort_by(|a, b| (&a.name, a.bits).cmp(&(&b.name, b.bits)));
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|r| {
                json!({
                    "name": r.name, "family": r.family, "bits": r.bits, "bits_per_weight": r.bits_per_weight,
                    "bytes": r.bytes, "path": r.path, "revision": r.revision,
                    "last_used": r.last_used.map(|time| time.to_string()),
                })
            })
            .collect();
        return terminal::print(&format!("{}\n", serde_json::Value::from(rows)));
    }
    if rows.is_empty() {
        Terminal::new(false).note("no models yet; `cactus run` fetches a small one");
        return Ok(());
    }
    let widest = rows.iter().map(|r| r.name.chars().count()).max().unwrap_or(0).max(5);
    let mut text = format!(
        "{:widest$}  {:8} {:>4} {:>6} {:>10}  {:14}  {}\n",
        "model", "family", "bits", "total", "size", "last used", "path"
    );
    for r in &rows {
        let size = format!("{:.1} MB", r.bytes as f64 / 1e6);
        text += &format!(
            "{:widest$}  {:8} {:>4} {:6.2} {size:>10}  {:14}  {}\n",
            r.name,
            r.family,
            r.bits,
            r.bits_per_weight,
            ago(r.last_used, Timestamp::now()),
            r.path.display()
        );
    }
    terminal::print(&text)
}

/// Conversions in progress have names that begin with a dot.
fn is_visible(path: &Path) -> bool {
    path.file_name().is_some_and(|n| !n.to_string_lossy().starts_with('.'))
}

fn row(path: PathBuf) -> cactus::error::Result<Row> {
    let manifest = Bundle::read_manifest(&path)?;
    let last_used = cache::last_used(&path).and_then(|time| Timestamp::try_from(time).ok());
    Ok(Row {
        name: manifest.source.name,
        family: manifest.family,
        bits: manifest.quantiser.bits,
        bits_per_weight: manifest.quantiser.bits_per_weight,
        bytes: cache::size(&path),
        revision: manifest.source.revision,
        last_used,
        path,
    })
}

/// How long before `now` something was, in the largest whole unit.
fn ago(time: Option<Timestamp>, now: Timestamp) -> String {
    let Some(time) = time else { return "-".to_owned() };
    let seconds = now.as_second().saturating_sub(time.as_second()).max(0);
    let units = [(86_400, "day"), (3600, "hour"), (60, "minute")];
    match units.iter().find(|(length, _)| seconds >= *length) {
        None => "just now".to_owned(),
        Some((length, unit)) if seconds / length == 1 => format!("1 {unit} ago"),
        Some((length, unit)) => format!("{} {unit}s ago", seconds / length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_the_largest_unit() {
        let at = |second| Timestamp::from_second(second).ok();
        let now = at(1_000_000).unwrap();
        let told = |second| ago(at(second), now);
        assert_eq!(
            (told(999_990), told(999_940), told(1_000_060)),
            ("just now".into(), "1 minute ago".into(), "just now".into())
        );
        assert_eq!((told(1_000_000 - 7200), told(1_000_000 - 3 * 86_400)), ("2 hours ago".into(), "3 days ago".into()));
        assert_eq!(ago(None, now), "-");
    }
}
