//! `cactus rm`: converted models, and on demand their checkpoints, off the disk.

use super::Outcome;
use super::terminal::{self, Terminal};
use cactus::error::{Error, Result};
use cactus::hub::{self, cache};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// Hub names, aliases, paths of the checkpoints, or folders as `cactus list` prints them
    #[arg(required = true)]
    models: Vec<String>,
    /// The bundle with these bits (16 for the unquantised one)
    #[arg(long, conflicts_with = "all_bits")]
    bits: Option<String>,
    /// All bundles of the model
    #[arg(long)]
    all_bits: bool,
    /// The downloaded checkpoint as well
    #[arg(long)]
    checkpoint: bool,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
    /// Only errors
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: &Args) -> Outcome {
    let terminal = Terminal::new(args.quiet);
    // Everything is looked up before anything is removed.
    let mut folders = Vec::new();
    for model in &args.models {
        folders.extend(bundles(args, model)?);
        if args.checkpoint && (Path::new(model).exists() || folder(model)?.is_some()) {
            return Err(Error::usage(format!("{model} is no hub model, so it has no downloaded checkpoint"))
                .with_hint("leave out --checkpoint, or give the hub name")
                .into());
        }
    }
    folders.sort();
    folders.dedup();
    let mut what: Vec<String> =
        folders.iter().map(|folder| format!("{} ({:.1} MB)", folder.display(), cache::size(folder) as f64 / 1e6)).collect();
    if args.checkpoint {
        what.extend(args.models.iter().map(|model| format!("the downloaded checkpoint of {model}")));
    }
    if !args.yes && !terminal::confirm(&format!("remove {}?", what.join(", ")))? {
        terminal.note("nothing was removed");
        return Ok(());
    }
    let mut freed = 0;
    for folder in &folders {
        freed += cache::remove_bundle(folder)?;
    }
    if args.checkpoint {
        for model in &args.models {
            freed += hub::remove_checkpoint(model, &mut |event| {
                if let hub::Event::Note(text) = event {
                    terminal.note(text)
                }
            })?;
        }
    }
    let count = match folders.len() {
        1 => "1 converted model".to_owned(),
        n => format!("{n} converted models"),
    };
    let and = if args.checkpoint { " and the checkpoint" } else { "" };
    terminal.note(&format!("removed {count}{and}; {:.1} MB are free again", freed as f64 / 1e6));
    Ok(())
}

/// The bundles that `model` and the options mean.
fn bundles(args: &Args, model: &str) -> Result<Vec<PathBuf>> {
    if let Some(folder) = folder(model)? {
        return Ok(vec![folder]);
    }
    let there = cache::bundles_of(&cache::name_of(model)?)?;
    let labels: Vec<&str> = there.iter().map(|(label, _)| label.as_str()).collect();
    let list = labels.join(", ");
    let wanted: Vec<PathBuf> = match &args.bits {
        Some(bits) => {
            let label = if bits == "16" { "f16".to_owned() } else { format!("cq{bits}") };
            there.iter().filter(|(have, _)| *have == label).map(|(_, folder)| folder.clone()).collect()
        }
        None if args.all_bits || there.len() <= 1 => there.iter().map(|(_, folder)| folder.clone()).collect(),
        None => {
            return Err(Error::usage(format!("{model} is here as {list}")).with_hint("say which with --bits, or give --all-bits"));
        }
    };
    if wanted.is_empty() && !args.checkpoint {
        let bits = args.bits.as_ref().map_or(String::new(), |bits| format!(" with {bits} bits"));
        let hint = if there.is_empty() { "`cactus list` shows what is here".to_owned() } else { format!("it is here as {list}") };
        return Err(Error::not_found(format!("no converted {model}{bits} on this machine")).with_hint(hint));
    }
    Ok(wanted)
}

/// The bundle whose folder in the cache was named.
fn folder(model: &str) -> Result<Option<PathBuf>> {
    let root = cache::bundles()?;
    let typed = Path::new(model);
    let inside = |folder: &Path| {
        let real = folder.canonicalize().ok()?;
        let name = real.file_name()?.to_str()?;
        let visible = !name.starts_with('.') && real.is_dir();
        (visible && real.parent()? == root.canonicalize().ok()?).then(|| root.join(name))
    };
    if let Some(folder) = inside(typed) {
        return Ok(Some(folder));
    }
    if typed.join("cactus.json").is_file() {
        return Err(Error::usage(format!("{model} is a bundle outside the cache; remove it yourself")));
    }
    let plain = typed.components().count() == 1 && !typed.exists();
    Ok(if plain { inside(&root.join(typed)) } else { None })
}
