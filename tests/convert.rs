//! Conversion by the real program: reproducible bytes, interruptions, damaged files, memory.

use crate::support::{Finished, Home, LARGEST, as_gguf, finish, source, synthetic};
use cactus::model::Bundle;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn golden(model: &str) -> PathBuf {
    source("tests/golden").join(model)
}

/// Every file of a bundle.
fn contents(bundle: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(bundle).expect("a bundle").flatten();
    entries.map(|e| (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).expect("a file"))).collect()
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).expect("a folder").flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let home = Home::new();
    for (model, bits) in [("llama-untied", "4"), ("phi3", "2"), ("gemma2", "8"), ("qwen2", "16")] {
        let convert = |target: &str, threads: &str| {
            let target = home.path().join(target);
            let mut command = home.cactus(["convert", "--quiet", "--bits", bits]);
            finish(command.arg(golden(model)).arg(&target).env("RAYON_NUM_THREADS", threads)).ok();
            contents(&target)
        };
        let first = convert("first", "1");
        assert!(first.len() >= 4, "{:?}", first.keys());
        assert!(first == convert("second", "7"), "{model} at {bits} bits differs");
        // Over an existing bundle, too.
        assert!(first == convert("first", "2"), "{model} at {bits} bits differs");
    }
}

/// What text the rounding was fitted to stands in the manifest.
#[test]
fn text_to_calibrate_on_is_chosen_and_recorded() {
    let home = Home::new();
    let file = |name: &str, text: &str| {
        let path = home.path().join(name);
        fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let good = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n{\"text\": \"ho\"}\n";
    let (jsonl, bad) = (file("a.jsonl", good), file("b.jsonl", "{\"text\": \"ho\"}\n{\"text\": \n"));
    let convert = |calibrate: &str| {
        let target = home.path().join("out").join("m");
        let mut command = home.cactus(["convert", "--bits", "3", "--calibrate-tokens", "400", "--calibrate", calibrate]);
        (finish(command.arg(golden("qwen3")).arg(&target)), target)
    };
    for (calibrate, text) in [
        ("shipped", "shipped 400"),
        ("generated", "generated 400"),
        ("auto", "generated 200, shipped 200"),
        (jsonl.as_str(), "file "),
        ("none", ""),
    ] {
        let (finished, target) = convert(calibrate);
        assert!(finished.stderr.contains(text), "{finished:?}");
        finished.ok();
        let quantiser = Bundle::read_manifest(&target).expect("a manifest").quantiser;
        assert!(quantiser.calibration_text.starts_with(text), "{calibrate}: {}", quantiser.calibration_text);
        assert_eq!(quantiser.calibration_tokens == 0, calibrate == "none");
        assert_eq!(names(&home.path().join("out")), ["m"], "leftovers");
    }
    let text = convert(&bad).0.failed(2);
    assert!(text.lines().count() == 2 && text.contains("b.jsonl line 2: not JSON: "), "{text}");
}

/// Every width that a mixture may choose can be fitted to text, with either code.
#[test]
fn mixtures_of_all_widths() {
    let home = Home::new();
    let target = home.path().join("m");
    for (bits, code, widest, narrowest) in [("6.5", "trellis", 8, 4), ("6", "scalar", 8, 4), ("2.2", "trellis", 3, 2)] {
        let mut command = home.cactus(["convert", "--bits", bits, "--code", code, "--calibrate", "shipped"]);
        finish(command.args(["--calibrate-tokens", "400"]).arg(golden("qwen2")).arg(&target)).ok();
        let bundle = Bundle::open(&target).expect("a bundle");
        let widths: Vec<usize> = bundle.manifest.tensors.values().map(|t| t.format.bits()).filter(|bits| *bits <= 8).collect();
        assert!(widths.iter().any(|bits| *bits >= widest) && widths.iter().any(|bits| *bits <= narrowest), "{bits}: {widths:?}");
    }
}

#[test]
fn other_folders_are_not_overwritten() {
    let home = Home::new();
    let target = home.path().join("photos");
    fs::create_dir(&target).expect("a folder");
    fs::write(target.join("cat.png"), "cat").expect("written");
    let mut command = home.cactus(["convert"]);
    finish(command.arg(golden("mistral")).arg(&target)).failed(2);
    assert_eq!(names(&target), ["cat.png"]);
    let mut command = home.cactus(["convert"]);
    finish(command.arg(golden("mistral")).arg(golden("mistral"))).failed(2);
    assert_eq!(names(home.path()), ["photos"]);
}

/// A checkpoint larger than what conversion may use: killed at several moments, then converted in little memory.
#[test]
fn p49_large_checkpoint_is_killed_and_converted_in_little_memory() {
    let home = Home::new();
    let layers = match std::env::var("CACTUS_TEST_LARGE") {
        Ok(on) if on == "1" => 33,
        _ if cfg!(debug_assertions) => 1,
        _ => 2,
    };
    let (checkpoint, out) = (home.path().join("checkpoint"), home.path().join("out"));
    synthetic(&checkpoint, layers);
    let target = out.join("model");
    let convert = |bits: &str| {
        let mut command = home.cactus(["convert", "--quiet", "--bits", bits]);
        command.arg(&checkpoint).arg(&target);
        command
    };
    for share in [0.0, 0.05, 0.2, 0.5] {
        kill(&mut convert("16"), &out, (share * (layers as f64) * 134e6) as u64);
        assert!(!target.exists(), "half a bundle is visible after a kill at {share}");
    }
    let Finished { code, stderr, peak_bytes, time, .. } = finish(&mut convert("4"));
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(names(&out), ["model"], "leftovers");
    Bundle::open(&target).expect("a sound bundle");
    println!("{} MB converted in {time:.1?}, peak {} MB", layers * 134 + 34, peak_bytes / 1_000_000);
    // The promise is a gigabyte above the largest tensor: a layer of this size, its moments, the sample's inputs.
    assert!(peak_bytes < LARGEST + 1_000_000_000, "peak of {peak_bytes} bytes");

    // A kill leaves the older bundle as it was.
    let before = fs::read(target.join("cactus.json")).expect("a manifest");
    kill(&mut convert("16"), &out, 1_000_000);
    assert!(before == fs::read(target.join("cactus.json")).expect("a manifest"));
    Bundle::open(&target).expect("a sound bundle");
}

/// Starts a conversion into `out` and kills it once its weights file has more than `bytes` bytes.
fn kill(command: &mut Command, out: &Path, bytes: u64) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts");
    let begin = Instant::now();
    let partial = format!("-{}", child.id());
    let written = || {
        let folder = fs::read_dir(out).ok()?.flatten().find(|e| e.file_name().to_string_lossy().ends_with(&partial))?;
        Some(fs::metadata(folder.path().join("weights.safetensors")).map_or(0, |m| m.len()))
    };
    while written().is_none_or(|n| n < bytes) {
        assert!(child.try_wait().expect("a child").is_none(), "ended too early");
        assert!(begin.elapsed() < Duration::from_secs(120), "nothing is written");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().expect("killed");
    child.wait().expect("a child");
}

/// Numbers that look random and are the same everywhere.
struct Seed(u64);

impl Seed {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n as u64) as usize
    }
}

/// Converts a damaged checkpoint with 400 MB of address space and expects a quick refusal in one line. With
/// `may_pass` the damage may have gone where it does not matter.
fn refused(home: &Home, checkpoint: &Path, what: &str, may_pass: bool) {
    let target = home.path().join("out");
    let mut command = home.cactus(["convert", "--quiet", "--bits", "4"]);
    command.arg(checkpoint).arg(&target);
    let finished = finish(&mut limited(command));
    assert!(finished.time < Duration::from_secs(20), "{what}: took {:?}", finished.time);
    assert!(finished.peak_bytes < 100_000_000, "{what}: {} bytes", finished.peak_bytes);
    if may_pass && finished.code == Some(0) {
        fs::remove_dir_all(&target).expect("a bundle");
        return;
    }
    assert_eq!(finished.code, Some(1), "{what}: {}", finished.stderr);
    let name = checkpoint.file_name().expect("a name").to_string_lossy().into_owned();
    let text = finished.failed(1);
    assert!(text.lines().count() <= 2 && text.contains(&name), "{what}: {text}");
    assert!(!target.exists(), "{what}: a bundle is visible");
}

/// The same command within a bound on its address space, where a shell can set one.
fn limited(command: Command) -> Command {
    if !cfg!(target_os = "linux") {
        return command;
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -v 400000; exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    // A thread takes address space for its stack and its heap.
    shell.stdin(Stdio::null()).env("RAYON_NUM_THREADS", "2").env("MALLOC_ARENA_MAX", "2");
    shell
}

/// A copy of the golden Llama folder, with other weights.
fn folder_with(weights: &[u8], dir: &Path) -> PathBuf {
    let folder = dir.join("damaged");
    fs::create_dir_all(&folder).expect("a folder");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden("llama-tied").join(name), folder.join(name)).expect("a copy");
    }
    fs::write(folder.join("model.safetensors"), weights).expect("written");
    folder
}

/// Runs `test` on `whole` cut at 20 places, and with 8 bytes of its first `header` bytes changed at 40 places
/// to values that make lengths and counts absurd.
fn damage(whole: &[u8], header: usize, mut test: impl FnMut(&[u8], &str, bool)) {
    let mut seed = Seed(7);
    for i in 0..20 {
        // Half of the cuts in the header, which is a small part of the file.
        let at = seed.below(if i % 2 == 0 { header } else { whole.len() });
        test(&whole[..at], &format!("cut at {at}"), false);
    }
    for value in [u64::MAX, i64::MAX as u64, 1 << 40, 0] {
        for _ in 0..10 {
            let at = seed.below(header - 8);
            let mut bytes = whole.to_vec();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            test(&bytes, &format!("{value:x} at {at}"), true);
        }
    }
}

#[test]
fn p56_damaged_safetensors_are_refused() {
    let (home, dir) = (Home::new(), TempDir::new().expect("a folder"));
    let whole = fs::read(golden("llama-tied").join("model.safetensors")).expect("weights");
    let length = u64::from_le_bytes(whole[..8].try_into().expect("8 bytes")) as usize;
    damage(&whole, 8 + length, |bytes, what, may_pass| refused(&home, &folder_with(bytes, dir.path()), what, may_pass));
    for (header, what) in [
        (u64::MAX, "largest header"),
        (whole.len() as u64, "header longer than the file"),
        (0, "no header"),
        (1 << 32, "header of 4 GB"),
    ] {
        let bytes = [&header.to_le_bytes(), &whole[8..]].concat();
        refused(&home, &folder_with(&bytes, dir.path()), what, false);
    }
    // Sizes written as text.
    let text = String::from_utf8(whole[8..8 + length].to_vec()).expect("a header in UTF-8");
    for (from, to) in [
        ("[512,128]", "[512,18446744073709551615]"),
        ("[512,128]", "[4294967296,4294967296]"),
        ("[512,128]", "[0,128]"),
        ("\"BF16\"", "\"BF32\""),
        ("\"data_offsets\":[0,", "\"data_offsets\":[18446744073709551615,"),
    ] {
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{from} is not in the header");
        let bytes = [&(changed.len() as u64).to_le_bytes(), changed.as_bytes(), &whole[8 + length..]].concat();
        refused(&home, &folder_with(&bytes, dir.path()), to, false);
    }
}

#[test]
fn p52_damaged_gguf_files_are_refused() {
    let (home, dir) = (Home::new(), TempDir::new().expect("a folder"));
    let whole = as_gguf(&golden("llama-tied"));
    // Tensors begin where the rest of the file is 4 bytes for each weight.
    let header = whole.len() - 4 * 361_088 - 32;
    let path = dir.path().join("damaged.gguf");
    let mut test = |bytes: &[u8], what: &str, may_pass: bool| {
        fs::write(&path, bytes).expect("written");
        refused(&home, &path, what, may_pass);
    };
    damage(&whole, header, &mut test);
    for at in [8, 16] {
        // Counts of tensors and of metadata entries.
        for count in [u64::MAX, 1 << 32, 1_000_000] {
            let mut bytes = whole.clone();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            test(&bytes, &format!("{count} entries at {at}"), false);
        }
    }
    test(b"<!DOCTYPE html><html>Sign in</html>", "a web page", false);
    test(b"", "an empty file", false);
}
