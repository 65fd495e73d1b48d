//! Calibrated conversions that were interrupted or killed, and go on.

use crate::support::{Home, finish, source};
use cactus::error::{Error, Kind};
use cactus::model::bundle::Provenance;
use cactus::model::convert::{self, Event, Options};
use cactus::model::import::Checkpoint;
use cactus::quant::Bits;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn golden(model: &str) -> PathBuf {
    source("tests/golden").join(model)
}

fn options(bits: f64, sequential: Option<f32>) -> Options {
    // Two texts; ids that look random.
    let text = |n: u32| (0..n).map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(n) >> 20 & 511).collect();
    let source = Provenance { name: "test".into(), revision: None };
    let plain = Options::plain(Bits::new(bits).expect("bits"), source);
    Options { calibration: vec![text(150), text(90)], sequential, ..plain }
}

/// Every file of a bundle.
fn contents(bundle: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(bundle).expect("a bundle").flatten();
    entries.map(|e| (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).expect("a file"))).collect()
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// What happened during a conversion.
struct Seen {
    result: Result<(), Error>,
    notes: Vec<String>,
    events: usize,
    /// Work in all, done at the start, done at the end.
    work: (u64, u64, u64),
}

/// Converts and interrupts that at the `stop`th event.
fn convert(checkpoint: &Path, target: &Path, options: &Options, stop: usize) -> Seen {
    let mut seen = Seen { result: Ok(()), notes: Vec::new(), events: 0, work: (0, 0, 0) };
    let checkpoint = Checkpoint::open(checkpoint).expect("a checkpoint");
    let result = convert::convert(&checkpoint, target, options, &mut |event| {
        seen.events += 1;
        match event {
            Event::Note(text) => seen.notes.push(text.to_owned()),
            Event::Start { work, done } => seen.work = (work, done, done),
            Event::Advance(work) => seen.work.2 += work,
            _ => {}
        }
        if seen.events == stop { Err(Error::new(Kind::Interrupted, "interrupted")) } else { Ok(()) }
    });
    seen.result = result.map(drop);
    seen
}

#[test]
fn interrupted_conversions_go_on_to_the_same_bytes() {
    let folder = TempDir::new().expect("a folder");
    for (model, bits, sequential) in
        [("llama-untied", 4.0, Some(0.5)), ("gemma2", 2.0, Some(0.5)), ("llama-tied", 3.3, Some(0.5)), ("qwen2", 3.0, None)]
    {
        let (whole, target) = (folder.path().join("whole"), folder.path().join("out").join("model"));
        let options = options(bits, sequential);
        let once = convert(&golden(model), &whole, &options, usize::MAX);
        once.result.expect("a bundle");
        assert!(once.notes.is_empty() && once.work.1 == 0);
        assert_eq!(once.work.0, once.work.2, "{model}: work announced and work done differ");
        let whole = contents(&whole);
        let mut notes = Vec::new();
        // One event further each time, until the end is reached.
        let mut runs = 0;
        for stop in (1..).map(|n| 1 + n * once.events / 12) {
            let seen = convert(&golden(model), &target, &options, stop);
            runs += 1;
            notes.extend(seen.notes);
            match seen.result {
                Ok(()) => break,
                Err(error) => {
                    assert_eq!(error.kind, Kind::Interrupted);
                    assert!(!target.exists());
                    let kept = names(target.parent().expect("a parent"));
                    assert_eq!(kept.len(), usize::from(error.hint().is_some()), "{kept:?}");
                }
            }
        }
        assert!(runs > 2 && notes.iter().any(|n| n.starts_with("going on with ")), "{model}: {runs} runs, {notes:?}");
        assert!(whole == contents(&target), "{model}: bytes differ");
        assert_eq!(names(target.parent().expect("a parent")), ["model"]);
        fs::remove_dir_all(&target).expect("removed");
    }
}

/// Stops at one event after the other, each time on a fresh start, and goes on once.
#[test]
fn every_moment_is_a_good_one_to_stop() {
    let folder = TempDir::new().expect("a folder");
    let (whole, target) = (folder.path().join("whole"), folder.path().join("out").join("model"));
    let options = options(2.0, Some(0.5));
    let events = convert(&golden("phi3"), &whole, &options, usize::MAX).events;
    let whole = contents(&whole);
    for stop in (1..=events).step_by(3) {
        convert(&golden("phi3"), &target, &options, stop).result.expect_err("interrupted");
        let seen = convert(&golden("phi3"), &target, &options, usize::MAX);
        seen.result.expect("a bundle");
        assert!(seen.work.0 == seen.work.2, "stopped at {stop}: {:?}", seen.work);
        assert!(whole == contents(&target), "stopped at {stop}");
        assert_eq!(names(target.parent().expect("a parent")), ["model"], "stopped at {stop}");
        fs::remove_dir_all(&target).expect("removed");
    }
}

/// Other errors leave nothing.
#[test]
fn failed_conversions_do_not_go_on() {
    let folder = TempDir::new().expect("a folder");
    let target = folder.path().join("model");
    let checkpoint = Checkpoint::open(&golden("mistral")).expect("a checkpoint");
    let mut count = 0;
    let result = convert::convert(&checkpoint, &target, &options(4.0, Some(0.5)), &mut |_| {
        count += 1;
        if count > 20 { Err(Error::new(Kind::Io, "the disk is full")) } else { Ok(()) }
    });
    assert_eq!(result.expect_err("an error").kind, Kind::Io);
    assert!(names(folder.path()).is_empty());
}

/// The only folder in `out`, which is that of an interrupted conversion.
fn leftover(out: &Path) -> PathBuf {
    let names = names(out);
    assert!(names.len() == 1 && names[0].contains(".partial-"), "{names:?}");
    out.join(&names[0])
}

#[test]
fn what_does_not_fit_is_begun_anew() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("out");
    let (checkpoint, target) = (folder.path().join("checkpoint"), out.join("model"));
    fs::create_dir(&checkpoint).expect("a folder");
    for name in names(&golden("llama-tied")) {
        fs::copy(golden("llama-tied").join(&name), checkpoint.join(name)).expect("a copy");
    }
    let same = options(4.0, Some(0.5));
    let events = convert(&checkpoint, &folder.path().join("whole"), &same, usize::MAX).events;
    let whole = contents(&folder.path().join("whole"));
    let interrupt = || {
        let error = convert(&checkpoint, &target, &same, events - 12).result.expect_err("interrupted");
        assert!(error.hint().is_some_and(|hint| hint.contains("go on")));
    };
    let again = |options: &Options, same: bool, what: &str| {
        let seen = convert(&checkpoint, &target, options, usize::MAX);
        seen.result.expect(what);
        assert_eq!(!seen.notes.is_empty(), same, "{what}: {:?}", seen.notes);
        assert_eq!(names(&out), ["model"], "{what}");
        let found = contents(&target);
        fs::remove_dir_all(&target).expect("removed");
        found
    };
    // Undisturbed, it goes on.
    interrupt();
    assert!(again(&same, true, "the same") == whole);
    // Other options.
    let mut other = same.clone();
    other.calibration[1].pop();
    for (options, what) in
        [(other, "other text"), (options(3.0, Some(0.5)), "other bits"), (options(4.0, Some(0.4)), "another share")]
    {
        interrupt();
        again(&options, false, what);
    }
    // What a killed process was about to write or to remove does not get into the bundle.
    interrupt();
    for name in ["progress.next", "progress.streams-1", "progress.streams-999"] {
        fs::write(leftover(&out).join(name), "x").expect("written");
    }
    assert!(again(&same, true, "files of a moment") == whole);
    // Damage: every file cut short, missing, and changed in one byte in the middle.
    interrupt();
    let files = names(&leftover(&out));
    assert!(files.iter().any(|f| f.starts_with("progress.streams-")) && files.len() == 4, "{files:?}");
    fs::remove_dir_all(leftover(&out)).expect("removed");
    for file in files.iter().filter(|f| *f != ".lock") {
        for damage in ["shorter", "missing", "changed", "longer"] {
            interrupt();
            let path = leftover(&out).join(file);
            let mut bytes = fs::read(&path).expect("a file");
            match damage {
                "shorter" => bytes.truncate(bytes.len() / 3),
                "changed" => {
                    // Before what was written after the record.
                    let at = bytes.len() / 3;
                    bytes[at] ^= 1;
                }
                "longer" => bytes.extend([7; 1000]),
                _ => {}
            }
            fs::write(&path, bytes).expect("written");
            if damage == "missing" {
                fs::remove_file(&path).expect("removed");
            }
            // What follows the finished part of the weights does not matter.
            let sound = file == "weights.safetensors" && damage == "longer";
            assert!(again(&same, sound, &format!("{file} {damage}")) == whole, "{file} {damage}");
        }
    }
    // Another checkpoint of the same size.
    interrupt();
    let path = checkpoint.join("model.safetensors");
    let mut bytes = fs::read(&path).expect("weights");
    let last = bytes.len() - 1;
    bytes[last] ^= 0x80;
    fs::write(&path, bytes).expect("written");
    assert!(again(&same, false, "another checkpoint") != whole);
}

/// `cactus convert` of a golden model to `target`; the text is long enough for it to take a while.
fn command(home: &Home, target: &Path) -> Command {
    let text = home.path().join("text");
    if !text.exists() {
        fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(4000)).expect("written");
    }
    let mut command = home.cactus(["convert", "--bits", "2.6", "--calibrate-tokens", "3000", "--calibrate"]);
    command.arg(text).arg(golden("llama3-rope")).arg(target);
    command
}

fn spawn(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts")
}

/// Waits until the conversion in `out` has a record of at least `bytes` finished bytes of weights.
fn wait(child: &mut Child, out: &Path, bytes: u64) -> bool {
    let begin = Instant::now();
    let have = || {
        let folder = names(out).into_iter().find(|name| name.contains(".partial-"))?;
        let text = fs::read_to_string(out.join(folder).join("progress")).ok()?;
        let record: serde_json::Value = serde_json::from_str(text.split_once('\n')?.1).ok()?;
        record["bytes"].as_u64()
    };
    while have().is_none_or(|have| have < bytes) {
        assert!(begin.elapsed() < Duration::from_secs(120), "nothing is written");
        if child.try_wait().expect("a child").is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

#[test]
fn killed_conversions_go_on_to_the_same_bytes() {
    let home = Home::new();
    let (whole, out) = (home.path().join("whole"), home.path().join("out"));
    finish(&mut command(&home, &whole)).ok();
    let size = fs::metadata(whole.join("weights.safetensors")).expect("weights").len();
    let target = out.join("model");
    let mut killed = 0;
    for bytes in [0, 1, size / 3, size / 2, size * 3 / 4] {
        let mut child = spawn(&mut command(&home, &target));
        if wait(&mut child, &out, bytes) {
            child.kill().expect("killed");
            child.wait().expect("a child");
            killed += usize::from(!target.exists());
        }
    }
    assert!(killed > 2, "only {killed} were killed in time");
    let last = finish(&mut command(&home, &target));
    assert!(last.stderr.contains("going on with ") || target.exists(), "{}", last.stderr);
    last.ok();
    let (whole, found) = (contents(&whole), contents(&target));
    assert!(whole.keys().eq(found.keys()), "{:?}", found.keys());
    for (name, bytes) in &whole {
        assert!(found.get(name) == Some(bytes), "{name} differs");
    }
    assert_eq!(names(&out), ["model"]);
}

#[test]
fn processes_at_once_do_not_share_a_folder() {
    let home = Home::new();
    let (whole, out) = (home.path().join("whole"), home.path().join("out"));
    finish(&mut command(&home, &whole)).ok();
    let target = out.join("model");
    let mut child = spawn(&mut command(&home, &target));
    assert!(wait(&mut child, &out, 1));
    child.kill().expect("killed");
    child.wait().expect("a child");
    let mut children: Vec<Child> = (0..2).map(|_| spawn(&mut command(&home, &target))).collect();
    for child in &mut children {
        assert!(child.wait().expect("a child").success());
    }
    assert!(contents(&whole) == contents(&target));
    assert_eq!(names(&out), ["model"]);
}
