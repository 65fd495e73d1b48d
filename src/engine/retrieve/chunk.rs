//! A text in passages: cut where a heading, a paragraph or a function begins, and of a length that a model takes in whole.

use super::super::embed::Embedder;
use super::Passage;
use crate::error::Result;

/// Tokens of a passage at most.
const MOST: usize = 200;
/// Tokens from which a passage may end before a heading.
const ENOUGH: usize = 48;
/// Tokens that a passage repeats of the one before, where there was no good place to cut.
const OVERLAP: usize = 32;

/// A line with its number and tokens; a long line is cut into several of one number.
struct Line<'t> {
    number: usize,
    text: &'t str,
    tokens: usize,
    /// How good it is to begin here.
    start: Start,
}

#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Start {
    Bad,
    /// Less indented than what stands before, as functions are.
    Outer,
    /// Behind an empty line.
    Paragraph,
    Heading,
}

/// The passages of the text of `file`, in order.
pub fn passages(file: &str, text: &str, embedder: &Embedder) -> Result<Vec<Passage>> {
    let lines = lines(text, embedder)?;
    let (mut out, mut begin) = (Vec::new(), 0);
    while begin < lines.len() {
        let (mut end, mut tokens) = (begin, 0);
        while end < lines.len() && (tokens + lines[end].tokens <= MOST || end == begin) {
            if lines[end].start == Start::Heading && tokens >= ENOUGH {
                break;
            }
            tokens += lines[end].tokens;
            end += 1;
        }
        let mut next = end;
        if end < lines.len() && lines[end].start != Start::Heading {
            // The best place in the second half.
            let half = begin + 1 + (end - begin) / 2;
            let mut best = (Start::Bad, end);
            for (at, line) in lines.iter().enumerate().take(end + 1).skip(half) {
                if line.start >= best.0 && line.start != Start::Bad {
                    best = (line.start, at);
                }
            }
            (end, next) = (best.1, best.1);
            if best.0 == Start::Bad {
                let mut again = 0;
                while next > begin + 1 && again + lines[next - 1].tokens <= OVERLAP {
                    again += lines[next - 1].tokens;
                    next -= 1;
                }
            }
        }
        push(file, &lines[begin..end], &mut out);
        begin = next;
    }
    Ok(out)
}

fn push(file: &str, lines: &[Line], out: &mut Vec<Passage>) {
    let full: Vec<&Line> = lines.iter().filter(|line| !line.text.trim().is_empty()).collect();
    let (Some(first), Some(last)) = (full.first(), full.last()) else { return };
    let mut text = String::new();
    let mut number = first.number;
    for line in lines.iter().filter(|line| (first.number..=last.number).contains(&line.number)) {
        if line.number > number {
            text.push('\n');
            number = line.number;
        }
        text += line.text;
    }
    out.push(Passage { file: file.to_owned(), first: first.number, last: last.number, text });
}

fn lines<'t>(text: &'t str, embedder: &Embedder) -> Result<Vec<Line<'t>>> {
    let mut lines: Vec<Line> = Vec::new();
    let (mut empty, mut indent) = (true, 0);
    for (at, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let own_indent = line.len() - trimmed.len();
        let heading = trimmed.starts_with('#') && trimmed.trim_start_matches('#').starts_with(' ') && own_indent == 0;
        let start = match () {
            () if heading => Start::Heading,
            () if trimmed.is_empty() => Start::Bad,
            () if empty => Start::Paragraph,
            () if own_indent == 0 && indent > 0 && trimmed.starts_with(char::is_alphabetic) => Start::Outer,
            () => Start::Bad,
        };
        (empty, indent) = (trimmed.is_empty(), if trimmed.is_empty() { indent } else { own_indent });
        let tokens = embedder.tokenizer().encode(line, false)?.len();
        let pieces = if tokens <= MOST { vec![line] } else { pieces(line, tokens) };
        let share = tokens.div_ceil(pieces.len());
        lines.extend(pieces.into_iter().enumerate().map(|(n, text)| Line {
            number: at + 1,
            text,
            tokens: share,
            start: if n == 0 { start } else { Start::Bad },
        }));
    }
    Ok(lines)
}

/// A long line in pieces of some twenty tokens, cut at spaces where there are any.
fn pieces(line: &str, tokens: usize) -> Vec<&str> {
    let size = (line.len() / tokens.div_ceil(20)).max(1);
    let (mut out, mut rest) = (Vec::new(), line);
    while rest.len() > size {
        let near = (size..rest.len()).find(|at| rest.is_char_boundary(*at)).unwrap_or(rest.len());
        let space = rest[near..].find(' ').filter(|at| *at < size).map_or(near, |at| near + at);
        let (piece, after) = rest.split_at(space.max(1));
        out.push(piece);
        rest = after;
    }
    out.push(rest);
    out
}
