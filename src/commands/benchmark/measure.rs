//! Measuring on this computer.

use super::bandwidth::Bandwidth;
use super::child;
use super::peer::Peer;
use super::report::{Build, Conditions, Kind, Llm, Machine, Measurement, MemoryUse, Model, Read, Report};
use super::report::{cache_bytes, weight_bytes};
use super::spread::Spread;
use super::table::counted;
use super::{Lengths, MeasureArgs};
use crate::commands::machine::{Resident, Sensors};
use crate::commands::model_options::{EngineArgs, MachineArgs, memory_warning};
use crate::commands::terminal::{self, Terminal};
use cactus::engine::{Engine, Session};
use cactus::error::{Kind as Failure, Result};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Seed of the token ids.
const SEED: u64 = 42;
/// Tokens of the prompt whose first token is waited for.
const SHORT: usize = 30;
/// About as many tokens for the program that is started anew.
const PROMPT: &str = "Write one sentence about the sea, and another one about the hills behind it.";

/// One thing to measure, and its samples so far.
struct Item {
    kind: Kind,
    prompt_tokens: usize,
    depth: usize,
    generated_tokens: usize,
    samples: Vec<f64>,
}

impl Item {
    fn new(kind: Kind, prompt_tokens: usize, depth: usize, generated_tokens: usize) -> Item {
        Item { kind, prompt_tokens, depth, generated_tokens, samples: Vec::new() }
    }

    /// Measurements of the same name can be compared.
    fn name(&self) -> String {
        match self.kind {
            Kind::Prefill => format!("prefill {}", self.prompt_tokens),
            Kind::Decode => format!("decode {} @ {}", self.generated_tokens, self.depth),
            Kind::FirstToken => format!("first token of {}", self.prompt_tokens),
            Kind::ProgramStart => "start to first token".to_owned(),
            Kind::Load => "load".to_owned(),
            Kind::LoadOpen => "load: open".to_owned(),
            Kind::LoadTokenizer => "load: tokenizer".to_owned(),
            Kind::LoadPlan => "load: plan".to_owned(),
        }
    }
}

/// Measures the bundle at `path`; `name` is what was typed.
pub fn measure(
    path: &Path,
    name: &str,
    args: &MeasureArgs,
    pinned: Option<Vec<usize>>,
    mut peer: Option<Peer>,
    terminal: &mut Terminal,
) -> Result<Report> {
    let spec = cactus::model::Bundle::read_manifest(path)?.spec;
    let (lengths, left_out) = Lengths::of(args, spec.max_context())?;
    left_out.iter().for_each(|note| terminal.note(note));
    Resident::forget_peak();
    let threads = pinned.as_ref().map(|cpus| cpus.len() as u16).or(args.machine.threads);
    let machine = MachineArgs { threads, ..args.machine.clone() };
    let options = EngineArgs { machine, context: Some(lengths.context(SHORT).min(spec.max_context())) };
    let engine = options.load(path)?;
    if let Some(warning) = memory_warning([&engine]) {
        terminal.note(&warning);
    }
    let before = Sensors::read();
    let mut bench = Bench::new(&engine, path, &options, &lengths);
    let kinds = bench.items.len() + peer.as_ref().map_or(0, |_| 1 + lengths.depths.len());
    let what = format!("measuring on {}: {} after a warm-up", counted(engine.threads(), "thread"), counted(args.runs, "run"));
    terminal.start(&what, Some(((args.runs + 1) * kinds) as u64), false);
    terminal.stage(&what, "filling the context");
    let memory = bench.fill()?;
    for run in 0..=args.runs {
        if run > 0 {
            pause(args.pause)?;
        }
        let number = if run == 0 { "warm-up".to_owned() } else { format!("run {run}") };
        for at in 0..bench.items.len() {
            terminal::not_interrupted()?;
            terminal.stage(&what, &format!("{number}, {}", bench.items[at].name()));
            bench.sample(at, run > 0, terminal)?;
            terminal.advance(1);
            let item = &bench.items[at];
            if let Some(peer) = peer.as_mut().filter(|_| matches!(item.kind, Kind::Prefill | Kind::Decode)) {
                terminal.stage(&what, &format!("{number}, {} of llama-bench", item.name()));
                peer.sample(&item.name(), item.prompt_tokens, item.generated_tokens, item.depth, engine.threads(), run > 0)?;
                terminal.advance(1);
            }
        }
    }
    terminal.stage(&what, "memory bandwidth");
    let read = Bandwidth::measure(engine.threads());
    let machine = Machine::this(&engine, before);
    terminal.finish();
    let measurements = bench.measurements(read)?;
    let median = |kind: Kind| measurements.iter().find(|m| m.kind == kind).map(|m| m.spread.median);
    let llm = Llm {
        prefill_tps: median(Kind::Prefill),
        decode_tps: measurements.iter().find(|m| m.kind == Kind::Decode && m.depth == 0).map(|m| m.spread.median),
        time_to_first_token_ms: median(Kind::FirstToken),
        start_to_first_token_ms: median(Kind::ProgramStart),
        load_ms: median(Kind::Load),
        prompt_tokens: lengths.prefill,
        generated_tokens: lengths.decode,
        finish_reason: FINISH.to_owned(),
        measurements,
    };
    Ok(Report {
        date: now(),
        model: Model::of(&engine, name),
        against: peer.and_then(|peer| peer.against(&llm.measurements)),
        llm,
        memory,
        read,
        conditions: Conditions {
            runs: args.runs,
            warmup_runs: 1,
            pause_s: args.pause,
            threads: engine.threads(),
            pinned_cpus: pinned,
            context: engine.context(),
            kv: engine.cache_format().to_string(),
            seed: SEED,
            sampling: "none: forced tokens".to_owned(),
        },
        machine,
        build: Build::this(),
        compared: None,
    })
}

/// Generation always ends at its length.
const FINISH: &str = "length";

/// What is measured in every run, one after another.
struct Bench<'e> {
    engine: &'e Engine,
    path: &'e Path,
    options: &'e EngineArgs,
    /// Ids of a whole context. Every measurement runs a part of them at the positions where they stand.
    ids: Vec<u32>,
    /// For what begins with nothing.
    empty: Session<'e>,
    /// Sessions that are filled up to a depth, deepest first.
    filled: Vec<(usize, Session<'e>)>,
    items: Vec<Item>,
    /// The first failure of a program that was started anew has been told.
    start_failed: bool,
}

impl<'e> Bench<'e> {
    fn new(engine: &'e Engine, path: &'e Path, options: &'e EngineArgs, lengths: &Lengths) -> Self {
        let mut items = vec![Item::new(Kind::Prefill, lengths.prefill, 0, 0)];
        items.extend(lengths.depths.iter().map(|depth| Item::new(Kind::Decode, 0, *depth, lengths.decode)));
        items.push(Item::new(Kind::FirstToken, SHORT.min(engine.context()), 0, 1));
        items.push(Item::new(Kind::ProgramStart, 0, 0, 1));
        items.extend([Kind::Load, Kind::LoadOpen, Kind::LoadTokenizer, Kind::LoadPlan].map(|kind| Item::new(kind, 0, 0, 0)));
        let ids = ids(engine.vocab(), engine.context());
        Bench { engine, path, options, ids, empty: engine.session(), filled: Vec::new(), items, start_failed: false }
    }

    /// Fills a session for each depth. Memory is told of the first, the deepest, before there are others.
    fn fill(&mut self) -> Result<Option<MemoryUse>> {
        let decode = self.items.iter().map(|item| item.generated_tokens).max().unwrap_or(0);
        let prefill = self.items.iter().map(|item| item.prompt_tokens).max().unwrap_or(0);
        let mut depths: Vec<usize> = self.items.iter().map(|item| item.depth).collect();
        depths.sort_unstable_by(|a, b| b.cmp(a));
        depths.dedup();
        let deepest = depths.first().copied().unwrap_or(0);
        let mut session = std::mem::replace(&mut self.empty, self.engine.session());
        session.feed(&self.ids[..prefill.max(deepest)], &terminal::interrupted)?;
        session.truncate(deepest);
        for id in &self.ids[deepest..deepest + decode] {
            session.step(*id)?;
            terminal::not_interrupted()?;
        }
        let memory = Resident::read();
        if deepest == 0 {
            self.empty = session;
        } else {
            session.truncate(deepest);
            self.filled.push((deepest, session));
        }
        for depth in depths.into_iter().skip(1).filter(|depth| *depth > 0) {
            let mut session = self.engine.session();
            session.feed(&self.ids[..depth], &terminal::interrupted)?;
            self.filled.push((depth, session));
        }
        let positions = prefill.max(deepest + decode);
        Ok(memory.map(|memory| MemoryUse { peak_bytes: memory.peak, steady_bytes: memory.now, positions }))
    }

    /// Measures an item once. `counts`: this is not the warm-up.
    fn sample(&mut self, at: usize, counts: bool, terminal: &Terminal) -> Result<()> {
        let Item { kind, prompt_tokens, depth, generated_tokens, .. } = self.items[at];
        let sample = match kind {
            Kind::Prefill => prompt_tokens as f64 / self.feed(prompt_tokens)?.as_secs_f64(),
            Kind::FirstToken => milliseconds(self.feed(prompt_tokens)?),
            Kind::Decode => generated_tokens as f64 / self.decode(depth, generated_tokens)?.as_secs_f64(),
            Kind::ProgramStart => match self.start(at)? {
                Ok(time) => milliseconds(time),
                Err(reason) => {
                    if !std::mem::replace(&mut self.start_failed, true) {
                        terminal.note(&format!("the start of the program is not measured: {reason}"));
                    }
                    return Ok(());
                }
            },
            Kind::Load => {
                let begin = Instant::now();
                let engine = self.options.load(self.path)?;
                let all = milliseconds(begin.elapsed());
                let times = engine.load_times();
                // The parts come right behind the whole.
                for (part, ms) in self.items[at + 1..].iter_mut().zip([times.open_ms, times.tokenizer_ms, times.plan_ms]) {
                    part.samples.extend(counts.then_some(ms));
                }
                all
            }
            Kind::LoadOpen | Kind::LoadTokenizer | Kind::LoadPlan => return Ok(()),
        };
        self.items[at].samples.extend(counts.then_some(sample));
        Ok(())
    }

    /// Time to read the first `tokens` ids with nothing before them.
    fn feed(&mut self, tokens: usize) -> Result<Duration> {
        self.empty.truncate(0);
        let begin = Instant::now();
        self.empty.feed(&self.ids[..tokens], &terminal::interrupted)?;
        Ok(begin.elapsed())
    }

    /// Time to run `tokens` ids one by one behind `depth` others.
    fn decode(&mut self, depth: usize, tokens: usize) -> Result<Duration> {
        let filled = self.filled.iter_mut().find(|(filled, _)| *filled == depth);
        let session = filled.map_or(&mut self.empty, |(_, session)| session);
        session.truncate(depth);
        let begin = Instant::now();
        for id in &self.ids[depth..depth + tokens] {
            session.step(*id)?;
            terminal::not_interrupted()?;
        }
        Ok(begin.elapsed())
    }

    /// Time from the start of this program, as a new process, until it has printed an answer of one token; or why
    /// that cannot be told.
    fn start(&mut self, at: usize) -> Result<Result<Duration, String>> {
        if self.start_failed {
            return Ok(Err(String::new()));
        }
        let program = match std::env::current_exe() {
            Ok(program) => program,
            Err(e) => return Ok(Err(e.to_string())),
        };
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CACTUS_") && text != "CACTUS_CPU" && text != "CACTUS_HOME" {
                command.env_remove(name);
            }
        }
        command.env("CACTUS_CONFIG", "none").arg("run").arg(self.path);
        command.args(["--prompt", PROMPT, "--max-tokens", "1", "--json", "--quiet", "--no-stdin"]);
        command.args(["--threads", &self.engine.threads().to_string()]);
        let begin = Instant::now();
        let ended = match child::run(&mut command, &mut |_| {}) {
            Ok(ended) => ended,
            Err(e) if e.kind == Failure::Interrupted => return Err(e),
            Err(e) => return Ok(Err(e.to_string())),
        };
        let answer: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
        let tokens = answer["prefill_tokens"].as_u64().filter(|_| ended.success);
        Ok(match (tokens, ended.first_output) {
            (Some(tokens), Some(first)) => {
                self.items[at].prompt_tokens = tokens as usize;
                Ok(first - begin)
            }
            _ => Err(answer["error"].as_str().unwrap_or(ended.last_words()).to_owned()),
        })
    }

    /// What has samples, with their spread.
    fn measurements(self, read: Option<Bandwidth>) -> Result<Vec<Measurement>> {
        let weights = weight_bytes(self.engine)?;
        let mut all = Vec::new();
        for item in self.items {
            let name = item.name();
            let Some(spread) = Spread::of(item.samples) else { continue };
            let read = (item.kind == Kind::Decode).then(|| {
                let cache = cache_bytes(self.engine, item.depth, item.generated_tokens);
                let rate = (weights + cache) * spread.median;
                let share = read.map(|limit| rate / limit.bytes_per_second);
                Read {
                    weight_bytes_per_token: weights,
                    cache_bytes_per_token: cache,
                    bytes_per_second: rate,
                    share_of_limit: share,
                }
            });
            all.push(Measurement {
                name,
                kind: item.kind,
                unit: item.kind.unit().to_owned(),
                prompt_tokens: item.prompt_tokens,
                depth: item.depth,
                generated_tokens: item.generated_tokens,
                finish_reason: (item.generated_tokens > 0).then(|| FINISH.to_owned()),
                spread,
                read,
            });
        }
        Ok(all)
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The time in UTC, to the second.
fn now() -> String {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

/// Waits, but not longer than the user wants.
fn pause(seconds: f64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        std::thread::sleep(left.min(Duration::from_millis(50)));
        terminal::not_interrupted()?;
    }
    Ok(())
}

/// Ids below `vocab`, the same every time: SplitMix64 (Steele, Lea and Flood, 2014).
fn ids(vocab: usize, count: usize) -> Vec<u32> {
    let mut state = SEED;
    let next = |_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % vocab.max(1) as u64) as u32
    };
    (0..count).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_those_of_splitmix64() {
        // First outputs for the seed 42: bdd732262feb6e95, 28efe333b266f103, 47526757130f9f52.
        assert_eq!(ids(1 << 16, 3), [0x6e95, 0xf103, 0x9f52]);
        assert!(ids(7, 1000).iter().all(|id| *id < 7));
    }
}
