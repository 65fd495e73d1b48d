//! `cactus serve`: one model behind an API that clients of OpenAI's understand.

mod access;
mod ask;
mod asked;
mod body;
mod embeddings;
mod events;
mod failure;
mod listen;
mod reply;
mod responses;
mod routes;

use super::model_options::{EngineArgs, ModelArgs, memory_warning};
use super::settings;
use super::terminal::Terminal;
use super::{Outcome, corpus};
use access::Access;
use axum::http::StatusCode;
use cactus::engine::Request;
use cactus::engine::chat::Message;
use cactus::engine::embed::Embedder;
use cactus::engine::retrieve::Folder;
use cactus::engine::service::Service;
use cactus::error::{Error, Kind};
use serde_json::Value;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::sync::watch;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Address to listen at; 0.0.0.0 is all of this machine's
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port; 0 takes a free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Answers that are written at the same time; each has a context of its own
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=128))]
    slots: u16,
    /// Requests that may wait beyond those; more are told to come back later
    #[arg(long, default_value_t = 64)]
    queue: usize,
    /// Another name by which requests may call the model; may be given several times
    #[arg(long, value_name = "NAME")]
    alias: Vec<String>,
    /// Ask for this key
    #[arg(long, value_name = "KEY", env = "CACTUS_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// A web origin (https://app.example) whose pages may ask, `*` for all; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// A host name by which this machine may be called; may be given several times
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Bytes of a request at most
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    body_limit: usize,
    /// An embedding model for /v1/embeddings and --corpus [default: states of the chat model, which tell likeness less well;
    /// with --corpus, minilm where it is converted]
    #[arg(long, value_name = "MODEL")]
    embedding_model: Option<String>,
    /// Answer from the files of this folder: the passages that belong to the last question are read first, and listed beside
    /// the answer
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Only errors
    #[arg(short, long)]
    quiet: bool,
}

impl Args {
    fn embedder(&self, terminal: &mut Terminal) -> Result<Option<Embedder<'static>>, Error> {
        if self.embedding_model.is_none() && self.corpus.is_none() {
            return Ok(None);
        }
        corpus::embedder(self.embedding_model.as_deref(), &self.engine.machine, terminal)
    }
}

/// What all requests share.
struct App {
    service: Service,
    /// The model's name in answers.
    id: String,
    /// Other names that it goes by.
    names: Vec<String>,
    created: u64,
    embedder: Option<Embedder<'static>>,
    corpus: Option<Folder>,
    defaults: Request,
    access: Access,
    body_limit: usize,
    /// Requests so far, and those of them that failed.
    requests: AtomicU64,
    failed: AtomicU64,
    ids: AtomicU64,
    terminal: Terminal,
}

impl App {
    /// Calls `work` with the model that makes vectors.
    fn with_embedder<T>(&self, work: impl FnOnce(&Embedder) -> failure::Result<T>) -> failure::Result<T> {
        match &self.embedder {
            Some(embedder) => work(embedder),
            None => work(&Embedder::of(self.service.engine())?),
        }
    }

    /// Puts the passages that belong to the last question into the messages; tells them for programs.
    fn ground(&self, messages: &mut Vec<Message>) -> failure::Result<Option<Value>> {
        let Some(folder) = &self.corpus else { return Ok(None) };
        self.with_embedder(|embedder| Ok(Some(folder.ground(messages, self.service.engine(), embedder)?.json())))
    }

    /// Says on standard error what happens.
    fn log(&self, text: &str) {
        self.terminal.note(text);
    }

    /// An id that no other answer has.
    fn fresh_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:x}{:08x}", self.created, self.ids.fetch_add(1, Ordering::Relaxed))
    }

    /// Refuses the names of other models.
    fn knows(&self, model: &str) -> failure::Result<()> {
        let same = |name: &str| name.eq_ignore_ascii_case(model);
        let known = model.is_empty() || same("default") || same(&self.id) || self.names.iter().any(|name| same(name));
        if known {
            return Ok(());
        }
        let message = format!("there is no model {model:?} here, only {:?} (--alias gives it another name)", self.id);
        Err(failure::Failure::new(StatusCode::NOT_FOUND, "model_not_found", message).of("model"))
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Work that takes long, apart from the thread that serves connections.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> failure::Result<T> + Send + 'static) -> failure::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(events::broken()))
}

pub fn run(args: &Args) -> Outcome {
    let mut terminal = Terminal::new(args.quiet);
    if args.api_key.as_deref().is_some_and(|key| key.trim().is_empty()) {
        return Err(Error::usage("the API key is empty").into());
    }
    let address = SocketAddr::new(args.host, args.port);
    let failed = |e: std::io::Error| Error::new(Kind::Io, format!("cannot listen at {address}: {e}"));
    // A port that is taken is known before the model is loaded.
    let listener = std::net::TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let bundle = args.model.bundle(&mut terminal)?;
    let engine = args.engine.load(&bundle)?;
    if let Some(warning) = memory_warning([&engine]) {
        terminal.note(&warning);
    }
    let embedder = args.embedder(&mut terminal)?;
    let folder = match (&args.corpus, &embedder) {
        (None, _) => None,
        (Some(dir), Some(embedder)) => Some(opened(dir, embedder, &mut terminal)?),
        (Some(dir), None) => Some(opened(dir, &Embedder::of(&engine)?, &mut terminal)?),
    };
    let source = engine.bundle.manifest.source.name.clone();
    let short = source.rsplit('/').next().unwrap_or(&source).to_owned();
    let names = args.alias.iter().cloned().chain([short, args.model.name().to_owned()]).collect();
    let defaults = Request { sampling: settings::current().sampling(), ..Request::default() };
    let app = Arc::new(App {
        service: Service::start(Arc::new(engine), args.slots.into(), args.queue)?,
        id: source,
        names,
        created: now(),
        embedder,
        corpus: folder,
        defaults,
        terminal,
        access: Access { key: args.api_key.clone(), origins: args.allow_origin.clone(), hosts: args.allow_host.clone() },
        body_limit: args.body_limit,
        requests: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        ids: AtomicU64::new(0),
    });
    if !args.host.is_loopback() && app.access.key.is_none() {
        app.log("warning: everybody who reaches this machine can use the model; --api-key asks for a key");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Error::new(Kind::Io, format!("cannot start the server: {e}")))?;
    app.log(&format!("{} at http://{address} (API: http://{address}/v1)", app.id));
    runtime.block_on(serve(app.clone(), listener)).map_err(failed)?;
    app.service.close();
    app.log("stopped");
    Ok(())
}

/// The folder `dir`, read.
fn opened(dir: &Path, embedder: &Embedder, terminal: &mut Terminal) -> Result<Folder, Error> {
    let folder = corpus::folder(dir, embedder)?;
    corpus::read(&folder, embedder, terminal)?;
    Ok(folder)
}

async fn serve(app: Arc<App>, listener: std::net::TcpListener) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let (stop, stopping) = watch::channel(false);
    let ended = ended()?;
    tokio::spawn(async move {
        ended.await;
        // What was begun is finished; nothing new is begun.
        let _ = stop.send(true);
    });
    listen::serve(listener, routes::router(app), stopping).await;
    Ok(())
}

/// Waits for somebody to end the program.
fn ended() -> std::io::Result<impl Future<Output = ()> + Send> {
    #[cfg(unix)]
    let mut terminated = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    Ok(async move {
        let interrupted = tokio::signal::ctrl_c();
        #[cfg(unix)]
        tokio::select! {
            _ = interrupted => {}
            _ = terminated.recv() => {}
        }
        #[cfg(not(unix))]
        let _ = interrupted.await;
    })
}
