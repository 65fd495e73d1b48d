//! Numbers in JSON that stay numbers: JSON sets no limit to their digits, but readers do (RFC 8259 section 6).
//!
//! A model that repeats itself writes digits without end, and `1e999` is infinite or an error to most readers. So a number
//! has about [`DIGITS`] digits before its point at most, and two in its exponent, which keeps it within 64-bit floats.

use llguidance::toktrie::SimpleVob;

/// Digits before the point.
const DIGITS: usize = 200;
/// Digits of one token, beyond those before the point. With both, and the exponent, a number stays below 1e308.
const LONG: usize = 8;
/// Digits of an exponent.
const EXPONENT: usize = 2;

/// Tokens that could make a number too large.
pub(super) struct Lengthening {
    /// Begin with a digit.
    digit: SimpleVob,
    /// Begin with more digits than an exponent may have, and with more than it may have behind its first.
    three: SimpleVob,
    two: SimpleVob,
    /// Have an exponent that is too long, or very many digits.
    whole: SimpleVob,
}

impl Lengthening {
    /// Of tokens with these bytes.
    pub(super) fn new(words: &[Vec<u8>]) -> Self {
        let set = |holds: &dyn Fn(&[u8]) -> bool| {
            let mut set = SimpleVob::alloc(words.len());
            (0..).zip(words).filter(|(_, word)| holds(word)).for_each(|(id, _)| set.allow_token(id));
            set
        };
        let run = |word: &[u8]| word.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let exponent = |word: &[u8], at: usize| {
            let rest = &word[at + 1..];
            matches!(word[at], b'e' | b'E') && run(rest.strip_prefix(b"+").or(rest.strip_prefix(b"-")).unwrap_or(rest)) > EXPONENT
        };
        Lengthening {
            digit: set(&|word| run(word) > 0),
            three: set(&|word| run(word) > EXPONENT),
            two: set(&|word| run(word) > EXPONENT - 1),
            whole: set(&|word| (0..word.len()).any(|at| exponent(word, at) || run(&word[at..]) > LONG)),
        }
    }
}

/// Where a JSON text stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Place {
    /// Between texts and numbers, or in a word.
    #[default]
    Outside,
    Text,
    /// Behind a backslash.
    Escape,
    /// Before the point, so many digits.
    Number(usize),
    Fraction,
    /// Behind the `e`, so many digits.
    Exponent(usize),
}

impl Place {
    pub(super) fn push(&mut self, byte: u8) {
        *self = match (*self, byte) {
            (Place::Text, b'\\') => Place::Escape,
            (Place::Text, b'"') => Place::Outside,
            (Place::Text | Place::Escape, _) => Place::Text,
            (Place::Number(count), b'0'..=b'9') => Place::Number(count + 1),
            (Place::Exponent(count), b'0'..=b'9') => Place::Exponent(count + 1),
            (Place::Fraction, b'0'..=b'9') => Place::Fraction,
            (Place::Number(_), b'.') => Place::Fraction,
            (Place::Number(_) | Place::Fraction, b'e' | b'E') => Place::Exponent(0),
            (Place::Exponent(0), b'+' | b'-') => Place::Exponent(0),
            (_, b'"') => Place::Text,
            (_, b'0'..=b'9') => Place::Number(1),
            _ => Place::Outside,
        };
    }

    /// Takes from `mask` what would make a number too large.
    pub(super) fn limit(self, mask: &mut SimpleVob, tokens: &Lengthening) {
        match self {
            Place::Text | Place::Escape => return,
            Place::Number(DIGITS..) => mask.sub(&tokens.digit),
            Place::Exponent(0) => mask.sub(&tokens.three),
            Place::Exponent(1) => mask.sub(&tokens.two),
            Place::Exponent(_) => mask.sub(&tokens.digit),
            Place::Outside | Place::Number(_) | Place::Fraction => {}
        }
        mask.sub(&tokens.whole);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_in_a_text_is_known() {
        for (text, place) in [
            ("", Place::Outside),
            ("{\"a", Place::Text),
            ("{\"a\\\"", Place::Text),
            ("{\"a\\", Place::Escape),
            ("\"1e5\"", Place::Outside),
            ("[12", Place::Number(2)),
            ("[-1.5", Place::Fraction),
            ("[1,null", Place::Outside),
            ("[1e", Place::Exponent(0)),
            ("[1.0E-7", Place::Exponent(1)),
            ("true", Place::Outside),
        ] {
            let mut at = Place::default();
            text.bytes().for_each(|byte| at.push(byte));
            assert_eq!(at, place, "{text}");
        }
    }

    #[test]
    fn long_exponents_are_taken_away() {
        let words: Vec<Vec<u8>> =
            ["1", "12", "123", "e", "e12", "e-123", "\"", "a1"].map(|word| word.as_bytes().to_vec()).to_vec();
        let tokens = Lengthening::new(&words);
        let left = |place: Place| {
            let mut mask = SimpleVob::alloc_ones(words.len());
            place.limit(&mut mask, &tokens);
            mask.to_list()
        };
        assert_eq!(left(Place::Text).len(), 8);
        assert_eq!(left(Place::Number(3)), [0, 1, 2, 3, 4, 6, 7]);
        assert_eq!(left(Place::Number(200)), [3, 4, 6, 7]);
        assert_eq!(left(Place::Exponent(0)), [0, 1, 3, 4, 6, 7]);
        assert_eq!(left(Place::Exponent(1)), [0, 3, 4, 6, 7]);
        assert_eq!(left(Place::Exponent(2)), [3, 4, 6, 7]);
    }
}
