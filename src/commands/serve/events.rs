//! From the engine's thread to the caller: pieces of answers, and streams of server-sent events made of them.

use super::failure::Failure;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use cactus::engine::Answer;
use cactus::engine::schedule::Listener;
use cactus::engine::thinking::Part;
use cactus::engine::tools::Call;
use cactus::engine::writing::TokenChoices;
use cactus::error::Result;
use serde_json::Value;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender, UnboundedReceiver, UnboundedSender, channel};
use tokio_stream::wrappers::ReceiverStream;

/// A comment is sent when there was nothing to say for so long, so that nobody on the way thinks the stream is dead.
const SILENCE: Duration = Duration::from_secs(15);
/// Events that are made ahead of what the caller reads.
const AHEAD: usize = 16;

/// Something that one of several answers says.
pub struct Heard {
    pub choice: usize,
    pub said: Said,
    /// The tokens of it, if they were asked for.
    pub tokens: Vec<TokenChoices>,
}

pub enum Said {
    Thought(String),
    Answer(String),
    Call(Call),
    End(Box<Result<Answer>>),
}

/// Hands on what an answer says.
pub struct Ear {
    pub choice: usize,
    pub to: UnboundedSender<Heard>,
}

impl Listener for Ear {
    fn part(&mut self, part: Part, choices: &mut Vec<TokenChoices>) {
        let said = match part {
            Part::Thought(text) => Said::Thought(text.to_owned()),
            Part::Answer(text) => Said::Answer(text.to_owned()),
            Part::Call(call) => Said::Call(call.clone()),
        };
        let _ = self.to.send(Heard { choice: self.choice, said, tokens: std::mem::take(choices) });
    }
    fn done(&mut self, outcome: Result<Answer>, tokens: Vec<TokenChoices>) {
        let _ = self.to.send(Heard { choice: self.choice, said: Said::End(Box::new(outcome)), tokens });
    }
    fn gone(&self) -> bool {
        self.to.is_closed()
    }
}

/// All answers, whole, with their tokens.
pub async fn whole(mut from: UnboundedReceiver<Heard>, count: usize) -> Result<Vec<(Answer, Vec<TokenChoices>)>, Failure> {
    let mut answers: Vec<(Option<Answer>, Vec<TokenChoices>)> = (0..count).map(|_| (None, Vec::new())).collect();
    while let Some(Heard { choice, said, mut tokens }) = from.recv().await {
        let (answer, all) = &mut answers[choice];
        all.append(&mut tokens);
        if let Said::End(outcome) = said {
            *answer = Some((*outcome)?);
        }
    }
    let complete = answers.into_iter().map(|(answer, tokens)| Some((answer?, tokens))).collect::<Option<_>>();
    complete.ok_or_else(broken)
}

/// The engine's thread has ended without a word.
pub fn broken() -> Failure {
    Failure::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, "engine_failed", "the engine failed")
}

/// The sending end of a stream of events.
pub struct Events(Sender<std::result::Result<String, Infallible>>);

impl Events {
    /// False when nobody reads any more.
    pub async fn data(&self, event: &Value) -> bool {
        self.0.send(Ok(format!("data: {}\n\n", one_line(event)))).await.is_ok()
    }

    pub async fn named(&self, name: &str, event: &Value) -> bool {
        self.0.send(Ok(format!("event: {name}\ndata: {}\n\n", one_line(event)))).await.is_ok()
    }

    pub async fn done(&self) {
        let _ = self.0.send(Ok("data: [DONE]\n\n".to_owned())).await;
    }

    /// What is heard next; comments are sent meanwhile. Nothing when all has been said or nobody reads any more.
    pub async fn next(&self, from: &mut UnboundedReceiver<Heard>) -> Option<Heard> {
        loop {
            tokio::select! {
                heard = from.recv() => return heard,
                () = self.0.closed() => return None,
                () = tokio::time::sleep(SILENCE) => {
                    let _ = self.0.send(Ok(": still here\n\n".to_owned())).await;
                }
            }
        }
    }
}

/// JSON that no reader takes for several lines: some clients also end one at the line ends of Unicode.
fn one_line(event: &Value) -> String {
    event.to_string().replace('\u{85}', "\\u0085").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

/// A response that streams what is sent, and its sending end.
pub fn stream() -> (Events, Response) {
    let (sender, receiver): (_, Receiver<std::result::Result<String, Infallible>>) = channel(AHEAD);
    let body = Body::from_stream(ReceiverStream::new(receiver));
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (Events(sender), (headers, body).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients that read lines as Python's `splitlines` does lost the rest of such an event.
    #[test]
    fn an_event_is_one_line_for_every_client() {
        let event = serde_json::json!({"text": "a\u{85}b\u{2028}c\u{2029}d\u{b}\n\r\u{1c}"});
        let line = one_line(&event);
        assert!(!line.contains(['\u{85}', '\u{2028}', '\u{2029}', '\u{b}', '\n', '\r', '\u{1c}']), "{line}");
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), event);
    }
}
