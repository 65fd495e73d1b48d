//! Standard output for results, standard error for everything else.

use super::{Failure, Outcome};
use cactus::error::{Error, Kind, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fs::File;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Writes to standard output. A closed pipe ends the program quietly with exit code 0.
pub fn print(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        std::io::ErrorKind::BrokenPipe => Failure::Reported(0),
        _ => Error::io("write", std::path::Path::new("standard output"), &e).into(),
    })
}

/// Where results go.
pub enum Output {
    Stdout,
    File(OutputFile),
}

/// A file that is written beside its final name and gets that when it is complete. What is no ordinary file
/// (`/dev/null`, a named pipe) is written as it is.
pub struct OutputFile {
    file: File,
    path: PathBuf,
    /// The name until then.
    partial: Option<PathBuf>,
}

impl Output {
    /// `None`: standard output. A file is created now, so that a wrong path is known before the work.
    pub fn open(path: Option<&Path>) -> Result<Output> {
        let Some(path) = path else { return Ok(Output::Stdout) };
        let special = path.metadata().is_ok_and(|data| !data.is_file() && !data.is_dir());
        let partial = (!special).then(|| {
            let mut name = path.as_os_str().to_owned();
            name.push(".partial");
            PathBuf::from(name)
        });
        if path.is_dir() {
            return Err(Error::usage(format!("{} is a folder", path.display())).with_hint("give --output the name of a file"));
        }
        let file = match &partial {
            Some(partial) => File::create(partial),
            None => File::options().write(true).open(path),
        };
        let file = file.map_err(|e| Error::io("create", path, &e))?;
        Ok(Output::File(OutputFile { file, path: path.to_path_buf(), partial }))
    }

    pub fn write(&mut self, text: &str) -> Outcome {
        match self {
            Output::Stdout => print(text),
            Output::File(out) => Ok(out.file.write_all(text.as_bytes()).map_err(|e| Error::io("write", &out.path, &e))?),
        }
    }

    /// Everything has been written.
    pub fn finish(self) -> Outcome {
        let Output::File(mut out) = self else { return Ok(()) };
        if let Some(partial) = out.partial.take() {
            std::fs::rename(&partial, &out.path).map_err(|e| {
                let _ = std::fs::remove_file(&partial);
                Error::io("write", &out.path, &e)
            })?;
        }
        Ok(())
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let Some(partial) = self.partial.take() {
            let _ = std::fs::remove_file(partial);
        }
    }
}

/// Lines of cells as text; the first column to the left, the others to the right.
pub fn columns(lines: &[Vec<String>]) -> String {
    let count = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| lines.iter().filter_map(|line| line.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cell = |(at, cell): (usize, &String)| match at {
            0 => format!("{cell:<0$}", widths[at]),
            _ => format!("{cell:>0$}", widths[at]),
        };
        let cells: Vec<String> = line.iter().enumerate().map(cell).collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// An error and its hint, a line each.
pub fn print_error(error: &Error) {
    let mut err = std::io::stderr().lock();
    let _ = writeln!(err, "error: {error}");
    if let Some(hint) = error.hint() {
        let _ = writeln!(err, "hint: {hint}");
    }
}

/// Messages and progress on standard error.
pub struct Terminal {
    quiet: bool,
    verbose: bool,
    bar: Option<ProgressBar>,
}

impl Terminal {
    pub fn new(quiet: bool) -> Self {
        Terminal { quiet, verbose: false, bar: None }
    }

    /// Shows details as well.
    pub fn verbose(mut self, verbose: bool) -> Self {
        self.verbose = verbose;
        self
    }

    /// A line for people who want to know more.
    pub fn detail(&self, text: &str) {
        if self.verbose {
            self.say(text);
        }
    }

    /// A line for people; nothing when quiet.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            self.say(text);
        }
    }

    /// A line that was asked for, even when quiet.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln_quietly(text)),
            None => eprintln_quietly(text),
        }
    }

    /// Begins a progress bar; without a terminal one line says what is done. `bytes`: amounts are bytes.
    pub fn start(&mut self, what: &str, total: Option<u64>, bytes: bool) {
        let amounts = if bytes { "{bytes}/{total_bytes} {bytes_per_sec}" } else { "{human_pos}/{human_len} {per_sec}" };
        match total {
            Some(_) => self.start_bar(what, total, &format!("{{msg}} {{wide_bar}} {amounts} {{eta}} left")),
            None => self.start_bar(what, total, "{msg} {spinner} {bytes} {bytes_per_sec}"),
        }
    }

    /// The same for work in a unit that says nothing to people, of which some was done earlier.
    pub fn start_work(&mut self, what: &str, total: u64, done: u64) {
        self.start_bar(what, Some(total), "{msg} {wide_bar} {percent}% {eta} left");
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.reset_eta();
        }
    }

    /// Says on the progress bar what is done now.
    pub fn stage(&self, what: &str, stage: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{what}: {stage}"));
        }
    }

    fn start_bar(&mut self, what: &str, total: Option<u64>, template: &str) {
        self.finish();
        if self.quiet {
            return;
        }
        if !std::io::stderr().is_terminal() {
            return self.note(what);
        }
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        self.bar = Some(bar);
    }

    pub fn advance(&self, amount: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(amount);
        }
    }

    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.finish();
    }
}

/// A line on standard error; a closed standard error is no reason to stop.
fn eprintln_quietly(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C only sets a flag.
pub fn catch_interrupts() {
    // Fails only when a handler is there already, which is just as well.
    let _ = ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed));
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// What long work is asked now and then: an error once the user has had enough.
pub fn not_interrupted() -> Result<()> {
    if interrupted() { Err(Error::new(Kind::Interrupted, "interrupted")) } else { Ok(()) }
}

pub fn clear_interrupt() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}

/// Asks on the terminal.
///
/// # Errors
/// `Usage` where there is none.
pub fn confirm(question: &str) -> Result<bool> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err(Error::usage("there is no terminal to ask on").with_hint("--yes does it without a question"));
    }
    let mut err = std::io::stderr().lock();
    let mut line = String::new();
    let asked = write!(err, "{question} [y/N] ").and_then(|()| err.flush());
    asked.and_then(|()| stdin.lock().read_line(&mut line)).map_err(|e| Error::io("read", Path::new("the answer"), &e))?;
    Ok(["y", "yes"].contains(&line.trim().to_ascii_lowercase().as_str()))
}

/// A text in which nothing is for a terminal to obey.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
