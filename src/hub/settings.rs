//! What the environment says about caches, the hub and the token, read in one place.

use super::package::{self, Package};
use crate::error::{Error, Kind, Result};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Everything in this room that depends on the environment.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Our own cache folder.
    pub root: PathBuf,
    /// The Hugging Face cache folder (the one that holds `models--owner--name`).
    pub hf_cache: PathBuf,
    /// Address of the hub, without a slash at the end.
    pub endpoint: String,
    pub token: Option<Token>,
    /// File with further certificates to trust, in PEM form.
    pub certificates: Option<PathBuf>,
    /// No request leaves the machine.
    pub offline: bool,
    /// Folders in which `python3` and `pip` are looked for, in the form of `PATH`.
    pub search_path: OsString,
    /// Where the starter model comes from when the hub cannot be reached.
    pub package: Package,
    /// Wait before the first retry; doubled for each further one.
    pub backoff: Duration,
}

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

impl Settings {
    pub fn from_env() -> Result<Settings> {
        Self::from_lookup(&|name| std::env::var_os(name))
    }

    /// Reads settings through `lookup`, which answers as `std::env::var_os` does. Variables and defaults are
    /// those of <https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables>.
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Settings> {
        let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let folder = |name: &str| set(name).map(|value| expand_home(PathBuf::from(value)));

        let hf_home = folder("HF_HOME")
            .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| dirs::home_dir().map(|home| home.join(".cache").join("huggingface")));
        let hf_cache = folder("HF_HUB_CACHE")
            .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| hf_home.as_ref().map(|home| home.join("hub")))
            .ok_or_else(|| Error::usage("no home folder to keep downloads in").with_hint("set HF_HOME to a folder"))?;
        let root = folder("CACTUS_HOME")
            .or_else(|| dirs::cache_dir().map(|cache| cache.join("cactus")))
            .ok_or_else(|| Error::usage("no home folder to keep models in").with_hint("set CACTUS_HOME to a folder"))?;

        let endpoint = match set("HF_ENDPOINT") {
            None => DEFAULT_ENDPOINT.to_string(),
            Some(value) => value.to_string_lossy().trim().trim_end_matches('/').to_string(),
        };
        let token_file = folder("HF_TOKEN_PATH").or_else(|| hf_home.map(|home| home.join("token")));
        let token = set("HF_TOKEN")
            .and_then(|value| Token::new(value.as_encoded_bytes(), "HF_TOKEN".to_string()))
            .or_else(|| Token::from_file(&token_file?));

        let offline = set("HF_HUB_OFFLINE")
            .is_some_and(|value| ["1", "on", "yes", "true"].iter().any(|yes| value.eq_ignore_ascii_case(yes)));
        Ok(Settings {
            root,
            hf_cache,
            endpoint,
            token,
            certificates: folder("SSL_CERT_FILE"),
            offline,
            search_path: set("PATH").unwrap_or_default(),
            package: package::STARTER,
            backoff: Duration::from_secs(1),
        })
    }
}

/// A hub token as found. It is judged only when a request needs it, so that a bad one does not stand in the
/// way of a model that is already here.
#[derive(Clone)]
pub(crate) struct Token {
    bytes: Vec<u8>,
    /// The variable or file it came from.
    origin: String,
}

impl Token {
    /// `None` if there is nothing but white space.
    pub fn new(bytes: &[u8], origin: String) -> Option<Token> {
        let bytes = bytes.trim_ascii();
        (!bytes.is_empty()).then(|| Token { bytes: bytes.to_vec(), origin })
    }

    fn from_file(path: &Path) -> Option<Token> {
        Token::new(&std::fs::read(path).ok()?, path.display().to_string())
    }

    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The token as text for a header; refused if it holds anything but visible ASCII.
    pub fn checked(&self) -> Result<&str> {
        match std::str::from_utf8(&self.bytes) {
            Ok(text) if text.bytes().all(|b| b.is_ascii_graphic()) => Ok(text),
            _ => Err(Error::new(Kind::Usage, format!("the token in {} has characters no token can have", self.origin))
                .with_hint("copy the token again from your hub account settings")),
        }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(from {})", self.origin)
    }
}

/// Replaces a leading `~` by the home folder.
fn expand_home(path: PathBuf) -> PathBuf {
    match (path.strip_prefix("~"), dirs::home_dir()) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}
