//! `cactus eval`: what do fewer bits cost on one's own text and tasks?

mod likeness;
mod report;
mod tasks;

use super::Outcome;
use super::model_options::{EngineArgs, ModelArgs, memory_warning};
use super::terminal::{self, Terminal};
use cactus::engine::Engine;
use cactus::error::{Error, Result};
use cactus::model::Bundle;
use cactus::quant::Bits;
use likeness::{Likeness, Material};
use report::Row;
use std::path::{Path, PathBuf};
use tasks::Questions;

#[derive(clap::Args)]
pub struct Args {
    /// Models to judge: folders, .gguf files, bundles, hub names (owner/name) or aliases
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// Bits per weight of the models that are no bundles: 1, 2, 3, 4, 8, or 16 for no quantisation [default: 4]
    #[arg(long)]
    bits: Option<Bits>,
    /// The model to hold them against
    #[arg(long, value_name = "REF")]
    against: Option<String>,
    /// Bits per weight of REF if it is no bundle [default: 16]
    #[arg(long, value_name = "BITS", requires = "against")]
    against_bits: Option<Bits>,
    #[command(flatten)]
    material: MaterialArgs,
    /// Keep what REF says in this file [default: a file in the cache folder for each REF and text]
    #[arg(long, value_name = "FILE", requires = "against")]
    reference_cache: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print a JSON object, or an array of them if there are several models
    #[arg(long)]
    json: bool,
    /// Only results and errors
    #[arg(short, long)]
    quiet: bool,
}

/// What models are judged by.
#[derive(clap::Args)]
#[group(required = true, multiple = true)]
struct MaterialArgs {
    /// Score a text: the second half of every chunk of --ctx tokens, as llama-perplexity does
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    text: Option<PathBuf>,
    /// Score the assistant's turns of chats: a JSON object a line, {"messages": [{"role", "content"}, ...]}
    #[arg(long, value_name = "FILE")]
    chat: Option<PathBuf>,
    /// Only the first N chunks of the text, or chats
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// Tokens of a chunk [default: 512], or of a chat at most [default: 4096, or the model's limit]
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<usize>,
    /// Ask questions: a JSON object a line with a prompt and what is right; see docs/evaluation.md
    #[arg(long, value_name = "FILE")]
    task: Option<PathBuf>,
    /// Answer prompts, a JSON object a line, and count answers that are loops or too short
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Complete the prompts as they stand, without the chat template
    #[arg(long)]
    raw: bool,
    /// Tokens of an answer at most
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Reasoning before the answer: on, off, or auto: as the model does by itself
    #[arg(long, default_value = "auto", value_parser = ["auto", "on", "off"])]
    think: String,
    /// Run the code that models write, to test it. It runs as you, with limits but not in a sandbox
    #[arg(long)]
    allow_code: bool,
    /// Seconds that the test of one answer may take
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    test_timeout: u32,
}

pub fn run(args: &Args) -> Outcome {
    let likeness = Material::open(&args.material)?;
    let questions = Questions::open(&args.material)?;
    if likeness.is_none() && questions.is_none() {
        let hint = "give --text FILE, --chat FILE, --task FILE or --prompts FILE";
        return Err(Error::usage("there is nothing to judge by").with_hint(hint).into());
    }
    let mut terminal = Terminal::new(args.quiet);
    terminal::catch_interrupts();
    // Everything is found or converted before the first is run.
    let reference =
        args.against.as_ref().map(|name| Subject::find(name, args.against_bits.or(Some(Bits::SIXTEEN)), &mut terminal));
    let reference = reference.transpose()?;
    let models: Vec<Subject> =
        args.models.iter().map(|name| Subject::find(name, args.bits, &mut terminal)).collect::<Result<_>>()?;

    let (mut kept, mut answers) = (None, None);
    if let Some(subject) = &reference {
        if let Some(material) = &likeness {
            let engine = subject.load(&args.engine, Some(material.context(&subject.bundle)?), &terminal)?;
            kept = Some(Likeness::prepare(&engine, subject, material, args.reference_cache.as_deref(), &mut terminal)?);
        }
        if let Some(questions) = &questions {
            let engine = subject.load(&args.engine, None, &terminal)?;
            answers = Some(questions.answer(&engine, subject, &mut terminal)?);
        }
    }
    let mut rows = Vec::new();
    for subject in &models {
        let mut row = Row::new(subject, reference.as_ref())?;
        if let Some(material) = &likeness {
            let engine = subject.load(&args.engine, Some(material.context(&subject.bundle)?), &terminal)?;
            row.summary = Some(likeness::judge(&engine, subject, material, kept.as_ref(), &mut terminal)?);
        }
        if let Some(questions) = &questions {
            let engine = subject.load(&args.engine, None, &terminal)?;
            row.score = Some(questions.answer(&engine, subject, &mut terminal)?.score(answers.as_ref()));
        }
        rows.push(row);
    }
    terminal::print(&if args.json { report::json(&rows) } else { report::table(&rows) })
}

/// A model that is judged or held against.
struct Subject {
    /// As it was typed.
    name: String,
    bundle: PathBuf,
}

impl Subject {
    /// Finds or makes the bundle. `bits` are for what is no bundle yet; `None`: those of the settings.
    fn find(name: &str, bits: Option<Bits>, terminal: &mut Terminal) -> Result<Subject> {
        let bits = bits.filter(|_| !Bundle::is_bundle(Path::new(name)));
        Ok(Subject { name: name.to_owned(), bundle: ModelArgs { model: Some(name.to_owned()), bits }.bundle(terminal)? })
    }

    fn load(&self, engine: &EngineArgs, context: Option<usize>, terminal: &Terminal) -> Result<Engine> {
        let engine = EngineArgs { context: context.or(engine.context), ..engine.clone() }.load(&self.bundle)?;
        if let Some(warning) = memory_warning([&engine]) {
            terminal.note(&warning);
        }
        Ok(engine)
    }
}
