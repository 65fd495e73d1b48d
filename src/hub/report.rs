//! What is in force between this machine and the hub, for people who look for a fault.

use super::settings::Settings;
use crate::error::{Error, Kind, Result};
use reqwest::Url;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The settings of this room without anything secret.
#[derive(Clone, Debug)]
pub struct Report {
    /// Our own cache folder.
    pub cache: PathBuf,
    /// The Hugging Face cache folder.
    pub hf_cache: PathBuf,
    /// Address of the hub.
    pub endpoint: String,
    /// Where the token was found: a variable or a file.
    pub token_from: Option<String>,
    /// `HF_HUB_OFFLINE` forbids requests.
    pub offline: bool,
}

/// Reads the environment.
pub fn report() -> Result<Report> {
    let Settings { root, hf_cache, endpoint, token, offline, .. } = Settings::from_env()?;
    let token_from = token.map(|token| token.origin().to_owned());
    Ok(Report { cache: root, hf_cache, endpoint, token_from, offline })
}

impl Report {
    /// Asks the hub for anything at all, without a token, and returns how long the answer took. Proxies and
    /// certificates are those that downloads use. Blocks for `limit` at most.
    pub fn reach(&self, limit: Duration) -> Result<Duration> {
        let failed = |e: &dyn std::fmt::Display| Error::new(Kind::Network, format!("cannot reach {}: {e}", self.endpoint));
        let url = Url::parse(&self.endpoint).map_err(|e| failed(&e))?;
        // Fails only if a provider is installed already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder().timeout(limit).redirect(reqwest::redirect::Policy::none());
        if matches!(url.host_str(), Some("localhost" | "127.0.0.1" | "[::1]")) {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|e| failed(&e))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| failed(&e))?;
        let begin = Instant::now();
        let answer = runtime.block_on(async { client.head(url).send().await });
        // A name lookup may still hang in its thread; nobody waits for it.
        runtime.shutdown_background();
        match answer {
            Ok(_) => Ok(begin.elapsed()),
            Err(e) if e.is_timeout() => Err(failed(&format!("no answer within {} s", limit.as_secs_f64()))),
            Err(e) => Err(failed(&innermost(&e))),
        }
    }
}

/// The first cause, which names the fault.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    fn at(endpoint: String) -> Report {
        Report { cache: "c".into(), hf_cache: "h".into(), endpoint, token_from: None, offline: false }
    }

    #[test]
    fn any_answer_is_an_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let read = stream.read(&mut request).unwrap();
            stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n").unwrap();
            String::from_utf8_lossy(&request[..read]).to_lowercase()
        });
        at(format!("http://{address}")).reach(Duration::from_secs(5)).unwrap();
        let request = server.join().unwrap();
        assert!(request.starts_with("head / ") && !request.contains("authorization"), "{request}");
    }

    #[test]
    fn silence_and_refusal_are_told_apart() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let begin = Instant::now();
        let silent = at(format!("http://{address}")).reach(Duration::from_millis(300)).unwrap_err();
        assert!(begin.elapsed() < Duration::from_secs(2));
        assert_eq!(silent.kind, Kind::Network);
        assert!(silent.message().contains("within 0.3 s"), "{silent}");
        drop(listener);
        let refused = at(format!("http://{address}")).reach(Duration::from_secs(5)).unwrap_err();
        assert!(refused.message().contains("refused"), "{refused}");
        assert_eq!(at("not an address".into()).reach(Duration::from_secs(1)).unwrap_err().kind, Kind::Network);
    }
}
