//! From what was typed where a model is expected to an opened engine: find, download, convert, load.

use super::machine::{Memory, size};
use super::settings::{self, Key};
use super::terminal::{self, Terminal};
use cactus::engine::calibration_text::{self, Reader};
use cactus::engine::{Engine, Footprint, LoadOptions, load, self_text};
use cactus::error::{Error, Kind, Result};
use cactus::graph::CacheFormat;
use cactus::hub::{self, cache, catalog};
use cactus::model::bundle::Provenance;
use cactus::model::convert::{self, Options, Report};
use cactus::model::import::Checkpoint;
use cactus::model::{Bundle, bundle, families};
use cactus::quant::{Bits, Code};
use clap::builder::TypedValueParser;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub const ENVIRONMENT: &str = "Environment:
  CACTUS_HOME    where converted models are kept (default: the user's cache folder)
  CACTUS_CONFIG  the settings file, or `none` (default: cactus/config.toml in the user's config folder)
  CACTUS_MODEL, CACTUS_BITS, CACTUS_THREADS, ...    any setting; `cactus doctor` lists them
  CACTUS_CPU     highest instruction set to use: scalar, avx2, avx512, neon, neon-dotprod, neon-i8mm
  HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE    as for the Hugging Face tools

Exit codes:
  0    done, also when nobody reads the output any more
  1    could not be done: not found, bad file, too little memory, network, a failed line of a batch
  2    asked wrongly: options, settings, a prompt longer than the context
  130  interrupted";

/// Which model, and how its weights are stored.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// A folder, a .gguf file, a bundle, a hub name (owner/name) or an alias [default: that of config.toml,
    /// or a small starter model]
    pub model: Option<String>,
    /// Bits per weight: 1, 2, 3, 4, 8, a mixture such as 3.26 or 2.54, or 16 for no quantisation [default: 4]
    #[arg(long)]
    pub bits: Option<Bits>,
}

/// How a model is run.
#[derive(clap::Args, Clone, Default)]
pub struct EngineArgs {
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Tokens of prompt and answer together [default: 4096, or the model's limit]
    #[arg(long)]
    pub context: Option<usize>,
}

/// What of the machine a model gets.
#[derive(clap::Args, Clone, Default)]
pub struct MachineArgs {
    /// Threads [default: one for each fast core this process may use]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: Option<u16>,
    /// Keys and values of earlier tokens: f16, or int8 in half the memory [default: int8 below 8 bits a weight]
    #[arg(long, value_parser = cache_format())]
    pub kv: Option<CacheFormat>,
    /// Leave weights in the pages of the file, which other programs share, instead of moving them to huge pages
    #[arg(long)]
    pub no_huge_pages: bool,
}

fn cache_format() -> impl clap::builder::TypedValueParser<Value = CacheFormat> {
    clap::builder::PossibleValuesParser::new(["f16", "int8"])
        .map(|name| if name == "int8" { CacheFormat::Int8 } else { CacheFormat::F16 })
}

impl ModelArgs {
    /// A model that another option names.
    pub fn named(name: &str) -> Self {
        ModelArgs { model: Some(name.to_owned()), bits: None }
    }

    /// What was typed or is set, or the starter.
    pub fn name(&self) -> &str {
        self.model.as_deref().or_else(|| settings::current().text(Key::Model)).unwrap_or(catalog::STARTER.repo)
    }

    /// Whether nobody chose a model.
    pub fn is_default(&self) -> bool {
        self.model.is_none() && settings::current().get(Key::Model).1 == settings::Origin::Default
    }

    /// Bits of the body.
    pub fn bits(&self) -> Bits {
        self.bits.or_else(|| settings::current().bits()).unwrap_or(Bits::FOUR)
    }

    /// The same for a found checkpoint: embedding models are small, and bits matter more to them.
    pub fn bits_for(&self, found: &hub::Found) -> Bits {
        let config = std::fs::read(found.path.join("config.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let embedding = config.is_some_and(|config| families::is_embedding(&config));
        if embedding { self.bits.unwrap_or(EMBEDDING_BITS) } else { self.bits() }
    }

    /// Finds or makes the bundle for this model.
    pub fn bundle(&self, terminal: &mut Terminal) -> Result<PathBuf> {
        let path = Path::new(self.name());
        if Bundle::is_bundle(path) {
            let stored = Bundle::read_manifest(path)?.quantiser.bits;
            return match self.bits {
                Some(bits) if bits != stored => {
                    Err(Error::usage(format!("{} holds {stored}-bit weights, not {bits}-bit ones", path.display()))
                        .with_hint("convert the original checkpoint with the bits you want"))
                }
                _ => Ok(path.to_path_buf()),
            };
        }
        let bits = self.bits();
        // A bundle of an older version counts as none and is made again.
        let usable = |bundle: &Path| Bundle::read_manifest(bundle).is_ok();
        if let Some(name) = hub_name(self.name()) {
            let converted = cache::bundle_dir(name, &bits.label())?;
            if usable(&converted) {
                cache::touch(&converted);
                return Ok(converted);
            }
        }
        let found = find(self.name(), terminal)?;
        let bits = self.bits_for(&found);
        let target = cached_bundle(self.name(), &found, bits)?;
        let _lock = cache::Lock::for_bundle(&target, &mut |event| show(event, terminal))?;
        let changed = found.source == hub::Source::Local && newer(&found.path, &target);
        if changed || !usable(&target) {
            convert(&found, &target, &Wanted::new(bits), terminal)?;
        }
        cache::touch(&target);
        Ok(target)
    }
}

/// The hub name that was typed, aliases resolved; `None` for a path.
fn hub_name(typed: &str) -> Option<&str> {
    let known = || catalog::lookup(typed).map(|m| m.repo);
    if Path::new(typed).exists() { None } else { known().or_else(|| typed.contains('/').then_some(typed)) }
}

/// Where the bundle of a found checkpoint is kept.
pub fn cached_bundle(typed: &str, found: &hub::Found, bits: Bits) -> Result<PathBuf> {
    cache::bundle_dir(hub_name(typed).unwrap_or(&found.name), &bits.label())
}

/// Shows what the hub does.
pub fn show(event: hub::Event, terminal: &mut Terminal) {
    match event {
        hub::Event::Note(text) => terminal.note(text),
        hub::Event::Start { what, total_bytes } => terminal.start(what, total_bytes, true),
        hub::Event::Advance(bytes) => terminal.advance(bytes),
        hub::Event::Finish => terminal.finish(),
    }
}

/// Finds or downloads a checkpoint.
pub fn find(name: &str, terminal: &mut Terminal) -> Result<hub::Found> {
    let found = hub::find(name, &mut |event| show(event, terminal));
    terminal.finish();
    found
}

/// What to convert to.
pub struct Wanted {
    pub bits: Bits,
    pub head_bits: Option<u32>,
    pub code: Code,
    pub calibrate: Calibrate,
    pub tokens: usize,
    pub sequential: Option<f32>,
    /// Grids of the checkpoint are kept.
    pub keep: bool,
}

impl Wanted {
    /// What `cactus run` makes when it finds nothing.
    pub fn new(bits: Bits) -> Self {
        let calibrate = Calibrate::Auto;
        Wanted {
            bits,
            head_bits: None,
            code: Code::Trellis,
            calibrate,
            tokens: SAMPLE_TOKENS,
            sequential: Some(SHARE),
            keep: true,
        }
    }
}

/// Bits of embedding models when nobody says otherwise.
const EMBEDDING_BITS: Bits = Bits::EIGHT;

/// How far weights make up for errors of earlier layers.
pub const SHARE: f32 = 0.5;

/// What rounding is fitted to.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Calibrate {
    /// Text that comes with the program, and text that the model writes itself.
    #[default]
    Auto,
    /// Text that comes with the program.
    Shipped,
    /// Text that the model writes itself.
    Generated,
    /// Nothing: every weight to its nearest level.
    None,
    File(PathBuf),
}

impl From<&str> for Calibrate {
    fn from(text: &str) -> Self {
        match text {
            "auto" => Calibrate::Auto,
            "shipped" => Calibrate::Shipped,
            "generated" => Calibrate::Generated,
            "none" => Calibrate::None,
            file => Calibrate::File(file.into()),
        }
    }
}

/// Tokens of sample text.
pub const SAMPLE_TOKENS: usize = 4096;
/// Of these, those that the model writes itself if nobody says otherwise.
const GENERATED_SHARE: f64 = 0.5;

/// Sample text as token ids, and in words what it is.
fn sample(checkpoint: &Checkpoint, target: &Path, wanted: &Wanted, terminal: &mut Terminal) -> Result<(Vec<Vec<u32>>, String)> {
    let tokens = wanted.tokens;
    let count = |texts: &[Vec<u32>]| texts.iter().map(Vec::len).sum::<usize>();
    if tokens == 0 || wanted.calibrate == Calibrate::None {
        return Ok((Vec::new(), String::new()));
    }
    let reader = Reader::new(checkpoint)?;
    if let Calibrate::File(path) = &wanted.calibrate {
        let texts = reader.file(path, tokens)?;
        let what = format!("file {}", count(&texts));
        return Ok((texts, what));
    }
    let generated = match wanted.calibrate {
        Calibrate::Generated => generate(checkpoint, target, tokens, terminal)?,
        Calibrate::Auto => may_generate(checkpoint, target, (tokens as f64 * GENERATED_SHARE) as usize, terminal)?,
        _ => Vec::new(),
    };
    let written = count(&generated);
    if wanted.calibrate == Calibrate::Generated {
        if written == 0 {
            return Err(Error::unsupported("the model writes no text that is fit to calibrate on")
                .with_hint("use --calibrate shipped, or give a file"));
        }
        return Ok((generated, format!("generated {written}")));
    }
    let shipped = reader.shipped(tokens - written)?;
    let mut what = format!("shipped {}", count(&shipped));
    if written > 0 {
        what = format!("generated {written}, {what}");
    }
    Ok((calibration_text::mixed(generated, shipped), what))
}

/// Lets the model write.
fn generate(checkpoint: &Checkpoint, target: &Path, tokens: usize, terminal: &mut Terminal) -> Result<Vec<Vec<u32>>> {
    let amount = self_text::Amount { tokens, longest: calibration_text::LONGEST, seed: 0 };
    terminal::catch_interrupts();
    terminal.start("the model writes text to calibrate on", Some(tokens as u64), false);
    let texts = self_text::write(checkpoint, target, &amount, &mut |tokens| {
        terminal.advance(tokens as u64);
        terminal::not_interrupted()
    });
    terminal.finish();
    texts
}

/// The same where nobody asked for it: nothing if it cannot be done well.
fn may_generate(checkpoint: &Checkpoint, target: &Path, tokens: usize, terminal: &mut Terminal) -> Result<Vec<Vec<u32>>> {
    // It has a byte a weight and reads all of them for every token: from memory that is quick, from a disk never.
    let bytes = checkpoint.tensors.values().map(|t| t.shape.iter().map(|n| *n as u64).product::<u64>());
    let bytes = bytes.fold(0, u64::saturating_add);
    if let Some(memory) = Memory::detect().filter(|memory| bytes > memory.total / 2) {
        let (need, total) = (size(bytes), size(memory.total));
        terminal
            .note(&format!("this machine has {total} of memory, too little to let a model of {need} write text to calibrate on"));
        return Ok(Vec::new());
    }
    match generate(checkpoint, target, tokens, terminal) {
        Err(e) if !matches!(e.kind, Kind::Interrupted | Kind::BadFile) => {
            terminal.note(&format!("warning: the model cannot write text to calibrate on: {e}"));
            Ok(Vec::new())
        }
        texts => texts,
    }
}

/// Converts a found checkpoint.
pub fn convert(found: &hub::Found, target: &Path, wanted: &Wanted, terminal: &mut Terminal) -> Result<Report> {
    let bits = wanted.bits;
    let checkpoint = Checkpoint::open(&found.path)?;
    let name = match found.source {
        // The folder's own name: the path would make bundles differ between machines.
        hub::Source::Local => found.path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
        _ => found.name.clone(),
    };
    let source = Provenance { name, revision: found.revision.clone() };
    let mut options = Options {
        head_bits: wanted.head_bits,
        code: wanted.code,
        sequential: wanted.sequential,
        keep: wanted.keep,
        ..Options::plain(bits, source)
    };
    if convert::needs_text(&checkpoint, &options)? {
        let begin = std::time::Instant::now();
        (options.calibration, options.calibration_text) = sample(&checkpoint, target, wanted, terminal)?;
        if !options.calibration.is_empty() {
            let (text, seconds) = (&options.calibration_text, begin.elapsed().as_secs_f64());
            terminal.note(&format!("calibrating on tokens of text: {text} ({seconds:.0} s)"));
        }
    }
    let what = format!("converting to {bits} bits");
    terminal::catch_interrupts();
    let report = convert::convert(&checkpoint, target, &options, &mut |event| {
        match event {
            convert::Event::Warning(text) => terminal.note(&format!("warning: {text}")),
            convert::Event::Note(text) => terminal.note(text),
            convert::Event::Start { work, done } => terminal.start_work(&what, work, done),
            convert::Event::Stage(text) => terminal.stage(&what, text),
            convert::Event::Advance(work) => terminal.advance(work),
        }
        terminal::not_interrupted()
    });
    terminal.finish();
    report
}

/// Whether a local checkpoint was changed after its bundle was made.
fn newer(source: &Path, target: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let made = modified(&target.join(bundle::MANIFEST));
    let files = std::fs::read_dir(source).into_iter().flatten().flatten().map(|e| modified(&e.path()));
    files.chain([modified(source)]).any(|m| m > made)
}

impl MachineArgs {
    /// How to run a model with so many tokens at most, its weights left where they are.
    pub fn options(&self, context: Option<usize>) -> Result<LoadOptions> {
        let threads = self.threads.map(usize::from).or_else(|| settings::current().whole(Key::Threads).map(|n| n as usize));
        Ok(LoadOptions { threads, ceiling: load::ceiling()?, context, cache: self.kv, huge_pages: false })
    }
}

impl EngineArgs {
    /// Opens the bundle at `path`. A setting for the context is cut to what the model was made for; a flag is
    /// taken at its word.
    pub fn load(&self, path: &Path) -> Result<Engine> {
        self.load_by(path, Engine::load)
    }

    /// Opens the bundle at `path` as a second model, which runs in turn with `engine` and with the same context.
    pub fn load_beside(&self, path: &Path, engine: &Engine) -> Result<Engine> {
        let most = Bundle::read_manifest(path)?.spec.max_context();
        let args = EngineArgs { context: Some(engine.context().min(most)), ..self.clone() };
        args.load_by(path, |path, options| engine.load_beside(path, options))
    }

    fn load_by(&self, path: &Path, open: impl FnOnce(&Path, &LoadOptions) -> Result<Engine>) -> Result<Engine> {
        let memory = Memory::detect();
        let weights = path.join(bundle::WEIGHTS).metadata().map_or(0, |data| data.len());
        if let Some(memory) = memory {
            fits_at_all("the weights", weights, memory)?;
        }
        let mut context = self.context;
        if let (None, Some(wanted)) = (context, settings::current().whole(Key::Context)) {
            context = Some((wanted as usize).min(Bundle::read_manifest(path)?.spec.max_context()));
        }
        // The file's pages stay in the page cache for a while.
        let huge_pages = !self.machine.no_huge_pages && memory.is_some_and(|memory| weights <= memory.available / 2);
        let options = LoadOptions { huge_pages, ..self.machine.options(context)? };
        let engine = open(path, &options)?;
        if let Some(memory) = memory {
            let what = format!("a context of {} tokens", engine.context());
            fits_at_all(&what, engine.footprint().cache, memory)?;
        }
        Ok(engine)
    }
}

/// An error if something needs more than all memory.
fn fits_at_all(what: &str, bytes: u64, memory: Memory) -> Result<()> {
    if bytes <= memory.total {
        return Ok(());
    }
    let text = format!("{what} would take {}, this machine has {} of memory", size(bytes), size(memory.total));
    Err(Error::new(Kind::Io, text).with_hint("use a smaller model, fewer --bits or a smaller --context"))
}

/// A warning if models that are open together will be short of memory.
pub fn memory_warning<'a>(engines: impl IntoIterator<Item = &'a Engine>) -> Option<String> {
    let need = engines.into_iter().map(Engine::footprint).reduce(Footprint::and)?;
    tight(&need, Memory::detect()?)
}

fn tight(need: &Footprint, memory: Memory) -> Option<String> {
    (need.total() > memory.available).then(|| {
        format!(
            "warning: the model may need {} of memory (weights {}, context {}, working memory {}) and {} is free; \
             expect it to be slow, or use fewer --bits or a smaller --context",
            size(need.total()),
            size(need.weights),
            size(need.cache),
            size(need.arena),
            size(memory.available)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    /// User report P73: a model that cannot fit says so before it is loaded.
    #[test]
    fn p73_memory_is_judged_before_loading() {
        let memory = Memory { total: 8 * GB, available: 3 * GB };
        assert!(fits_at_all("the weights", 8 * GB, memory).is_ok());
        let error = fits_at_all("the weights", 9 * GB, memory).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert_eq!(error.message(), "the weights would take 9.00 GB, this machine has 8.00 GB of memory");
        let need = |weights| Footprint { weights, cache: GB / 2, arena: GB / 4 };
        assert_eq!(tight(&need(2 * GB), memory), None);
        let warning = tight(&need(5 * GB / 2), memory).unwrap();
        assert!(warning.contains("3.25 GB") && warning.contains("2.50 GB") && warning.contains("3.00 GB is free"), "{warning}");
        assert!(tight(&need(u64::MAX), memory).is_some());
        // A model and its draft model are judged together.
        assert!(tight(&need(3 * GB / 2).and(need(GB)), memory).is_some());
    }
}
