//! What a benchmark found out and under which conditions; `--json` prints this, and `--compare` reads it.

use super::bandwidth::Bandwidth;
use super::compare::Comparison;
use super::peer::Against;
use super::spread::Spread;
use crate::commands::machine::{self, Memory, Sensors};
use cactus::engine::Engine;
use cactus::error::{Error, Result};
use cactus::kernels::Topology;
use cactus::kernels::attention::AttentionShape;
use cactus::model::spec::Mixer;
use cactus::quant::Bits;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The whole result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub date: String,
    pub model: Model,
    pub llm: Llm,
    pub memory: Option<MemoryUse>,
    pub read: Option<Bandwidth>,
    pub conditions: Conditions,
    pub machine: Machine,
    pub build: Build,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<Against>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<Comparison>,
}

/// The model and how its weights are stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Model {
    pub name: String,
    pub family: String,
    /// Bits asked for.
    pub bits: Bits,
    pub bits_per_weight: f64,
    /// Tensors of each format.
    pub formats: BTreeMap<String, usize>,
    pub weights_bytes: u64,
    pub weights_sha256: String,
}

/// The medians that people look for first, and everything they come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Llm {
    pub prefill_tps: Option<f64>,
    /// Without anything before it.
    pub decode_tps: Option<f64>,
    /// Of a short prompt, the program being ready.
    pub time_to_first_token_ms: Option<f64>,
    /// From the start of the program until it has printed an answer of one token.
    pub start_to_first_token_ms: Option<f64>,
    pub load_ms: Option<f64>,
    /// Tokens of the prefill.
    pub prompt_tokens: usize,
    /// Tokens of each decode.
    pub generated_tokens: usize,
    /// Why generation ended.
    pub finish_reason: String,
    pub measurements: Vec<Measurement>,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Prefill,
    Decode,
    FirstToken,
    ProgramStart,
    Load,
    /// Mapping and checking the bundle.
    LoadOpen,
    LoadTokenizer,
    /// Threads, graph and plans.
    LoadPlan,
}

impl Kind {
    /// What the samples count.
    pub fn unit(self) -> &'static str {
        match self {
            Kind::Prefill | Kind::Decode => "tokens/s",
            _ => "ms",
        }
    }
}

/// One of the things that are measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measurement {
    pub name: String,
    pub kind: Kind,
    pub unit: String,
    /// Tokens that are read while the clock runs.
    pub prompt_tokens: usize,
    /// Tokens that were there before.
    pub depth: usize,
    pub generated_tokens: usize,
    pub finish_reason: Option<String>,
    #[serde(flatten)]
    pub spread: Spread,
    pub read: Option<Read>,
}

/// What decoding reads from memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Read {
    pub weight_bytes_per_token: f64,
    /// Keys and values, on average over the tokens.
    pub cache_bytes_per_token: f64,
    pub bytes_per_second: f64,
    /// Of the read bandwidth that was measured. Weights that fit a cache may be read faster than that.
    pub share_of_limit: Option<f64>,
}

/// Memory of the process, with one session in which so many positions are filled.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MemoryUse {
    pub peak_bytes: u64,
    pub steady_bytes: u64,
    pub positions: usize,
}

/// How was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Conditions {
    pub runs: usize,
    pub warmup_runs: usize,
    pub pause_s: f64,
    pub threads: usize,
    /// CPUs that the process was pinned to.
    pub pinned_cpus: Option<Vec<usize>>,
    pub context: usize,
    /// How keys and values are kept.
    pub kv: String,
    /// Of the token ids.
    pub seed: u64,
    pub sampling: String,
}

/// Where was measured. What the system does not tell is null.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Name of a device that is not this computer.
    pub device: Option<String>,
    pub cpu: Option<String>,
    pub features: Vec<String>,
    /// Instruction-set level of the kernels.
    pub kernels: String,
    pub cores: String,
    pub os: String,
    pub memory_bytes: Option<u64>,
    pub last_level_cache_bytes: Option<u64>,
    pub governor: Option<String>,
    pub before: Sensors,
    pub after: Sensors,
}

/// Which program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Build {
    pub version: String,
    pub profile: String,
    pub target: String,
}

impl Build {
    pub fn this() -> Build {
        let environment = match () {
            () if cfg!(target_env = "gnu") => "-gnu",
            () if cfg!(target_env = "musl") => "-musl",
            () if cfg!(target_env = "msvc") => "-msvc",
            () => "",
        };
        Build {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
            target: format!("{}-{}{environment}", std::env::consts::ARCH, std::env::consts::OS),
        }
    }
}

impl Model {
    /// What is loaded; `name` as it was typed.
    pub fn of(engine: &Engine, name: &str) -> Model {
        let manifest = &engine.bundle.manifest;
        let mut formats = BTreeMap::new();
        for entry in manifest.tensors.values() {
            *formats.entry(format!("{:?}", entry.format).to_ascii_lowercase()).or_default() += 1;
        }
        Model {
            name: name.to_owned(),
            family: manifest.family.clone(),
            bits: manifest.quantiser.bits,
            bits_per_weight: manifest.quantiser.bits_per_weight,
            formats,
            weights_bytes: engine.bundle.bytes().len() as u64,
            weights_sha256: manifest.weights_sha256.clone(),
        }
    }
}

impl Machine {
    /// This computer; sensors as they are `before` and now.
    pub fn this(engine: &Engine, before: Sensors) -> Machine {
        Machine {
            device: None,
            cpu: machine::cpu_name(),
            features: machine::cpu_features().into_iter().map(str::to_owned).collect(),
            kernels: engine.level().name().to_owned(),
            cores: Topology::detect().to_string(),
            os: std::env::consts::OS.to_owned(),
            memory_bytes: Memory::detect().map(|memory| memory.total),
            last_level_cache_bytes: machine::last_level_cache(),
            governor: machine::governor(),
            before,
            after: Sensors::read(),
        }
    }
}

impl Report {
    /// Reads what `--json` printed.
    pub fn open(path: &Path) -> Result<Report> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, &e))?;
        Report::parse(&text).map_err(|e| e.context(path.display()))
    }

    pub fn parse(text: &str) -> Result<Report> {
        let wrong = |e| Error::new(cactus::error::Kind::BadFile, format!("no result of `cactus benchmark --json`: {e}"));
        serde_json::from_str(text).map_err(wrong)
    }
}

/// Bytes of weights that decoding one token reads: all of them, but of an embedding that is not the head as well
/// only one row.
pub fn weight_bytes(engine: &Engine) -> Result<f64> {
    let manifest = &engine.bundle.manifest;
    let mut bytes = 0.0;
    for name in manifest.tensors.keys() {
        let weight = engine.bundle.weight(name)?;
        let one_row = name.starts_with("embed") && !engine.spec().tied;
        let rows = if one_row { engine.spec().vocab.max(1) } else { 1 };
        bytes += weight.range.len() as f64 / rows as f64;
    }
    Ok(bytes)
}

/// Bytes of keys and values that a token reads, on average over `tokens` tokens behind `depth` others.
pub fn cache_bytes(engine: &Engine, depth: usize, tokens: usize) -> f64 {
    let layers = &engine.spec().layers;
    let mut bytes = 0.0;
    for Mixer::Attention { heads, kv_heads, head_dim, window, scale, cap, .. } in layers.iter().map(|layer| layer.mixer.clone()) {
        let shape = AttentionShape { heads, kv_heads, head_dim, scale, cap, window };
        let position = engine.cache_format().position_bytes(&shape) as f64;
        let seen = |token: usize| (depth + token + 1).min(window.unwrap_or(usize::MAX));
        bytes += position * (0..tokens).map(seen).sum::<usize>() as f64 / tokens.max(1) as f64;
    }
    bytes
}
