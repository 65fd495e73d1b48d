//! Who may ask: the key, and which pages and names a browser may come from.
//!
//! A page that somebody visits can send requests to a server on the same machine. So a browser's `Origin` must be the
//! server's own or one that was allowed, and `Host` must be an address or a name that was allowed, which stops names that
//! are made to point here (DNS rebinding).

use super::App;
use super::failure::Failure;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;

/// Who may ask.
pub struct Access {
    pub key: Option<String>,
    /// Origins beside the own; `*` is all.
    pub origins: Vec<String>,
    /// Host names beside addresses and `localhost`.
    pub hosts: Vec<String>,
}

impl Access {
    fn check(&self, headers: &HeaderMap, path: &str) -> Result<(), Failure> {
        let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        let host = text(header::HOST).unwrap_or("localhost");
        if !self.knows_host(host) {
            let what = format!("requests for host {host:?} are not answered (--allow-host)");
            return Err(Failure::new(StatusCode::FORBIDDEN, "foreign_host", what));
        }
        if let Some(origin) = text(header::ORIGIN).filter(|origin| !self.knows_origin(origin, host)) {
            let what = format!("requests of pages from {origin:?} are not answered (--allow-origin)");
            return Err(Failure::new(StatusCode::FORBIDDEN, "foreign_origin", what));
        }
        let Some(key) = self.key.as_deref().filter(|_| !matches!(path, "/" | "/health")) else { return Ok(()) };
        let given = text(header::AUTHORIZATION).and_then(|text| text.strip_prefix("Bearer "));
        match given.or_else(|| text(HeaderName::from_static("x-api-key"))) {
            Some(given) if same(given.trim().as_bytes(), key.as_bytes()) => Ok(()),
            Some(_) => Err(Failure::new(StatusCode::UNAUTHORIZED, "invalid_api_key", "the API key is wrong")),
            None => {
                Err(Failure::new(StatusCode::UNAUTHORIZED, "missing_api_key", "an API key is needed: Authorization: Bearer KEY"))
            }
        }
    }

    fn knows_host(&self, host: &str) -> bool {
        let name = name_of(host);
        name.eq_ignore_ascii_case("localhost")
            || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
            || self.hosts.iter().any(|known| known.eq_ignore_ascii_case(name))
    }

    fn knows_origin(&self, origin: &str, host: &str) -> bool {
        let own = origin.strip_prefix("http://").is_some_and(|from| from.eq_ignore_ascii_case(host));
        own || self.origins.iter().any(|known| known == "*" || known.eq_ignore_ascii_case(origin))
    }
}

/// A host without its port.
fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && (!name.contains(':') || name.ends_with(']')) => name,
        _ => host,
    }
}

/// Compares in a time that does not tell where texts differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// Lets a request through or says why not; answers browsers that ask first.
pub async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let origin = headers.get(header::ORIGIN).cloned();
    let asked = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let preflight = request.method() == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let path = if preflight { "/" } else { request.uri().path() };
    let checked = app.access.check(headers, path);
    let foreign = checked.as_ref().is_err_and(|failure| failure.status == StatusCode::FORBIDDEN);
    let mut response = match checked {
        Err(failure) => failure.into_response(),
        Ok(()) if preflight => StatusCode::NO_CONTENT.into_response(),
        Ok(()) => next.run(request).await,
    };
    if let Some(origin) = origin.filter(|_| !foreign) {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("Origin"));
        if preflight {
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
            let any = HeaderValue::from_static("authorization, content-type");
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(any));
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_allowed_names_are_hosts() {
        let access = Access { key: None, origins: vec!["https://a.example".into()], hosts: vec!["box.lan".into()] };
        for host in ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "[::1]:8080", "::1", "192.168.1.7", "box.lan:1"] {
            assert!(access.knows_host(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example", "", "box.lan.evil"] {
            assert!(!access.knows_host(host), "{host}");
        }
        assert!(access.knows_origin("http://127.0.0.1:8080", "127.0.0.1:8080"));
        assert!(access.knows_origin("https://a.example", "127.0.0.1:8080"));
        for origin in ["http://127.0.0.1:3000", "null", "https://a.example.evil", "http://a.example"] {
            assert!(!access.knows_origin(origin, "127.0.0.1:8080"), "{origin}");
        }
        assert!(same(b"key", b"key") && !same(b"key", b"kez") && !same(b"key", b"keys"));
    }
}
