//! `cactus benchmark`: what it records, its arithmetic, other programs and devices (pretended ones).

use crate::support::{Finished, Home, bundle, finish, source};
use cactus::kernels::Topology;
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A 4-bit bundle of a model of random weights and 256 positions.
struct Stage {
    home: Home,
    model: String,
}

impl Stage {
    fn new() -> Stage {
        Stage::of("llama-tied")
    }

    fn of(golden: &str) -> Stage {
        let home = Home::new();
        let model = home.path().join("model");
        bundle(&source("tests/golden").join(golden), &model, 4);
        Stage { model: model.to_string_lossy().into_owned(), home }
    }

    /// `cactus benchmark` with few tokens and runs. Other programs are those of the fixtures, and pretend.
    fn command(&self, more: &[&str]) -> Command {
        let few = ["benchmark", &self.model, "--prefill", "40", "--decode", "4", "--depth", "0,16"];
        let runs: &[&str] = if more.contains(&"--runs") { &[] } else { &["--runs", "2"] };
        let mut command = self.home.cactus([&few, runs, more].concat());
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", source("tests/fixtures/programs").display()));
        command.env("PRETEND", self.home.path()).env("PRETEND_PROGRAM", program());
        command
    }

    fn run(&self, more: &[&str]) -> Finished {
        finish(&mut self.command(more))
    }

    fn json(&self, more: &[&str]) -> Value {
        json(&self.run(&[&["--json", "--quiet"], more].concat()).ok())
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.home.path().join(name);
        std::fs::write(&path, content).expect("written");
        path.to_string_lossy().into_owned()
    }
}

fn json(text: &str) -> Value {
    assert_eq!(text.matches('\n').count(), 1, "one line: {text}");
    serde_json::from_str(text).expect("JSON")
}

fn measurement<'v>(report: &'v Value, name: &str) -> &'v Value {
    let all = report["llm"]["measurements"].as_array().expect("a list");
    all.iter().find(|m| m["name"] == name).unwrap_or_else(|| panic!("{name} in {report}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Equal but for the last digits: reading a number may round.
fn assert_near(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() <= 1e-12 * expected.abs(), "{what}: {got}, expected {expected}");
}

fn samples(measurement: &Value) -> Vec<f64> {
    measurement["samples"].as_array().expect("a list").iter().map(number).collect()
}

/// User report P76: cold first runs were counted, and results did not say the lengths, threads or why generation ended.
#[test]
fn p76_runs_are_alike_and_the_conditions_are_told() {
    let stage = Stage::new();
    let mut command = stage.home.cactus(["benchmark", &stage.model, "--prefill", "40", "--decode", "4", "--json"]);
    let finished = finish(command.args(["--depth", "0,16", "--threads", "2"]));
    assert!(finished.stderr.contains("7 runs after a warm-up"), "{}", finished.stderr);
    let report = json(&finished.ok());
    let (conditions, llm) = (&report["conditions"], &report["llm"]);
    assert_eq!((&conditions["runs"], &conditions["warmup_runs"], &conditions["threads"]), (&7.into(), &1.into(), &2.into()));
    assert!(conditions["seed"].is_u64() && conditions["sampling"] == "none: forced tokens");
    assert_eq!((&llm["prompt_tokens"], &llm["generated_tokens"]), (&40.into(), &4.into()));
    assert_eq!(llm["finish_reason"], "length");
    for name in ["prefill 40", "decode 4 @ 0", "decode 4 @ 16", "first token of 30", "load", "load: tokenizer"] {
        let mut values = samples(measurement(&report, name));
        assert_eq!(values.len(), 7, "{name}: the warm-up is not among them");
        assert!(values.iter().all(|v| v.is_finite() && *v > 0.0), "{name}: {values:?}");
        // Of seven sorted values the fourth is the median.
        values.sort_by(f64::total_cmp);
        let median = values[3];
        let mut distances: Vec<f64> = values.iter().map(|v| (v - median).abs()).collect();
        distances.sort_by(f64::total_cmp);
        for (key, expected) in [("median", median), ("min", values[0]), ("max", values[6])] {
            assert_near(number(&measurement(&report, name)[key]), expected, name);
        }
        // A small difference of large numbers.
        assert!((number(&measurement(&report, name)["mad"]) - distances[3]).abs() <= 1e-12 * median, "{name}");
    }
    let decode = measurement(&report, "decode 4 @ 16");
    assert_eq!(
        (&decode["depth"], &decode["generated_tokens"], &decode["finish_reason"]),
        (&16.into(), &4.into(), &"length".into())
    );
    assert_eq!(llm["prefill_tps"], measurement(&report, "prefill 40")["median"]);
    assert_eq!(llm["decode_tps"], measurement(&report, "decode 4 @ 0")["median"]);
    let machine = &report["machine"];
    assert!(machine["kernels"].is_string() && machine["features"].is_array() && machine["before"].is_object(), "{machine}");
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        assert!(machine["cpu"].is_string());
        // The program could be started anew.
        assert_eq!(samples(measurement(&report, "start to first token")).len(), 7);
        let memory = &report["memory"];
        assert!(number(&memory["peak_bytes"]) >= number(&memory["steady_bytes"]) && memory["positions"] == 40, "{memory}");
    }
    let build = &report["build"];
    assert_eq!(build["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(build["profile"], if cfg!(debug_assertions) { "debug" } else { "release" });
    assert!(build["target"].as_str().expect("a text").starts_with(std::env::consts::ARCH));
    let model = &report["model"];
    assert!(model["bits"] == 4.0 || model["bits"] == 4, "{model}");
    assert!(number(&model["bits_per_weight"]) > 4.0 && number(&model["formats"]["tcq4"]) > 0.0, "{model}");
    assert!(report["date"].as_str().expect("a text").ends_with('Z'));
    assert!(number(&report["read"]["bytes_per_second"]) > 0.0);
}

/// User report P74: nobody could see how many threads were used.
#[test]
fn p74_the_number_of_threads_is_printed() {
    let stage = Stage::new();
    let usual = Topology::detect().threads();
    let finished = stage.run(&["--runs", "1"]);
    assert!(finished.stderr.contains(&format!("measuring on {usual} thread")), "{}", finished.stderr);
    let line = |text: &str| text.lines().find(|line| line.starts_with("threads ")).expect("a line on threads").to_owned();
    let text = finished.ok();
    assert_eq!(line(&text).split_whitespace().nth(1), Some(usual.to_string().as_str()));
    let text = finish(stage.command(&["--runs", "1", "-q"]).env("CACTUS_THREADS", "3")).ok();
    assert_eq!(line(&text).split_whitespace().nth(1), Some("3"));
    assert_eq!(stage.json(&["--runs", "1", "--threads", "1"])["conditions"]["threads"], 1);
}

/// What decoding reads, from the sizes in the file and in the checkpoint's configuration.
#[test]
fn reads_are_counted() {
    for (golden, kv) in [("llama-tied", "f16"), ("llama-untied", "int8")] {
        let stage = Stage::of(golden);
        let report = stage.json(&["--runs", "1", "--kv", kv]);
        assert_eq!(report["conditions"]["kv"], kv);
        let file = std::fs::read(Path::new(&stage.model).join("weights.safetensors")).expect("weights");
        let tensors = SafeTensors::deserialize(&file).expect("safetensors");
        let mut weights: f64 = tensors.iter().map(|(_, tensor)| tensor.data().len() as f64).sum();
        let config = std::fs::read_to_string(source("tests/golden").join(golden).join("config.json")).expect("a file");
        let config: Value = serde_json::from_str(&config).expect("JSON");
        if golden == "llama-untied" {
            let embed = tensors.tensor("embed").expect("an embedding").data().len() as f64;
            weights -= embed - embed / number(&config["vocab_size"]);
        }
        let heads = number(&config["num_key_value_heads"]);
        let dim = config["head_dim"].as_f64().unwrap_or(number(&config["hidden_size"]) / number(&config["num_attention_heads"]));
        // Keys and values, and with int8 an f32 scale for each of both.
        let head = if kv == "f16" { 4.0 * dim } else { 2.0 * dim + 8.0 };
        let position = number(&config["num_hidden_layers"]) * heads * head;
        // Four tokens behind 16 see 17, 18, 19 and 20 positions.
        for (name, seen) in [("decode 4 @ 0", 2.5), ("decode 4 @ 16", 18.5)] {
            let (read, speed) = (&measurement(&report, name)["read"], number(&measurement(&report, name)["median"]));
            let near = |key: &str, expected: f64| {
                let got = number(&read[key]);
                assert!((got - expected).abs() <= 1e-9 * expected, "{golden}, {name}, {key}: {got}, expected {expected}");
            };
            near("weight_bytes_per_token", weights);
            near("cache_bytes_per_token", position * seen);
            near("bytes_per_second", (weights + position * seen) * speed);
            let limit = number(&report["read"]["bytes_per_second"]);
            near("share_of_limit", (weights + position * seen) * speed / limit);
        }
    }
}

#[test]
fn forms_hold_the_same_figures() {
    let stage = Stage::new();
    let names = ["prefill 40", "decode 4 @ 0", "decode 4 @ 16", "first token of 30", "load"];
    for form in [&[][..], &["--markdown"]] {
        let finished = stage.run(&[&["--runs", "1", "--quiet"], form].concat());
        assert_eq!(finished.stderr, "");
        let text = finished.ok();
        assert!(names.iter().all(|name| text.contains(name)) && text.contains("of limit"), "{text}");
        assert_eq!(text.contains("|---|---:|"), form == ["--markdown"], "{text}");
    }
    let finished = stage.run(&["--csv"]);
    assert!(finished.stderr.contains("fewer than 5 runs"), "{}", finished.stderr);
    let text = finished.ok();
    let mut lines = text.lines();
    let titles: Vec<&str> = lines.next().expect("titles").split(',').collect();
    let at = |title: &str| titles.iter().position(|t| *t == title).expect("a column");
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').collect()).collect();
    for name in names {
        let row = rows.iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("{name} in {text}"));
        let values: Vec<f64> = row[at("samples")].split(' ').map(|v| v.parse().expect("a number")).collect();
        assert_eq!((values.len(), row[at("runs")]), (2, "2"));
        let median: f64 = row[at("median")].parse().expect("a number");
        assert!((median - (values[0] + values[1]) / 2.0).abs() < 1e-9 * median, "{text}");
    }
}

#[test]
fn wrong_wishes_are_told() {
    let stage = Stage::new();
    let missing = stage.home.path().join("no-such-file").to_string_lossy().into_owned();
    let (text, gguf) = (stage.file("text", "{}"), stage.file("m.gguf", ""));
    for (args, code, named) in [
        (vec!["--prefill", "1000"], 2, "256"),
        (vec!["--runs", "0"], 2, "runs"),
        (vec!["--pause", "nan"], 2, "pause"),
        (vec!["--depth", "300"], 2, "256"),
        (vec!["--json", "--csv"], 2, "csv"),
        (vec!["--compare", &missing], 1, "no-such-file"),
        (vec!["--compare", &text], 1, "benchmark"),
        (vec!["--against", "llama-bench"], 2, "gguf"),
        (vec!["--against", "llama-bench", "--gguf", &missing], 1, "no-such-file"),
        (vec!["--against", "llama-bench", "--gguf", &gguf, "--peer", &missing], 1, "no-such-file"),
        (vec!["--ios"], 1, "iOS"),
        (vec!["--android", "--binary", &missing], 1, "no-such-file"),
        (vec!["--android", "--binary", &text], 1, "AArch64"),
    ] {
        // A length may be given only once.
        let mut command = stage.home.cactus(["benchmark", stage.model.as_str(), "--decode", "4"].iter().chain(&args));
        let told = finish(&mut command).failed(code);
        assert!(told.contains(named), "{args:?}: {told}");
    }
    if cfg!(not(target_arch = "aarch64")) {
        let told = stage.run(&["--android"]).failed(2);
        assert!(told.contains("AArch64") && told.contains("aarch64-linux-android"), "{told}");
    }
    // What was not asked for is cut to the model's context of 256.
    let finished = finish(&mut stage.home.cactus(["benchmark", &stage.model, "--runs", "1"]));
    for note in ["only 256 tokens are read", "depth 1024 is left out", "depth 4096 is left out"] {
        assert!(finished.stderr.contains(note), "{}", finished.stderr);
    }
    assert!(finished.ok().contains("decode 100 @ 0"));
}

#[test]
fn an_earlier_result_is_compared() {
    let stage = Stage::new();
    let mut old = stage.json(&["--threads", "1"]);
    old["machine"]["cpu"] = "Abacus 3".into();
    let list = old["llm"]["measurements"].as_array_mut().expect("a list");
    list.retain(|m| m["name"] != "decode 4 @ 16");
    list.iter_mut().find(|m| m["name"] == "prefill 40").expect("a prefill")["median"] = 0.5.into();
    let path = stage.file("old.json", old.to_string());
    let finished = stage.run(&["--json", "--threads", "2", "--compare", &path]);
    for warning in ["CPU: Abacus 3 then", "threads: 1 then, 2 now", "decode 4 @ 16 was not measured then"] {
        assert!(finished.stderr.contains(&format!("warning: {warning}")), "{warning}: {}", finished.stderr);
    }
    for alike in ["quantisation", "version", "runs"] {
        assert!(!finished.stderr.contains(&format!("warning: {alike}")), "{}", finished.stderr);
    }
    let new = json(&finished.ok());
    let ratios = new["compared"]["ratios"].as_array().expect("a list");
    let prefill = ratios.iter().find(|r| r["name"] == "prefill 40").expect("a ratio");
    assert_near(number(&prefill["ratio"]), number(&new["llm"]["prefill_tps"]) / 0.5, "ratio");
    assert!(stage.run(&["--threads", "1", "-q", "--compare", &path]).ok().contains("new/old"));
}

#[cfg(target_os = "linux")]
#[test]
fn threads_are_pinned() {
    let stage = Stage::new();
    let report = stage.json(&["--runs", "1", "--pin", "--threads", "1"]);
    assert_eq!(report["conditions"]["pinned_cpus"].as_array().map(Vec::len), Some(1));
    assert!(report["machine"]["cores"].as_str().expect("a text").starts_with("1 CPU on 1 core"), "{report}");
    assert!(stage.run(&["--pin", "--threads", "512"]).failed(2).contains("512 threads"));
}

#[cfg(unix)]
#[test]
fn another_engine_is_measured_in_alternation() {
    let stage = Stage::new();
    let gguf = stage.file("m.gguf", "");
    let against = ["--against", "llama-bench", "--gguf", &gguf, "--threads", "2"];
    let report = stage.json(&against);
    let log = std::fs::read_to_string(stage.home.path().join("peer.log")).expect("a log");
    let round = ["p=40 n=0 d=0 t=2 fa=1", "p=0 n=4 d=0 t=2 fa=0", "p=0 n=4 d=16 t=2 fa=0"];
    assert_eq!(log.lines().collect::<Vec<_>>(), [round, round, round].concat(), "a warm-up and two runs, one kind after another");
    let told = &report["against"];
    assert_eq!((&told["model"], &told["build"]), (&"m.gguf".into(), &"0c1e570".into()));
    assert_eq!(number(&told["bits_per_weight"]), 4.5);
    let results = told["results"].as_array().expect("a list");
    assert_eq!(results.len(), 3);
    for result in results {
        assert_eq!(samples(&result["spread"]), [101.0, 102.0], "the warm-up is not among them");
        let ours = measurement(&report, result["name"].as_str().expect("a name"));
        assert_near(number(&result["ratio"]), number(&ours["median"]) / 101.5, "ratio");
    }
    assert!(stage.run(&[&against[..], &["-q"]].concat()).ok().contains("ours/theirs"));
    stage.file("peer-fails", "");
    assert!(stage.run(&[&against[..], &["-q"]].concat()).failed(1).contains("failed to load model"));
}

/// What a pretended device runs: `CACTUS_TEST_DEVICE_PROGRAM`, such as a build for AArch64 in an emulator, else this build.
fn program() -> std::ffi::OsString {
    std::env::var_os("CACTUS_TEST_DEVICE_PROGRAM").unwrap_or_else(|| env!("CARGO_BIN_EXE_cactus").into())
}

/// A phone on a folder.
#[cfg(unix)]
struct Phone {
    stage: Stage,
    binary: String,
}

#[cfg(unix)]
impl Phone {
    fn new() -> Phone {
        let stage = Stage::new();
        std::fs::create_dir_all(stage.home.path().join("disk/data/local/tmp")).expect("a folder");
        stage.file("devices", "ABC123\tdevice\n\n");
        // The beginning of a program for AArch64: 64 bits, little-endian, machine 183.
        let mut head = b"\x7fELF\x02\x01\x01".to_vec();
        head.resize(18, 0);
        head.extend([183, 0]);
        Phone { binary: stage.file("cactus-aarch64", head), stage }
    }

    fn command(&self, more: &[&str]) -> Command {
        self.stage.command(&[&["--android", "--binary", &self.binary], more].concat())
    }

    fn run(&self, more: &[&str]) -> Finished {
        let finished = finish(&mut self.command(more));
        assert!(self.left().is_empty(), "everything is removed: {:?}", self.left());
        finished
    }

    /// What lies in the folder for temporary files.
    fn left(&self) -> Vec<PathBuf> {
        let folder = self.stage.home.path().join("disk/data/local/tmp");
        folder.read_dir().expect("a folder").map(|entry| entry.expect("an entry").path()).collect()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.stage.home.path().join("adb.log")).unwrap_or_default()
    }
}

#[cfg(unix)]
#[test]
fn an_android_device_measures() {
    let phone = Phone::new();
    let report = json(&phone.run(&["--json", "--threads", "1", "-q"]).ok());
    assert_eq!(report["machine"]["device"], "Pretend 5");
    assert_eq!((&report["conditions"]["threads"], &report["conditions"]["runs"]), (&1.into(), &2.into()));
    assert_eq!(samples(measurement(&report, "decode 4 @ 16")).len(), 2);
    assert_eq!(report["model"]["name"], phone.stage.model.as_str());
    assert!(phone.log().contains("weights.safetensors") && phone.log().contains("-s ABC123 shell rm -rf"), "{}", phone.log());
    let finished = phone.run(&["--runs", "1"]);
    assert!(finished.stderr.contains("measuring on Pretend 5") && finished.stderr.contains("1 run after"), "{}", finished.stderr);
    assert!(finished.ok().contains("Pretend 5"));
}

#[cfg(unix)]
#[test]
fn a_device_that_fails_is_told_in_a_line() {
    let phone = Phone::new();
    let fails = |file: &str, named: &[&str]| {
        let path = phone.stage.file(file, "");
        let told = phone.run(&["-q"]).failed(1);
        assert!(named.iter().all(|part| told.contains(part)), "{file}: {told}");
        std::fs::remove_file(path).expect("removed");
    };
    fails("full", &["No space left", "hint: "]);
    fails("broken", &["Pretend 5", "Illegal instruction"]);
    phone.stage.file("devices", "");
    assert!(phone.run(&[]).failed(1).contains("no device"));
    phone.stage.file("devices", "A\tunauthorized\n");
    assert!(phone.run(&[]).failed(1).contains("unauthorized"));
    phone.stage.file("devices", "A\tdevice\nB\tdevice\n");
    let told = phone.run(&[]).failed(2);
    assert!(told.contains("A (device), B (device)") && told.contains("hint: "), "{told}");
    let empty = phone.stage.home.path().join("disk");
    assert!(finish(phone.command(&[]).env("PATH", empty)).failed(1).contains("no adb in the PATH"));
}

/// Ctrl-C while the device measures.
#[cfg(unix)]
#[test]
fn an_interrupted_device_is_left_clean() {
    let phone = Phone::new();
    phone.stage.file("slow", "");
    let mut child = phone.command(&["-q"]).spawn().expect("the program starts");
    let running = phone.stage.home.path().join("running");
    while !running.exists() {
        assert!(child.try_wait().expect("a child").is_none(), "it ended early");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(!phone.left().is_empty());
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("a signal");
    assert_eq!(child.wait().expect("an end").code(), Some(130));
    assert!(phone.left().is_empty(), "{:?}", phone.left());
}
