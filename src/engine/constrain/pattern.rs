//! Regular expressions of JSON schemas (ECMA-262) in the dialect of the `regex` crate, and the formats of strings.
//!
//! What the two dialects read differently is rewritten, so that every text the rewritten pattern takes is one that the
//! original takes, or refused. Sources: ECMA-262 section 22.2, the `regex-syntax` documentation, and for formats
//! RFC 3339, RFC 5321 and RFC 1123.

/// White space for ECMA-262, Python and Rust alike.
const SPACES: &str = r" \t\n\r\f\v";
/// What any of them calls white space.
const ALL_SPACES: &str = r"\s\x1c-\x1f\u{85}\u{feff}";

/// The pattern rewritten, or what it has that cannot be expressed.
pub(super) fn rewritten(pattern: &str) -> Result<String, String> {
    let mut out = String::with_capacity(pattern.len() + 8);
    let mut chars = pattern.chars().peekable();
    // Inside a class, and whether that is a negated one.
    let (mut class, mut negated) = (false, false);
    while let Some(c) = chars.next() {
        match c {
            '\\' => escape(&mut chars, class && negated, class, &mut out)?,
            '[' if !class => {
                (class, negated) = (true, chars.next_if_eq(&'^').is_some());
                if chars.peek() == Some(&']') {
                    return Err("an empty class `[]`".into());
                }
                out.push_str(if negated { "[^" } else { "[" });
            }
            ']' if class => {
                class = false;
                out.push(']');
            }
            // Sets within sets and set operations are unknown to ECMA-262.
            '[' | '&' | '~' if class => out.extend(['\\', c]),
            '-' if class && chars.peek() == Some(&'-') => return Err("`--` in a class".into()),
            '(' if !class && chars.peek() == Some(&'?') => {
                chars.next();
                group(&mut chars, &mut out)?;
            }
            '.' if !class => out.push_str(r"[^\n\r\u{2028}\u{2029}]"),
            '{' if !class && chars.peek() == Some(&',') => return Err("`{,`".into()),
            _ => out.push(c),
        }
    }
    if class {
        return Err("a class without an end".into());
    }
    Ok(out)
}

type Chars<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// What follows a backslash.
fn escape(chars: &mut Chars, in_negated: bool, in_class: bool, out: &mut String) -> Result<(), String> {
    let Some(c) = chars.next() else { return Err("a backslash at its end".into()) };
    // In a negated class what is matched grows where the set shrinks.
    let spaces = |few: bool| if few { SPACES } else { ALL_SPACES };
    match c {
        's' if in_class => out.push_str(spaces(!in_negated)),
        's' => out.push_str(&format!("[{SPACES}]")),
        'S' => out.push_str(&format!("[^{}]", spaces(in_negated))),
        '<' | '>' => out.push(c),
        'd' | 'D' | 'w' | 'W' | 'n' | 'r' | 't' | 'f' | 'v' => out.extend(['\\', c]),
        'u' | 'x' => {
            let digits: String = chars.take(if c == 'u' { 4 } else { 2 }).collect();
            let code = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
            match code {
                Some(code) if digits.len() == if c == 'u' { 4 } else { 2 } => {
                    out.push_str(&format!("\\u{{{:x}}}", u32::from(code)));
                }
                _ => return Err(format!("`\\{c}{digits}`")),
            }
        }
        'p' | 'P' if chars.peek() == Some(&'{') => out.extend(['\\', c]),
        _ if c.is_ascii_punctuation() => out.extend(['\\', c]),
        _ => return Err(format!("`\\{c}`")),
    }
    Ok(())
}

/// What follows `(?`: names of groups are left out.
fn group(chars: &mut Chars, out: &mut String) -> Result<(), String> {
    match chars.next() {
        Some(':') => {}
        Some('<') if !matches!(chars.peek(), Some('=' | '!')) => {
            if !chars.any(|c| c == '>') {
                return Err("a group name without an end".into());
            }
        }
        Some('<') => return Err(format!("a look-behind `(?<{}`", chars.next().unwrap_or_default())),
        Some(c @ ('=' | '!')) => return Err(format!("a look-ahead `(?{c}`")),
        other => return Err(format!("`(?{}`", other.map(String::from).unwrap_or_default())),
    }
    out.push_str("(?:");
    Ok(())
}

/// How a format is enforced.
pub(super) enum Format {
    /// The grammar library knows it.
    Known,
    Pattern(String),
}

/// Formats that can be promised, in alphabetical order.
pub(super) const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// A format by its name. Where the library is laxer than common validators (29 February of every year, leap seconds,
/// lengths of addresses) a stricter pattern stands in.
pub(super) fn format(name: &str) -> Option<Format> {
    let pattern = match name {
        "date" => date(),
        "time" => time().to_owned(),
        "date-time" => format!("(?:{})T{}", date(), time()),
        "email" => format!("{ATOM}{{1,32}}(?:\\.{ATOM}{{1,15}}){{0,2}}@{}", hostname("{1,2}")),
        "hostname" => hostname("{0,2}"),
        _ => return FORMATS.contains(&name).then_some(Format::Known),
    };
    Some(Format::Pattern(format!("^(?:{pattern})$")))
}

/// A character of the part of an address before the `@`.
const ATOM: &str = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-]";

/// Labels of at most 63 characters; as many as fit 253.
fn hostname(more: &str) -> String {
    const LABEL: &str = "[A-Za-z0-9](?:[A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?";
    format!("{LABEL}(?:\\.{LABEL}){more}")
}

/// Days that exist in the Gregorian calendar, years 1 to 9999.
fn date() -> String {
    let year = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)";
    let four = "(?:0[48]|[2468][048]|[13579][26])";
    let months = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|\
                  02-(?:0[1-9]|1[0-9]|2[0-8]))";
    format!("{year}-{months}|(?:[0-9]{{2}}{four}|{four}00)-02-29")
}

fn time() -> &'static str {
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+\\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reads_differently_is_rewritten() {
        for (pattern, expected) in [
            (r"^[a-z]+$", r"^[a-z]+$"),
            (r"a.b", r"a[^\n\r\u{2028}\u{2029}]b"),
            (r"[.[&~]", r"[.\[\&\~]"),
            (r"\s\S", r"[ \t\n\r\f\v][^\s\x1c-\x1f\u{85}\u{feff}]"),
            (r"[\s_][^\s_]", r"[ \t\n\r\f\v_][^\s\x1c-\x1f\u{85}\u{feff}_]"),
            (r"[^\S]", r"[^[^ \t\n\r\f\v]]"),
            (r"(?:a)(?<year>\d)(b)", r"(?:a)(?:\d)(b)"),
            (r"é\u00e9\x41\/\<", r"é\u{e9}\u{41}\/<"),
        ] {
            assert_eq!(rewritten(pattern).as_deref(), Ok(expected), "{pattern}");
        }
    }

    #[test]
    fn what_cannot_be_expressed_is_named() {
        for (pattern, part) in [
            ("(?=a)", "(?="),
            ("(?!a)", "(?!"),
            ("(?<=a)", "(?<="),
            ("(?<!a)", "(?<!"),
            ("(?i)a", "(?i"),
            ("(?P<n>a)", "(?P"),
            (r"(a)\1", r"\1"),
            (r"\bword\b", r"\b"),
            (r"\Aa\z", r"\A"),
            (r"\cA", r"\c"),
            (r"\ud83d\ude00", r"\ud83d"),
            (r"\x4", r"\x4"),
            ("[]", "[]"),
            ("[a", "end"),
            ("[a--b]", "--"),
            ("a{,3}", "{,"),
            ("a\\", "backslash"),
        ] {
            let error = rewritten(pattern).expect_err(pattern);
            assert!(error.contains(part), "{pattern}: {error}");
        }
    }

    #[test]
    fn every_listed_format_is_there() {
        assert!(FORMATS.iter().all(|name| format(name).is_some()) && FORMATS.is_sorted());
        for name in ["unknown", "int32", "regex", "idn-email", ""] {
            assert!(format(name).is_none(), "{name}");
        }
    }
}
