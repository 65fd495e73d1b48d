//! What the commands of the chat do.

use super::editor;
use super::repl::{Chat, Next};
use crate::commands::Outcome;
use crate::commands::terminal;
use cactus::engine::conversation::{Conversation, Settings};
use cactus::engine::{Engine, Session, response};
use cactus::error::{Error, Result};
use std::path::{Path, PathBuf};

pub struct Command {
    pub name: &'static str,
    /// What follows the name, and what it does, for the help.
    usage: &'static str,
    about: &'static str,
}

const fn command(name: &'static str, usage: &'static str, about: &'static str) -> Command {
    Command { name, usage, about }
}

pub const COMMANDS: [Command; 14] = [
    command("/help", "", "this text"),
    command("/clear", "", "forget the conversation; the system prompt stays"),
    command("/system", "[TEXT]", "show or set the system prompt (- removes it)"),
    command("/save", "NAME", "write the conversation to a file; a bare name goes to the chats of this user"),
    command("/load", "[NAME]", "go on with a saved conversation; without a name: list them"),
    command("/set", "[NAME VALUE]", "show or change settings: temperature, think, max-tokens, ..."),
    command("/model", "[MODEL]", "show the model, or go on with another one"),
    command("/stats", "", "numbers of the last answer"),
    command("/regenerate", "", "answer the last message again, with another seed"),
    command("/undo", "", "take back the last message and its answer"),
    command("/image", "FILE", "give the model an image"),
    command("/audio", "FILE", "give the model a sound file"),
    command("/exit", "", "leave (also Ctrl-D)"),
    command("/quit", "", "the same"),
];

/// The command and its argument, if `typed` is one: a single line that begins with a slash and a word. Paths
/// and comments begin otherwise, and a space in front makes anything a message.
pub fn parse(typed: &str) -> Option<(&str, &str)> {
    let typed = typed.trim_end();
    let (name, rest) = typed.split_once(' ').unwrap_or((typed, ""));
    let word = name.strip_prefix('/')?;
    let is_word = word == "?" || (!word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase()));
    (is_word && !typed.contains('\n')).then(|| (name, rest.trim()))
}

impl Chat<'_> {
    /// Carries out a command; `None`: the chat goes on.
    pub fn command(&mut self, name: &str, argument: &str, engine: &Engine, session: &mut Session) -> Outcome<Option<Next>> {
        let done = match name {
            "/exit" | "/quit" | "/bye" => return Ok(Some(Next::Leave)),
            "/model" if !argument.is_empty() => return Ok(Some(Next::Model(argument.to_owned()))),
            "/regenerate" => {
                self.regenerate(engine, session)?;
                Ok(())
            }
            "/help" | "/?" => {
                self.note(&help());
                Ok(())
            }
            "/clear" => {
                self.conversation.clear();
                self.note("(cleared)");
                Ok(())
            }
            "/system" => {
                self.system(argument);
                Ok(())
            }
            "/undo" => {
                self.undo();
                Ok(())
            }
            "/model" => {
                self.note(&describe(engine));
                Ok(())
            }
            "/stats" => {
                self.stats(engine, session);
                Ok(())
            }
            "/save" => self.save(argument),
            "/load" => self.load(argument),
            "/set" => self.set(argument),
            "/image" | "/audio" => Err(Error::unsupported(format!(
                "{} takes text only: this version of cactus reads no {}",
                self.conversation.model,
                if name == "/image" { "images" } else { "sound" }
            ))),
            _ => {
                Err(Error::usage(format!("no command {name}")).with_hint("/help lists them; a space in front makes it a message"))
            }
        };
        if let Err(error) = done {
            terminal::print_error(&error);
        }
        Ok(None)
    }

    fn system(&mut self, argument: &str) {
        match argument {
            "" => self.note(self.conversation.system().unwrap_or("(no system prompt)")),
            "-" => {
                self.conversation.set_system(None);
                self.note("(system prompt removed)");
            }
            text => {
                self.conversation.set_system(Some(text));
                self.note("(system prompt set, from the next answer on)");
            }
        }
    }

    fn undo(&mut self) {
        match self.conversation.undo() {
            Some(question) => self.note(&format!("(taken back: {})", shortened(&question))),
            None => self.note("(nothing to take back)"),
        }
    }

    fn save(&self, argument: &str) -> Result<()> {
        let path = chat_path(argument, "/save")?;
        if let Some(folder) = path.parent().filter(|_| is_bare(argument)) {
            // Where this fails, saving fails and says so.
            let _ = editor::private_folder(folder);
        }
        self.conversation.save(&path)?;
        let count = self.conversation.messages().len();
        self.note(&format!("(saved {count} messages to {})", path.display()));
        Ok(())
    }

    fn load(&mut self, argument: &str) -> Result<()> {
        if argument.is_empty() {
            let names = saved_names();
            self.note(&if names.is_empty() { "(no saved conversations)".to_owned() } else { names.join("\n") });
            return Ok(());
        }
        let mut loaded = Conversation::load(&chat_path(argument, "/load")?, &self.conversation.settings)?;
        let model = std::mem::take(&mut self.conversation.model);
        let other = (loaded.model != model && !loaded.model.is_empty()).then(|| loaded.model.clone());
        loaded.model = model;
        self.conversation = loaded;
        self.last = None;
        self.note(&format!("(loaded {} messages)", self.conversation.messages().len()));
        if let Some(other) = other {
            self.note(&format!(
                "(they were made with {other}; {} goes on. /model {other} changes that)",
                self.conversation.model
            ));
        }
        if let Some(last) = self.conversation.messages().last() {
            self.note(&format!("... {}", shortened(&last.content)));
        }
        Ok(())
    }

    fn set(&mut self, argument: &str) -> Result<()> {
        let settings = &mut self.conversation.settings;
        match argument.split_once(char::is_whitespace) {
            _ if argument.is_empty() => {
                let lines: Vec<String> =
                    Settings::NAMES.iter().map(|name| format!("{name:20}{}", settings.get(name).unwrap_or_default())).collect();
                self.note(&lines.join("\n"));
                Ok(())
            }
            Some((name, value)) => {
                settings.set(name, value.trim())?;
                let value = settings.get(name).unwrap_or_default();
                self.note(&format!("({name} is now {value})"));
                Ok(())
            }
            None => match settings.get(argument) {
                Some(value) => {
                    self.note(&format!("{argument:20}{value}"));
                    Ok(())
                }
                None => settings.clone().set(argument, ""),
            },
        }
    }

    fn stats(&self, engine: &Engine, session: &Session) {
        let Some(last) = &self.last else { return self.note("(no answer yet)") };
        let memory = response::ram_usage_mb().as_f64().map_or(String::new(), |mb| format!(", {mb:.0} MB of memory at most"));
        self.note(&format!(
            "prompt       {} tokens, {} of them known from before, {:.1} tokens/s
answer       {} tokens, {:.1} tokens/s
time         {:.2} s to the first token, {:.2} s in all
confidence   {}
context      {} of {} tokens, {:.1} MB of keys and values{memory}
turns        {}, {} of them no longer shown to the model",
            last.prompt_tokens,
            last.reused_tokens,
            last.prefill_tps(),
            last.ids.len(),
            last.decode_tps(),
            last.first_token_ms / 1e3,
            last.total_ms / 1e3,
            last.confidence.map_or("unknown".to_owned(), |c| format!("{c:.2}")),
            session.ids().len(),
            engine.context(),
            session.cache_bytes() as f64 / 1e6,
            self.conversation.turns(),
            self.conversation.passed_turns(),
        ));
    }
}

fn help() -> String {
    let lines: Vec<String> = COMMANDS.iter().map(|c| format!("  {:25}{}", format!("{} {}", c.name, c.usage), c.about)).collect();
    format!(
        "{}
Several lines: paste them, begin a line with Alt-Enter, or put them between \"\"\" and \"\"\".
Ctrl-C stops an answer; what was said so far stays in the conversation.",
        lines.join("\n")
    )
}

fn describe(engine: &Engine) -> String {
    let manifest = &engine.bundle.manifest;
    format!(
        "{} ({}), {:.2} bits per weight, {}, {} threads, context {} of {} tokens",
        manifest.source.name,
        manifest.family,
        manifest.quantiser.bits_per_weight,
        engine.level(),
        engine.threads(),
        engine.context(),
        manifest.spec.max_context()
    )
}

/// The first line, cut to what fits a terminal.
fn shortened(text: &str) -> String {
    let line = text.trim().lines().next().unwrap_or_default();
    let cut: String = line.chars().filter(|c| !c.is_control()).take(70).collect();
    if cut.len() < text.trim().len() { cut + "..." } else { cut }
}

/// A name without folder and ending.
fn is_bare(name: &str) -> bool {
    !name.contains(['/', '\\', '.', '~'])
}

/// The file of a conversation.
fn chat_path(name: &str, command: &str) -> Result<PathBuf> {
    if name.is_empty() {
        return Err(Error::usage(format!("{command} needs a name or a file")));
    }
    if !is_bare(name) {
        let home = name.strip_prefix("~/").and_then(|rest| Some(dirs::home_dir()?.join(rest)));
        return Ok(home.unwrap_or_else(|| PathBuf::from(name)));
    }
    let folder = chats_folder().ok_or_else(|| Error::not_found("no folder for this user's data").with_hint("give a path"))?;
    Ok(folder.join(format!("{name}.json")))
}

fn chats_folder() -> Option<PathBuf> {
    Some(editor::data_folder()?.join("chats"))
}

/// Names of saved conversations, in alphabetical order.
fn saved_names() -> Vec<String> {
    let entries = chats_folder().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let name = |path: &Path| (path.extension()? == "json").then(|| path.file_stem()?.to_str().map(str::to_owned))?;
    let mut names: Vec<String> = entries.filter_map(|entry| name(&entry.path())).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        assert_eq!(parse("/set top-k  5 "), Some(("/set", "top-k  5")));
        assert_eq!(parse("/?"), Some(("/?", "")));
        assert_eq!(parse("/nonsense"), Some(("/nonsense", "")));
        for message in ["/etc/hosts what is it", "// a comment", "/", " /help", "/exit\nnow", "a /help", "/Users"] {
            assert_eq!(parse(message), None, "{message:?}");
        }
    }

    #[test]
    fn bare_names_have_a_folder_of_their_own() {
        assert!(is_bare("notes") && !is_bare("notes.json") && !is_bare("./notes") && !is_bare("../x"));
        assert_eq!(chat_path("./notes.json", "/save").unwrap(), PathBuf::from("./notes.json"));
        assert!(chat_path("", "/save").is_err());
    }
}
