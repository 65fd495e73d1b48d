//! `cactus download`: a checkpoint into the cache, nothing more.

use super::Outcome;
use super::model_options;
use super::terminal::{self, Terminal};
use cactus::error::{Error, Result};
use cactus::hub::{self, Request, Source, catalog};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A hub name (owner/name) or an alias; default: a small starter model
    model: Option<String>,
    /// Branch, tag or commit (default: main)
    #[arg(long)]
    revision: Option<String>,
    /// Fetch the official prebuilt bundle with so many bits (such as 4 or 3.26) instead, if there is one: an
    /// archive, whose folder `cactus convert` reads once it is unpacked
    #[arg(long, value_name = "BITS", conflicts_with = "revision")]
    official: Option<f64>,
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
    if let Some(bits) = args.official {
        let path = official(model, bits, &mut terminal)?;
        return terminal::print(&format!("{}\n", path.display()));
    }
    let found = model_options::find(&name, &mut terminal)?;
    match found.source {
        Source::Cache => terminal.note("it is here already"),
        Source::Local => terminal.note("it is a local path; there is nothing to download"),
        Source::Hub | Source::Package => {}
    }
    terminal::print(&format!("{}\n", found.path.display()))
}

/// Fetches an official bundle; the path of its archive.
fn official(model: &str, bits: f64, terminal: &mut Terminal) -> Result<PathBuf> {
    let found = hub::find_official(model, &mut |event| model_options::show(event, terminal))?
        .ok_or_else(|| Error::not_found(format!("there are no official bundles of {model}")))?;
    let path = hub::fetch_official(&found, bits, &mut |event| model_options::show(event, terminal));
    terminal.finish();
    path
}
