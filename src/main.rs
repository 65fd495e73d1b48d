//! The `cactus` command.

mod commands;

fn main() -> std::process::ExitCode {
    commands::main()
}
