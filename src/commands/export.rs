//! `cactus export`: the weights of a bundle as an ordinary checkpoint, for other programs.

use super::Outcome;
use super::model_options::ModelArgs;
use super::terminal::{self, Terminal};
use cactus::model::Bundle;
use cactus::model::export::{self, Event, Options};
use cactus::quant::Bits;
use cactus::quant::Format;
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A bundle, or the name of a model (which is converted first if it is not yet)
    model: String,
    /// Folder to write
    dir: PathBuf,
    /// Type of all tensors [default: as stored, and f16 for what is quantised]
    #[arg(long, value_parser = ["f16", "bf16", "f32"])]
    dtype: Option<String>,
    /// Bits of the bundle, when a model is named: 1 to 8, such as 4 or 3.26, or 16 [default: 4]
    #[arg(long)]
    bits: Option<Bits>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// No progress, no report
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: &Args) -> Outcome {
    let mut terminal = Terminal::new(args.quiet);
    let model = ModelArgs { model: Some(args.model.clone()), bits: args.bits };
    let bundle = Bundle::open(&model.bundle(&mut terminal)?)?;
    let dtype = args.dtype.as_deref().map(|name| match name {
        "f16" => Format::F16,
        "bf16" => Format::BF16,
        _ => Format::F32,
    });
    terminal::catch_interrupts();
    let report = export::export(&bundle, &args.dir, &Options { dtype, shard_bytes: export::SHARD_BYTES }, &mut |event| {
        match event {
            Event::Start { bytes } => terminal.start("exporting", Some(bytes), true),
            Event::Advance(bytes) => terminal.advance(bytes),
        }
        terminal::not_interrupted()
    });
    terminal.finish();
    let report = report?;
    if args.json {
        let object = json!({ "path": args.dir, "tensors": report.tensors, "files": report.files, "bytes": report.bytes });
        terminal::print(&format!("{object}\n"))
    } else if args.quiet {
        Ok(())
    } else {
        let (tensors, megabytes) = (report.tensors, report.bytes as f64 / 1e6);
        terminal::print(&format!("{tensors} tensors, {megabytes:.1} MB\n{}\n", args.dir.display()))
    }
}
