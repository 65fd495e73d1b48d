//! Requests to the hub: connections, the token, patience with a busy hub, and what its refusals mean.

use super::settings::Settings;
use super::{Event, catalog};
use crate::error::{Error, Kind, Result};
use flate2::write::MultiGzDecoder;
use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, HeaderMap, HeaderValue, IF_RANGE, RANGE, RETRY_AFTER};
use reqwest::{Certificate, Method, Response, StatusCode, Url, redirect};
use std::future::Future;
use std::io::Write;
use std::time::Duration;

/// A machine without a route to the hub should say so quickly.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest silence in the middle of an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Further tries after an answer that asks for patience or stops in the middle.
pub(super) const RETRIES: u32 = 3;
/// Longest wait in all that the hub may ask for before we hand the matter to the user; its rate limits are
/// counted in windows of five minutes (<https://huggingface.co/docs/hub/rate-limits>).
const LONGEST_WAIT: Duration = Duration::from_secs(300);
/// Longest answer that is kept in memory; the longest known listings are below 2 MB.
const ANSWER_BYTES: usize = 32 << 20;

/// Connections to one hub.
pub(super) struct Http<'a> {
    pub settings: &'a Settings,
    pub base: Url,
    auth: Option<HeaderValue>,
    /// Follows redirects, dropping the token on another host.
    following: reqwest::Client,
    /// Shows redirects: their headers carry the hash of a large file.
    direct: reqwest::Client,
}

/// One request.
pub(super) struct Ask<'r> {
    pub method: Method,
    pub url: Url,
    /// The repository it is about, for messages; empty for a search.
    pub repo: &'r str,
    /// The revision or file that it is about, for messages.
    pub thing: &'r str,
    /// Bytes from here on, if not 0.
    pub from: u64,
    /// Only if this is still the content's entity tag; everything otherwise.
    pub if_etag: Option<&'r str>,
    /// Redirects are shown, not followed.
    pub direct: bool,
}

impl<'r> Ask<'r> {
    pub fn get(url: Url, repo: &'r str, thing: &'r str) -> Ask<'r> {
        Ask { method: Method::GET, url, repo, thing, from: 0, if_etag: None, direct: false }
    }
}

/// Runs a conversation with the hub to its end.
pub(super) fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    if tokio::runtime::Handle::try_current().is_ok() {
        return Err(Error::usage("a download cannot be started from async code; use a thread of its own"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::new(Kind::Io, format!("cannot start the downloader: {e}")))?;
    let result = runtime.block_on(work);
    // A name lookup may still hang in its thread; nobody waits for it.
    runtime.shutdown_background();
    result
}

impl<'a> Http<'a> {
    pub fn new(settings: &'a Settings) -> Result<Http<'a>> {
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
        let roots = roots(settings)?;
        let build = |policy: redirect::Policy| {
            let mut builder = reqwest::Client::builder()
                .user_agent(concat!("cactus/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(CONNECT_TIMEOUT)
                .read_timeout(READ_TIMEOUT)
                .tls_certs_merge(roots.clone())
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
        Ok(Http { settings, base, auth, following, direct })
    }

    /// Sends one request, with patience for a busy hub. Any other answer than success, a shown redirect or, to
    /// a request for a part, "no such part" is an error.
    pub async fn send(&self, ask: &Ask<'_>, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Response> {
        let client = if ask.direct { &self.direct } else { &self.following };
        let mut waited = Duration::ZERO;
        for attempt in 0.. {
            let mut request = client.request(ask.method.clone(), ask.url.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(auth) = &self.auth {
                request = request.header(AUTHORIZATION, auth.clone());
            }
            if ask.from > 0 {
                request = request.header(RANGE, format!("bytes={}-", ask.from));
                if let Some(etag) = ask.if_etag {
                    request = request.header(IF_RANGE, etag);
                }
            }
            let response = match request.send().await {
                Ok(response) => response,
                // A connection that breaks while the answer is awaited is worth another try, a missing one is not.
                Err(e) if e.is_connect() || e.is_timeout() || attempt == RETRIES => return Err(self.unreachable(e)),
                Err(_) => {
                    tokio::time::sleep(self.backoff(attempt)).await;
                    continue;
                }
            };
            let status = response.status();
            let no_such_part = status == StatusCode::RANGE_NOT_SATISFIABLE && ask.from > 0;
            if status.is_success() || status.is_redirection() || no_such_part {
                return Ok(response);
            }
            if ![StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(&status) && !status.is_server_error() {
                return Err(self.refusal(status, response.headers(), ask));
            }
            let asked = asked_wait(response.headers());
            let wait = asked.unwrap_or_else(|| self.backoff(attempt));
            waited = waited.saturating_add(wait);
            if attempt == RETRIES || waited > LONGEST_WAIT {
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

    /// Sends a request and reads the whole answer.
    pub async fn bytes(&self, ask: &Ask<'_>, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Vec<u8>> {
        let mut body = Body::new(self.send(ask, on_event).await?).map_err(|what| self.broken(&what))?;
        let mut bytes = Vec::new();
        while let Some(chunk) = body.chunk().await.map_err(|what| self.broken(&what))? {
            if bytes.len() + chunk.len() > ANSWER_BYTES {
                return Err(self.broken("the answer is too long"));
            }
            bytes.extend_from_slice(chunk);
        }
        Ok(bytes)
    }

    /// Sends a request and reads the answer as JSON.
    pub async fn json<T: serde::de::DeserializeOwned>(&self, ask: &Ask<'_>, on_event: &mut dyn FnMut(Event<'_>)) -> Result<T> {
        serde_json::from_slice(&self.bytes(ask, on_event).await?).map_err(|_| self.no_hub())
    }

    /// The error for an answer that no hub would give.
    pub fn no_hub(&self) -> Error {
        Error::new(Kind::Network, format!("{} does not answer as a hub does", self.host()))
            .with_hint("if a network login page is in the way, sign in there first; otherwise check HF_ENDPOINT")
    }

    fn broken(&self, what: &str) -> Error {
        Error::new(Kind::Network, format!("{}: {what}", self.host())).with_hint("run the same command again")
    }

    pub fn backoff(&self, attempt: u32) -> Duration {
        self.settings.backoff.saturating_mul(1 << attempt.min(RETRIES))
    }

    /// The error for an answer that says no. What the hub means is in `X-Error-Code`; bodies may be web pages
    /// and are never shown.
    fn refusal(&self, status: StatusCode, headers: &HeaderMap, ask: &Ask) -> Error {
        let (repo, thing) = (ask.repo, ask.thing);
        let page = format!("{}/{repo}", self.address());
        let code = header(headers, "x-error-code").unwrap_or_default();
        let said = header(headers, "x-error-message").unwrap_or_default();
        let origin = self.settings.token.as_ref().map(|token| token.origin());
        let near = catalog::near(repo);
        let similar = match near.is_empty() {
            true => "check the name".to_string(),
            false => format!("did you mean {}?", near.join(" or ")),
        };
        let absent = || Error::not_found(format!("no model {repo} on {}", self.host()));
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
            // Without a token a private repository looks like none.
            (401, "RepoNotFound", None) => absent().with_hint(format!("{similar}; for a private model set HF_TOKEN")),
            (404, ..) | (401, "RepoNotFound", _) => absent().with_hint(similar),
            (401, _, None) => {
                Error::new(Kind::Network, format!("{} shows no {repo}: it does not exist, or it is private", self.host()))
                    .with_hint(format!("{similar}; for a private model set HF_TOKEN"))
            }
            (401, _, Some(origin)) => Error::new(Kind::Network, format!("{} does not accept the token in {origin}", self.host()))
                .with_hint("make a new token, or remove this one for public models"),
            (number, ..) => {
                let said: String = said.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(150).collect();
                let said = if said.is_empty() || said.contains('<') { String::new() } else { format!(": {said}") };
                let of = if repo.is_empty() { String::new() } else { format!(" of {repo}") };
                Error::new(Kind::Network, format!("{} refuses {thing}{of} (status {number}){said}", self.host()))
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

    pub fn host(&self) -> &str {
        self.base.host_str().unwrap_or("the hub")
    }

    /// The hub's address without a user name or password that may be in it.
    fn address(&self) -> String {
        let port = self.base.port().map(|port| format!(":{port}")).unwrap_or_default();
        format!("{}://{}{port}{}", self.base.scheme(), self.host(), self.base.path().trim_end_matches('/'))
    }

    pub fn url(&self, segments: &[&str]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    pub fn file_url(&self, repo: &str, commit: &str, name: &str) -> Url {
        let (owner, repo) = repo.split_once('/').unwrap_or((repo, ""));
        let mut segments = vec![owner, repo, "resolve", commit];
        segments.extend(name.split('/'));
        self.url(&segments)
    }
}

/// The body of an answer, unpacked if the server packed it although nobody asked for that.
pub(super) struct Body {
    response: Response,
    unpack: Option<MultiGzDecoder<Vec<u8>>>,
    chunk: Vec<u8>,
}

impl Body {
    /// The error names an encoding that is not known.
    pub fn new(response: Response) -> Result<Body, String> {
        let unpack = match header(response.headers(), CONTENT_ENCODING.as_str()) {
            None | Some("" | "identity") => None,
            Some("gzip" | "x-gzip") => Some(MultiGzDecoder::new(Vec::new())),
            Some(other) => return Err(format!("the answer is packed as `{}`, which nobody asked for", other.escape_debug())),
        };
        Ok(Body { response, unpack, chunk: Vec::new() })
    }

    /// The next bytes; `None` after the last. The error says how the answer broke off.
    pub async fn chunk(&mut self) -> Result<Option<&[u8]>, String> {
        let next = self.response.chunk().await.map_err(|e| deepest(&e))?;
        let Some(unpack) = &mut self.unpack else {
            let Some(bytes) = next else { return Ok(None) };
            self.chunk.clear();
            self.chunk.extend_from_slice(&bytes);
            return Ok(Some(&self.chunk));
        };
        match next {
            Some(bytes) => unpack.write_all(&bytes).map_err(|e| format!("the packed answer is damaged: {e}"))?,
            None => {
                unpack.try_finish().map_err(|e| format!("the packed answer is cut short: {e}"))?;
                if unpack.get_ref().is_empty() {
                    return Ok(None);
                }
            }
        }
        self.chunk = std::mem::take(unpack.get_mut());
        Ok(Some(&self.chunk))
    }
}

/// Certificates that `SSL_CERT_FILE` adds to those of the system. On Linux the system's part of the job is done
/// by `rustls-native-certs`, which takes that file instead of the usual places; elsewhere only this adds them.
fn roots(settings: &Settings) -> Result<Vec<Certificate>> {
    let Some(path) = &settings.certificates else { return Ok(Vec::new()) };
    let fix = "SSL_CERT_FILE must name a file with certificates in PEM form";
    let pem = std::fs::read(path).map_err(|e| Error::io("read", path, &e).with_hint(fix))?;
    match Certificate::from_pem_bundle(&pem) {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(Error::bad_file(path, "holds no certificate in PEM form").with_hint(fix)),
    }
}

/// How long a busy hub wants to be left alone: `Retry-After` in seconds or as a date, else the seconds to the
/// next window in `RateLimit` (`"api";r=0;t=55`).
fn asked_wait(headers: &HeaderMap) -> Option<Duration> {
    if let Some(value) = header(headers, RETRY_AFTER.as_str()) {
        if let Ok(seconds) = value.trim().parse() {
            return Some(Duration::from_secs(seconds));
        }
        if let Ok(date) = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(value.trim()) {
            let seconds = date.as_second().saturating_sub(jiff::Timestamp::now().as_second());
            return Some(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)));
        }
    }
    let parts = header(headers, "ratelimit")?.split(';');
    parts.filter_map(|part| part.trim().strip_prefix("t=")?.parse().ok()).map(Duration::from_secs).next()
}

pub(super) fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|ip| ip.is_loopback())
}

/// The innermost cause, which says most ("connection refused"), on one line.
pub(super) fn deepest(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_read_in_all_its_forms() {
        let wait = |name: &'static str, value: &str| {
            asked_wait(&HeaderMap::from_iter([(
                reqwest::header::HeaderName::from_static(name),
                HeaderValue::from_str(value).unwrap(),
            )]))
        };
        assert_eq!(wait("retry-after", "17"), Some(Duration::from_secs(17)));
        assert_eq!(wait("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert!(wait("retry-after", "Fri, 31 Dec 2100 23:59:59 GMT").unwrap() > Duration::from_secs(1 << 30));
        assert_eq!(wait("retry-after", "soon"), None);
        assert_eq!(wait("ratelimit", "\"api\";r=0;t=55"), Some(Duration::from_secs(55)));
        assert_eq!(wait("ratelimit", "\"api\";r=0"), None);
        assert_eq!(wait("etag", "55"), None);
    }
}
