//! Weights that a GGUF file has in 4 or 8 bits: kept to the bit, and run without being rounded again.

use crate::support::{Home, Kind, as_gguf_of_kinds, engine, finish, plain_options, relative, source};
use cactus::graph::{CacheFormat, Feed, Graph, Memory, Plan, Run, reference};
use cactus::kernels::{Level, Pool};
use cactus::model::Bundle;
use cactus::model::convert::{Options, convert};
use cactus::model::export::{self, SHARD_BYTES, export};
use cactus::model::import::Checkpoint;
use cactus::quant::blocks::{Block, pack_tile};
use cactus::quant::encode::encode_tile;
use cactus::quant::{CqLayout, Format, Rotation};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn golden() -> PathBuf {
    source("tests/golden/llama-tied")
}

/// A GGUF file of the golden model.
fn gguf(dir: &Path, name: &str, kind: impl Fn(&str) -> Kind) -> PathBuf {
    let path = dir.join(format!("{name}.gguf"));
    fs::write(&path, as_gguf_of_kinds(&golden(), kind)).expect("written");
    path
}

/// Rounded to 4 bits all over, and so again where grids are not kept.
fn four_bits(keep: bool) -> Options {
    Options { keep, head_bits: Some(4), ..plain_options(4) }
}

/// The formats of the matrices of a bundle made from `checkpoint`.
fn converted(checkpoint: &Path, target: &Path, options: &Options) -> BTreeMap<String, Format> {
    let checkpoint = Checkpoint::open(checkpoint).expect("a sound checkpoint");
    convert(&checkpoint, target, options, &mut |_| Ok(())).expect("a conversion");
    let tensors = Bundle::open(target).expect("a sound bundle").manifest.tensors;
    tensors.into_iter().filter(|(_, t)| t.format != Format::F32).map(|(name, t)| (name, t.format)).collect()
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
    row.iter().map(|x| f64::from(*x) - total.ln()).collect()
}

/// Mean divergence of logits from those of a reference, nats a token.
fn divergence(logits: &[f32], reference: &[f32], vocab: usize) -> f64 {
    let rows = reference.chunks_exact(vocab).zip(logits.chunks_exact(vocab));
    let of_row =
        |(p, q): (&[f32], &[f32])| -> f64 { log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum() };
    rows.clone().map(of_row).sum::<f64>() / rows.len() as f64
}

fn logits(bundle: &Path, level: Level) -> Vec<f32> {
    let ids: Vec<u32> = (0..48).map(|i| (i * 37 + i * i) % 400).collect();
    engine(bundle, level).score(&ids).expect("logits")
}

/// Exported as f32, every tensor has the values that the file had, bit for bit and row by row, those of queries and
/// keys included, whose rows stand in another order in the file.
#[test]
fn values_survive_to_the_bit() {
    let dir = TempDir::new().expect("a folder");
    let embed = |kind| move |name: &str| if name.contains("embed") { kind } else { Kind::Q4_0 };
    for (name, bits, embed_kind) in [("four", 4, Kind::Q4_0), ("eight", 8, Kind::Q8_0)] {
        let kind = embed(embed_kind);
        let file = gguf(dir.path(), name, kind);
        let path = |what: &str| dir.path().join(format!("{name}-{what}"));
        let formats = converted(&file, &path("bundle"), &plain_options(bits));
        for (tensor, format) in formats {
            let expected = if tensor == "embed" && bits == 8 { Format::Q8_0 } else { Format::Q4_0 };
            assert_eq!(format, expected, "{tensor}");
        }
        let bundle = Bundle::open(&path("bundle")).expect("a sound bundle");
        assert!(bundle.manifest.tensors.values().all(|t| t.relative_error == 0.0));
        let options = export::Options { dtype: Some(Format::F32), shard_bytes: SHARD_BYTES };
        export(&bundle, &path("export"), &options, &mut |_| Ok(())).expect("an export");
        let (before, after) = (Checkpoint::open(&golden()).expect("sound"), Checkpoint::open(&path("export")).expect("sound"));
        let values = |checkpoint: &Checkpoint, name: &str| {
            let tensor = checkpoint.tensor(name).expect("a tensor");
            let mut values = vec![0.0; tensor.elements()];
            tensor.read_rows(0..tensor.rows(), &mut values).expect("values");
            values
        };
        for name in before.tensors.keys() {
            let kind = if name.contains("norm") { Kind::F32 } else { kind(name) };
            let expected = kind.rounded(&values(&before, name));
            let same = values(&after, name).iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && after.tensors.contains_key(name), "{name}");
        }
    }
}

/// Kept weights answer as the same file does at 16 bits, but for the rounding of activations; rounded again they
/// are off by a multiple of that.
#[test]
fn kept_weights_answer_as_at_16_bits() {
    let dir = TempDir::new().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    let (four, eight) = (gguf(dir.path(), "q4_0", |_| Kind::Q4_0), gguf(dir.path(), "q8_0", |_| Kind::Q8_0));
    for (file, bits) in [(&four, 4), (&four, 8), (&eight, 8)] {
        converted(file, &path("sixteen"), &plain_options(16));
        converted(file, &path("kept"), &plain_options(bits));
        converted(file, &path("again"), &four_bits(false));
        for level in Level::supported() {
            let reference = logits(&path("sixteen"), level);
            let of = |name: &str| divergence(&logits(&path(name), level), &reference, 512);
            let (kept, again) = (of("kept"), of("again"));
            println!("{level} {bits} bits: kept {kept:.3e}, rounded again {again:.3e}");
            assert!(kept < again / 20.0, "{level} at {bits} bits: {kept} against {again}");
        }
    }
}

/// Matrices that are stacked in a bundle need one grid for all; eight bits hold four as well. What is not kept is
/// rotated, and both kinds work side by side.
#[test]
fn stacks_of_different_kinds() {
    let dir = TempDir::new().expect("a folder");
    let file = gguf(dir.path(), "mixed", |name| match name {
        n if n.contains("v_proj") => Kind::Q8_0,
        n if n.contains("up_proj") => Kind::F32,
        n if n.contains("embed") => Kind::Q8_0,
        _ => Kind::Q4_0,
    });
    let path = |name: &str| dir.path().join(name);
    converted(&file, &path("sixteen"), &plain_options(16));
    let (four, eight) = (Format::Tcq4, Format::Cq8);
    for (bits, options, embed, qkv, gate_up, bound) in [
        (4, four_bits(true), four, four, four, 0.5),
        // The head has 8 bits where rounding is plain.
        (4, plain_options(4), Format::Q8_0, four, four, 0.5),
        (8, plain_options(8), Format::Q8_0, Format::Q8_0, eight, 0.03),
    ] {
        let formats = converted(&file, &path("bundle"), &options);
        for layer in 0..2 {
            let of = |name: &str| formats[&format!("layers.{layer}.{name}")];
            assert_eq!((of("attn.qkv"), of("attn.out")), (qkv, Format::Q4_0), "{bits}");
            assert_eq!((of("mlp.gate_up"), of("mlp.down")), (gate_up, Format::Q4_0), "{bits}");
        }
        assert_eq!(formats["embed"], embed);
        let difference = relative(&logits(&path("bundle"), Level::best(None)), &logits(&path("sixteen"), Level::best(None)));
        assert!(difference < bound, "{bits} bits: {difference}");
    }
    // Where fewer are asked for, or a mixture is, or nothing is to be rounded, all is as without grids.
    for bits in [2, 3, 16] {
        let (kept, again) = (plain_options(bits), Options { keep: false, ..plain_options(bits) });
        let head = |options: Options| Options { head_bits: Some(bits), ..options };
        let (kept, again) = (converted(&file, &path("a"), &head(kept)), converted(&file, &path("b"), &head(again)));
        assert_eq!(kept, again);
    }
}

/// Text goes through layers whose matrices are kept, and what is left is fitted to it.
#[test]
fn calibration_passes_kept_matrices() {
    let dir = TempDir::new().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    let text: Vec<u32> = (0..256).map(|i| (i * 37 + i * i) % 400).collect();
    let calibrated = Options { calibration: vec![text.clone(); 2], sequential: Some(0.5), ..plain_options(4) };
    for (name, odd) in [("embed", "embed"), ("first", "layers.0.mlp.down"), ("last", "layers.1.self_attn.o")] {
        let file = gguf(dir.path(), name, |n| if n.contains(odd) { Kind::F32 } else { Kind::Q4_0 });
        converted(&file, &path("sixteen"), &plain_options(16));
        let kept = converted(&file, &path("kept"), &calibrated);
        converted(&file, &path("plain"), &four_bits(true));
        assert_eq!(kept.values().filter(|f| **f == Format::Tcq4).count(), 1, "{name}: {kept:?}");
        assert_eq!(kept.values().filter(|f| **f == Format::Q4_0).count(), 8, "{name}: {kept:?}");
        assert!(Bundle::read_manifest(&path("kept")).unwrap().quantiser.calibration_tokens > 0);
        let of = |name: &str| logits(&path(name), Level::best(None));
        let of = |name: &str| divergence(&of(name), &of("sixteen"), 512);
        println!("{name}: {:.3e}, plainly rounded {:.3e}", of("kept"), of("plain"));
        // Look-ups are not helped by what helps the head.
        assert!(of("kept") < of("plain") * if name == "embed" { 1.5 } else { 1.0 }, "{name}");
    }
}

/// What the program prints. Nothing is fitted to text when nothing is left to round.
#[test]
fn the_report_tells_what_is_kept() {
    let (home, dir) = (Home::new(), TempDir::new().expect("a folder"));
    let file = gguf(dir.path(), "model", |_| Kind::Q4_0);
    let target = home.path().join("out");
    let run = |more: &[&str]| {
        let mut command = home.cactus(["convert"]);
        finish(command.arg(&file).arg(&target).args(more)).ok()
    };
    for more in [&[][..], &["--bits", "8"], &["--calibrate", "shipped", "--code", "scalar"]] {
        let report = run(more);
        assert!(report.contains("9 of 9 matrices kept as the checkpoint has them (q4_0), without loss\n"), "{report}");
        assert!(report.lines().any(|l| l.starts_with("embed ") && l.contains(" q4_0 ") && l.ends_with(" kept")), "{report}");
        let quantiser = Bundle::read_manifest(&target).expect("a manifest").quantiser;
        assert_eq!((quantiser.calibration_tokens, quantiser.calibration_text.as_str()), (0, ""));
    }
    let report = run(&["--requantise", "--calibrate", "shipped", "--calibrate-tokens", "300"]);
    assert!(!report.contains("kept") && report.contains(" tcq4 "), "{report}");
    assert!(Bundle::read_manifest(&target).expect("a manifest").quantiser.calibration_tokens > 0);
    let report: serde_json::Value = serde_json::from_str(&run(&["--json"])).expect("JSON");
    let tensors = report["tensors"].as_array().expect("tensors");
    assert!(tensors.iter().all(|t| t["kept"] == (t["format"] == "q4_0")));
    assert_eq!(tensors.iter().filter(|t| t["kept"] == true).count(), 9);
}

/// Two matrices with one input, one of them rotated: each gets the input as it needs it.
#[test]
fn one_input_serves_both_kinds() {
    let (rows, cols, tokens) = (96, 160, 5);
    let mut memory = Memory::default();
    let mut graph = Graph::default();
    let x = graph.rows_input(cols);
    let mut bytes = |format: Format| {
        let layout = CqLayout::new(format, rows, cols).expect("a layout");
        let weights: Vec<f32> = (0..rows * cols).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
        let mut data = vec![0; layout.bytes().expect("a size")];
        for (tile, out) in data.chunks_exact_mut(layout.tile_bytes()).enumerate() {
            let rows = &weights[tile * 64 * cols..((tile + 1) * 64).min(rows) * cols];
            if layout.rotation() != Rotation::None {
                encode_tile(&layout, rows, None, out);
            } else {
                let block = |x: &[f32]| Block {
                    scale: half::f16::from_f32(0.125),
                    levels: std::array::from_fn(|k| (x[k] * 7.0).round() as i8),
                };
                pack_tile(&layout, &rows.chunks_exact(32).map(block).collect::<Vec<_>>(), out);
            }
        }
        memory.push(&format.to_string(), &data, rows, cols, format)
    };
    for format in [Format::Q4_0, Format::Cq8, Format::Q8_0, Format::Cq4, Format::Q4_0] {
        let weight = graph.weight(bytes(format));
        let y = graph.matmul(x, weight, None).expect("a product");
        graph.output(y);
    }
    let rows: Vec<f32> = (0..tokens * cols).map(|i| ((i * 31 % 257) as f32 - 128.0) / 40.0).collect();
    let feed = Feed::Rows { rows: &rows, tokens };
    let truth = reference::run(&graph, memory.bytes(), feed);
    let pool = Pool::new(2);
    for level in Level::supported() {
        let plan = Plan::new(&graph, level, tokens, pool.threads()).expect("a plan");
        assert_eq!(plan.describe().matches("rotate").count(), 2, "one form a kind");
        let (mut buffers, mut state) = (plan.buffers(), plan.state(tokens, CacheFormat::F16));
        let weights = memory.bytes();
        plan.execute(Run { weights, feed, state: &mut state, buffers: &mut buffers, pool: &pool, profile: None });
        for (i, truth) in truth.iter().enumerate() {
            let truth: Vec<f32> = truth.iter().map(|x| *x as f32).collect();
            let difference = relative(plan.output(&buffers, i), &truth);
            assert!(difference < 0.01, "{level}, product {i}: {difference}");
        }
    }
}
