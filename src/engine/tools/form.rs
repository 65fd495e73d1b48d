//! Grammars of calls, in the Lark dialect of `llguidance`.

use super::super::constrain::{self, Constraint};
use super::super::tokenizer::Tokenizer;
use super::{Dialect, Notation, Tool, Tools, properties};
use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::fmt::Write;

impl Tools {
    /// The form that holds an answer to what was declared: from its beginning where a call must come, else behind the mark
    /// that begins one. Nothing where calls are optional and have no mark.
    ///
    /// # Errors
    /// `Usage` for a schema that cannot be promised, where a call is forced or the tool is strict.
    pub(in crate::engine) fn constraint(&self, dialect: &Dialect, tokenizer: &Tokenizer) -> Result<Option<Constraint>> {
        let notation = dialect.notation;
        let mut form = Form { notation, tokenizer, rules: String::new(), count: 0 };
        let mut bodies = Vec::new();
        for tool in self.list() {
            let named = |e: Error| e.context(format!("tool {:?}", tool.name));
            bodies.push(form.call(tool, self.forced() || tool.strict).map_err(named)?);
        }
        let any = format!("({})", bodies.join(" | "));
        let Some((open, close)) = notation.marks() else {
            return Ok(self.forced().then(|| form.finish(&any)));
        };
        let (open_mark, close_mark) = (form.mark(open), form.mark(close));
        let many = |more: String| if self.parallel { format!(" ({more})*") } else { String::new() };
        let body = match notation {
            Notation::Hermes => {
                let call = format!("SPACE {any} SPACE {close_mark}");
                format!("{call}{}", many(format!("SPACE {open_mark} {call}")))
            }
            Notation::Pythonic => format!("\"[\" {any}{} \"]\" {close_mark}", many(format!("\", \" {any}"))),
            _ => format!("{any} {close_mark}{}", many(format!("{open_mark} {any} {close_mark}"))),
        };
        Ok(Some(match self.forced() {
            true => form.finish(&format!("{open_mark} {body}")),
            false => form.finish(&body).once(open, notation == Notation::Hermes),
        }))
    }
}

/// Rules that are being written.
struct Form<'a> {
    notation: Notation,
    tokenizer: &'a Tokenizer,
    rules: String,
    count: usize,
}

/// A text as a grammar has it.
fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

impl Form<'_> {
    fn finish(self, start: &str) -> Constraint {
        let text = r"(.|\n)*";
        let plain = match self.notation.quote().map(|quote| self.is_token(quote)) {
            Some(false) => "[^<]*",
            _ => text,
        };
        let mut grammar = format!("start: {start}\n{}SPACE: /[ \\n]{{0,2}}/\n", self.rules);
        if self.notation.quote().is_some() {
            let quote = self.quote();
            let _ = write!(
                grammar,
                "text: {quote} TEXT {quote}\nTEXT: /{plain}/\n\
                 INTEGER: /-?(0|[1-9][0-9]{{0,17}})/\nNUMBER: /-?(0|[1-9][0-9]{{0,17}})(\\.[0-9]{{1,17}})?/\n\
                 any: text | NUMBER | \"true\" | \"false\" | \"null\" | \"[\" (any (\",\" any)*)? \"]\" | object\n\
                 object: \"{{\" (KEY \":\" any (\",\" KEY \":\" any)*)? \"}}\"\nKEY: /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/\n",
            );
        }
        Constraint::of_checked(grammar)
    }

    /// Whether a mark is a token that no text spells.
    fn is_token(&self, mark: &str) -> bool {
        self.tokenizer.token_id(mark).is_some_and(|id| self.tokenizer.is_hidden(id) || self.tokenizer.is_control(id))
    }

    fn mark(&self, mark: &str) -> String {
        if self.is_token(mark) { mark.to_owned() } else { quoted(mark) }
    }

    fn quote(&self) -> String {
        self.notation.quote().map_or_else(String::new, |quote| self.mark(quote))
    }

    /// A rule of its own for `body`.
    fn rule(&mut self, body: &str) -> String {
        let name = format!("r{}", self.count);
        self.count += 1;
        let _ = writeln!(self.rules, "{name}: {body}");
        name
    }

    /// A call of `tool`. `strict`: what cannot be promised is an error, else it is left open.
    fn call(&mut self, tool: &Tool, strict: bool) -> Result<String> {
        let Tool { name, parameters, .. } = tool;
        Ok(match self.notation {
            Notation::Hermes | Notation::Llama3 => {
                let word = if self.notation == Notation::Hermes { "arguments" } else { "parameters" };
                let arguments = schema(parameters, strict, &json!({"type": "object"}))?;
                let begin = quoted(&format!("{{\"name\": \"{name}\", \"{word}\": "));
                self.rule(&format!("{begin} %json {arguments} \"}}\""))
            }
            Notation::Pythonic => {
                let arguments = self.fields(tool.arguments(), "=", ", ", &mut |form, value| {
                    let mut value = value.clone();
                    carry_definitions(parameters, &mut value);
                    form.python_value(&value, strict)
                })?;
                self.rule(&format!("{} {arguments} \")\"", quoted(&format!("{name}("))))
            }
            Notation::FunctionGemma | Notation::Gemma4 => {
                let arguments = self.gemma_object(parameters)?;
                self.rule(&format!("{} {arguments}", quoted(&format!("call:{name}"))))
            }
        })
    }

    /// Fields in the order of the schema, those that need not be there left out or not.
    fn fields<'s>(
        &mut self,
        fields: impl Iterator<Item = (&'s str, &'s Value, bool)>,
        is: &str,
        between: &str,
        value: &mut dyn FnMut(&mut Self, &Value) -> Result<String>,
    ) -> Result<String> {
        // What follows when nothing was written yet, and when something was.
        let (mut first, mut next) = ("\"\"".to_owned(), "\"\"".to_owned());
        let fields: Vec<_> = fields.collect();
        for (name, schema, required) in fields.into_iter().rev() {
            let field = format!("{} {}", quoted(&format!("{name}{is}")), value(self, schema)?);
            let (begun, going) = (format!("{field} {next}"), format!("{} {field} {next}", quoted(between)));
            let skip = |taken: String, skipped: &str| if required { taken } else { format!("{taken} | {skipped}") };
            first = self.rule(&skip(begun, &first));
            next = self.rule(&skip(going, &next));
        }
        Ok(first)
    }

    fn python_value(&mut self, value: &Value, strict: bool) -> Result<String> {
        let constant = value.get("const").is_some() || value.get("enum").is_some();
        if !constant && value.get("type").is_some_and(|kind| kind == "boolean") {
            return Ok("(\"True\" | \"False\")".to_owned());
        }
        Ok(self.rule(&format!("%json {}", schema(value, strict, &json!({}))?)))
    }

    /// Types, names and lists of choices are held to; other keywords are not.
    fn gemma_object(&mut self, schema: &Value) -> Result<String> {
        let fields = self.fields(properties(schema), ":", ",", &mut Self::gemma_value)?;
        Ok(self.rule(&format!("\"{{\" {fields} \"}}\"")))
    }

    fn gemma_value(&mut self, schema: &Value) -> Result<String> {
        let choices = schema.get("enum").and_then(Value::as_array).cloned();
        let choices = choices.or_else(|| schema.get("const").map(|only| vec![only.clone()]));
        if let Some(choices) = choices.filter(|choices| !choices.is_empty()) {
            let quote = self.quote();
            let literal = |value: &Value| match value {
                Value::String(text) if text.is_empty() => format!("{quote} {quote}"),
                Value::String(text) => format!("{quote} {} {quote}", quoted(text)),
                other => quoted(&other.to_string()),
            };
            return Ok(format!("({})", choices.iter().map(literal).collect::<Vec<_>>().join(" | ")));
        }
        if let Some(Value::Array(kinds)) = schema.get("type") {
            let mut each = Vec::new();
            for kind in kinds {
                let mut one = schema.clone();
                one["type"] = kind.clone();
                each.push(self.gemma_value(&one)?);
            }
            return Ok(format!("({})", each.join(" | ")));
        }
        Ok(match schema.get("type").and_then(Value::as_str) {
            Some("string") => "text".to_owned(),
            Some("integer") => "INTEGER".to_owned(),
            Some("number") => "NUMBER".to_owned(),
            Some("boolean") => "(\"true\" | \"false\")".to_owned(),
            Some("null") => "\"null\"".to_owned(),
            Some("array") => {
                let item = schema.get("items").map_or_else(|| Ok("any".to_owned()), |items| self.gemma_value(items))?;
                format!("\"[\" ({item} (\",\" {item})*)? \"]\"")
            }
            Some("object") if schema.get("properties").is_some() => self.gemma_object(schema)?,
            Some("object") => "object".to_owned(),
            _ => "any".to_owned(),
        })
    }
}

/// A schema that is promised; where that cannot be and need not, `open`.
fn schema(wanted: &Value, strict: bool, open: &Value) -> Result<Value> {
    match constrain::checked_schema(wanted) {
        Err(_) if !strict => constrain::checked_schema(open),
        checked => checked,
    }
}

/// References within a part of a schema lead to the definitions of the whole.
fn carry_definitions(whole: &Value, part: &mut Value) {
    for name in ["$defs", "definitions"] {
        if let (Some(definitions), Some(fields)) = (whole.get(name), part.as_object_mut()) {
            fields.entry(name).or_insert_with(|| definitions.clone());
        }
    }
}

#[cfg(test)]
#[path = "form_tests.rs"]
mod tests;
