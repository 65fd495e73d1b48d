//! Tools that an answer may call, and running them.

use crate::commands::terminal;
use cactus::engine::Engine;
use cactus::engine::tools::{self, Call, Choice, Tools};
use cactus::error::{Error, Result};
use serde_json::Value;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Answers with calls, one after another, until the model must do without.
pub const ROUNDS: usize = 16;
/// Bytes of a result that the model is shown.
const LONGEST: usize = 64 << 10;

#[derive(clap::Args)]
pub struct ToolArgs {
    /// Functions that the model may call: a JSON file with a list as the OpenAI API has it. A call is printed as a line of
    /// JSON with name and arguments
    #[arg(long, value_name = "FILE", conflicts_with_all = ["form", "profile"])]
    tools: Option<PathBuf>,
    /// auto: the model calls if it wants to; required: it must; none: it cannot; or the NAME of the function to call
    #[arg(long, value_name = "CHOICE", requires = "tools", default_value = "auto", hide_default_value = true)]
    tool_choice: String,
    /// Show the model only the N functions that fit the prompt best [default: all]
    #[arg(long, value_name = "N", requires = "tools")]
    tool_top_k: Option<usize>,
    /// Run a shell command for every call, after asking: the name is in CACTUS_TOOL_NAME, the arguments are a JSON object on
    /// its standard input, and what it prints goes back to the model
    #[arg(long, value_name = "COMMAND", requires = "tools", conflicts_with = "batch")]
    pub tool_exec: Option<String>,
    /// Do not ask before --tool-exec runs
    #[arg(long, requires = "tool_exec", conflicts_with = "batch")]
    yes: bool,
}

impl ToolArgs {
    pub fn read(&self) -> Result<Option<Tools>> {
        let Some(path) = &self.tools else { return Ok(None) };
        if self.tool_exec.is_some() && !self.yes && !std::io::stdin().is_terminal() {
            return Err(Error::usage("there is no terminal to ask on before a call is run").with_hint("--yes runs all calls"));
        }
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, &e))?;
        tools::read(&text, &Choice::named(&self.tool_choice)).map_err(|e| e.context(path.display()))
    }

    /// Whether fewer tools than there are may be wanted.
    pub fn chooses(&self) -> bool {
        self.tool_top_k.is_some()
    }

    /// What of the tools the model is shown for a question.
    pub fn few(&self, tools: Option<Tools>, question: &str, engine: &Engine) -> Result<Option<Tools>> {
        tools.map(|tools| tools.few(self.tool_top_k.unwrap_or(0), question, engine)).transpose()
    }

    /// What every call gives; `allowed` is asked before each, unless all are allowed.
    pub fn results(&self, calls: &[Call], allowed: &mut dyn FnMut(&str) -> Result<bool>) -> Result<Vec<String>> {
        let command = self.tool_exec.as_deref().unwrap_or_default();
        let result = |call: &Call| {
            let allowed = self.yes || allowed(&format!("run {}?", shown(call)))?;
            if allowed { run(command, call) } else { Ok("error: the user did not allow this call".to_owned()) }
        };
        calls.iter().map(result).collect()
    }
}

/// A call as it is asked about.
pub fn shown(call: &Call) -> String {
    terminal::printable(&format!("{} {}", call.name, Value::Object(call.arguments.clone())))
}

/// What the command prints, and how it failed if it did.
fn run(command: &str, call: &Call) -> Result<String> {
    let failed = |e: &std::io::Error| Error::io("run", Path::new(command), e);
    let (shell, flag) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };
    let mut child = Command::new(shell)
        .args([flag, command])
        .env("CACTUS_TOOL_NAME", &call.name)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| failed(&e))?;
    let arguments = format!("{}\n", Value::Object(call.arguments.clone()));
    let input = child.stdin.take();
    // The command may print before it reads, or not read at all.
    let writing = std::thread::spawn(move || drop(input.map(|mut input| input.write_all(arguments.as_bytes()))));
    let output = child.wait_with_output().map_err(|e| failed(&e))?;
    drop(writing.join());
    let mut text = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    if text.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text += "\n[cut here]";
    }
    if !output.status.success() {
        text = format!("error: {}\n{text}", output.status).trim_end().to_owned();
    }
    Ok(text)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_prints_is_its_result() {
        let call = Call { name: "f".into(), arguments: serde_json::Map::from_iter([("a".into(), "b\n".into())]) };
        assert_eq!(run("echo $CACTUS_TOOL_NAME; cat", &call).unwrap(), "f\n{\"a\":\"b\\n\"}");
        assert_eq!(run("echo half; exit 3", &call).unwrap(), "error: exit status: 3\nhalf");
        // One that prints much and reads nothing.
        let long = run("yes | head -c 200000", &call).unwrap();
        assert!(long.len() < LONGEST + 20 && long.ends_with("[cut here]"));
    }
}
