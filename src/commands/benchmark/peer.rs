//! The same work by `llama-bench` of llama.cpp, in alternation with ours.

use super::PeerArgs;
use super::child;
use super::report::Measurement;
use super::spread::Spread;
use cactus::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// The program, and what it has measured so far.
pub struct Peer {
    program: PathBuf,
    gguf: PathBuf,
    /// Samples in tokens a second by the name of our measurement.
    samples: Vec<(String, Vec<f64>)>,
    /// What it last said about itself.
    about: Value,
}

/// How we compare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Against {
    pub program: String,
    /// Commit of its build.
    pub build: Option<String>,
    /// File name of its model.
    pub model: String,
    pub model_type: Option<String>,
    pub model_bytes: Option<u64>,
    pub bits_per_weight: Option<f64>,
    pub results: Vec<Versus>,
}

/// One measurement of both.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Versus {
    pub name: String,
    /// Medians, in tokens a second.
    pub ours: f64,
    pub theirs: f64,
    /// Ours by theirs.
    pub ratio: f64,
    pub spread: Spread,
}

impl Peer {
    /// `None` if none was asked for.
    pub fn find(args: &PeerArgs) -> Result<Option<Peer>> {
        let (Some(name), Some(gguf)) = (&args.against, &args.gguf) else { return Ok(None) };
        if !gguf.is_file() {
            return Err(Error::not_found(format!("{} is no file", gguf.display())));
        }
        let program = args.peer.clone().unwrap_or_else(|| PathBuf::from(name));
        Ok(Some(Peer { program, gguf: gguf.clone(), samples: Vec::new(), about: Value::Null }))
    }

    /// Measures once: reading `prompt` tokens with nothing before them, or `generated` ones behind `depth` others.
    /// Flash attention is on where it helps that program: for prompts, not for single tokens.
    pub fn sample(
        &mut self,
        name: &str,
        prompt: usize,
        generated: usize,
        depth: usize,
        threads: usize,
        counts: bool,
    ) -> Result<()> {
        let flash = if prompt > 0 { "1" } else { "0" };
        let mut command = Command::new(&self.program);
        command.arg("-m").arg(&self.gguf).args(["-t", &threads.to_string(), "-r", "1", "-fa", flash, "-o", "json"]);
        command.args(["-p", &prompt.to_string(), "-n", &generated.to_string()]);
        if generated > 0 {
            command.args(["-d", &depth.to_string()]);
        }
        let ended = child::run(&mut command, &mut |_| {}).map_err(|e| match e.kind {
            Kind::NotFound => Error::not_found(format!("there is no program {}", self.program.display()))
                .with_hint("build llama.cpp and give --peer the path of its llama-bench"),
            _ => e,
        })?;
        if !ended.success {
            return Err(Error::new(Kind::Io, format!("llama-bench failed: {}", ended.last_words())));
        }
        let speed = serde_json::from_str::<Value>(&ended.stdout).ok().and_then(|mut all| {
            let result = all.get_mut(0)?.take();
            let same = result["n_prompt"].as_u64() == Some(prompt as u64) && result["n_gen"].as_u64() == Some(generated as u64);
            let speed = result["avg_ts"].as_f64().filter(|speed| same && *speed > 0.0)?;
            self.about = result;
            Some(speed)
        });
        let Some(speed) = speed else {
            return Err(Error::new(Kind::BadFile, format!("llama-bench printed no result for {name}")));
        };
        if counts {
            match self.samples.iter_mut().find(|(known, _)| known == name) {
                Some((_, samples)) => samples.push(speed),
                None => self.samples.push((name.to_owned(), vec![speed])),
            }
        }
        Ok(())
    }

    /// Our `measurements` against what it has measured; `None` if that is nothing.
    pub fn against(self, measurements: &[Measurement]) -> Option<Against> {
        let versus = |(name, samples): (String, Vec<f64>)| {
            let ours = measurements.iter().find(|m| m.name == name)?.spread.median;
            let spread = Spread::of(samples)?;
            Some(Versus { name, ours, theirs: spread.median, ratio: ours / spread.median, spread })
        };
        let results: Vec<Versus> = self.samples.into_iter().filter_map(versus).collect();
        let text = |key: &str| self.about[key].as_str().map(str::to_owned);
        let bytes = self.about["model_size"].as_u64();
        let weights = self.about["model_n_params"].as_f64().filter(|weights| *weights > 0.0);
        (!results.is_empty()).then(|| Against {
            program: "llama-bench".to_owned(),
            build: text("build_commit"),
            model: self.gguf.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            model_type: text("model_type"),
            model_bytes: bytes,
            bits_per_weight: bytes.zip(weights).map(|(bytes, weights)| bytes as f64 * 8.0 / weights),
            results,
        })
    }
}
