//! `cactus doctor`: what is in force on this machine, and what would make it faster.

use super::Outcome;
use super::machine::{self, Memory, size};
use super::settings::{Key, Origin, ROWS, Settings};
use super::terminal;
use cactus::engine::load;
use cactus::error::{Error, Result};
use cactus::hub::cache;
use cactus::hub::report::{self, Report};
use cactus::kernels::{Level, Topology};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// How long the hub may take to answer.
const HUB_LIMIT: Duration = Duration::from_secs(2);
/// Memory below which even small models are short of room.
const LITTLE_MEMORY: u64 = 1_000_000_000;

#[derive(clap::Args)]
pub struct Args {
    /// Also ask whether the hub can be reached; nothing else here opens a connection
    #[arg(long)]
    online: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Outcome {
    let settings = Settings::load();
    let ceiling = load::ceiling();
    let hub = report::report();
    let reached = match (&hub, args.online) {
        (Ok(hub), true) if !hub.offline => Some(hub.reach(HUB_LIMIT).map(|time| time.as_secs_f64() * 1e3)),
        _ => None,
    };
    let findings = Findings {
        topology: Topology::detect(),
        online_cpus: machine::online_cpus(),
        memory: Memory::detect(),
        ceiling: *ceiling.as_ref().unwrap_or(&None),
        best: Level::best(None),
    };
    let advice = findings.advice(settings.as_ref().ok());
    let whole = Whole { findings: &findings, settings: settings.as_ref(), hub: hub.as_ref().ok(), reached, advice };
    let text = if args.json { format!("{}\n", whole.as_json()) } else { whole.as_text() };
    terminal::print(&text)?;
    // What is wrong with the settings is an error like anywhere else, after what could be told.
    settings?;
    ceiling?;
    hub?;
    Ok(())
}

/// What this machine has.
struct Findings {
    topology: Topology,
    online_cpus: Option<usize>,
    memory: Option<Memory>,
    ceiling: Option<Level>,
    /// The best level of this CPU.
    best: Level,
}

impl Findings {
    fn level(&self) -> Level {
        Level::best(self.ceiling).min(self.best)
    }

    /// What would make it faster, a sentence each.
    fn advice(&self, settings: Option<&Settings>) -> Vec<String> {
        let mut advice = Vec::new();
        let (level, cpus) = (self.level(), self.topology);
        if cfg!(debug_assertions) {
            advice.push("this is a debug build; build with --release".to_owned());
        }
        if level < self.best {
            advice.push(format!("CACTUS_CPU holds the kernels at {level}; without it this CPU does {}", self.best));
        }
        match self.best {
            Level::Scalar if cfg!(target_arch = "x86_64") => {
                advice.push("this CPU (or virtual machine) has no AVX2; with it kernels are many times faster".to_owned());
            }
            Level::Scalar => advice.push("there are no fast kernels for this kind of CPU, only plain ones".to_owned()),
            Level::Neon => advice.push("this CPU has no dot-product instructions; one that has is much faster".to_owned()),
            _ => {}
        }
        let chosen = settings.and_then(|s| s.whole(Key::Threads)).map_or(cpus.threads(), |n| n as usize);
        if chosen > cpus.parallelism {
            advice.push(format!("{chosen} threads are set, but only {} can run at once", cpus.parallelism));
        } else if chosen < cpus.threads() {
            advice.push(format!("{chosen} threads are set; this machine would do well with {}", cpus.threads()));
        }
        if let Some(online) = self.online_cpus.filter(|online| *online > cpus.parallelism) {
            advice.push(format!(
                "this process may use {} of {online} CPUs (affinity or container quota); more cores are faster",
                cpus.parallelism
            ));
        } else if cpus.cores <= 2 {
            advice.push(format!("few cores ({}); long prompts are read faster with more", cpus.cores));
        }
        if let Some(memory) = self.memory.filter(|memory| memory.available < LITTLE_MEMORY) {
            advice.push(format!(
                "little memory is free ({}); close other programs, or use a small model with few --bits",
                size(memory.available)
            ));
        }
        advice
    }
}

/// Everything that is told.
struct Whole<'a> {
    findings: &'a Findings,
    settings: Result<&'a Settings, &'a Error>,
    hub: Option<&'a Report>,
    /// Milliseconds until the hub answered; `None`: not asked.
    reached: Option<Result<f64>>,
    advice: Vec<String>,
}

/// A setting in force: name, value, where it comes from.
fn settings_rows(settings: &Settings, topology: Topology) -> Vec<(&'static str, Value, String)> {
    let row = |row: &super::settings::Row| {
        let (value, origin) = settings.get(row.key);
        let value = match (value, row.key) {
            (Some(super::settings::Value::Text(text)), _) => json!(text),
            (Some(super::settings::Value::Whole(number)), _) => json!(number),
            // Through text, so that 1.1 stays 1.1.
            (Some(super::settings::Value::Real(number)), _) => json!(number.to_string().parse::<f64>().unwrap_or_default()),
            (None, Key::Threads) => json!(topology.threads()),
            (None, _) => Value::Null,
        };
        let origin = match origin {
            Origin::Default => "default".to_owned(),
            Origin::File => settings.path.as_ref().map_or_else(String::new, |path| path.display().to_string()),
            Origin::Environment => row.variable.to_owned(),
        };
        (row.name, value, origin)
    };
    ROWS.iter().map(row).collect()
}

/// What a value that is not set means.
fn unset(name: &str) -> &'static str {
    if name == "context" { "4096, or the model's limit" } else { "none" }
}

impl Whole<'_> {
    fn folders(&self) -> Vec<(&'static str, &Path)> {
        self.hub.map_or_else(Vec::new, |hub| vec![("models", hub.cache.as_path()), ("hub cache", hub.hf_cache.as_path())])
    }

    fn as_text(&self) -> String {
        let Findings { topology, memory, .. } = *self.findings;
        let mut text = format!("cactus {} on {} {}\n", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
        let mut line = |name: &str, value: &str| text += &format!("  {name:20} {value}\n");
        line("cpu", machine::cpu_name().as_deref().unwrap_or("unknown"));
        line("cpu features", &machine::cpu_features().join(" "));
        let held = if self.findings.ceiling.is_some() { " (CACTUS_CPU)" } else { "" };
        line("kernels", &format!("{}{held}", self.findings.level()));
        line("cores", &topology.to_string());
        line("threads", &format!("{} by default", topology.threads()));
        line(
            "memory",
            &memory.map_or_else(|| "unknown".to_owned(), |m| format!("{} free of {}", size(m.available), size(m.total))),
        );
        for (name, folder) in self.folders() {
            let free = cache::free_bytes(folder).map_or_else(String::new, |free| format!(", {} free", size(free)));
            line(name, &format!("{} ({}{free})", folder.display(), size(machine::folder_bytes(folder))));
        }
        if let Some(hub) = self.hub {
            let reached = match &self.reached {
                None if hub.offline => "HF_HUB_OFFLINE is set".to_owned(),
                None => "not asked, see --online".to_owned(),
                Some(Ok(ms)) => format!("reachable, {ms:.0} ms"),
                Some(Err(e)) => e.to_string(),
            };
            line("hub", &format!("{} ({reached})", hub.endpoint));
            line("hub token", hub.token_from.as_deref().unwrap_or("none"));
        }
        match self.settings {
            Err(error) => line("settings", &format!("faulty: {error}")),
            Ok(settings) => {
                let path = settings.path.as_ref().map_or_else(|| "no file".to_owned(), |path| path.display().to_string());
                let missing = settings.path.is_some() && !settings.exists;
                line("settings", &format!("{path}{}", if missing { " (not there)" } else { "" }));
                for (name, value, origin) in settings_rows(settings, topology) {
                    let value = match value {
                        Value::Null => unset(name).to_owned(),
                        Value::String(text) => text.escape_debug().to_string(),
                        Value::Number(n) if n.is_f64() => n.as_f64().map_or_else(String::new, |x| x.to_string()),
                        other => other.to_string(),
                    };
                    line(&format!("  {name}"), &format!("{value}  ({origin})"));
                }
            }
        }
        text += if self.advice.is_empty() { "Nothing stands in the way of speed.\n" } else { "What would make it faster:\n" };
        self.advice.iter().for_each(|advice| text += &format!("  - {advice}\n"));
        text
    }

    fn as_json(&self) -> Value {
        let Findings { topology, memory, online_cpus, ceiling, .. } = *self.findings;
        let folder = |(name, path): (&str, &Path)| {
            let (bytes, free) = (machine::folder_bytes(path), cache::free_bytes(path));
            json!({ "name": name, "path": path, "bytes": bytes, "free_bytes": free })
        };
        let hub = self.hub.map(|hub| {
            let (reachable, ms, error) = match &self.reached {
                None => (Value::Null, Value::Null, Value::Null),
                Some(Ok(ms)) => (true.into(), (ms.round() as u64).into(), Value::Null),
                Some(Err(e)) => (false.into(), Value::Null, e.to_string().into()),
            };
            json!({ "endpoint": hub.endpoint, "offline": hub.offline, "token_from": hub.token_from,
                "reachable": reachable, "answer_ms": ms, "error": error })
        });
        let settings = match self.settings {
            Err(error) => json!({ "error": error.to_string() }),
            Ok(settings) => {
                let rows = settings_rows(settings, topology);
                let values: serde_json::Map<String, Value> = rows
                    .into_iter()
                    .map(|(name, value, from)| (name.to_owned(), json!({ "value": value, "from": from })))
                    .collect();
                json!({ "path": settings.path, "exists": settings.exists, "values": values })
            }
        };
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "os": std::env::consts::OS,
            "arch": std::env::consts::ARCH,
            "cpu": { "name": machine::cpu_name(), "features": machine::cpu_features(),
                "kernels": self.findings.level().name(), "ceiling": ceiling.map(Level::name), "online": online_cpus,
                "allowed": topology.logical, "parallelism": topology.parallelism, "cores": topology.cores,
                "fast_cores": topology.fast, "default_threads": topology.threads() },
            "memory": memory.map(|m| json!({ "total_bytes": m.total, "available_bytes": m.available })),
            "folders": self.folders().into_iter().map(folder).collect::<Vec<_>>(),
            "hub": hub,
            "settings": settings,
            "advice": self.advice,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(best: Level, ceiling: Option<Level>, cores: usize, online: usize) -> Findings {
        let topology = Topology { parallelism: cores, logical: cores, cores, fast: cores };
        let memory = Some(Memory { total: 16_000_000_000, available: 8_000_000_000 });
        Findings { topology, online_cpus: Some(online), memory, ceiling, best }
    }

    #[test]
    fn advice_fits_the_machine() {
        let advice = |findings: &Findings| {
            let mut advice = findings.advice(None);
            advice.retain(|a| !a.contains("debug build"));
            advice
        };
        assert_eq!(advice(&machine(Level::best(None), None, 8, 8)), [""; 0]);
        let expect = |findings: Findings, part: &str| {
            let advice = advice(&findings);
            assert!(advice.len() == 1 && advice[0].contains(part), "{part}: {advice:?}");
        };
        expect(
            machine(Level::Scalar, None, 8, 8),
            "plain|AVX2".split('|').nth(usize::from(cfg!(target_arch = "x86_64"))).unwrap(),
        );
        expect(machine(Level::best(None), None, 4, 16), "4 of 16 CPUs");
        expect(machine(Level::best(None), None, 2, 2), "few cores");
        let low = Some(Memory { total: 2_000_000_000, available: 300_000_000 });
        expect(Findings { memory: low, ..machine(Level::best(None), None, 8, 8) }, "300.0 MB");
        if Level::best(None) > Level::Scalar {
            expect(machine(Level::best(None), Some(Level::Scalar), 8, 8), "CACTUS_CPU");
        }
    }
}
