//! How like the reference a model speaks: text and chats.

use super::{MaterialArgs, Subject};
use crate::commands::terminal::{self, Terminal};
use cactus::engine::Engine;
use cactus::engine::chat::Message;
use cactus::engine::evaluate::{self, Key, Progress, Reader, Sequence, Summary};
use cactus::engine::load::DEFAULT_CONTEXT;
use cactus::error::{Error, Kind, Result};
use cactus::hub::cache;
use cactus::model::Bundle;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Tokens of a chunk of text.
const CHUNK: usize = 512;

/// What is scored, as it was read.
pub struct Material {
    content: Content,
    limit: Option<usize>,
    ctx: Option<usize>,
}

enum Content {
    Text(String),
    Chats(Vec<Vec<Message>>),
}

impl Material {
    /// Reads the files; `None` if none was named.
    pub fn open(args: &MaterialArgs) -> Result<Option<Material>> {
        let limit = args.chunks.map(|n| n as usize);
        let content = match (&args.text, &args.chat) {
            (Some(path), _) => Content::Text(read(path)?),
            (None, Some(path)) => Content::Chats(chats(path, limit.unwrap_or(usize::MAX))?),
            (None, None) => return Ok(None),
        };
        Ok(Some(Material { content, limit, ctx: args.ctx }))
    }

    /// Tokens that are run at once.
    pub fn context(&self, bundle: &Path) -> Result<usize> {
        Ok(match (self.ctx, &self.content) {
            (Some(ctx), _) => ctx,
            (None, Content::Text(_)) => CHUNK,
            (None, Content::Chats(_)) => DEFAULT_CONTEXT.min(Bundle::read_manifest(bundle)?.spec.max_context()),
        })
    }

    fn sequences(&self, engine: &Engine) -> Result<Vec<Sequence>> {
        match &self.content {
            Content::Text(text) => evaluate::chunks(&engine.tokenizer, text, engine.context(), self.limit),
            Content::Chats(chats) => evaluate::chats(&engine.tokenizer, &engine.template, chats, engine.context()),
        }
    }
}

pub fn read(path: &Path) -> Result<String> {
    match std::fs::read_to_string(path) {
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => Err(Error::bad_file(path, "is not UTF-8 text")),
        read => read.map_err(|e| Error::io("read", path, &e)),
    }
}

/// The lines of a file that hold something, with their numbers, each as JSON.
pub fn json_lines(path: &Path) -> Result<Vec<(usize, Value)>> {
    let text = read(path)?;
    let lines = text.trim_start_matches('\u{feff}').lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parse = |(at, line): (usize, &str)| match serde_json::from_str(line) {
        Ok(value) => Ok((at + 1, value)),
        Err(e) => Err(Error::bad_file(path, format!("line {} is no JSON: {e}", at + 1))),
    };
    lines.map(parse).collect()
}

fn chats(path: &Path, limit: usize) -> Result<Vec<Vec<Message>>> {
    let chat = |(line, mut value): (usize, Value)| {
        let wrong = |what: String| Error::bad_file(path, format!("line {line}: {what}"));
        let messages = value.get_mut("messages").map(Value::take).ok_or_else(|| wrong("it has no `messages`".into()))?;
        serde_json::from_value(messages).map_err(|e| wrong(format!("`messages`: {e}")))
    };
    json_lines(path)?.into_iter().take(limit).map(chat).collect()
}

/// What a reference said, in its file.
pub struct Likeness {
    path: PathBuf,
    key: Key,
    sequences: Vec<Sequence>,
    vocab: usize,
}

impl Likeness {
    /// Finds what the reference said of the material, or lets it speak.
    pub fn prepare(
        engine: &Engine,
        subject: &Subject,
        material: &Material,
        file: Option<&Path>,
        terminal: &mut Terminal,
    ) -> Result<Likeness> {
        let sequences = material.sequences(engine)?;
        let key = evaluate::reference_key(engine, &sequences);
        let path = match file {
            Some(file) => file.to_path_buf(),
            None => {
                let name: String = key[..16].iter().map(|b| format!("{b:02x}")).collect();
                cache::root()?.join("references").join(name)
            }
        };
        let (rows, vocab) = (evaluate::scored(&sequences), engine.vocab());
        let kept = Likeness { path, key, sequences, vocab };
        match kept.open() {
            Some(reader) => terminal.note(&format!("reference: {} ({} MB)", kept.path.display(), megabytes(reader.bytes()))),
            None => {
                terminal.start(&format!("reference {}", subject.name), Some(rows), false);
                let mut advance = |tokens| terminal.advance(tokens);
                let mut progress = Progress { stopped: &terminal::interrupted, advance: &mut advance };
                let bytes = evaluate::write_reference(engine, &kept.sequences, &kept.path, &mut progress)?;
                terminal.finish();
                terminal.note(&format!("reference: {} ({} MB written)", kept.path.display(), megabytes(bytes)));
            }
        }
        Ok(kept)
    }

    fn open(&self) -> Option<Reader> {
        Reader::open(&self.path, &self.key, evaluate::scored(&self.sequences), self.vocab)
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

/// Scores a model, against what the reference said if there is one.
pub fn judge(
    engine: &Engine,
    subject: &Subject,
    material: &Material,
    kept: Option<&Likeness>,
    terminal: &mut Terminal,
) -> Result<Summary> {
    let sequences = material.sequences(engine)?;
    let reader = match kept {
        None => None,
        Some(kept) if kept.vocab != engine.vocab() || kept.sequences != sequences => {
            return Err(Error::usage(format!("{} and the reference read the same text as different tokens", subject.name))
                .with_hint("only models with the same tokenizer can be held against each other"));
        }
        Some(kept) => {
            let gone = || Error::new(Kind::BadFile, format!("{} was changed meanwhile", kept.path.display()));
            Some(kept.open().ok_or_else(gone)?)
        }
    };
    terminal.start(&subject.name, Some(evaluate::scored(&sequences)), false);
    let mut advance = |tokens| terminal.advance(tokens);
    let mut progress = Progress { stopped: &terminal::interrupted, advance: &mut advance };
    let scores = evaluate::score(engine, &sequences, reader, &mut progress)?;
    terminal.finish();
    Ok(scores.summary())
}
