//! Faults that users of tools of this kind have reported, where it takes a whole model to see them. Names of such
//! tests begin with `p` and a number here and everywhere else.

use crate::golden::Golden;
use crate::support::{Home, as_gguf, as_gguf_cut_by, bundle, engine, finish, plain_options, relative, source};
use cactus::engine::chat::{Message, RenderOptions, Rendered, Role};
use cactus::engine::sampler::Sampling;
use cactus::engine::tokenizer::Tokenizer;
use cactus::engine::{Answer, Engine, Finish, LoadOptions, Request, Session, generate};
use cactus::error::{Error, Kind};
use cactus::kernels::Level;
use cactus::model::Bundle;
use cactus::model::convert::{self, Event, Report};
use cactus::model::import::Checkpoint;
use cactus::quant::{CqLayout, decode::decode_row};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Numbers that look random and are the same everywhere, below `limit`.
fn numbers(count: usize, limit: u32) -> Vec<u32> {
    let mut state = 11u64;
    let next = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % u64::from(limit)) as u32
    };
    (0..count).map(next).collect()
}

/// Type, shape and bytes by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Writes a folder with the tokenizer of a golden model.
fn write_folder(folder: &Path, config: &Value, tensors: &Tensors) {
    fs::create_dir_all(folder).expect("a folder");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(source("tests/golden/llama-tied").join(name), folder.join(name)).expect("a copy");
    }
    fs::write(folder.join("config.json"), config.to_string()).expect("written");
    let views: Vec<(&String, TensorView)> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor")))
        .collect();
    fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).expect("a file")).expect("written");
}

/// A copy of a golden model in which `edit` changed something.
fn edited(model: &str, folder: &Path, edit: impl FnOnce(&mut Value, &mut Tensors)) {
    let golden = source("tests/golden").join(model);
    let mut config: Value = serde_json::from_slice(&fs::read(golden.join("config.json")).expect("a config")).expect("JSON");
    let bytes = fs::read(golden.join("model.safetensors")).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let owned = |(name, t): (String, TensorView)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec()));
    let mut tensors: Tensors = file.tensors().into_iter().map(owned).collect();
    edit(&mut config, &mut tensors);
    write_folder(folder, &config, &tensors);
}

/// Converts without calibration; also gives the warnings.
fn convert(checkpoint: &Path, target: &Path, bits: u32) -> Result<(Report, Vec<String>), Error> {
    let options = plain_options(bits);
    let mut warnings = Vec::new();
    let report = convert::convert(&Checkpoint::open(checkpoint)?, target, &options, &mut |event| {
        if let Event::Warning(text) = event {
            warnings.push(text.to_owned());
        }
        Ok(())
    })?;
    Ok((report, warnings))
}

fn user_prompt(engine: &Engine, text: &str) -> Vec<u32> {
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    let rendered = engine.template.render(&[Message::new(Role::User, text)], &options).expect("a rendering");
    engine.tokenizer.encode_prompt(&rendered).expect("ids")
}

/// An answer, whose pieces must be its text.
fn answer(session: &mut Session, prompt: &[u32], request: &Request) -> Answer {
    let mut pieces = String::new();
    let answer = generate(session, prompt, request, &mut |text| pieces += text, &|| false).expect("an answer");
    assert_eq!(pieces, answer.text, "stream and whole text differ");
    answer
}

fn request(sampling: Sampling, max_tokens: usize) -> Request {
    Request { sampling, max_tokens, ignore_end: true, ..Request::default() }
}

#[test]
fn p03_unknown_template_function_is_a_line_with_its_place() {
    let home = Home::new();
    let folder = home.path().join("model");
    edited("llama-tied", &folder, |_, _| {});
    fs::write(folder.join("chat_template.jinja"), "{{ messages[0].content }}\n{{ today_in('Paris') }}\n").expect("written");
    let text = home.run(["run", &folder.to_string_lossy(), "--quiet", "--prompt", "Hi"]).failed(1);
    assert!(text.contains("line 2") && text.contains("today_in"), "{text}");
}

#[test]
fn p04_template_that_refuses_everything_is_quoted() {
    let home = Home::new();
    let folder = home.path().join("model");
    edited("llama-tied", &folder, |_, _| {});
    fs::write(folder.join("chat_template.jinja"), "{{ raise_exception('no chats today') }}").expect("written");
    let text = home.run(["run", &folder.to_string_lossy(), "--quiet", "--system", "Be brief.", "--prompt", "Hi"]).failed(2);
    assert!(text.contains("no chats today"), "{text}");
}

/// Every pre-tokenizer on one vocabulary, in both forms of a checkpoint, against the ids that the tokenizers library
/// gives (`fixtures/pretokenizers/generate.py`).
#[test]
fn p12_byte_level_ids_are_the_reference_ones_from_folder_and_gguf() {
    let path = source("tests/fixtures/pretokenizers/byte_level.json");
    let truth: Value = serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("JSON");
    let dir = TempDir::new().expect("a folder");
    let (folder, file) = (dir.path().join("model"), dir.path().join("model.gguf"));
    edited("llama-wide-heads", &folder, |_, _| {});
    let texts = |value: &Value| serde_json::from_value::<Vec<String>>(value.clone()).expect("texts");
    for kind in truth["kinds"].as_array().expect("kinds") {
        let mut tokenizer = truth["tokenizer"].clone();
        for key in ["normalizer", "pre_tokenizer"] {
            tokenizer[key] = kind[key].clone();
        }
        tokenizer["model"]["ignore_merges"] = kind["ignore_merges"].clone();
        fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).expect("written");
        let pre = kind["pre"].as_str().expect("a name");
        fs::write(&file, as_gguf_cut_by(&folder, pre)).expect("written");
        let ids: Vec<Vec<u32>> = serde_json::from_value(kind["ids"].clone()).expect("ids");
        for (form, path) in [("folder", &folder), ("GGUF", &file)] {
            let checkpoint = Checkpoint::open(path).expect(pre);
            let files = &checkpoint.tokenizer;
            let tokenizer =
                Tokenizer::from_text(&files.tokenizer_json, &files.config, checkpoint.generation.as_ref()).expect(pre);
            for ((text, ids), decoded) in texts(&truth["texts"]).iter().zip(&ids).zip(texts(&kind["decoded"])) {
                let what = format!("{pre} as {form}: {text:?}");
                assert_eq!(tokenizer.encode(text, false).expect(&what), *ids, "{what}");
                let prompt = tokenizer.encode_prompt(&Rendered::raw(text.as_str())).expect(&what);
                assert_eq!(prompt[prompt.len() - ids.len()..], *ids, "{what}");
                assert_eq!(tokenizer.decode(ids), decoded, "{what}");
            }
        }
    }
}

/// Twenty repeats on any number of threads, in fresh sessions and in ones that know part of the prompt, however the
/// prompt came in.
#[test]
fn p13_repeats_are_identical_cold_warm_and_on_any_threads() {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join("model");
    bundle(&source("tests/golden/llama-tied"), &path, 4);
    // Longer than a run of prefill.
    let prompt: Vec<u32> = numbers(170, 500).iter().map(|n| n + 5).collect();
    let sampled = Sampling { temperature: 1.2, top_k: 60, top_p: 0.95, repetition_penalty: 1.1, seed: 7, ..Default::default() };
    for sampling in [Sampling::default(), sampled] {
        let request = request(sampling, 30);
        let outcome = |a: Answer| (a.text, a.ids, a.logprobs.iter().map(|p| p.to_bits()).collect::<Vec<_>>(), a.finish);
        let mut expected = None;
        for threads in [1, 2, 3, 5] {
            let options = LoadOptions { threads: Some(threads), ..Default::default() };
            let engine = Engine::load(&path, &options).expect("an engine");
            let expected = expected.get_or_insert_with(|| outcome(answer(&mut engine.session(), &prompt, &request)));
            let check = |session: &mut Session, reused: usize, what: &str| {
                let answer = answer(session, &prompt, &request);
                assert_eq!(answer.reused_tokens, reused, "{what}, {threads} threads");
                assert!(outcome(answer) == *expected, "{what}, {threads} threads");
            };
            let mut session = engine.session();
            check(&mut session, 0, "cold");
            check(&mut session, 169, "warm");
            // Another conversation with the same beginning.
            let other = [&prompt[..60], &[9, 8, 7]].concat();
            answer(&mut session, &other, &request);
            check(&mut session, 60, "after another conversation");
            for piece in [1, 37, 128] {
                let mut session = engine.session();
                for end in (piece..prompt.len()).step_by(piece) {
                    session.feed(&prompt[..end], &|| false).expect("logits");
                }
                check(&mut session, (prompt.len() - 1) / piece * piece, &format!("{piece} tokens at a time"));
            }
        }
    }
}

#[test]
fn p13_program_and_library_agree() {
    let home = Home::new();
    let path = home.path().join("model");
    bundle(&source("tests/golden/llama-tied"), &path, 4);
    let engine = engine(&path, Level::best(None));
    for (temperature, seed) in [(0.0, 0), (1.3, 3), (1.3, 4)] {
        let sampling = Sampling { temperature, seed, top_k: 50, repetition_penalty: 1.1, ..Default::default() };
        let request = Request { ignore_end: false, ..request(sampling, 24) };
        let prompt = user_prompt(&engine, "Speak slowly, s'il vous plaît");
        let expected = answer(&mut engine.session(), &prompt, &request);
        let (temperature, seed) = (temperature.to_string(), seed.to_string());
        let mut command = home.cactus(["run", "--json", "--top-k", "50", "--max-tokens", "24"]);
        command.args(["--prompt", "Speak slowly, s'il vous plaît", "--temperature", &temperature, "--seed", &seed]);
        let value: Value = serde_json::from_str(&finish(command.arg(&path)).ok()).expect("JSON");
        assert_eq!(value["response"], expected.text, "temperature {temperature}, seed {seed}");
        assert_eq!(value["decode_tokens"], expected.ids.len());
        assert_eq!(value["prefill_tokens"], prompt.len());
    }
}

/// Whatever part of an answer is the stop text, the answer is what comes before it, in the stream as in the whole.
#[test]
fn p18_answers_are_cut_before_the_stop_text() {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join("model");
    bundle(&source("tests/golden/qwen2"), &path, 8);
    let engine = engine(&path, Level::best(None));
    let sampling = Sampling { temperature: 1.0, seed: 5, ..Default::default() };
    let free = request(sampling, 24);
    let mut session = engine.session();
    let prompt = user_prompt(&engine, "Where does the river meet the sea?");
    let whole = answer(&mut session, &prompt, &free);
    assert_eq!(whole.finish, Finish::Length);
    let starts: Vec<usize> = whole.text.char_indices().map(|(at, _)| at).chain([whole.text.len()]).collect();
    assert!(starts.len() > 25, "{:?}", whole.text);
    let mut inside = 0;
    for (i, &from) in starts.iter().enumerate() {
        for length in [1, 2, 5] {
            let Some(&to) = starts.get(i + length) else { continue };
            let stop = &whole.text[from..to];
            let stops = vec!["no such text".to_owned(), stop.to_owned(), format!("{stop}?!")];
            let cut = answer(&mut session, &prompt, &Request { stops, ..free.clone() });
            assert_eq!(Some(cut.text.as_str()), whole.text.split(stop).next(), "{stop:?}");
            assert_eq!(cut.finish, Finish::Stop, "{stop:?}");
            assert_eq!(cut.ids, whole.ids[..cut.ids.len()]);
            inside += usize::from(engine.tokenizer.decode(&cut.ids) != format!("{}{stop}", cut.text));
        }
    }
    assert!(inside > 0, "no stop text ended within a token");
}

/// What is there counts, and a flag that contradicts it is reported.
#[test]
fn p44_output_head_is_the_matrix_if_there_is_one() {
    let dir = TempDir::new().expect("a folder");
    let (folder, target) = (dir.path().join("model"), dir.path().join("bundle"));
    let check = |model: &str, path: &Path, warning: Option<&str>, what: &str| {
        let golden = Golden::read(model);
        let (_, warnings) = convert(path, &target, 16).expect(what);
        assert_eq!(warnings.len(), usize::from(warning.is_some()), "{what}: {warnings:?}");
        assert!(warnings.iter().all(|w| w.contains(warning.unwrap_or_default())), "{what}: {warnings:?}");
        let engine = engine(&target, Level::best(None));
        assert_eq!(engine.spec().tied, model == "llama-tied", "{what}");
        let error = relative(&engine.score(&golden.ids).expect(what), &golden.logits);
        assert!(error <= 2e-3, "{what}: logits differ by {error:e}");
    };
    let none = Some("there is none: the embedding is used");
    let used = Some("lm_head.weight is there and is used");
    for (model, flag, warning) in [
        ("llama-tied", json!(true), None),
        ("llama-tied", Value::Null, None),
        ("llama-tied", json!(false), none),
        ("llama-untied", json!(false), None),
        ("llama-untied", Value::Null, None),
        ("llama-untied", json!(true), used),
    ] {
        let what = format!("{model}, flag {flag}");
        edited(model, &folder, |config, _| config["tie_word_embeddings"] = flag);
        check(model, &folder, warning, &what);
    }
    for model in ["llama-tied", "llama-untied"] {
        let file = dir.path().join("model.gguf");
        fs::write(&file, as_gguf(&source("tests/golden").join(model))).expect("written");
        check(model, &file, None, &format!("{model} as GGUF"));
    }
    for model in ["llama-tied", "llama-untied"] {
        edited(model, &folder, |_, tensors| {
            tensors.remove("model.embed_tokens.weight").expect("an embedding");
        });
        let error = convert(&folder, &target, 16).expect_err("there is no embedding");
        assert_eq!(error.kind, Kind::BadFile);
        assert!(error.message().contains("model.embed_tokens.weight is missing"), "{error}");
    }
}

/// A Llama of one layer with widths that are no multiple of a group, and noise for weights.
fn odd_widths(folder: &Path, hidden: usize, intermediate: usize) {
    let heads = hidden / 16;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": 1,
        "intermediate_size": intermediate, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 512,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": false,
    });
    let mut tensors = Tensors::new();
    let mut add = |name: &str, shape: &[usize]| {
        let count = shape.iter().product::<usize>();
        let sums = numbers(4 * count, 1 << 16);
        // Sums of four uniform numbers, about as wide as trained weights.
        let value = |four: &[u32]| (four.iter().sum::<u32>() as f32 / 65536.0 - 2.0) * 0.1;
        let values = sums.chunks_exact(4).map(|four| if shape.len() == 1 { 1.0 } else { value(four) });
        tensors.insert(name.to_owned(), (Dtype::F32, shape.to_vec(), values.flat_map(f32::to_le_bytes).collect()));
    };
    add("model.embed_tokens.weight", &[512, hidden]);
    add("lm_head.weight", &[512, hidden]);
    add("model.norm.weight", &[hidden]);
    for norm in ["input_layernorm", "post_attention_layernorm"] {
        add(&format!("model.layers.0.{norm}.weight"), &[hidden]);
    }
    for part in ["q", "k", "v", "o"] {
        add(&format!("model.layers.0.self_attn.{part}_proj.weight"), &[hidden, hidden]);
    }
    for part in ["gate", "up"] {
        add(&format!("model.layers.0.mlp.{part}_proj.weight"), &[intermediate, hidden]);
    }
    add("model.layers.0.mlp.down_proj.weight", &[hidden, intermediate]);
    write_folder(folder, &config, &tensors);
}

/// The relative error of a bundle's matrix, decoded here, against a matrix of the checkpoint.
fn round_trip(bundle: &Bundle, name: &str, checkpoint: &Checkpoint, source: &str) -> f64 {
    let weight = bundle.weight(name).expect(name);
    let tensor = checkpoint.tensor(source).expect(source);
    let mut expected = vec![0.0; tensor.elements()];
    tensor.read_rows(0..tensor.rows(), &mut expected).expect(source);
    let layout = CqLayout::new(weight.format, weight.rows, weight.cols).expect("a quantised matrix");
    let (mut row, mut noise, mut signal) = (vec![0.0; weight.cols], 0.0, 0.0);
    for (n, expected) in expected.chunks_exact(weight.cols).enumerate() {
        decode_row(&layout, &bundle.bytes()[weight.range.clone()], n, &mut row);
        noise += row.iter().zip(expected).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        signal += expected.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>();
    }
    (noise / signal).sqrt()
}

#[test]
fn p45_odd_widths_convert_and_the_report_names_them() {
    let dir = TempDir::new().expect("a folder");
    for (hidden, intermediate, padded) in
        [(112, 4304, &["down", "qkv", "out", "gate_up", "embed", "head"][..]), (128, 208, &["down"]), (128, 256, &[])]
    {
        let (folder, target) = (dir.path().join("model"), dir.path().join("bundle"));
        odd_widths(&folder, hidden, intermediate);
        let checkpoint = Checkpoint::open(&folder).expect("a checkpoint");
        convert(&folder, &target, 16).expect("16 bits");
        let ids = numbers(20, 512);
        let exact = engine(&target, Level::best(None)).score(&ids).expect("logits");
        // The error of the best levels for normally distributed weights (Max 1960), and a tenth more.
        for (bits, limit) in [(1, 0.603), (2, 0.343), (3, 0.186), (4, 0.0975), (8, 0.01)] {
            let what = format!("{hidden} and {intermediate} at {bits} bits");
            let (report, _) = convert(&folder, &target, bits).expect(&what);
            for tensor in &report.tensors {
                let leaf = tensor.name.rsplit('.').next().expect("a name");
                assert_eq!(tensor.padded, padded.contains(&leaf), "{what}: {}", tensor.name);
                let limit = if tensor.rows == 1 { 0.0 } else { limit * 1.1 };
                assert!(tensor.error.relative() <= limit, "{what}: {} has {}", tensor.name, tensor.error.relative());
            }
            let bundle = Bundle::open(&target).expect(&what);
            for (name, source) in [
                ("layers.0.mlp.down", "model.layers.0.mlp.down_proj.weight"),
                ("layers.0.attn.out", "model.layers.0.self_attn.o_proj.weight"),
            ] {
                let (found, reported) =
                    (round_trip(&bundle, name, &checkpoint, source), bundle.manifest.tensors[name].relative_error);
                assert!((found - reported).abs() <= 1e-3 * reported, "{what}: {name} has {found}, reported is {reported}");
            }
            if bits == 8 {
                let error = relative(&engine(&target, Level::best(None)).score(&ids).expect(&what), &exact);
                assert!(error < 0.05, "{what}: logits differ by {error}");
            }
        }
    }
}

#[test]
fn p45_program_lists_padded_tensors() {
    let home = Home::new();
    let folder = home.path().join("model");
    odd_widths(&folder, 128, 4304);
    let convert = |more: &[&str]| {
        let mut command = home.cactus(["convert", "--calibrate", "none"].iter().chain(more));
        finish(command.arg(&folder).arg(home.path().join("bundle"))).ok()
    };
    let table = convert(&[]);
    let rows: Vec<&str> = table.lines().filter(|line| line.contains("padded to whole groups")).collect();
    assert!(rows.len() == 1 && rows[0].starts_with("layers.0.mlp.down "), "{table}");
    let report: Value = serde_json::from_str(&convert(&["--json"])).expect("JSON");
    let tensors = report["tensors"].as_array().expect("tensors");
    let padded: Vec<&Value> = tensors.iter().filter(|t| t["padded"] == true).map(|t| &t["name"]).collect();
    assert_eq!(padded, ["layers.0.mlp.down"]);
}

#[test]
fn p48_quantised_checkpoints_are_refused_by_the_program() {
    let home = Home::new();
    let folder = home.path().join("model");
    let refused = |expected: &[&str]| {
        let mut command = home.cactus(["convert", "--quiet"]);
        let text = finish(command.arg(&folder).arg(home.path().join("out"))).failed(1);
        assert!(expected.iter().all(|part| text.contains(part)), "{expected:?} not all in: {text}");
        assert!(!home.path().join("out").exists());
    };
    for (method, config) in [
        ("fp8", json!({ "quant_method": "fp8", "weight_block_size": [128, 128] })),
        ("gptq", json!({ "quant_method": "gptq", "bits": 4, "group_size": 128 })),
        ("awq", json!({ "quant_method": "awq", "bits": 4 })),
        ("bitsandbytes", json!({ "load_in_8bit": true })),
        ("compressed-tensors", json!({ "quant_method": "compressed-tensors" })),
    ] {
        edited("llama-tied", &folder, |c, _| c["quantization_config"] = config);
        refused(&["already quantised with", method]);
    }
    // Without a word in the configuration.
    let matrix = "model.layers.0.mlp.down_proj";
    let with = |name: &str, dtype: Dtype, shape: &[usize], width: usize| {
        edited("llama-tied", &folder, |_, tensors| {
            let bytes = vec![0; shape.iter().product::<usize>() * width];
            tensors.insert(format!("{matrix}.{name}"), (dtype, shape.to_vec(), bytes));
        });
    };
    with("weight", Dtype::F8_E4M3, &[128, 256], 1);
    refused(&["fp8", matrix]);
    with("weight", Dtype::U8, &[128, 128], 1);
    refused(&["packed integers", matrix]);
    with("weight", Dtype::I8, &[128, 256], 1);
    refused(&["packed integers", matrix]);
    with("qweight", Dtype::I32, &[32, 128], 4);
    refused(&["gptq or awq", matrix]);
    with("weight_scale_inv", Dtype::F32, &[1, 2], 4);
    refused(&["fp8", matrix]);
    // A scale under a name that nobody knows must not be dropped either.
    for name in ["input_scale", "weight.scale", "smooth_factor"] {
        with(name, Dtype::F32, &[1], 4);
        refused(&[&format!("{matrix}.{name} has no place")]);
    }
    with("weight", Dtype::F64, &[128, 256], 8);
    refused(&["F64", "F32, F16 and BF16"]);
}

/// A bundle says what it was made from and with, and has the hash of its weights, so that another file under its name
/// is noticed.
#[test]
fn p50_bundles_can_be_told_apart() {
    let dir = TempDir::new().expect("a folder");
    let manifest = |model: &str, bits: u32| {
        let target = dir.path().join(model);
        convert(&source("tests/golden").join(model), &target, bits).expect("a bundle");
        let manifest = Bundle::open(&target).expect("a bundle").manifest;
        assert!(manifest.written_by.ends_with(env!("CARGO_PKG_VERSION")) && manifest.quantiser.bits.uniform() == Some(bits));
        let hash = Sha256::digest(fs::read(target.join("weights.safetensors")).expect("weights"));
        assert_eq!(manifest.weights_sha256, hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        manifest.weights_sha256
    };
    let first = manifest("llama-tied", 4);
    assert_eq!(manifest("llama-tied", 4), first);
    assert_ne!(manifest("llama-tied", 3), first);
    assert_ne!(manifest("llama3-rope", 4), first);
}

/// Every cut of a file that is mapped or read is found before anything is computed.
#[test]
fn p54_cut_files_are_refused_with_both_sizes() {
    let home = Home::new();
    let path = home.path().join("model");
    bundle(&source("tests/golden/llama-tied"), &path, 4);
    let weights = path.join("weights.safetensors");
    let whole = fs::read(&weights).expect("weights");
    let run = |model: &Path| home.run(["run", &model.to_string_lossy(), "--quiet", "--max-tokens", "3", "--prompt", "Hi"]);
    run(&path).ok();
    for cut in [0, 7, 100, 3000, whole.len() / 2, whole.len() - 64, whole.len() - 1] {
        fs::write(&weights, &whole[..cut]).expect("written");
        let text = run(&path).failed(1);
        assert!(text.contains("weights.safetensors") && text.contains("hint: "), "{cut}: {text}");
        if cut > whole.len() / 3 {
            assert!(text.contains(&cut.to_string()) && text.contains(&whole.len().to_string()), "{cut}: {text}");
        }
    }
    let (file, gguf) = (home.path().join("model.gguf"), as_gguf(&source("tests/golden/llama-tied")));
    for cut in [gguf.len() / 2, gguf.len() - 1] {
        fs::write(&file, &gguf[..cut]).expect("written");
        let text = run(&file).failed(1);
        for part in ["cut short", &cut.to_string(), &gguf.len().to_string(), "hint: download it again"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}

#[test]
fn p56_what_is_no_safetensors_file_is_named() {
    let home = Home::new();
    let folder = home.path().join("model");
    let run = |model: PathBuf| home.run(["run", &model.to_string_lossy(), "--quiet", "--prompt", "Hi"]).failed(1);
    edited("llama-tied", &folder, |_, _| {});
    let weights = folder.join("model.safetensors");
    let whole = fs::read(&weights).expect("weights");
    // A pickle that would make a file when loaded.
    let made = home.path().join("made");
    let pickle = format!("\x00\x02cos\nsystem\n(S'touch {}'\ntR.", made.display());
    let pickle = [&[0x80u8][..], &pickle.as_bytes()[1..]].concat();
    for (bytes, what) in [
        (&pickle[..], "a Python pickle"),
        (b"PK\x03\x04archive/data.pkl", "a zip archive"),
        (b"<!DOCTYPE html><html>Sign in</html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "a Git-LFS pointer"),
        (&whole[..whole.len() - 10], "short by 10 bytes"),
    ] {
        fs::write(&weights, bytes).expect("written");
        let text = run(folder.clone());
        assert!(text.contains("model.safetensors: ") && text.contains(what) && text.contains("hint: "), "{what}: {text}");
    }
    fs::remove_file(&weights).expect("removed");
    fs::write(folder.join("pytorch_model.bin"), &pickle).expect("written");
    let text = run(folder.clone());
    assert!(text.contains("pytorch_model.bin") && text.contains("never opened"), "{text}");
    assert!(!made.exists());
}
