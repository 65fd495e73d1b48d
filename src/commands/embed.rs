//! `cactus embed`: texts to vectors.

use super::Outcome;
use super::model_options::{MachineArgs, ModelArgs};
use super::terminal::{self, Terminal};
use cactus::engine::embed::{Embedder, Embedding};
use cactus::error::{Error, Kind, Result};
use cactus::hub::catalog;
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal};
use std::path::Path;

/// Texts that are read, run and printed together.
const TOGETHER: usize = 64;

#[derive(clap::Args)]
#[command(after_help = "Text on standard input is a text a line; a line that is a JSON string, or an object with a field \
    \"text\", is that text.")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts; none, or `-`: the lines of standard input
    texts: Vec<String>,
    /// Scale vectors to length 1, whatever the model says
    #[arg(long, conflicts_with = "no_normalize")]
    normalize: bool,
    /// Leave vectors as they are
    #[arg(long)]
    no_normalize: bool,
    /// Tokens that are kept of a text [default: what the model was made for]
    #[arg(long)]
    max_tokens: Option<usize>,
    #[command(flatten)]
    machine: MachineArgs,
    /// Print objects with index, embedding, tokens and whether the text was cut, instead of arrays
    #[arg(long)]
    json: bool,
    /// Only results and errors
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: &Args) -> Outcome {
    let lines = args.texts.is_empty() || args.texts == ["-"];
    if lines && std::io::stdin().is_terminal() {
        return Err(Error::usage("no text").with_hint("give texts behind the model, or pipe lines in").into());
    }
    let mut terminal = Terminal::new(args.quiet);
    let named = args.model.model.clone().unwrap_or_else(|| catalog::EMBEDDING.repo.to_owned());
    let model = ModelArgs { model: Some(named), bits: args.model.bits };
    let bundle = model.bundle(&mut terminal)?;
    let embedder = Embedder::load(&bundle, &args.machine.options(args.max_tokens)?)?;
    if !embedder.is_encoder() {
        terminal.note("this is a chat model: an embedding model finds what belongs together much better");
    }
    terminal::catch_interrupts();
    let mut job = Job { args, embedder, terminal, done: 0 };
    if !lines {
        return args.texts.chunks(TOGETHER).try_for_each(|texts| job.run(texts));
    }
    let mut waiting = Vec::new();
    let mut stdin = std::io::stdin().lock();
    let mut number = 0;
    loop {
        let mut line = Vec::new();
        let read = stdin.read_until(b'\n', &mut line).map_err(|e| Error::io("read", Path::new("standard input"), &e))?;
        if read > 0 {
            number += 1;
            waiting.push(text_of(line, number)?);
        }
        if waiting.len() == TOGETHER || read == 0 {
            job.run(&waiting)?;
            waiting.clear();
        }
        if read == 0 {
            return Ok(());
        }
    }
}

/// The text of an input line.
fn text_of(mut line: Vec<u8>, number: usize) -> Result<String> {
    while line.last().is_some_and(|byte| b"\r\n".contains(byte)) {
        line.pop();
    }
    let wrong = |what: &str| Error::usage(format!("line {number} of standard input {what}"));
    let line = String::from_utf8(line).map_err(|_| wrong("is not UTF-8 text"))?;
    if !line.starts_with(['{', '"']) {
        return Ok(line);
    }
    match serde_json::from_str::<Value>(&line) {
        Ok(Value::String(text)) => Ok(text),
        Ok(Value::Object(fields)) => match fields.get("text") {
            Some(Value::String(text)) => Ok(text.clone()),
            _ => Err(wrong("is a JSON object without a text in `text`")),
        },
        // Text may well begin with a quotation mark or a brace.
        _ => Ok(line),
    }
}

struct Job<'a> {
    args: &'a Args,
    embedder: Embedder<'static>,
    terminal: Terminal,
    done: usize,
}

impl Job<'_> {
    fn run(&mut self, texts: &[String]) -> Outcome {
        let normalize = !self.args.no_normalize && (self.args.normalize || self.embedder.normalizes());
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let embeddings = self.embedder.embed(&texts, normalize, &terminal::interrupted);
        for embedding in embeddings? {
            if embedding.truncated {
                let most = self.embedder.max_tokens();
                self.terminal.note(&format!("text {} was cut to its first {most} tokens", self.done + 1));
            }
            terminal::print(&self.line(&embedding)?)?;
            self.done += 1;
        }
        Ok(())
    }

    fn line(&self, embedding: &Embedding) -> Result<String> {
        let Embedding { values, tokens, truncated } = embedding;
        if values.iter().any(|x| !x.is_finite()) {
            return Err(Error::new(Kind::BadFile, "the model gives values that are no numbers"));
        }
        let line = match self.args.json {
            true => json!({ "index": self.done, "embedding": values, "tokens": tokens, "truncated": truncated }),
            false => json!(values),
        };
        Ok(format!("{line}\n"))
    }
}
