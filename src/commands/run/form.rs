//! The options that give an answer a form.

use cactus::engine::constrain::Constraint;
use cactus::error::{Error, Result};
use std::path::{Path, PathBuf};

/// At most one of these.
#[derive(clap::Args)]
#[group(id = "form", multiple = false)]
pub struct FormArgs {
    /// The answer is JSON that this JSON schema allows (a file, or the schema itself). Say in the prompt what you want:
    /// the model does not see the schema
    #[arg(long, value_name = "FILE|JSON")]
    schema: Option<String>,
    /// The answer is a JSON object
    #[arg(long)]
    json_mode: bool,
    /// The answer matches this regular expression as a whole
    #[arg(long, value_name = "REGEX")]
    regex: Option<String>,
    /// The answer keeps to a Lark grammar
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl FormArgs {
    pub fn constraint(&self) -> Result<Option<Constraint>> {
        if let Some(schema) = &self.schema {
            let inline = schema.trim_start().starts_with('{');
            let text = if inline { schema.clone() } else { read(Path::new(schema))? };
            let named = |e: Error| if inline { e } else { e.context(schema) };
            let value = serde_json::from_str(text.trim_start_matches('\u{feff}'))
                .map_err(|e| named(Error::usage(format!("the schema is no JSON: {e}"))))?;
            return Ok(Some(Constraint::json_schema(&value).map_err(named)?));
        }
        if let Some(pattern) = &self.regex {
            return Ok(Some(Constraint::regex(pattern)?));
        }
        if let Some(path) = &self.grammar {
            return Ok(Some(Constraint::lark(&read(path)?).map_err(|e| e.context(path.display()))?));
        }
        Ok(self.json_mode.then(Constraint::json_object))
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| Error::io("read", path, &e))
}
