//! The chat on a terminal.

use super::display::{Display, Shown, dimmed};
use super::editor::{self, Editor, Input};
use super::{repl_commands, tools};
use crate::commands::Outcome;
use crate::commands::model_options::ModelArgs;
use crate::commands::terminal::{self, Terminal};
use cactus::engine::conversation::{Conversation, Overflow, Settings, Slide};
use cactus::engine::thinking::generate_parts;
use cactus::engine::tools::{Tools, turn};
use cactus::engine::{Answer, Engine, Finish, Request, Session};
use cactus::error::{Error, Result};

/// The chat's end, or how it goes on.
pub enum Next {
    Leave,
    /// With another model, by the name that was typed.
    Model(String),
}

pub struct Chat<'a> {
    args: &'a super::Args,
    terminal: &'a mut Terminal,
    editor: Editor,
    pub conversation: Conversation,
    /// The last answer, for its numbers.
    pub last: Option<Answer>,
    /// Times the last message was answered again: its seed moves on.
    again: u64,
}

/// Chats until the user leaves.
pub fn run(args: &super::Args, mut engine: Engine, small: Option<Engine>, request: &Request, terminal: &mut Terminal) -> Outcome {
    check(&engine).map_err(|e| e.with_hint("give the text with --prompt"))?;
    let settings = Settings { request: request.clone(), think: args.think, overflow: Overflow::Ask };
    let conversation = Conversation::new(args.model.name(), args.system(), settings);
    let mut chat = Chat { args, terminal, editor: Editor::new()?, conversation, last: None, again: 0 };
    chat.note("Type a message. /help lists the commands.");
    loop {
        match chat.talk(&engine, small.as_ref())? {
            Next::Leave => return Ok(()),
            Next::Model(name) => match chat.open(&name) {
                Ok(other) => {
                    engine = other;
                    chat.note(&format!("({name} goes on with this conversation)"));
                    chat.conversation.model = name;
                    chat.last = None;
                }
                Err(error) => terminal::print_error(&error),
            },
        }
    }
}

fn check(engine: &Engine) -> Result<()> {
    match engine.template.has_template() {
        true => Ok(()),
        false => Err(Error::usage("this is a base model without a chat template; it can continue a text but not chat")),
    }
}

impl Chat<'_> {
    /// A remark for the user.
    pub fn note(&self, text: &str) {
        self.terminal.note(&dimmed(text));
    }

    fn open(&mut self, name: &str) -> Result<Engine> {
        let model = ModelArgs { model: Some(name.to_owned()), bits: self.args.model.bits };
        let bundle = model.bundle(self.terminal)?;
        let engine = self.args.engine.load(&bundle)?;
        check(&engine)?;
        Ok(engine)
    }

    /// Message by message, with one model and perhaps a draft model.
    fn talk<'e>(&mut self, engine: &'e Engine, small: Option<&'e Engine>) -> Outcome<Next> {
        let mut session = engine.session();
        if let Some(Err(error)) = small.map(|small| session.guess_with(small.session())) {
            self.note(&format!("(nothing is guessed ahead by the draft model: {error})"));
        }
        let mut leaving = false;
        loop {
            let typed = match self.editor.read(">>> ")? {
                Input::Text(text) => text,
                Input::End => return Ok(Next::Leave),
                Input::Interrupt { empty: false } => {
                    leaving = false;
                    continue;
                }
                Input::Unreadable => {
                    self.note("(that was no UTF-8 text; nothing was sent)");
                    continue;
                }
                Input::Interrupt { empty: true } if leaving => return Ok(Next::Leave),
                Input::Interrupt { empty: true } => {
                    leaving = true;
                    self.note("(Ctrl-C again, Ctrl-D or /exit leaves)");
                    continue;
                }
            };
            leaving = false;
            let text = editor::message(&typed);
            if text.trim().is_empty() {
                continue;
            }
            self.editor.remember(&typed);
            match repl_commands::parse(&typed) {
                Some((name, argument)) => {
                    if let Some(next) = self.command(name, argument, engine, &mut session)? {
                        return Ok(next);
                    }
                }
                None => {
                    self.conversation.ask(text);
                    self.again = 0;
                    if !self.turn(engine, &mut session)? {
                        self.conversation.undo();
                    }
                }
            }
        }
    }

    /// Answers the last message anew; where that comes to nothing, the old answer stays.
    pub fn regenerate(&mut self, engine: &Engine, session: &mut Session) -> Outcome {
        let before = self.conversation.clone();
        if !self.conversation.take_back_answer() {
            self.note("(no message to answer)");
            return Ok(());
        }
        self.again += 1;
        if self.conversation.settings.request.sampling.temperature <= 0.0 {
            self.note("(at temperature 0 the answer is always the same; try /set temperature 0.7)");
        }
        if !self.turn(engine, session)? {
            self.conversation = before;
        }
        Ok(())
    }

    /// Answers the last message. False if there is no answer.
    fn turn(&mut self, engine: &Engine, session: &mut Session) -> Outcome<bool> {
        terminal::clear_interrupt();
        match self.make_room(engine) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => {
                terminal::print_error(&error);
                return Ok(false);
            }
        }
        let mut request = self.conversation.settings.request.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(self.again);
        for round in 0.. {
            let settings = &self.conversation.settings;
            let exec = self.args.tools.tool_exec.is_some() && round < tools::ROUNDS;
            let shown = Shown { thoughts: settings.think.shows(), answer: true, calls: !exec, markdown: true };
            let mut display = Display::new(shown);
            let answer = self.conversation.prompt(engine).and_then(|prompt| {
                generate_parts(session, &prompt, &request, &mut |part| display.part(part), &terminal::interrupted)
            });
            let answer = match answer {
                Ok(answer) => answer,
                Err(error) => {
                    terminal::print_error(&error);
                    return Ok(false);
                }
            };
            if !answer.ids.is_empty() {
                display.finish()?;
            }
            if answer.ids.is_empty() && answer.finish == Finish::Interrupted {
                self.note("(stopped before the answer began; the message is taken back)");
                return Ok(false);
            }
            self.note(&status(&answer, session, engine));
            let mut results = Vec::new();
            if exec && answer.finish == Finish::Stop {
                results = self.args.tools.results(&answer.calls, &mut terminal::confirm)?;
            }
            let going_on = !results.is_empty();
            match answer.calls.is_empty() {
                true => self.conversation.answer(answer.text.clone()),
                false => self.conversation.called(turn(&answer.text, &answer.calls, results)),
            }
            self.last = Some(answer);
            if !going_on {
                break;
            }
            request.tools = request.tools.map(Tools::optional);
        }
        Ok(true)
    }

    /// Sees to it that the conversation fits the context. False if the user wants no answer then.
    fn make_room(&mut self, engine: &Engine) -> Result<bool> {
        let Some(slide) = self.conversation.overflow(engine)? else { return Ok(true) };
        let context = engine.context();
        let full = format!("the conversation takes {} of {context} tokens, too many for another answer", slide.before);
        match self.conversation.settings.overflow {
            Overflow::Stop => {
                return Err(Error::usage(full)
                    .with_hint("/clear starts over; /set overflow slide leaves out the oldest turns; --context makes room"));
            }
            Overflow::Slide => {}
            Overflow::Ask => {
                self.note(&full);
                let question = format!("Leave out the {} ({} tokens)? [y]es, [a]lways, [n]o: ", oldest(&slide), freed(&slide));
                match self.editor.read(&question)? {
                    Input::Text(text) if text.trim().is_empty() || text.trim_start().starts_with(['y', 'Y']) => {}
                    Input::Text(text) if text.trim_start().starts_with(['a', 'A']) => {
                        self.conversation.settings.overflow = Overflow::Slide;
                    }
                    _ => {
                        self.note("(no answer, and the message is taken back; /clear starts over)");
                        return Ok(false);
                    }
                }
            }
        }
        self.conversation.slide(&slide);
        self.note(&format!("(the model is no longer shown the {}: {} tokens)", oldest(&slide), freed(&slide)));
        Ok(true)
    }
}

fn oldest(slide: &Slide) -> String {
    if slide.turns == 1 { "oldest turn".to_owned() } else { format!("{} oldest turns", slide.turns) }
}

fn freed(slide: &Slide) -> usize {
    slide.before.saturating_sub(slide.after)
}

/// The line below an answer.
fn status(answer: &Answer, session: &Session, engine: &Engine) -> String {
    let confidence = answer.confidence.map_or("unknown".to_owned(), |c| format!("{c:.2}"));
    let mut end = match answer.finish {
        Finish::Stop => "",
        Finish::Length => ", cut at max-tokens",
        Finish::Context => ", cut: the context is full",
        Finish::Interrupted => ", stopped",
    }
    .to_owned();
    if answer.unfinished_thinking {
        end += if answer.finish == Finish::Stop { ", ended while still thinking" } else { " while still thinking" };
    }
    format!(
        "[{:.1} tokens/s, {} of {} tokens of context, confidence {confidence}{end}]",
        answer.decode_tps(),
        session.ids().len(),
        engine.context(),
    )
}
