//! An official folder as a checkpoint: its files under Hugging Face names, with the values that the checkpoint had
//! before its makers scaled and padded them.

use super::names::FileName;
use super::{Precision, Tensor, Undo, WeightsFile};
use crate::error::{Error, Result};
use crate::model::import::folder::{list, parse_json, read_json, read_text};
use crate::model::import::folder_tokenizer;
use crate::model::import::{Checkpoint, Encoding, RowOrder, SourceTensor, TokenizerFiles, gguf};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// What every such folder has; settings, a line each, without the nested ones.
const SETTINGS: &str = "config.txt";

/// Whether `dir` is such a folder.
pub(in crate::model::import) fn holds(dir: &Path) -> bool {
    let weights = || list(dir).is_ok_and(|names| names.iter().any(|name| name.ends_with(".weights")));
    dir.join(SETTINGS).is_file() && weights()
}

pub(in crate::model::import) fn open(dir: &Path) -> Result<Checkpoint> {
    let settings = read_text(&dir.join(SETTINGS))?.unwrap_or_default();
    let family = settings.lines().find_map(|line| line.strip_prefix("model_type=")).unwrap_or("").trim();
    if !matches!(family, "qwen" | "gemma3" | "generic") {
        return Err(Error::unsupported(format!(
            "{}: model type {family:?} of an official bundle is not supported (supported: qwen, gemma3, generic)",
            dir.display()
        ))
        .with_hint("convert the checkpoint that it was made from"));
    }
    let rows = manifest(dir)?;
    let mut tensors = BTreeMap::new();
    let mut ranks = BTreeMap::new();
    for file in list(dir)? {
        let Some(name) = FileName::parse(&file) else { continue };
        let key = name.hugging_face();
        match ranks.get(&key) {
            // The same tensor at another width.
            Some((rank, _)) if *rank < name.rank => continue,
            Some((rank, other)) if *rank == name.rank => {
                return Err(Error::bad_file(dir, format!("{file} and {other} are the same tensor")));
            }
            _ => {}
        }
        let tensor = source(&dir.join(&file), &name, rows.get(&file), family)?;
        ranks.insert(key.clone(), (name.rank, file.clone()));
        tensors.insert(key, tensor);
    }
    let (tokenizer, generation) = tokenizer(dir)?;
    let config = config(dir)?;
    let sentence = Default::default();
    Ok(Checkpoint { path: dir.to_path_buf(), config, generation, tokenizer, tensors, norms_include_one: false, sentence })
}

/// What the manifest says about a file.
#[derive(Debug, Default)]
struct Row {
    /// Before padding.
    shape: Option<Vec<usize>>,
    /// Factor that was put on the values.
    factor: Option<f32>,
}

/// Rows by file name; empty without a manifest.
fn manifest(dir: &Path) -> Result<BTreeMap<String, Row>> {
    let names = ["conversion_manifest.json", "weights_manifest.json"];
    let mut rows = BTreeMap::new();
    for path in names.map(|name| dir.join(name)) {
        let Some(text) = read_text(&path)? else { continue };
        let value: Value = parse_json(&path, &text)?;
        let list = value.as_array().or_else(|| value["weights"].as_array());
        for row in list.into_iter().flatten() {
            let file = ["output_file", "output_name"].iter().find_map(|key| row[key].as_str());
            let Some(file) = file else { continue };
            let bad = |what: &str| Error::bad_file(&path, format!("{what} of {file} is {:.60}", row[what].to_string()));
            let sizes = |list: &Vec<Value>| list.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect();
            let shape = match &row["shape"] {
                Value::Null => None,
                shape => Some(shape.as_array().and_then(sizes).ok_or_else(|| bad("shape"))?),
            };
            let factor = match &row["scale_factor"] {
                Value::Null => None,
                factor => {
                    let usable = |factor: &f64| factor.is_finite() && (1e-6..1e6).contains(&factor.abs());
                    Some(factor.as_f64().filter(usable).ok_or_else(|| bad("scale_factor"))? as f32)
                }
            };
            rows.insert(file.to_owned(), Row { shape, factor });
        }
        break;
    }
    Ok(rows)
}

fn source(path: &Path, name: &FileName, row: Option<&Row>, family: &str) -> Result<SourceTensor> {
    let file = WeightsFile::open(path)?;
    let factor = row.and_then(|row| row.factor);
    let undo = match family {
        "gemma3" => name.undo_gemma3(factor),
        _ => Undo { offset: 0.0, factor: 1.0 / factor.unwrap_or(1.0) },
    };
    let stored = file.shape();
    let mut shape = stored.clone();
    if let Some(wanted) = row.and_then(|row| row.shape.as_ref()).filter(|wanted| **wanted != stored) {
        let padded = matches!((&wanted[..], &stored[..]), ([n, k], [rows, cols]) if n == rows && (1..=*cols).contains(k));
        if !(padded && matches!(file, WeightsFile::Cq(_))) {
            return Err(Error::bad_file(path, format!("holds a shape of {stored:?}, the manifest means {wanted:?}")));
        }
        shape.clone_from(wanted);
    }
    let header = file.header();
    if header.transposed && stored.len() > 1 {
        return Err(Error::unsupported(format!("{}: a transposed matrix is not supported", path.display())));
    }
    let encoding = match header.precision {
        Precision::F32 if undo == Undo::NOTHING => Encoding::F32,
        Precision::F16 if undo == Undo::NOTHING => Encoding::F16,
        precision => Encoding::Official(precision.bits()),
    };
    let (weights, offset) = (header.file.clone(), header.data.start);
    let width = |shape: &[usize]| if shape.len() < 2 { shape.iter().product() } else { shape[1..].iter().product() };
    let tensor = Tensor { undo, width: width(&shape), stored_width: width(&stored), file };
    let official = Some(Arc::new(tensor));
    Ok(SourceTensor { shape, encoding, order: RowOrder::Plain, file: weights, offset, official })
}

/// The configuration of the checkpoint: its own file, or what the makers merged from it.
fn config(dir: &Path) -> Result<Value> {
    if let Some(config) = read_json(&dir.join("config.json"))? {
        return Ok(config);
    }
    let Some(mut config) = read_json(&dir.join("hf_config.json"))? else {
        return Err(Error::not_found(format!("{}: there is neither config.json nor hf_config.json", dir.display()))
            .with_hint("config.txt leaves nested settings out; put the config.json of the original model into the folder"));
    };
    // There it has the makers' word for the family.
    let class = config["architectures"][0].as_str();
    if let Some(kind) = class.and_then(gguf::model_type) {
        config["model_type"] = json!(kind);
    }
    Ok(config)
}

/// Tokenizer files and generation settings. What the makers delete of the original ones stands in their own.
fn tokenizer(dir: &Path) -> Result<(TokenizerFiles, Option<Value>)> {
    let mut files = folder_tokenizer::read(dir)?;
    let special = read_json(&dir.join("special_tokens.json"))?.unwrap_or_else(|| json!({}));
    if files.config.as_object().is_none_or(Map::is_empty) {
        let mut config = Map::new();
        for name in ["bos_token", "eos_token", "pad_token", "unk_token"] {
            let id = special[format!("{name}_id")].as_u64().map(|id| id.to_string());
            let text = id.and_then(|id| special["special_tokens"][id].as_str());
            config.extend(text.map(|text| (name.to_owned(), json!(text))));
        }
        files.config = Value::Object(config);
    }
    if files.chat_template.is_none() {
        let own = read_text(&dir.join("chat_template.jinja2"))?;
        files.chat_template = own.or_else(|| special["chat_template"].as_str().map(str::to_owned));
    }
    let generation = match read_json(&dir.join("generation_config.json"))? {
        None if special["eos_token_id"].is_u64() => Some(json!({ "eos_token_id": special["eos_token_id"] })),
        own => own,
    };
    Ok((files, generation))
}
