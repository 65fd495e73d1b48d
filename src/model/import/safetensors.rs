//! The header of one `.safetensors` file: which tensors it holds and where. Only the header is read, with
//! positioned reads, and everything in it is checked against the file before anyone uses it.
//!
//! Format: `u64` little-endian header length, that many bytes of JSON (`name -> {dtype, shape,
//! data_offsets}`), then the data; offsets count from the start of the data and leave no gaps.
//! <https://huggingface.co/docs/safetensors/index#format>

use super::{Encoding, RowOrder, SourceFile, SourceTensor};
use crate::error::{Error, Result};
use safetensors::tensor::{Dtype, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::Path;

/// Longest header that is read. The reference implementation has the same bound.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// What one file holds.
#[derive(Debug)]
pub(super) struct Tensors {
    /// Tensors that can be read as weights.
    pub floats: BTreeMap<String, SourceTensor>,
    /// Tensors of every other dtype, by name.
    pub other: BTreeMap<String, Dtype>,
}

/// Reads and checks the header of the file at `path`.
pub(super) fn open(path: &Path) -> Result<Tensors> {
    let file = SourceFile::open(path)?;
    let mut start = vec![0u8; file.len.min(64) as usize];
    file.read_exact_at(0, &mut start)?;
    let header_len = match start.first_chunk::<8>() {
        Some(bytes) => u64::from_le_bytes(*bytes),
        None => return Err(not_safetensors(path, &start)),
    };
    // A header is a JSON object, so any other ninth byte means another kind of file.
    if start.get(8).is_some_and(|&b| b != b'{') || !(2..=MAX_HEADER_BYTES).contains(&header_len) {
        return Err(not_safetensors(path, &start));
    }
    let data_start = 8 + header_len;
    if data_start > file.len {
        return Err(short(path, data_start, file.len));
    }
    let mut json = vec![0u8; header_len as usize];
    file.read_exact_at(8, &mut json)?;
    let UniqueMap(infos) = serde_json::from_slice::<UniqueMap<TensorInfo>>(&json)
        .map_err(|e| Error::bad_file(path, format!("the safetensors header is damaged: {e}")).with_hint(AGAIN))?;
    drop(json);

    let data_len = check_layout(&infos).map_err(|what| Error::bad_file(path, what).with_hint(AGAIN))?;
    let Some(expected) = data_start.checked_add(data_len) else {
        return Err(Error::bad_file(path, "the tensor offsets in the safetensors header are absurd").with_hint(AGAIN));
    };
    if expected > file.len {
        return Err(short(path, expected, file.len));
    }
    if expected < file.len {
        let extra = file.len - expected;
        return Err(Error::bad_file(path, format!("{extra} bytes after the last tensor")).with_hint(AGAIN));
    }

    let mut tensors = Tensors { floats: BTreeMap::new(), other: BTreeMap::new() };
    for (name, info) in infos {
        let encoding = match info.dtype {
            Dtype::F32 => Encoding::F32,
            Dtype::F16 => Encoding::F16,
            Dtype::BF16 => Encoding::BF16,
            other => {
                tensors.other.insert(name, other);
                continue;
            }
        };
        let offset = data_start + info.data_offsets.0 as u64;
        let tensor =
            SourceTensor { shape: info.shape, encoding, order: RowOrder::Plain, file: file.clone(), offset, official: None };
        tensors.floats.insert(name, tensor);
    }
    Ok(tensors)
}

const AGAIN: &str = "download the file again";

fn short(path: &Path, expected: u64, actual: u64) -> Error {
    let missing = expected - actual;
    Error::bad_file(path, format!("the file is short by {missing} bytes ({actual} of at least {expected})"))
        .with_hint("the download was cut; fetch the file again")
}

/// Checks that the tensors fill the data section without gap or overlap and that every range has the size
/// of its dtype and shape. Returns the length of the data section.
fn check_layout(infos: &BTreeMap<String, TensorInfo>) -> Result<u64, String> {
    let mut by_offset: Vec<(&String, &TensorInfo)> = infos.iter().collect();
    by_offset.sort_by_key(|(_, info)| info.data_offsets);
    let mut end = 0;
    let mut previous = "the header";
    for (name, info) in by_offset {
        let (from, to) = info.data_offsets;
        if from > to {
            return Err(format!("tensor {name}: its data range {from}..{to} runs backwards"));
        }
        if from < end {
            return Err(format!("tensor {name}: its data range {from}..{to} overlaps that of {previous}"));
        }
        if from > end {
            return Err(format!("{} unexplained bytes between {previous} and tensor {name}", from - end));
        }
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |bits, &d| bits.checked_mul(d));
        match bits {
            Some(bits) if bits % 8 == 0 && bits / 8 == to - from => {}
            Some(bits) => {
                let (dtype, shape, held) = (info.dtype, &info.shape, to - from);
                let needed = bits.div_ceil(8);
                return Err(format!("tensor {name}: {dtype} of shape {shape:?} is {needed} bytes, its data range has {held}"));
            }
            None => return Err(format!("tensor {name}: shape {:?} is larger than any memory", info.shape)),
        }
        (end, previous) = (to, name);
    }
    Ok(end as u64)
}

/// The error for a file that is something else than its name says, from its first bytes.
fn not_safetensors(path: &Path, start: &[u8]) -> Error {
    let json = ("JSON text", "a server's error answer was perhaps saved as the file; download it again");
    match foreign(start).or(start.starts_with(b"{").then_some(json)) {
        Some((what, hint)) => Error::bad_file(path, format!("not a safetensors file but {what}")).with_hint(hint),
        None => Error::bad_file(path, "not a safetensors file").with_hint(AGAIN),
    }
}

/// Recognises, by its first bytes (64 are enough), what often lies under the name of a model file. Returns
/// what it is and what to do.
pub(super) fn foreign(start: &[u8]) -> Option<(&'static str, &'static str)> {
    const PICKLE: &str = "pickle can run code when loaded and is never opened; use a safetensors version of the model, \
                          or save one with transformers (save_pretrained)";
    let text = start.trim_ascii_start();
    let tag = |tag: &str| text.get(..tag.len()).is_some_and(|t| t.eq_ignore_ascii_case(tag.as_bytes()));
    Some(match start {
        [] => ("an empty file", AGAIN),
        [b'P', b'K', 3, 4, ..] => ("a zip archive, most likely a PyTorch checkpoint", PICKLE),
        [0x80, 2..=5, ..] => ("a Python pickle, most likely an old PyTorch checkpoint", PICKLE),
        [b'G', b'G', b'U', b'F', ..] => ("a GGUF file", "rename it so that it ends in .gguf"),
        [0x89, b'H', b'D', b'F', ..] => ("an HDF5 file (TensorFlow or Keras)", "use a safetensors version of the model"),
        _ if start.starts_with(b"version https://git-lfs") => (
            "a Git-LFS pointer (the real content was never fetched)",
            "run `git lfs pull` in the folder, or download the file itself",
        ),
        _ if tag("<!doctype") || tag("<html") || tag("<?xml") => {
            ("a web page", "the download went to a page instead of the file (sign-in, licence or error page); download it again")
        }
        _ => return None,
    })
}

/// A JSON object in which no name may come twice. `__metadata__`, the one reserved name of a safetensors
/// header, is left out.
pub(super) struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = BTreeMap<String, V>;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let value = map.next_value().map_err(|e| A::Error::custom(format!("{name}: {e}")))?;
                    if entries.insert(name.clone(), value).is_some() {
                        return Err(A::Error::custom(format!("{name} comes twice")));
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Entries(PhantomData)).map(UniqueMap)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::error::Kind;

    /// A file with this header text and `data` bytes of content.
    pub fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn open_bytes(bytes: &[u8]) -> Result<Tensors> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights.safetensors");
        std::fs::write(&path, bytes).unwrap();
        open(&path)
    }

    /// The message and hint of the failure that `bytes` must give; it names the file.
    fn failure(bytes: &[u8]) -> String {
        let error = open_bytes(bytes).unwrap_err();
        assert_eq!(error.kind, Kind::BadFile, "{error}");
        assert!(error.message().contains("weights.safetensors: "), "{error}");
        assert!(error.hint().is_some(), "{error}");
        assert!(!error.message().contains('\n'));
        format!("{error} / {}", error.hint().unwrap())
    }

    const TWO: &str = r#"{"__metadata__":{"format":"pt"},
        "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},
        "n":{"dtype":"I64","shape":[],"data_offsets":[12,20]}}"#;

    #[test]
    fn tensors_are_found_and_read() {
        let mut data = vec![0x80, 0x3f, 0x00, 0xc0]; // bf16 1.0, -2.0
        data.extend([1.5f32, -0.25].iter().flat_map(|v| v.to_le_bytes()));
        data.extend(7i64.to_le_bytes());
        let tensors = open_bytes(&file(TWO, &data)).unwrap();
        assert_eq!(tensors.other.iter().map(|(n, d)| (n.as_str(), *d)).collect::<Vec<_>>(), [("n", Dtype::I64)]);
        let (a, b) = (&tensors.floats["a"], &tensors.floats["b"]);
        assert_eq!((a.shape.as_slice(), a.encoding), (&[2, 1][..], Encoding::BF16));
        let mut out = [0.0; 2];
        a.read_rows(0..2, &mut out).unwrap();
        assert_eq!(out, [1.0, -2.0]);
        b.read_rows(0..1, &mut out).unwrap();
        assert_eq!(out, [1.5, -0.25]);
    }

    /// The header as other writers make it: from the `safetensors` crate itself.
    #[test]
    fn reads_what_the_reference_crate_writes() {
        let values: Vec<u8> = (0..6).flat_map(|i| half::f16::from_f32(i as f32).to_le_bytes()).collect();
        let view = safetensors::tensor::TensorView::new(Dtype::F16, vec![3, 2], &values).unwrap();
        let bytes = safetensors::serialize([("w", view)], None).unwrap();
        let tensors = open_bytes(&bytes).unwrap();
        let mut out = [0.0; 4];
        tensors.floats["w"].read_rows(1..3, &mut out).unwrap();
        assert_eq!(out, [2.0, 3.0, 4.0, 5.0]);
    }

    #[test]
    fn p56_a_cut_file_says_by_how_much() {
        let whole = file(TWO, &[0; 20]);
        for cut in 0..whole.len() {
            let text = failure(&whole[..cut]);
            match cut {
                0 => assert!(text.contains("an empty file"), "{text}"),
                1..8 => assert!(text.contains("not a safetensors file"), "{text}"),
                _ if cut >= 8 + TWO.len() => {
                    assert!(text.contains(&format!("short by {} bytes", whole.len() - cut)), "{text}");
                }
                _ => assert!(text.contains(&format!("short by {} bytes", 8 + TWO.len() - cut)), "{text}"),
            }
        }
    }

    #[test]
    fn every_false_length_is_an_error() {
        let whole = file(TWO, &[0; 20]);
        for byte in 0..8 {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[byte] ^= 1 << bit;
                failure(&bytes);
            }
        }
        failure(&[u64::MAX.to_le_bytes().as_slice(), b"{}"].concat());
        failure(&[100_000_001u64.to_le_bytes().as_slice(), b"{}"].concat());
    }

    /// No single flipped header bit may panic; whatever is accepted must stay inside the file.
    #[test]
    fn flipped_header_bits_never_panic() {
        let whole = file(TWO, &[0; 20]);
        for at in 8..8 + TWO.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                if let Ok(tensors) = open_bytes(&bytes) {
                    for t in tensors.floats.values() {
                        assert!(t.offset + t.encoding.bytes(t.elements()).unwrap() as u64 <= whole.len() as u64);
                    }
                }
            }
        }
    }

    #[test]
    fn damaged_headers_are_named() {
        let max = u64::MAX;
        let big = 1u64 << 33;
        let cases = [
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#.into(), "a: its data range 8..0 runs backwards"),
            (
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#
                    .into(),
                "b: its data range 4..8 overlaps that of a",
            ),
            (
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[6,10]}}"#
                    .into(),
                "2 unexplained bytes between a and tensor b",
            ),
            (
                r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#.into(),
                "a: F32 of shape [3] is 12 bytes, its data range has 8",
            ),
            (format!(r#"{{"a":{{"dtype":"F32","shape":[{big},{big}],"data_offsets":[0,8]}}}}"#), "larger than any memory"),
            (format!(r#"{{"a":{{"dtype":"U8","shape":[{max}],"data_offsets":[0,{max}]}}}}"#), "absurd|larger than any memory"),
            (r#"{"a":{"dtype":"U8","shape":[9000000000],"data_offsets":[0,9000000000]}}"#.into(), "short by 8999999992 bytes"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#.into(), "4 bytes after the last tensor"),
            (r#"{"a":{"dtype":"Q7","shape":[8],"data_offsets":[0,8]}}"#.into(), "a: unknown variant `Q7`"),
            (r#"{"a":{"dtype":"U8","shape":[-8],"data_offsets":[0,8]}}"#.into(), "header is damaged"),
            (r#"{"a":{"dtype":"U8","data_offsets":[0,8]}}"#.into(), "missing field `shape`"),
            (
                r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#
                    .into(),
                "a comes twice",
            ),
            (r#"{"a":"#.into(), "header is damaged"),
            ("{".repeat(5000), "header is damaged"),
        ];
        for (header, expected) in cases {
            let text = failure(&file(&header, &[0; 8]));
            assert!(expected.split('|').any(|e| text.contains(e)), "{text}\nexpected {expected}");
        }
    }

    #[test]
    fn p56_other_kinds_of_file_are_recognised() {
        let cases: [(&[u8], &str); 8] = [
            (b"PK\x03\x04\0\0\x08\x08\0\0archive/data.pkl", "zip archive, most likely a PyTorch"),
            (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "Python pickle"),
            (b"<!DOCTYPE html>\n<html>Sign in</html>", "a web page"),
            (b"\n  <HTML><body>404</body></HTML>", "a web page"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "Git-LFS pointer"),
            (b"GGUF\x03\0\0\0\0\0\0\0", "a GGUF file"),
            (b"{\"error\":\"Repository not found\"}", "JSON text"),
            (b"\xde\xad\xbe\xef\xde\xad\xbe\xef\xde\xad", "not a safetensors file"),
        ];
        for (bytes, expected) in cases {
            let text = failure(bytes);
            assert!(text.contains(expected), "{text}");
        }
        // 640 = 0x0280: the length of a good header may look like the start of a pickle.
        let header = format!("{:<640}", r#"{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}"#);
        assert_eq!(open_bytes(&file(&header, &[0, 0])).unwrap().floats.len(), 1);
    }
}
