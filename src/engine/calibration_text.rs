//! Text to calibrate on, as token ids: what ships with the program, or a file of the user's.
//!
//! Chats are rendered by the model's chat template, because the template's own tokens are part of every input
//! that the model will meet.

use super::chat::{ChatTemplate, Message, RenderOptions, Role};
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use crate::model::calibrate::SAMPLE;
use crate::model::import::Checkpoint;
use serde_json::Value;
use std::path::Path;

/// Tokens of a text at most; longer ones are cut into several.
pub const LONGEST: usize = 512;

/// What makes texts into token ids.
pub struct Reader {
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

impl Reader {
    /// With the tokenizer and the template of `checkpoint`.
    pub fn new(checkpoint: &Checkpoint) -> Result<Self> {
        let files = &checkpoint.tokenizer;
        let tokenizer = Tokenizer::from_text(&files.tokenizer_json, &files.config, checkpoint.generation.as_ref())?;
        let template = ChatTemplate::for_tokenizer(files.chat_template.as_deref(), &tokenizer)?;
        Ok(Reader { tokenizer, template })
    }

    /// Up to `tokens` tokens of the text that ships with the program: a mixture of prose, chats, code and data.
    /// If the model has a chat template, the chats in it are rendered by that, each a text of its own.
    pub fn shipped(&self, tokens: usize) -> Result<Vec<Vec<u32>>> {
        let mut texts = Texts::new(tokens);
        let mut plain = String::new();
        for piece in SAMPLE.split("\n---\n") {
            // Room is judged by the part that is not encoded yet as well: a token has at least one byte.
            match chat(piece).filter(|_| self.template.has_template()) {
                Some(messages) => texts.add(self.render(&messages)?),
                None => {
                    plain.push_str(piece);
                    plain.push_str("\n---\n");
                }
            }
            let pending = self.tokenizer.encode(&plain, false)?;
            if pending.len() >= LONGEST.min(texts.room) {
                texts.add_pieces(&pending, self.begin());
                plain.clear();
            }
            if texts.room == 0 {
                break;
            }
        }
        texts.add_pieces(&self.tokenizer.encode(&plain, false)?, self.begin());
        Ok(texts.texts)
    }

    /// Up to `tokens` tokens of a file. One that ends in `.jsonl` has an object a line: a chat
    /// `{"messages": [{"role", "content"}, ...]}`, which is rendered by the chat template, or `{"text": "..."}`.
    /// Any other file is one text.
    pub fn file(&self, path: &Path, tokens: usize) -> Result<Vec<Vec<u32>>> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, &e))?;
        let mut texts = Texts::new(tokens);
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl")) {
            for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let ids = self.line(line).map_err(|e| e.context(format!("{} line {}", path.display(), number + 1)))?;
                texts.add_pieces(&ids, None);
                if texts.room == 0 {
                    break;
                }
            }
        } else {
            // No more text than could be needed.
            let some: String = text.chars().take(tokens.saturating_mul(16)).collect();
            texts.add_pieces(&self.tokenizer.encode(&some, false)?, self.begin());
        }
        if texts.texts.is_empty() && tokens > 0 {
            return Err(Error::bad_file(path, "there is no text to calibrate on"));
        }
        Ok(texts.texts)
    }

    /// A line of a JSONL file.
    fn line(&self, line: &str) -> Result<Vec<u32>> {
        let wrong = |what: String| Error::usage(what).with_hint(r#"a line is {"messages": [...]} or {"text": "..."}"#);
        let mut value: Value = serde_json::from_str(line).map_err(|e| wrong(format!("not JSON: {e}")))?;
        match (value.get_mut("messages").map(Value::take), value.get("text").and_then(Value::as_str)) {
            (Some(messages), _) => {
                let messages: Vec<Message> = serde_json::from_value(messages).map_err(|e| wrong(format!("`messages`: {e}")))?;
                if messages.is_empty() {
                    return Err(wrong("`messages` is empty".to_owned()));
                }
                self.render(&messages)
            }
            (None, Some(text)) => self.tokenizer.encode(text, true),
            (None, None) => Err(wrong("neither `messages` nor `text`".to_owned())),
        }
    }

    fn render(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let options = RenderOptions { now: Some(super::self_text::DATE), ..Default::default() };
        self.tokenizer.encode_prompt(&self.template.render(messages, &options)?)
    }

    /// What texts for this model begin with.
    fn begin(&self) -> Option<u32> {
        self.tokenizer.bos().filter(|_| self.tokenizer.wants_bos())
    }
}

/// Texts being gathered.
struct Texts {
    texts: Vec<Vec<u32>>,
    /// Tokens that are still wanted.
    room: usize,
}

impl Texts {
    fn new(tokens: usize) -> Self {
        Texts { texts: Vec::new(), room: tokens }
    }

    /// Adds a text, or what there is room for.
    fn add(&mut self, mut ids: Vec<u32>) {
        ids.truncate(self.room.min(LONGEST));
        self.room -= ids.len();
        self.texts.extend(Some(ids).filter(|ids| !ids.is_empty()));
    }

    /// Adds a text in pieces that each start with `begin`.
    fn add_pieces(&mut self, ids: &[u32], begin: Option<u32>) {
        for piece in ids.chunks(LONGEST - usize::from(begin.is_some())) {
            self.add(begin.into_iter().chain(piece.iter().copied()).collect());
        }
    }
}

/// Alternates texts of two kinds, so that any beginning is a mixture.
pub fn mixed(a: Vec<Vec<u32>>, b: Vec<Vec<u32>>) -> Vec<Vec<u32>> {
    let (mut a, mut b) = (a.into_iter(), b.into_iter());
    let mut texts = Vec::new();
    loop {
        let (x, y) = (a.next(), b.next());
        if x.is_none() && y.is_none() {
            return texts;
        }
        texts.extend(x.into_iter().chain(y));
    }
}

/// How the shipped text names who speaks: system, user, assistant.
const SYSTEM: &[&str] = &["System"];
#[rustfmt::skip]
const USER: &[&str] = &[
    "User", "Utilisateur", "Benutzer", "Utente", "Usuário", "Gebruiker", "Użytkownik", "Användare", "Kullanıcı", "Pengguna",
    "Người dùng", "Пользователь", "Користувач", "Χρήστης", "משתמש", "المستخدم", "उपयोगकर्ता", "用户", "ユーザー", "사용자",
];
#[rustfmt::skip]
const ASSISTANT: &[&str] = &[
    "Assistant", "Assistent", "Assistente", "Asystent", "Asistan", "Asisten", "Trợ lý", "Ассистент", "Помічник", "Βοηθός",
    "עוזר", "المساعد", "सहायक", "助手", "アシスタント", "도우미",
];

/// A piece of the shipped text that is a chat.
fn chat(piece: &str) -> Option<Vec<Message>> {
    let speaker = |line: &str| -> Option<(Role, usize)> {
        let at = line.find([':', '：'])?;
        let name = line[..at].trim_end();
        let role = [(SYSTEM, Role::System), (USER, Role::User), (ASSISTANT, Role::Assistant)];
        let role = role.into_iter().find(|(names, _)| names.contains(&name))?.1;
        Some((role, at + line[at..].chars().next().map_or(0, char::len_utf8)))
    };
    let mut messages: Vec<Message> = Vec::new();
    for line in piece.trim().lines() {
        match (speaker(line), messages.last_mut()) {
            (Some((role, at)), _) => messages.push(Message::new(role, line[at..].trim())),
            (None, Some(message)) => {
                message.content.push('\n');
                message.content.push_str(line);
            }
            (None, None) => return None,
        }
    }
    messages.iter().any(|m| m.role == Role::Assistant).then_some(messages)
}

#[cfg(test)]
#[path = "calibration_text_tests.rs"]
mod tests;
