//! `cactus list`: the converted models in the cache.

use super::Outcome;
use super::terminal::{self, Terminal};
use cactus::error::Error;
use cactus::hub::cache;
use cactus::model::Bundle;
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
    bits: u32,
    bits_per_weight: f64,
    bytes: u64,
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
                json!({ "name": r.name, "family": r.family, "bits": r.bits, "bits_per_weight": r.bits_per_weight, "bytes": r.bytes, "path": r.path })
            })
            .collect();
        return terminal::print(&format!("{}\n", serde_json::Value::from(rows)));
    }
    if rows.is_empty() {
        Terminal::new(false).note("no models yet; `cactus run` fetches a small one");
        return Ok(());
    }
    let widest = rows.iter().map(|r| r.name.chars().count()).max().unwrap_or(0).max(5);
    let mut text = format!("{:widest$}  {:8} {:>4} {:>6} {:>10}  {}\n", "model", "family", "bits", "total", "size", "path");
    for r in &rows {
        let size = format!("{:.1} MB", r.bytes as f64 / 1e6);
        text += &format!(
            "{:widest$}  {:8} {:>4} {:6.2} {size:>10}  {}\n",
            r.name,
            r.family,
            r.bits,
            r.bits_per_weight,
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
    let sizes = std::fs::read_dir(&path).into_iter().flatten().flatten().filter_map(|e| e.metadata().ok());
    let bytes = sizes.map(|m| m.len()).sum();
    Ok(Row {
        name: manifest.source.name,
        family: manifest.family,
        bits: manifest.quantiser.bits,
        bits_per_weight: manifest.quantiser.bits_per_weight,
        bytes,
        path,
    })
}
