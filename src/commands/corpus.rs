//! `--corpus` and `--embedding-model`: the folder that answers come from, and the model that finds passages in it.

use super::model_options::{MachineArgs, ModelArgs};
use super::terminal::{self, Terminal};
use cactus::engine::Embedder;
use cactus::engine::retrieve::{self, Folder, Reading};
use cactus::error::{Error, Result};
use cactus::hub::{cache, catalog};
use cactus::model::Bundle;
use cactus::quant::Bits;
use std::path::Path;

/// The embedding model that was named, or else the usual one if it has been converted; `None`: the chat model must do.
pub fn embedder(named: Option<&str>, machine: &MachineArgs, terminal: &mut Terminal) -> Result<Option<Embedder<'static>>> {
    let bundle = match named {
        Some(name) => ModelArgs::named(name).bundle(terminal)?,
        None => match cache::bundle_dir(catalog::EMBEDDING.repo, &Bits::EIGHT.label()) {
            Ok(path) if Bundle::read_manifest(&path).is_ok() => path,
            _ => return Ok(None),
        },
    };
    Embedder::load(&bundle, &machine.options(None)?).map(Some).map_err(|e| e.context("embedding model"))
}

/// The folder `dir`, with its index in the cache.
pub fn folder(dir: &Path, embedder: &Embedder) -> Result<Folder> {
    let kept = cache::root()?.join("corpora");
    std::fs::create_dir_all(&kept).map_err(|e| Error::io("create", &kept, &e))?;
    Ok(Folder::new(dir, Some(kept.join(retrieve::index_name(dir, embedder)?))))
}

/// Reads the folder, shows how far that is, and says what was found.
pub fn read(folder: &Folder, embedder: &Embedder, terminal: &mut Terminal) -> Result<Reading> {
    if !embedder.is_encoder() {
        terminal.note(&format!("passages are found with the chat model; `cactus convert {}` helps", catalog::EMBEDDING.alias));
    }
    let dir = folder.dir().display();
    let mut last = 0;
    let opened = folder.read(
        embedder,
        &mut |done, all| {
            if done == 0 && all > 0 {
                terminal.start(&format!("reading {dir}"), Some(all as u64), false);
            }
            terminal.advance((done - last) as u64);
            last = done;
        },
        &terminal::interrupted,
    );
    terminal.finish();
    let reading = opened?;
    let report = &reading.report;
    let skipped = report.skipped();
    let skipped = if skipped.is_empty() { String::new() } else { format!("; skipped: {skipped}") };
    terminal.note(&format!("{dir}: {} files, {} passages{skipped}", report.files, report.passages));
    report.unreadable.iter().for_each(|what| terminal.detail(&format!("unreadable: {what}")));
    Ok(reading)
}
