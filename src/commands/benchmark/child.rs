//! Other programs, run to their end or until the user has had enough.

use crate::commands::terminal;
use cactus::error::{Error, Result};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How often the end of the program and Ctrl-C are looked for.
const TICK: Duration = Duration::from_millis(20);
/// How long output is waited for after the end, should something that the program started hold it open.
const LINGER: Duration = Duration::from_secs(2);

/// What a program left behind.
pub struct Ended {
    pub success: bool,
    pub stdout: String,
    pub stderr: String,
    /// When the first byte of standard output came.
    pub first_output: Option<Instant>,
}

impl Ended {
    /// Why it failed, in its own words: its last error line, or else its last line.
    pub fn last_words(&self) -> &str {
        let lines = || self.stdout.lines().chain(self.stderr.lines()).map(str::trim);
        let error = lines().rev().find_map(|line| line.strip_prefix("error: "));
        error.or_else(|| lines().rfind(|line| !line.is_empty())).unwrap_or("it said nothing")
    }
}

enum Piece {
    Out(Vec<u8>, Instant),
    Line(String),
}

/// Runs `command`; lines of its standard error go to `on_line` as they come.
///
/// # Errors
/// `NotFound` if there is no such program, `Interrupted` after Ctrl-C (then it has been killed).
pub fn run(command: &mut Command, on_line: &mut dyn FnMut(&str)) -> Result<Ended> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let name = command.get_program().to_owned();
    let failed = |e: std::io::Error| Error::io("run", Path::new(&name), &e);
    let mut child = command.spawn().map_err(failed)?;
    let (send, pieces) = mpsc::channel();
    if let Some(mut stdout) = child.stdout.take() {
        let send = send.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 8192];
            while let Ok(n @ 1..) = stdout.read(&mut buffer) {
                if send.send(Piece::Out(buffer[..n].to_vec(), Instant::now())).is_err() {
                    break;
                }
            }
        });
    }
    if let Some(stderr) = child.stderr.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).split(b'\n').map_while(std::io::Result::ok) {
                if send.send(Piece::Line(String::from_utf8_lossy(&line).into_owned())).is_err() {
                    break;
                }
            }
        });
    }
    let (mut stdout, mut stderr, mut first_output) = (Vec::new(), String::new(), None);
    let (mut status, mut ended_at) = (None, None);
    loop {
        match pieces.recv_timeout(TICK) {
            Ok(Piece::Out(bytes, at)) => {
                first_output.get_or_insert(at);
                stdout.extend(bytes);
            }
            Ok(Piece::Line(line)) => {
                on_line(&line);
                stderr += &line;
                stderr.push('\n');
            }
            Err(RecvTimeoutError::Timeout) => {}
            // Both outputs are closed.
            Err(RecvTimeoutError::Disconnected) if status.is_some() => break,
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
        }
        if terminal::interrupted() {
            let _ = child.kill();
            let _ = child.wait();
            terminal::not_interrupted()?;
        }
        if status.is_none() {
            status = child.try_wait().map_err(failed)?;
            ended_at = status.map(|_| Instant::now());
        }
        if ended_at.is_some_and(|at: Instant| at.elapsed() > LINGER) {
            break;
        }
    }
    let success = status.is_some_and(|status| status.success());
    if !success {
        // Ctrl-C reaches the program as well, and it may be the first to end.
        terminal::not_interrupted()?;
    }
    Ok(Ended { success, stdout: String::from_utf8_lossy(&stdout).into_owned(), stderr, first_output })
}
