//! Passages of a folder of files that belong to a question: found by their words and by what they mean, with the lines
//! they stand in.

mod chunk;
mod files;
mod store;
pub mod vector_index;
pub(super) mod words;

use super::chat::{Message, Role, last_question};
use super::embed::Embedder;
use super::load::Engine;
use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use words::Words;

/// Passages of each ranking that count.
const RANKED: usize = 50;
/// Constant of reciprocal rank fusion (Cormack et al., 2009, <https://doi.org/10.1145/1571941.1572114>).
const FUSION: f64 = 60.0;
/// Passages that are embedded at a time.
const TOGETHER: usize = 64;
/// Passages that a question gets when nobody says otherwise.
pub const TOP: usize = 5;

/// A piece of a file.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Passage {
    /// Path from the folder, with `/`.
    pub file: String,
    /// First and last line, counted from 1.
    pub first: usize,
    pub last: usize,
    pub text: String,
}

impl Passage {
    /// `file:first-last`, with nothing in it that a terminal would obey.
    pub fn place(&self) -> String {
        let file: String = self.file.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        format!("{file}:{}-{}", self.first, self.last)
    }
}

/// A passage that was found.
#[derive(Clone, Debug)]
pub struct Hit<'c> {
    pub passage: &'c Passage,
    /// Sum of `1 / (60 + rank)` over the rankings that have it.
    pub score: f64,
}

/// What counts for a question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    Words,
    Meaning,
    #[default]
    Both,
}

/// What happened while a folder was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Files with passages.
    pub files: usize,
    pub passages: usize,
    /// Files that were read again.
    pub changed: usize,
    /// Files that hold no text.
    pub binary: usize,
    /// Files that no person wrote: minified, generated, or of several megabytes.
    pub unfit: usize,
    /// Files and folders that could not be read, with the reason.
    pub unreadable: Vec<String>,
}

impl Report {
    /// In words what was left out; empty if nothing was.
    pub fn skipped(&self) -> String {
        let counts =
            [(self.binary, "without text"), (self.unfit, "minified or too large"), (self.unreadable.len(), "unreadable")];
        let counts: Vec<String> = counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        counts.join(", ")
    }
}

/// A folder that was read.
pub struct Corpus {
    passages: Vec<Passage>,
    /// `[passages, dim]`, each of length 1.
    vectors: Vec<f32>,
    words: Words,
}

impl Corpus {
    /// Reads the folder `dir`. What the file `index` keeps of an earlier time is used for files that did not change; it is
    /// written again when something changed. `each` is told how many passages of how many have their vectors.
    ///
    /// # Errors
    /// `NotFound` or `Usage` when `dir` is no folder, holds nothing that can be read, or cannot be listed; `Interrupted`.
    pub fn open(
        dir: &Path,
        index: Option<&Path>,
        embedder: &Embedder,
        each: &mut dyn FnMut(usize, usize),
        stopped: &dyn Fn() -> bool,
    ) -> Result<(Self, Report)> {
        let mut report = Report::default();
        let found = files::list(dir, &mut report)?;
        let key = store::Key::new(dir, embedder)?;
        let mut kept = index.and_then(|index| store::read(index, &key)).unwrap_or_default();
        let (mut entries, mut waiting) = (Vec::with_capacity(found.len()), Vec::new());
        let before = kept.len();
        for file in found {
            let known = kept.remove(&file.name);
            let known = match known {
                Some(known) if known.stamp == file.stamp => Some(known),
                known => match files::read(&file, &mut report) {
                    None => None,
                    Some(text) => {
                        let hash = store::hash(&text);
                        match known {
                            Some(known) if known.hash == hash => Some(store::Entry { stamp: file.stamp, ..known }),
                            _ => {
                                report.changed += 1;
                                let passages = chunk::passages(&file.name, &text, embedder)?;
                                waiting.push(entries.len());
                                Some(store::Entry { stamp: file.stamp, hash, passages, vectors: Vec::new() })
                            }
                        }
                    }
                },
            };
            if let Some(entry) = known {
                entries.push((file.name, entry));
            }
        }
        let texts: Vec<(usize, String)> = waiting
            .iter()
            .flat_map(|&at| entries[at].1.passages.iter().map(move |passage| (at, format!("{}\n{}", passage.file, passage.text))))
            .collect();
        for (n, some) in texts.chunks(TOGETHER).enumerate() {
            each(n * TOGETHER, texts.len());
            let lines: Vec<&str> = some.iter().map(|(_, text)| text.as_str()).collect();
            for ((at, _), embedding) in some.iter().zip(embedder.embed(&lines, true, stopped)?) {
                entries[*at].1.vectors.extend(embedding.values);
            }
        }
        each(texts.len(), texts.len());
        if let Some(index) = index.filter(|_| report.changed > 0 || before != entries.len()) {
            store::write(index, &key, &entries)?;
        }
        report.files = entries.iter().filter(|(_, entry)| !entry.passages.is_empty()).count();
        let (mut passages, mut vectors) = (Vec::new(), Vec::new());
        for (_, entry) in entries {
            passages.extend(entry.passages);
            vectors.extend(entry.vectors);
        }
        report.passages = passages.len();
        if passages.is_empty() {
            let skipped = report.skipped();
            let skipped = if skipped.is_empty() { String::new() } else { format!(" ({skipped} skipped)") };
            return Err(Error::usage(format!("{} holds no text files{skipped}", dir.display())));
        }
        let words = Words::new(passages.iter().map(|passage| format!("{} {}", passage.file, passage.text)));
        Ok((Corpus { passages, vectors, words }, report))
    }

    /// All passages, in order of their files.
    pub fn passages(&self) -> &[Passage] {
        &self.passages
    }

    /// The passages that belong to `question`, at most `top`, the best one first. `embedder` is the one that the folder was
    /// read with.
    pub fn search(&self, question: &str, by: By, top: usize, embedder: &Embedder) -> Result<Vec<Hit<'_>>> {
        let mut rankings = Vec::new();
        if by != By::Meaning {
            rankings.push(self.words.rank(question, RANKED));
        }
        if by != By::Words {
            let question = embedder.embed(&[question], true, &|| false)?.remove(0).values;
            let mut ranking = nearest(self.vectors.chunks_exact(question.len()), &question);
            ranking.truncate(RANKED);
            rankings.push(ranking);
        }
        let found = fused(self.passages.len(), rankings).into_iter().take(top);
        Ok(found.map(|(at, score)| Hit { passage: &self.passages[at], score }).collect())
    }
}

/// All vectors in order of their likeness to `wanted`, the nearest first; all of them have length 1.
pub(super) fn nearest<'v>(vectors: impl Iterator<Item = &'v [f32]>, wanted: &[f32]) -> Vec<usize> {
    let likeness = |vector: &[f32]| vector.iter().zip(wanted).map(|(a, b)| a * b).sum::<f32>();
    let likeness: Vec<f32> = vectors.map(likeness).collect();
    let mut ranking: Vec<usize> = (0..likeness.len()).collect();
    ranking.sort_by(|a, b| likeness[*b].total_cmp(&likeness[*a]));
    ranking
}

/// Reciprocal rank fusion of rankings of `count` things: those that any has, with their scores, the best first.
pub(super) fn fused(count: usize, rankings: impl IntoIterator<Item = Vec<usize>>) -> Vec<(usize, f64)> {
    let mut scores = vec![0.0; count];
    for ranking in rankings {
        ranking.into_iter().enumerate().for_each(|(rank, at)| scores[at] += 1.0 / (FUSION + 1.0 + rank as f64));
    }
    let mut found: Vec<(usize, f64)> = scores.into_iter().enumerate().filter(|(_, score)| *score > 0.0).collect();
    found.sort_by(|a, b| b.1.total_cmp(&a.1));
    found
}

/// A folder that many questions are answered from; read again when a file in it has changed.
pub struct Folder {
    dir: PathBuf,
    index: Option<PathBuf>,
    last: Mutex<Option<Reading>>,
}

/// A folder as it was read.
#[derive(Clone)]
pub struct Reading {
    pub corpus: Arc<Corpus>,
    pub report: Report,
    /// Names and stamps of the files that were there.
    files: Vec<(String, String)>,
}

impl Folder {
    /// `index`: the file that keeps passages and vectors for the next time.
    pub fn new(dir: &Path, index: Option<PathBuf>) -> Self {
        Folder { dir: dir.to_path_buf(), index, last: Mutex::new(None) }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder as it is now; `embedder` must be the same one every time.
    ///
    /// # Errors
    /// As [`Corpus::open`].
    pub fn read(&self, embedder: &Embedder, each: &mut dyn FnMut(usize, usize), stopped: &dyn Fn() -> bool) -> Result<Reading> {
        let mut last = self.last.lock().unwrap_or_else(|e| e.into_inner());
        let files = files::list(&self.dir, &mut Report::default())?;
        let files: Vec<(String, String)> = files.into_iter().map(|file| (file.name, file.stamp)).collect();
        if let Some(reading) = last.as_ref().filter(|reading| reading.files == files) {
            return Ok(reading.clone());
        }
        let (corpus, report) = Corpus::open(&self.dir, self.index.as_deref(), embedder, each, stopped)?;
        Ok(last.insert(Reading { corpus: Arc::new(corpus), report, files }).clone())
    }

    /// [`read`](Self::read) without anybody to tell or to ask.
    ///
    /// # Errors
    /// As [`Corpus::open`].
    pub fn now(&self, embedder: &Embedder) -> Result<Reading> {
        self.read(embedder, &mut |_, _| {}, &|| false)
    }

    /// Puts what belongs to the last question into the system turn of `messages`.
    ///
    /// # Errors
    /// As [`Corpus::open`] and [`Corpus::search`].
    pub fn ground(&self, messages: &mut Vec<Message>, engine: &Engine, embedder: &Embedder) -> Result<Grounds> {
        let system = messages.first().filter(|message| message.role == Role::System).map(|message| message.content.clone());
        let corpus = self.now(embedder)?.corpus;
        let grounds = Grounds::find(&corpus, last_question(messages), system.as_deref(), engine, embedder)?;
        if system.is_some() {
            messages.remove(0);
        }
        messages.insert(0, Message::new(Role::System, &grounds.system));
        Ok(grounds)
    }
}

/// What a folder has about a question, as much of it as half of the context holds.
pub struct Grounds {
    /// What the model is told instead of its system text alone.
    pub system: String,
    /// The passages in it, the best one first, and their scores.
    pub sources: Vec<(Passage, f64)>,
    /// Passages that were found beside those.
    pub left_out: usize,
}

impl Grounds {
    /// Looks for what belongs to `question`; `system` is what the model would be told without.
    ///
    /// # Errors
    /// As [`Corpus::search`].
    pub fn find(corpus: &Corpus, question: &str, system: Option<&str>, engine: &Engine, embedder: &Embedder) -> Result<Self> {
        let mut room = engine.context() / 2;
        let mut hits = corpus.search(question, By::Both, TOP, embedder)?;
        let (found, mut kept) = (hits.len(), 0);
        for hit in &hits {
            let tokens = engine.tokenizer.encode(&hit.passage.text, false)?.len() + 16;
            if tokens > room {
                break;
            }
            (room, kept) = (room - tokens, kept + 1);
        }
        hits.truncate(kept);
        let system = system_message(system, &hits);
        let sources = hits.into_iter().map(|hit| (hit.passage.clone(), hit.score)).collect();
        Ok(Grounds { system, sources, left_out: found - kept })
    }

    /// The passages for programs: `[{"file", "first_line", "last_line", "score"}]`.
    pub fn json(&self) -> Value {
        let source = |(p, score): &(Passage, f64)| json!({ "file": p.file, "first_line": p.first, "last_line": p.last, "score": (score * 1e4).round() / 1e4 });
        self.sources.iter().map(source).collect()
    }
}

/// What a model is told about passages, behind `system` if there is one.
fn system_message(system: Option<&str>, hits: &[Hit]) -> String {
    let mut text = system.map_or_else(String::new, |system| format!("{system}\n\n"));
    text += "Answer from these passages of the user's files, and name the mark of those you use, such as [file:1-9]. \
             If they do not hold the answer, say so.\n";
    for Hit { passage, .. } in hits {
        text += &format!("\n[{}]\n{}\n", passage.place(), passage.text.trim_end());
    }
    text
}

/// Name of the index file of a folder and a model.
pub fn index_name(dir: &Path, embedder: &Embedder) -> Result<PathBuf> {
    Ok(PathBuf::from(store::Key::new(dir, embedder)?.file_name()))
}
