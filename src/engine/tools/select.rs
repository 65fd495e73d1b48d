//! The tools that belong to a question.

use super::super::embed::Embedder;
use super::super::load::Engine;
use super::super::retrieve::{fused, nearest, words::Words};
use super::{Tool, Tools};
use crate::error::Result;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Vectors of tools that are kept.
const KEPT: usize = 4096;

/// Vectors of what tools say of themselves, so that each is made once.
#[derive(Default)]
pub(in crate::engine) struct Vectors(Mutex<HashMap<String, Vec<f32>>>);

impl Tools {
    /// Leaves the `most` tools that belong best to `question`, by their words and by what they mean to the model, in the
    /// order they were given in. 0 keeps all.
    ///
    /// # Errors
    /// As [`Embedder::embed`].
    pub fn few(mut self, most: usize, question: &str, engine: &Engine) -> Result<Self> {
        if most == 0 || self.list.len() <= most {
            return Ok(self);
        }
        let texts: Vec<String> = self.list.iter().map(about).collect();
        let by_words = Words::new(texts.iter().cloned()).rank(question, texts.len());
        let by_meaning = engine.tool_vectors.rank(question, &texts, engine)?;
        let mut best = fused(texts.len(), [by_words, by_meaning]);
        best.truncate(most);
        best.sort_unstable_by_key(|(at, _)| *at);
        self.list = Arc::new(best.into_iter().map(|(at, _)| self.list[at].clone()).collect());
        Ok(self)
    }
}

/// What a tool says of itself.
fn about(tool: &Tool) -> String {
    format!("{} {}", tool.name.replace(['_', '-', '.'], " "), tool.description)
}

impl Vectors {
    /// The nearest first.
    fn rank(&self, question: &str, texts: &[String], engine: &Engine) -> Result<Vec<usize>> {
        let embedder = Embedder::of(engine)?;
        let embed = |texts: &[&str]| embedder.embed(texts, true, &|| false);
        let mut known = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if known.len() > KEPT {
            known.clear();
        }
        let new: Vec<&str> = texts.iter().map(String::as_str).filter(|text| !known.contains_key(*text)).collect();
        let made = embed(&new)?;
        known.extend(new.into_iter().map(str::to_owned).zip(made.into_iter().map(|embedding| embedding.values)));
        let question = embed(&[question])?.remove(0).values;
        Ok(nearest(texts.iter().map(|text| known[text].as_slice()), &question))
    }
}
