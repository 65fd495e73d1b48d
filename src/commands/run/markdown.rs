//! Light markdown for a terminal, while the text arrives: styles are put around it, and every character stays
//! in its place, marks included.

const RESET: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const HEADER: &str = "\x1b[1;36m";
const CODE: &str = "\x1b[33m";
const BULLET: &str = "\x1b[36m";

/// Turns pieces of an answer into pieces for a terminal. Without colour only control characters are made
/// visible, which no answer may send to a terminal as they are.
pub struct Markdown {
    colour: bool,
    /// Beginning of a line whose kind is not known yet.
    start: String,
    at_start: bool,
    /// Length of the fence that opened the code block we are in.
    fence: Option<usize>,
    /// The line is a fence or code: no marks in it.
    plain: bool,
    header: bool,
    bold: bool,
    code: bool,
    /// A run of one mark (`*` or `` ` ``) whose length is not known yet.
    run: String,
    /// The last character before the run.
    before: char,
}

impl Markdown {
    pub fn new(colour: bool) -> Self {
        Markdown {
            colour,
            start: String::new(),
            at_start: true,
            fence: None,
            plain: false,
            header: false,
            bold: false,
            code: false,
            run: String::new(),
            before: ' ',
        }
    }

    /// What to show for the next piece.
    pub fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            let c = visible(c);
            match (self.colour, self.at_start) {
                (false, _) => out.push(c),
                (true, true) => self.line_start(c, &mut out),
                (true, false) => self.inline(c, &mut out),
            }
        }
        out
    }

    /// The text has ended: what was held back, and the end of all styles.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        if self.at_start {
            self.begin_line(&mut out);
        }
        self.end_run(None, &mut out);
        if self.is_styled() {
            out.push_str(RESET);
        }
        *self = Markdown::new(self.colour);
        out
    }

    fn is_styled(&self) -> bool {
        self.header || self.bold || self.code || self.fence.is_some() || self.plain
    }

    /// Collects the beginning of a line until its kind is known.
    fn line_start(&mut self, c: char, out: &mut String) {
        self.start.push(c);
        if c == '\n' || !may_be_mark(&self.start) {
            self.begin_line(out);
        }
    }

    /// Decides what kind of line `start` begins, and shows it.
    fn begin_line(&mut self, out: &mut String) {
        self.at_start = false;
        let start = std::mem::take(&mut self.start);
        let mark = start.trim_start();
        let ticks = mark.chars().take_while(|c| *c == '`').count();
        let closes = self.fence.is_some_and(|len| ticks >= len && mark[ticks..].trim().is_empty());
        if let (Some(_), false) = (self.fence, closes) {
            self.plain = true;
        } else if ticks >= 3 {
            self.plain = true;
            self.fence = if closes { None } else { Some(ticks) };
            out.push_str(CODE);
        } else if mark.starts_with('#') && mark.trim_start_matches('#').starts_with(' ') {
            self.header = true;
            out.push_str(HEADER);
        } else if let Some(bullet) = bullet(mark) {
            let indent = start.len() - mark.len();
            let (bullet, rest) = start.split_at(indent + bullet);
            out.push_str(BULLET);
            out.push_str(bullet);
            out.push_str(RESET);
            self.before = ' ';
            return rest.chars().for_each(|c| self.inline(c, out));
        }
        self.before = ' ';
        start.chars().for_each(|c| self.inline(c, out));
    }

    fn inline(&mut self, c: char, out: &mut String) {
        if !self.plain && (c == '*' || c == '`') && self.run.chars().all(|r| r == c) {
            self.run.push(c);
            return;
        }
        self.end_run(Some(c), out);
        if c == '\n' {
            return self.end_line(out);
        }
        if !self.plain && (c == '*' || c == '`') {
            self.run.push(c);
        } else {
            out.push(c);
            self.before = c;
        }
    }

    /// Shows a finished run of marks; `next` follows it.
    fn end_run(&mut self, next: Option<char>, out: &mut String) {
        if self.run.is_empty() {
            return;
        }
        let run = std::mem::take(&mut self.run);
        let space = |c: char| c.is_whitespace();
        let before = self.before;
        self.before = run.chars().next_back().unwrap_or(' ');
        if run.starts_with('`') && run.len() == 1 {
            let opens = !self.code;
            if opens && next.is_none_or(|c| c == '\n') {
                return out.push_str(&run);
            }
            self.code = opens;
            return self.style_around(opens, &run, out);
        }
        if run.starts_with('*') && (2..=3).contains(&run.len()) && !self.code {
            let opens = !self.bold && next.is_some_and(|c| !space(c));
            let closes = self.bold && !space(before);
            if opens || closes {
                self.bold = opens;
                return self.style_around(opens, &run, out);
            }
        }
        out.push_str(&run);
    }

    /// A mark belongs to what it encloses.
    fn style_around(&self, opens: bool, mark: &str, out: &mut String) {
        if !opens {
            out.push_str(mark);
        }
        out.push_str(RESET);
        if self.header {
            out.push_str(HEADER);
        }
        if self.bold {
            out.push_str(BOLD);
        }
        if self.code {
            out.push_str(CODE);
        }
        if opens {
            out.push_str(mark);
        }
    }

    /// Ends the styles of a line; a code block goes on.
    fn end_line(&mut self, out: &mut String) {
        if self.is_styled() && self.fence.is_none() {
            out.push_str(RESET);
        }
        out.push('\n');
        (self.plain, self.header, self.bold, self.code) = (false, false, false, false);
        self.at_start = true;
        self.before = ' ';
    }
}

/// Whether a line that begins so may still become a header, fence or list item.
fn may_be_mark(start: &str) -> bool {
    let mark = start.trim_start_matches([' ', '\t']);
    let same = |c: char| mark.chars().all(|m| m == c);
    let number = mark.strip_suffix('.').unwrap_or(mark);
    start.len() <= 24
        && (same('#') || same('`') || ["-", "*", "+"].contains(&mark) || number.chars().all(|c| c.is_ascii_digit()))
        && start.len() - mark.len() <= 16
}

/// Length of a list mark (`-`, `*`, `+`, `12.`) that a space follows.
fn bullet(line: &str) -> Option<usize> {
    let digits = line.chars().take_while(char::is_ascii_digit).count();
    let len = match line.chars().next()? {
        '-' | '*' | '+' => 1,
        _ if digits > 0 && line[digits..].starts_with('.') => digits + 1,
        _ => return None,
    };
    line[len..].starts_with(' ').then_some(len)
}

/// Control characters as pictures, so that an answer cannot steer the terminal.
fn visible(c: char) -> char {
    match c {
        '\n' | '\t' => c,
        '\0'..='\u{1f}' => char::from_u32(0x2400 + u32::from(c)).unwrap_or('\u{fffd}'),
        '\u{7f}' => '\u{2421}',
        '\u{80}'..='\u{9f}' => '\u{fffd}',
        c => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(pieces: &[&str]) -> String {
        let mut markdown = Markdown::new(true);
        let mut out: String = pieces.iter().map(|piece| markdown.push(piece)).collect();
        out += &markdown.finish();
        out
    }

    /// Without escape codes.
    fn plain(text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find('\u{1b}') {
            out.push_str(&rest[..at]);
            let end = rest[at..].find('m').expect("a whole code");
            rest = &rest[at + end + 1..];
        }
        out + rest
    }

    const TEXTS: [&str; 9] = [
        "# Title\n\nSome **bold** and `code`, 2 ** 3, a*b, `un\n**closed\n```rust\nfn main() { **x** }\n# no\n```\nend",
        "1. one\n2. two **b**\n  - in `c`\n* star\n** no\n*",
        "```\ncode",
        "````\n```\n````\n- **a*b**\n",
        "#",
        "**",
        "a ``two `ticks` `` b\n\n\n   ",
        "é**ü**日本`語`\r\n🦀***x***",
        "####### ####\n12345678901234567890123456789. x\n                    - deep",
    ];

    #[test]
    fn no_text_is_lost_however_it_arrives() {
        for text in TEXTS {
            let whole = render(&[text]);
            assert_eq!(plain(&whole), text.replace('\r', "\u{240d}"), "{whole:?}");
            let cuts: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
            for &at in &cuts {
                assert_eq!(render(&[&text[..at], &text[at..]]), whole, "{text:?} cut at {at}");
            }
            let characters: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            assert_eq!(render(&characters), whole);
        }
    }

    #[test]
    fn styles_are_where_they_belong() {
        assert_eq!(render(&["a **b** c"]), format!("a {RESET}{BOLD}**b**{RESET} c"));
        assert_eq!(render(&["x `y` z\n"]), format!("x {RESET}{CODE}`y`{RESET} z\n"));
        assert_eq!(render(&["# T\nx"]), format!("{HEADER}# T{RESET}\nx"));
        assert_eq!(render(&["- x"]), format!("{BULLET}-{RESET} x"));
        assert_eq!(render(&["```\n**a**\n```\nb"]), format!("{CODE}```\n**a**\n{CODE}```{RESET}\nb"));
        assert_eq!(render(&["2 ** 3 and #x"]), "2 ** 3 and #x");
        // An unclosed mark ends with its line.
        assert_eq!(render(&["**a\nb"]), format!("{RESET}{BOLD}**a{RESET}\nb"));
    }

    #[test]
    fn without_colour_there_are_no_codes() {
        for text in TEXTS {
            let mut markdown = Markdown::new(false);
            let shown = markdown.push(text) + &markdown.finish();
            assert_eq!(shown, text.replace('\r', "\u{240d}"));
        }
        let mut markdown = Markdown::new(false);
        assert_eq!(markdown.push("\u{1b}]0;title\u{7}\t\u{9b}x"), "\u{241b}]0;title\u{2407}\t\u{fffd}x");
    }
}
