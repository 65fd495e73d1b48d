//! JSON text exactly as Python's `json.dumps` writes it, which is what models saw in training.

use serde_json::Value;

/// `indent` in spaces per level; `separators` are those between items and after keys (Python's
/// defaults if `None`).
pub(super) fn python_json(
    value: &Value,
    indent: Option<usize>,
    separators: Option<(&str, &str)>,
    ensure_ascii: bool,
    sort_keys: bool,
) -> String {
    let (item, key) = separators.unwrap_or((if indent.is_some() { "," } else { ", " }, ": "));
    let mut writer = Writer { indent, item, key, ensure_ascii, sort_keys, out: String::new() };
    writer.value(value, 0);
    writer.out
}

struct Writer<'a> {
    indent: Option<usize>,
    item: &'a str,
    key: &'a str,
    ensure_ascii: bool,
    sort_keys: bool,
    out: String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, level: usize) {
        match value {
            Value::String(text) => self.string(text),
            Value::Number(number) if number.is_f64() => self.out += &python_float(number.as_f64().unwrap_or(0.0)),
            Value::Array(list) if !list.is_empty() => {
                self.out.push('[');
                for (i, item) in list.iter().enumerate() {
                    self.start_item(i, level + 1);
                    self.value(item, level + 1);
                }
                self.new_line(level);
                self.out.push(']');
            }
            Value::Object(map) if !map.is_empty() => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(b.0));
                }
                self.out.push('{');
                for (i, (key, item)) in entries.into_iter().enumerate() {
                    self.start_item(i, level + 1);
                    self.string(key);
                    self.out += self.key;
                    self.value(item, level + 1);
                }
                self.new_line(level);
                self.out.push('}');
            }
            other => self.out += &other.to_string(),
        }
    }

    fn start_item(&mut self, i: usize, level: usize) {
        if i > 0 {
            self.out += self.item;
        }
        self.new_line(level);
    }

    fn new_line(&mut self, level: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.saturating_mul(level).min(1000)));
        }
    }

    fn string(&mut self, text: &str) {
        let quoted = Value::String(text.to_string()).to_string();
        if !self.ensure_ascii {
            self.out += &quoted;
            return;
        }
        for c in quoted.chars() {
            // Noncharacters are the marks of guarded text, which must survive.
            if (c.is_ascii() && c != '\u{7f}') || ('\u{fdd0}'..='\u{fdef}').contains(&c) {
                self.out.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    self.out += &format!("\\u{unit:04x}");
                }
            }
        }
    }
}

/// Python's `repr`: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn python_float(number: f64) -> String {
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{number}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected text from Python 3's `json.dumps`.
    #[test]
    fn numbers_and_text_as_python() {
        let value: Value =
            serde_json::from_str(r#"[1, -3, 1.0, 0.1, 1e16, 123456789012345.0, 1e-5, 0.0001, 2.5e-7, -1.5e300, true, null]"#)
                .unwrap();
        let expected = "[1, -3, 1.0, 0.1, 1e+16, 123456789012345.0, 1e-05, 0.0001, 2.5e-07, -1.5e+300, true, null]";
        assert_eq!(python_json(&value, None, None, false, false), expected);
        let value = Value::String("é\u{1}\u{7f}\n\"\\/<😀".into());
        assert_eq!(python_json(&value, None, None, false, false), "\"é\\u0001\u{7f}\\n\\\"\\\\/<😀\"");
        assert_eq!(python_json(&value, None, None, true, false), "\"\\u00e9\\u0001\\u007f\\n\\\"\\\\/<\\ud83d\\ude00\"");
    }

    #[test]
    fn layout_as_python() {
        let value: Value = serde_json::from_str(r#"{"b": [1, {}], "a": {"c": []}}"#).unwrap();
        let indented = "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": {\n    \"c\": []\n  }\n}";
        assert_eq!(python_json(&value, Some(2), None, false, false), indented);
        assert_eq!(python_json(&value, None, Some((",", ":")), false, true), r#"{"a":{"c":[]},"b":[1,{}]}"#);
    }
}
