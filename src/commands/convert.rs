//! `cactus convert`: a checkpoint to a bundle, with a report.

use super::Outcome;
use super::model_options::{self, Calibrate, ModelArgs, Wanted};
use super::terminal::{self, Terminal};
use cactus::error::Error;
use cactus::model::Bundle;
use cactus::model::convert::{Report, TensorReport};
use cactus::model::families;
use cactus::model::import::Checkpoint;
use cactus::quant::{Bits, Code, Format};
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Folder to write (default: the cache, where `cactus run` finds it)
    dir: Option<PathBuf>,
    /// Bytes that the weights may take, such as 500M or 1.5G; chooses the bits
    #[arg(long, value_parser = parse_size, conflicts_with = "bits")]
    size: Option<u64>,
    /// Bits of the embedding table and the output head (default: as --bits; 8 below that with --calibrate none)
    #[arg(long, value_parser = ["1", "2", "3", "4", "8", "16"])]
    head_bits: Option<String>,
    /// What rounding below 8 bits is fitted to: shipped (text that comes with the program), generated (text that
    /// the model writes itself), auto (both), none, or a file: text, or .jsonl with {"messages": [...]} or
    /// {"text": ...} a line
    #[arg(long, default_value = "auto", value_name = "auto|shipped|generated|none|FILE")]
    calibrate: String,
    /// Tokens of text that rounding is fitted to
    #[arg(long, default_value_t = model_options::SAMPLE_TOKENS)]
    calibrate_tokens: usize,
    /// How codes of 1 to 4 bits become levels: trellis (smaller error) or scalar (fewer instructions)
    #[arg(long, default_value = "trellis", value_parser = ["trellis", "scalar"])]
    code: String,
    /// Round weights that are quantised in the checkpoint (GGUF Q4_0 and Q8_0, official CQ) again instead of keeping them
    #[arg(long)]
    requantise: bool,
    /// How far weights make up for the errors of layers before them, 0 to 1, or off
    #[arg(long, default_value_t = model_options::SHARE.to_string(), value_parser = parse_share, hide = true)]
    sequential: String,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// No progress, no report
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: &Args) -> Outcome {
    let mut terminal = Terminal::new(args.quiet);
    if Bundle::is_bundle(Path::new(args.model.name())) {
        return Err(Error::usage(format!("{} is converted already", args.model.name()))
            .with_hint("give the checkpoint that it was made from")
            .into());
    }
    let found = model_options::find(args.model.name(), &mut terminal)?;
    let bits = match args.size {
        Some(size) => bits_for(&found.path, size)?,
        None => args.model.bits_for(&found),
    };
    let target = match &args.dir {
        Some(dir) => dir.clone(),
        None => model_options::cached_bundle(args.model.name(), &found, bits)?,
    };
    let begin = std::time::Instant::now();
    let head_bits = args.head_bits.as_deref().and_then(|b| b.parse().ok());
    let wanted = Wanted {
        bits,
        head_bits,
        code: if args.code == "scalar" { Code::Scalar } else { Code::Trellis },
        calibrate: Calibrate::from(args.calibrate.as_str()),
        tokens: args.calibrate_tokens,
        sequential: args.sequential.parse().ok(),
        keep: !args.requantise,
    };
    let report = model_options::convert(&found, &target, &wanted, &mut terminal)?;
    let seconds = begin.elapsed().as_secs_f64();
    if args.json {
        terminal::print(&format!("{}\n", as_json(&report, &target, seconds)))
    } else if args.quiet {
        Ok(())
    } else {
        terminal::print(&as_table(&report, &target, seconds))
    }
}

/// `500M`, `1.5G`, or bytes.
fn parse_size(text: &str) -> Result<u64, String> {
    let (number, unit) = match text.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let factor = match unit.to_ascii_uppercase().trim_end_matches('B') {
        "" => 1.0,
        "K" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        _ => return Err("a number of bytes, or one with K, M or G behind it".to_owned()),
    };
    match number.trim().parse::<f64>() {
        Ok(number) if number > 0.0 && number * factor < 1e15 => Ok((number * factor) as u64),
        _ => Err("a number of bytes, or one with K, M or G behind it".to_owned()),
    }
}

/// The most bits a weight that fit `size` bytes.
fn bits_for(checkpoint: &Path, size: u64) -> Result<Bits, Error> {
    let plan = families::plan(&Checkpoint::open(checkpoint)?)?;
    let weights: usize = plan.tensors.iter().map(|t| t.rows * t.cols).sum();
    let bits = (800.0 * size as f64 / weights as f64).floor() / 100.0;
    Bits::new(bits.min(8.0)).ok_or_else(|| {
        Error::usage(format!("{size} bytes are {bits:.2} bits for each of {weights} weights; at least 1 is needed"))
    })
}

fn parse_share(text: &str) -> Result<String, String> {
    match text.parse::<f32>() {
        _ if text == "off" => {}
        Ok(share) if (0.0..=1.0).contains(&share) => {}
        _ => return Err("a number from 0 to 1, or off".to_owned()),
    }
    Ok(text.to_owned())
}

fn as_table(report: &Report, target: &Path, seconds: f64) -> String {
    let mut text = format!("{:28} {:>16} {:>6} {:>8} {:>9}", "tensor", "shape", "format", "bits", "error");
    // Expected divergence, where bits were chosen by it.
    let mixed = report.tensors.iter().any(|t| t.expected_kl.is_some());
    text += if mixed { "  expected KL\n" } else { "\n" };
    for t in &report.tensors {
        let shape = format!("{} x {}", t.rows, t.cols);
        let kl = t.expected_kl.map_or(String::new(), |kl| format!("  {kl:11.5}"));
        let padded = if t.padded { "  padded to whole groups" } else { "" };
        let kept = if t.kept { "  kept" } else { "" };
        let error = t.error.relative();
        let _ = writeln!(
            text,
            "{:28} {shape:>16} {:>6} {:8.3} {error:9.5}{kl}{padded}{kept}",
            t.name,
            t.format.to_string(),
            t.bits_per_weight()
        );
    }
    let matrices = report.tensors.iter().filter(|t| t.format != Format::F32);
    let kept: Vec<&TensorReport> = report.tensors.iter().filter(|t| t.kept).collect();
    if !kept.is_empty() {
        let named: BTreeSet<String> = kept.iter().map(|t| t.format.to_string()).collect();
        let (named, count) = (named.into_iter().collect::<Vec<_>>().join(", "), matrices.count());
        let error = kept.iter().map(|t| t.error.relative()).fold(0.0, f64::max);
        let loss = if error == 0.0 { "without loss".to_owned() } else { format!("codebooks to within {:.2} %", 100.0 * error) };
        let _ = writeln!(text, "{} of {count} matrices kept as the checkpoint has them ({named}), {loss}", kept.len());
    }
    if !report.rounded_again.is_empty() {
        let _ = writeln!(text, "official matrices rounded again: {}", report.rounded_again.join(", "));
    }
    let _ = writeln!(
        text,
        "total: {} weights, {:.1} MB, {:.3} bits a weight, relative error {:.5}, {seconds:.1} s\n{}",
        report.weights(),
        report.bytes() as f64 / 1e6,
        report.bits_per_weight(),
        report.relative_error(),
        target.display()
    );
    text
}

fn as_json(report: &Report, target: &Path, seconds: f64) -> serde_json::Value {
    let tensor = |t: &TensorReport| {
        json!({
            "name": t.name, "rows": t.rows, "cols": t.cols, "format": t.format, "bytes": t.bytes,
            "bits_per_weight": t.bits_per_weight(), "relative_error": t.error.relative(), "padded": t.padded,
            "kept": t.kept, "expected_kl": t.expected_kl,
        })
    };
    json!({
        "path": target, "family": report.family, "weights": report.weights(), "bytes": report.bytes(),
        "bits_per_weight": report.bits_per_weight(), "relative_error": report.relative_error(), "seconds": seconds,
        "rounded_again": report.rounded_again, "tensors": report.tensors.iter().map(tensor).collect::<Vec<_>>(),
    })
}
