//! A small model hub on the loopback interface, with faults to order. Files of 1,000 bytes and more are
//! redirected to another host name, as the real hub does with large files.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

/// The commit of everything this hub serves.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const LARGE: usize = 1000;

/// What goes wrong.
#[derive(Default)]
pub struct Faults {
    /// Files are for licensed accounts only.
    pub gated: bool,
    /// This many requests are answered with the status and the `Retry-After` value.
    pub busy: usize,
    pub busy_status: u16,
    pub retry_after: String,
    /// Bodies of large files end after this many bytes, this many times.
    pub cut_at: usize,
    pub cuts: usize,
    /// Large files are sent with one byte changed.
    pub corrupt: bool,
    /// `Range` is ignored.
    pub no_ranges: bool,
}

/// One request that arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    /// The host name the client used.
    pub host: String,
    pub authorization: Option<String>,
    pub range: Option<String>,
}

/// A running hub with one repository; its thread ends with the process.
pub struct Hub {
    /// Its address, for `HF_ENDPOINT`.
    pub url: String,
    shared: Arc<Shared>,
}

struct Shared {
    repo: String,
    files: BTreeMap<String, Vec<u8>>,
    port: u16,
    faults: Mutex<Faults>,
    seen: Mutex<Vec<Seen>>,
}

impl Hub {
    pub fn start(repo: &str, files: &[(&str, Vec<u8>)]) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            repo: repo.to_string(),
            files: files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect(),
            port,
            faults: Mutex::default(),
            seen: Mutex::default(),
        });
        let served = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let served = served.clone();
                std::thread::spawn(move || served.answer(stream));
            }
        });
        Hub { url: format!("http://127.0.0.1:{port}"), shared }
    }

    pub fn faults(&self) -> MutexGuard<'_, Faults> {
        self.shared.faults.lock().unwrap()
    }

    /// The requests so far; the list starts anew.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.shared.seen.lock().unwrap())
    }
}

impl Shared {
    fn answer(&self, stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(first) = lines.next() else { return };
        let mut words = first.split(' ');
        let (method, path) = (words.next().unwrap_or("").to_string(), words.next().unwrap_or("").to_string());
        let headers: BTreeMap<String, String> = lines
            .take_while(|line| !line.is_empty())
            .filter_map(|line| line.split_once(": ").map(|(name, value)| (name.to_ascii_lowercase(), value.to_string())))
            .collect();
        let header = |name: &str| headers.get(name).cloned();
        let seen = Seen {
            method,
            path,
            host: header("host").unwrap_or_default(),
            authorization: header("authorization"),
            range: header("range"),
        };
        self.seen.lock().unwrap().push(seen.clone());
        self.route(&seen, Reply { stream, head_only: seen.method == "HEAD" });
    }

    fn route(&self, seen: &Seen, mut reply: Reply) {
        let mut faults = self.faults.lock().unwrap();
        if faults.busy > 0 {
            faults.busy -= 1;
            let headers = [("Retry-After", faults.retry_after.clone())];
            return reply.send(faults.busy_status, &headers, b"<html><body>Too many requests</body></html>", None);
        }
        if let Some(sha256) = seen.path.strip_prefix("/cdn/") {
            let Some(bytes) = self.files.values().find(|bytes| hash(bytes) == sha256) else {
                return reply.send(404, &[], b"", None);
            };
            let mut bytes = bytes.clone();
            if faults.corrupt {
                bytes[0] ^= 1;
            }
            let start = seen.range.as_ref().and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
            let start = start.filter(|_| !faults.no_ranges);
            let (status, from) = start.map_or((200, 0), |from| (206, from));
            let range = [("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len()))];
            let cut = (faults.cuts > 0).then_some(faults.cut_at);
            faults.cuts = faults.cuts.saturating_sub(1);
            return reply.send(status, &range[..usize::from(status == 206)], &bytes[from..], cut);
        }
        let path = seen.path.replace("%2F", "/");
        let error = |code: &str| [("X-Error-Code", code.to_string())];
        if let Some(revision) = path.strip_prefix(&format!("/api/models/{}/revision/", self.repo)) {
            if !["main", "v1.0", "refs/pr/1", COMMIT].contains(&revision) {
                return reply.send(404, &error("RevisionNotFound"), b"{}", None);
            }
            let names: Vec<String> = self.files.keys().map(|name| format!("{{\"rfilename\":{name:?}}}")).collect();
            let body = format!("{{\"id\":{:?},\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", self.repo, names.join(","));
            return reply.send(200, &[], body.as_bytes(), None);
        }
        let Some(name) = path.strip_prefix(&format!("/{}/resolve/{COMMIT}/", self.repo)) else {
            return reply.send(404, &error("RepoNotFound"), b"<html>not here</html>", None);
        };
        if faults.gated {
            let status = if seen.authorization.is_some() { 403 } else { 401 };
            return reply.send(status, &error("GatedRepo"), b"<html>gated</html>", None);
        }
        let Some(bytes) = self.files.get(name) else {
            return reply.send(404, &error("EntryNotFound"), b"", None);
        };
        if bytes.len() < LARGE {
            return reply.send(200, &[("ETag", format!("\"{}\"", &hash(bytes)[..40]))], bytes, None);
        }
        let headers = [
            ("X-Linked-ETag", format!("\"{}\"", hash(bytes))),
            ("X-Linked-Size", bytes.len().to_string()),
            ("Location", format!("http://localhost:{}/cdn/{}", self.port, hash(bytes))),
        ];
        reply.send(302, &headers, b"", None);
    }
}

/// SHA-256 in hexadecimal.
pub fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

struct Reply {
    stream: TcpStream,
    head_only: bool,
}

impl Reply {
    /// Sends an answer whose body stops after `cut` bytes although its length is announced in full.
    fn send(&mut self, status: u16, headers: &[(&str, String)], body: &[u8], cut: Option<usize>) {
        let mut head = format!("HTTP/1.1 {status} -\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        let body = if self.head_only { &[] } else { &body[..cut.map_or(body.len(), |cut| cut.min(body.len()))] };
        let _ = self.stream.write_all(format!("{head}\r\n").as_bytes());
        let _ = self.stream.write_all(body);
        let _ = self.stream.flush();
    }
}
