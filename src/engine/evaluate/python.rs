//! Running programs that a model wrote, with limits.
//!
//! This is no sandbox. A program runs as the user, in an empty folder of its own, without the environment and
//! user packages (`python3 -I`), with limits on time, CPU time, memory and file sizes, and its process group is
//! killed when the time is over. It can still read what the user can read, write where the user can write,
//! start processes that leave the group, and use the network. See `docs/evaluation.md`.

use crate::error::{Error, Kind, Result};
use std::path::PathBuf;
use std::time::Duration;

/// Limits of a program.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub time: Duration,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    Failed,
    TimedOut,
}

/// Address space, in KiB: 4 GiB.
const MEMORY_KIB: u64 = 4 << 20;
/// Largest file, in blocks of 512 or 1024 bytes, as the shell counts: 32 or 64 MiB.
const FILE_BLOCKS: u64 = 65536;
/// How often it is looked whether a program has ended.
const GLANCE: Duration = Duration::from_millis(5);

/// An empty folder that only the user may enter; gone with the value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Folder> {
        static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("cactus-eval-{}-{number}", std::process::id()));
        let mut builder = std::fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path).map_err(|e| Error::io("create", &path, &e))?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a Python program to its end or to the end of its time.
///
/// # Errors
/// `NotFound` when there is no `python3`, `Interrupted` when `stopped` says so (the program is killed).
#[cfg(unix)]
pub fn run(program: &str, limits: &Limits, stopped: &dyn Fn() -> bool) -> Result<Verdict> {
    use rustix::process::{Pid, Signal, kill_process_group};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    /// The shell's exit status for a command that does not exist.
    const NO_COMMAND: i32 = 127;

    let folder = Folder::new()?;
    let file = folder.0.join("program.py");
    std::fs::write(&file, program).map_err(|e| Error::io("write", &file, &e))?;
    // A limit that a system does not know is no reason to stop.
    let script = format!(
        "ulimit -c 0; ulimit -t {} 2>/dev/null; ulimit -v {MEMORY_KIB} 2>/dev/null; ulimit -f {FILE_BLOCKS} 2>/dev/null; \
         exec python3 -I -B program.py",
        limits.time.as_secs().saturating_add(1)
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]).current_dir(&folder.0).env_clear().env("HOME", &folder.0).env("LANG", "C.UTF-8");
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let mut child = command.spawn().map_err(|e| Error::io("run", std::path::Path::new("sh"), &e))?;
    let group = Pid::from_child(&child);
    let begin = Instant::now();
    let result = loop {
        match child.try_wait() {
            Ok(Some(status)) if status.code() == Some(NO_COMMAND) => {
                break Err(Error::not_found("python3 was not found, tests of programs need it"));
            }
            Ok(Some(status)) => break Ok(if status.success() { Verdict::Passed } else { Verdict::Failed }),
            Ok(None) if begin.elapsed() >= limits.time => break Ok(Verdict::TimedOut),
            Ok(None) if stopped() => break Err(Error::new(Kind::Interrupted, "interrupted")),
            Ok(None) => std::thread::sleep(GLANCE),
            Err(e) => break Err(Error::io("wait for", std::path::Path::new("python3"), &e)),
        }
    };
    // Also what the program left running behind it.
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
    result
}

#[cfg(not(unix))]
pub fn run(_program: &str, _limits: &Limits, _stopped: &dyn Fn() -> bool) -> Result<Verdict> {
    Err(Error::unsupported("tests of programs run on Unix systems only"))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::time::Instant;

    fn verdict(program: &str, seconds: u64) -> Verdict {
        run(program, &Limits { time: Duration::from_secs(seconds) }, &|| false).unwrap()
    }

    #[test]
    fn programs_pass_and_fail() {
        assert_eq!(verdict("x = 1\nassert x == 1", 20), Verdict::Passed);
        assert_eq!(verdict("assert 1 == 2", 20), Verdict::Failed);
        assert_eq!(verdict("not a program", 20), Verdict::Failed);
        assert_eq!(verdict("import sys\nsys.exit(3)", 20), Verdict::Failed);
        // Alone in its folder, without the environment.
        let alone = "import os\nassert os.listdir() == ['program.py']\n\
                     assert not [name for name in os.environ if name.startswith('CARGO')]";
        assert_eq!(verdict(alone, 20), Verdict::Passed);
    }

    #[test]
    fn limits_hold() {
        assert_eq!(verdict("x = bytearray(6 << 30)", 20), Verdict::Failed);
        let large = "f = open('f', 'wb')\nfor _ in range(200): f.write(bytes(1 << 20)); f.flush()";
        assert_eq!(verdict(large, 20), Verdict::Failed);
    }

    /// Endless programs end, and so do the processes that they started.
    #[test]
    fn endless_programs_are_killed_with_their_group() {
        let begin = Instant::now();
        let marker = std::env::temp_dir().join(format!("cactus-eval-marker-{}", std::process::id()));
        let program = format!(
            "import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 4; : > \"$0\"', {:?}])\nwhile True: pass",
            marker.display().to_string()
        );
        assert_eq!(verdict(&program, 1), Verdict::TimedOut);
        assert!(begin.elapsed() < Duration::from_secs(4));
        std::thread::sleep(Duration::from_secs(5));
        assert!(!marker.exists(), "a process outlived its group");
        let interrupted = run("while True: pass", &Limits { time: Duration::from_secs(60) }, &|| true).unwrap_err();
        assert_eq!(interrupted.kind, Kind::Interrupted);
    }
}
