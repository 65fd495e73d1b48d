//! Waiting for the text that a form begins behind.

/// Up to where an answer is free.
#[derive(Clone, Debug)]
pub(super) struct Wait {
    mark: Vec<u8>,
    /// The answer may end without it.
    optional: bool,
    /// It counts at the beginning of a line only.
    line: bool,
    /// Marks of a block at the beginning of the answer, in which it does not count.
    block: Option<(Vec<u8>, Vec<u8>)>,
    within: bool,
    /// The text so far, and what of it was searched.
    seen: Vec<u8>,
    from: usize,
}

impl Wait {
    pub fn until(mark: &str) -> Self {
        Wait {
            mark: mark.as_bytes().to_vec(),
            optional: false,
            line: false,
            block: None,
            within: false,
            seen: Vec::new(),
            from: 0,
        }
    }

    pub fn unless(mark: &str, line: bool) -> Self {
        Wait { optional: true, line, ..Wait::until(mark) }
    }

    pub fn outside(&mut self, open: &str, close: &str) {
        self.block = self.optional.then(|| (open.as_bytes().to_vec(), close.as_bytes().to_vec()));
    }

    pub fn is_optional(&self) -> bool {
        self.optional
    }

    /// Takes more text. What stands behind the mark, once it has come.
    pub fn pass(&mut self, bytes: &[u8]) -> Option<&[u8]> {
        self.seen.extend_from_slice(bytes);
        if let Some((open, close)) = &self.block {
            let words = self.seen.trim_ascii_start();
            if !self.within && words.len() < open.len() && open.starts_with(words) {
                return None;
            }
            self.within = self.within || words.starts_with(open);
            if self.within {
                let end = find(&self.seen, close, self.from);
                self.from = end.unwrap_or_else(|| self.seen.len().saturating_sub(close.len()));
                end?;
                self.from += close.len();
            }
            self.block = None;
        }
        while let Some(at) = find(&self.seen, &self.mark, self.from) {
            self.from = at + self.mark.len();
            let line = self.seen[..at].rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
            if !self.line || line.trim_ascii().is_empty() {
                return Some(&self.seen[self.from..]);
            }
        }
        self.from = self.from.max(self.seen.len().saturating_sub(self.mark.len()));
        None
    }
}

/// Where `part` begins, not before `from`.
fn find(text: &[u8], part: &[u8], from: usize) -> Option<usize> {
    text[from..].windows(part.len()).position(|window| window == part).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left behind the mark, after how many pieces; nothing if it did not come.
    fn found(mut wait: Wait, text: &str, size: usize) -> Option<String> {
        let mut pieces = text.as_bytes().chunks(size);
        let rest = loop {
            if let Some(rest) = wait.pass(pieces.next()?) {
                break rest.to_vec();
            }
        };
        let rest = [rest, pieces.flatten().copied().collect()].concat();
        Some(String::from_utf8(rest).expect("text"))
    }

    #[test]
    fn a_mark_is_found_wherever_the_text_is_cut() {
        let line = Wait::unless("<c>", true);
        let mut thinking = Wait::unless("<c>", true);
        thinking.outside("<t>", "</t>");
        for size in 1..12 {
            for (wait, text, rest) in [
                (Wait::until("</t>"), "a</t</t>b", Some("b")),
                (Wait::until("</t>"), "a</t", None),
                (line.clone(), "<c>x", Some("x")),
                (line.clone(), " <c>x", Some("x")),
                (line.clone(), "as <c> says\n <c>x", Some("x")),
                (line.clone(), "as <c> says", None),
                (thinking.clone(), "<t>\n<c></t>\n<c>x", Some("x")),
                (thinking.clone(), "\n<t><c>", None),
                (thinking.clone(), "<c>x", Some("x")),
                (thinking.clone(), "a\n<c>x", Some("x")),
                (thinking.clone(), "<t", None),
            ] {
                assert_eq!(found(wait, text, size).as_deref(), rest, "{text:?} in pieces of {size}");
            }
        }
    }
}
