//! The `cactus` command.

#![deny(unsafe_code)]

mod commands;

fn main() -> std::process::ExitCode {
    commands::main()
}
