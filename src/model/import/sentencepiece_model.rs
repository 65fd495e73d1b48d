//! The content of a sentencepiece `tokenizer.model`: a protobuf message, of which the few fields that decide how
//! text is cut are read. Field numbers and defaults:
//! <https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto>

use crate::error::{Error, Result};
use std::collections::HashSet;
use std::path::Path;

/// Longest piece that is taken, in bytes. Trainers allow 16 characters unless told otherwise.
const MAX_PIECE_BYTES: usize = 1024;
/// More pieces than any model has (the largest published vocabularies have some 262,000).
const MAX_PIECES: usize = 4 << 20;

/// What a piece is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Byte,
}

#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub text: String,
    pub score: f32,
    pub kind: PieceKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Unigram,
    Bpe,
}

/// A checked model: pieces are unique and not empty, there is exactly one unknown piece, with byte fallback all
/// 256 byte pieces are there, and the character map only points into itself.
#[derive(Debug)]
pub(super) struct SentencePieceModel {
    pub pieces: Vec<Piece>,
    pub algorithm: Algorithm,
    pub byte_fallback: bool,
    pub unknown_id: usize,
    pub bos_piece: String,
    pub eos_piece: String,
    /// Compiled character replacements (NFKC and the like); empty for none.
    pub charsmap: Vec<u8>,
    pub add_dummy_prefix: bool,
    pub remove_extra_whitespaces: bool,
}

impl SentencePieceModel {
    /// Parses and checks `bytes`, the content of `path`.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let mut model = SentencePieceModel {
            pieces: Vec::new(),
            algorithm: Algorithm::Unigram,
            byte_fallback: false,
            unknown_id: 0,
            bos_piece: "<s>".into(),
            eos_piece: "</s>".into(),
            charsmap: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
        };
        model.read(bytes).and_then(|()| model.check()).map_err(|problem| match problem {
            Problem::Damaged(what) => {
                Error::bad_file(path, format!("not a sound sentencepiece model: {what}")).with_hint("download the file again")
            }
            Problem::Unsupported(what) => {
                Error::unsupported(format!("{}: sentencepiece models with {what} cannot be read", path.display()))
                    .with_hint("save tokenizer.json with transformers (AutoTokenizer.from_pretrained, then save_pretrained)")
            }
        })?;
        Ok(model)
    }

    fn read(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        let mut fields = Fields(bytes);
        while let Some((number, field)) = fields.next()? {
            match number {
                1 if self.pieces.len() == MAX_PIECES => return Err(Problem::Damaged("too many pieces".into())),
                1 => {
                    let piece = read_piece(field.bytes()?).map_err(|p| p.context(format!("piece {}", self.pieces.len())))?;
                    self.pieces.push(piece);
                }
                2 => self.read_trainer(field.bytes()?)?,
                3 => self.read_normalizer(field.bytes()?)?,
                5 if denormalizes(field.bytes()?)? => return Err(Problem::Unsupported("a denormalizer".into())),
                _ => {}
            }
        }
        Ok(())
    }

    fn read_trainer(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        let mut fields = Fields(bytes);
        while let Some((number, field)) = fields.next()? {
            match number {
                3 => {
                    self.algorithm = match field.varint()? {
                        1 => Algorithm::Unigram,
                        2 => Algorithm::Bpe,
                        3 => return Err(Problem::Unsupported("algorithm WORD".into())),
                        4 => return Err(Problem::Unsupported("algorithm CHAR".into())),
                        n => return Err(Problem::Unsupported(format!("algorithm number {n}"))),
                    }
                }
                24 if field.flag()? => return Err(Problem::Unsupported("whitespace as a suffix".into())),
                35 => self.byte_fallback = field.flag()?,
                46 => self.bos_piece = field.text()?,
                47 => self.eos_piece = field.text()?,
                _ => {}
            }
        }
        Ok(())
    }

    fn read_normalizer(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        let mut fields = Fields(bytes);
        while let Some((number, field)) = fields.next()? {
            match number {
                2 => self.charsmap = field.bytes()?.to_vec(),
                3 => self.add_dummy_prefix = field.flag()?,
                4 => self.remove_extra_whitespaces = field.flag()?,
                5 if !field.flag()? => return Err(Problem::Unsupported("spaces kept as they are".into())),
                _ => {}
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), Problem> {
        let damaged = |what: String| Err(Problem::Damaged(what));
        let mut seen = HashSet::new();
        let mut bytes = HashSet::new();
        let mut unknown = None;
        for (id, piece) in self.pieces.iter().enumerate() {
            if piece.text.is_empty() || !seen.insert(piece.text.as_str()) {
                return damaged(format!("piece {id} ({:?}) is empty or comes twice", piece.text));
            }
            match piece.kind {
                PieceKind::Unknown if unknown.replace(id).is_some() => return damaged("two unknown pieces".into()),
                PieceKind::Byte => {
                    bytes.insert(piece.text.as_str());
                }
                _ => {}
            }
        }
        match unknown {
            Some(id) => self.unknown_id = id,
            None => return damaged("no unknown piece".into()),
        }
        if self.byte_fallback
            && let Some(b) = (0..=255u8).find(|b| !bytes.contains(format!("<0x{b:02X}>").as_str()))
        {
            return damaged(format!("no piece for byte {b}, which byte fallback needs"));
        }
        if self.charsmap.is_empty() { Ok(()) } else { check_charsmap(&self.charsmap) }
    }
}

fn read_piece(bytes: &[u8]) -> Result<Piece, Problem> {
    let mut piece = Piece { text: String::new(), score: 0.0, kind: PieceKind::Normal };
    let mut fields = Fields(bytes);
    while let Some((number, field)) = fields.next()? {
        match number {
            1 => piece.text = field.text()?,
            2 => piece.score = field.float()?,
            3 => {
                piece.kind = match field.varint()? {
                    1 => PieceKind::Normal,
                    2 => PieceKind::Unknown,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    5 => return Err(Problem::Unsupported("unused pieces".into())),
                    6 => PieceKind::Byte,
                    n => return Err(Problem::Unsupported(format!("pieces of type {n}"))),
                }
            }
            _ => {}
        }
    }
    if piece.text.len() > MAX_PIECE_BYTES {
        return Err(Problem::Damaged(format!("longer than {MAX_PIECE_BYTES} bytes")));
    }
    if !piece.score.is_finite() {
        return Err(Problem::Damaged("its score is not a finite number".into()));
    }
    Ok(piece)
}

/// Whether a normalizer specification carries a character map.
fn denormalizes(bytes: &[u8]) -> Result<bool, Problem> {
    let mut fields = Fields(bytes);
    while let Some((number, field)) = fields.next()? {
        if number == 2 && !field.bytes()?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Checks a compiled character map: a `u32` byte count, a double-array trie of that many bytes, and the
/// NUL-separated replacement texts that the leaves point into. The reader in `tokenizers` follows it unchecked.
///
/// Units of the trie (<https://github.com/s-yata/darts-clone>): bit 31 marks a value, else bits 0-7 are the byte
/// that leads here, bit 8 says that a value unit hangs below, bits 10-30 (shifted left by 8 when bit 9 is set)
/// give the distance to the children. A child lies at the base XOR its byte, hence in the same block of 256.
fn check_charsmap(charsmap: &[u8]) -> Result<(), Problem> {
    let damaged = || Problem::Damaged("the character map is damaged".into());
    let (size, rest) = charsmap.split_first_chunk::<4>().ok_or_else(damaged)?;
    let (trie, texts) = rest.split_at_checked(u32::from_le_bytes(*size) as usize).ok_or_else(damaged)?;
    let texts = std::str::from_utf8(texts).map_err(|_| damaged())?;
    if trie.is_empty() || trie.len() % 1024 != 0 {
        return Err(damaged());
    }
    let units: Vec<u32> = trie.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    for (i, &unit) in units.iter().enumerate() {
        let value_here = unit >> 31 == 1;
        if value_here && i != 0 {
            continue;
        }
        let distance = ((unit >> 10) as usize) << ((unit & (1 << 9)) >> 6);
        let value = *units.get(i ^ distance).ok_or_else(damaged)?;
        let text_at = (value & 0x7fff_ffff) as usize;
        if (unit >> 8) & 1 == 1 && !texts.is_char_boundary(text_at) {
            return Err(damaged());
        }
    }
    Ok(())
}

enum Problem {
    Damaged(String),
    Unsupported(String),
}

impl Problem {
    fn context(self, whose: String) -> Self {
        match self {
            Problem::Damaged(what) => Problem::Damaged(format!("{whose}: {what}")),
            unsupported => unsupported,
        }
    }
}

/// One value of the protobuf wire format. <https://protobuf.dev/programming-guides/encoding/>
enum Field<'a> {
    Varint(u64),
    Fixed32([u8; 4]),
    Fixed64,
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    fn bytes(&self) -> Result<&'a [u8], Problem> {
        if let Field::Bytes(bytes) = self { Ok(bytes) } else { Err(Problem::Damaged("a field has the wrong type".into())) }
    }
    fn varint(&self) -> Result<u64, Problem> {
        if let Field::Varint(n) = self { Ok(*n) } else { Err(Problem::Damaged("a field has the wrong type".into())) }
    }
    fn flag(&self) -> Result<bool, Problem> {
        Ok(self.varint()? != 0)
    }
    fn float(&self) -> Result<f32, Problem> {
        match self {
            Field::Fixed32(bytes) => Ok(f32::from_le_bytes(*bytes)),
            _ => Err(Problem::Damaged("a field has the wrong type".into())),
        }
    }
    fn text(&self) -> Result<String, Problem> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| Problem::Damaged("a text is not UTF-8".into()))
    }
}

/// The fields of a message, in file order.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// The next field number and value, or `None` at the end.
    fn next(&mut self) -> Result<Option<(u64, Field<'a>)>, Problem> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let key = self.varint()?;
        let field = match key & 7 {
            0 => Field::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                Field::Fixed64
            }
            2 => {
                let len = self.varint()?;
                Field::Bytes(self.take(len)?)
            }
            5 => Field::Fixed32(self.take(4)?.try_into().map_err(|_| ends_early())?),
            n => return Err(Problem::Damaged(format!("wire type {n}"))),
        };
        Ok(Some((key >> 3, field)))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], Problem> {
        let len = usize::try_from(len).map_err(|_| ends_early())?;
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(ends_early)?;
        self.0 = rest;
        Ok(taken)
    }

    fn varint(&mut self) -> Result<u64, Problem> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Problem::Damaged("a number runs over 64 bits".into()))
    }
}

fn ends_early() -> Problem {
    Problem::Damaged("the file ends early".into())
}
