//! Running the `cactus` program.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A home folder of its own, so that a test neither sees nor changes the user's caches.
pub struct Home(TempDir);

impl Home {
    pub fn new() -> Self {
        Home(TempDir::new().expect("a folder"))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// `cactus` with `args`, an empty standard input, and no way to a network.
    pub fn cactus<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cactus"));
        let foreign = ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_TOKEN"];
        let own = std::env::vars_os().map(|(name, _)| name).filter(|name| name.to_string_lossy().starts_with("CACTUS_"));
        for name in own.chain(foreign.map(Into::into)) {
            command.env_remove(name);
        }
        command.env("HOME", self.path()).env("CACTUS_HOME", self.path().join("cactus"));
        // Port 9 is `discard`: nothing listens there on a machine of today.
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("HF_HUB_OFFLINE", "1");
        command.args(args).stdin(Stdio::null());
        command
    }

    /// Runs `cactus` with `args` to its end.
    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Finished {
        finish(&mut self.cactus(args))
    }
}

/// What a program left behind.
#[derive(Debug)]
pub struct Finished {
    /// `None` when a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub time: Duration,
    /// Largest resident memory seen, in bytes; 0 where the system does not tell. The last moments may be missed.
    pub peak_bytes: u64,
}

/// Runs a command to its end, at most a quarter of an hour.
pub fn finish(command: &mut Command) -> Finished {
    let begin = Instant::now();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let reader = |pipe: Option<Box<dyn std::io::Read + Send>>| {
        std::thread::spawn(move || std::io::read_to_string(pipe.expect("a pipe")).expect("UTF-8 text"))
    };
    let stdout = reader(stdout.map(|p| Box::new(p) as _));
    let stderr = reader(stderr.map(|p| Box::new(p) as _));
    let mut peak_bytes = 0;
    let status = loop {
        peak_bytes = peak_bytes.max(peak(child.id()));
        if let Some(status) = child.try_wait().expect("a child to wait for") {
            break status;
        }
        if begin.elapsed() > Duration::from_secs(900) {
            let _ = child.kill();
            panic!("the program does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let time = begin.elapsed();
    let text = |thread: std::thread::JoinHandle<String>| thread.join().expect("a reader");
    Finished { code: status.code(), stdout: text(stdout), stderr: text(stderr), time, peak_bytes }
}

/// Largest resident memory of a running process so far, in bytes.
fn peak(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

impl Finished {
    /// Asserts success and gives standard output.
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout
    }

    /// Asserts failure with `code`, nothing on standard output, one error line with at most one hint, and
    /// gives standard error.
    pub fn failed(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        assert_eq!(self.stdout, "");
        let lines = |start: &str| self.stderr.lines().filter(|l| l.starts_with(start)).count();
        assert_eq!(lines("error: "), 1, "{}", self.stderr);
        assert!(lines("hint: ") <= 1, "{}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self.stderr
    }
}
