//! A small model hub on the loopback interface, with faults to order. Files of 1,000 bytes and more are
//! redirected to another host name, as the real hub does with large files.

#![allow(dead_code, reason = "the tests inside and outside of the library each use a part")]

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The commit of everything this hub serves.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const LARGE: usize = 1000;

/// What goes wrong.
#[derive(Clone, Default)]
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
    /// Bodies are packed with gzip although nobody asked for it.
    pub gzip: bool,
    /// No answer about a file tells a length; bodies are sent in chunks.
    pub no_length: bool,
    /// Size that the hub claims of large files.
    pub claimed_bytes: Option<u64>,
    /// Large files are sent in pieces of 16 kB with this pause after each.
    pub pause: Option<Duration>,
    /// Files are found under another path of the same host first.
    pub moved: bool,
}

/// A part of a large file that was sent.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    pub from: usize,
    /// Bytes handed to the operating system, of which some may never have arrived.
    pub bytes: usize,
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
    files: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Answers to further requests, by path.
    answers: Mutex<BTreeMap<String, String>>,
    port: u16,
    faults: Mutex<Faults>,
    seen: Mutex<Vec<Seen>>,
    sent: Mutex<Vec<Sent>>,
    /// Answers that are being given.
    open: AtomicUsize,
}

impl Hub {
    pub fn start(repo: &str, files: &[(&str, Vec<u8>)]) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            repo: repo.to_string(),
            files: Mutex::new(files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect()),
            answers: Mutex::default(),
            port,
            faults: Mutex::default(),
            seen: Mutex::default(),
            sent: Mutex::default(),
            open: AtomicUsize::new(0),
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

    /// Puts another content in the place of a file.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        self.shared.files.lock().unwrap().insert(name.to_string(), bytes);
    }

    /// From now on `path` (without a query) is answered with this JSON text.
    pub fn answer(&self, path: &str, json: impl ToString) {
        self.shared.answers.lock().unwrap().insert(path.to_string(), json.to_string());
    }

    /// The parts of large files sent so far, once all answers are given; the list starts anew.
    pub fn take_sent(&self) -> Vec<Sent> {
        // A client that has everything may be done before the server has written down what it sent.
        for _ in 0..1000 {
            if self.shared.open.load(Ordering::SeqCst) == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        std::mem::take(&mut self.shared.sent.lock().unwrap())
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
        self.open.fetch_add(1, Ordering::SeqCst);
        let sent = self.route(&seen, Reply { stream, head_only: seen.method == "HEAD" });
        self.sent.lock().unwrap().extend(sent);
        self.open.fetch_sub(1, Ordering::SeqCst);
    }

    fn route(&self, seen: &Seen, mut reply: Reply) -> Option<Sent> {
        // Taken at the start, so that a slow answer does not keep the next one waiting.
        let faults = {
            let mut faults = self.faults.lock().unwrap();
            let now = faults.clone();
            faults.busy = faults.busy.saturating_sub(1);
            if seen.path.starts_with("/cdn/") {
                faults.cuts = faults.cuts.saturating_sub(1);
            }
            now
        };
        let files = self.files.lock().unwrap().clone();
        if faults.busy > 0 {
            let headers = [("Retry-After", faults.retry_after.clone())];
            reply.send(faults.busy_status, &headers, b"<html><body>Too many requests</body></html>", &Faults::default());
            return None;
        }
        if let Some(sha256) = seen.path.strip_prefix("/cdn/") {
            let Some(bytes) = files.values().find(|bytes| hash(bytes) == sha256) else {
                reply.send(404, &[], b"", &Faults::default());
                return None;
            };
            let mut bytes = bytes.clone();
            if faults.corrupt {
                bytes[0] ^= 1;
            }
            let start = seen.range.as_ref().and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
            let start = start.filter(|_| !faults.no_ranges);
            let (status, from) = start.map_or((200, 0), |from| (206, from));
            if from >= bytes.len() {
                reply.send(416, &[], b"", &Faults::default());
                return None;
            }
            let range = [("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len()))];
            let sent = reply.send(status, &range[..usize::from(status == 206)], &bytes[from..], &faults);
            return Some(Sent { from, bytes: sent });
        }
        self.describe(seen, &faults, &files, &mut reply);
        None
    }

    /// Answers about the repository, and small files.
    fn describe(&self, seen: &Seen, faults: &Faults, files: &BTreeMap<String, Vec<u8>>, reply: &mut Reply) {
        let none = Faults::default();
        let path = seen.path.split('?').next().unwrap_or_default().replace("%2F", "/");
        let error = |code: &str| [("X-Error-Code", code.to_string())];
        if let Some(json) = self.answers.lock().unwrap().get(&path) {
            reply.send(200, &[], json.as_bytes(), &none);
            return;
        }
        if let Some(revision) = path.strip_prefix(&format!("/api/models/{}/revision/", self.repo)) {
            if !["main", "v1.0", "refs/pr/1", COMMIT].contains(&revision) {
                reply.send(404, &error("RevisionNotFound"), b"{}", &none);
                return;
            }
            let sizes = seen.path.contains("blobs=true") && !faults.no_length;
            let sibling = |(name, bytes): (&String, &Vec<u8>)| match sizes {
                true => format!("{{\"rfilename\":{name:?},\"size\":{}}}", bytes.len()),
                false => format!("{{\"rfilename\":{name:?}}}"),
            };
            let names: Vec<String> = files.iter().map(sibling).collect();
            let about = "\"downloads\":1234,\"likes\":5,\"gated\":false,\"cardData\":{\"license\":\"mit\"}";
            let body = format!("{{\"id\":{:?},\"sha\":\"{COMMIT}\",{about},\"siblings\":[{}]}}", self.repo, names.join(","));
            reply.send(200, &[], body.as_bytes(), &none);
            return;
        }
        let resolve = format!("/{}/resolve/{COMMIT}/", self.repo);
        let moved = format!("/mirror{resolve}");
        if let Some(name) = path.strip_prefix(&resolve).filter(|_| faults.moved) {
            reply.send(307, &[("Location", format!("{moved}{name}"))], b"", &none);
            return;
        }
        let Some(name) = path.strip_prefix(&resolve).or_else(|| path.strip_prefix(&moved)) else {
            reply.send(404, &error("RepoNotFound"), b"<html>not here</html>", &none);
            return;
        };
        if faults.gated {
            let status = if seen.authorization.is_some() { 403 } else { 401 };
            reply.send(status, &error("GatedRepo"), b"<html>gated</html>", &none);
            return;
        }
        let Some(bytes) = files.get(name) else {
            reply.send(404, &error("EntryNotFound"), b"", &none);
            return;
        };
        if bytes.len() < LARGE {
            let shape = Faults { gzip: faults.gzip, no_length: faults.no_length, ..none };
            reply.send(200, &[("ETag", format!("\"{}\"", &hash(bytes)[..40]))], bytes, &shape);
            return;
        }
        let size = faults.claimed_bytes.unwrap_or(bytes.len() as u64).to_string();
        let headers = [
            ("X-Linked-ETag", format!("\"{}\"", hash(bytes))),
            ("Location", format!("http://localhost:{}/cdn/{}", self.port, hash(bytes))),
            ("X-Linked-Size", size),
        ];
        reply.send(302, &headers[..3 - usize::from(faults.no_length)], b"", &none);
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
    /// Sends an answer as the faults want it: packed, without a length, slowly, or with a body that stops
    /// although its length is announced in full. Gives the number of bytes of the body that were sent.
    fn send(&mut self, status: u16, headers: &[(&str, String)], body: &[u8], faults: &Faults) -> usize {
        let packed = match faults.gzip && !body.is_empty() {
            true => {
                let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
                packer.write_all(body).unwrap();
                Some(packer.finish().unwrap())
            }
            false => None,
        };
        let mut head = format!("HTTP/1.1 {status} -\r\nConnection: close\r\n");
        if packed.is_some() {
            head.push_str("Content-Encoding: gzip\r\n");
        }
        let body = packed.as_deref().unwrap_or(body);
        head.push_str(&match faults.no_length {
            true => "Transfer-Encoding: chunked\r\n".to_string(),
            false => format!("Content-Length: {}\r\n", body.len()),
        });
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        let _ = self.stream.write_all(format!("{head}\r\n").as_bytes());
        if self.head_only {
            return 0;
        }
        let cut = if faults.cuts > 0 { faults.cut_at } else { usize::MAX };
        let mut sent = 0;
        for piece in body[..body.len().min(cut)].chunks(16 << 10) {
            let framed = match faults.no_length {
                true => [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat(),
                false => piece.to_vec(),
            };
            if self.stream.write_all(&framed).is_err() {
                return sent;
            }
            sent += piece.len();
            if let Some(pause) = faults.pause {
                std::thread::sleep(pause);
            }
        }
        if faults.no_length && sent == body.len() {
            let _ = self.stream.write_all(b"0\r\n\r\n");
        }
        let _ = self.stream.flush();
        sent
    }
}
