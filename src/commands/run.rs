//! `cactus run`: one answer, or a chat.

mod display;
mod editor;
mod markdown;
mod repl;
mod repl_commands;

use super::model_options::{EngineArgs, ModelArgs};
use super::terminal::{self, Terminal};
use super::{Failure, Outcome};
use cactus::engine::chat::{Message, Role};
use cactus::engine::sampler::Sampling;
use cactus::engine::thinking::{Prompt, Think, generate_parts};
use cactus::engine::{Engine, Finish, Request, response};
use cactus::error::{Error, Result};
use cactus::hub::catalog;
use clap::builder::TypedValueParser;
use display::{Display, Shown};
use std::io::{IsTerminal, Read};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt. Text piped to standard input follows it after an empty line
    #[arg(short, long)]
    pub prompt: Option<String>,
    /// What the model is told before the conversation
    #[arg(short, long)]
    pub system: Option<String>,
    /// Reasoning before the answer: on, off, or hide (reason, but show only the answer). Thoughts go to
    /// standard error. auto: as the model does by itself
    #[arg(long, default_value = "auto", value_parser = think())]
    pub think: Think,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the answer as a JSON object with confidence, timings and token counts
    #[arg(long)]
    pub json: bool,
    /// Only results and errors
    #[arg(short, long)]
    pub quiet: bool,
    /// Print where the time went, to standard error
    #[arg(long)]
    pub profile: bool,
}

fn think() -> impl clap::builder::TypedValueParser<Value = Think> {
    clap::builder::PossibleValuesParser::new(Think::NAMES).try_map(|name| name.parse::<Think>())
}

/// How tokens are chosen.
#[derive(clap::Args, Clone)]
pub struct SamplingArgs {
    /// Tokens of the answer at most
    #[arg(long, default_value_t = 1024)]
    pub max_tokens: usize,
    /// 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// Only the K likeliest tokens (0: all)
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f32,
    /// Only tokens at least this likely in proportion to the likeliest
    #[arg(long, default_value_t = 0.0)]
    pub min_p: f32,
    /// Makes tokens of the last 64 less likely (1: no effect)
    #[arg(long, default_value_t = 1.1)]
    pub repetition_penalty: f32,
    /// The same seed gives the same answer
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Ends the answer; may be given several times
    #[arg(long)]
    pub stop: Vec<String>,
}

impl SamplingArgs {
    pub fn request(&self) -> Result<Request> {
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            ..Sampling::default()
        };
        sampling.validate()?;
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::usage("an empty stop text would end every answer at once"));
        }
        Ok(Request { sampling, max_tokens: self.max_tokens, stops: self.stop.clone(), ignore_end: false })
    }
}

/// Threshold that answers are compared with until handoff is configured.
const THRESHOLD: f64 = 0.7;

pub fn run(args: &Args) -> Outcome {
    match answer(args) {
        Err(Failure::Error(error)) if args.json => {
            terminal::print(&format!("{}\n", response::failure(&error, THRESHOLD)))?;
            Err(Failure::Reported(error.exit_code()))
        }
        outcome => outcome,
    }
}

fn answer(args: &Args) -> Outcome {
    let request = args.sampling.request()?;
    let prompt = prompt(args)?;
    let mut terminal = Terminal::new(args.quiet || args.json);
    let bundle = args.model.bundle(&mut terminal)?;
    let engine = args.engine.load(&bundle)?;
    if args.model.model.is_none() {
        terminal.note(&format!(
            "{} is a small starter model; for better answers try: cactus run {}",
            catalog::STARTER.repo,
            catalog::RECOMMENDED.repo
        ));
    }
    terminal::catch_interrupts();
    let Some(prompt) = prompt else {
        return repl::run(args, engine, &request, &mut terminal);
    };
    let prompt = one_turn(&engine, args.system.as_deref(), &prompt, args.think)?;
    let mut session = engine.session();
    session.profile = args.profile.then(Default::default);
    let shown = Shown { thoughts: args.think.shows() && !args.quiet && !args.json, answer: !args.json, markdown: false };
    let mut display = Display::new(shown);
    let answer = generate_parts(&mut session, &prompt, &request, &mut |part| display.part(part), &terminal::interrupted)?;
    display.finish()?;
    if args.json {
        terminal::print(&format!("{}\n", response::completion(&answer, THRESHOLD)))?;
    }
    if let Some(profile) = &session.profile {
        terminal.note(&profile.table());
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
    Ok(())
}

/// The prompt of one user turn; a model without a chat template gets the text as it is.
fn one_turn(engine: &Engine, system: Option<&str>, prompt: &str, think: Think) -> Result<Prompt> {
    if !engine.template.has_template() {
        let text = system.map_or_else(|| prompt.to_owned(), |s| format!("{s}\n\n{prompt}"));
        return Ok(Prompt { ids: engine.tokenizer.encode(&text, true)?, inside: false });
    }
    let mut messages: Vec<Message> = system.map(|s| Message::new(Role::System, s)).into_iter().collect();
    messages.push(Message::new(Role::User, prompt));
    Prompt::chat(engine, &messages, think.enable())
}

/// The prompt option and what was piped in, joined by an empty line; `None` for a chat on a terminal.
fn prompt(args: &Args) -> Result<Option<String>> {
    let mut piped = String::new();
    let stdin = std::io::stdin();
    // A closed or empty standard input next to --prompt is an ordinary call from a script.
    if !stdin.is_terminal() {
        let source = std::path::Path::new("standard input");
        let mut bytes = Vec::new();
        stdin.lock().read_to_end(&mut bytes).map_err(|e| Error::io("read", source, &e))?;
        piped = String::from_utf8(bytes).map_err(|_| Error::usage("standard input is not UTF-8 text"))?;
    }
    let piped = piped.trim_end();
    match (&args.prompt, piped.is_empty()) {
        (Some(prompt), true) if prompt.trim().is_empty() => Err(Error::usage("the prompt is empty")),
        (Some(prompt), true) => Ok(Some(prompt.clone())),
        (Some(prompt), false) => Ok(Some(format!("{prompt}\n\n{piped}"))),
        (None, false) => Ok(Some(piped.to_owned())),
        (None, true) if !stdin.is_terminal() => {
            Err(Error::usage("no prompt: standard input is empty and no terminal")
                .with_hint("give --prompt TEXT, or pipe text in"))
        }
        (None, true) if args.json => Err(Error::usage("--json needs a prompt").with_hint("give --prompt TEXT, or pipe text in")),
        (None, true) => Ok(None),
    }
}
