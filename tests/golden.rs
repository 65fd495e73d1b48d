//! Small random models of every supported family against what transformers computes from them; see
//! `golden/README.md`.

use crate::support::{argmax, as_gguf, bundle, engine, mixture, relative, source};
use cactus::engine::generate::generate;
use cactus::engine::sampler::Sampling;
use cactus::engine::{Engine, LoadOptions, Request};
use cactus::graph::{Feed, reference};
use cactus::kernels::Level;
use cactus::model::bundle::Manifest;
use cactus::model::decoder::{self, Logits};
use cactus::model::spec::Mixer;
use safetensors::{SafeTensors, tensor::Dtype};
use serde_json::Value;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MODELS: [&str; 11] = [
    "llama-tied",
    "llama-untied",
    "llama-wide-heads",
    "llama3-rope",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3-text",
    "smollm3",
    "phi3",
];

/// What transformers computed.
pub struct Golden {
    pub folder: PathBuf,
    pub ids: Vec<u32>,
    /// `[ids, vocab]`
    pub logits: Vec<f32>,
    greedy: Vec<u32>,
    text: String,
    text_ids: Vec<u32>,
}

impl Golden {
    pub fn read(model: &str) -> Self {
        let folder = source("tests/golden").join(model);
        let bytes = std::fs::read(folder.join("golden.safetensors")).expect("a golden file");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let words = |name: &str, dtype: Dtype| -> Vec<[u8; 4]> {
            let tensor = file.tensor(name).expect("a known tensor");
            assert_eq!(tensor.dtype(), dtype, "{name}");
            tensor.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]).collect()
        };
        let ids = |name: &str| words(name, Dtype::I32).into_iter().map(u32::from_le_bytes).collect();
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
        Golden {
            ids: ids("input_ids"),
            logits: words("logits", Dtype::F32).into_iter().map(f32::from_le_bytes).collect(),
            greedy: ids("greedy_ids"),
            text: header.metadata().as_ref().expect("metadata")["text"].clone(),
            text_ids: ids("text_ids"),
            folder,
        }
    }
}

/// Runs `test` on every model, converted to `bits`; it gets the bundle's path.
fn with_each(bits: u32, test: impl Fn(&str, &Golden, &Path)) {
    let dir = TempDir::new().expect("a folder");
    for model in MODELS {
        let (golden, path) = (Golden::read(model), dir.path().join(model));
        bundle(&golden.folder, &path, bits);
        test(model, &golden, &path);
    }
}

/// Cosine of the row that fits worst.
fn worst_cosine(got: &[f32], expected: &[f32], width: usize) -> f64 {
    assert_eq!(got.len(), expected.len());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let cosine = |(a, b): (&[f32], &[f32])| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
    let rows = got.chunks_exact(width).zip(expected.chunks_exact(width)).map(cosine);
    rows.fold(1.0, |a, b| if b.is_nan() { f64::NEG_INFINITY } else { a.min(b) })
}

/// The graph of a model in plain loops.
fn slow(engine: &Engine, ids: &[u32]) -> Vec<f32> {
    let bundle = &engine.bundle;
    let graph = decoder::graph(engine.spec(), Logits::All, &|name| bundle.weight(name)).expect("a graph");
    reference::run(&graph, bundle.bytes(), Feed::Ids(ids))[0].iter().map(|v| *v as f32).collect()
}

fn check_at_16_bits(what: &str, golden: &Golden, engine: &Engine) {
    let logits = engine.score(&golden.ids).expect(what);
    let error = relative(&logits, &golden.logits);
    println!("{what}: {error:.1e}");
    // Keys and values are kept in 16 bits.
    assert!(error <= 2e-3, "{what}: logits differ by {error:e}");

    let mut session = engine.session();
    let mut greedy = vec![argmax(session.feed(&golden.ids, &|| false).expect(what).logits)];
    while greedy.len() < golden.greedy.len() {
        let last = greedy[greedy.len() - 1];
        greedy.push(argmax(session.step(last).expect(what)));
    }
    assert_eq!(greedy, golden.greedy, "{what}");
    assert_eq!(engine.tokenizer.encode(&golden.text, false).expect(what), golden.text_ids, "{what}");
}

#[test]
fn logits_greedy_ids_and_text_ids_at_16_bits() {
    with_each(16, |model, golden, path| {
        for level in Level::supported() {
            check_at_16_bits(&format!("{model} {level}"), golden, &engine(path, level));
        }
    });
}

/// The same model as a GGUF file: other names, other rotary order, other tokenizer form.
#[test]
fn gguf_gives_the_same() {
    let dir = TempDir::new().expect("a folder");
    for model in ["llama-tied", "llama-untied"] {
        let golden = Golden::read(model);
        let (file, path) = (dir.path().join(format!("{model}.gguf")), dir.path().join(model));
        std::fs::write(&file, as_gguf(&golden.folder)).expect("written");
        bundle(&file, &path, 16);
        check_at_16_bits(&format!("{model} as GGUF"), &golden, &engine(&path, Level::best(None)));
    }
}

/// Four heads of 32 in a width of 96: sizes come from `head_dim` (`key_length` in GGUF), not from a division.
#[test]
fn p47_wide_heads_as_folder_and_as_gguf() {
    let dir = TempDir::new().expect("a folder");
    let golden = Golden::read("llama-wide-heads");
    let (file, folder) = (dir.path().join("model.gguf"), golden.folder.clone());
    std::fs::write(&file, as_gguf(&folder)).expect("written");
    for (n, checkpoint) in [folder, file].iter().enumerate() {
        let path = dir.path().join(format!("bundle-{n}"));
        bundle(checkpoint, &path, 16);
        let engine = engine(&path, Level::best(None));
        let Mixer::Attention { heads, kv_heads, head_dim, .. } = engine.spec().layers[0].mixer;
        assert_eq!((engine.spec().dim, heads, kv_heads, head_dim), (96, 4, 2, 32));
        check_at_16_bits(&checkpoint.display().to_string(), &golden, &engine);
    }
}

/// However a prompt is cut, the same numbers come out, bit by bit.
#[test]
fn p13_pieces_of_a_prompt_give_the_same_bits() {
    let bits_of = |logits: &[f32]| logits.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for bits in [16, 4] {
        with_each(bits, |model, golden, path| {
            for level in Level::supported() {
                let engine = engine(path, level);
                let all = engine.score(&golden.ids).expect(model);
                let (mut single, mut pieces) = (engine.session(), engine.session());
                for (n, row) in all.chunks_exact(engine.vocab()).enumerate() {
                    let row = bits_of(row);
                    let what = format!("{model}, {bits} bits, {level}, position {n}");
                    assert!(row == bits_of(single.step(golden.ids[n]).expect(&what)), "{what}: a single step differs");
                    if n % 5 == 4 {
                        let fed = pieces.feed(&golden.ids[..=n], &|| false).expect(&what);
                        assert_eq!(fed.reused, n - 4, "{what}");
                        assert!(row == bits_of(fed.logits), "{what}: five at a time differ");
                    }
                }
            }
        });
    }
}

/// The graph in plain loops agrees with transformers, which leaves only kernels and the 16-bit cache to blame
/// for a larger difference elsewhere.
#[test]
fn slow_reference_agrees() {
    with_each(16, |model, golden, path| {
        let engine = engine(path, Level::Scalar);
        let exact = engine.bundle.manifest.tensors.values().all(|t| t.relative_error == 0.0);
        let limit = if exact { 1e-5 } else { 1e-3 };
        let error = relative(&slow(&engine, &golden.ids), &golden.logits);
        println!("{model} slow: {error:.1e}");
        assert!(error <= limit, "{model}: reference differs by {error:e}");
    });
}

/// On quantised weights the kernels, which round activations to 8 bits, stay close to the plain loops.
#[test]
fn kernels_agree_on_quantised_weights() {
    for bits in [1, 2, 3, 4, 8] {
        with_each(bits, |model, golden, path| {
            let expected = slow(&engine(path, Level::Scalar), &golden.ids);
            for level in Level::supported() {
                let engine = engine(path, level);
                let cosine = worst_cosine(&engine.score(&golden.ids).expect(model), &expected, engine.vocab());
                println!("{model} {bits} bits {level} against plain loops: {cosine:.5}");
                assert!(cosine >= 0.995, "{model}, {bits} bits, {level}: cosine {cosine}");
            }
        });
    }
}

/// A bound on mistakes, not a measure of quality: widths are small and weights are noise. White noise as large
/// as the rounding of 4 bits, put on the weights in transformers, gives worst rows of 0.85 to 0.98.
#[test]
fn quantised_weights_stay_close() {
    for (bits, limit) in [(8, 0.998), (4, 0.85)] {
        with_each(bits, |model, golden, path| {
            let engine = engine(path, Level::best(None));
            let cosine = worst_cosine(&engine.score(&golden.ids).expect(model), &golden.logits, engine.vocab());
            println!("{model} {bits} bits: {cosine:.5}");
            assert!(cosine >= limit, "{model} at {bits} bits: cosine {cosine}");
        });
    }
}

/// Checking guesses several at a time gives the tokens that one at a time give, and their probabilities bit for bit.
#[test]
fn guesses_change_nothing() {
    let guessed = Cell::new(0);
    with_each(4, |model, golden, path| {
        let engine = engine(path, Level::best(None));
        let prompt: Vec<u32> = golden.ids.iter().cycle().take(40).copied().collect();
        for temperature in [0.0, 0.3, 1.0] {
            let answer = |draft: bool| {
                let sampling = Sampling { temperature, seed: 5, repetition_penalty: 1.05, ..Default::default() };
                let request = Request { sampling, max_tokens: 120, ignore_end: true, draft, ..Request::default() };
                let mut session = engine.session();
                let answer = generate(&mut session, &prompt, &request, &mut |_| {}, &|| false).expect("an answer");
                (answer, session.ids().to_vec())
            };
            let ((with, session), (without, plain_session)) = (answer(true), answer(false));
            assert_eq!(with.ids, without.ids, "{model} at temperature {temperature}");
            assert_eq!(with.logprobs, without.logprobs, "{model} at temperature {temperature}");
            assert_eq!((with.finish, with.text), (without.finish, without.text), "{model}");
            assert_eq!(session, plain_session, "{model}");
            assert_eq!(without.drafted_tokens, 0);
            guessed.set(guessed.get() + with.drafted_tokens);
        }
    });
    assert!(guessed.get() > 0, "no guess was right");
}

/// So does checking what a smaller model guesses; one of another vocabulary is refused.
#[test]
fn a_draft_model_changes_nothing() {
    let dir = TempDir::new().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    let golden = Golden::read("llama-tied");
    for bits in [3, 8] {
        bundle(&golden.folder, &path(&bits.to_string()), bits);
    }
    // The same model, but two tokens have changed places.
    bundle(&golden.folder, &path("other"), 3);
    let tokenizer = path("other").join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&tokenizer).expect("a file")).expect("JSON");
    let vocab = json["model"]["vocab"].as_object_mut().expect("a vocabulary");
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    (vocab["a"], vocab["b"]) = (b, a);
    std::fs::write(&tokenizer, json.to_string()).expect("written");
    let large = engine(&path("8"), Level::best(None));
    let load = |name: &str, context| {
        let options = LoadOptions { context: Some(context), ..Default::default() };
        large.load_beside(&path(name), &options).expect("a sound bundle")
    };
    let (same, small, short) = (load("8", 200), load("3", 200), load("3", 30));
    assert!(large.session().guess_with(load("other", 200).session()).is_err());
    let prompt: Vec<u32> = golden.ids.iter().take(20).copied().collect();
    for temperature in [0.0, 1.0] {
        let answer = |draft_model: Option<&Engine>| {
            let sampling = Sampling { temperature, seed: 5, repetition_penalty: 1.05, ..Default::default() };
            let request = Request { sampling, max_tokens: 100, ignore_end: true, draft: true, ..Request::default() };
            let mut session = large.session();
            if let Some(small) = draft_model {
                session.guess_with(small.session()).expect("the same vocabulary");
            }
            let first = generate(&mut session, &prompt, &request, &mut |_| {}, &|| false).expect("an answer");
            // Another question in the same session.
            let second = generate(&mut session, &prompt[..9], &request, &mut |_| {}, &|| false).expect("an answer");
            ([first.ids, second.ids], [first.logprobs, second.logprobs], first.drafted_tokens + second.drafted_tokens)
        };
        let plain = answer(None);
        for (what, model) in [("same", &same), ("small", &small), ("short", &short)] {
            let with = answer(Some(model));
            assert_eq!((&with.0, &with.1), (&plain.0, &plain.1), "{what} at temperature {temperature}");
            println!("{what} at temperature {temperature}: {} guessed, {} without", with.2, plain.2);
            if what == "same" && temperature == 0.0 {
                // How much is guessed depends on what runs have cost, and so on what else the machine does.
                assert!((0..8).any(|_| answer(Some(model)).2 > answer(None).2), "it never guessed more");
            }
        }
    }
}

/// Tables in parts of several widths: logits are those of the slow reference, where parts are rows of one matrix.
#[test]
fn tables_in_parts_are_one_table() {
    let dir = TempDir::new().expect("a folder");
    for model in ["llama-tied", "llama-untied", "gemma3-text"] {
        let (golden, path) = (Golden::read(model), dir.path().join(model));
        mixture(&golden.folder, &path);
        let whole = engine(&path, Level::best(None));
        let (spec, Manifest { tensors, .. }) = (whole.spec(), &whole.bundle.manifest);
        let bits = |part: usize| tensors[&format!("embed.{part}")].format.bits();
        let last = spec.table_parts.len();
        assert!(last > 0 && bits(0) > bits(last), "{model}: {:?}", spec.table_parts);
        assert_eq!(tensors.contains_key("head.0"), !spec.tied);
        for level in Level::supported() {
            let engine = engine(&path, level);
            let (fast, truth) = (engine.score(&golden.ids).expect("logits"), slow(&engine, &golden.ids));
            let cosine = worst_cosine(&fast, &truth, engine.vocab());
            assert!(cosine > 0.995, "{model} {level}: {cosine}");
        }
    }
}
