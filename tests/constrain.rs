//! Answers of a given form, from models whose weights are noise: whatever they would rather say, the form holds.

use crate::golden::Golden;
use crate::support::{Home, bundle, engine};
use cactus::engine::constrain::{Constrained, Constraint};
use cactus::engine::sampler::Sampling;
use cactus::engine::{Answer, Engine, Finish, LoadOptions, Request, generate};
use cactus::error::Kind;
use cactus::kernels::Level;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A golden model at 8 bits.
fn noise(model: &str) -> (TempDir, Golden, Engine) {
    let (dir, golden) = (TempDir::new().expect("a folder"), Golden::read(model));
    bundle(&golden.folder, &dir.path().join("bundle"), 8);
    let engine = engine(&dir.path().join("bundle"), Level::best(None));
    (dir, golden, engine)
}

fn request(constraint: &Constraint, sampling: Sampling) -> Request {
    Request { sampling, max_tokens: 200, ignore_end: true, constraint: Some(constraint.clone()), ..Request::default() }
}

fn answer(engine: &Engine, prompt: &[u32], request: &Request) -> Answer {
    generate(&mut engine.session(), prompt, request, &mut |_| {}, &|| false).expect("an answer")
}

fn samplings() -> Vec<Sampling> {
    let hot = |seed| Sampling { temperature: 1.5, seed, ..Default::default() };
    vec![
        Sampling::default(),
        Sampling { repetition_penalty: 1.8, ..Default::default() },
        hot(1),
        hot(2),
        Sampling { top_k: 1, ..hot(3) },
        Sampling { top_p: 0.3, ..hot(4) },
        Sampling { min_p: 0.5, repetition_penalty: 1.3, ..hot(5) },
        Sampling { top_k: 5, top_p: 0.9, min_p: 0.01, ..hot(6) },
    ]
}

/// The schema, by hand.
fn is_order(value: &Value) -> bool {
    let Some(fields) = value.as_object() else { return false };
    let known = fields.keys().all(|name| ["id", "size", "lines", "note"].contains(&name.as_str()));
    let line = |line: &Value| {
        line.as_object().is_some_and(|line| line.len() == 1)
            && line["n"].as_f64().is_some_and(|n| n.fract() == 0.0 && (-5.0..=12.0).contains(&n))
    };
    known
        && fields["id"].as_str().is_some_and(|id| id.len() == 5 && id.starts_with("A-") && id[2..].parse::<u16>().is_ok())
        && ["small", "\u{fc}ber"].map(Value::from).contains(&fields["size"])
        && fields["lines"].as_array().is_some_and(|lines| (1..=2).contains(&lines.len()) && lines.iter().all(line))
        && fields.get("note").is_none_or(|note| note.is_null() || note.is_boolean())
}

#[test]
fn p25_every_answer_that_ends_keeps_to_its_schema() {
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["id", "size", "lines"],
        "properties": {
            "id": {"type": "string", "pattern": "^A-\\d{3}$"},
            "size": {"enum": ["small", "\u{fc}ber"]},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 2},
            "note": {"type": ["boolean", "null"]},
        },
        "$defs": {"line": {"type": "object", "properties": {"n": {"type": "integer", "minimum": -5, "maximum": 12}},
            "required": ["n"], "additionalProperties": false}},
    });
    let constraint = Constraint::json_schema(&schema).expect("a schema");
    let mut forced = 0;
    for model in ["llama-tied", "qwen3", "gemma3-text"] {
        let (_dir, golden, engine) = noise(model);
        for sampling in samplings() {
            let what = format!("{model}, {sampling:?}");
            let request = request(&constraint, sampling);
            let given = answer(&engine, &golden.ids[..20], &request);
            assert_eq!(given.finish, Finish::Stop, "{what}: {}", given.text);
            let value: Value = serde_json::from_str(&given.text).unwrap_or_else(|e| panic!("{what}: {e}: {}", given.text));
            assert!(is_order(&value), "{what}: {value}");
            assert_eq!(given.text, given.text.trim(), "{what}");
            forced += given.drafted_tokens;
            // Forced tokens and guesses change nothing; neither do texts that would end a free answer.
            let stops = vec!["\"".to_owned(), "}".to_owned()];
            let plain = answer(&engine, &golden.ids[..20], &Request { draft: false, stops, ..request.clone() });
            assert_eq!((plain.ids, plain.text, plain.finish), (given.ids.clone(), given.text.clone(), given.finish), "{what}");
            // Cut short, it is the beginning of the same answer.
            let cut = answer(&engine, &golden.ids[..20], &Request { max_tokens: given.ids.len() - 1, ..request });
            assert_eq!((cut.finish, &cut.ids[..]), (Finish::Length, &given.ids[..given.ids.len() - 1]), "{what}");
        }
    }
    assert!(forced > 0, "no token was forced");
}

/// Lists of lists of numbers: the model may only choose how deep, how long, and where to put white space.
#[test]
fn p27_answers_end_with_their_value() {
    let (_dir, golden, engine) = noise("llama-tied");
    let list = json!({"type": "array", "maxItems": 3, "items": {"anyOf": [{"$ref": "#"}, {"enum": [1, 22, null]}]}});
    let forms = [list, json!({"enum": ["a", 1.5, true, null]}), json!({"type": "integer", "minimum": -9, "maximum": 999})];
    let mut ended = 0;
    for constraint in forms.map(|schema| Constraint::json_schema(&schema).expect("a schema")) {
        for sampling in samplings() {
            let given = answer(&engine, &golden.ids[..20], &request(&constraint, sampling));
            let blanks = given.text.split(|c: char| !c.is_whitespace()).map(str::len).max().unwrap_or(0);
            assert!(blanks <= 33, "{blanks} blanks: {:?}", given.text);
            assert_eq!(given.text, given.text.trim_start());
            if given.finish == Finish::Stop {
                ended += 1;
                assert_eq!(given.text, given.text.trim_end());
                serde_json::from_str::<Value>(&given.text).expect("JSON");
            }
        }
    }
    assert!(ended >= 16, "{ended} ended");
    for schema in [json!({"type": "array"}), json!({"type": "number"})] {
        let given = answer(
            &engine,
            &golden.ids[..20],
            &request(&Constraint::json_schema(&schema).expect("a schema"), samplings()[2].clone()),
        );
        assert!(given.finish == Finish::Length || serde_json::from_str::<Value>(&given.text).is_ok(), "{}", given.text);
    }
}

/// A regular expression, a grammar, and a form behind a text that the model does not say.
#[test]
fn other_forms_hold_too() {
    let (_dir, golden, engine) = noise("qwen2");
    for sampling in samplings() {
        let given = answer(
            &engine,
            &golden.ids[..20],
            &request(&Constraint::regex("(yes|no)[!?]{2}").expect("a pattern"), sampling.clone()),
        );
        assert!(
            ["yes", "no"].iter().any(|word| given.text.strip_prefix(word).is_some_and(|rest| rest.len() == 2)),
            "{}",
            given.text
        );
        let grammar = Constraint::lark("start: \"<\" ITEM (\",\" ITEM)* \">\"\nITEM: /[ab]{1,3}/").expect("a grammar");
        let given = answer(&engine, &golden.ids[..20], &request(&grammar, sampling.clone()));
        let body = given.text.strip_prefix('<').expect("a start");
        let whole = body.strip_suffix('>').unwrap_or(body);
        assert!(given.finish == Finish::Length || body.ends_with('>'), "{}", given.text);
        assert!(whole.chars().all(|c| "ab,".contains(c)) && whole.split(',').all(|item| item.len() <= 3), "{}", given.text);
        let behind = Constraint::json_object().after("no noise says this");
        assert_eq!(answer(&engine, &golden.ids[..20], &request(&behind, sampling)).finish, Finish::Length);
    }
    let bad = Constraint::lark("start: <|no_such_token|>").expect("known later");
    let error = generate(&mut engine.session(), &golden.ids[..20], &request(&bad, Sampling::default()), &mut |_| {}, &|| false);
    assert_eq!(error.expect_err("a grammar that cannot be used").kind, Kind::Usage);
}

#[test]
fn the_options_of_run() {
    let (dir, _, _) = noise("llama-tied");
    let home = Home::new();
    let model = dir.path().join("bundle").to_string_lossy().into_owned();
    let run = |more: &[&str]| home.run([&["run", &model, "-q", "--prompt", "Hi", "--temperature", "1"], more].concat());
    let schema = r#"{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}"#;
    let is_right = |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|v| v == json!({"a": 1}) || v == json!({"a": 2}));
    assert!(is_right(&run(&["--schema", schema]).ok()));
    let file = home.path().join("schema.json");
    std::fs::write(&file, schema).expect("written");
    let path = file.to_string_lossy().into_owned();
    let whole: Value = serde_json::from_str(&run(&["--schema", &path, "--json"]).ok()).expect("JSON");
    assert!(is_right(whole["response"].as_str().expect("a text")));
    assert_eq!(run(&["--regex", "[0-9]{4}"]).ok().trim().len(), 4);
    let grammar = home.path().join("g.lark");
    std::fs::write(&grammar, "start: \"x\" /[yz]/").expect("written");
    assert!(["xy", "xz"].contains(&run(&["--grammar", &grammar.to_string_lossy()]).ok().trim()));
    let cut = home.run(["run", &model, "--prompt", "Hi", "--schema", schema, "--max-tokens", "3"]);
    assert!(cut.stderr.contains("cut at 3 tokens"), "{}", cut.stderr);
    for (more, part) in [
        (vec!["--schema", "{\"uniqueItems\": true}"], "/uniqueItems"),
        (vec!["--schema", "{\"type\": "], "no JSON"),
        (vec!["--regex", "("], "regular expression"),
        (vec!["--json-mode", "--regex", "a"], "cannot be used with"),
        (vec!["--json-mode", "--stop", "a"], "cannot be used with"),
    ] {
        let text = run(&more).failed(2);
        assert!(text.contains(part), "{more:?}: {text}");
    }
    run(&["--schema", "none.json"]).failed(1);
    let lines = format!(
        "{{\"prompt\": \"Hi\", \"response_format\": {{\"type\": \"json_schema\", \"json_schema\": {{\"name\": \"a\", \"schema\": {schema}}}}}}}\n"
    );
    let lines = lines
        + "{\"prompt\": \"Hi\", \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": {\"not\": {}}}}}\n";
    let batch = home.path().join("in.jsonl");
    std::fs::write(&batch, lines).expect("written");
    let finished = home.run(["run", &model, "-q", "--temperature", "1", "--batch", &batch.to_string_lossy()]);
    let answers: Vec<Value> = finished.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(is_right(answers[0]["response"].as_str().expect("a text")), "{}", answers[0]);
    assert!(answers[1]["error"].as_str().expect("a text").contains("/not"), "{}", answers[1]);
}

/// What masks cost beside the model: `CACTUS_TEST_BUNDLE=FOLDER cargo test --release -- --ignored --nocapture masks_cost`.
#[test]
#[ignore = "measures; needs a bundle in CACTUS_TEST_BUNDLE"]
fn masks_cost_little() {
    let path = std::env::var_os("CACTUS_TEST_BUNDLE").expect("a bundle");
    let options = LoadOptions { threads: Some(2), ..Default::default() };
    let engine = Engine::load(Path::new(&path), &options).expect("a sound bundle");
    let name = json!({"type": "string"});
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "city", "tags"], "properties":
        {"name": name, "age": {"type": "integer"}, "city": name, "tags": {"type": "array", "items": name}}});
    let constraint = Constraint::json_schema(&schema).expect("a schema");
    let begin = Instant::now();
    Constrained::new(&engine, &constraint).expect("a form");
    println!("first form of the model: {:?}", begin.elapsed());
    let text = "{\"name\": \"Ada Lovelace\", \"age\": 36, \"city\": \"London, near the river\", \"tags\": [\"poet\", \"engine\", \"notes\"]}";
    let ids = engine.tokenizer.encode(text, false).expect("ids");
    let (mut masks, mut steps, mut forms) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..40 {
        let begin = Instant::now();
        let mut form = Constrained::new(&engine, &constraint).expect("a form");
        forms.push(begin.elapsed());
        let mut session = engine.session();
        session.feed(&ids[..1], &|| false).expect("logits");
        for id in &ids {
            let begin = Instant::now();
            let mask = form.mask().expect("a mask").expect("a mask");
            assert!(mask[*id as usize / 32] >> (id % 32) & 1 == 1, "{:?}", engine.tokenizer.token_text(*id));
            form.commit(*id).expect("a token");
            masks.push(begin.elapsed());
            let begin = Instant::now();
            session.step(*id).expect("logits");
            steps.push(begin.elapsed());
        }
        assert!(form.finished());
    }
    let show = |what: &str, times: &mut Vec<Duration>| {
        times.sort_unstable();
        let mean = times.iter().sum::<Duration>() / times.len() as u32;
        println!(
            "{what}: mean {mean:?}, median {:?}, p99 {:?}, of {}",
            times[times.len() / 2],
            times[times.len() * 99 / 100],
            times.len()
        );
        mean.as_secs_f64()
    };
    show("form", &mut forms);
    let (mask, step) = (show("mask and commit", &mut masks), show("decode step", &mut steps));
    println!("{:.2} % of a step", mask / step * 100.0);
}
