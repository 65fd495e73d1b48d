//! Official weight folders as checkpoints.

use crate::golden::Golden;
use crate::support::{Home, as_official, as_official_of, bundle, engine, finish, plain_options, relative};
use cactus::kernels::Level;
use cactus::model::convert::{Options, Report, convert};
use cactus::model::export::{self, SHARD_BYTES, export};
use cactus::model::import::Checkpoint;
use cactus::model::{Bundle, families};
use cactus::quant::Format;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const MODELS: [&str; 8] = ["llama-tied", "llama-untied", "llama3-rope", "qwen2", "qwen3", "smollm3", "phi3", "gemma3-text"];

/// Stored as F16, the models compute what they did; scaled tensors of Gemma 3 included.
#[test]
fn f16_folders_give_the_golden_logits() {
    let dir = TempDir::new().expect("a folder");
    for model in MODELS {
        let golden = Golden::read(model);
        let (folder, path) = (dir.path().join(format!("{model}-official")), dir.path().join(model));
        as_official(&golden.folder, &folder, 16);
        bundle(&folder, &path, 16);
        let engine = engine(&path, Level::best(None));
        let error = relative(&engine.score(&golden.ids).expect(model), &golden.logits);
        println!("{model}: {error:.1e}");
        // A norm that means 1 + w is stored as (1 + w) / 16 - 1 in f16, whose steps are 2^-11 there.
        assert!(error <= if model.starts_with("gemma") { 2e-2 } else { 2e-3 }, "{model}: logits differ by {error:e}");
        let (tokenizer, source) = (&engine.tokenizer, Checkpoint::open(&golden.folder).expect("sound"));
        assert_eq!((tokenizer.bos_text(), tokenizer.eos_text()), (Some("<s>"), Some("</s>")));
        assert_eq!(tokenizer.eos_ids(), [2]);
        assert_eq!(engine.bundle.chat_template, source.tokenizer.chat_template, "{model}");
    }
}

/// As CQ4, padded, rotated and scaled, the values are those that the definition gives.
#[test]
fn cq_folders_give_the_values_of_the_definition() {
    let dir = TempDir::new().expect("a folder");
    for model in MODELS {
        let folder = dir.path().join(model);
        let expected = as_official(&Golden::read(model).folder, &folder, 4);
        let checkpoint = Checkpoint::open(&folder).expect("a sound folder");
        families::plan(&checkpoint).expect("a known architecture");
        assert_eq!(checkpoint.tensors.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{model}");
        for (name, expected) in &expected {
            let tensor = checkpoint.tensor(name).expect("there");
            let mut values = vec![0.0; tensor.elements()];
            tensor.read_rows(0..tensor.rows(), &mut values).expect("values");
            let limit = match (model, name.contains("norm")) {
                ("gemma3-text", true) => 2e-2,
                (_, false) if name.contains("_proj.weight") => 1e-5,
                // F32 in llama-untied, F16 in the file.
                _ => 5e-4,
            };
            let error = relative(&values, expected);
            assert!(error <= limit, "{model} {name}: {error:e}");
        }
    }
}

fn converted(home: &Home, folder: &Path) -> crate::support::Finished {
    finish(home.cactus(["convert", "--quiet", "--bits", "4", "--calibrate", "none"]).arg(folder).arg(home.path().join("out")))
}

#[test]
fn the_command_converts_folders_and_names_what_is_wrong() {
    let home = Home::new();
    let folder = home.path().join("official");
    let golden = Golden::read("qwen3").folder;
    as_official(&golden, &folder, 4);
    converted(&home, &folder).ok();
    let shown = finish(home.cactus(["show"]).arg(&folder)).ok();
    assert!(shown.contains("qwen3") && shown.contains("official(4)"), "{shown}");
    let report = |more: &[&str]| {
        let mut command = home.cactus(["convert", "--calibrate", "none"]);
        finish(command.arg(&folder).arg(home.path().join("out")).args(more)).ok()
    };
    let text = report(&[]);
    assert!(text.contains("9 of 9 matrices kept as the checkpoint has them (bcq4, f16), codebooks to within 0."), "{text}");
    let text = report(&["--requantise"]);
    assert!(!text.contains("kept") && text.contains(" tcq4 "), "{text}");

    let at = |name: &str| folder.join(name);
    let failed = |what: &str| {
        let stderr = converted(&home, &folder).failed(1);
        assert!(stderr.contains(what), "{stderr}");
        as_official(&golden, &folder, 4);
    };
    fs::remove_file(at("hf_config.json")).unwrap();
    failed("neither config.json nor hf_config.json");
    fs::remove_file(at("layer_1_attn_q.weights")).unwrap();
    failed("tensor model.layers.1.self_attn.q_proj.weight is missing");
    fs::copy(at("output_norm.weights"), at("vision_post_layernorm.weights")).unwrap();
    failed("tensor vision_post_layernorm.weight has no place");
    fs::remove_file(at("vision_post_layernorm.weights")).unwrap();
    fs::write(at("config.txt"), "model_type=whisper\n").unwrap();
    failed("model type \"whisper\"");
    let manifest = fs::read_to_string(at("conversion_manifest.json")).unwrap();
    for (from, to) in [("[512,128]", "[512,127]"), ("\"scale_factor\":1.0", "\"scale_factor\":0.0"), ("[512,128]", "[-1]")] {
        assert!(manifest.contains(from), "{manifest}");
        fs::write(at("conversion_manifest.json"), manifest.replace(from, to)).unwrap();
        failed(".weights");
    }
    let mut transposed = fs::read(at("token_embeddings.weights")).unwrap();
    transposed[4] = 4;
    fs::write(at("token_embeddings.weights"), &transposed).unwrap();
    failed("transposed");
    let whole = fs::read(at("layer_0_ffn_up.weights")).unwrap();
    fs::write(at("layer_0_ffn_up.weights"), &whole[..whole.len() - 1]).unwrap();
    failed("layer_0_ffn_up.weights: the file has");

    // A file that says its width comes before one that does not; without a manifest nothing is padded.
    as_official(&golden, &folder, 16);
    fs::rename(at("layer_0_ffn_up.weights"), at("layer_0_ffn_up.cq4.weights")).unwrap();
    fs::write(at("layer_0_ffn_up.weights"), "something else").unwrap();
    fs::remove_file(at("conversion_manifest.json")).unwrap();
    converted(&home, &folder).ok();
}

/// The factors of Gemma 3 are known without a manifest, too.
#[test]
fn gemma3_without_a_manifest() {
    let dir = TempDir::new().expect("a folder");
    let expected = as_official(&Golden::read("gemma3-text").folder, dir.path(), 16);
    fs::remove_file(dir.path().join("conversion_manifest.json")).expect("removed");
    let checkpoint = Checkpoint::open(dir.path()).expect("a sound folder");
    for (name, expected) in &expected {
        let tensor = checkpoint.tensor(name).expect("there");
        let mut values = vec![0.0; tensor.elements()];
        tensor.read_rows(0..tensor.rows(), &mut values).expect("values");
        let error = relative(&values, expected);
        assert!(error <= if name.contains("norm") { 2e-2 } else { 1e-3 }, "{name}: {error:e}");
    }
}

fn to_bundle(folder: &Path, target: &Path, options: &Options) -> Report {
    convert(&Checkpoint::open(folder).expect("a sound folder"), target, options, &mut |_| Ok(())).expect("a conversion")
}

/// The formats of the matrices of layers.
fn formats(report: &Report) -> BTreeMap<&str, Format> {
    let layers = report.tensors.iter().filter(|t| t.format != Format::F32 && t.name.starts_with("layers."));
    layers.map(|t| (t.name.as_str(), t.format)).collect()
}

/// Root of the squared difference over that of the expected squares.
fn error(got: &[f32], expected: &[f32]) -> f64 {
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    (sum(&mut got.iter().zip(expected).map(|(a, b)| a - b)) / sum(&mut expected.iter().copied())).sqrt()
}

const WIDTHS: [(usize, Format, f64); 4] =
    [(1, Format::Bcq1, 1e-5), (2, Format::Bcq2, 7e-4), (3, Format::Bcq3, 1.8e-3), (4, Format::Bcq4, 6e-3)];

/// Every matrix of a bundle has the values of the folder, but for codebooks that became integers; what is F16 there has
/// them to the bit.
#[test]
fn codes_are_kept() {
    let dir = TempDir::new().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    for (bits, format, bound) in WIDTHS {
        // Of Gemma 3 some matrices are stored at 16 times their values; Phi-3 has joined ones, Qwen 2 biases.
        for model in ["llama-untied", "qwen2", "gemma3-text"] {
            let expected = as_official(&Golden::read(model).folder, &at("folder"), bits);
            let report = to_bundle(&at("folder"), &at("bundle"), &plain_options(4));
            assert!(formats(&report).values().all(|f| *f == format), "{model}: {:?}", formats(&report));
            assert!(report.tensors.iter().all(|t| t.kept == (t.format != Format::F32)) && report.rounded_again.is_empty());
            let options = export::Options { dtype: Some(Format::F32), shard_bytes: SHARD_BYTES };
            let bundle = Bundle::open(&at("bundle")).expect("a sound bundle");
            export(&bundle, &at("export"), &options, &mut |_| Ok(())).expect("an export");
            let exported = Checkpoint::open(&at("export")).expect("a sound checkpoint");
            let mut largest = 0.0f64;
            for (name, expected) in expected.iter().filter(|(name, _)| name.contains("proj.weight")) {
                let tensor = exported.tensor(name).expect("there");
                let mut values = vec![0.0; tensor.elements()];
                tensor.read_rows(0..tensor.rows(), &mut values).expect("values");
                largest = largest.max(error(&values, expected));
            }
            println!("{model} at {bits} bits: {largest:.2e}");
            assert!(largest <= bound, "{model} at {bits} bits: {largest:e}");
            let told = report.tensors.iter().filter(|t| t.format == format).map(|t| t.error.relative()).fold(0.0, f64::max);
            assert!((told - largest).abs() < 0.2 * largest + 1e-6, "{model}: {told:e} in the report, {largest:e} found");
            for name in ["folder", "bundle", "export"] {
                fs::remove_dir_all(at(name)).expect("removed");
            }
        }
    }
}

/// At every level the kept matrices answer as the folder does at 16 bits, but for activations of 8 bits and the integers of
/// codebooks; rounded again they are off by a multiple of that.
#[test]
fn kept_codes_answer_as_at_16_bits() {
    let dir = TempDir::new().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    let golden = Golden::read("qwen3");
    for (bits, ..) in WIDTHS {
        as_official(&golden.folder, &at("folder"), bits);
        to_bundle(&at("folder"), &at("sixteen"), &plain_options(16));
        to_bundle(&at("folder"), &at("kept"), &plain_options(4));
        let again = Options { keep: false, head_bits: Some(16), ..plain_options(bits as u32) };
        let report = to_bundle(&at("folder"), &at("again"), &again);
        assert!(report.tensors.iter().all(|t| !t.kept) && report.rounded_again.is_empty());
        for level in Level::supported() {
            let logits = |name: &str| engine(&at(name), level).score(&golden.ids).expect("logits");
            let truth = logits("sixteen");
            let (kept, again) = (error(&logits("kept"), &truth), error(&logits("again"), &truth));
            println!("{level} {bits} bits: kept {kept:.2e}, rounded again {again:.2e}");
            assert!(kept < 0.06 && kept < again / 4.0, "{level} at {bits} bits: {kept:e} against {again:e}");
        }
    }
}

/// Matrices that a bundle stacks are kept if they can share a header; what cannot is rounded again and named, and text is
/// fitted to through what is kept.
#[test]
fn what_is_not_kept_is_named() {
    let dir = TempDir::new().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    let golden = Golden::read("llama-tied");
    as_official_of(&golden.folder, &at("folder"), |name| match name {
        n if n.contains("0.self_attn.v_proj") => (3, &[1.0]),
        n if n.contains("1.mlp.up_proj") => (4, &[1.0, 0.5]),
        n if n.contains("0.mlp.down_proj") => (16, &[]),
        n if n.contains(".layers.") => (4, &[1.0]),
        _ => (16, &[]),
    });
    let text: Vec<u32> = (0..256).map(|i| (i * 37 + i * i) % 400).collect();
    let calibrated = Options { calibration: vec![text; 2], sequential: Some(0.5), ..plain_options(4) };
    to_bundle(&at("folder"), &at("sixteen"), &plain_options(16));
    for options in [plain_options(4), calibrated] {
        let report = to_bundle(&at("folder"), &at("bundle"), &options);
        for (name, format) in formats(&report) {
            let expected = match name {
                "layers.0.attn.qkv" | "layers.1.mlp.gate_up" => Format::Tcq4,
                "layers.0.mlp.down" => Format::F16,
                _ => Format::Bcq4,
            };
            assert_eq!(format, expected, "{name}");
        }
        let why = "(parts that are stored in different ways)";
        assert_eq!(report.rounded_again, [format!("layers.0.attn.qkv {why}"), format!("layers.1.mlp.gate_up {why}")]);
        let logits = |name: &str| engine(&at(name), Level::best(None)).score(&golden.ids).expect("logits");
        let off = error(&logits("bundle"), &logits("sixteen"));
        assert!(off < 0.3, "{off}");
    }
    // Fewer bits than the codes have.
    let report = to_bundle(&at("folder"), &at("bundle"), &plain_options(3));
    assert!(formats(&report).values().all(|f| [Format::Tcq3, Format::F16].contains(f)), "{:?}", formats(&report));
    assert!(report.rounded_again.contains(&"layers.0.attn.out (more bits than are asked for)".to_owned()));
}
