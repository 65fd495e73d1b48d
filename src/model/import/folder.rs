//! Opening a Hugging Face model folder: `config.json`, the weights in one or several `.safetensors` files,
//! and the tokenizer (see [`super::folder_tokenizer`]).

use super::safetensors::{self, Tensors, UniqueMap};
use super::{Checkpoint, folder_tokenizer, sentence};
use crate::error::{Error, Kind, Result};
use ::safetensors::tensor::Dtype;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Longest JSON or text file that is read, in bytes. The largest published `tokenizer.json` files have some 35 MB.
const MAX_TEXT_BYTES: u64 = 512 << 20;

/// Opens the model in `dir`. A folder that holds no safetensors but exactly one `.gguf` opens that file.
pub(super) fn open(dir: &Path) -> Result<Checkpoint> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let weights = match find_weights(dir)? {
        Weights::Gguf(path) => return super::gguf::open(&path),
        Weights::Safetensors(weights) => weights,
    };
    let config = read_json(&dir.join("config.json"))?.ok_or_else(|| {
        Error::not_found(format!("{}: there is no config.json", dir.display()))
            .with_hint("a model folder holds config.json beside its weights; download the whole repository")
    })?;
    let generation = read_json(&dir.join("generation_config.json"))?;
    refuse_quantised_config(dir, &config)?;
    let tensors = read_tensors(dir, &weights)?;
    let tokenizer = folder_tokenizer::read(dir)?;
    let sentence = sentence::read(dir)?;
    Ok(Checkpoint { path: dir.to_path_buf(), config, generation, tokenizer, tensors, norms_include_one: false, sentence })
}

/// The JSON object in `path`, or `None` when there is no such file.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    let value: Value = parse_json(path, &text)?;
    if !value.is_object() {
        return Err(Error::bad_file(path, "not a JSON object"));
    }
    Ok(Some(value))
}

/// Parses `text`, the content of `path`. The error tells line and column.
pub(super) fn parse_json<'a, T: Deserialize<'a>>(path: &Path, text: &'a str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::bad_file(path, format!("invalid JSON: {e}")))
}

/// The text of `path`, or `None` when there is no such file.
pub(super) fn read_text(path: &Path) -> Result<Option<String>> {
    let Some(bytes) = read_bytes(path)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|_| Error::bad_file(path, "not UTF-8 text"))
}

/// The bytes of a small file, or `None` when it does not exist. What is not the file itself (a Git-LFS pointer,
/// a web page) is an error.
pub(super) fn read_bytes(path: &Path) -> Result<Option<Vec<u8>>> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("open", path, &e)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, &e))?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        return Err(Error::bad_file(path, "far too large for what it should be"));
    }
    match safetensors::foreign(&bytes[..bytes.len().min(64)]) {
        Some((what, hint)) => Err(Error::bad_file(path, format!("this is {what}")).with_hint(hint)),
        None => Ok(Some(bytes)),
    }
}

enum Weights {
    Safetensors(Shards),
    Gguf(PathBuf),
}

/// The safetensors files of one model.
#[derive(Default)]
struct Shards {
    files: Vec<PathBuf>,
    /// The index file and what it says: tensor name to number in `files`.
    index: Option<(PathBuf, BTreeMap<String, usize>)>,
}

/// Decides which files of the folder are the model. As in transformers, `model.safetensors` comes before an index.
fn find_weights(dir: &Path) -> Result<Weights> {
    let names = list(dir)?;
    let ending = |end: &str| names.iter().filter(|n| n.ends_with(end)).map(String::as_str).collect::<Vec<_>>();
    let one = |name: &str| Ok(Weights::Safetensors(Shards { files: vec![dir.join(name)], index: None }));
    if names.contains("model.safetensors") {
        return one("model.safetensors");
    }
    match ending(".safetensors.index.json")[..] {
        [] => {}
        [name] => return indexed(dir, name),
        _ if names.contains("model.safetensors.index.json") => return indexed(dir, "model.safetensors.index.json"),
        ref several => return Err(ambiguous(dir, several)),
    }
    if names.contains("adapter_config.json") {
        return Err(Error::unsupported(format!("{}: an adapter (LoRA), not a whole model", dir.display()))
            .with_hint("merge it into its base model (merge_and_unload in peft) and convert the result"));
    }
    match ending(".safetensors")[..] {
        [] => {}
        [name] if numbered(name).is_none() => return one(name),
        ref several => return numbered_set(dir, several),
    }
    match ending(".gguf")[..] {
        [] => {}
        [name] => return Ok(Weights::Gguf(dir.join(name))),
        ref several => {
            return Err(Error::usage(format!("{}: several GGUF files: {}", dir.display(), several.join(", ")))
                .with_hint("give the path of the one to open"));
        }
    }
    let unread = [".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz"];
    // training_args.bin and the like lie beside the weights of other formats.
    if let Some(name) = names.iter().find(|n| unread.iter().any(|e| n.ends_with(e)) && !n.starts_with("training_args")) {
        return Err(Error::unsupported(format!(
            "{}: weights are only there as {name}; safetensors and GGUF can be read",
            dir.display()
        ))
        .with_hint(
            "pickle can run code when loaded and is never opened; take a revision of the repository that has safetensors, \
             or load the model with transformers and save it with save_pretrained",
        ));
    }
    Err(Error::not_found(format!(
        "{}: no weights (looked for model.safetensors, model.safetensors.index.json, another .safetensors file, a .gguf file)",
        dir.display()
    )))
}

/// Names of the files in `dir`, sorted. Names that are not Unicode are none we look for.
pub(super) fn list(dir: &Path) -> Result<BTreeSet<String>> {
    let failed = |e: std::io::Error| Error::io("read", dir, &e);
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string().ok());
    }
    Ok(names)
}

fn ambiguous(dir: &Path, names: &[&str]) -> Error {
    Error::bad_file(dir, format!("it is not clear which of these files is the model: {}", names.join(", ")))
        .with_hint("keep one of them, named model.safetensors, or add model.safetensors.index.json")
}

/// Splits `prefix-00002-of-00005.safetensors` into prefix, number and count.
fn numbered(name: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| (digits.len() == 5).then(|| digits.parse().ok())?;
    Some((prefix, parse(number)?, parse(count)?))
}

/// Numbered shards without an index: the whole set, or an error naming the first that is missing.
fn numbered_set(dir: &Path, names: &[&str]) -> Result<Weights> {
    let Some((prefix, _, count)) = names.first().and_then(|n| numbered(n)) else { return Err(ambiguous(dir, names)) };
    if names.iter().any(|n| numbered(n).is_none_or(|(p, number, c)| (p, c) != (prefix, count) || !(1..=c).contains(&number))) {
        return Err(ambiguous(dir, names));
    }
    if names.len() < count as usize {
        let of = |number: u32| format!("{prefix}-{number:05}-of-{count:05}.safetensors");
        let first = (1..=count).map(of).find(|n| !names.contains(&n.as_str())).unwrap_or_default();
        return Err(missing(&dir.join(first), count as usize - names.len(), count as usize));
    }
    Ok(Weights::Safetensors(Shards { files: names.iter().map(|n| dir.join(n)).collect(), index: None }))
}

fn missing(first: &Path, missing: usize, count: usize) -> Error {
    Error::not_found(format!("{}: this weight file is missing ({missing} of {count} are)", first.display()))
        .with_hint("download the whole repository")
}

/// The shards that an index names. They may lie in sub-folders of the model folder, never outside it.
fn indexed(dir: &Path, name: &str) -> Result<Weights> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: UniqueMap<String>,
    }
    let path = dir.join(name);
    let text = read_text(&path)?.unwrap_or_default();
    let UniqueMap(map) = parse_json::<Index>(&path, &text)?.weight_map;
    let names: BTreeSet<&String> = map.values().collect();
    if names.is_empty() {
        return Err(Error::bad_file(&path, "the index names no tensors"));
    }
    for name in &names {
        let inside = Path::new(name).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
        if name.is_empty() || !inside || name.contains(['\\', '\0']) {
            return Err(Error::bad_file(&path, format!("shard name {name:?} leads out of the folder")));
        }
    }
    let absent: Vec<_> = names.iter().filter(|n| !dir.join(n).is_file()).collect();
    if let Some(first) = absent.first() {
        return Err(missing(&dir.join(first), absent.len(), names.len()));
    }
    let number: BTreeMap<&String, usize> = names.iter().enumerate().map(|(i, n)| (*n, i)).collect();
    let index = map.iter().map(|(tensor, file)| (tensor.clone(), number[file])).collect();
    let files = names.iter().map(|n| dir.join(n)).collect();
    Ok(Weights::Safetensors(Shards { files, index: Some((path, index)) }))
}

/// Opens all shards and joins their tensors, leaving out buffers that hold no weights.
fn read_tensors(dir: &Path, shards: &Shards) -> Result<BTreeMap<String, super::SourceTensor>> {
    let mut all = Tensors { floats: BTreeMap::new(), other: BTreeMap::new() };
    // Number in `files` of the shard that holds a tensor.
    let mut home: BTreeMap<String, usize> = BTreeMap::new();
    for (i, path) in shards.files.iter().enumerate() {
        let tensors = safetensors::open(path)?;
        for name in tensors.floats.keys().chain(tensors.other.keys()) {
            if let Some(first) = home.insert(name.clone(), i) {
                let first = shards.files[first].display();
                return Err(Error::bad_file(path, format!("tensor {name} is also in {first}")));
            }
        }
        all.floats.extend(tensors.floats);
        all.other.extend(tensors.other);
    }
    if let Some((index_path, index)) = &shards.index {
        for (name, &file) in index {
            if home.get(name) != Some(&file) {
                let file = shards.files[file].display();
                return Err(Error::bad_file(index_path, format!("tensor {name} is listed in {file} but is not there")));
            }
        }
    }
    refuse_quantised_tensors(dir, &all)?;
    all.floats.retain(|name, tensor| !is_buffer(name, tensor.shape.len()));
    match all.other.iter().find(|(name, dtype)| !is_buffer(name, 0) && !is_counter(name, **dtype)) {
        None => Ok(all.floats),
        Some((name, dtype)) => Err(Error::unsupported(format!(
            "{}: tensor {name} is stored as {dtype}; F32, F16 and BF16 can be read",
            dir.display()
        ))),
    }
}

/// Constant tables that some checkpoints carry along: rotary frequencies, position numbers, causal masks.
fn is_buffer(name: &str, rank: usize) -> bool {
    let leaf = name.rsplit('.').next().unwrap_or(name);
    // GPT-2 type masks are [1, 1, n, n]; a real bias is a vector.
    matches!(leaf, "inv_freq" | "position_ids" | "masked_bias") || (name.ends_with(".attn.bias") && rank != 1)
}

/// Integer state such as batch-norm step counts and token tables: never a matrix of the model.
fn is_counter(name: &str, dtype: Dtype) -> bool {
    matches!(dtype, Dtype::I64 | Dtype::BOOL) && !name.ends_with("weight")
}

fn quantised(dir: &Path, method: &str, evidence: &str) -> Error {
    Error::new(
        Kind::Unsupported,
        format!("{}: the checkpoint is already quantised with {method} ({evidence}), which cannot be read", dir.display()),
    )
    .with_hint("convert the original F32, F16 or BF16 checkpoint that it was made from, or a GGUF file of the model")
}

/// Refuses a checkpoint whose config declares a quantisation method, for the whole model or its text part.
fn refuse_quantised_config(dir: &Path, config: &Value) -> Result<()> {
    for part in [config, &config["text_config"], &config["llm_config"]] {
        for key in ["quantization_config", "compression_config", "quantization"] {
            let declared = &part[key];
            if !declared.is_object() {
                continue;
            }
            let flag = |key: &str| declared[key] == true;
            let method = match declared["quant_method"].as_str() {
                Some(method) => method,
                None if flag("load_in_4bit") || flag("load_in_8bit") => "bitsandbytes",
                None if key == "compression_config" => "compressed-tensors",
                None if key == "quantization" && declared["group_size"].is_u64() => "mlx",
                None => "an unnamed method",
            };
            return Err(quantised(dir, method, &format!("{key} in config.json")));
        }
    }
    Ok(())
}

/// Refuses a checkpoint whose tensors are the parts of a quantised format, whatever its config says.
fn refuse_quantised_tensors(dir: &Path, tensors: &Tensors) -> Result<()> {
    const PARTS: [(&str, &str); 11] = [
        (".qweight", "gptq or awq"),
        (".qzeros", "gptq or awq"),
        (".scales", "gptq, awq or mlx"),
        (".weight_scale_inv", "fp8"),
        (".weight_packed", "compressed-tensors"),
        (".weight_scale", "fp8 or compressed-tensors"),
        (".absmax", "bitsandbytes"),
        (".quant_map", "bitsandbytes"),
        (".SCB", "bitsandbytes"),
        ("_proj_blocks", "mxfp4"),
        ("_proj_scales", "mxfp4"),
    ];
    for name in tensors.floats.keys().chain(tensors.other.keys()) {
        if let Some((_, method)) = PARTS.iter().find(|(end, _)| name.ends_with(end)) {
            return Err(quantised(dir, method, &format!("tensor {name}")));
        }
    }
    for (name, dtype) in &tensors.other {
        let method = match dtype {
            Dtype::F8_E4M3 | Dtype::F8_E5M2 | Dtype::F8_E8M0 | Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ => "fp8",
            Dtype::F4 | Dtype::F6_E2M3 | Dtype::F6_E3M2 => "a microscaling format",
            Dtype::U8 | Dtype::I8 | Dtype::U32 | Dtype::I32 if name.ends_with("weight") => "packed integers",
            _ => continue,
        };
        return Err(quantised(dir, method, &format!("tensor {name} is {dtype}")));
    }
    Ok(())
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
