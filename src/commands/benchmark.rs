//! `cactus benchmark`: speed and memory, measured so that anyone can repeat it. See docs/benchmarking.md.

mod affinity;
mod android;
mod bandwidth;
mod child;
mod compare;
mod measure;
mod peer;
mod report;
mod spread;
mod table;

use super::Outcome;
use super::model_options::{MachineArgs, ModelArgs};
use super::settings::{self, Key};
use super::terminal::{self, Terminal};
use android::Device;
use cactus::error::{Error, Result};
use cactus::kernels::Topology;
use compare::Comparison;
use peer::Peer;
use report::Report;
use std::path::PathBuf;

/// Runs below which a spread says little.
const FEW_RUNS: usize = 5;
const PREFILL: usize = 1024;
const DECODE: usize = 100;
const DEPTHS: [usize; 3] = [0, 1024, 4096];

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    measure: MeasureArgs,
    /// Print ratios to an earlier result, what --json printed then
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    #[command(flatten)]
    peer: PeerArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print a JSON object with every sample
    #[arg(long, group = "form")]
    json: bool,
    /// Print a line a measurement, separated by commas
    #[arg(long, group = "form")]
    csv: bool,
    /// Print Markdown tables
    #[arg(long, group = "form")]
    markdown: bool,
    /// Only results and errors
    #[arg(short, long)]
    quiet: bool,
}

/// What is measured, and how.
#[derive(clap::Args)]
pub struct MeasureArgs {
    /// Tokens of the prompt that is read [default: 1024, or the model's limit]
    #[arg(long, value_name = "N", value_parser = count())]
    prefill: Option<usize>,
    /// Tokens that are generated each time [default: 100, or the model's limit]
    #[arg(long, value_name = "N", value_parser = count())]
    decode: Option<usize>,
    /// Tokens that are there before those [default: 0,1024,4096, as far as the model goes]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    depth: Option<Vec<usize>>,
    /// Runs that count, after one that does not; at least 5 tell something about the spread
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = count())]
    runs: usize,
    /// Seconds to wait between runs, so that the machine cools down
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    pause: f64,
    #[command(flatten)]
    machine: MachineArgs,
    /// Keep the process on as many of the fastest cores as there are threads (Linux, Android)
    #[arg(long)]
    pin: bool,
}

/// Another engine to measure in alternation.
#[derive(clap::Args)]
pub struct PeerArgs {
    /// Let llama.cpp do the same work
    #[arg(long, value_parser = ["llama-bench"], requires = "gguf", conflicts_with = "android")]
    against: Option<String>,
    /// Its model
    #[arg(long, value_name = "FILE", requires = "against")]
    gguf: Option<PathBuf>,
    /// Its program [default: llama-bench in the PATH]
    #[arg(long, value_name = "PATH", requires = "against")]
    peer: Option<PathBuf>,
}

/// Another device to measure on.
#[derive(clap::Args)]
pub struct DeviceArgs {
    /// Measure on an Android device, through adb; SERIAL where several are attached. Write MODEL before this
    #[arg(long, value_name = "SERIAL", num_args = 0..=1, default_missing_value = "", conflicts_with = "ios")]
    android: Option<String>,
    /// The program for that device: cactus, built for AArch64 [default: this program, if it is]
    #[arg(long, value_name = "PATH", requires = "android")]
    binary: Option<PathBuf>,
    /// Measure on an iOS device (not automated, see docs/benchmarking.md)
    #[arg(long)]
    ios: bool,
}

/// A number from 1 on.
fn count() -> impl clap::builder::TypedValueParser<Value = usize> {
    use clap::builder::TypedValueParser;
    clap::value_parser!(u32).range(1..).map(|n| n as usize)
}

/// A time that can be waited for: up to a day.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=86400.0).contains(seconds));
    seconds.ok_or_else(|| "a number of seconds, 0 to 86400, is expected".to_owned())
}

pub fn run(args: &Args) -> Outcome {
    if args.device.ios {
        return Err(ios().into());
    }
    let mut terminal = Terminal::new(args.quiet);
    terminal::catch_interrupts();
    // Whatever is missing is told before the work.
    let earlier = args.compare.as_deref().map(Report::open).transpose()?;
    let peer = Peer::find(&args.peer)?;
    let device = Device::find(&args.device)?;
    let name = args.model.name();
    let bundle = args.model.bundle(&mut terminal)?;
    if args.measure.runs < FEW_RUNS {
        terminal.note(&format!("fewer than {FEW_RUNS} runs tell little about the spread"));
    }
    let mut report = match &device {
        Some(device) => device.measure(&bundle, name, &args.measure, args.quiet, &mut terminal)?,
        None => measure::measure(&bundle, name, &args.measure, pinned(&args.measure)?, peer, &mut terminal)?,
    };
    if let Some(earlier) = &earlier {
        let compared = Comparison::of(earlier, &report);
        compared.differences.iter().for_each(|difference| terminal.note(&format!("warning: {difference}")));
        report.compared = Some(compared);
    }
    terminal::print(&match () {
        () if args.json => serde_json::to_string(&report).unwrap_or_default() + "\n",
        () if args.csv => table::csv(&report),
        () if args.markdown => table::markdown(&report),
        () => table::text(&report),
    })
}

/// Pins this process if that was asked for, before there are other threads. Gives the CPUs.
fn pinned(args: &MeasureArgs) -> Result<Option<Vec<usize>>> {
    if !args.pin {
        return Ok(None);
    }
    let set = || settings::current().whole(Key::Threads).map(|n| n as usize);
    let threads = args.machine.threads.map(usize::from).or_else(set).unwrap_or_else(|| Topology::detect().threads());
    affinity::pin(threads).map(Some)
}

fn ios() -> Error {
    let there = std::process::Command::new("xcrun").arg("--version").output().is_ok_and(|output| output.status.success());
    let text = if there {
        "measuring on an iOS device is not automated"
    } else {
        "measuring on an iOS device needs Xcode on a Mac, and there is no xcrun in the PATH"
    };
    Error::unsupported(text).with_hint("docs/benchmarking.md says how to do it by hand")
}

/// How many tokens are read and generated.
#[derive(Debug, PartialEq)]
pub struct Lengths {
    pub prefill: usize,
    pub decode: usize,
    /// Ascending.
    pub depths: Vec<usize>,
}

impl Lengths {
    /// What was asked for and fits `max_context`, and a note on everything that does not.
    fn of(args: &MeasureArgs, max_context: usize) -> Result<(Lengths, Vec<String>)> {
        let limited = |asked: Option<usize>, usual: usize, what: &str| match asked {
            Some(n) if n > max_context => {
                Err(Error::usage(format!("{n} tokens to {what} are more than the model's context of {max_context}")))
            }
            asked => Ok(asked.unwrap_or(usual.min(max_context))),
        };
        let prefill = limited(args.prefill, PREFILL, "read")?;
        let decode = limited(args.decode, DECODE, "generate")?;
        let mut depths = args.depth.clone().unwrap_or_else(|| DEPTHS.to_vec());
        depths.sort_unstable();
        depths.dedup();
        let mut notes = Vec::new();
        if args.prefill.is_none() && prefill < PREFILL {
            notes.push(format!("only {prefill} tokens are read: that is the model's context"));
        }
        depths.retain(|depth| {
            let fits = depth.checked_add(decode).is_some_and(|end| end <= max_context);
            if !fits {
                notes.push(format!(
                    "depth {depth} is left out: with {decode} tokens it is more than the context of {max_context}"
                ));
            }
            fits
        });
        if depths.is_empty() {
            return Err(Error::usage(format!(
                "no --depth fits the model's context of {max_context} with {decode} tokens behind it"
            )));
        }
        Ok((Lengths { prefill, decode, depths }, notes))
    }

    /// Positions for all of that, and for a prompt of `short` tokens.
    fn context(&self, short: usize) -> usize {
        self.depths.last().map_or(0, |depth| depth + self.decode).max(self.prefill).max(short)
    }
}

impl MeasureArgs {
    /// As options for the same program elsewhere.
    fn to_options(&self) -> Vec<String> {
        let mut options = vec![format!("--runs {} --pause {}", self.runs, self.pause)];
        options.extend(self.prefill.map(|n| format!("--prefill {n}")));
        options.extend(self.decode.map(|n| format!("--decode {n}")));
        if let Some(depths) = &self.depth {
            options.push(format!("--depth {}", depths.iter().map(usize::to_string).collect::<Vec<_>>().join(",")));
        }
        options.extend(self.machine.threads.map(|n| format!("--threads {n}")));
        options.extend(self.machine.kv.map(|kv| format!("--kv {kv}")));
        options.extend(self.machine.no_huge_pages.then(|| "--no-huge-pages".to_owned()));
        options.extend(self.pin.then(|| "--pin".to_owned()));
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(prefill: Option<usize>, decode: Option<usize>, depth: Option<&[usize]>) -> MeasureArgs {
        MeasureArgs {
            prefill,
            decode,
            depth: depth.map(<[usize]>::to_vec),
            runs: 7,
            pause: 0.0,
            machine: MachineArgs::default(),
            pin: false,
        }
    }

    #[test]
    fn lengths_fit_the_context() {
        let of = |args: MeasureArgs, max| Lengths::of(&args, max).map(|(lengths, notes)| (lengths, notes.len()));
        let lengths = |prefill, decode, depths: &[usize]| Lengths { prefill, decode, depths: depths.to_vec() };
        assert_eq!(of(args(None, None, None), 8192).unwrap(), (lengths(1024, 100, &[0, 1024, 4096]), 0));
        assert_eq!(of(args(None, None, None), 4195).unwrap(), (lengths(1024, 100, &[0, 1024]), 1));
        assert_eq!(of(args(None, None, None), 256).unwrap(), (lengths(256, 100, &[0]), 3));
        assert_eq!(of(args(None, None, None), 50).unwrap(), (lengths(50, 50, &[0]), 3));
        assert_eq!(of(args(Some(9), Some(8), Some(&[16, 0, 16])), 64).unwrap(), (lengths(9, 8, &[0, 16]), 0));
        assert_eq!(lengths(9, 8, &[0, 16]).context(30), 30);
        assert_eq!(lengths(9, 8, &[0, 160]).context(30), 168);
        for wrong in [args(Some(65), None, None), args(None, Some(65), None), args(None, None, Some(&[64, usize::MAX]))] {
            assert_eq!(of(wrong, 64).unwrap_err().exit_code(), 2);
        }
    }
}
