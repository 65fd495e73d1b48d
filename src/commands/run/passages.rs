//! `--corpus`: what the files of a folder have about a prompt.

use super::super::model_options::ModelArgs;
use super::super::terminal::{self, Terminal};
use super::Args;
use cactus::engine::retrieve::{self, By, Corpus, Passage};
use cactus::engine::{Embedder, Engine};
use cactus::error::{Error, Result};
use cactus::hub::{cache, catalog};
use cactus::model::Bundle;
use cactus::quant::Bits;
use std::path::PathBuf;

/// What a folder has about a prompt.
#[derive(Default)]
pub(super) struct Found {
    /// What the model is told instead of the system text alone.
    pub system: Option<String>,
    pub sources: Vec<Passage>,
}

impl Args {
    /// What the folder of `--corpus` has about the prompt.
    pub(super) fn passages(&self, engine: &Engine, prompt: &str, terminal: &mut Terminal) -> Result<Found> {
        let Some(dir) = &self.corpus else { return Ok(Found::default()) };
        let usable = |path: &PathBuf| Bundle::read_manifest(path).is_ok();
        let here = || cache::bundle_dir(catalog::EMBEDDING.repo, &Bits::EIGHT.label()).ok().filter(usable);
        let bundle = match &self.embedding_model {
            Some(name) => Some(ModelArgs::named(name).bundle(terminal)?),
            None => here(),
        };
        let embedder = match bundle {
            Some(bundle) => Embedder::load(&bundle, &self.engine.machine.options(None)?)?,
            None => Embedder::of(engine)?,
        };
        if !embedder.is_encoder() {
            terminal
                .note(&format!("passages are found with the chat model; `cactus convert {}` helps", catalog::EMBEDDING.alias));
        }
        let folder = cache::root()?.join("corpora");
        std::fs::create_dir_all(&folder).map_err(|e| Error::io("create", &folder, &e))?;
        let index = folder.join(retrieve::index_name(dir, &embedder)?);
        let mut last = 0;
        let opened = Corpus::open(
            dir,
            &index,
            &embedder,
            &mut |done, all| {
                if done == 0 && all > 0 {
                    terminal.start(&format!("reading {}", dir.display()), Some(all as u64), false);
                }
                terminal.advance((done - last) as u64);
                last = done;
            },
            &terminal::interrupted,
        );
        terminal.finish();
        let (corpus, report) = opened?;
        let skipped = report.skipped();
        let skipped = if skipped.is_empty() { String::new() } else { format!("; skipped: {skipped}") };
        terminal.note(&format!("{}: {} files, {} passages{skipped}", dir.display(), report.files, report.passages));
        report.unreadable.iter().for_each(|what| terminal.detail(&format!("unreadable: {what}")));
        // Half of the context is for passages.
        let mut room = engine.context() / 2;
        let mut hits = corpus.search(prompt, By::Both, retrieve::TOP, &embedder)?;
        let mut kept = 0;
        for hit in &hits {
            let tokens = engine.tokenizer.encode(&hit.passage.text, false)?.len() + 16;
            if tokens > room {
                break;
            }
            (room, kept) = (room - tokens, kept + 1);
        }
        if kept < hits.len() {
            terminal.note(&format!("only {kept} of {} passages fit into half of the context", hits.len()));
            hits.truncate(kept);
        }
        let system = Some(retrieve::system_message(self.system(), &hits));
        Ok(Found { system, sources: hits.into_iter().map(|hit| hit.passage.clone()).collect() })
    }
}
