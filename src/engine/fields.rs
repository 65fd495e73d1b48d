//! Reading the fields of a JSON request: null is absent, unknown fields are ignored, a wrong type names its field.

use crate::error::Error;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// An object whose fields are asked for one by one.
#[derive(Debug, Default)]
pub struct Fields(Map<String, Value>);

/// A field that is not as it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    pub name: String,
    pub message: String,
}

impl FieldError {
    pub fn new(name: impl Into<String>, message: impl Into<String>) -> Self {
        FieldError { name: name.into(), message: message.into() }
    }

    pub fn into_error(self) -> Error {
        Error::usage(self.message)
    }
}

type Result<T> = std::result::Result<T, FieldError>;

impl From<Map<String, Value>> for Fields {
    fn from(fields: Map<String, Value>) -> Self {
        Fields(fields)
    }
}

impl Fields {
    /// Reads the body of a request.
    pub fn parse(body: &[u8]) -> Result<Self> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(FieldError::new("body", "the body must be a JSON object")),
            Err(error) => Err(FieldError::new("body", format!("the body is not JSON: {error}"))),
        }
    }

    /// A field that is there and not null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(&self, name: &str, expected: &str, read: impl FnOnce(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(FieldError::new(name, format!("{name} must be {expected}"))),
        }
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub fn text(&self, name: &str) -> Result<Option<&str>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| FieldError::new(name, format!("{name} must be a string")))
    }

    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.read(name, &expected, |value| value.as_f64().filter(|number| range.contains(number)))
    }

    /// A whole number; 5.0 is one too.
    pub fn whole(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>> {
        let expected = match *range.end() {
            u64::MAX => format!("a whole number from {}", range.start()),
            end => format!("a whole number from {} to {end}", range.start()),
        };
        let whole = |value: &Value| {
            let real = value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..9e15).contains(x)).map(|x| x as u64);
            value.as_u64().or(real).filter(|number| range.contains(number))
        };
        self.read(name, &expected, whole)
    }

    /// A text or a list of texts.
    pub fn texts(&self, name: &str) -> Result<Vec<String>> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let read = |value: &Value| match value {
            Value::Array(list) => list.iter().map(text).collect(),
            value => text(value).map(|text| vec![text]),
        };
        Ok(self.read(name, "a string or a list of strings", read)?.unwrap_or_default())
    }

    /// Refuses what would change the answer and is not there.
    pub fn unsupported(&self, name: &str, harmless: impl FnOnce(&Value) -> bool) -> Result<()> {
        match self.get(name) {
            Some(value) if !harmless(value) => Err(FieldError::new(name, format!("{name} is not supported"))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn null_is_absent_and_wrong_types_are_named() {
        let f = fields(r#"{"a": null, "b": 2.0, "c": "x", "d": ["x", "y"], "e": 1e300, "f": -1, "g": 18446744073709551615}"#);
        assert_eq!(f.whole("a", 0..=9).unwrap(), None);
        assert_eq!(f.whole("b", 0..=9).unwrap(), Some(2));
        assert_eq!(f.whole("g", 0..=u64::MAX).unwrap(), Some(u64::MAX));
        assert_eq!((f.texts("c").unwrap().len(), f.texts("d").unwrap().len(), f.texts("a").unwrap().len()), (1, 2, 0));
        for (name, message) in [("c", "c must be a whole number from 0 to 9"), ("e", "e must be"), ("f", "f must be")] {
            let failure = f.whole(name, 0..=9).unwrap_err();
            assert!(failure.message.starts_with(message), "{}", failure.message);
            assert_eq!(failure.name, name);
        }
        assert!(f.flag("b").is_err() && f.text("d").is_err() && f.number("c", 0.0..=1.0).is_err() && f.texts("b").is_err());
        for body in ["", "[]", "7", "{", "{\"a\": NaN}", "\u{feff}{}"] {
            assert_eq!(Fields::parse(body.as_bytes()).map(|_| ()).unwrap_err().name, "body", "{body}");
        }
    }
}
