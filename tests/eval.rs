//! `cactus eval`: figures against independent arithmetic, the cache of a reference, tasks, exit codes.

use crate::support::{Home, argmax, bundle, engine, finish, source};
use cactus::engine::Engine;
use cactus::engine::evaluate::{self, Progress, Reader, Sequence};
use cactus::kernels::Level;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Bundles of 16 and 2 bits of a model of random weights, and a text.
struct Stage {
    home: Home,
    reference: String,
    model: String,
    text: String,
}

impl Stage {
    fn new() -> Stage {
        let home = Home::new();
        let at = |name: &str| home.path().join(name);
        bundle(&source("tests/golden/llama-tied"), &at("sixteen"), 16);
        bundle(&source("tests/golden/llama-tied"), &at("two"), 2);
        let words = ["the model ", "reads a text ", "of many words, ", "and says: ", "what is next?\n", "nothing 12 "];
        let text: String = (0..120).map(|i| words[(i * i + i / 7) % words.len()]).collect();
        std::fs::write(at("text.txt"), text).expect("written");
        let name = |name: &str| at(name).to_string_lossy().into_owned();
        Stage { reference: name("sixteen"), model: name("two"), text: name("text.txt"), home }
    }

    fn eval(&self, more: &[&str]) -> crate::support::Finished {
        self.home.run(["eval"].iter().chain(more))
    }

    fn write(&self, name: &str, lines: &[Value]) -> String {
        let path = self.home.path().join(name);
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, text).expect("written");
        path.to_string_lossy().into_owned()
    }
}

fn json(text: &str) -> Value {
    assert_eq!(text.matches('\n').count(), 1, "one line: {text}");
    serde_json::from_str(text).expect("JSON")
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key} in {value}"))
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let best = row.iter().fold(f64::NEG_INFINITY, |best, l| best.max(f64::from(*l)));
    let total: f64 = row.iter().map(|l| (f64::from(*l) - best).exp()).sum();
    row.iter().map(|l| f64::from(*l) - best - total.ln()).collect()
}

/// The figures of a text are those that whole rows of logits give from the definitions, chunk by chunk as
/// llama-perplexity cuts them.
#[test]
fn figures_follow_from_whole_logits() {
    let stage = Stage::new();
    let (reference, model) = (load(&stage.reference), load(&stage.model));
    const CTX: usize = 48;
    let text = std::fs::read_to_string(&stage.text).expect("a text");
    let bos = reference.tokenizer.bos().filter(|_| reference.tokenizer.wants_bos());
    let mut ids: Vec<u32> = bos.into_iter().collect();
    ids.extend(reference.tokenizer.encode(&text, false).expect("tokens"));
    let (mut kls, mut same, mut squares, mut losses, mut losses_ref) = (Vec::new(), 0, 0.0, 0.0, 0.0);
    for chunk in ids.chunks_exact(CTX).take(3) {
        let mut chunk = chunk.to_vec();
        if let Some(bos) = bos {
            chunk[0] = bos;
        }
        let (p, q) = (reference.score(&chunk).expect("logits"), model.score(&chunk).expect("logits"));
        for at in CTX / 2..CTX - 1 {
            let row = |logits: &[f32]| logits[at * model.vocab()..(at + 1) * model.vocab()].to_vec();
            let (p, q, next) = (row(&p), row(&q), chunk[at + 1] as usize);
            same += usize::from(argmax(&p) == argmax(&q));
            let (p, q) = (log_softmax(&p), log_softmax(&q));
            kls.push(p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
            squares += (q[next].exp() - p[next].exp()).powi(2);
            losses -= q[next];
            losses_ref -= p[next];
        }
    }
    let n = kls.len() as f64;
    let args = ["--text", &stage.text, "--ctx", "48", "--chunks", "3", "--json", "-q"];
    let got = json(&stage.eval(&[&[stage.model.as_str(), "--against", &stage.reference][..], &args].concat()).ok());
    assert_eq!((got["tokens"].as_u64(), got["chunks"].as_u64()), (Some(kls.len() as u64), Some(3)));
    let near = |key: &str, expected: f64, tolerance: f64| {
        let value = number(&got, key);
        assert!((value - expected).abs() < tolerance, "{key} is {value}, expected {expected}");
    };
    assert!(kls.iter().sum::<f64>() / n > 1e-3, "the models differ");
    near("mean_kl", kls.iter().sum::<f64>() / n, 1e-5);
    near("top1", same as f64 / n, 1e-9);
    near("rms_dp", (squares / n).sqrt(), 1e-6);
    near("ppl", (losses / n).exp(), 1e-2);
    near("ppl_ref", (losses_ref / n).exp(), 1e-2);
    near("mean_ln_ppl_ratio", (losses - losses_ref) / n, 1e-5);
    kls.sort_by(f64::total_cmp);
    near("median_kl", kls[kls.len() / 2], 1e-4);
    assert!(number(&got, "kl_p99") <= number(&got, "kl_p999") && number(&got, "kl_p999") <= kls[kls.len() - 1] + 1e-4);
    let (low, high) = (got["mean_kl_ci"][0].as_f64().expect("low"), got["mean_kl_ci"][1].as_f64().expect("high"));
    assert!(low <= number(&got, "mean_kl") && number(&got, "mean_kl") <= high);
    for key in ["model", "reference", "bits", "reference_bits", "bytes", "bits_per_weight", "kl_max", "top1_ci", "version"] {
        assert!(!got[key].is_null(), "{key} in {got}");
    }
    // Without a reference only the perplexity is there, and it is the same.
    let alone = json(&stage.eval(&[&[stage.model.as_str()][..], &args].concat()).ok());
    assert!((number(&alone, "ppl") - number(&got, "ppl")).abs() < 1e-9 && alone.get("mean_kl").is_none());
}

fn load(path: &str) -> Engine {
    engine(Path::new(path), Level::best(None))
}

#[test]
fn a_model_is_like_itself_and_several_make_an_array() {
    let stage = Stage::new();
    let args = ["--against", &stage.reference, "--text", &stage.text, "--ctx", "64"];
    let run = stage.eval(&[&[stage.reference.as_str(), &stage.model][..], &args, &["--json"]].concat());
    let (stderr, rows) = (run.stderr.clone(), json(&run.ok()));
    let [own, other] = [&rows[0], &rows[1]];
    assert!(number(own, "mean_kl") < 1e-6 && number(own, "kl_max") < 1e-6 && number(own, "top1") == 1.0, "{own}");
    assert!(number(other, "mean_kl") > 1e-3 && number(other, "top1") < 1.0, "{other}");
    assert!(stderr.contains("MB written"), "{stderr}");
    // The same again comes from the cache, as a table with a line a model.
    let again = stage.eval(&[&[stage.reference.as_str(), &stage.model][..], &args].concat());
    assert!(!again.stderr.contains("written"), "{}", again.stderr);
    let table = again.ok();
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(table.contains("mean KL") && table.contains("100.00 %"), "{table}");
}

/// A reference is made again when it is broken or of other text, and never half there.
#[test]
fn references_are_made_again_when_they_do_not_fit() {
    let stage = Stage::new();
    let cache = stage.home.path().join("deeper/cache");
    let name = cache.to_string_lossy().into_owned();
    let eval = |ctx: &str| {
        let args = ["--against", &stage.reference, "--reference-cache", &name, "--text", &stage.text, "--ctx", ctx, "--json"];
        let run = stage.eval(&[&[stage.model.as_str()][..], &args].concat());
        (run.stderr.contains("written"), number(&json(&run.ok()), "mean_kl"))
    };
    let (written, kl) = eval("64");
    assert!(written);
    assert_eq!(eval("64"), (false, kl));
    let good = std::fs::read(&cache).expect("a cache");
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    for bytes in [&bad[..], &good[..good.len() / 3], b"something else"] {
        std::fs::write(&cache, bytes).expect("written");
        assert_eq!(eval("64"), (true, kl));
        assert!(std::fs::read(&cache).expect("a cache") == good);
    }
    assert!(eval("32").0);
    assert!(eval("64").0);
    assert_eq!(std::fs::read_dir(cache.parent().expect("a folder")).expect("a folder").count(), 1);
    // Stopped halfway: nothing stays.
    let engine = load(&stage.reference);
    let ids: Vec<u32> = (0..40).collect();
    let sequences = [Sequence { document: 0, ids, targets: vec![1..8, 20..40] }];
    let path = stage.home.path().join("stopped/reference");
    let count = std::cell::Cell::new(0);
    let stopped = || {
        count.set(count.get() + 1);
        count.get() > 30
    };
    let mut progress = Progress { stopped: &stopped, advance: &mut |_| {} };
    let error = evaluate::write_reference(&engine, &sequences, &path, &mut progress).expect_err("stopped");
    assert_eq!(error.exit_code(), 130);
    assert_eq!(std::fs::read_dir(path.parent().expect("a folder")).expect("a folder").count(), 0);
    // Scattered targets give the rows of those places.
    let mut progress = Progress { stopped: &|| false, advance: &mut |_| {} };
    evaluate::write_reference(&engine, &sequences, &path, &mut progress).expect("written");
    let key = evaluate::reference_key(&engine, &sequences);
    let mut reader = Reader::open(&path, &key, 27, engine.vocab()).expect("a reference");
    let logits = engine.score(&sequences[0].ids).expect("logits");
    for place in (1..8).chain(20..40) {
        let row = log_softmax(&logits[(place - 1) * engine.vocab()..place * engine.vocab()]);
        assert!((reader.row().expect("a row").log_prob - row[place]).abs() < 1e-4, "{place}");
    }
}

#[test]
fn tasks_are_marked_and_flips_counted() {
    let stage = Stage::new();
    // What the models say is nonsense; right is what the reference says.
    let ask = |bundle: &str, prompt: &str| {
        let args = ["run", bundle, "--prompt", prompt, "--max-tokens", "8", "--repetition-penalty", "1", "-q"];
        stage.home.run(args).ok().trim().to_owned()
    };
    let prompts = ["Hello", "What is", "one two three", "the text", "12"];
    let said: Vec<(String, String)> =
        prompts.iter().map(|prompt| (ask(&stage.reference, prompt), ask(&stage.model, prompt))).collect();
    assert!(said.iter().any(|(a, b)| a != b && !a.is_empty()), "{said:?}");
    let lines: Vec<Value> =
        prompts.iter().zip(&said).map(|(prompt, (right, _))| json!({ "prompt": prompt, "answer": right })).collect();
    let task = stage.write("task.jsonl", &lines);
    let args = ["--against", &stage.reference, "--task", &task, "--max-tokens", "8", "--json", "-q"];
    let rows = json(&stage.eval(&[&[stage.reference.as_str(), &stage.model][..], &args].concat()).ok());
    let lost = said.iter().filter(|(a, b)| a != b).count();
    assert_eq!((number(&rows[0], "accuracy"), number(&rows[1], "accuracy_ref")), (1.0, 1.0));
    assert_eq!(number(&rows[1], "accuracy"), (prompts.len() - lost) as f64 / prompts.len() as f64);
    assert_eq!(rows[0]["flips"]["p"], 1.0);
    let flips = &rows[1]["flips"];
    assert_eq!((flips["right_to_wrong"].as_u64(), flips["wrong_to_right"].as_u64()), (Some(lost as u64), Some(0)));
    assert!((number(flips, "p") - (2.0 / f64::from(1 << lost)).min(1.0)).abs() < 1e-9);
    assert_eq!(rows[0]["loops"]["answers"], 5);

    // Choices: of those, the one with the highest log-probability by its bytes.
    let engine = load(&stage.reference);
    let choices = ["dog", "a b c", "the"];
    let prompt = "one two";
    let start = engine.tokenizer.encode(prompt, true).expect("tokens").len();
    let score = |choice: &str| {
        let ids = engine.tokenizer.encode(&format!("{prompt} {choice}"), true).expect("tokens");
        let logits = engine.score(&ids).expect("logits");
        let row = |at: usize| log_softmax(&logits[(at - 1) * engine.vocab()..at * engine.vocab()]);
        let first = ids.iter().zip(engine.tokenizer.encode(prompt, true).expect("tokens")).take_while(|(a, b)| **a == *b).count();
        assert!(first <= start);
        (first..ids.len()).map(|at| row(at)[ids[at] as usize]).sum::<f64>() / (choice.len() + 1) as f64
    };
    let best = (0..3).max_by(|a, b| score(choices[*a]).total_cmp(&score(choices[*b]))).expect("a choice");
    let line = |right: usize| {
        let choices: Vec<String> = choices.iter().map(|choice| format!(" {choice}")).collect();
        json!({ "prompt": prompt, "choices": choices, "answer": right, "raw": true })
    };
    let task = stage.write("choices.jsonl", &[line(0), line(1), line(2)]);
    let row = json(&stage.eval(&[&stage.reference, "--task", &task, "--json"]).ok());
    assert_eq!(row["right"], 1, "{row}");
    let task = stage.write("choice.jsonl", &[line(best)]);
    assert_eq!(json(&stage.eval(&[&stage.reference, "--task", &task, "--json"]).ok())["right"], 1);
}

/// Code of a model runs only when it is allowed; one that does not end is killed and counted.
#[cfg(unix)]
#[test]
fn tests_of_programs_need_leave_and_end() {
    let stage = Stage::new();
    let mark = stage.home.path().join("mark");
    let write = format!("open({:?}, 'w').write('x')", mark.to_string_lossy());
    // The answer stands in a comment, so that nonsense is no error.
    let line = |test: &str| json!({ "prompt": "# hello", "raw": true, "stop": "\n", "max_tokens": 3, "test": test });
    let task = stage.write("code.jsonl", &[line(&write), line("assert False"), line("while True: pass")]);
    let refused = stage.eval(&[&stage.reference, "--task", &task]).failed(2);
    assert!(refused.contains("--allow-code") && !mark.exists(), "{refused}");
    let args = ["--task", &task, "--allow-code", "--test-timeout", "1", "--json"];
    let run = stage.eval(&[&[stage.reference.as_str()][..], &args].concat());
    assert!(run.time.as_secs() < 60);
    let row = json(&run.ok());
    assert_eq!((&row["right"], &row["questions"], &row["timeouts"]), (&json!(1), &json!(3), &json!(1)));
    assert!(mark.exists());
}

#[test]
fn loops_are_counted_in_watched_prompts() {
    let stage = Stage::new();
    let prompts = stage.write("prompts.jsonl", &[json!({ "prompt": "one" }), json!({ "prompt": "two", "max_tokens": 3 })]);
    let row = json(&stage.eval(&[&stage.model, "--prompts", &prompts, "--max-tokens", "30", "--json"]).ok());
    assert_eq!(row["loops"]["answers"], 2);
    assert!(number(&row["loops"], "short") >= 0.5 && row.get("accuracy").is_none(), "{row}");
}

/// Of a chat, what the assistant says and the token that ends it are scored, and nothing else.
#[test]
fn chats_are_scored_turn_by_turn() {
    let stage = Stage::new();
    let engine = load(&stage.reference);
    let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
    let chat = [turn("user", "Hi"), turn("assistant", "one two"), turn("user", "More"), turn("assistant", "three")];
    let messages = chat.iter().map(|turn| serde_json::from_value(turn.clone()).expect("a message")).collect::<Vec<_>>();
    let sequences = evaluate::chats(&engine.tokenizer, &engine.template, &[messages], 200).expect("sequences");
    let said: Vec<String> = sequences
        .iter()
        .flat_map(|s| s.targets.iter().map(|range| &s.ids[range.clone()]))
        .map(|ids| {
            let (end, text) = ids.split_last().expect("tokens");
            assert!(engine.tokenizer.is_control(*end), "{ids:?}");
            engine.tokenizer.decode(text)
        })
        .collect();
    assert_eq!((sequences.len(), said), (1, vec!["one two".to_owned(), "three".to_owned()]));
    let file = stage.write("chats.jsonl", &[json!({ "messages": chat }), json!({ "messages": chat[..2] })]);
    let args = ["--against", &stage.reference, "--chat", &file, "--json"];
    let row = json(&stage.eval(&[&[stage.model.as_str()][..], &args].concat()).ok());
    let first = sequences[0].targets[0].len();
    assert_eq!((&row["chunks"], &row["tokens"]), (&json!(2), &json!(sequences[0].scored() + first)));
    assert!(number(&row, "mean_kl") > 1e-3);
}

#[test]
fn what_is_asked_wrongly_is_said() {
    let stage = Stage::new();
    let wrong = |more: &[&str], code: i32, word: &str| {
        let text = stage.eval(&[&[stage.reference.as_str()][..], more].concat()).failed(code);
        assert!(text.contains(word), "{more:?}: {text}");
    };
    wrong(&["--text", "missing.txt"], 1, "missing.txt");
    wrong(&["--text", &stage.text, "--ctx", "100000"], 2, "100000");
    wrong(&["--text", &stage.text, "--ctx", "2"], 2, "--ctx");
    let short = stage.home.path().join("short.txt").to_string_lossy().into_owned();
    std::fs::write(&short, "a few words").expect("written");
    wrong(&["--text", &short, "--ctx", "64"], 2, "64");
    let bad = stage.write("bad.jsonl", &[json!({ "prompt": "p", "answer": "a" }), json!({ "prompt": "p", "anser": "a" })]);
    wrong(&["--task", &bad], 2, "line 2");
    wrong(&["--chat", &bad], 1, "messages");
    wrong(&["--prompts", &bad], 2, "--task");
    let chat = stage.write("chat.jsonl", &[json!({ "messages": [{ "role": "user", "content": "Hi" }] })]);
    wrong(&["--chat", &chat], 2, "");
    // Nothing to judge by, and a reference cache without a reference.
    for args in [&["--json"][..], &["--text", &stage.text, "--reference-cache", "x"]] {
        assert_eq!(stage.eval(&[&[stage.reference.as_str()][..], args].concat()).code, Some(2));
    }
    // Another tokenizer: the same without merges.
    let tokenizer = Path::new(&stage.model).join("tokenizer.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&tokenizer).expect("a tokenizer")).expect("JSON");
    value["model"]["merges"] = json!([]);
    std::fs::write(&tokenizer, value.to_string()).expect("written");
    wrong(&["--text", &stage.text, "--ctx", "32", "--against", &stage.model], 2, "different tokens");
}

/// A checkpoint is converted to the bits that are asked for, the reference to 16.
#[test]
fn checkpoints_are_converted_first() {
    let stage = Stage::new();
    let checkpoint: PathBuf = source("tests/golden/llama-tied");
    let checkpoint = checkpoint.to_string_lossy();
    let args = ["eval", &checkpoint, "--bits", "2", "--against", &checkpoint, "--text", &stage.text, "--ctx", "64", "--json"];
    let row = json(&finish(&mut stage.home.cactus(args)).ok());
    assert_eq!((&row["bits"], &row["reference_bits"]), (&json!(2), &json!(16)));
    assert!(number(&row, "mean_kl") > 1e-4 && number(&row, "bytes") < number(&row, "reference_bytes"));
}
