//! A running `cactus serve`, and a client that can also misbehave.

use super::Home;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Ends with the test.
pub struct Server {
    child: Child,
    pub port: u16,
    log: Arc<Mutex<String>>,
}

/// What came back.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The events of a stream, which must end as streams do.
    pub fn events(&self) -> Vec<Value> {
        let data: Vec<&str> = self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(data.last(), Some(&"[DONE]"), "{}", self.body);
        data[..data.len() - 1].iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
    }
}

impl Server {
    /// Serves the bundle or checkpoint `model` of `home` at a free port.
    pub fn start(home: &Home, model: &str, more: &[&str]) -> Server {
        let mut command = home.cactus(["serve", model, "--port", "0", "--threads", "2"]);
        command.args(more).current_dir(home.path()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe"));
        let (mut first, mut port) = (String::new(), None);
        while port.is_none() && lines.read_line(&mut first).expect("text") > 0 {
            let after = |text: &str| text.split_once(" at http://")?.1.split_once(" (")?.0.rsplit(':').next()?.parse().ok();
            port = first.lines().find_map(after);
        }
        let log = Arc::new(Mutex::new(first));
        let written = log.clone();
        std::thread::spawn(move || {
            let mut line = String::new();
            while lines.read_line(&mut line).is_ok_and(|read| read > 0) {
                written.lock().expect("no panic").push_str(&std::mem::take(&mut line));
            }
        });
        let Some(port) = port else { panic!("no server: {}", log.lock().expect("no panic")) };
        Server { child, port, log }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has said so far.
    pub fn log(&self) -> String {
        self.log.lock().expect("no panic").clone()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().expect("a child").code()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        stream
    }

    /// Sends bytes as they are and reads what comes until the server ends the connection.
    pub fn raw(&self, bytes: &[u8]) -> Reply {
        let mut stream = self.connect();
        // A server that has answered already need not read the rest.
        let _ = stream.write_all(bytes);
        read(stream)
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        self.raw(&request(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    /// A number of `/metrics`.
    pub fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("cactus_{name} ")));
        line.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The bytes of a request.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    if !headers.iter().any(|(name, _)| *name == "host") {
        head += "host: localhost\r\n";
    }
    headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    [head.as_bytes(), b"\r\n", body].concat()
}

/// Reads a response to its end.
fn read(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let split = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or(bytes.len());
    let head = String::from_utf8_lossy(&bytes[..split]).into_owned();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let header = |line: &str| line.split_once(':').map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()));
    let headers: Vec<(String, String)> = head.lines().filter_map(header).collect();
    let mut body = bytes.get(split + 4..).unwrap_or_default().to_vec();
    if headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked") {
        body = joined(&body);
    }
    Reply { status, headers, body: String::from_utf8(body).expect("UTF-8") }
}

/// Chunks put together, as far as they came.
fn joined(mut bytes: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(line) = bytes.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&bytes[..line]).ok().and_then(|hex| usize::from_str_radix(hex, 16).ok()).unwrap_or(0);
        let rest = &bytes[line + 2..];
        whole.extend_from_slice(&rest[..size.min(rest.len())]);
        if size == 0 || rest.len() < size + 2 {
            break;
        }
        bytes = &rest[size + 2..];
    }
    whole
}
