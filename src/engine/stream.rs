//! Token ids to text one token at a time: whole characters only, and cut at stop strings.

use serde_json::Value;

use super::tokenizer::Tokenizer;

/// What a tokenizer's decoder does to token spellings, as far as it can be done token by token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decoding {
    /// Every character of a token stands for one byte (GPT-2's alphabet).
    ByteLevel,
    /// Replacements within a token, `<0xNN>` tokens as bytes, and up to `strip` leading `strip_char`s of
    /// the whole text dropped.
    Pieces { replace: Vec<(String, String)>, byte_fallback: bool, strip_char: char, strip: usize },
    /// `replacement` stands for a space; at the start of a text it is dropped if `strip_first`.
    Metaspace { replacement: char, strip_first: bool },
    /// Anything else (WordPiece, CTC): text depends on the neighbour, which is decoded along.
    Other,
}

impl Decoding {
    /// From the `decoder` object of a `tokenizer.json`.
    pub(super) fn new(decoder: &Value) -> Self {
        Self::parse(decoder).unwrap_or(Decoding::Other)
    }

    fn parse(decoder: &Value) -> Option<Self> {
        let kind = |step: &Value| step.get("type").and_then(Value::as_str).unwrap_or_default().to_string();
        let one_char = |value: &Value| value.as_str().and_then(|s| s.chars().next());
        match kind(decoder).as_str() {
            "ByteLevel" => return Some(Decoding::ByteLevel),
            "Metaspace" => {
                let replacement = one_char(decoder.get("replacement")?)?;
                let strip_first = decoder.get("prepend_scheme").and_then(Value::as_str) != Some("never");
                return Some(Decoding::Metaspace { replacement, strip_first });
            }
            "Sequence" => {}
            _ => return None,
        }
        let steps = decoder.get("decoders")?.as_array()?;
        if let [only] = steps.as_slice() {
            return Self::parse(only);
        }
        let (mut replace, mut byte_fallback, mut fused, mut strip_char, mut strip) = (Vec::new(), false, false, ' ', 0);
        for step in steps {
            match kind(step).as_str() {
                "Replace" if !byte_fallback && !fused => {
                    let pattern = step.get("pattern")?.get("String")?.as_str()?;
                    replace.push((pattern.to_string(), step.get("content")?.as_str()?.to_string()));
                }
                "ByteFallback" if !fused => byte_fallback = true,
                "Fuse" => fused = true,
                "Strip" if fused && strip == 0 && step.get("stop")?.as_u64()? == 0 => {
                    strip_char = one_char(step.get("content")?)?;
                    strip = usize::try_from(step.get("start")?.as_u64()?).ok()?;
                }
                _ => return None,
            }
        }
        Some(Decoding::Pieces { replace, byte_fallback, strip_char, strip })
    }

    /// The bytes a token of this spelling stands for in the middle of a text.
    pub(super) fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            // A token with a character outside the alphabet was added as it is.
            Decoding::ByteLevel => {
                token.chars().map(alphabet_byte).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Decoding::Pieces { replace, byte_fallback, .. } => {
                if let Some(byte) = fallback_byte(token).filter(|_| *byte_fallback) {
                    return vec![byte];
                }
                replace.iter().fold(token.to_string(), |text, (from, to)| text.replace(from, to)).into_bytes()
            }
            Decoding::Metaspace { replacement, .. } => token.replace(*replacement, " ").into_bytes(),
            Decoding::Other => token.as_bytes().to_vec(),
        }
    }
}

/// The byte that `c` stands for in GPT-2's byte alphabet: printable Latin-1 characters are themselves, the
/// other 68 bytes are U+0100.. in order.
fn alphabet_byte(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// `<0x0A>` is the byte 10.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The state between two tokens of one text: the bytes of a character that is not complete yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Detokenizer {
    partial: Vec<u8>,
    /// Tokens seen; the first one may lose a leading space.
    started: bool,
    /// Leading characters dropped so far, and whether that may go on.
    stripped: usize,
    past_strip: bool,
    previous: Option<u32>,
}

impl Detokenizer {
    /// Appends what became complete with `id` to `out`; ids outside the vocabulary add nothing.
    pub(super) fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        let Some(token) = tokenizer.token_text(id) else { return };
        let first = !std::mem::replace(&mut self.started, true);
        match tokenizer.decoding() {
            Decoding::Metaspace { replacement, strip_first: true } if first => {
                self.partial.extend_from_slice(token.replace(*replacement, "").as_bytes());
            }
            Decoding::Other => {
                let with = |ids: &[u32]| tokenizer.decode_whole(ids);
                let text = match self.previous {
                    None => with(&[id]),
                    Some(previous) => {
                        let both = with(&[previous, id]);
                        both.strip_prefix(&with(&[previous])).map(str::to_string).unwrap_or_else(|| with(&[id]))
                    }
                };
                self.partial.extend_from_slice(text.as_bytes());
            }
            decoding => self.partial.extend(decoding.bytes(&token)),
        }
        self.previous = Some(id);
        let from = out.len();
        self.take_complete(out);
        if let Decoding::Pieces { strip_char, strip, .. } = tokenizer.decoding() {
            self.strip_start(from, *strip_char, *strip, out);
        }
    }

    /// Moves complete characters to `out`. A byte that cannot start or continue one becomes U+FFFD.
    fn take_complete(&mut self, out: &mut String) {
        let mut at = 0;
        while at < self.partial.len() {
            match std::str::from_utf8(&self.partial[at..]) {
                Ok(text) => {
                    out.push_str(text);
                    at = self.partial.len();
                }
                Err(e) => {
                    let valid = &self.partial[at..at + e.valid_up_to()];
                    out.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    at += valid.len();
                    let Some(bad) = e.error_len() else { break };
                    out.push('\u{fffd}');
                    at += bad;
                }
            }
        }
        self.partial.drain(..at);
    }

    /// Drops leading `strip_char`s, `limit` in the whole text, from what stands in `out` after `from`.
    fn strip_start(&mut self, from: usize, strip_char: char, limit: usize, out: &mut String) {
        while !self.past_strip {
            let Some(c) = out[from..].chars().next() else { return };
            if self.stripped < limit && c == strip_char {
                out.remove(from);
                self.stripped += 1;
            } else {
                self.past_strip = true;
            }
        }
    }
}

/// One step of a [`TextStream`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Text that is ready to show; often empty.
    pub text: String,
    /// A stop string (or stop token) was met: the answer ends here, and nothing follows.
    pub stopped: bool,
}

/// The text of a growing answer.
///
/// The pieces are whole characters, and joined they are what [`Tokenizer::decode`] makes of all ids, cut
/// before the first stop string. First is the one that is complete first, the longest if several are at
/// once; so the cut depends on the text only, not on how it was divided into tokens. Text that may be the
/// beginning of a stop string is held back until that is decided.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    state: Detokenizer,
    stops: Vec<Stop>,
    stop_ids: Vec<u32>,
    shown_ids: Vec<u32>,
    /// Decoded but not handed out.
    held: String,
    stopped: bool,
}

/// A stop string with its matching automaton (Knuth-Morris-Pratt), so that a token costs time in its own
/// length only.
struct Stop {
    text: Vec<u8>,
    /// For a match of i + 1 bytes, the length of the longest shorter match that ends there too.
    fallback: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Self {
        let text = text.as_bytes().to_vec();
        let mut fallback = vec![0; text.len()];
        let mut len = 0;
        for i in 1..text.len() {
            while len > 0 && text[i] != text[len] {
                len = fallback[len - 1];
            }
            if text[i] == text[len] {
                len += 1;
            }
            fallback[i] = len;
        }
        Stop { text, fallback, matched: 0 }
    }

    /// Whether the stop string is complete with `byte`.
    fn push(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.text[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        if self.text[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.text.len()
    }
}

impl<'a> TextStream<'a> {
    /// Empty stop strings are ignored. One that spells a special token also stops at that token, which
    /// has no text of its own.
    pub fn new(tokenizer: &'a Tokenizer, stops: Vec<String>) -> Self {
        let stop_ids =
            tokenizer.special_tokens().iter().filter(|token| stops.contains(&token.text)).map(|token| token.id).collect();
        let stops = stops.iter().filter(|stop| !stop.is_empty()).map(|stop| Stop::new(stop)).collect();
        TextStream {
            tokenizer,
            state: Detokenizer::default(),
            stops,
            stop_ids,
            shown_ids: Vec::new(),
            held: String::new(),
            stopped: false,
        }
    }

    /// Shows these special tokens as their text instead of leaving them out, for callers that read
    /// markup from the text (tool calls, reasoning).
    pub fn showing(mut self, ids: Vec<u32>) -> Self {
        self.shown_ids = ids;
        self
    }

    /// Takes the next token of the answer.
    pub fn push(&mut self, id: u32) -> Piece {
        if self.stopped {
            return Piece { text: String::new(), stopped: true };
        }
        if self.stop_ids.contains(&id) {
            self.stopped = true;
            return Piece { text: std::mem::take(&mut self.held), stopped: true };
        }
        if self.tokenizer.is_hidden(id) && !self.shown_ids.contains(&id) {
            return Piece::default();
        }
        let from = self.held.len();
        self.state.push(self.tokenizer, id, &mut self.held);
        for at in from..self.held.len() {
            let byte = self.held.as_bytes()[at];
            let mut longest = 0;
            for stop in &mut self.stops {
                if stop.push(byte) {
                    longest = longest.max(stop.text.len());
                }
            }
            if longest > 0 {
                self.stopped = true;
                self.held.truncate((at + 1).saturating_sub(longest));
                return Piece { text: std::mem::take(&mut self.held), stopped: true };
            }
        }
        let hold = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len().saturating_sub(hold));
        Piece { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The answer ended without a stop string: what was held back. Half a character is dropped.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
