//! A model behind one handle, asked and answering in JSON: the safe half of the C API ([`super::ffi`]). `docs/c-api.md` has
//! the fields.

use super::chat::{self, Message};
use super::embed::Embedder;
use super::evaluate::metrics::Softmax;
use super::fields::{FieldError, Fields};
use super::generate::{Answer, Request};
use super::load::{self, Engine, LoadOptions};
use super::response::{self, THRESHOLD};
use super::retrieve::{self, Folder, Hit};
use super::sampler::Sampling;
use super::schedule::{Job, Listener};
use super::service::Service;
use super::thinking::{self, Part, Prompt, Splitter};
use super::tools::{self, Choice, Tools};
use super::writing::TokenChoices;
use crate::error::{Error, Kind, Result};
use crate::model::Bundle;
use crate::model::spec::Spec;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

/// Tokens of an answer where nothing is said.
const MAX_TOKENS: u64 = 100;
/// Tools that the model is shown where nothing is said.
const TOOLS: u64 = 2;
/// Pieces that are written ahead of what the caller has seen, so that a stop comes in time.
const AHEAD: usize = 4;

/// An opened model. It may be used from several threads; answers are written one after the other.
pub struct Handle {
    model: Model,
    corpus: Option<Folder>,
    stop: Arc<AtomicBool>,
}

enum Model {
    Chat { engine: Arc<Engine>, service: Mutex<Service> },
    Embedding(Box<Embedder<'static>>),
}

/// What one answer says on its way.
enum Heard {
    Piece(String, u32),
    End(Box<Result<Answer>>),
}

struct Ear {
    to: SyncSender<Heard>,
    stop: Arc<AtomicBool>,
}

impl Listener for Ear {
    fn part(&mut self, part: Part, choices: &mut Vec<TokenChoices>) {
        let id = choices.last().map_or(0, |choice| choice.id);
        choices.clear();
        if let Part::Answer(text) = part {
            let _ = self.to.send(Heard::Piece(text.to_owned(), id));
        }
    }
    fn done(&mut self, outcome: Result<Answer>, _: Vec<TokenChoices>) {
        let _ = self.to.send(Heard::End(Box::new(outcome)));
    }
    fn gone(&self) -> bool {
        false
    }
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

impl Handle {
    /// Opens a bundle that `cactus convert` wrote, and reads the folder that answers are to come from, if there is one. What
    /// was read of it is kept there for the next time with `keep`.
    pub fn open(path: &Path, corpus: Option<&Path>, keep: bool) -> Result<Self> {
        if !Bundle::is_bundle(path) {
            return Err(
                Error::not_found(format!("{} is no bundle", path.display())).with_hint("cactus convert MODEL FOLDER makes one")
            );
        }
        let options = LoadOptions { ceiling: load::ceiling()?, ..Default::default() };
        let model = match Bundle::read_manifest(path)?.spec {
            Spec::Encoder(_) => Model::Embedding(Box::new(Embedder::load(path, &options)?)),
            _ => {
                let engine = Arc::new(Engine::load(path, &options)?);
                Model::Chat { service: Mutex::new(serve(&engine)?), engine }
            }
        };
        let mut handle = Handle { model, corpus: None, stop: Arc::default() };
        if let Some(dir) = corpus {
            let name = handle.with_embedder(|embedder| retrieve::index_name(dir, embedder))?;
            let kept = dir.join(".cactus");
            if keep {
                std::fs::create_dir_all(&kept).map_err(|e| Error::io("create", &kept, &e))?;
            }
            let folder = Folder::new(dir, keep.then(|| kept.join(name)));
            handle.with_embedder(|embedder| folder.now(embedder))?;
            handle.corpus = Some(folder);
        }
        Ok(handle)
    }

    fn chat(&self) -> Result<(&Arc<Engine>, &Mutex<Service>)> {
        match &self.model {
            Model::Chat { engine, service } => Ok((engine, service)),
            Model::Embedding(_) => Err(Error::usage("this is an embedding model, it writes no answers")),
        }
    }

    fn with_embedder<T>(&self, work: impl FnOnce(&Embedder) -> Result<T>) -> Result<T> {
        match &self.model {
            Model::Embedding(embedder) => work(embedder),
            Model::Chat { engine, .. } => work(&Embedder::of(engine)?),
        }
    }

    /// Forgets what was read.
    pub fn reset(&self) -> Result<()> {
        let (engine, service) = self.chat()?;
        *service.lock().unwrap_or_else(|e| e.into_inner()) = serve(engine)?;
        Ok(())
    }

    /// The vector of a text; of length 1 with `normalize`, else as the model gives it.
    pub fn embed(&self, text: &str, normalize: bool) -> Result<Vec<f32>> {
        self.with_embedder(|embedder| Ok(embedder.embed(&[text], normalize, &|| false)?.remove(0).values))
    }

    /// The passages of the folder that belong to a question, `top` at most (0: five): `{"chunks": [{"score", "source", "content"}]}`.
    pub fn passages(&self, question: &str, top: usize) -> Result<Value> {
        let Some(folder) = &self.corpus else { return Ok(json!({"chunks": []})) };
        let top = if top == 0 { retrieve::TOP } else { top };
        self.with_embedder(|embedder| {
            let reading = folder.now(embedder)?;
            let hits = reading.corpus.search(question, retrieve::By::Both, top, embedder)?;
            let chunk = |hit: &Hit| json!({"score": hit.score, "source": hit.passage.place(), "content": hit.passage.text});
            Ok(json!({"chunks": hits.iter().map(chunk).collect::<Vec<_>>()}))
        })
    }

    /// Ends the answer that is being written, from another thread or from its own pieces.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Answers a conversation; the completion response.
    pub fn complete(&self, asked: &Asked, on_piece: &mut dyn FnMut(&str, u32)) -> Result<Value> {
        let Read { prompt, options, sources } = self.prompt(asked)?;
        let answer = self.answer(prompt, options.request, on_piece)?;
        let mut response = response::completion(&answer, options.threshold.unwrap_or(THRESHOLD));
        if let Some(sources) = sources {
            response["sources"] = sources;
        }
        Ok(response)
    }

    /// Reads a conversation, so that an answer to it can begin sooner; the prefill response.
    pub fn prefill(&self, asked: &Asked) -> Result<Value> {
        let Read { prompt, mut options, .. } = self.prompt(asked)?;
        options.request.max_tokens = 1;
        // Nothing is to be said, so nothing holds it to a form.
        options.request.tools = None;
        let answer = self.answer(prompt, options.request, &mut |_, _| {})?;
        Ok(json!({
            "success": true,
            "error": null,
            "prefill_tokens": answer.prompt_tokens,
            "prefill_tps": answer.prefill_tps(),
            "total_time_ms": answer.first_token_ms,
            "ram_usage_mb": response::ram_usage_mb(),
        }))
    }

    /// The prompt that a conversation becomes.
    pub fn render(&self, asked: &Asked) -> Result<String> {
        let (messages, options, _) = self.read(asked)?;
        let (engine, _) = self.chat()?;
        let rendered = thinking::render(engine, &messages, options.request.tools.as_ref(), Some(options.think))?;
        Ok(rendered.text().into_owned())
    }

    /// Ids of a text, without those that begin or end one.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        self.with_embedder(|embedder| embedder.tokenizer().encode(text, false))
    }

    /// How likely the model finds the tokens `start..end`, seen from at most `context` tokens before them: the sum of the
    /// natural logarithms of their probabilities. The first token of all has nothing before it and does not count.
    pub fn score_window(&self, ids: &[u32], start: usize, end: usize, context: usize) -> Result<Value> {
        if start >= end || end > ids.len() {
            return Err(Error::usage(format!("the window {start} to {end} is not within {} tokens", ids.len())));
        }
        let (engine, _) = self.chat()?;
        let first = start.saturating_sub(context.max(1));
        let seen = &ids[first..end];
        if seen.len() > engine.context() {
            let message = format!("{} tokens do not fit the context of {}", seen.len(), engine.context());
            return Err(Error::usage(message));
        }
        let vocab = engine.vocab();
        let logits = engine.score(&seen[..seen.len() - 1])?;
        let mut sum = 0.0f64;
        let mut tokens = 0;
        for (row, &id) in logits.chunks_exact(vocab).zip(&seen[1..]).skip((start - first).saturating_sub(1)) {
            sum += Softmax::of(row).map_or(f64::NAN, |softmax| softmax.log_prob(row[id as usize]));
            tokens += 1;
        }
        Ok(json!({"success": true, "logprob": sum, "tokens": tokens}))
    }

    fn prompt(&self, asked: &Asked) -> Result<Read> {
        let (messages, options, sources) = self.read(asked)?;
        let (engine, _) = self.chat()?;
        let prompt = Prompt::chat(engine, &messages, options.request.tools.as_ref(), Some(options.think))?;
        Ok(Read { prompt, options, sources })
    }

    fn read(&self, asked: &Asked) -> Result<(Vec<Message>, Options, Option<Value>)> {
        let (engine, _) = self.chat()?;
        let mut options = Options::parse(asked.options)?;
        let mut messages: Vec<Message> =
            serde_json::from_str(asked.messages).map_err(|e| Error::usage(format!("messages: {e}")))?;
        if messages.is_empty() {
            return Err(Error::usage("messages: there are none"));
        }
        if let Some(text) = asked.tools.filter(|text| !text.trim().is_empty()) {
            let choice = if options.force_tools { Choice::Required } else { Choice::Auto };
            let tools = tools::read(text, &choice)?;
            let few = |tools: Tools| tools.few(options.tool_rag_top_k, chat::last_question(&messages), engine);
            options.request.tools = tools.map(few).transpose()?;
        }
        let ground = |folder: &Folder| self.with_embedder(|embedder| Ok(folder.ground(&mut messages, engine, embedder)?.json()));
        let sources = self.corpus.as_ref().map(ground).transpose()?;
        Ok((messages, options, sources))
    }

    fn answer(&self, prompt: Prompt, request: Request, on_piece: &mut dyn FnMut(&str, u32)) -> Result<Answer> {
        self.stop.store(false, Ordering::Relaxed);
        let (to, from) = sync_channel(AHEAD);
        let listener = Box::new(Ear { to, stop: self.stop.clone() });
        let (engine, service) = self.chat()?;
        let splitter = Splitter::new(thinking::tags(engine), prompt.inside);
        let job = Job { prompt: prompt.ids, request, splitter, listener };
        let taken = service.lock().unwrap_or_else(|e| e.into_inner()).submit(vec![job]);
        taken.map_err(|_| Error::usage("this model is answering already"))?;
        for heard in from {
            match heard {
                Heard::Piece(text, id) => on_piece(&text, id),
                Heard::End(outcome) => return *outcome,
            }
        }
        Err(Error::new(Kind::Io, "the engine failed"))
    }
}

/// One answer at a time; the next may come before the last one has quite ended.
fn serve(engine: &Arc<Engine>) -> Result<Service> {
    Service::start(engine.clone(), 1, 1)
}

/// A request, read.
struct Read {
    prompt: Prompt,
    options: Options,
    /// The passages that the answer comes from.
    sources: Option<Value>,
}

/// What a caller sends, as JSON.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub messages: &'a str,
    pub options: Option<&'a str>,
    pub tools: Option<&'a str>,
}

/// The options of a completion.
struct Options {
    request: Request,
    think: bool,
    /// Nothing: the default.
    threshold: Option<f64>,
    /// The answer must call a tool.
    force_tools: bool,
    /// So many tools at most are shown to the model; 0: all.
    tool_rag_top_k: usize,
}

impl Options {
    /// Values outside a range that mean "as the model does by itself" become our defaults.
    fn parse(json: Option<&str>) -> Result<Self> {
        let fields = match json {
            Some(json) if !json.trim().is_empty() => Fields::parse(json.as_bytes())
                .map_err(|e| FieldError::new("options", format!("options: {}", e.message)).into_error())?,
            _ => Fields::default(),
        };
        Options::read(&fields).map_err(|e| FieldError::new(e.name, format!("options: {}", e.message)).into_error())
    }

    fn read(fields: &Fields) -> Result<Self, FieldError> {
        let any = f64::from(f32::MIN)..=f64::from(f32::MAX);
        let number = |name: &str| fields.number(name, any.clone());
        let within = |value: Option<f64>, good: &dyn Fn(f64) -> bool, default: f32| {
            value.filter(|x| good(*x)).map_or(default, |x| x as f32)
        };
        let sampling = Sampling {
            temperature: within(number("temperature")?, &|t| t >= 0.0, 0.0),
            top_p: within(number("top_p")?, &|p| p > 0.0 && p <= 1.0, 1.0),
            top_k: fields.whole("top_k", 0..=u64::from(u32::MAX))?.unwrap_or(0) as usize,
            min_p: within(number("min_p")?, &|p| (0.0..=1.0).contains(&p), 0.15),
            repetition_penalty: within(number("repetition_penalty")?, &|p| p > 0.0, 1.1),
            seed: fields.whole("seed", 0..=u64::MAX)?.unwrap_or(0),
            ..Sampling::default()
        };
        fields.unsupported("include_stop_sequences", |value| value == false)?;
        let request = Request {
            sampling,
            max_tokens: fields.whole("max_tokens", 1..=u64::from(u32::MAX))?.unwrap_or(MAX_TOKENS) as usize,
            stops: fields.texts("stop_sequences")?,
            // Tells which token a piece ends with.
            top_logprobs: Some(0),
            ..Request::default()
        };
        let threshold = number("confidence_threshold")?.filter(|threshold| *threshold >= 0.0);
        Ok(Options {
            request,
            think: fields.flag("enable_thinking_if_supported")?.unwrap_or(false),
            threshold,
            force_tools: fields.flag("force_tools")?.unwrap_or(false),
            tool_rag_top_k: fields.whole("tool_rag_top_k", 0..=u64::from(u32::MAX))?.unwrap_or(TOOLS) as usize,
        })
    }
}
