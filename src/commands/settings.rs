//! Defaults of the user's own: `config.toml`, above it the environment. Flags are stronger than both; where a
//! flag was not given, commands ask here.

use cactus::engine::sampler::Sampling;
use cactus::error::{Error, Result};
use cactus::quant::Bits;
use cactus::quant::bits::SUPPORTED;
use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use toml::de::{DeTable, DeValue};

/// Names the file, or `none`.
const CONFIG: &str = "CACTUS_CONFIG";

/// What can be set, in the order of [`ROWS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Model,
    Bits,
    Threads,
    Context,
    Temperature,
    TopP,
    TopK,
    MinP,
    RepetitionPenalty,
    MaxTokens,
    Seed,
    System,
}

/// A key as it is written, and what may stand behind it.
pub struct Row {
    pub key: Key,
    /// In the file.
    pub name: &'static str,
    /// In the environment.
    pub variable: &'static str,
    form: Form,
    default: Option<Value>,
}

enum Form {
    Text,
    Bits,
    /// A whole number from the first to the second.
    Whole(u64, u64),
    /// A number that [`Sampling::validate`] judges.
    Sampling(fn(&mut Sampling, f32)),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Text(Cow<'static, str>),
    Whole(u64),
    Real(f32),
}

const fn row(key: Key, name: &'static str, variable: &'static str, form: Form, default: Option<Value>) -> Row {
    Row { key, name, variable, form, default }
}

pub static ROWS: [Row; 12] = [
    row(Key::Model, "model", "CACTUS_MODEL", Form::Text, Some(Value::Text(Cow::Borrowed(cactus::hub::catalog::STARTER.repo)))),
    row(Key::Bits, "bits", "CACTUS_BITS", Form::Bits, Some(Value::Real(4.0))),
    row(Key::Threads, "threads", "CACTUS_THREADS", Form::Whole(1, 512), None),
    row(Key::Context, "context", "CACTUS_CONTEXT", Form::Whole(1, u32::MAX as u64), None),
    row(Key::Temperature, "temperature", "CACTUS_TEMPERATURE", Form::Sampling(|s, x| s.temperature = x), Some(Value::Real(0.0))),
    row(Key::TopP, "top_p", "CACTUS_TOP_P", Form::Sampling(|s, x| s.top_p = x), Some(Value::Real(1.0))),
    row(Key::TopK, "top_k", "CACTUS_TOP_K", Form::Whole(0, u32::MAX as u64), Some(Value::Whole(0))),
    row(Key::MinP, "min_p", "CACTUS_MIN_P", Form::Sampling(|s, x| s.min_p = x), Some(Value::Real(0.0))),
    row(
        Key::RepetitionPenalty,
        "repetition_penalty",
        "CACTUS_REPETITION_PENALTY",
        Form::Sampling(|s, x| s.repetition_penalty = x),
        Some(Value::Real(1.1)),
    ),
    row(Key::MaxTokens, "max_tokens", "CACTUS_MAX_TOKENS", Form::Whole(0, u32::MAX as u64), Some(Value::Whole(1024))),
    row(Key::Seed, "seed", "CACTUS_SEED", Form::Whole(0, u64::MAX), Some(Value::Whole(0))),
    row(Key::System, "system", "CACTUS_SYSTEM", Form::Text, None),
];

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(text) => text.fmt(f),
            Value::Whole(number) => number.fmt(f),
            Value::Real(number) => number.fmt(f),
        }
    }
}

impl Form {
    fn expected(&self) -> String {
        match self {
            Form::Text => "a text".to_owned(),
            Form::Bits => SUPPORTED.to_owned(),
            Form::Whole(from, u64::MAX) => format!("a whole number from {from}"),
            Form::Whole(from, to) => format!("a whole number from {from} to {to}"),
            Form::Sampling(_) => "a number".to_owned(),
        }
    }

    /// `Err` says what is wrong with the value.
    fn check(&self, value: Value) -> Result<Value, String> {
        let good = match (self, &value) {
            (Form::Text, Value::Text(_)) => true,
            (Form::Bits, Value::Real(bits)) => Bits::new(f64::from(*bits)).is_some(),
            (Form::Whole(from, to), Value::Whole(number)) => (from..=to).contains(&number),
            (Form::Sampling(set), Value::Real(number)) => {
                let mut sampling = Sampling::default();
                set(&mut sampling, *number);
                return sampling.validate().map(|()| value).map_err(|e| e.message().to_owned());
            }
            _ => false,
        };
        if good { Ok(value) } else { Err(format!("is {value}, but must be {}", self.expected())) }
    }

    /// Reads a variable.
    fn parse(&self, text: &str) -> Result<Value, String> {
        let value = match self {
            Form::Text => Some(Value::Text(text.to_owned().into())),
            Form::Whole(..) => text.trim().parse().ok().map(Value::Whole),
            Form::Bits | Form::Sampling(_) => text.trim().parse().ok().map(Value::Real),
        };
        self.check(value.ok_or_else(|| format!("is `{text:.60}`, but must be {}", self.expected()))?)
    }

    /// Reads a value of the file.
    fn read(&self, value: &DeValue) -> Result<Value, String> {
        let wrong = || format!("is {}, but must be {}", described(value), self.expected());
        let read = match (self, value) {
            (Form::Text, DeValue::String(text)) => Some(Value::Text(text.to_string().into())),
            (Form::Whole(..), DeValue::Integer(n)) => u64::from_str_radix(n.as_str(), n.radix()).ok().map(Value::Whole),
            (Form::Bits | Form::Sampling(_), DeValue::Integer(n)) => {
                i64::from_str_radix(n.as_str(), n.radix()).ok().map(|n| Value::Real(n as f32))
            }
            (Form::Bits | Form::Sampling(_), DeValue::Float(x)) => x.as_str().parse().ok().map(Value::Real),
            _ => None,
        };
        self.check(read.ok_or_else(wrong)?)
    }
}

/// A value of the file as a message shows it.
fn described(value: &DeValue) -> String {
    match value {
        DeValue::String(text) => format!("the text \"{:.60}\"", text.escape_debug()),
        DeValue::Integer(n) => n.to_string(),
        DeValue::Float(x) => x.to_string(),
        DeValue::Boolean(b) => b.to_string(),
        other => format!("of type {}", other.type_str()),
    }
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    File,
    Environment,
}

/// What is in force below the flags.
#[derive(Debug, Default)]
pub struct Settings {
    /// The file that was looked for; `None`: none is wanted, or there is no folder for it.
    pub path: Option<PathBuf>,
    /// Whether it is there.
    pub exists: bool,
    values: [Option<(Value, Origin)>; 12],
}

impl Settings {
    /// Reads the file and the environment.
    pub fn load() -> Result<Settings> {
        Self::from_lookup(&|name| std::env::var_os(name), dirs::config_dir())
    }

    /// The same with an environment of the caller's, which answers as `std::env::var_os` does.
    fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>, config_dir: Option<PathBuf>) -> Result<Settings> {
        let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let mut settings = Settings::default();
        let named = set(CONFIG);
        settings.path = match &named {
            Some(name) if name == "none" => None,
            Some(name) => Some(PathBuf::from(name)),
            None => config_dir.map(|folder| folder.join("cactus").join("config.toml")),
        };
        if let Some(path) = settings.path.clone() {
            match std::fs::read(&path) {
                Ok(bytes) => {
                    let text = String::from_utf8(bytes).map_err(|_| usage(&path, "is not UTF-8 text"))?;
                    settings.exists = true;
                    settings.read_file(&text, &path)?;
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound && named.is_none() => {}
                Err(e) => {
                    let error = Error::io("read", &path, &e);
                    return Err(if named.is_some() { error.context(CONFIG) } else { error });
                }
            }
        }
        for row in &ROWS {
            if let Some(text) = set(row.variable) {
                let text = text.to_str().ok_or_else(|| Error::usage(format!("{} is not UTF-8 text", row.variable)))?;
                let value =
                    row.form.parse(text).map_err(|what| Error::usage(format!("{}: {}", row.variable, named_once(row, what))))?;
                settings.values[row.key as usize] = Some((value, Origin::Environment));
            }
        }
        Ok(settings)
    }

    fn read_file(&mut self, text: &str, path: &Path) -> Result<()> {
        let line = |at: usize| 1 + text.bytes().take(at).filter(|b| *b == b'\n').count();
        let at_line = |at: usize, what: &str| usage(path, &format!("line {}: {what}", line(at)));
        let table = DeTable::parse(text).map_err(|e| {
            let message = e.message().lines().collect::<Vec<_>>().join(", ");
            e.span().map_or_else(|| usage(path, &message), |span| at_line(span.start, &message))
        })?;
        for (key, value) in table.get_ref() {
            let name = key.get_ref();
            let Some(row) = ROWS.iter().find(|row| row.name == *name) else {
                return Err(at_line(key.span().start, &format!("there is no setting `{}`", name.escape_debug()))
                    .with_hint(format!("known: {}", ROWS.each_ref().map(|row| row.name).join(", "))));
            };
            let value = row.form.read(value.get_ref()).map_err(|what| at_line(key.span().start, &named_once(row, what)))?;
            self.values[row.key as usize] = Some((value, Origin::File));
        }
        Ok(())
    }

    /// The value in force, if there is one, and where it comes from.
    pub fn get(&self, key: Key) -> (Option<&Value>, Origin) {
        match &self.values[key as usize] {
            Some((value, origin)) => (Some(value), *origin),
            None => (ROWS[key as usize].default.as_ref(), Origin::Default),
        }
    }

    pub fn text(&self, key: Key) -> Option<&str> {
        match self.get(key).0 {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    pub fn whole(&self, key: Key) -> Option<u64> {
        match self.get(key).0 {
            Some(Value::Whole(number)) => Some(*number),
            _ => None,
        }
    }

    /// Bits per weight.
    pub fn bits(&self) -> Option<Bits> {
        match self.get(Key::Bits).0 {
            Some(Value::Real(bits)) => Bits::new(f64::from(*bits)),
            _ => None,
        }
    }

    /// How tokens are chosen.
    pub fn sampling(&self) -> Sampling {
        let mut sampling = Sampling::default();
        for row in &ROWS {
            if let (Form::Sampling(set), Some(Value::Real(number))) = (&row.form, self.get(row.key).0) {
                set(&mut sampling, *number);
            }
        }
        sampling.top_k = self.whole(Key::TopK).map_or(sampling.top_k, |k| k as usize);
        sampling.seed = self.whole(Key::Seed).unwrap_or(sampling.seed);
        sampling
    }
}

/// A complaint with the key's name in front, unless it begins with that already.
fn named_once(row: &Row, what: String) -> String {
    if what.starts_with(row.name) { what } else { format!("{} {what}", row.name) }
}

fn usage(path: &Path, what: &str) -> Error {
    Error::usage(format!("{}: {what}", path.display()))
}

static CURRENT: OnceLock<Settings> = OnceLock::new();

/// Reads the settings of this process; called once, before a command runs.
pub fn load() -> Result<()> {
    let settings = Settings::load()?;
    CURRENT.get_or_init(|| settings);
    Ok(())
}

/// The settings of this process; the defaults if none were read.
pub fn current() -> &'static Settings {
    CURRENT.get_or_init(Settings::default)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cactus::error::Kind;

    /// Settings from a file and variables.
    fn from(file: &str, variables: &[(&str, &str)]) -> Result<Settings> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cactus/config.toml");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, file).unwrap();
        let lookup = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v));
        Settings::from_lookup(&lookup, Some(folder.path().to_path_buf()))
    }

    #[test]
    fn rows_are_in_the_order_of_keys() {
        for (at, row) in ROWS.iter().enumerate() {
            assert_eq!(row.key as usize, at);
            assert_eq!(row.variable, format!("CACTUS_{}", row.name.to_uppercase()));
        }
    }

    #[test]
    fn the_environment_is_stronger_than_the_file() {
        let file =
            "# mine\nmodel = \"qwen3\"\nbits = 0x2\ntemperature = 1\ntop_p = 0.9\ntop_k = 1_0\nseed = 7\nsystem = '''a\nb'''\n";
        let settings = from(file, &[("CACTUS_BITS", "8"), ("CACTUS_MODEL", ""), ("CACTUS_MIN_P", " 0.5 ")]).unwrap();
        assert_eq!(settings.text(Key::Model), Some("qwen3"));
        assert_eq!(settings.get(Key::Bits), (Some(&Value::Real(8.0)), Origin::Environment));
        assert_eq!(settings.text(Key::System), Some("a\nb"));
        assert_eq!(settings.whole(Key::Threads), None);
        assert_eq!(settings.get(Key::MaxTokens), (Some(&Value::Whole(1024)), Origin::Default));
        let expected = Sampling {
            temperature: 1.0,
            top_p: 0.9,
            top_k: 10,
            min_p: 0.5,
            repetition_penalty: 1.1,
            seed: 7,
            ..Sampling::default()
        };
        assert_eq!(settings.sampling(), expected);
    }

    #[test]
    fn faults_name_file_line_and_key() {
        for (file, parts) in [
            ("bits = 4\ntemprature = 1", ["line 2", "temprature", "no setting"]),
            ("\n\nthreads = \"two\"", ["line 3", "threads", "whole number from 1 to 512"]),
            ("threads = 0", ["line 1", "threads is 0", "from 1 to 512"]),
            ("threads = -1", ["line 1", "threads is -1", "from 1 to 512"]),
            ("bits = 9", ["line 1", "bits is 9", "1 to 8"]),
            ("bits = 4.005", ["line 1", "bits is 4.005", "or 16"]),
            ("model = 3", ["line 1", "model is 3", "a text"]),
            ("top_p = 1.5", ["line 1", "top_p is 1.5", "at most 1"]),
            ("temperature = nan", ["line 1", "temperature", "0 or more"]),
            ("seed = 1\nseed = 2", ["line 2", "duplicate", ""]),
            ("seed = ", ["line 1", "", ""]),
            ("[run]\nbits = 4", ["line 1", "`run`", "no setting"]),
            ("context = [1]", ["line 1", "context", "array"]),
        ] {
            let error = from(file, &[]).unwrap_err();
            assert_eq!(error.kind, Kind::Usage);
            for part in parts.iter().chain(&["config.toml: "]) {
                assert!(error.message().contains(part), "{file}: {error}");
            }
        }
        for (variable, value, part) in [
            ("CACTUS_THREADS", "many", "from 1 to 512"),
            ("CACTUS_BITS", "9", "1 to 8"),
            ("CACTUS_TEMPERATURE", "-1", "0 or more"),
            ("CACTUS_CONFIG", "/no/such/file", "/no/such/file"),
        ] {
            let error = from("", &[(variable, value)]).unwrap_err();
            assert!(error.message().contains(variable) && error.message().contains(part), "{error}");
        }
    }

    #[test]
    fn a_missing_file_is_an_empty_one() {
        let nothing = |_: &str| None;
        let folder = tempfile::tempdir().unwrap();
        for config_dir in [None, Some(folder.path().to_path_buf())] {
            let settings = Settings::from_lookup(&nothing, config_dir).unwrap();
            assert!(!settings.exists);
            assert_eq!(settings.get(Key::Bits), (Some(&Value::Real(4.0)), Origin::Default));
        }
        let settings = from("bits = 2", &[("CACTUS_CONFIG", "none")]).unwrap();
        assert_eq!((settings.path.clone(), settings.bits()), (None, Some(Bits::FOUR)));
    }
}
