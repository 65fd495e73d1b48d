//! `cactus logits`: numbers to hold against any other engine.

use super::Outcome;
use super::model_options::{EngineArgs, ModelArgs, memory_warning};
use super::terminal::Terminal;
use cactus::engine::{Request, generate};
use cactus::error::{Error, Result};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids, comma-separated, or a file that holds them (separated by commas or white space)
    #[arg(long)]
    ids: String,
    /// The safetensors file to write: `logits` [tokens, vocab] F32 and `greedy_ids` [N] I32
    #[arg(long)]
    output: PathBuf,
    /// Also generate N tokens, always the likeliest one, going on after end-of-text
    #[arg(long, default_value_t = 0)]
    greedy: usize,
    #[command(flatten)]
    engine: EngineArgs,
    /// Only errors
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: &Args) -> Outcome {
    let ids = read_ids(&args.ids)?;
    // Room for everything that was asked for, unless a context was.
    let context = args.engine.context.or(Some(ids.len() + args.greedy));
    let engine_args = EngineArgs { context, ..args.engine.clone() };
    let mut terminal = Terminal::new(args.quiet);
    let bundle = args.model.bundle(&mut terminal)?;
    let engine = engine_args.load(&bundle)?;
    if let Some(warning) = memory_warning([&engine]) {
        terminal.note(&warning);
    }
    if ids.len() + args.greedy > engine.context() {
        return Err(Error::usage(format!(
            "{} ids and {} greedy tokens do not fit the context of {}",
            ids.len(),
            args.greedy,
            engine.context()
        ))
        .into());
    }
    let logits = engine.score(&ids)?;
    let mut greedy: Vec<i32> = Vec::new();
    if args.greedy > 0 {
        let request = Request { max_tokens: args.greedy, ignore_end: true, ..Request::default() };
        let answer = generate(&mut engine.session(), &ids, &request, &mut |_| {}, &|| false)?;
        greedy = answer.ids.iter().map(|id| *id as i32).collect();
    }
    write(&args.output, &logits, engine.vocab(), &greedy)?;
    Ok(())
}

/// The list itself, or the content of the file of that name.
fn read_ids(text: &str) -> Result<Vec<u32>> {
    let content = if Path::new(text).is_file() {
        std::fs::read_to_string(text).map_err(|e| Error::io("read", Path::new(text), &e))?
    } else {
        text.to_owned()
    };
    let pieces = content.split(|c: char| c == ',' || c.is_whitespace()).filter(|p| !p.is_empty());
    let ids: Vec<u32> = pieces
        .map(|p| p.parse().map_err(|_| Error::usage(format!("`{p:.40}` is no token id, and no file has this name"))))
        .collect::<Result<_>>()?;
    if ids.is_empty() { Err(Error::usage("there are no token ids")) } else { Ok(ids) }
}

fn write(path: &Path, logits: &[f32], vocab: usize, greedy: &[i32]) -> Result<()> {
    use safetensors::tensor::{Dtype, TensorView};
    let view = |dtype, shape: Vec<usize>, bytes| TensorView::new(dtype, shape, bytes);
    let logits_view = view(Dtype::F32, vec![logits.len() / vocab, vocab], bytemuck::cast_slice(logits));
    let greedy_view = view(Dtype::I32, vec![greedy.len()], bytemuck::cast_slice(greedy));
    let all = logits_view.and_then(|l| greedy_view.map(|g| [("logits", l), ("greedy_ids", g)]));
    let bytes = all.and_then(|tensors| safetensors::serialize(tensors, None));
    let bytes = bytes.map_err(|e| Error::usage(format!("cannot write the logits: {e}")))?;
    // Written beside and renamed, so that a reader never sees half a file.
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path)).map_err(|e| {
        let _ = std::fs::remove_file(&partial);
        Error::io("write", path, &e)
    })
}
