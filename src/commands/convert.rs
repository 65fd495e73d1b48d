//! `cactus convert`: a checkpoint to a bundle, with a report.

use super::Outcome;
use super::model_options::{self, Calibrate, ModelArgs, Wanted};
use super::terminal::{self, Terminal};
use cactus::error::Error;
use cactus::model::Bundle;
use cactus::model::convert::Report;
use cactus::quant::Code;
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Folder to write (default: the cache, where `cactus run` finds it)
    dir: Option<PathBuf>,
    /// Bits of the embedding table and the output head (default: 8 below 8 bits, otherwise as --bits)
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
    let bits = args.model.bits();
    if Bundle::is_bundle(Path::new(args.model.name())) {
        return Err(Error::usage(format!("{} is converted already", args.model.name()))
            .with_hint("give the checkpoint that it was made from")
            .into());
    }
    let found = model_options::find(args.model.name(), &mut terminal)?;
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

fn parse_share(text: &str) -> Result<String, String> {
    match text.parse::<f32>() {
        _ if text == "off" => {}
        Ok(share) if (0.0..=1.0).contains(&share) => {}
        _ => return Err("a number from 0 to 1, or off".to_owned()),
    }
    Ok(text.to_owned())
}

fn as_table(report: &Report, target: &Path, seconds: f64) -> String {
    let mut text = format!("{:28} {:>16} {:>6} {:>8} {:>9}\n", "tensor", "shape", "format", "bits", "error");
    for t in &report.tensors {
        let shape = format!("{} x {}", t.rows, t.cols);
        let padded = if t.padded { "  padded to whole groups" } else { "" };
        let error = t.error.relative();
        let _ = writeln!(
            text,
            "{:28} {shape:>16} {:>6} {:8.3} {error:9.5}{padded}",
            t.name,
            t.format.to_string(),
            t.bits_per_weight()
        );
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
    let tensor = |t: &cactus::model::convert::TensorReport| {
        json!({
            "name": t.name, "rows": t.rows, "cols": t.cols, "format": t.format, "bytes": t.bytes,
            "bits_per_weight": t.bits_per_weight(), "relative_error": t.error.relative(), "padded": t.padded,
        })
    };
    json!({
        "path": target, "family": report.family, "weights": report.weights(), "bytes": report.bytes(),
        "bits_per_weight": report.bits_per_weight(), "relative_error": report.relative_error(), "seconds": seconds,
        "tensors": report.tensors.iter().map(tensor).collect::<Vec<_>>(),
    })
}
