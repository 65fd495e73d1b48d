//! Official weight folders as checkpoints.

use crate::golden::Golden;
use crate::support::{Home, as_official, bundle, engine, finish, relative};
use cactus::kernels::Level;
use cactus::model::families;
use cactus::model::import::Checkpoint;
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
        as_official(&golden.folder, &folder, false);
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
        let expected = as_official(&Golden::read(model).folder, &folder, true);
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
    as_official(&golden, &folder, true);
    converted(&home, &folder).ok();
    let shown = finish(home.cactus(["show"]).arg(&folder)).ok();
    assert!(shown.contains("qwen3") && shown.contains("official(4)"), "{shown}");

    let at = |name: &str| folder.join(name);
    let failed = |what: &str| {
        let stderr = converted(&home, &folder).failed(1);
        assert!(stderr.contains(what), "{stderr}");
        as_official(&golden, &folder, true);
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
    as_official(&golden, &folder, false);
    fs::rename(at("layer_0_ffn_up.weights"), at("layer_0_ffn_up.cq4.weights")).unwrap();
    fs::write(at("layer_0_ffn_up.weights"), "something else").unwrap();
    fs::remove_file(at("conversion_manifest.json")).unwrap();
    converted(&home, &folder).ok();
}

/// The factors of Gemma 3 are known without a manifest, too.
#[test]
fn gemma3_without_a_manifest() {
    let dir = TempDir::new().expect("a folder");
    let expected = as_official(&Golden::read("gemma3-text").folder, dir.path(), false);
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
