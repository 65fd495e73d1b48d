//! Standard output for results, standard error for everything else.

use super::{Failure, Outcome};
use cactus::error::Error;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Writes to standard output. A closed pipe ends the program quietly with exit code 0.
pub fn print(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        std::io::ErrorKind::BrokenPipe => Failure::Reported(0),
        _ => Error::io("write", std::path::Path::new("standard output"), &e).into(),
    })
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
    bar: Option<ProgressBar>,
}

impl Terminal {
    pub fn new(quiet: bool) -> Self {
        Terminal { quiet, bar: None }
    }

    /// A line for people; nothing when quiet.
    pub fn note(&self, text: &str) {
        if self.quiet {
            return;
        }
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln_quietly(text)),
            None => eprintln_quietly(text),
        }
    }

    /// Begins a progress bar; without a terminal one line says what is done. `bytes`: amounts are bytes.
    pub fn start(&mut self, what: &str, total: Option<u64>, bytes: bool) {
        self.finish();
        if self.quiet {
            return;
        }
        if !std::io::stderr().is_terminal() {
            return self.note(what);
        }
        let amounts = if bytes { "{bytes}/{total_bytes} {bytes_per_sec}" } else { "{human_pos}/{human_len} {per_sec}" };
        let template = match total {
            Some(_) => format!("{{msg}} {{wide_bar}} {amounts} {{eta}} left"),
            None => "{msg} {spinner} {bytes} {bytes_per_sec}".to_owned(),
        };
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template(&template) {
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

pub fn clear_interrupt() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}
