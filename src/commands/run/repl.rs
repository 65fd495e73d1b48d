//! The chat on a terminal.

use super::chat_ids;
use crate::commands::terminal::{self, Terminal};
use crate::commands::{Failure, Outcome};
use cactus::engine::chat::{Message, Role};
use cactus::engine::{Engine, Finish, Request, generate};
use cactus::error::Error;
use rustyline::error::ReadlineError;

const HELP: &str = "/clear  forget the conversation    /help  this text    /exit  leave (also Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the conversation.";

pub fn run(engine: &Engine, request: &Request, system: Option<&str>, terminal: &Terminal) -> Outcome {
    if !engine.template.has_template() {
        return Err(Error::usage("this is a base model without a chat template; it can continue a text but not chat")
            .with_hint("give the text with --prompt")
            .into());
    }
    let mut editor =
        rustyline::DefaultEditor::new().map_err(|e| Failure::Error(Error::usage(format!("cannot use the terminal: {e}"))))?;
    let opening: Vec<Message> = system.map(|s| Message::new(Role::System, s)).into_iter().collect();
    let mut messages = opening.clone();
    let mut session = engine.session();
    terminal.note("Type a message. /help lists the commands.");
    loop {
        let line = match editor.readline(">>> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                terminal.note("(Ctrl-D or /exit leaves)");
                continue;
            }
            Err(ReadlineError::Eof) => return Ok(()),
            Err(e) => return Err(Error::usage(format!("cannot read from the terminal: {e}")).into()),
        };
        let line = line.trim();
        match line {
            "" => continue,
            "/exit" | "/quit" | "/bye" => return Ok(()),
            "/help" | "/?" => terminal.note(HELP),
            "/clear" => {
                messages = opening.clone();
                terminal.note("(cleared)");
            }
            _ if line.starts_with('/') && !line.contains(' ') => terminal.note(&format!("no command {line}; /help lists them")),
            text => {
                let _ = editor.add_history_entry(text);
                messages.push(Message::new(Role::User, text));
                terminal::clear_interrupt();
                match turn(engine, &mut session, &messages, request, terminal) {
                    Ok(answer) => messages.push(Message::new(Role::Assistant, answer)),
                    Err(Failure::Error(error)) => {
                        terminal::print_error(&error);
                        messages.pop();
                    }
                    Err(reported) => return Err(reported),
                }
            }
        }
    }
}

/// One answer, streamed; returns its text.
fn turn(
    engine: &Engine,
    session: &mut cactus::engine::Session,
    messages: &[Message],
    request: &Request,
    terminal: &Terminal,
) -> Outcome<String> {
    let ids = chat_ids(engine, messages)?;
    let mut closed = Ok(());
    let on_text = &mut |text: &str| {
        if closed.is_ok() {
            closed = terminal::print(text);
        }
    };
    let answer = generate(session, &ids, request, on_text, &terminal::interrupted)?;
    closed?;
    terminal::print("\n")?;
    let note = match answer.finish {
        Finish::Stop => "",
        Finish::Length => ", cut at --max-tokens",
        Finish::Context => ", cut: the context is full",
        Finish::Interrupted => ", stopped",
    };
    terminal.note(&format!(
        "[{:.1} tokens/s, {} of {} tokens of context, confidence {:.2}{note}]",
        answer.decode_tps(),
        session.ids().len(),
        engine.context(),
        answer.confidence.unwrap_or(0.0)
    ));
    Ok(answer.text)
}
