//! The hub over HTTP: what a repository holds, and its files, checked, into the cache.
//!
//! The requests are those of Python's client: the revision's listing, then for each file a HEAD that names
//! size and content hash (on the redirect itself for large files), then a GET. See
//! <https://huggingface.co/docs/hub/api>.

use super::cache::{Partial, hex};
use super::files::{self, Selection};
use super::settings::Settings;
use super::snapshot::{Complete, Snapshots, is_commit};
use super::{Event, catalog, is_repo_id};
use crate::error::{Error, Kind, Result};
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderValue, LOCATION, RANGE, RETRY_AFTER,
};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url, redirect};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::time::Duration;

/// A machine without a route to the hub should say so quickly.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest silence in the middle of an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Further tries after an answer that asks for patience or stops in the middle.
const RETRIES: u32 = 3;
/// Longest wait that the hub may ask for before we hand the matter to the user.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Largest listing read; the longest known ones are below 2 MB.
const LISTING_BYTES: usize = 32 << 20;

/// Talks to the hub about one repository.
pub(super) struct Client<'a> {
    settings: &'a Settings,
    repo: &'a str,
    base: Url,
    auth: Option<HeaderValue>,
    /// Follows redirects, dropping the token on another host.
    following: reqwest::Client,
    /// Shows redirects: their headers carry the hash of a large file.
    direct: reqwest::Client,
}

#[derive(serde::Deserialize)]
struct Listing {
    id: Option<String>,
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(serde::Deserialize)]
struct Sibling {
    rfilename: String,
}

/// A file as the hub describes it.
struct Remote<'n> {
    name: &'n str,
    /// Name of the content: its SHA-256 for large files, a git hash for small ones.
    etag: String,
    bytes: u64,
}

impl<'a> Client<'a> {
    pub fn new(settings: &'a Settings, repo: &'a str) -> Result<Client<'a>> {
        let not_hub =
            || Error::usage("HF_ENDPOINT is not the address of a hub").with_hint("give it as https://host, or unset it");
        let base = Url::parse(&settings.endpoint).map_err(|_| not_hub())?;
        if !["http", "https"].contains(&base.scheme()) || base.host_str().is_none() {
            return Err(not_hub());
        }
        let loopback = is_loopback(&base);
        let mut auth = None;
        if let Some(token) = &settings.token {
            if base.scheme() == "http" && !loopback {
                return Err(Error::usage("HF_ENDPOINT is plain http, which would show the token to everyone on the way")
                    .with_hint(format!("use https, or remove the token ({})", token.origin())));
            }
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.checked()?))
                .map_err(|_| Error::usage(format!("the token in {} cannot be sent", token.origin())))?;
            value.set_sensitive(true);
            auth = Some(value);
        }
        // Fails only if a provider is installed already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let build = |policy: redirect::Policy| {
            let mut builder = reqwest::Client::builder()
                .user_agent(concat!("cactus/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(CONNECT_TIMEOUT)
                .read_timeout(READ_TIMEOUT)
                .redirect(policy);
            if loopback {
                builder = builder.no_proxy();
            }
            builder.build().map_err(|e| {
                Error::new(Kind::Network, format!("cannot prepare connections: {}", deepest(&e)))
                    .with_hint("install the system's CA certificates, or set SSL_CERT_FILE")
            })
        };
        let following = build(redirect::Policy::limited(10))?;
        let direct = build(redirect::Policy::none())?;
        Ok(Client { settings, repo, base, auth, following, direct })
    }

    /// Downloads what the checkpoint at `revision` needs and makes it visible in the cache.
    pub fn fetch(&self, revision: &str, snapshots: &Snapshots, on_event: &mut dyn FnMut(Event)) -> Result<Complete> {
        if tokio::runtime::Handle::try_current().is_ok() {
            return Err(Error::usage("a download cannot be started from async code; use a thread of its own"));
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::new(Kind::Io, format!("cannot start the downloader: {e}")))?;
        let result = runtime.block_on(self.fetch_all(revision, snapshots, on_event));
        // A name lookup may still hang in its thread; nobody waits for it.
        runtime.shutdown_background();
        result
    }

    async fn fetch_all(&self, revision: &str, snapshots: &Snapshots, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Complete> {
        let listing = self.listing(revision, on_event).await?;
        let (commit, names) = (listing.sha, listing.siblings.into_iter().map(|s| s.rfilename).collect::<Vec<_>>());
        // A renamed repository answers with its new name.
        let repo = listing.id.filter(|id| is_repo_id(id)).unwrap_or_else(|| self.repo.to_string());
        let unusable = |reason: String| Error::unsupported(format!("{}: {reason}", self.repo));

        let mut done: Vec<Remote> = Vec::new();
        let mut shards = None;
        if let Some(name) = files::index(&names) {
            let index = self.describe(&repo, &commit, name, on_event).await?;
            let blob = snapshots.blob(&index.etag)?;
            self.file(&repo, &commit, &index, snapshots, &mut |event| {
                if let Event::Note(_) = event {
                    on_event(event)
                }
            })
            .await?;
            let text = std::fs::read(&blob).map_err(|e| Error::io("read", &blob, &e))?;
            shards = Some(files::shards_of(&text).map_err(unusable)?);
            done.push(index);
        }
        let Selection { files: chosen, gguf } = files::select(&names, shards.as_deref()).map_err(unusable)?;
        if let Some(bad) = chosen.iter().find(|name| !files::is_safe(name)) {
            return Err(unusable(format!("the file name `{}` is not inside the repository", bad.escape_debug())));
        }
        if let Some(gguf) = &gguf {
            on_event(Event::Note(&format!("{} has no safetensors; taking {gguf}", self.repo)));
        }

        let mut wanted = Vec::new();
        for name in chosen.iter().filter(|name| done.iter().all(|file| file.name != **name)) {
            wanted.push(self.describe(&repo, &commit, name, on_event).await?);
        }
        let mut absent = 0u64;
        for file in &wanted {
            if !is_present(file, snapshots)? {
                absent = absent.saturating_add(file.bytes);
            }
        }
        on_event(Event::Start { what: self.repo, total_bytes: Some(absent) });
        for file in wanted {
            self.file(&repo, &commit, &file, snapshots, on_event).await?;
            done.push(file);
        }
        // Links last and in order: a snapshot that shows its last weight file is complete.
        for name in &chosen {
            for file in done.iter().filter(|file| file.name == name) {
                snapshots.link(&commit, name, &file.etag)?;
            }
        }
        snapshots.set_revision(revision, &commit)?;
        on_event(Event::Finish);
        let folder = snapshots.snapshot(&commit);
        Ok(Complete { path: gguf.map_or(folder.clone(), |file| folder.join(file)), commit })
    }

    /// What the repository holds at `revision`.
    async fn listing(&self, revision: &str, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Listing> {
        let (owner, name) = self.repo.split_once('/').unwrap_or((self.repo, ""));
        let url = self.url(&["api", "models", owner, name, "revision", revision]);
        let mut response = self.send(&self.following, Method::GET, &url, None, revision, on_event).await?;
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.unreachable(e))? {
            if body.len() + chunk.len() > LISTING_BYTES {
                return Err(Error::new(Kind::Network, format!("{}: the list of files is too long", self.host())));
            }
            body.extend_from_slice(&chunk);
        }
        match serde_json::from_slice::<Listing>(&body) {
            Ok(listing) if is_commit(&listing.sha) => Ok(listing),
            _ => Err(Error::new(Kind::Network, format!("{} does not answer as a hub does", self.host()))
                .with_hint("if a network login page is in the way, sign in there first; otherwise check HF_ENDPOINT")),
        }
    }

    /// Size and content name of one file.
    async fn describe<'n>(
        &self,
        repo: &str,
        commit: &str,
        name: &'n str,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Remote<'n>> {
        let mut url = self.file_url(repo, commit, name);
        for _ in 0..5 {
            let response = self.send(&self.direct, Method::HEAD, &url, None, name, on_event).await?;
            let headers = response.headers();
            let linked = header(headers, "x-linked-etag").zip(header(headers, "x-linked-size"));
            let plain = header(headers, ETAG.as_str()).zip(header(headers, CONTENT_LENGTH.as_str()));
            let redirected = response.status().is_redirection();
            if let Some((etag, bytes)) = linked.or(plain.filter(|_| !redirected)) {
                let etag = etag.trim_start_matches("W/").trim_matches('"').to_string();
                if let (true, Ok(bytes)) = (is_etag(&etag), bytes.parse()) {
                    return Ok(Remote { name, etag, bytes });
                }
                break;
            }
            // A moved repository or a cached copy at the same host; the token must not go anywhere else.
            let next = header(headers, LOCATION.as_str()).and_then(|to| url.join(to).ok());
            match next.filter(|next| redirected && next.origin() == self.base.origin()) {
                Some(next) => url = next,
                None => break,
            }
        }
        Err(Error::new(Kind::Network, format!("{} gives no size and content hash for {name}", self.host())))
    }

    /// Downloads one file into its blob, unless that is there already.
    async fn file(
        &self,
        repo: &str,
        commit: &str,
        file: &Remote<'_>,
        snapshots: &Snapshots,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        if is_present(file, snapshots)? {
            return Ok(());
        }
        let blob = snapshots.blob(&file.etag)?;
        let url = self.file_url(repo, commit, file.name);
        // The lock on the repository makes this name ours, so a killed download leaves one file at most.
        let mut partial = Partial::create(blob.with_file_name(format!("{}.cactus.incomplete", file.etag)))?;
        let mut hash = Sha256::new();
        let mut have = 0u64;
        for attempt in 0.. {
            let mut response = self.send(&self.following, Method::GET, &url, Some(have), file.name, on_event).await?;
            // A server that does not know ranges starts over; what we have is passed over.
            let mut skip = have;
            if response.status() == StatusCode::PARTIAL_CONTENT {
                let range = header(response.headers(), CONTENT_RANGE.as_str()).unwrap_or_default();
                if !range.starts_with(&format!("bytes {have}-")) {
                    return Err(Error::new(
                        Kind::Network,
                        format!("{} sent another part of {} than asked", self.host(), file.name),
                    ));
                }
                skip = 0;
            }
            let cut = loop {
                let chunk = match response.chunk().await {
                    Ok(Some(chunk)) => chunk,
                    Ok(None) => break "the connection was closed early".to_string(),
                    Err(e) => break deepest(&e),
                };
                let passed = skip.min(chunk.len() as u64);
                skip -= passed;
                let fresh = &chunk[passed as usize..];
                if fresh.len() as u64 > file.bytes - have {
                    return Err(self.damaged(file, "is longer than the hub says"));
                }
                partial.file.write_all(fresh).map_err(|e| Error::io("write", partial.path(), &e))?;
                hash.update(fresh);
                have += fresh.len() as u64;
                on_event(Event::Advance(fresh.len() as u64));
            };
            if have == file.bytes {
                break;
            }
            if attempt == RETRIES {
                return Err(Error::new(
                    Kind::Network,
                    format!("{} of {} stopped after {have} of {} bytes: {cut}", file.name, self.repo, file.bytes),
                )
                .with_hint("run the same command again"));
            }
            on_event(Event::Note(&format!("{} stopped after {have} bytes; going on from there", file.name)));
            tokio::time::sleep(self.backoff(attempt)).await;
        }
        if is_sha256(&file.etag) && hex(&hash.finalize()) != file.etag {
            return Err(self.damaged(file, "does not have the SHA-256 that the hub names"));
        }
        partial.keep(&blob)
    }

    /// Sends one request, with patience for a busy hub; any other answer than success or a shown redirect is
    /// an error. `thing` is what the request is about, for the message; `from` asks for the bytes from there.
    async fn send(
        &self,
        client: &reqwest::Client,
        method: Method,
        url: &Url,
        from: Option<u64>,
        thing: &str,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Response> {
        for attempt in 0.. {
            let mut request: RequestBuilder = client.request(method.clone(), url.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(auth) = &self.auth {
                request = request.header(AUTHORIZATION, auth.clone());
            }
            if let Some(from) = from.filter(|&from| from > 0) {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            let response = request.send().await.map_err(|e| self.unreachable(e))?;
            let status = response.status();
            if status.is_success() || status.is_redirection() {
                return Ok(response);
            }
            if status != StatusCode::TOO_MANY_REQUESTS && !status.is_server_error() {
                return Err(self.refusal(status, response.headers(), thing));
            }
            let asked = header(response.headers(), RETRY_AFTER.as_str()).and_then(|s| s.parse().ok()).map(Duration::from_secs);
            let wait = asked.unwrap_or_else(|| self.backoff(attempt));
            if attempt == RETRIES || wait > LONGEST_WAIT {
                let busy = if status.is_server_error() { "has a fault of its own" } else { "asks for fewer requests" };
                let message = format!("{} {busy} (status {})", self.host(), status.as_u16());
                return Err(Error::new(Kind::Network, message).with_hint(match asked {
                    Some(asked) => format!("try again in {} seconds", asked.as_secs()),
                    None => "try again later".to_string(),
                }));
            }
            on_event(Event::Note(&format!("{} is busy; next try in {:.0} s", self.host(), wait.as_secs_f32().ceil())));
            tokio::time::sleep(wait).await;
        }
        unreachable!("the last attempt returns")
    }

    fn backoff(&self, attempt: u32) -> Duration {
        self.settings.backoff.saturating_mul(1 << attempt.min(RETRIES))
    }

    /// The error for an answer that says no. What the hub means is in `X-Error-Code`; bodies may be web pages
    /// and are never shown.
    fn refusal(&self, status: StatusCode, headers: &HeaderMap, thing: &str) -> Error {
        let repo = self.repo;
        let page = format!("{}/{repo}", self.address());
        let code = header(headers, "x-error-code").unwrap_or_default();
        let said = header(headers, "x-error-message").unwrap_or_default();
        let origin = self.settings.token.as_ref().map(|token| token.origin());
        let near = catalog::near(repo);
        let similar = match near.is_empty() {
            true => "check the name".to_string(),
            false => format!("did you mean {}?", near.join(" or ")),
        };
        match (status.as_u16(), code, origin) {
            (401 | 403, "GatedRepo", None) => {
                Error::new(Kind::Network, format!("{repo} is gated: it needs an account that accepted its licence"))
                    .with_hint(format!("accept it at {page}, make a token, and set HF_TOKEN"))
            }
            (401 | 403, "GatedRepo", Some(origin)) => {
                Error::new(Kind::Network, format!("{repo} is gated, and the account of your token has not been let in"))
                    .with_hint(format!("accept the licence at {page} with the account of the token in {origin}"))
            }
            (404, "RevisionNotFound", _) => Error::not_found(format!("{repo} has no revision {thing}")),
            (404, "EntryNotFound", _) => Error::not_found(format!("{repo} has no file {thing}")),
            (404, ..) | (401, "RepoNotFound", _) => {
                Error::not_found(format!("no model {repo} on {}", self.host())).with_hint(similar)
            }
            (401, _, None) => {
                Error::new(Kind::Network, format!("{} shows no {repo}: it does not exist, or it is private", self.host()))
                    .with_hint(format!("{similar}; for a private model set HF_TOKEN"))
            }
            (401, _, Some(origin)) => Error::new(Kind::Network, format!("{} does not accept the token in {origin}", self.host()))
                .with_hint("make a new token, or remove this one for public models"),
            (number, ..) => {
                let said: String = said.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(150).collect();
                let said = if said.is_empty() || said.contains('<') { String::new() } else { format!(": {said}") };
                Error::new(Kind::Network, format!("{} refuses {thing} of {repo} (status {number}){said}", self.host()))
            }
        }
    }

    /// The error for a request that got no answer. Addresses are left out: those of redirects hold secrets.
    fn unreachable(&self, error: reqwest::Error) -> Error {
        let reason = match (error.is_connect(), error.is_timeout()) {
            (true, true) => "no connection within 5 seconds".to_string(),
            (false, true) => "no answer within 30 seconds".to_string(),
            _ => deepest(&error),
        };
        let hint = match reason.contains("certificate") {
            true => "if a proxy signs connections anew, set SSL_CERT_FILE to its certificate".to_string(),
            false => "check the network, HTTPS_PROXY and HF_ENDPOINT, or give a local folder or .gguf file".to_string(),
        };
        Error::new(Kind::Network, format!("cannot reach {}: {reason}", self.address())).with_hint(hint)
    }

    fn damaged(&self, file: &Remote, what: &str) -> Error {
        Error::new(Kind::BadFile, format!("{} of {} {what}; it was not kept", file.name, self.repo))
            .with_hint("try again; if it happens twice, a proxy or mirror is changing files")
    }

    fn host(&self) -> &str {
        self.base.host_str().unwrap_or("the hub")
    }

    /// The hub's address without a user name or password that may be in it.
    fn address(&self) -> String {
        let port = self.base.port().map(|port| format!(":{port}")).unwrap_or_default();
        format!("{}://{}{port}{}", self.base.scheme(), self.host(), self.base.path().trim_end_matches('/'))
    }

    fn url(&self, segments: &[&str]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    fn file_url(&self, repo: &str, commit: &str, name: &str) -> Url {
        let (owner, repo) = repo.split_once('/').unwrap_or((repo, ""));
        let mut segments = vec![owner, repo, "resolve", commit];
        segments.extend(name.split('/'));
        self.url(&segments)
    }
}

fn is_present(file: &Remote, snapshots: &Snapshots) -> Result<bool> {
    let blob = snapshots.blob(&file.etag)?;
    Ok(std::fs::metadata(blob).is_ok_and(|meta| meta.len() == file.bytes))
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Whether an etag can be a file name.
fn is_etag(etag: &str) -> bool {
    (8..=128).contains(&etag.len()) && etag.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn is_sha256(etag: &str) -> bool {
    etag.len() == 64 && etag.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|ip| ip.is_loopback())
}

/// The innermost cause, which says most ("connection refused"), on one line.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}
