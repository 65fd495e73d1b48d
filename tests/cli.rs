//! What scripts rely on: output, exit codes, JSON.

use crate::support::{Finished, Home, argmax, finish, relative, source};
use safetensors::SafeTensors;
use serde_json::Value;
use std::io::Write;
use std::process::Stdio;

/// Fields of a completion response, in order.
const COMPLETION: [&str; 17] = [
    "success",
    "error",
    "cloud_handoff",
    "cloud_handoff_reason",
    "response",
    "function_calls",
    "segments",
    "confidence",
    "confidence_threshold",
    "time_to_first_token_ms",
    "total_time_ms",
    "prefill_tps",
    "decode_tps",
    "ram_usage_mb",
    "prefill_tokens",
    "decode_tokens",
    "total_tokens",
];

/// A model of random weights, which answers in nonsense.
fn model() -> String {
    source("tests/golden/llama-tied").to_string_lossy().into_owned()
}

/// `cactus run` on that model, with a short answer.
fn run(home: &Home, more: &[&str]) -> Finished {
    home.run(["run", &model(), "--max-tokens", "12"].iter().chain(more))
}

fn json(text: &str) -> Value {
    assert_eq!(text.matches('\n').count(), 1, "one line: {text}");
    serde_json::from_str(text).expect("JSON")
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// `cactus run` with text piped in.
fn piped(home: &Home, args: &[&str], input: &str) -> Finished {
    let path = home.path().join("input.txt");
    std::fs::write(&path, input).expect("written");
    let mut command = home.cactus(["run", &model(), "--max-tokens", "12"].iter().chain(args));
    finish(command.stdin(std::fs::File::open(path).expect("a file")))
}

#[test]
fn stdout_holds_the_answer_only() {
    let home = Home::new();
    let first = run(&home, &["--prompt", "Hi"]);
    assert!(first.stderr.contains("converting"), "{}", first.stderr);
    assert!(!first.stderr.contains('\u{1b}'), "{}", first.stderr);
    let answer = first.ok();
    assert!(!answer.contains('\u{1b}'));

    let quiet = run(&home, &["--prompt", "Hi", "--quiet"]);
    assert_eq!(quiet.stderr, "");
    assert_eq!(quiet.ok(), answer);

    // A prompt may also follow the model.
    assert_eq!(run(&home, &["Hi", "--quiet"]).ok(), answer);
    run(&home, &["Hi", "--prompt", "Hi"]).failed(2);

    let value = json(&run(&home, &["--prompt", "Hi", "--json"]).ok());
    assert_eq!(format!("{}\n", value["response"].as_str().expect("a text")), answer);
}

#[test]
fn json_has_the_documented_shape() {
    let home = Home::new();
    let value = json(&home.run(["run", &model(), "--prompt", "Hi", "--json", "--max-tokens", "5"]).ok());
    assert_eq!(keys(&value), COMPLETION);
    assert_eq!(value["success"], true);
    assert_eq!(value["error"], Value::Null);
    assert_eq!(value["function_calls"], serde_json::json!([]));
    assert!((0.5..=1.0).contains(&value["confidence"].as_f64().expect("a number")));
    let count = |key: &str| value[key].as_u64().expect("a count");
    assert_eq!(count("prefill_tokens") + count("decode_tokens"), count("total_tokens"));
    assert!(count("decode_tokens") <= 5);
    for key in ["time_to_first_token_ms", "total_time_ms", "prefill_tps"] {
        assert!(value[key].as_f64().expect("a number") > 0.0, "{key}");
    }

    let failed = home.run(["run", "no-such-model", "--prompt", "Hi", "--json"]);
    assert_eq!((failed.code, failed.stderr.as_str()), (Some(1), ""));
    let value = json(&failed.stdout);
    assert_eq!(keys(&value), COMPLETION);
    assert_eq!((&value["success"], &value["response"], &value["confidence"]), (&false.into(), &Value::Null, &Value::Null));
    assert!(value["error"].as_str().expect("a text").contains("no-such-model"));
}

#[test]
fn exit_codes_tell_who_is_wrong() {
    let home = Home::new();
    for (args, code, named) in [
        (vec!["run", "no-such-model", "--prompt", "x"], 1, "no-such-model"),
        (vec!["run", "./no/such/folder", "--prompt", "x"], 1, "./no/such/folder"),
        (vec!["run", "nobody/nothing", "--prompt", "x"], 1, "nobody/nothing"),
        (vec!["run", "Why is it so?"], 2, "--prompt"),
        (vec!["run", "Cargo.toml", "--prompt", "x"], 1, "Cargo.toml"),
        (vec!["run", &model(), "--prompt", ""], 2, "prompt"),
        (vec!["run", &model()], 2, "prompt"),
        (vec!["run", &model(), "--prompt", "x", "--temperature=-1"], 2, "temperature"),
        (vec!["run", &model(), "--prompt", "x", "--top-p", "nan"], 2, "top"),
        (vec!["run", &model(), "--prompt", "x", "--stop", ""], 2, "stop"),
        (vec!["run", &model(), "--prompt", "x", "--context", "0"], 2, "context"),
        (vec!["run", &model(), "--prompt", "x", "--context", "1000000"], 2, "context"),
        (vec!["run", &model(), "--prompt", "one two three four five six", "--context", "4"], 2, "4"),
        (vec!["logits", &model(), "--ids", "1,x", "--output", "out"], 2, "x"),
        (vec!["logits", &model(), "--ids", "100000", "--output", "out"], 2, "100000"),
        (vec!["logits", &model(), "--ids", ",", "--output", "out"], 2, "ids"),
    ] {
        let text = home.run(&args).failed(code);
        assert!(text.contains(named), "{args:?}: {text}");
    }
    // Refused by the option parser, which has a form of its own.
    for args in [
        vec!["run", "--no-such-option"],
        vec!["run", "--bits", "9", "--prompt", "x"],
        vec!["run", "--threads", "0", "--prompt", "x"],
        vec!["no-such-command"],
        vec![],
    ] {
        let finished = home.run(&args);
        assert_eq!((finished.code, finished.stdout.as_str()), (Some(2), ""), "{args:?}: {}", finished.stderr);
    }
    let text = finish(home.cactus(["run", &model(), "--prompt", "x"]).env("CACTUS_CPU", "abacus")).failed(2);
    assert!(text.contains("abacus") && text.contains("scalar"), "{text}");
}

#[test]
fn closed_pipe_is_no_error() {
    let home = Home::new();
    run(&home, &["--prompt", "Hi"]).ok();
    let mut command = home.cactus(["run", &model(), "--prompt", "Hi", "--max-tokens", "200", "--quiet"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn piped_text_follows_the_prompt() {
    let home = Home::new();
    let tokens = |finished: Finished| {
        let value = json(&finished.ok());
        (value["prefill_tokens"].clone(), value["response"].clone())
    };
    let joined = tokens(run(&home, &["--json", "--prompt", "Translate:\n\nBonjour"]));
    assert_eq!(tokens(piped(&home, &["--json", "--prompt", "Translate:"], "Bonjour\n")), joined);
    assert_eq!(tokens(piped(&home, &["--json"], "Translate:\n\nBonjour\n")), joined);
    assert_ne!(tokens(run(&home, &["--json", "--prompt", "Translate:"])), joined);
    let path = home.path().join("latin1");
    std::fs::File::create(&path).and_then(|mut f| f.write_all(b"caf\xe9")).expect("written");
    let mut command = home.cactus(["run", &model()]);
    finish(command.stdin(std::fs::File::open(path).expect("a file"))).failed(2);
}

/// Also for any number of threads, and at any time with the same seed.
#[test]
fn p13_the_same_request_gives_the_same_answer() {
    let home = Home::new();
    let sampled = ["--prompt", "Hi", "--temperature", "1.5", "--top-k", "50", "--seed"];
    let with = |more: &[&str]| run(&home, more).ok();
    let greedy = with(&["--prompt", "Hi"]);
    let seven = with(&[&sampled[..], &["7"]].concat());
    for threads in ["1", "2", "3"] {
        assert_eq!(with(&["--prompt", "Hi", "--threads", threads]), greedy);
        assert_eq!(with(&[&sampled[..], &["7", "--threads", threads]].concat()), seven);
    }
    assert_ne!(seven, with(&[&sampled[..], &["8"]].concat()));
    assert_ne!(seven, greedy);
}

#[test]
fn logits_are_written() {
    let home = Home::new();
    let golden = std::fs::read(source("tests/golden/llama-tied/golden.safetensors")).expect("a golden file");
    let golden = SafeTensors::deserialize(&golden).expect("safetensors");
    let words = |file: &SafeTensors, name: &str| -> Vec<[u8; 4]> {
        file.tensor(name).expect(name).data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]).collect()
    };
    let ids: Vec<String> = words(&golden, "input_ids").into_iter().map(|b| u32::from_le_bytes(b).to_string()).collect();
    let output = home.path().join("logits.safetensors");
    for form in [ids.join(","), "ids.txt".to_owned()] {
        std::fs::write(home.path().join("ids.txt"), ids.join("\n")).expect("written");
        let mut command = home.cactus(["logits", &model(), "--bits", "16", "--quiet", "--greedy", "16", "--ids", &form]);
        let text = finish(command.arg("--output").arg(&output).current_dir(home.path())).ok();
        assert_eq!(text, "");
        let bytes = std::fs::read(&output).expect("the output");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let floats = |file: &SafeTensors| words(file, "logits").into_iter().map(f32::from_le_bytes).collect::<Vec<_>>();
        let logits = floats(&file);
        assert_eq!(file.tensor("logits").expect("logits").shape(), [24, 512]);
        assert!(relative(&logits, &floats(&golden)) < 2e-3);
        assert_eq!(words(&file, "greedy_ids"), words(&golden, "greedy_ids"));
        assert_eq!(argmax(&logits[23 * 512..]).to_le_bytes(), words(&file, "greedy_ids")[0]);
    }
}

#[test]
fn list_shows_what_was_converted() {
    let home = Home::new();
    assert_eq!(home.run(["list"]).ok(), "");
    assert_eq!(home.run(["list", "--json"]).ok(), "[]\n");
    run(&home, &["--prompt", "Hi"]).ok();
    run(&home, &["--prompt", "Hi", "--bits", "2"]).ok();
    let table = home.run(["list"]).ok();
    assert_eq!(table.lines().count(), 3, "{table}");
    let rows = json(&home.run(["list", "--json"]).ok());
    let rows = rows.as_array().expect("a list");
    let bits: Vec<_> = rows.iter().map(|r| r["bits"].as_u64().expect("bits")).collect();
    assert_eq!(bits, [2, 4]);
    for row in rows {
        assert_eq!((&row["name"], &row["family"]), (&"llama-tied".into(), &"llama".into()));
        // What is listed can be run by its path.
        let path = row["path"].as_str().expect("a path");
        home.run(["run", path, "--prompt", "Hi", "--max-tokens", "3", "--quiet"]).ok();
    }
}

#[test]
fn packagers_get_completions_and_a_manual_page() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(home.run(["completions", shell]).ok().contains("logits"), "{shell}");
    }
    let page = home.run(["man"]).ok();
    assert!(page.starts_with(".") || page.contains(".TH"), "{page:.60}");
    assert!(home.run(["--version"]).ok().starts_with("cactus "));
    assert!(home.run(["run", "--help"]).ok().contains("--prompt"));
}
