//! What is typed: one file per subcommand. Only this room prints, reads flags and sets exit codes.

mod batch;
mod benchmark;
mod completions;
mod convert;
mod corpus;
mod doctor;
mod download;
mod embed;
mod eval;
mod export;
mod list;
mod logits;
mod machine;
mod model_options;
mod rm;
mod run;
mod search;
mod serve;
mod settings;
mod show;
mod stats;
mod terminal;

use cactus::error::Error;
use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;
use std::time::Instant;

/// Convert and run language models on an ordinary CPU.
#[derive(Parser)]
#[command(name = "cactus", version, about, max_term_width = 100, after_help = model_options::ENVIRONMENT)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer a prompt, or chat when there is none
    Run(Box<run::Args>),
    /// Answer over HTTP, as clients of OpenAI's API expect it
    Serve(serve::Args),
    /// Convert a checkpoint to a bundle of small weights
    Convert(convert::Args),
    /// Write the weights of a bundle as an ordinary Hugging Face checkpoint
    Export(export::Args),
    /// Fetch a checkpoint and print where it is
    Download(download::Args),
    /// List the converted models on this machine
    List(list::Args),
    /// Say what a model is: sizes, bits of each tensor, chat template, licence
    Show(show::Args),
    /// Look for models on the hub
    Search(search::Args),
    /// Remove converted models
    Rm(rm::Args),
    /// Turn texts into vectors, to compare them by what they mean
    Embed(embed::Args),
    /// Measure what fewer bits cost: distance to a reference model on a text, right answers on tasks
    Eval(eval::Args),
    /// Measure speed and memory, so that anyone can repeat it
    Benchmark(benchmark::Args),
    /// Write the logits for given token ids, to compare with other engines
    Logits(logits::Args),
    /// Show what is in force: settings, CPU, memory, caches, and what would make it faster
    Doctor(doctor::Args),
    /// Print a shell completion script
    #[command(hide = true)]
    Completions(completions::Args),
    /// Print the manual page
    #[command(hide = true)]
    Man,
}

/// Runs the program.
pub fn main() -> ExitCode {
    let started = Instant::now();
    let cli = Cli::parse();
    let result = dispatch(cli.command, started);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Reported(code)) => ExitCode::from(code),
        Err(Failure::Error(error)) => {
            terminal::print_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn dispatch(command: Command, started: Instant) -> Outcome {
    // The doctor reports faults of the settings himself; the others here need none.
    if !matches!(command, Command::Doctor(_) | Command::List(_) | Command::Completions(_) | Command::Man) {
        settings::load()?;
    }
    match command {
        Command::Run(args) => run::run(&args, started),
        Command::Serve(args) => serve::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Download(args) => download::run(&args),
        Command::List(args) => list::run(&args),
        Command::Show(args) => show::run(&args),
        Command::Search(args) => search::run(&args),
        Command::Rm(args) => rm::run(&args),
        Command::Embed(args) => embed::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Benchmark(args) => benchmark::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => completions::run(&args, &mut Cli::command()),
        Command::Man => completions::man(Cli::command()),
    }
}

/// Why a command did not end well.
enum Failure {
    Error(Error),
    /// Everything has been said already (a JSON error object, an interrupted answer, a closed pipe).
    Reported(u8),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Error(error)
    }
}

type Outcome<T = ()> = Result<T, Failure>;
