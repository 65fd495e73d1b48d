//! Small random models of every supported family against what transformers computes from them; see
//! `golden/README.md`.

use crate::support::{Net, argmax, bundle, source};
use cactus::engine::tokenizer::Tokenizer;
use cactus::graph::reference;
use cactus::kernels::Level;
use cactus::model::Bundle;
use safetensors::{SafeTensors, tensor::Dtype};
use std::path::PathBuf;
use tempfile::TempDir;

const MODELS: [&str; 10] =
    ["llama-tied", "llama-untied", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma2", "gemma3-text", "smollm3", "phi3"];

/// What transformers computed.
struct Golden {
    folder: PathBuf,
    ids: Vec<u32>,
    /// `[ids, vocab]`
    logits: Vec<f32>,
    greedy: Vec<u32>,
    text: String,
    text_ids: Vec<u32>,
}

impl Golden {
    fn read(model: &str) -> Self {
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

/// Runs `test` on every model, converted to `bits`.
fn with_each(bits: u32, mut test: impl FnMut(&str, &Golden, &Bundle)) {
    let dir = TempDir::new().expect("a folder");
    for model in MODELS {
        let golden = Golden::read(model);
        let bundle = bundle(&golden.folder, &dir.path().join(model), bits);
        test(model, &golden, &bundle);
    }
}

/// Largest difference over the largest expected value.
fn relative(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, |a: f32, b| if b.is_nan() { f32::INFINITY } else { a.max(b) });
    let difference = largest(&mut got.iter().zip(expected).map(|(a, b)| (a - b).abs()));
    difference / largest(&mut expected.iter().map(|v| v.abs()))
}

/// Cosine of the row that fits worst.
fn worst_cosine(got: &[f32], expected: &[f32], width: usize) -> f64 {
    assert_eq!(got.len(), expected.len());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let cosine = |(a, b): (&[f32], &[f32])| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
    got.chunks_exact(width).zip(expected.chunks_exact(width)).map(cosine).fold(1.0, |a, b| if b < a { b } else { a })
}

#[test]
fn logits_and_greedy_ids_at_16_bits() {
    with_each(16, |model, golden, bundle| {
        for level in Level::supported() {
            let mut net = Net::new(bundle, level);
            let prefill = net.feed(&golden.ids);
            let error = relative(&prefill, &golden.logits);
            println!("{model} {level}: {error:.1e}");
            assert!(error <= 2e-3, "{model} at {level}: logits differ by {error:e}");

            let mut id = argmax(&prefill[prefill.len() - net.vocab()..]);
            let mut greedy = vec![id];
            while greedy.len() < golden.greedy.len() {
                id = argmax(&net.feed(&[id]));
                greedy.push(id);
            }
            assert_eq!(greedy, golden.greedy, "{model} at {level}");
        }
    });
}

/// However a prompt is cut, the same numbers come out, bit by bit.
#[test]
fn pieces_of_a_prompt_give_the_same_bits() {
    for bits in [16, 4] {
        with_each(bits, |model, golden, bundle| {
            for level in Level::supported() {
                let mut net = Net::new(bundle, level);
                let whole = net.feed(&golden.ids);
                for piece in [1, 5] {
                    net.reset();
                    let pieces: Vec<f32> = golden.ids.chunks(piece).flat_map(|ids| net.feed(ids)).collect();
                    let same = whole.iter().zip(&pieces).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{model}, {bits} bits, {level}: pieces of {piece} differ by {:e}", relative(&pieces, &whole));
                }
            }
        });
    }
}

/// The slow truth of the graph agrees with transformers, and kernels on quantised weights with the slow truth.
#[test]
fn slow_reference_agrees() {
    let slow = |net: &Net, bundle: &Bundle, ids: &[u32]| -> Vec<f32> {
        reference::run(&net.graph, bundle.bytes(), ids)[0].iter().map(|v| *v as f32).collect()
    };
    with_each(16, |model, golden, bundle| {
        let net = Net::new(bundle, Level::Scalar);
        let error = relative(&slow(&net, bundle, &golden.ids), &golden.logits);
        println!("{model} slow: {error:.1e}");
        assert!(error <= 5e-4, "{model}: reference differs by {error:e}");
    });
    with_each(4, |model, golden, bundle| {
        for level in Level::supported() {
            let mut net = Net::new(bundle, level);
            let cosine = worst_cosine(&net.feed(&golden.ids), &slow(&net, bundle, &golden.ids), net.vocab());
            println!("{model} 4 bits {level} against slow: {cosine:.5}");
            // Kernels round activations to 8 bits.
            assert!(cosine >= 0.998, "{model} at {level}: cosine {cosine}");
        }
    });
}

#[test]
fn quantised_weights_stay_close() {
    for (bits, limit) in [(8, 0.998), (4, 0.95)] {
        with_each(bits, |model, golden, bundle| {
            let mut net = Net::new(bundle, Level::best(None));
            let cosine = worst_cosine(&net.feed(&golden.ids), &golden.logits, net.vocab());
            println!("{model} {bits} bits: {cosine:.5}");
            assert!(cosine >= limit, "{model} at {bits} bits: cosine {cosine}");
        });
    }
}

#[test]
fn text_becomes_the_same_ids() {
    for model in MODELS {
        let golden = Golden::read(model);
        let read = |name: &str| serde_json::from_slice(&std::fs::read(golden.folder.join(name)).expect(name)).expect(name);
        let tokenizer = Tokenizer::open(&golden.folder.join("tokenizer.json"), &read("tokenizer_config.json"), None).expect(model);
        assert_eq!(tokenizer.encode(&golden.text, false).expect(model), golden.text_ids, "{model}");
    }
}
