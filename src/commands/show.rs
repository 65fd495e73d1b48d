//! `cactus show`: what a model is. A converted one is told about first, then a checkpoint on this machine; only a
//! model that is not here is asked for on the hub.

use super::Outcome;
use super::model_options::ModelArgs;
use super::terminal::{self, Terminal};
use cactus::error::Result;
use cactus::hub::{self, Official, cache, catalog};
use cactus::model::import::Checkpoint;
use cactus::model::spec::Spec;
use cactus::model::{Bundle, families};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Ask the hub as well, also about official bundles, when the model is here
    #[arg(long)]
    hub: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Outcome {
    let terminal = Terminal::new(false);
    let name = args.model.name();
    let local = local(args, name)?;
    let mut about = Map::new();
    if let Some(local) = &local {
        about.extend(local.clone());
    }
    if local.is_none() || args.hub {
        let mut note = |event: hub::Event| {
            if let hub::Event::Note(text) = event {
                terminal.note(text)
            }
        };
        // The bundle at a path remembers which model it was made from.
        let source = about.get("source").and_then(|source| source.get("name")?.as_str()).filter(|_| Path::new(name).exists());
        let typed = source.unwrap_or(name).to_owned();
        for (key, value) in remote(&hub::about(&typed, &mut note)?) {
            if about.get(&key).is_none_or(Value::is_null) {
                about.insert(key, value);
            }
        }
        match hub::find_official(&typed, &mut note) {
            Ok(official) => drop(about.insert("official".to_owned(), official.as_ref().map_or(Value::Null, as_json))),
            Err(error) => terminal.note(&format!("official bundles: {error}")),
        }
    }
    let about = Value::Object(about);
    if args.json { terminal::print(&format!("{about}\n")) } else { terminal::print(&text(&about)) }
}

/// What is on this machine: a bundle, else a checkpoint.
fn local(args: &Args, name: &str) -> Result<Option<Map<String, Value>>> {
    let path = Path::new(name);
    if Bundle::is_bundle(path) {
        return of_bundle(path, &[]).map(Some);
    }
    let mut there = cache::bundles_of(&cache::name_of(name)?)?;
    there.retain(|(_, folder)| Bundle::is_bundle(folder) && Bundle::read_manifest(folder).is_ok());
    let bits = args.model.bits();
    let label = bits.label();
    let exact = there.iter().find(|(have, _)| *have == label);
    let any = || there.first().filter(|_| args.model.bits.is_none());
    if let Some((_, folder)) = exact.or_else(any) {
        return of_bundle(folder, &there).map(Some);
    }
    match hub::find_here(name)? {
        Some(found) => of_checkpoint(&found).map(Some),
        None => Ok(None),
    }
}

/// A bundle; `there` are all bundles of its model.
fn of_bundle(path: &Path, there: &[(String, PathBuf)]) -> Result<Map<String, Value>> {
    let opened = Bundle::open(path)?;
    let manifest = &opened.manifest;
    let mut tensors = Vec::new();
    let mut weights = 0u64;
    for (name, entry) in &manifest.tensors {
        let count = (entry.rows as u64).saturating_mul(entry.cols as u64);
        weights = weights.saturating_add(count);
        let bytes = opened.weight(name)?.range.len();
        tensors.push(json!({
            "name": name, "rows": entry.rows, "cols": entry.cols, "format": entry.format, "bytes": bytes,
            "bits_per_weight": 8.0 * bytes as f64 / count.max(1) as f64, "relative_error": entry.relative_error,
        }));
    }
    let quantiser = &manifest.quantiser;
    let others: Vec<&str> = there.iter().map(|(label, _)| label.as_str()).collect();
    Ok(object(json!({
        "kind": "bundle", "name": manifest.source.name, "path": path, "family": manifest.family,
        "bits": quantiser.bits, "bits_per_weight": quantiser.bits_per_weight,
        "calibration_tokens": quantiser.calibration_tokens, "weights": weights, "bytes": cache::size(path),
        "context": manifest.spec.max_context(), "spec": of_spec(&manifest.spec),
        "template": opened.chat_template.is_some(), "licence": licence(&manifest.source.name),
        "source": { "name": manifest.source.name, "revision": manifest.source.revision },
        "last_used": cache::last_used(path).map(|time| jiff::Timestamp::try_from(time).unwrap_or_default().to_string()),
        "written_by": manifest.written_by, "bundles": others, "tensors": tensors,
    })))
}

fn of_checkpoint(found: &hub::Found) -> Result<Map<String, Value>> {
    let checkpoint = Checkpoint::open(&found.path)?;
    let plan = families::plan(&checkpoint)?;
    let mut tensors = Vec::new();
    let (mut weights, mut bytes) = (0u64, 0u64);
    for (name, tensor) in &checkpoint.tensors {
        let size = tensor.encoding.bytes(tensor.elements()).unwrap_or(0) as u64;
        weights = weights.saturating_add(tensor.elements() as u64);
        bytes = bytes.saturating_add(size);
        tensors.push(json!({
            "name": name, "shape": tensor.shape, "format": format!("{:?}", tensor.encoding).to_ascii_lowercase(),
            "bytes": size, "bits_per_weight": 8.0 * size as f64 / tensor.elements().max(1) as f64,
        }));
    }
    Ok(object(json!({
        "kind": "checkpoint", "name": found.name, "path": found.path, "family": plan.family, "weights": weights,
        "bytes": bytes, "context": plan.spec.max_context(), "spec": of_spec(&plan.spec),
        "template": checkpoint.tokenizer.chat_template.is_some(), "licence": licence(&found.name),
        "source": { "name": found.name, "revision": found.revision }, "tensors": tensors,
    })))
}

/// Sizes that people compare models by; those that differ between layers are given as least and most.
fn of_spec(spec: &Spec) -> Value {
    let spec = match spec {
        Spec::Decoder(spec) => spec,
        Spec::Encoder(spec) => {
            return json!({
                "layers": spec.layers, "dim": spec.dim, "hidden": spec.hidden, "heads": spec.heads, "vocab": spec.vocab,
                "pooling": spec.pooling, "normalize": spec.normalize,
            });
        }
    };
    let layers: Vec<Value> = spec.layers.iter().filter_map(|layer| serde_json::to_value(layer).ok()).collect();
    let sizes = |part: &str, key: &str| {
        let sizes = layers.iter().filter_map(|layer| layer.get(part)?.get(key)?.as_u64());
        match (sizes.clone().min(), sizes.max()) {
            (Some(least), Some(most)) if least == most => json!(least),
            (Some(least), Some(most)) => json!([least, most]),
            _ => Value::Null,
        }
    };
    json!({
        "layers": layers.len(), "dim": spec.dim, "hidden": sizes("mlp", "hidden"), "heads": sizes("mixer", "heads"),
        "kv_heads": sizes("mixer", "kv_heads"), "head_dim": sizes("mixer", "head_dim"),
        "window": sizes("mixer", "window"), "vocab": spec.vocab, "tied": spec.tied,
    })
}

/// What this machine knows about a licence: the model card, else the list of well-known models.
fn licence(name: &str) -> Option<String> {
    let known = || catalog::lookup(name).map(|m| m.licence.to_owned());
    hub::card(name).or_else(known)
}

fn remote(about: &hub::About) -> Map<String, Value> {
    let known = families::architectures();
    let supported = match &about.download {
        Err(_) => Some(false),
        Ok(_) if about.hit.architectures.is_empty() => None,
        Ok(_) => Some(about.hit.architectures.iter().any(|name| known.contains(&name.as_str()))),
    };
    let size = about.download.as_ref().ok().copied().flatten();
    object(json!({
        "kind": "hub", "name": about.hit.name, "architectures": about.hit.architectures, "supported": supported,
        "reason": about.download.as_ref().err(), "weights": about.parameters, "download_bytes": size,
        "context": about.context, "template": about.has_template, "licence": about.licence, "gated": about.hit.gated,
        "downloads": about.hit.downloads, "likes": about.hit.likes,
        "source": { "name": about.hit.name, "revision": about.revision },
    }))
}

fn as_json(official: &Official) -> Value {
    let archive = |a: &hub::Archive| json!({ "file": a.file, "bits": a.bits, "bytes": a.bytes, "sha256": a.sha256 });
    json!({
        "repo": official.repo, "revision": official.revision,
        "archives": official.archives.iter().map(archive).collect::<Vec<_>>(),
    })
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// The object for people: a line for each fact, then a table of tensors.
fn text(about: &Value) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: String| {
        if !value.is_empty() {
            let _ = writeln!(text, "{key:15} {value}");
        }
    };
    let megabytes = |value: &Value| value.as_f64().map_or(String::new(), |bytes| format!("{:.1} MB", bytes / 1e6));
    let revision = about.pointer("/source/revision").and_then(Value::as_str);
    line("model", plain(&about["name"]) + &revision.map_or(String::new(), |revision| format!(" at {revision}")));
    line("kind", plain(&about["kind"]));
    line("family", plain(&about["family"]));
    line("architectures", plain(&about["architectures"]));
    line("supported", plain(&about["supported"]) + &reason(&about["reason"]));
    line("weights", about["weights"].as_f64().map_or(String::new(), |n| format!("{:.1} million", n / 1e6)));
    let total = about["bits_per_weight"].as_f64().map_or(String::new(), |bits| format!(" ({bits:.2} with everything)"));
    line("bits", plain(&about["bits"]) + &total);
    line("size", megabytes(&about["bytes"]));
    line("to download", megabytes(&about["download_bytes"]));
    line("context", plain(&about["context"]));
    for (key, value) in about["spec"].as_object().into_iter().flatten() {
        line(key, plain(value));
    }
    line("chat template", plain(&about["template"]));
    line("licence", if about["licence"].is_null() { "not known here".to_owned() } else { plain(&about["licence"]) });
    line("gated", plain(&about["gated"]));
    line("also here as", plain(&about["bundles"]));
    line("path", plain(&about["path"]));
    line("last used", plain(&about["last_used"]));
    if let Some(archives) = about.pointer("/official/archives").and_then(Value::as_array) {
        let bits: Vec<String> = archives.iter().filter_map(|archive| Some(archive["bits"].as_f64()?.to_string())).collect();
        let repo = plain(&about["official"]["repo"]);
        line("official", format!("{repo} has bundles of {} bits (cactus download --official)", bits.join(", ")));
    }
    text + &tensors(&about["tensors"])
}

fn reason(reason: &Value) -> String {
    reason.as_str().map_or(String::new(), |reason| format!(": {reason}"))
}

/// A value as people write it; nothing for null.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::String(text) => text.chars().filter(|c| !c.is_control()).collect(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

fn tensors(list: &Value) -> String {
    let Some(list) = list.as_array() else { return String::new() };
    let widest = list.iter().map(|t| plain(&t["name"]).chars().count()).max().unwrap_or(0).max(6);
    let mut text = format!("\n{:widest$} {:>16} {:>6} {:>8} {:>9}\n", "tensor", "shape", "format", "bits", "error");
    for tensor in list {
        let shape = match tensor["shape"].as_array() {
            Some(shape) => shape.iter().map(plain).collect::<Vec<_>>().join(" x "),
            None => format!("{} x {}", tensor["rows"], tensor["cols"]),
        };
        let bits = tensor["bits_per_weight"].as_f64().unwrap_or(0.0);
        let error = tensor["relative_error"].as_f64().map_or(String::new(), |error| format!("{error:.5}"));
        let line =
            format!("{:widest$} {shape:>16} {:>6} {bits:8.3} {error:>9}", plain(&tensor["name"]), plain(&tensor["format"]));
        text += line.trim_end();
        text.push('\n');
    }
    text
}
