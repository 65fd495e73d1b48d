//! What a repository holds, and its files, checked, into the cache.
//!
//! The requests are those of Python's client: the revision's listing, then for each file a HEAD that names
//! size and content hash (on the redirect itself for large files), then a GET. See
//! <https://huggingface.co/docs/hub/api>.

use super::cache::{Lock, check_room};
use super::files::{self, Selection};
use super::http::{Ask, Body, Http, RETRIES, header};
use super::incoming::{Incoming, Underway, partial_of};
use super::settings::Settings;
use super::snapshot::{Complete, Snapshots, is_commit};
use super::{Event, http, is_repo_id};
use crate::error::{Error, Kind, Result};
use reqwest::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LOCATION};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Map, Value};

/// A connection that brought this much before it broke is worth as many further tries as a new one.
const PROGRESS_BYTES: u64 = 1 << 20;

/// Talks to the hub about one repository.
pub(super) struct Client<'a> {
    pub http: Http<'a>,
    pub repo: &'a str,
}

/// What the hub says about a revision of a repository.
#[derive(serde::Deserialize)]
pub(super) struct Listing {
    pub id: Option<String>,
    pub sha: String,
    pub siblings: Vec<Sibling>,
    /// Everything that is not needed for a download: licence, counts, configuration.
    #[serde(flatten)]
    pub about: Map<String, Value>,
}

#[derive(Clone, serde::Deserialize)]
pub(super) struct Sibling {
    pub rfilename: String,
    pub size: Option<u64>,
    #[serde(rename = "blobId")]
    pub blob_id: Option<String>,
    pub lfs: Option<Large>,
}

/// A file that the hub keeps outside of git.
#[derive(Clone, serde::Deserialize)]
pub(super) struct Large {
    pub sha256: Option<String>,
}

/// A file as the hub describes it.
pub(super) struct Remote<'n> {
    pub name: &'n str,
    /// Name of the content: its SHA-256 for large files, a git hash for small ones.
    pub etag: String,
    /// `None` from a server that tells no length.
    pub bytes: Option<u64>,
    /// The entity tag as sent, when the server that gives the content is the one that gave the tag.
    validator: Option<String>,
}

/// Where files come from: a repository under the name it has today, and a revision of it.
pub(super) struct Place<'p> {
    pub repo: String,
    pub revision: &'p str,
    pub commit: String,
}

/// How far a body got.
enum Arrived {
    All,
    /// It ended early; the text says how.
    Part(String),
}

impl<'a> Client<'a> {
    pub fn new(settings: &'a Settings, repo: &'a str) -> Result<Client<'a>> {
        Ok(Client { http: Http::new(settings)?, repo })
    }

    /// Downloads what the checkpoint at `revision` needs and makes it visible in the cache.
    pub fn fetch(&self, revision: &str, snapshots: &Snapshots, on_event: &mut dyn FnMut(Event)) -> Result<Complete> {
        http::block_on(self.fetch_all(revision, snapshots, on_event))
    }

    async fn fetch_all(&self, revision: &str, snapshots: &Snapshots, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Complete> {
        let listing = self.listing(revision, on_event).await?;
        let names: Vec<String> = listing.siblings.iter().map(|s| s.rfilename.clone()).collect();
        let place = self.place(&listing, revision);
        let unusable = |reason: String| Error::unsupported(format!("{}: {reason}", self.repo));

        let mut done: Vec<Remote> = Vec::new();
        let mut shards = None;
        if let Some(name) = files::index(&names) {
            let index = self.describe(&place, name, &listing, on_event).await?;
            let blob = snapshots.blob(&index.etag)?;
            self.file(&place, &index, snapshots, &mut |event| {
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
            wanted.push(self.describe(&place, name, &listing, on_event).await?);
        }
        on_event(Event::Start { what: self.repo, total_bytes: self.absent(&wanted, snapshots)? });
        for file in wanted {
            self.file(&place, &file, snapshots, on_event).await?;
            done.push(file);
        }
        // Links last and in order: a snapshot that shows its last weight file is complete.
        for name in &chosen {
            for file in done.iter().filter(|file| file.name == name) {
                snapshots.link(&place.commit, name, &file.etag)?;
            }
        }
        snapshots.set_revision(revision, &place.commit)?;
        on_event(Event::Finish);
        let folder = snapshots.snapshot(&place.commit);
        Ok(Complete { path: gguf.map_or(folder.clone(), |file| folder.join(file)), commit: place.commit })
    }

    /// What the repository holds at `revision`.
    pub async fn listing(&self, revision: &str, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Listing> {
        let (owner, name) = self.repo.split_once('/').unwrap_or((self.repo, ""));
        let mut url = self.http.url(&["api", "models", owner, name, "revision", revision]);
        url.set_query(Some("blobs=true"));
        match self.http.json::<Listing>(&Ask::get(url, self.repo, revision), on_event).await? {
            listing if is_commit(&listing.sha) => Ok(listing),
            _ => Err(self.http.no_hub()),
        }
    }

    /// A renamed repository answers with its new name.
    pub fn place<'p>(&self, listing: &Listing, revision: &'p str) -> Place<'p> {
        let repo = listing.id.clone().filter(|id| is_repo_id(id)).unwrap_or_else(|| self.repo.to_string());
        Place { repo, revision, commit: listing.sha.clone() }
    }

    /// Size and content name of one file.
    pub async fn describe<'n>(
        &self,
        place: &Place<'_>,
        name: &'n str,
        listing: &Listing,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Remote<'n>> {
        let listed = listing.siblings.iter().find(|s| s.rfilename == name);
        let listed_bytes = listed.and_then(|s| s.size);
        let mut url = self.http.file_url(&place.repo, &place.commit, name);
        for _ in 0..5 {
            let ask = Ask { method: Method::HEAD, direct: true, ..Ask::get(url.clone(), self.repo, name) };
            let response = self.http.send(&ask, on_event).await?;
            let headers = response.headers();
            if let Some(etag) = header(headers, "x-linked-etag").and_then(plain_etag) {
                let bytes = header(headers, "x-linked-size").and_then(|s| s.parse().ok()).or(listed_bytes);
                return Ok(Remote { name, etag, bytes, validator: None });
            }
            if !response.status().is_redirection() {
                let tag = header(headers, ETAG.as_str());
                let Some(etag) = tag.and_then(plain_etag) else { break };
                // The length of a packed body says nothing about the file.
                let packed = headers.contains_key(CONTENT_ENCODING);
                let length = header(headers, CONTENT_LENGTH.as_str()).filter(|_| !packed);
                let bytes = length.and_then(|s| s.parse().ok()).or(listed_bytes);
                let validator = tag.filter(|tag| tag.starts_with('"')).map(str::to_string);
                return Ok(Remote { name, etag, bytes, validator });
            }
            // A moved repository or a cached copy at the same host; the token must not go anywhere else.
            let next = header(headers, LOCATION.as_str()).and_then(|to| url.join(to).ok());
            match next.filter(|next| next.origin() == self.http.base.origin()) {
                Some(next) => url = next,
                None => break,
            }
        }
        let hash = |s: &Sibling| s.lfs.as_ref().and_then(|lfs| lfs.sha256.clone()).or_else(|| s.blob_id.clone());
        match listed.and_then(hash).filter(|etag| is_etag(etag)) {
            Some(etag) => Ok(Remote { name, etag, bytes: listed_bytes, validator: None }),
            None => Err(Error::new(Kind::Network, format!("{} gives no content hash for {name}", self.http.host()))
                .with_hint("if HF_ENDPOINT names a mirror, it does not serve what downloads need")),
        }
    }

    /// Bytes of `wanted` that are still to come, `None` if a server does not say; an error if there is no room
    /// for them.
    pub fn absent(&self, wanted: &[Remote], snapshots: &Snapshots) -> Result<Option<u64>> {
        let (mut absent, mut all_known) = (0u64, true);
        for file in wanted {
            if !is_present(file, snapshots)? {
                let partial = partial_of(&snapshots.blob(&file.etag)?);
                let have = std::fs::metadata(partial).map_or(0, |meta| meta.len());
                all_known &= file.bytes.is_some();
                absent = absent.saturating_add(file.bytes.unwrap_or(0).saturating_sub(have));
            }
        }
        let folder = snapshots.blobs()?;
        check_room(&folder, absent, self.repo)?;
        Ok(all_known.then_some(absent))
    }

    /// Downloads one file into its blob, unless that is there already. The caller holds the lock of the
    /// repository; that of the blob keeps Python's client away.
    pub async fn file(
        &self,
        place: &Place<'_>,
        file: &Remote<'_>,
        snapshots: &Snapshots,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        if is_present(file, snapshots)? {
            return Ok(());
        }
        let _lock = Lock::take(&snapshots.blob_lock(&file.etag), file.name, on_event)?;
        if is_present(file, snapshots)? {
            return Ok(());
        }
        let blob = snapshots.blob(&file.etag)?;
        let mut underway = Underway::open(snapshots.underway_path());
        let stale = |etag: &str| is_etag(etag).then(|| blob.with_file_name(etag));
        underway.begin(place.revision, file.name, &file.etag, stale)?;

        let mut incoming = Incoming::open(&blob)?;
        // Without a length there is no telling whether the beginning is the whole.
        if file.bytes.is_none_or(|bytes| incoming.have > bytes) {
            incoming.restart()?;
        }
        let mut resumed = incoming.have > 0;
        if resumed && file.bytes != Some(incoming.have) {
            on_event(Event::Note(&format!("{}: going on after {}", file.name, megabytes(incoming.have))));
        }
        let mut counted = incoming.have;
        let mut failures = 0;
        loop {
            let before = incoming.have;
            let arrived = match file.bytes == Some(incoming.have) {
                true => Arrived::All,
                false => self.pull(place, file, &mut incoming, &mut counted, on_event).await?,
            };
            match arrived {
                Arrived::All if !is_sha256(&file.etag) || incoming.sha256() == file.etag => break,
                // The beginning may have been spoilt by a power cut or another program.
                Arrived::All if resumed => {
                    on_event(Event::Note(&format!("{}: what was here is damaged; starting over", file.name)));
                    incoming.restart()?;
                    resumed = false;
                }
                Arrived::All => {
                    incoming.discard();
                    return Err(self.damaged(file, "does not have the SHA-256 that the hub names"));
                }
                Arrived::Part(how) => {
                    if incoming.have >= before.saturating_add(PROGRESS_BYTES) {
                        failures = 0;
                    }
                    if failures == RETRIES {
                        let of = file.bytes.map_or(String::new(), |bytes| format!(" of {bytes}"));
                        return Err(Error::new(
                            Kind::Network,
                            format!("{} of {} stopped after {}{of} bytes: {how}", file.name, self.repo, incoming.have),
                        )
                        .with_hint("run the same command again; it goes on from there"));
                    }
                    on_event(Event::Note(&format!("{} stopped after {} bytes; trying again", file.name, incoming.have)));
                    tokio::time::sleep(self.http.backoff(failures)).await;
                    failures += 1;
                    if file.bytes.is_none() {
                        incoming.restart()?;
                    }
                }
            }
        }
        incoming.keep(&blob)?;
        underway.end(place.revision, file.name)
    }

    /// One request for what is missing of `file`. `counted` bytes have been told as progress so far.
    async fn pull(
        &self,
        place: &Place<'_>,
        file: &Remote<'_>,
        incoming: &mut Incoming,
        counted: &mut u64,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Arrived> {
        let url = self.http.file_url(&place.repo, &place.commit, file.name);
        let ask = Ask { from: incoming.have, if_etag: file.validator.as_deref(), ..Ask::get(url, self.repo, file.name) };
        let response = self.http.send(&ask, on_event).await?;
        if !continues(&response, incoming.have, file.bytes) {
            if response.status() != StatusCode::OK {
                incoming.restart()?;
                return Ok(Arrived::Part("the server sent another part than asked".to_string()));
            }
            // The server does not know ranges, or the file is another one by now.
            incoming.restart()?;
        }
        let mut body = match Body::new(response) {
            Ok(body) => body,
            Err(how) => return Err(self.damaged(file, &format!("cannot be read: {how}"))),
        };
        loop {
            let chunk = match body.chunk().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                Err(how) => return Ok(Arrived::Part(how)),
            };
            if file.bytes.is_some_and(|bytes| chunk.len() as u64 > bytes - incoming.have) {
                incoming.restart()?;
                return Err(self.damaged(file, "is longer than the hub says"));
            }
            incoming.write(chunk)?;
            if incoming.have > *counted {
                on_event(Event::Advance(incoming.have - *counted));
                *counted = incoming.have;
            }
        }
        match file.bytes {
            Some(bytes) if incoming.have < bytes => Ok(Arrived::Part("the connection was closed early".to_string())),
            _ => Ok(Arrived::All),
        }
    }

    fn damaged(&self, file: &Remote, what: &str) -> Error {
        Error::new(Kind::BadFile, format!("{} of {} {what}; it was not kept", file.name, self.repo))
            .with_hint("try again; if it happens twice, a proxy or mirror is changing files")
    }
}

/// Whether the body of `response` begins at byte `have` of a file of `bytes` bytes.
fn continues(response: &Response, have: u64, bytes: Option<u64>) -> bool {
    if response.status() != StatusCode::PARTIAL_CONTENT {
        return have == 0 && response.status() == StatusCode::OK;
    }
    let range = header(response.headers(), CONTENT_RANGE.as_str()).unwrap_or_default();
    let Some((part, total)) = range.strip_prefix("bytes ").and_then(|r| r.split_once('/')) else { return false };
    let same_total = total == "*" || total.parse().ok() == bytes;
    // A part of a packed body is no part of the file.
    have > 0 && part.starts_with(&format!("{have}-")) && same_total && !response.headers().contains_key(CONTENT_ENCODING)
}

fn is_present(file: &Remote, snapshots: &Snapshots) -> Result<bool> {
    let blob = snapshots.blob(&file.etag)?;
    Ok(std::fs::metadata(blob).is_ok_and(|meta| file.bytes.is_none_or(|bytes| meta.len() == bytes)))
}

/// An entity tag without its marks, if it can be a file name.
fn plain_etag(tag: &str) -> Option<String> {
    let etag = tag.trim_start_matches("W/").trim_matches('"');
    is_etag(etag).then(|| etag.to_string())
}

/// Whether an etag can be a file name.
fn is_etag(etag: &str) -> bool {
    (8..=128).contains(&etag.len()) && etag.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn is_sha256(etag: &str) -> bool {
    etag.len() == 64 && etag.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}
