//! A bundle written back as a checkpoint: the values, the names and the files that other programs read.

use crate::support::{Home, as_gguf, bundle, finish, mixture, source};
use cactus::model::Bundle;
use cactus::model::export::{self, Options, SHARD_BYTES, export};
use cactus::model::import::Checkpoint;
use cactus::quant::Format;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MODELS: [&str; 10] = [
    "llama-tied",
    "llama-untied",
    "llama-wide-heads",
    "llama3-rope",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3-text",
    "smollm3",
    "phi3",
];

fn golden(model: &str) -> PathBuf {
    source("tests/golden").join(model)
}

fn exported(from: &Path, to: &Path, dtype: Option<Format>, shard_bytes: u64) -> export::Report {
    let bundle = Bundle::open(from).expect("a sound bundle");
    export(&bundle, to, &Options { dtype, shard_bytes }, &mut |_| Ok(())).expect("an export")
}

/// Shape and values of every tensor.
fn tensors(checkpoint: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let checkpoint = Checkpoint::open(checkpoint).expect("a sound checkpoint");
    let read = |(name, tensor): (&String, &cactus::model::import::SourceTensor)| {
        let mut values = vec![0.0; tensor.elements()];
        tensor.read_rows(0..tensor.rows(), &mut values).expect("values");
        (name.clone(), (tensor.shape.clone(), values))
    };
    checkpoint.tensors.iter().map(read).collect()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON")
}

/// Nothing is lost at 16 bits: the export has the tensors of the checkpoint, bit by bit where the bundle keeps the
/// type of the source, and converts to the same bundle again.
#[test]
fn a_round_trip_at_16_bits_changes_nothing() {
    let dir = TempDir::new().expect("a folder");
    for model in MODELS.into_iter().chain(["gemma2"]) {
        let path = |kind: &str| dir.path().join(format!("{model}-{kind}"));
        bundle(&golden(model), &path("first"), 16);
        exported(&path("first"), &path("export"), None, SHARD_BYTES);
        bundle(&path("export"), &path("second"), 16);
        let weights = |kind: &str| fs::read(path(kind).join("weights.safetensors")).expect("weights");
        assert!(weights("first") == weights("second"), "{model}");

        let lossless = Bundle::open(&path("first")).unwrap().manifest.tensors.values().all(|t| t.relative_error == 0.0);
        let (before, after) = (tensors(&golden(model)), tensors(&path("export")));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "{model}");
        for (name, (shape, values)) in &before {
            let (new_shape, new_values) = &after[name];
            assert_eq!(shape, new_shape, "{model} {name}");
            // F32 was rounded to F16, and a norm of Gemma has passed through `1 + w`.
            let bound = |v: &f32| 1e-7 + v.abs() * 5e-4;
            let near = values.iter().zip(new_values).all(|(a, b)| (a - b).abs() <= bound(a));
            assert!(near && (!lossless || model.starts_with("gemma") || values == new_values), "{model} {name}");
        }
        for file in ["tokenizer.json", "generation_config.json"] {
            assert!(path("export").join(file).exists(), "{model} {file}");
        }
        let (old, new) = (json(&golden(model).join("config.json")), json(&path("export").join("config.json")));
        for key in ["architectures", "model_type", "hidden_size", "rope_parameters", "dtype"] {
            assert_eq!(old[key], new[key], "{model} {key}");
        }
    }
}

/// At 4 bits, exported as f32, the values are those that the program computes with.
#[test]
fn quantised_values_are_those_of_the_bundle() {
    let dir = TempDir::new().expect("a folder");
    for model in ["llama-untied", "gemma3-text", "phi3"] {
        let (first, out) = (dir.path().join(model), dir.path().join(format!("{model}-export")));
        bundle(&golden(model), &first, 4);
        exported(&first, &out, Some(Format::F32), SHARD_BYTES);
        let (bundle, after) = (Bundle::open(&first).unwrap(), tensors(&out));
        let rows = |name: &str| -> Vec<f32> {
            let weight = bundle.weight(name).expect("a tensor");
            let mut values = vec![0.0; weight.rows * weight.cols];
            for (row, out) in values.chunks_exact_mut(weight.cols).enumerate() {
                weight.row(bundle.bytes(), row, out);
            }
            values
        };
        let stack = |names: &[&str]| -> Vec<f32> {
            names.iter().flat_map(|n| after[&format!("model.layers.1.{n}.weight")].1.clone()).collect()
        };
        let (qkv, gate_up): (&[&str], &[&str]) = match model {
            "phi3" => (&["self_attn.qkv_proj"], &["mlp.gate_up_proj"]),
            _ => (&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], &["mlp.gate_proj", "mlp.up_proj"]),
        };
        assert!(rows("layers.1.attn.qkv") == stack(qkv), "{model}");
        assert!(rows("layers.1.mlp.gate_up") == stack(gate_up), "{model}");
        assert!(rows("layers.1.mlp.down") == stack(&["mlp.down_proj"]), "{model}");
        assert!(rows("embed") == after["model.embed_tokens.weight"].1, "{model}");
        let one = if model.starts_with("gemma") { 1.0 } else { 0.0 };
        let norm: Vec<f32> = after["model.norm.weight"].1.iter().map(|w| w + one).collect();
        assert!(rows("norm") == norm, "{model}");
        assert_eq!(json(&out.join("config.json"))["torch_dtype"], "float32");
    }
}

/// A table in parts is one tensor of the checkpoint.
#[test]
fn parts_come_back_as_one_table() {
    let dir = TempDir::new().expect("a folder");
    for model in ["llama-tied", "llama-untied"] {
        let (first, out) = (dir.path().join(model), dir.path().join(format!("{model}-export")));
        mixture(&golden(model), &first);
        exported(&first, &out, Some(Format::F32), SHARD_BYTES);
        let (bundle, after) = (Bundle::open(&first).unwrap(), tensors(&out));
        for (table, name) in [("embed", "model.embed_tokens.weight"), ("head", "lm_head.weight")] {
            let mut values = Vec::new();
            for part in 0..=bundle.manifest.decoder().expect("a decoder").table_parts.len() {
                let Ok(weight) = bundle.weight(&format!("{table}.{part}")) else { continue };
                for row in 0..weight.rows {
                    values.resize(values.len() + weight.cols, 0.0);
                    let at = values.len() - weight.cols;
                    weight.row(bundle.bytes(), row, &mut values[at..]);
                }
            }
            assert!(after.get(name).map_or(&[][..], |(_, whole)| whole) == values, "{model} {name}");
        }
        assert_eq!(tensors(&golden(model)).keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "{model}");
    }
}

/// A GGUF file becomes the Hugging Face checkpoint that it was made from.
#[test]
fn gguf_sources_come_back_under_hugging_face_names() {
    let dir = TempDir::new().expect("a folder");
    for model in ["llama-tied", "llama-untied"] {
        let path = |kind: &str| dir.path().join(format!("{model}-{kind}"));
        fs::write(path("x.gguf"), as_gguf(&golden(model))).expect("written");
        bundle(&path("x.gguf"), &path("bundle"), 16);
        exported(&path("bundle"), &path("export"), Some(Format::F32), SHARD_BYTES);
        let (before, after) = (tensors(&golden(model)), tensors(&path("export")));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
        for (name, (shape, values)) in &before {
            let near = values.iter().zip(&after[name].1).all(|(a, b)| (a - b).abs() <= a.abs() * 5e-4 + 1e-6);
            assert!(*shape == after[name].0 && near, "{model} {name}");
        }
        let config = json(&path("export").join("config.json"));
        assert_eq!(
            (&config["model_type"], &config["hidden_size"]),
            (&Value::from("llama"), &json(&golden(model).join("config.json"))["hidden_size"])
        );
    }
}

#[test]
fn large_exports_have_several_files_and_an_index() {
    let dir = TempDir::new().expect("a folder");
    let (first, one, many) = (dir.path().join("b"), dir.path().join("one"), dir.path().join("many"));
    bundle(&golden("llama-untied"), &first, 16);
    exported(&first, &one, None, SHARD_BYTES);
    let report = exported(&first, &many, None, 100_000);
    assert!(report.files > 2, "{report:?}");
    let index = json(&many.join("model.safetensors.index.json"));
    assert_eq!(index["weight_map"].as_object().unwrap().len(), report.tensors);
    assert_eq!(index["metadata"]["total_size"], report.bytes);
    for n in 1..=report.files {
        let file = many.join(format!("model-{n:05}-of-{:05}.safetensors", report.files));
        assert!(fs::metadata(file).unwrap().len() < 110_000);
    }
    assert!(tensors(&one) == tensors(&many));
}

#[test]
fn the_command_keeps_other_folders_and_names_what_is_missing() {
    let home = Home::new();
    let (first, out) = (home.path().join("bundle"), home.path().join("out"));
    bundle(&golden("qwen2"), &first, 4);
    let run = |extra: &[&str]| finish(home.cactus(["export"]).arg(&first).arg(&out).args(extra));
    run(&["--quiet"]).ok();
    // An earlier export may be replaced.
    let report: Value = serde_json::from_str(&run(&["--dtype", "bf16", "--json"]).ok()).expect("JSON");
    assert_eq!(report["files"], 1);
    assert_eq!(json(&out.join("config.json"))["torch_dtype"], "bfloat16");
    fs::remove_file(out.join(export::MARK)).expect("removed");
    assert!(run(&[]).failed(2).contains("no export"));

    let manifest = first.join("cactus.json");
    let mut old = json(&manifest);
    for (_, tensor) in old["tensors"].as_object_mut().unwrap() {
        tensor.as_object_mut().unwrap().remove("sources");
    }
    fs::write(&manifest, old.to_string()).expect("written");
    fs::remove_dir_all(&out).expect("removed");
    assert!(run(&[]).failed(1).contains("convert the model again"));
    assert!(!out.exists());
    // It still answers.
    Bundle::open(&first).expect("a sound bundle");
    // A manifest that lies about its sources is refused.
    bundle(&golden("qwen2"), &first, 4);
    let good = json(&manifest);
    let lie = |edit: &dyn Fn(&mut Value)| {
        let mut bad = good.clone();
        edit(&mut bad["tensors"]["layers.0.attn.qkv"]["sources"]);
        fs::write(&manifest, bad.to_string()).expect("written");
        run(&[]).failed(1);
        assert!(!out.exists());
    };
    lie(&|sources| sources[0]["shape"][0] = Value::from(u64::MAX));
    lie(&|sources| sources[0]["shape"][1] = Value::from(1));
    lie(&|sources| sources[0]["shape"] = Value::from(vec![7]));
    lie(&|sources| sources[1]["name"] = sources[0]["name"].clone());
    lie(&|sources| drop(sources.as_array_mut().unwrap().pop()));
}
