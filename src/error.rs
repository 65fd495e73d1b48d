//! The one error type: a lower-case line that names what failed and which thing it failed on, and,
//! when the user can do something about it, a hint.

use std::fmt;
use std::path::Path;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What sort of failure an [`Error`] is; tests and exit codes look at this, people read the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The caller asked for something that makes no sense (exit code 2).
    Usage,
    /// A model, file or setting that was named does not exist.
    NotFound,
    /// A file is damaged, cut short or not what its name says.
    BadFile,
    /// A sound input that this version cannot handle; the message names the thing.
    Unsupported,
    /// A download or another machine failed.
    Network,
    /// The operating system refused a read, write, mapping or allocation.
    Io,
    /// The user stopped the work (exit code 130).
    Interrupted,
}

/// See [`Kind`] for the sorts and the module text for the manners.
#[derive(Debug)]
pub struct Error {
    pub kind: Kind,
    message: String,
    hint: Option<String>,
}

impl Error {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), hint: None }
    }
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Kind::NotFound, message)
    }
    pub fn bad_file(path: &Path, what: impl fmt::Display) -> Self {
        Self::new(Kind::BadFile, format!("{}: {what}", path.display()))
    }
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Kind::Unsupported, message)
    }
    /// An operating-system failure while doing `what` to `path` ("read", "write", "map", ...).
    pub fn io(what: &str, path: &Path, source: &std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound => Kind::NotFound,
            std::io::ErrorKind::Interrupted => Kind::Interrupted,
            _ => Kind::Io,
        };
        Self::new(kind, format!("cannot {what} {}: {source}", path.display()))
    }
    /// Adds what the user can do, shown on its own `hint:` line.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
    /// Puts what was being done in front of the message ("model.gguf: ...").
    pub fn context(mut self, doing: impl fmt::Display) -> Self {
        self.message = format!("{doing}: {}", self.message);
        self
    }
    pub fn message(&self) -> &str {
        &self.message
    }
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
    /// The message with its hint in parentheses, where there is one line only.
    pub fn in_one_line(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{self} (hint: {hint})"),
            None => self.to_string(),
        }
    }
    /// The process exit code for this failure.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Usage => 2,
            Kind::Interrupted => 130,
            _ => 1,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
