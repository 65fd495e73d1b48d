//! Embedding models against what transformers computes from them, and `cactus embed` from outside.

use crate::support::{Home, bundle, finish, relative, source};
use cactus::engine::{Embedder, LoadOptions};
use cactus::graph::{Feed, reference};
use cactus::kernels::Level;
use cactus::model::spec::{Encoder, Pooling, Spec};
use cactus::model::{Bundle, text_encoder};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;

/// What transformers computed.
struct Golden {
    folder: PathBuf,
    bytes: Vec<u8>,
}

impl Golden {
    fn read() -> Self {
        let folder = source("tests/golden/bert");
        Golden { bytes: std::fs::read(folder.join("golden.safetensors")).expect("a golden file"), folder }
    }

    fn words(&self, name: &str) -> Vec<[u8; 4]> {
        let file = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        let tensor = file.tensor(name).expect("a known tensor");
        tensor.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]).collect()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.words(name).into_iter().map(u32::from_le_bytes).collect()
    }

    fn values(&self, name: &str) -> Vec<f32> {
        self.words(name).into_iter().map(f32::from_le_bytes).collect()
    }

    fn texts(&self) -> Vec<String> {
        let (_, header) = SafeTensors::read_metadata(&self.bytes).expect("a header");
        serde_json::from_str(&header.metadata().as_ref().expect("metadata")["texts"]).expect("texts")
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn embedder(path: &Path, level: Level) -> Embedder<'static> {
    let options = LoadOptions { threads: Some(2), ceiling: Some(level), ..Default::default() };
    Embedder::load(path, &options).expect("a sound bundle")
}

fn encoder(bundle: &Bundle) -> Encoder {
    match &bundle.manifest.spec {
        Spec::Encoder(spec) => spec.clone(),
        Spec::Decoder(_) => panic!("a decoder"),
    }
}

#[test]
fn vectors_and_ids_at_16_bits() {
    let (golden, dir) = (Golden::read(), TempDir::new().expect("a folder"));
    let path = dir.path().join("bundle");
    bundle(&golden.folder, &path, 16);
    let texts = golden.texts();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    for level in Level::supported() {
        let embedder = embedder(&path, level);
        assert_eq!((embedder.dim(), embedder.max_tokens(), embedder.normalizes()), (96, 64, true));
        let vectors = embedder.embed(&texts, true, &|| false).expect("vectors");
        for (n, (text, vector)) in texts.iter().zip(&vectors).enumerate() {
            let ids = golden.ids(&format!("text_ids.{n}"));
            assert_eq!(embedder.ids(text).expect("ids"), (ids.clone(), n == 3), "text {n}");
            let error = relative(&vector.values, &golden.values(&format!("text_mean.{n}")));
            println!("{level} text {n}: {error:.1e}");
            assert!(error < 2e-3, "{level} text {n}: {error:e}");
            assert_eq!((vector.tokens, vector.truncated), (ids.len(), n == 3));
            // Alone it gives the same bits.
            assert_eq!(embedder.embed(&[text], true, &|| false).expect("a vector")[0], *vector, "{level} text {n}");
        }
    }
}

/// Two texts in one run, in plain loops and by kernels.
#[test]
fn hidden_states_agree() {
    let (golden, dir) = (Golden::read(), TempDir::new().expect("a folder"));
    let expected = golden.values("last_hidden_state");
    let (ids, dim) = (golden.ids("input_ids"), 96);
    // The second text is 13 tokens long, the rest is padding.
    let ids: Vec<u32> = ids[..33].to_vec();
    for (bits, limit) in [(16, 1e-5), (8, 0.1), (4, 1.0)] {
        let path = dir.path().join(bits.to_string());
        bundle(&golden.folder, &path, bits);
        let bundle = Bundle::open(&path).expect("a bundle");
        let graph = text_encoder::graph(&encoder(&bundle), &|name| bundle.weight(name)).expect("a graph");
        let feed = Feed::Texts { ids: &ids, ends: &[20, 33] };
        let slow: Vec<f32> = reference::run(&graph, bundle.bytes(), feed)[0].iter().map(|x| *x as f32).collect();
        let error = relative(&slow, &expected[..33 * dim]);
        println!("{bits} bits, plain loops: {error:.1e}");
        assert!(error < limit, "{bits} bits: {error:e}");
        for level in Level::supported() {
            let plan = cactus::graph::Plan::new(&graph, level, 40, 2).expect("a plan");
            let pool = cactus::kernels::Pool::new(2);
            let (mut buffers, mut state) = (plan.buffers(), plan.state(0, Default::default()));
            let run = cactus::graph::Run {
                weights: bundle.bytes(),
                feed,
                state: &mut state,
                buffers: &mut buffers,
                pool: &pool,
                profile: None,
            };
            plan.execute(run);
            let fast = plan.output(&buffers, 0);
            let worst = fast.chunks(dim).zip(slow.chunks(dim)).map(|(a, b)| cosine(a, b)).fold(1.0, f64::min);
            println!("{bits} bits {level}: {worst:.6}");
            assert!(worst > if bits == 16 { 0.999_999 } else { 0.995 }, "{bits} bits {level}: {worst}");
        }
    }
}

#[test]
fn the_files_of_sentence_transformers_are_followed() {
    let (golden, dir) = (Golden::read(), TempDir::new().expect("a folder"));
    let folder = dir.path().join("model");
    std::fs::create_dir_all(folder.join("1_Pooling")).expect("a folder");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden.folder.join(name), folder.join(name)).expect("a copy");
    }
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("written");
    let module = |kind: &str, path: &str| format!(r#"{{"type": "sentence_transformers.models.{kind}", "path": "{path}"}}"#);
    let steps = [module("Transformer", ""), module("Pooling", "1_Pooling")].join(",");
    write("modules.json", &format!("[{steps}]"));
    write("1_Pooling/config.json", r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#);
    write("sentence_bert_config.json", r#"{"max_seq_length": 16, "do_lower_case": false}"#);
    let path = dir.path().join("bundle");
    bundle(&folder, &path, 16);
    let embedder = embedder(&path, Level::best(None));
    let spec = encoder(embedder.bundle());
    assert_eq!((spec.pooling, spec.normalize, spec.max_tokens), (Pooling::First, false, 16));
    let vector = embedder.embed(&[golden.texts()[0].as_str()], embedder.normalizes(), &|| false).expect("a vector").remove(0);
    assert!(relative(&vector.values, &golden.values("text_first.0")) < 2e-3);
    let long = embedder.embed(&["a ".repeat(50).as_str()], false, &|| false).expect("a vector").remove(0);
    assert_eq!((long.tokens, long.truncated), (16, true));

    let home = Home::new();
    write("1_Pooling/config.json", r#"{"pooling_mode_max_tokens": true}"#);
    let error = home.run(["convert".as_ref(), folder.as_os_str(), dir.path().join("x").as_os_str()]).failed(1);
    assert!(error.contains("pooling_mode_max_tokens"), "{error}");
    write("modules.json", &format!("[{steps},{}]", module("Dense", "2_Dense")));
    let error = home.run(["convert".as_ref(), folder.as_os_str(), dir.path().join("x").as_os_str()]).failed(1);
    assert!(error.contains("the step Dense"), "{error}");
}

#[test]
fn the_command_reads_arguments_and_lines() {
    let (golden, home) = (Golden::read(), Home::new());
    let model = golden.folder.to_str().expect("a path");
    let vectors = |text: &str| -> Vec<Vec<f32>> { text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect() };
    let two = vectors(&home.run(["embed", model, "the river", "cold water", "--bits", "16"]).ok());
    assert_eq!(two.iter().map(Vec::len).collect::<Vec<_>>(), [96, 96]);
    assert!((two[0].iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);

    // Lines, JSON strings and objects are the same texts.
    let mut child = home.cactus(["embed", model, "-", "--bits", "16", "--json"]);
    child.stdin(Stdio::piped());
    let input = home.path().join("input");
    let long = "a ".repeat(100);
    std::fs::write(&input, format!("the river\n\"cold water\"\r\n{{\"text\": \"the river\"}}\n\n{long}")).expect("written");
    child.stdin(std::fs::File::open(&input).expect("a file"));
    let done = finish(&mut child);
    assert!(done.stderr.contains("text 5 was cut to its first 64 tokens"), "{}", done.stderr);
    let lines: Vec<Value> = done.ok().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 5);
    let vector = |n: usize| serde_json::from_value::<Vec<f32>>(lines[n]["embedding"].clone()).expect("a vector");
    assert_eq!((vector(0), vector(1), vector(2)), (two[0].clone(), two[1].clone(), two[0].clone()));
    assert_eq!((&lines[3]["tokens"], &lines[3]["index"], &lines[4]["truncated"]), (&2.into(), &3.into(), &true.into()));

    let plain = vectors(&home.run(["embed", model, "the river", "--bits", "16", "--no-normalize"]).ok()).remove(0);
    assert!(cosine(&plain, &two[0]) > 0.999_999 && plain.iter().map(|x| x * x).sum::<f32>() > 1.5);
    // Eight bits are the default of embedding models.
    let quantised = vectors(&home.run(["embed", model, "the river"]).ok()).remove(0);
    assert!(quantised != two[0] && cosine(&quantised, &two[0]) > 0.99);
    // Where a text is expected, this model has none to give.
    let error = home.run(["run", model, "hello", "--bits", "16"]).failed(1);
    assert!(error.contains("embedding model") && error.contains("cactus embed"), "{error}");
    assert!(home.run(["embed", model, "the river", "--bits", "3.3"]).failed(1).contains("a mixture"));
}

/// The mean of the hidden states after the last norm, as transformers has them.
#[test]
fn chat_models_give_the_mean_of_their_states() {
    let folder = source("tests/golden/llama-tied");
    let bytes = std::fs::read(folder.join("golden.safetensors")).expect("a golden file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let words = |name: &str| file.tensor(name).expect("a known tensor").data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join("bundle");
    bundle(&folder, &path, 16);
    let engine = crate::support::engine(&path, Level::best(None));
    let ids: Vec<u32> = words("input_ids").map(u32::from_le_bytes).collect();
    let states: Vec<f32> = words("last_hidden_state").map(f32::from_le_bytes).collect();
    let dim = engine.spec().dim;
    let mean: Vec<f32> = (0..dim).map(|d| states.chunks(dim).map(|row| row[d]).sum::<f32>() / ids.len() as f32).collect();
    let embedder = Embedder::of(&engine).expect("an embedder");
    let vector = embedder.embed_ids(&[ids], &|| false).expect("a vector").remove(0);
    assert!(relative(&vector, &mean) < 2e-3);
}
