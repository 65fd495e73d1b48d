//! `cactus run`: one answer, many answers, or a chat.

mod display;
mod editor;
mod form;
mod markdown;
mod passages;
mod repl;
mod repl_commands;
mod sampling;
mod tools;

use super::batch::{Batch, Content, Item};
use super::machine::size;
use super::model_options::{EngineArgs, ModelArgs, memory_warning};
use super::settings::{self, Key};
use super::stats::Stats;
use super::terminal::{self, Output, Terminal};
use super::{Failure, Outcome};
use cactus::engine::chat::{Message, Role, last_question};
use cactus::engine::response::THRESHOLD;
use cactus::engine::retrieve::Grounds;
use cactus::engine::thinking::{Part, Prompt, Think};
use cactus::engine::tools::{Tools, turn};
use cactus::engine::{Engine, Finish, Request, Restored, Session, response};
use cactus::error::{Error, Result};
use cactus::hub::catalog;
use cactus::kernels::Topology;
use clap::builder::TypedValueParser;
use display::{Display, Shown};
use form::FormArgs;
pub use sampling::SamplingArgs;
use serde_json::json;
use std::cell::RefCell;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;
use tools::ToolArgs;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt, where a model is named before it: the same as --prompt
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "batch"])]
    pub words: Vec<String>,
    /// The prompt. Text piped to standard input follows it after an empty line; that is read to its end, so
    /// give `</dev/null` or --no-stdin where a script has an open pipe there
    #[arg(short, long)]
    pub prompt: Option<String>,
    /// What the model is told before the conversation
    #[arg(short, long)]
    pub system: Option<String>,
    /// Many prompts: a file (`-`: standard input) with a JSON object a line; an object a line is printed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "profile"])]
    pub batch: Option<String>,
    /// Write the answer to a file. A batch goes on where the file ends
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Do not read standard input
    #[arg(long)]
    pub no_stdin: bool,
    /// Reasoning before the answer: on, off, or hide (reason, but show only the answer). Thoughts go to
    /// standard error. auto: as the model does by itself
    #[arg(long, default_value = "auto", value_parser = think())]
    pub think: Think,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    tools: ToolArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Keep what was read in FILE, and go on from there in a later call: what a prompt has in common with the last one
    /// need not be read again
    #[arg(long, value_name = "FILE")]
    pub prompt_cache: Option<PathBuf>,
    /// A smaller model of the same vocabulary (or a bundle of this one with fewer bits) that guesses ahead. The answer
    /// stays this model's
    #[arg(long, value_name = "MODEL", conflicts_with = "no_draft")]
    pub draft_model: Option<String>,
    /// Answer from the files of this folder: the passages that belong to the prompt are read first, and named behind the
    /// answer
    #[arg(long, value_name = "DIR", conflicts_with = "batch")]
    pub corpus: Option<PathBuf>,
    /// The model that finds passages by what they mean [default: minilm where it is converted, else the chat model]
    #[arg(long, value_name = "MODEL", requires = "corpus")]
    pub embedding_model: Option<String>,
    /// Print the answer as a JSON object with confidence, timings and token counts
    #[arg(long)]
    pub json: bool,
    /// Only results and errors
    #[arg(short, long)]
    pub quiet: bool,
    /// Also what was loaded and how it is run
    #[arg(short, long, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Print times, rates and memory, to standard error
    #[arg(long)]
    pub stats: bool,
    /// Print where the time of the answer went, to standard error
    #[arg(long)]
    pub profile: bool,
}

fn think() -> impl clap::builder::TypedValueParser<Value = Think> {
    clap::builder::PossibleValuesParser::new(Think::NAMES).try_map(|name| name.parse::<Think>())
}

pub fn run(args: &Args, started: Instant) -> Outcome {
    match run_work(args, started) {
        Err(Failure::Error(error)) if args.json && args.batch.is_none() && args.output.is_none() => {
            terminal::print(&format!("{}\n", response::failure(&error, THRESHOLD)))?;
            Err(Failure::Reported(error.exit_code()))
        }
        outcome => outcome,
    }
}

/// What is to be done, its files opened.
enum Work {
    Prompt(String, Output),
    Batch(Batch),
    Chat,
}

fn run_work(args: &Args, started: Instant) -> Outcome {
    let request = Request { constraint: args.form.constraint()?, tools: args.tools.read()?, ..args.sampling.request()? };
    let work = work(args)?;
    if matches!(work, Work::Chat) && args.tools.chooses() {
        return Err(Error::usage("--tool-top-k needs a prompt or --batch").into());
    }
    let mut terminal = Terminal::new(args.quiet || args.json).verbose(args.verbose);
    let bundle = args.model.bundle(&mut terminal)?;
    let mut stats = Stats::new(started);
    let engine = args.engine.load(&bundle)?;
    let small = args.draft_model(&engine, &mut terminal)?;
    if let Some(warning) = memory_warning(std::iter::once(&engine).chain(&small)) {
        terminal.note(&warning);
    }
    if args.model.is_default() {
        terminal.note(&format!(
            "{} is a small starter model; for better answers try: cactus run {}",
            catalog::STARTER.repo,
            catalog::RECOMMENDED.repo
        ));
    }
    if args.verbose {
        terminal.detail(&details(&engine, &request));
    }
    terminal::catch_interrupts();
    let prompt_cache = args.prompt_cache.as_deref();
    let (system, think) = (args.system(), args.think);
    let asked = Asked { engine: &engine, small: small.as_ref(), request: &request, system, think, prompt_cache };
    let outcome = match work {
        Work::Prompt(prompt, output) => {
            let found = args.passages(&engine, &prompt, &mut terminal)?;
            let system = found.as_ref().map(|grounds| grounds.system.as_str()).or(asked.system);
            one(args, &Asked { system, ..asked }, &prompt, output, found.as_ref(), &mut stats, &terminal)
        }
        Work::Batch(batch) => many(args, &asked, batch, &mut stats, &mut terminal),
        Work::Chat => return repl::run(args, engine, small, &request, &mut terminal),
    };
    if args.stats && !matches!(outcome, Err(Failure::Error(_))) {
        terminal.say(&stats.table(&engine));
    }
    outcome
}

impl Args {
    fn draft_model(&self, engine: &Engine, terminal: &mut Terminal) -> Result<Option<Engine>> {
        let Some(name) = &self.draft_model else { return Ok(None) };
        let small = self.engine.load_beside(&ModelArgs::named(name).bundle(terminal)?, engine);
        small.map(Some).map_err(|e| e.context("draft model"))
    }

    /// What the model is told first; an empty text is none.
    fn system(&self) -> Option<&str> {
        self.system.as_deref().or_else(|| settings::current().text(Key::System)).filter(|text| !text.is_empty())
    }
}

/// Who answers, and how.
struct Asked<'a> {
    engine: &'a Engine,
    /// The draft model.
    small: Option<&'a Engine>,
    request: &'a Request,
    system: Option<&'a str>,
    think: Think,
    prompt_cache: Option<&'a Path>,
}

impl<'a> Asked<'a> {
    /// A session with the draft model, that holds what `--prompt-cache` kept.
    fn session(&self, terminal: &Terminal) -> Result<Session<'a>> {
        let mut session = self.engine.session();
        if let Some(small) = self.small {
            session.guess_with(small.session())?;
        }
        let Some(path) = self.prompt_cache else { return Ok(session) };
        let note = |what: &str| terminal.note(&format!("note: {} {what}; it is made anew", path.display()));
        match session.restore(path)? {
            Restored::Nothing => check_folder(path)?,
            Restored::Tokens(tokens) => terminal.detail(&format!("prompt cache: {tokens} tokens")),
            Restored::Foreign => note("was made with another model, CPU or --kv"),
            Restored::Damaged => note("is damaged"),
        }
        Ok(session)
    }

    /// Keeps what the session holds for `--prompt-cache`.
    fn keep(&self, session: &mut Session) -> Result<()> {
        self.prompt_cache.map_or(Ok(()), |path| session.save(path))
    }
}

/// That a file can be written there is known before the work.
fn check_folder(path: &Path) -> Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() && !folder.is_dir() => {
            Err(Error::usage(format!("there is no folder {} for --prompt-cache", folder.display())))
        }
        _ => Ok(()),
    }
}

/// Answers one prompt.
fn one(
    args: &Args,
    asked: &Asked,
    prompt: &str,
    output: Output,
    grounds: Option<&Grounds>,
    stats: &mut Stats,
    terminal: &Terminal,
) -> Outcome {
    let engine = asked.engine;
    let mut request = asked.request.clone();
    request.tools = args.tools.few(request.tools, prompt, engine)?;
    let mut messages = conversation(asked.system, prompt);
    let mut prompt = one_turn(engine, asked.system, prompt, request.tools.as_ref(), asked.think)?;
    let mut session = asked.session(terminal)?;
    session.profile = args.profile.then(Default::default);
    let exec = args.tools.tool_exec.is_some();
    let shown = Shown {
        thoughts: args.think.shows() && !args.quiet && !args.json,
        answer: !args.json,
        calls: !args.json && !exec,
        markdown: false,
    };
    let display = RefCell::new(Display::to(output, shown));
    // When nobody reads any more there is no reason to go on.
    let stopped = || terminal::interrupted() || display.borrow().is_closed();
    let mut called = Vec::new();
    let answer = loop {
        let on_part = &mut |part: Part| display.borrow_mut().part(part);
        let answer = stats.answer(&mut session, &prompt, &request, on_part, &stopped)?;
        if !exec || answer.calls.is_empty() || answer.finish == Finish::Interrupted {
            break answer;
        }
        let results = args.tools.results(&answer.calls, &mut terminal::confirm)?;
        for (call, result) in answer.calls.iter().zip(&results) {
            terminal.note(&format!("called {}", tools::shown(call)));
            called.push(json!({"name": call.name, "arguments": call.arguments, "result": result}));
        }
        messages.extend(turn(&answer.text, &answer.calls, results));
        if called.len() >= tools::ROUNDS {
            terminal.note(&format!("note: {} calls are enough; the answer must do without more", called.len()));
            request.tools = None;
        }
        request.tools = request.tools.map(Tools::optional);
        prompt = Prompt::chat(engine, &messages, request.tools.as_ref(), asked.think.enable())?;
    };
    let mut output = display.into_inner().finish()?;
    if args.json {
        let mut value = response::completion(&answer, THRESHOLD);
        if let Some(grounds) = grounds {
            value["sources"] = grounds.json();
        }
        if exec {
            value["called"] = called.into();
        }
        output.write(&format!("{value}\n"))?;
    }
    if let Some(grounds) = grounds.filter(|grounds| !grounds.sources.is_empty()) {
        let places: Vec<String> = grounds.sources.iter().map(|(passage, _)| format!("  {}", passage.place())).collect();
        terminal.note(&format!("sources:\n{}", places.join("\n")));
    }
    // All but the last token of a prompt that was known is known still.
    if answer.reused_tokens + 1 < answer.prompt_tokens {
        asked.keep(&mut session)?;
    }
    if let Some(profile) = &session.profile {
        terminal.say(&profile.table());
    }
    match answer.finish {
        Finish::Interrupted => return Err(Failure::Reported(130)),
        Finish::Context => {
            terminal.note(&format!("note: the context of {} tokens is full, the answer was cut", engine.context()))
        }
        Finish::Length if answer.unfinished_thinking => terminal.note(&format!(
            "note: all {} tokens (--max-tokens) went into thinking, there is no answer; more tokens or --think off help",
            answer.ids.len()
        )),
        Finish::Length => terminal.note(&format!("note: the answer was cut at {} tokens (--max-tokens)", answer.ids.len())),
        Finish::Stop if answer.unfinished_thinking => {
            terminal.note("note: the model ended inside its thinking, there is no answer; --think off may help");
        }
        Finish::Stop => {}
    }
    output.finish()
}

/// Answers every line of a batch, in one session, so that what prompts begin with alike is run once.
fn many(args: &Args, asked: &Asked, batch: Batch, stats: &mut Stats, terminal: &mut Terminal) -> Outcome {
    let Asked { engine, request, system, think, .. } = *asked;
    let mut session = asked.session(terminal)?;
    let answer = &mut |mut item: Item| {
        let question = match &item.content {
            Content::Prompt(prompt) => prompt,
            Content::Messages(messages) => last_question(messages),
        };
        item.request.tools = args.tools.few(item.request.tools.take(), question, engine)?;
        let system = item.system.as_deref().or(system).filter(|text| !text.is_empty());
        let think = item.think.unwrap_or(think);
        let prompt = match item.content {
            Content::Prompt(prompt) => one_turn(engine, system, &prompt, item.request.tools.as_ref(), think)?,
            Content::Messages(mut messages) => {
                if !engine.template.has_template() {
                    return Err(Error::usage("this is a base model without a chat template; give `prompt`, not `messages`"));
                }
                if let Some(system) = system.filter(|_| messages.iter().all(|m| m.role != Role::System)) {
                    messages.insert(0, Message::new(Role::System, system));
                }
                Prompt::chat(engine, &messages, item.request.tools.as_ref(), think.enable())?
            }
        };
        let answer = stats.answer(&mut session, &prompt, &item.request, &mut |_| {}, &terminal::interrupted)?;
        Ok((answer.finish != Finish::Interrupted).then(|| response::completion(&answer, THRESHOLD)))
    };
    let done = batch.run(request, answer, &|error| response::failure(error, THRESHOLD), terminal);
    // A line that failed takes nothing from the others.
    let kept = asked.keep(&mut session);
    done?;
    Ok(kept?)
}

/// The prompt of one user turn; a model without a chat template gets the text as it is.
fn one_turn(engine: &Engine, system: Option<&str>, prompt: &str, tools: Option<&Tools>, think: Think) -> Result<Prompt> {
    if !engine.template.has_template() {
        if tools.is_some() {
            return Err(Error::usage("this is a base model without a chat template; it calls no tools"));
        }
        let text = system.map_or_else(|| prompt.to_owned(), |s| format!("{s}\n\n{prompt}"));
        return Ok(Prompt { ids: engine.tokenizer.encode(&text, true)?, inside: false });
    }
    Prompt::chat(engine, &conversation(system, prompt), tools, think.enable())
}

fn conversation(system: Option<&str>, prompt: &str) -> Vec<Message> {
    let system = system.map(|text| Message::new(Role::System, text));
    system.into_iter().chain([Message::new(Role::User, prompt)]).collect()
}

/// What `--verbose` tells before the work begins.
fn details(engine: &Engine, request: &Request) -> String {
    let manifest = &engine.bundle.manifest;
    let need = engine.footprint();
    let s = &request.sampling;
    format!(
        "model:    {} ({}, {} bits, {:.2} bits a weight), {}\n\
         cpu:      {} threads ({}), {} kernels\n\
         context:  {} of at most {} tokens\n\
         memory:   weights {}, context {}, working memory {}\n\
         sampling: temperature {}, top_k {}, top_p {}, min_p {}, repetition_penalty {}, seed {}, at most {} tokens",
        manifest.source.name,
        manifest.family,
        manifest.quantiser.bits,
        manifest.quantiser.bits_per_weight,
        engine.bundle.path.display(),
        engine.threads(),
        Topology::detect(),
        engine.level(),
        engine.context(),
        manifest.spec.max_context(),
        size(need.weights),
        size(need.cache),
        size(need.arena),
        s.temperature,
        s.top_k,
        s.top_p,
        s.min_p,
        s.repetition_penalty,
        s.seed,
        request.max_tokens,
    )
}

/// Opens what is named and reads the prompt.
fn work(args: &Args) -> Result<Work> {
    if let Some(input) = &args.batch {
        if input == "-" && args.no_stdin {
            return Err(Error::usage("--batch - reads standard input, --no-stdin forbids it"));
        }
        return Ok(Work::Batch(Batch::open(input, args.output.as_deref())?));
    }
    let Some(prompt) = prompt(args)? else {
        if args.corpus.is_some() {
            return Err(Error::usage("--corpus needs a prompt").with_hint("give --prompt TEXT"));
        }
        return match args.prompt_cache {
            Some(_) => Err(Error::usage("--prompt-cache needs a prompt or --batch").with_hint("/save keeps a chat")),
            None => Ok(Work::Chat),
        };
    };
    Ok(Work::Prompt(prompt, Output::open(args.output.as_deref())?))
}

/// The prompt option and what was piped in, joined by an empty line; `None` for a chat on a terminal.
fn prompt(args: &Args) -> Result<Option<String>> {
    if let Some(model) = args.model.model.as_ref().filter(|m| m.contains(char::is_whitespace) && !Path::new(m).exists()) {
        return Err(Error::usage(format!("there is no model \"{model}\"")).with_hint("a prompt follows the model, or --prompt"));
    }
    let stdin = std::io::stdin();
    let piped = if args.no_stdin || stdin.is_terminal() { String::new() } else { read_stdin()? };
    let piped = piped.trim_end();
    let hint = "give --prompt TEXT, or pipe text in";
    let prompt = args.prompt.clone().or_else(|| (!args.words.is_empty()).then(|| args.words.join(" ")));
    match (prompt, piped.is_empty()) {
        (Some(prompt), true) if prompt.trim().is_empty() => Err(Error::usage("the prompt is empty")),
        (Some(prompt), true) => Ok(Some(prompt)),
        (Some(prompt), false) => Ok(Some(format!("{prompt}\n\n{piped}"))),
        (None, false) => Ok(Some(piped.to_owned())),
        (None, true) if args.no_stdin => Err(Error::usage("--no-stdin needs a prompt").with_hint("give --prompt TEXT")),
        (None, true) if !stdin.is_terminal() => {
            Err(Error::usage("no prompt: standard input is empty and no terminal").with_hint(hint))
        }
        (None, true) if args.json => Err(Error::usage("--json needs a prompt").with_hint(hint)),
        (None, true) if args.output.is_some() => Err(Error::usage("--output needs a prompt").with_hint(hint)),
        (None, true) if !std::io::stdout().is_terminal() => {
            Err(Error::usage("no prompt, and a chat needs a terminal for its output").with_hint(hint))
        }
        (None, true) => Ok(None),
    }
}

/// Standard input to its end. A closed or empty one next to --prompt is an ordinary call from a script.
fn read_stdin() -> Result<String> {
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().read_to_end(&mut bytes);
    read.map_err(|e| Error::io("read", Path::new("standard input"), &e))?;
    String::from_utf8(bytes).map_err(|_| Error::usage("standard input is not UTF-8 text"))
}
