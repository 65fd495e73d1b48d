//! Scripts around `cactus run`: many prompts, output files, streams that close, settings, the doctor.

use crate::support::{Finished, Home, bundle, finish, source};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A home with a bundle of random weights in it.
struct Bench {
    home: Home,
    model: PathBuf,
}

impl Bench {
    fn new() -> Self {
        let home = Home::new();
        let model = home.path().join("tiny");
        bundle(&source("tests/golden/llama-tied"), &model, 4);
        Bench { home, model }
    }

    /// `cactus run` on that model, with a short answer.
    fn command(&self, more: &[&str]) -> Command {
        let mut command = self.home.cactus(["run"]);
        command.arg(&self.model).args(["--max-tokens", "8"]).args(more).current_dir(self.home.path());
        command
    }

    fn run(&self, more: &[&str]) -> Finished {
        finish(&mut self.command(more))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(&path, text).expect("written");
        path
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).expect("a file")
    }

    /// The text of a single answer.
    fn answer(&self, more: &[&str]) -> String {
        self.run(&[&["-q"], more].concat()).ok().trim_end_matches('\n').to_owned()
    }
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// Output without what differs from run to run.
fn steady(text: &str) -> Vec<Value> {
    let mut lines = lines(text);
    for line in &mut lines {
        let fields = line.as_object_mut().expect("an object");
        fields.retain(|name, _| !name.ends_with("_ms") && !name.ends_with("_tps") && name != "ram_usage_mb");
    }
    lines
}

/// Sends Ctrl-C.
#[cfg(unix)]
fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill").success());
}

/// Waits for the end, which must come within `limit`.
fn end(child: &mut Child, limit: Duration) -> Option<i32> {
    let begin = Instant::now();
    loop {
        match child.try_wait().expect("a child") {
            Some(status) => return status.code(),
            None if begin.elapsed() > limit => {
                let _ = child.kill();
                panic!("no end within {limit:?}");
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

const FIVE: &str = r#"{"prompt": "Hi", "id": "a"}
{"prompt": "Hello there", "id": 2, "max_tokens": 3}

{"prompt": "Hi", "temperature": 1.5, "seed": 7, "top_k": 50, "system": "Be brief."}
not json
{"messages": [{"role": "user", "content": "Hi"}], "id": ["any", "thing"]}
"#;

#[test]
fn a_batch_answers_line_by_line_in_order() {
    let bench = Bench::new();
    bench.write("in.jsonl", FIVE);
    let finished = bench.run(&["--batch", "in.jsonl"]);
    assert_eq!(finished.code, Some(1));
    assert!(finished.stderr.contains("error: 1 of 5 prompts failed"), "{}", finished.stderr);
    let out = lines(&finished.stdout);
    let ids: Vec<_> = out.iter().map(|o| (o["line"].clone(), o["id"].clone(), o["success"].clone())).collect();
    let expected = [
        (json!(1), json!("a"), json!(true)),
        (json!(2), json!(2), json!(true)),
        (json!(4), json!(null), json!(true)),
        (json!(5), json!(null), json!(false)),
        (json!(6), json!(["any", "thing"]), json!(true)),
    ];
    assert_eq!(ids, expected);
    // The same as one by one.
    let text = |at: usize| out[at]["response"].as_str().expect("a text").to_owned();
    assert_eq!(text(0), bench.answer(&["--prompt", "Hi"]));
    assert!(bench.answer(&["--prompt", "Hello there"]).starts_with(&text(1)));
    assert_eq!(out[1]["decode_tokens"], 3);
    let sampled = ["--prompt", "Hi", "--temperature", "1.5", "--seed", "7", "--top-k", "50", "--system", "Be brief."];
    assert_eq!(text(2), bench.answer(&sampled));
    assert!(out[3]["error"].as_str().expect("a text").contains("no JSON"), "{}", out[3]);

    // From standard input, with flags as defaults, and quietly.
    let input =
        std::fs::File::open(bench.write("two", "{\"prompt\":\"Hi\"}\n{\"prompt\":\"Hi\",\"system\":\"\"}")).expect("a file");
    let args = ["--batch", "-", "--quiet", "--system", "Be brief.", "--temperature", "1.5", "--seed", "7", "--top-k", "50"];
    let finished = finish(bench.command(&args).stdin(input));
    assert_eq!(finished.stderr, "");
    let two = lines(&finished.ok());
    assert_eq!(two[0]["response"], out[2]["response"]);
    assert!(two[1]["prefill_tokens"].as_u64() < two[0]["prefill_tokens"].as_u64(), "an empty system text is none");
}

#[test]
fn a_batch_goes_on_where_it_ended() {
    let bench = Bench::new();
    bench.write("in.jsonl", FIVE);
    bench.run(&["--batch", "in.jsonl", "--output", "whole.jsonl"]).failed(1);
    let whole = bench.read("whole.jsonl");
    assert_eq!(whole.lines().count(), 5);

    // Two lines and a half; the first one is marked to see that it is kept.
    let marked = whole.replacen("\"success\":true", "\"success\":true,\"mark\":1", 1);
    let two: usize = marked.lines().take(2).map(|line| line.len() + 1).sum();
    bench.write("part.jsonl", &marked[..two + 40]);
    let finished = bench.run(&["--batch", "in.jsonl", "--output", "part.jsonl"]);
    assert!(finished.stderr.contains("2 prompts were done before"), "{}", finished.stderr);
    assert_eq!(finished.failed(1).lines().filter(|line| line.starts_with("error: 1 of 5 prompts failed")).count(), 1);
    assert_eq!(steady(&bench.read("part.jsonl")), steady(&marked));

    // All done: nothing is written, the failure is still told.
    bench.run(&["--batch", "in.jsonl", "--output", "part.jsonl", "-q"]).failed(1);
    assert_eq!(steady(&bench.read("part.jsonl")), steady(&marked));

    // Not the output of these prompts.
    bench.write("other.jsonl", &FIVE.replace("\"a\"", "\"b\""));
    for (input, output, code, part) in [
        ("other.jsonl", "whole.jsonl", 2, "input line 1"),
        ("in.jsonl", "in.jsonl", 2, "input and output"),
        ("in.jsonl", "other.jsonl", 2, "no output of a batch"),
        ("in.jsonl", "no/such/folder/out", 1, "no/such/folder/out"),
        ("no-such-file", "out", 1, "no-such-file"),
        (".", "out", 2, "folder"),
    ] {
        let before = std::fs::read(bench.path(output)).ok();
        let error = bench.run(&["--batch", input, "--output", output]).failed(code);
        assert!(error.contains(part), "{part}: {error}");
        assert_eq!(std::fs::read(bench.path(output)).ok(), before);
    }
    bench.write("few.jsonl", FIVE.lines().next().expect("a line"));
    assert!(bench.run(&["--batch", "few.jsonl", "--output", "whole.jsonl"]).failed(2).contains("input line 2"));
}

/// Answers come while the input is still open, and Ctrl-C ends the wait for more.
#[test]
#[cfg(unix)]
fn a_batch_can_be_interrupted() {
    let bench = Bench::new();
    let mut command = bench.command(&["--batch", "-", "--output", "out.jsonl", "-q"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("a start");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(b"{\"prompt\": \"Hi\"}\n").expect("written");
    let begin = Instant::now();
    while !std::fs::read_to_string(bench.path("out.jsonl")).is_ok_and(|text| text.ends_with('\n')) {
        assert!(begin.elapsed() < Duration::from_secs(60), "no answer while the input is open");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Nobody else may write there meanwhile.
    bench.write("in.jsonl", "{\"prompt\": \"Hi\"}\n");
    assert!(bench.run(&["--batch", "in.jsonl", "--output", "out.jsonl"]).failed(2).contains("another process"));
    interrupt(&child);
    assert_eq!(end(&mut child, Duration::from_secs(5)), Some(130));
    assert_eq!(lines(&bench.read("out.jsonl")).len(), 1);
    drop(input);

    // In the middle of an answer: that line is not written, and the next run makes it.
    let endless =
        "{\"prompt\": \"Hi\", \"max_tokens\": 3}\n".to_owned() + &"{\"prompt\": \"Hi\", \"max_tokens\": 100000}\n".repeat(2000);
    bench.write("endless.jsonl", &endless);
    let mut child = bench.command(&["--batch", "endless.jsonl", "-q"]).stdout(Stdio::piped()).spawn().expect("a start");
    let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut first = String::new();
    output.read_line(&mut first).expect("a line");
    interrupt(&child);
    let rest: Vec<String> = output.lines().map(|line| line.expect("text")).collect();
    assert_eq!(end(&mut child, Duration::from_secs(5)), Some(130));
    assert!(rest.len() < 2000 && rest.iter().all(|line| serde_json::from_str::<Value>(line).is_ok()), "whole lines only");
}

#[test]
fn an_answer_can_go_to_a_file() {
    let bench = Bench::new();
    let expected = bench.run(&["--prompt", "Hi", "-q"]).ok();
    assert_eq!(bench.run(&["--prompt", "Hi", "--output", "answer"]).ok(), "");
    assert_eq!(bench.read("answer"), expected);
    assert_eq!(bench.run(&["--prompt", "Hi", "--json", "-o", "answer"]).ok(), "");
    assert_eq!(lines(&bench.read("answer"))[0]["success"], true);
    // A failure leaves the file as it was.
    bench.run(&["--prompt", &"long ".repeat(500), "--context", "64", "--output", "answer"]).failed(2);
    assert!(bench.read("answer").contains("success"));
    bench.run(&["--prompt", "Hi", "--output", "no/such/folder"]).failed(1);
    bench.run(&["--prompt", "Hi", "--output", "."]).failed(2);
    assert_eq!(bench.run(&["--prompt", "Hi", "--output", "/dev/null"]).ok(), "");
    let left: Vec<_> = std::fs::read_dir(bench.home.path()).expect("a folder").flatten().map(|e| e.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("partial")), "{left:?}");
}

/// User report P71: nothing but the answer on standard output, and streams that are closed are no fault.
#[test]
#[cfg(target_os = "linux")]
fn p71_streams_may_be_closed() {
    let bench = Bench::new();
    // `cactus` as a shell function that also writes its exit code to a file: not every `sh` has pipefail.
    let program = format!("{} run {} --max-tokens 8", env!("CARGO_BIN_EXE_cactus"), bench.model.display());
    let shell = |script: &str| {
        let function = format!("cactus() {{ {program} \"$@\"; code=$?; echo $code >code; return $code; }}\n");
        let mut shell = Command::new("sh");
        shell.args(["-c", &(function + script)]).stdin(Stdio::null()).current_dir(bench.home.path());
        for (name, value) in bench.home.cactus([""; 0]).get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        finish(&mut shell)
    };
    let answer = bench.run(&["--prompt", "Hi", "-q"]).ok();
    for (script, out) in [
        ("cactus -q --prompt Hi <&-", answer.as_str()),
        ("cactus -q --prompt Hi 2>&-", &answer),
        ("cactus --prompt Hi --stats -v 2>&-", &answer),
        ("cactus -q --prompt Hi >&-", ""),
        ("cactus -q --prompt Hi <&- >&- 2>&-", ""),
        ("cactus -q --prompt Hi | head -c 0", ""),
        ("cactus --help | head -c 0", ""),
        ("printf '{\"prompt\":\"Hi\"}\\n%.0s' 1 2 3 | cactus -q --batch - | head -c 0", ""),
        ("export NO_COLOR=1 TERM=dumb; printf Hi | cactus -q", &answer),
    ] {
        let finished = shell(script);
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), (out, ""), "{script}");
        assert_eq!(bench.read("code").trim(), "0", "{script}");
    }
    assert!(shell("cactus -q --prompt Hi >/dev/full").failed(1).contains("standard output"));
    let full = shell("printf '{\"prompt\":\"Hi\"}\\n' | cactus -q --batch - -o /dev/full");
    assert!(full.failed(1).contains("/dev/full"));
}

/// An open pipe that a script inherited: its end belongs to the prompt, unless `--no-stdin` is given.
#[test]
fn p71_standard_input_can_be_left_alone() {
    let bench = Bench::new();
    let answer = bench.answer(&["--prompt", "Hi"]);
    let mut child = bench
        .command(&["--prompt", "Hi", "-q", "--no-stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a start");
    let held = child.stdin.take();
    assert_eq!(end(&mut child, Duration::from_secs(60)), Some(0));
    drop(held);
    let text = std::io::read_to_string(child.stdout.take().expect("a pipe")).expect("text");
    assert_eq!(text.trim_end_matches('\n'), answer);
    assert!(bench.run(&["--no-stdin"]).failed(2).contains("--no-stdin needs a prompt"));
    assert!(bench.run(&["--no-stdin", "--batch", "-"]).failed(2).contains("--no-stdin"));
}

#[test]
fn numbers_go_to_standard_error_when_asked_for() {
    let bench = Bench::new();
    let answer = bench.run(&["--prompt", "Hi", "-q"]).ok();
    let finished = bench.run(&["--prompt", "Hi", "-q", "--stats"]);
    for part in ["load", "open", "tokenizer", "plan", "first token", "after the start", "prefill", "decode", "tokens/s", "peak"] {
        assert!(finished.stderr.contains(part), "{part}: {}", finished.stderr);
    }
    assert!(finished.stderr.lines().all(|line| line.starts_with("stats: ")), "{}", finished.stderr);
    assert_eq!(finished.ok(), answer);
    let finished = bench.run(&["--prompt", "Hi", "-v", "--threads", "2", "--seed", "5", "--context", "100"]);
    for part in ["2 threads", "kernels", "100 of at most", "working memory", "seed 5", "4 bits", "core"] {
        assert!(finished.stderr.contains(part), "{part}: {}", finished.stderr);
    }
    assert!(!finished.stderr.contains('\u{1b}'));
    assert_eq!(finished.ok(), answer);
    assert_eq!(bench.run(&["--prompt", "Hi", "-v", "-q"]).code, Some(2));
}

/// User report P16: what does not fit is refused with both sizes, never cut in silence.
#[test]
fn p16_a_prompt_that_does_not_fit_is_refused() {
    let bench = Bench::new();
    let long = "one two three four ".repeat(40);
    let error = bench.run(&["--prompt", &long, "--context", "64"]).failed(2);
    let size: usize = error.split_whitespace().find_map(|word| word.parse().ok()).expect("a size");
    assert!(size > 64 && error.contains("context of 64") && error.contains("--context"), "{error}");
    bench.write("in.jsonl", &format!("{}\n{{\"prompt\":\"Hi\"}}\n", json!({ "prompt": long })));
    let finished = bench.run(&["--batch", "in.jsonl", "--context", "64", "-q"]);
    assert_eq!(finished.code, Some(1));
    let out = lines(&finished.stdout);
    assert!(out[0]["error"].as_str().expect("a text").contains("context of 64"), "{}", out[0]);
    assert_eq!(out[1]["success"], true);
}

/// User report P73: weights that cannot fit are refused before they are read.
#[test]
#[cfg(target_os = "linux")]
fn p73_a_model_larger_than_memory_is_refused() {
    let bench = Bench::new();
    let file = std::fs::File::options().write(true).open(bench.model.join("weights.safetensors")).expect("the weights");
    // A file with a hole: it has this size but takes no room.
    if file.set_len(1 << 43).is_err() {
        return;
    }
    let finished = bench.run(&["--prompt", "Hi"]);
    assert!(finished.peak_bytes < 200 << 20);
    let error = finished.failed(1);
    assert!(error.contains("weights") && error.contains("8796.09 GB") && error.contains("of memory"), "{error}");
}

fn settings(bench: &Bench, command: &mut Command) -> Value {
    let text = finish(command.args(["doctor", "--json"]).current_dir(bench.home.path())).ok();
    lines(&text)[0]["settings"]["values"].clone()
}

#[test]
fn flags_are_above_the_environment_and_that_above_the_file() {
    let bench = Bench::new();
    let file = bench.write(
        ".config/cactus/config.toml",
        &format!(
            "model = \"{}\"\nbits = 4 # mine\nmax_tokens = 2\ncontext = 1_000_000\nseed = 7\ntemperature = 1.5\n",
            bench.model.display()
        ),
    );
    let run = |env: &[(&str, &str)], args: &[&str]| {
        let mut command = bench.home.cactus(["run", "--prompt", "Hi", "--json"]);
        let text = finish(command.args(args).envs(env.iter().copied())).ok();
        lines(&text)[0].clone()
    };
    let tokens = |value: Value| value["decode_tokens"].as_u64().expect("a count");
    assert_eq!(tokens(run(&[], &[])), 2);
    assert_eq!(tokens(run(&[("CACTUS_MAX_TOKENS", "3")], &[])), 3);
    assert_eq!(tokens(run(&[("CACTUS_MAX_TOKENS", "3")], &["--max-tokens", "4"])), 4);
    let long = ["--max-tokens", "8"];
    assert_eq!(
        run(&[], &long)["response"],
        run(&[], &[&long[..], &["--seed", "7", "--temperature", "1.5"]].concat())["response"]
    );
    assert_eq!(run(&[("CACTUS_CONFIG", "none"), ("CACTUS_MODEL", &bench.model.to_string_lossy())], &long)["success"], true);

    let values = settings(&bench, bench.home.cactus([""; 0]).env("CACTUS_BITS", "8"));
    assert_eq!(values["bits"], json!({ "value": 8.0, "from": "CACTUS_BITS" }));
    assert_eq!(values["seed"], json!({ "value": 7, "from": file }));
    assert_eq!(values["repetition_penalty"], json!({ "value": 1.1, "from": "default" }));
    // A bundle has the bits it has; only a flag insists.
    assert_eq!(run(&[("CACTUS_BITS", "8")], &[])["success"], true);
    bench.home.run(["run", "--prompt", "Hi", "--bits", "8"]).failed(2);

    bench.write(".config/cactus/config.toml", "bits = 4\n\nthread = 2\n");
    let error = bench.home.run(["run", "--prompt", "Hi"]).failed(2);
    assert!(error.contains("config.toml: line 3") && error.contains("`thread`") && error.contains("threads"), "{error}");
    bench.home.run(["list"]).ok();
    let told = bench.home.run(["doctor"]);
    assert_eq!(told.code, Some(2));
    assert!(told.stdout.contains("faulty") && told.stderr.contains("line 3"), "{}", told.stdout);
    let error = finish(bench.home.cactus(["run", "--prompt", "Hi"]).env("CACTUS_CONFIG", "/no/such/file")).failed(1);
    assert!(error.contains("CACTUS_CONFIG") && error.contains("/no/such/file"), "{error}");
}

#[test]
fn the_doctor_tells_what_is_in_force() {
    let bench = Bench::new();
    bench.run(&["--prompt", "Hi"]).ok();
    let told = bench.home.run(["doctor"]).ok();
    for part in ["cactus ", "cpu features", "kernels", "cores", "threads", "memory", "models", "hub", "settings", "temperature"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert!(told.contains("HF_HUB_OFFLINE is set"), "{told}");
    let mut command = bench.home.cactus(["doctor", "--json", "--online"]);
    let finished = finish(command.env("CACTUS_CPU", "scalar").env("HF_TOKEN", "hf_secret").env_remove("HF_HUB_OFFLINE"));
    assert!(finished.time < Duration::from_secs(10));
    let text = finished.ok();
    assert!(!text.contains("hf_secret"));
    let value = &lines(&text)[0];
    assert_eq!((&value["cpu"]["kernels"], &value["cpu"]["ceiling"]), (&"scalar".into(), &"scalar".into()));
    assert!(value["cpu"]["default_threads"].as_u64().expect("a count") >= 1);
    assert_eq!((&value["hub"]["reachable"], &value["hub"]["token_from"]), (&false.into(), &"HF_TOKEN".into()));
    assert!(value["hub"]["error"].as_str().expect("a text").contains("127.0.0.1:9"), "{value}");
    if cfg!(target_os = "linux") {
        assert!(value["memory"]["available_bytes"].as_u64() < value["memory"]["total_bytes"].as_u64());
    }
    let text = finish(bench.home.cactus(["doctor"]).env("CACTUS_CPU", "abacus"));
    assert_eq!((text.code, text.stdout.is_empty()), (Some(2), false));
}

/// The best of several, because other tests run at the same time.
#[test]
fn help_comes_at_once() {
    let home = Home::new();
    let times = (0..20).map(|_| {
        let begin = Instant::now();
        home.cactus(["--help"]).stdout(Stdio::null()).status().expect("an end");
        begin.elapsed()
    });
    let best = times.min().expect("a time");
    assert!(best < Duration::from_millis(30), "{best:?}");
}
