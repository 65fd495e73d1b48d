//! `cactus download`: a checkpoint into the cache, nothing more.

use super::Outcome;
use super::model_options;
use super::terminal::{self, Terminal};
use cactus::error::Error;
use cactus::hub::{Request, Source, catalog};

#[derive(clap::Args)]
pub struct Args {
    /// A hub name (owner/name) or an alias; default: a small starter model
    model: Option<String>,
    /// Branch, tag or commit (default: main)
    #[arg(long)]
    revision: Option<String>,
    /// No progress; only the path and errors
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: &Args) -> Outcome {
    let model = args.model.as_deref().unwrap_or(catalog::STARTER.repo);
    let name = match &args.revision {
        Some(_) if Request::parse(model).revision.is_some() => {
            return Err(Error::usage(format!("{model} names a revision already")).with_hint("leave out --revision").into());
        }
        Some(revision) => format!("{model}@{revision}"),
        None => model.to_owned(),
    };
    let mut terminal = Terminal::new(args.quiet);
    let found = model_options::find(&name, &mut terminal)?;
    match found.source {
        Source::Cache => terminal.note("it is here already"),
        Source::Local => terminal.note("it is a local path; there is nothing to download"),
        Source::Hub | Source::Package => {}
    }
    terminal::print(&format!("{}\n", found.path.display()))
}
