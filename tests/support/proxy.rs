//! A company's proxy: it takes HTTPS connections to `hub.test`, signs them anew with an authority of its own, and
//! hands the requests to a hub of the tests.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A running proxy; its thread ends with the process.
pub struct Proxy {
    /// Its address, for `HTTPS_PROXY`.
    pub url: String,
    connections: Arc<AtomicUsize>,
}

/// Makes an authority and a certificate for `hub.test` in `folder`: `authority.pem`, `server.pem`, `server.key`.
/// False where there is no `openssl` program.
pub fn certificates(folder: &Path) -> bool {
    let openssl = |line: &str| {
        let done = Command::new("openssl").args(line.split(' ')).current_dir(folder).output();
        done.is_ok_and(|done| done.status.success())
    };
    std::fs::write(folder.join("names"), "subjectAltName=DNS:hub.test\n").expect("written");
    let new_key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    openssl(&format!("req -x509 {new_key} -keyout authority.key -out authority.pem -days 2 -subj /CN=authority"))
        && openssl(&format!("req {new_key} -keyout server.key -out server.csr -subj /CN=hub.test"))
        && openssl(
            "x509 -req -in server.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 -extfile names -out server.pem",
        )
}

impl Proxy {
    /// Starts a proxy in front of the hub at `hub` (`http://host:port`), with the [`certificates`] in `folder`.
    pub fn start(hub: &str, folder: &Path) -> Proxy {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let certificate = CertificateDer::from_pem_file(folder.join("server.pem")).expect("a certificate");
        let key = PrivateKeyDer::from_pem_file(folder.join("server.key")).expect("a key");
        let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate], key).expect("a pair");
        let config = Arc::new(config);
        let hub = hub.trim_start_matches("http://").to_string();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let connections = Arc::new(AtomicUsize::new(0));
        let count = connections.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::Relaxed);
                let (config, hub) = (config.clone(), hub.clone());
                // A client that does not trust the authority hangs up, which is no failure of the proxy.
                std::thread::spawn(move || drop(serve(stream, config, &hub)));
            }
        });
        Proxy { url, connections }
    }

    /// Connections taken so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

fn serve(mut stream: TcpStream, config: Arc<ServerConfig>, hub: &str) -> std::io::Result<()> {
    let head = head(&mut stream)?;
    if !head.starts_with(b"CONNECT hub.test:443 ") {
        return stream.write_all(b"HTTP/1.1 502 -\r\nContent-Length: 0\r\n\r\n");
    }
    stream.write_all(b"HTTP/1.1 200 -\r\n\r\n")?;
    let connection = ServerConnection::new(config).map_err(std::io::Error::other)?;
    let mut tls = StreamOwned::new(connection, stream);
    let request = self::head(&mut tls)?;
    let mut behind = TcpStream::connect(hub)?;
    behind.write_all(&request)?;
    let mut answer = Vec::new();
    behind.read_to_end(&mut answer)?;
    tls.write_all(&answer)?;
    tls.conn.send_close_notify();
    tls.flush()
}

/// Reads up to the empty line that ends a request without a body.
fn head(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while !bytes.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        bytes.push(byte[0]);
    }
    Ok(bytes)
}
