//! From a bundle back to a Hugging Face checkpoint: the stored values, decoded, under the names and in the
//! shapes of the checkpoint that was converted. What quantisation took away stays away.

use super::Bundle;
use super::bundle::{self, TensorEntry};
use super::config::Config;
use super::source::plain;
use super::staging::Staging;
use crate::error::{Error, Kind, Result};
use crate::graph::Weight;
use crate::hub::cache::check_room;
use crate::quant::Format;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

/// Says in a folder what was exported to it, and that it may be replaced.
pub const MARK: &str = "cactus_export.json";
/// Most bytes of tensors in a file of its own, unless a single tensor has more.
pub const SHARD_BYTES: u64 = 4_000_000_000;
/// Values that are decoded at a time.
const BLOCK_VALUES: usize = 1 << 20;

/// How to export.
#[derive(Clone, Debug)]
pub struct Options {
    /// `F32`, `F16` or `BF16` for every tensor; `None`: as the bundle stores it, f16 for what is quantised.
    pub dtype: Option<Format>,
    /// See [`SHARD_BYTES`].
    pub shard_bytes: u64,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Report {
    pub tensors: usize,
    pub files: usize,
    /// Of all tensors.
    pub bytes: u64,
}

/// What happens while exporting. An error from the handler ends the work, and nothing is left of it.
pub enum Event {
    /// Work begins: bytes to write in all.
    Start { bytes: u64 },
    /// So many more bytes are written.
    Advance(u64),
}

/// A checkpoint tensor: rows of a bundle tensor, or of one in parts.
struct Part {
    name: String,
    shape: Vec<usize>,
    format: Format,
    weight: Arc<Stack>,
    /// The first row in the bundle tensor; of a vector, the first element.
    first: usize,
    left_out: f32,
}

/// A bundle tensor, or its parts, one below the other: where each begins.
struct Stack(Vec<(usize, Weight)>);

impl Stack {
    fn row(&self, bundle: &Bundle, row: usize, out: &mut [f32]) {
        let part = self.0.partition_point(|(first, _)| *first <= row) - 1;
        let (first, weight) = &self.0[part];
        weight.row(bundle.bytes(), row - first, out);
    }
}

/// Writes the weights of `bundle` to the folder `target` as a checkpoint that `transformers` loads. The folder
/// must not exist or be an earlier export (it is replaced).
///
/// # Errors
/// `Unsupported` for a bundle that does not tell what its tensors were called, and for values beyond f16.
pub fn export(
    bundle: &Bundle,
    target: &Path,
    options: &Options,
    on_event: &mut dyn FnMut(Event) -> Result<()>,
) -> Result<Report> {
    if let Some(format) = options.dtype.filter(|f| f.is_quantised()) {
        return Err(Error::usage(format!("{format} is no type of a checkpoint (supported: f32, f16, bf16)")));
    }
    if target.exists() && !target.join(MARK).is_file() {
        return Err(Error::usage(format!("{} exists and is no export; it will not be overwritten", target.display())));
    }
    let config = bundle.source_config()?.ok_or_else(|| too_old(bundle))?;
    let config = exported_config(config, bundle, options)?;
    let shards = shards(parts(bundle, options)?, options.shard_bytes);
    let bytes = shards.iter().flatten().map(Part::bytes).sum();
    check_room(target, bytes, "the exported model")?;
    let staging = Staging::create(target)?;
    on_event(Event::Start { bytes })?;

    let mut homes = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        write_shard(bundle, shard, &staging.dir.join(&file), on_event)?;
        homes.extend(shard.iter().map(|part| (part.name.clone(), json!(file))));
    }
    let tensors = homes.len();
    if shards.len() > 1 {
        let index = json!({ "metadata": { "total_size": bytes }, "weight_map": homes });
        staging.write("model.safetensors.index.json", &text(&index))?;
    }
    staging.write("config.json", &text(&config))?;
    write_tokenizer(bundle, &staging)?;
    let manifest = &bundle.manifest;
    let mark = json!({
        "written_by": format!("cactus {}", env!("CARGO_PKG_VERSION")),
        "source": manifest.source,
        "bits": manifest.quantiser.bits,
        "bits_per_weight": manifest.quantiser.bits_per_weight,
        "weights_sha256": manifest.weights_sha256,
    });
    staging.write(MARK, &text(&mark))?;
    staging.publish(target)?;
    Ok(Report { tensors, files: shards.len(), bytes })
}

fn too_old(bundle: &Bundle) -> Error {
    Error::unsupported(format!("{}: the bundle does not tell what its checkpoint was like", bundle.path.display()))
        .with_hint("it was converted by an older version; convert the model again")
}

/// The checkpoint tensors that the bundle holds.
fn parts(bundle: &Bundle, options: &Options) -> Result<Vec<Part>> {
    let path = bundle.path.join(bundle::MANIFEST);
    let (mut parts, mut names) = (Vec::new(), BTreeSet::new());
    // Parts of a table have the same sources.
    let mut stacks: BTreeMap<&str, Vec<(&String, &TensorEntry)>> = BTreeMap::new();
    for (name, entry) in &bundle.manifest.tensors {
        let source = entry.sources.first().ok_or_else(|| too_old(bundle))?;
        stacks.entry(&source.name).or_default().push((name, entry));
    }
    for mut stack in stacks.into_values() {
        stack.sort_by_key(|(_, entry)| entry.first_row);
        let (name, entry) = stack[0];
        let wrong = || Error::bad_file(&path, format!("the sources of tensor {name} do not fit its shape"));
        let mut rows_in_all = 0usize;
        let mut weights = Vec::new();
        for (name, part) in &stack {
            let same = part.sources == entry.sources && part.cols == entry.cols && part.left_out == entry.left_out;
            if part.first_row != rows_in_all || !same {
                return Err(Error::bad_file(&path, format!("tensor {name} does not follow the part before it")));
            }
            weights.push((rows_in_all, bundle.weight(name)?));
            rows_in_all = rows_in_all.checked_add(part.rows).ok_or_else(wrong)?;
        }
        let weight = Arc::new(Stack(weights));
        let mut first = 0usize;
        let mut vector = false;
        for source in &entry.sources {
            let rows = match source.shape[..] {
                [rows] if rows_in_all == 1 => {
                    vector = true;
                    rows
                }
                [rows, cols] if cols == entry.cols && !vector => rows,
                _ => return Err(wrong()),
            };
            if source.name == "__metadata__" || !names.insert(source.name.clone()) {
                return Err(Error::bad_file(&path, format!("two tensors have the source {}", source.name)));
            }
            let stored = if entry.format.is_quantised() { Format::F16 } else { entry.format };
            parts.push(Part {
                name: source.name.clone(),
                shape: source.shape.clone(),
                format: options.dtype.unwrap_or(stored),
                weight: weight.clone(),
                first,
                left_out: entry.left_out,
            });
            first = first.checked_add(rows).ok_or_else(wrong)?;
        }
        if first != if vector { entry.cols } else { rows_in_all } {
            return Err(wrong());
        }
    }
    Ok(parts)
}

/// Cuts the list where a file would become larger than `limit` bytes.
fn shards(parts: Vec<Part>, limit: u64) -> Vec<Vec<Part>> {
    let mut shards: Vec<Vec<Part>> = Vec::new();
    let mut held = 0;
    for part in parts {
        match shards.last_mut().filter(|_| held + part.bytes() <= limit) {
            Some(shard) => {
                held += part.bytes();
                shard.push(part);
            }
            None => {
                held = part.bytes();
                shards.push(vec![part]);
            }
        }
    }
    shards
}

impl Part {
    /// Rows that are decoded at once, and their width: those of the bundle tensor, or a whole vector.
    fn grid(&self) -> (usize, usize) {
        if self.shape.len() == 1 { (1, self.shape[0]) } else { (self.shape[0], self.shape[1]) }
    }

    /// Size in the file. Shapes are those of parts of a mapped tensor.
    fn bytes(&self) -> u64 {
        let (rows, width) = self.grid();
        rows as u64 * width as u64 * (self.format.bits() / 8) as u64
    }

    fn dtype(&self) -> &'static str {
        match self.format {
            Format::F32 => "F32",
            Format::F16 => "F16",
            _ => "BF16",
        }
    }

    /// Row `row` in the type of the file.
    fn row(&self, bundle: &Bundle, row: usize) -> Result<Vec<u8>> {
        let mut values = vec![0.0; self.weight.0[0].1.cols];
        if self.shape.len() == 1 {
            self.weight.row(bundle, 0, &mut values);
            values = values[self.first..self.first + self.shape[0]].to_vec();
        } else {
            self.weight.row(bundle, self.first + row, &mut values);
        }
        values.iter_mut().for_each(|v| *v -= self.left_out);
        if self.format == Format::F16
            && let Some(large) = values.iter().find(|v| !half::f16::from_f32(**v).is_finite())
        {
            return Err(Error::unsupported(format!("tensor {} holds {large}, which f16 cannot", self.name))
                .with_hint("export as bf16 or f32"));
        }
        Ok(plain(self.format, &values).0)
    }
}

fn write_shard(bundle: &Bundle, parts: &[Part], path: &Path, on_event: &mut dyn FnMut(Event) -> Result<()>) -> Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut offset = 0;
    for part in parts {
        let end = offset + part.bytes();
        header.insert(part.name.clone(), json!({ "dtype": part.dtype(), "shape": part.shape, "data_offsets": [offset, end] }));
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    let failed = |e: std::io::Error| Error::io("write", path, &e);
    let file = File::create(path).map_err(|e| Error::io("create", path, &e))?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    file.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| file.write_all(&header)).map_err(failed)?;
    for part in parts {
        let (rows, width) = part.grid();
        let block = (BLOCK_VALUES / width.max(1)).max(1);
        for start in (0..rows).step_by(block) {
            let done: Vec<Vec<u8>> =
                (start..rows.min(start + block)).into_par_iter().map(|row| part.row(bundle, row)).collect::<Result<_>>()?;
            for bytes in &done {
                file.write_all(bytes).map_err(failed)?;
            }
            on_event(Event::Advance(done.iter().map(|bytes| bytes.len() as u64).sum()))?;
        }
    }
    file.into_inner().map_err(|e| failed(e.into_error()))?.sync_all().map_err(failed)
}

/// The checkpoint's configuration, made to tell the truth about the exported weights.
fn exported_config(mut config: Value, bundle: &Bundle, options: &Options) -> Result<Value> {
    let spec = bundle.manifest.decoder()?;
    if config["rope_scaling"]["rope_type"] == "factors" {
        config["rope_scaling"] = llama3_scaling(&config, spec.ropes.first().map_or(&[], |r| &r.frequencies[..]))?;
    }
    let Value::Object(map) = &mut config else {
        return Err(Error::bad_file(&bundle.path.join(bundle::SOURCE_CONFIG), "not a JSON object"));
    };
    map.insert("tie_word_embeddings".to_owned(), json!(spec.tied));
    let name = match options.dtype {
        Some(Format::F16) => Some("float16"),
        Some(Format::BF16) => Some("bfloat16"),
        Some(_) => Some("float32"),
        // What a loader computes in is the model's choice (f16 is too small for some); f32 is always right.
        None if map.contains_key("dtype") || map.contains_key("torch_dtype") => None,
        None => Some("float32"),
    };
    if let Some(name) = name {
        map.remove("dtype");
        map.insert("torch_dtype".to_owned(), json!(name));
    }
    Ok(config)
}

/// GGUF lists the divisors of the rotary frequencies, which `transformers` has no rule for. Those of Llama 3.1
/// and later come from its rule "llama3", with the constants of the released models; others are refused.
fn llama3_scaling(config: &Value, frequencies: &[f32]) -> Result<Value> {
    let factors = config["rope_scaling"]["factors"].as_array();
    let largest = factors.into_iter().flatten().filter_map(Value::as_f64).fold(1.0, f64::max);
    let scaling = json!({
        "rope_type": "llama3", "factor": largest, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let mut candidate = config.clone();
    candidate["rope_scaling"] = scaling.clone();
    let rope = Config(&candidate).rope(2 * frequencies.len(), None)?.rope;
    let agree = rope.frequencies.iter().zip(frequencies).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs());
    if agree {
        return Ok(scaling);
    }
    Err(Error::new(Kind::Unsupported, "the rotary frequencies have divisors of their own, which no config.json can tell")
        .with_hint("convert the Hugging Face checkpoint of the model and export that"))
}

fn write_tokenizer(bundle: &Bundle, staging: &Staging) -> Result<()> {
    let from = bundle.path.join(bundle::TOKENIZER);
    let to = staging.dir.join(bundle::TOKENIZER);
    std::fs::copy(&from, &to).map_err(|e| Error::io("copy", &from, &e))?;
    let mut config = bundle.tokenizer_config.clone();
    if let Value::Object(map) = &mut config
        && !map.contains_key("tokenizer_class")
    {
        // Reads tokenizer.json as it stands; the classes of single models build parts of it anew.
        map.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
    }
    staging.write(bundle::TOKENIZER_CONFIG, &text(&config))?;
    if let Some(template) = &bundle.chat_template {
        staging.write(bundle::CHAT_TEMPLATE, template)?;
    }
    if let Some(generation) = &bundle.generation_config {
        staging.write(bundle::GENERATION_CONFIG, &text(generation))?;
    }
    Ok(())
}

/// Pretty JSON, with a line feed at the end.
fn text(value: &Value) -> String {
    format!("{value:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The divisors that llama.cpp's converter writes for Llama 3.2 1B, after
    /// <https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py>.
    fn divisors(factor: f64) -> Vec<f64> {
        let one = |i: usize| {
            let wavelength = std::f64::consts::TAU * 500_000f64.powf(2.0 * i as f64 / 64.0);
            if wavelength < 8192.0 / 4.0 {
                1.0
            } else if wavelength > 8192.0 {
                factor
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        (0..32).map(one).collect()
    }

    #[test]
    fn divisors_of_llama3_become_its_rule() {
        let config = |factors: &[f64]| {
            json!({
                "rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": { "rope_type": "factors", "factors": factors },
            })
        };
        let frequencies = |config: &Value| Config(config).rope(64, None).unwrap().rope.frequencies;
        for factor in [8.0, 32.0] {
            let config = config(&divisors(factor));
            let scaling = llama3_scaling(&config, &frequencies(&config)).unwrap();
            assert_eq!((&scaling["rope_type"], scaling["factor"].as_f64()), (&json!("llama3"), Some(factor)));
        }
        let mut other = divisors(8.0);
        other[20] *= 1.1;
        let config = config(&other);
        assert!(llama3_scaling(&config, &frequencies(&config)).is_err());
    }
}
