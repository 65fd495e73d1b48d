//! Shell completions and the manual page, for packagers.

use super::Outcome;
use super::terminal;
use cactus::error::Error;

#[derive(clap::Args)]
pub struct Args {
    shell: clap_complete::Shell,
}

pub fn run(args: &Args, command: &mut clap::Command) -> Outcome {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, command, "cactus", &mut text);
    terminal::print(&String::from_utf8_lossy(&text))
}

pub fn man(command: clap::Command) -> Outcome {
    let mut text = Vec::new();
    let page = clap_mangen::Man::new(command);
    page.render(&mut text).map_err(|e| Error::usage(format!("cannot render the manual page: {e}")))?;
    terminal::print(&String::from_utf8_lossy(&text))
}
