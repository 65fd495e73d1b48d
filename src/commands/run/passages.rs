//! `--corpus`: what the files of a folder have about a prompt.

use super::super::corpus;
use super::super::terminal::Terminal;
use super::Args;
use cactus::engine::retrieve::Grounds;
use cactus::engine::{Embedder, Engine};
use cactus::error::Result;

impl Args {
    /// What the folder of `--corpus` has about the prompt.
    pub(super) fn passages(&self, engine: &Engine, prompt: &str, terminal: &mut Terminal) -> Result<Option<Grounds>> {
        let Some(dir) = &self.corpus else { return Ok(None) };
        let embedder = match corpus::embedder(self.embedding_model.as_deref(), &self.engine.machine, terminal)? {
            Some(embedder) => embedder,
            None => Embedder::of(engine)?,
        };
        let reading = corpus::read(&corpus::folder(dir, &embedder)?, &embedder, terminal)?;
        let grounds = Grounds::find(&reading.corpus, prompt, self.system(), engine, &embedder)?;
        if grounds.left_out > 0 {
            let all = grounds.sources.len() + grounds.left_out;
            terminal.note(&format!("only {} of {all} passages fit into half of the context", grounds.sources.len()));
        }
        Ok(Some(grounds))
    }
}
