//! Bits per weight as a user asks for them: whole numbers, and mixed rates such as 3.26.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// In hundredths of a bit, so that rates can be compared and named. 1 to 8, or 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bits(u16);

/// What [`Bits`] can be, for messages.
pub const SUPPORTED: &str = "1 to 8 (such as 4, 3.26, 2.54), or 16";

impl Bits {
    pub const FOUR: Bits = Bits(400);
    pub const EIGHT: Bits = Bits(800);
    /// No quantisation.
    pub const SIXTEEN: Bits = Bits(1600);

    pub fn new(bits: f64) -> Option<Self> {
        let hundredths = bits * 100.0;
        let near = hundredths.round();
        let known = (100.0..=800.0).contains(&near) || near == 1600.0;
        (known && (hundredths - near).abs() < 1e-3).then_some(Bits(near as u16))
    }

    pub fn value(self) -> f64 {
        f64::from(self.0) / 100.0
    }

    /// The width that every matrix has, when that is what is asked for.
    pub fn uniform(self) -> Option<u32> {
        matches!(self.0, 100 | 200 | 300 | 400 | 800 | 1600).then_some(u32::from(self.0 / 100))
    }

    /// How bundle folders name it: `cq3.26`, `f16`.
    pub fn label(self) -> String {
        if self == Self::SIXTEEN { "f16".to_owned() } else { format!("cq{self}") }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.value())
    }
}

impl FromStr for Bits {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().ok().and_then(Bits::new).ok_or_else(|| format!("supported: {SUPPORTED}"))
    }
}

impl Serialize for Bits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(100) { serializer.serialize_u16(self.0 / 100) } else { serializer.serialize_f64(self.value()) }
    }
}

impl<'de> Deserialize<'de> for Bits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bits = f64::deserialize(deserializer)?;
        Bits::new(bits).ok_or_else(|| serde::de::Error::custom(format!("{bits} bits (supported: {SUPPORTED})")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_limits() {
        for (text, shown, uniform) in
            [("4", "4", Some(4)), ("4.0", "4", Some(4)), ("3.26", "3.26", None), ("16", "16", Some(16)), ("5", "5", None)]
        {
            let bits: Bits = text.parse().unwrap();
            assert_eq!((bits.to_string().as_str(), bits.uniform()), (shown, uniform));
            assert_eq!(serde_json::from_str::<Bits>(&serde_json::to_string(&bits).unwrap()).unwrap(), bits);
        }
        assert_eq!(serde_json::to_string(&Bits::FOUR).unwrap(), "4");
        assert_eq!("2.54".parse::<Bits>().unwrap().label(), "cq2.54");
        assert_eq!(Bits::SIXTEEN.label(), "f16");
        for bad in ["0", "0.99", "8.5", "12", "3.265", "-1", "nan", "inf", "four", "1e9"] {
            assert!(bad.parse::<Bits>().is_err(), "{bad}");
        }
    }
}
