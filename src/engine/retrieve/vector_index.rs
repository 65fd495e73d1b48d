//! Vectors with their documents in a folder: nearest ones by cosine.
//!
//! Two files, all numbers little-endian. `index.bin`: magic, version, dimension and count as u32; for every document a
//! record of 24 bytes (i32 id, four bytes of padding, u64 offset in `data.bin`, u8 flags with bit 0 for deleted, seven bytes
//! of padding) and its vector, of length 1, in f16. `data.bin`: magic and version as u32; for every document the lengths of
//! content and metadata as u16, then both. A document that was deleted keeps its place until [`VectorIndex::compact`].

use super::super::embed::to_length_one;
use crate::error::{Error, Result};
use half::f16;
use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const MAGIC: u32 = 0x4341_4354;
const VERSION: u32 = 1;
const HEADER: usize = 16;
const RECORD: usize = 24;
const DATA_HEADER: u64 = 8;
const DELETED: u8 = 1;
/// Bytes of a document, and of its metadata, at most.
pub const LONGEST: usize = u16::MAX as usize;
/// Values of a vector at most.
const WIDEST: usize = 1 << 16;
const INDEX: &str = "index.bin";
const DATA: &str = "data.bin";
/// Is there while a compacted pair of files takes the place of the old one.
const MOVING: &str = "compacted";

/// A document to add.
#[derive(Clone, Copy, Debug)]
pub struct Document<'d> {
    pub id: i32,
    pub content: &'d str,
    pub metadata: &'d str,
    /// `[dim]`, of any length but 0.
    pub vector: &'d [f32],
}

/// What is stored of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub content: String,
    pub metadata: String,
    /// `[dim]`, of length 1.
    pub vector: Vec<f32>,
}

struct Entry {
    id: i32,
    offset: u64,
    deleted: bool,
}

/// An open index. Only one can have a folder open at a time.
pub struct VectorIndex {
    dir: PathBuf,
    dim: usize,
    entries: Vec<Entry>,
    /// `[entries, dim]`
    vectors: Vec<f16>,
    places: HashMap<i32, usize>,
    /// Locked as long as this lives.
    data: File,
}

impl VectorIndex {
    /// Opens the index in the folder `dir`, or makes an empty one.
    ///
    /// # Errors
    /// `Usage` when it has another dimension or is open elsewhere, `BadFile` when it is damaged, `Io`.
    pub fn open(dir: &Path, dim: usize) -> Result<Self> {
        if dim == 0 || dim > WIDEST {
            return Err(Error::usage(format!("a dimension of {dim} (1 to {WIDEST} are taken)")));
        }
        std::fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, &e))?;
        if dir.join(MOVING).exists() {
            finish_move(dir)?;
        }
        let data = open_data(dir)?;
        let mut index =
            VectorIndex { dir: dir.to_path_buf(), dim, entries: Vec::new(), vectors: Vec::new(), places: HashMap::new(), data };
        let path = dir.join(INDEX);
        match std::fs::read(&path) {
            Ok(bytes) => index.parse(&bytes).map_err(|e| e.context(path.display()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => index.write_index(dir)?,
            Err(e) => return Err(Error::io("read", &path, &e)),
        }
        Ok(index)
    }

    fn parse(&mut self, bytes: &[u8]) -> Result<()> {
        let damaged = |what: &str| Error::bad_file(Path::new(INDEX), what);
        let u32_at = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
        if u32_at(0) != Some(MAGIC) || u32_at(4) != Some(VERSION) {
            return Err(damaged("is no index of version 1"));
        }
        let (dim, count) = (u32_at(8).unwrap_or(0) as usize, u32_at(12).unwrap_or(0) as usize);
        if dim != self.dim {
            return Err(Error::usage(format!("holds vectors of {dim} values, not of {}", self.dim)));
        }
        let each = RECORD + 2 * dim;
        if count.checked_mul(each).and_then(|n| n.checked_add(HEADER)) != Some(bytes.len()) {
            return Err(damaged("its length does not fit its count"));
        }
        let end = self.data.metadata().map_err(|e| Error::io("read", &self.dir.join(DATA), &e))?.len();
        for record in bytes[HEADER..].chunks_exact(each) {
            let id = i32::from_le_bytes([record[0], record[1], record[2], record[3]]);
            let offset = u64::from_le_bytes(std::array::from_fn(|i| record[8 + i]));
            let deleted = record[16] & DELETED != 0;
            if offset < DATA_HEADER || offset.checked_add(4).is_none_or(|at| at > end) {
                return Err(damaged("a document lies outside of data.bin"));
            }
            if !deleted && self.places.insert(id, self.entries.len()).is_some() {
                return Err(damaged("an id is there twice"));
            }
            self.entries.push(Entry { id, offset, deleted });
            self.vectors.extend(record[RECORD..].chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])));
        }
        Ok(())
    }

    /// Values of a vector.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Documents that are not deleted.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Adds all of `documents`, or none.
    ///
    /// # Errors
    /// `Usage` for an id that is there, a text that is too long, a vector of another dimension, zeros or no numbers; `Io`.
    pub fn add(&mut self, documents: &[Document]) -> Result<()> {
        let mut new = HashMap::new();
        let mut vectors = Vec::with_capacity(documents.len() * self.dim);
        let mut texts = Vec::new();
        let mut offsets = Vec::new();
        let path = self.dir.join(DATA);
        let start = self.data.seek(SeekFrom::End(0)).map_err(|e| Error::io("write", &path, &e))?;
        for (at, Document { id, content, metadata, vector }) in documents.iter().enumerate() {
            if self.places.contains_key(id) || new.insert(*id, self.entries.len() + at).is_some() {
                return Err(Error::usage(format!("document {id} is there already")));
            }
            let vector = self.unit(vector).map_err(|e| e.context(format!("document {id}")))?;
            vectors.extend(vector.into_iter().map(f16::from_f32));
            offsets.push(start + texts.len() as u64);
            let size = |text: &str| {
                let long = || Error::usage(format!("a text of document {id} has {} bytes, {LONGEST} is the most", text.len()));
                u16::try_from(text.len()).map_err(|_| long())
            };
            for length in [size(content)?, size(metadata)?] {
                texts.extend(length.to_le_bytes());
            }
            texts.extend_from_slice(content.as_bytes());
            texts.extend_from_slice(metadata.as_bytes());
        }
        // Texts that no entry leads to harm nobody.
        self.data.write_all(&texts).and_then(|()| self.data.sync_data()).map_err(|e| Error::io("write", &path, &e))?;
        let before = self.entries.len();
        let entry = |(document, offset): (&Document, u64)| Entry { id: document.id, offset, deleted: false };
        self.entries.extend(documents.iter().zip(offsets).map(entry));
        self.vectors.extend(vectors);
        if let Err(error) = self.write_index(&self.dir) {
            self.entries.truncate(before);
            self.vectors.truncate(before * self.dim);
            return Err(error);
        }
        self.places.extend(new);
        Ok(())
    }

    /// The vector at length 1.
    fn unit(&self, vector: &[f32]) -> Result<Vec<f32>> {
        let mut vector = vector.to_vec();
        let length = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
        if vector.len() != self.dim || !length.is_finite() || length == 0.0 {
            return Err(Error::usage(format!("a vector is not {} numbers with a length", self.dim)));
        }
        to_length_one(&mut vector);
        Ok(vector)
    }

    fn places_of(&self, ids: &[i32]) -> Result<Vec<usize>> {
        let place = |id: &i32| self.places.get(id).copied().ok_or_else(|| Error::usage(format!("there is no document {id}")));
        ids.iter().map(place).collect()
    }

    /// Deletes all of these documents, or none.
    ///
    /// # Errors
    /// `Usage` for an id that is not there; `Io`.
    pub fn delete(&mut self, ids: &[i32]) -> Result<()> {
        let places = self.places_of(ids)?;
        places.iter().for_each(|at| self.entries[*at].deleted = true);
        if let Err(error) = self.write_index(&self.dir) {
            places.iter().for_each(|at| self.entries[*at].deleted = false);
            return Err(error);
        }
        self.places.retain(|id, _| !ids.contains(id));
        Ok(())
    }

    /// A document.
    ///
    /// # Errors
    /// `Usage` for an id that is not there, `BadFile` when its text is damaged, `Io`.
    pub fn get(&mut self, id: i32) -> Result<Stored> {
        let at = self.places_of(&[id])?[0];
        let (content, metadata) = self.texts(self.entries[at].offset)?;
        let text = |bytes: Vec<u8>| {
            String::from_utf8(bytes).map_err(|_| Error::bad_file(&self.dir.join(DATA), format!("document {id} is no UTF-8 text")))
        };
        let vector = self.vectors[at * self.dim..][..self.dim].iter().map(|x| x.to_f32()).collect();
        Ok(Stored { content: text(content)?, metadata: text(metadata)?, vector })
    }

    fn texts(&mut self, offset: u64) -> Result<(Vec<u8>, Vec<u8>)> {
        let path = self.dir.join(DATA);
        let failed = |e: std::io::Error| Error::io("read", &path, &e);
        let mut lengths = [0; 4];
        self.data.seek(SeekFrom::Start(offset)).map_err(failed)?;
        self.data.read_exact(&mut lengths).map_err(failed)?;
        let [a, b, c, d] = lengths;
        let mut content = vec![0; usize::from(u16::from_le_bytes([a, b]))];
        let mut metadata = vec![0; usize::from(u16::from_le_bytes([c, d]))];
        self.data.read_exact(&mut content).map_err(failed)?;
        self.data.read_exact(&mut metadata).map_err(failed)?;
        Ok((content, metadata))
    }

    /// Ids and cosines of the `most` documents nearest to `vector` that reach `threshold`, the nearest first.
    ///
    /// # Errors
    /// `Usage` for a vector of another dimension, zeros or no numbers.
    pub fn query(&self, vector: &[f32], most: usize, threshold: f32) -> Result<Vec<(i32, f32)>> {
        let wanted = self.unit(vector)?;
        let cosine = |row: &[f16]| row.iter().zip(&wanted).map(|(a, b)| a.to_f32() * b).sum::<f32>();
        let rows = self.entries.iter().zip(self.vectors.chunks_exact(self.dim)).filter(|(entry, _)| !entry.deleted);
        let mut found: Vec<(i32, f32)> = rows.map(|(entry, row)| (entry.id, cosine(row))).collect();
        found.retain(|(_, score)| *score >= threshold);
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        found.truncate(most);
        Ok(found)
    }

    /// Writes both files anew without what was deleted.
    ///
    /// # Errors
    /// `Io`; the index is then as it was.
    pub fn compact(&mut self) -> Result<()> {
        let new = self.dir.join("new");
        std::fs::create_dir_all(&new).map_err(|e| Error::io("create", &new, &e))?;
        let mut data = data_header();
        let (mut entries, mut vectors) = (Vec::new(), Vec::new());
        for at in 0..self.entries.len() {
            let Entry { id, offset, deleted } = self.entries[at];
            if deleted {
                continue;
            }
            let (content, metadata) = self.texts(offset)?;
            entries.push(Entry { id, offset: data.len() as u64, deleted });
            vectors.extend_from_slice(&self.vectors[at * self.dim..][..self.dim]);
            for text in [&content, &metadata] {
                data.extend((text.len() as u16).to_le_bytes());
            }
            data.extend(content);
            data.extend(metadata);
        }
        write_whole(&new.join(DATA), &data)?;
        let (entries, vectors) = (std::mem::replace(&mut self.entries, entries), std::mem::replace(&mut self.vectors, vectors));
        let moved = self.write_index(&new).and_then(|()| {
            // From here on the new files count, even if the move is cut short.
            write_whole(&self.dir.join(MOVING), b"")?;
            finish_move(&self.dir)
        });
        if let Err(error) = moved {
            (self.entries, self.vectors) = (entries, vectors);
            return Err(error);
        }
        self.data = open_data(&self.dir)?;
        self.places = self.entries.iter().enumerate().map(|(at, entry)| (entry.id, at)).collect();
        Ok(())
    }

    fn write_index(&self, dir: &Path) -> Result<()> {
        let mut bytes = Vec::with_capacity(HEADER + self.entries.len() * (RECORD + 2 * self.dim));
        for number in [MAGIC, VERSION, self.dim as u32, self.entries.len() as u32] {
            bytes.extend(number.to_le_bytes());
        }
        for (entry, vector) in self.entries.iter().zip(self.vectors.chunks_exact(self.dim)) {
            bytes.extend(entry.id.to_le_bytes());
            bytes.extend([0; 4]);
            bytes.extend(entry.offset.to_le_bytes());
            bytes.extend([u8::from(entry.deleted), 0, 0, 0, 0, 0, 0, 0]);
            bytes.extend(vector.iter().flat_map(|x| x.to_le_bytes()));
        }
        write_whole(&dir.join(INDEX), &bytes)
    }
}

fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    super::super::own_file::replace(path, |file| file.write_all(bytes))
}

fn data_header() -> Vec<u8> {
    [MAGIC, VERSION].iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Opens `data.bin` for this process alone; makes it where there is none.
fn open_data(dir: &Path) -> Result<File> {
    let path = dir.join(DATA);
    let failed = |e: std::io::Error| Error::io("open", &path, &e);
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        return Err(Error::usage(format!("the index in {} is open already", dir.display())));
    }
    let mut head = Vec::new();
    (&mut file).take(DATA_HEADER).read_to_end(&mut head).map_err(failed)?;
    if head.is_empty() {
        file.write_all(&data_header()).map_err(failed)?;
    } else if head != data_header() {
        return Err(Error::bad_file(&path, "is no data of an index of version 1"));
    }
    Ok(file)
}

/// Puts the files of a compacted index in their places.
fn finish_move(dir: &Path) -> Result<()> {
    let new = dir.join("new");
    for name in [DATA, INDEX] {
        let from = new.join(name);
        match std::fs::rename(&from, dir.join(name)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("rename", &from, &e)),
            _ => {}
        }
    }
    let mark = dir.join(MOVING);
    std::fs::remove_file(&mark).map_err(|e| Error::io("remove", &mark, &e))?;
    let _ = std::fs::remove_dir(new);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn document<'d>(id: i32, content: &'d str, vector: &'d [f32]) -> Document<'d> {
        Document { id, content, metadata: "m", vector }
    }

    fn ids(index: &VectorIndex, query: &[f32], most: usize) -> Vec<i32> {
        index.query(query, most, -1.0).expect("a query").into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn what_is_added_is_found_now_and_later() {
        let dir = TempDir::new().expect("a folder");
        let path = dir.path().join("a/b");
        let mut index = VectorIndex::open(&path, 2).expect("an index");
        index.add(&[document(7, "east", &[2.0, 0.0]), document(-3, "north", &[0.0, 0.5])]).expect("added");
        index.add(&[document(9, "", &[-1.0, 0.0])]).expect("added");
        for again in [false, true] {
            if again {
                drop(index);
                index = VectorIndex::open(&path, 2).expect("the same index");
            }
            assert_eq!(ids(&index, &[3.0, 1.0], 10), [7, -3, 9]);
            assert_eq!(ids(&index, &[3.0, 1.0], 1), [7]);
            let near = index.query(&[0.0, 2.0], 10, 0.5).expect("a query");
            assert!(near.len() == 1 && near[0].0 == -3 && (near[0].1 - 1.0).abs() < 1e-3, "{near:?}");
            let stored = Stored { content: "north".into(), metadata: "m".into(), vector: vec![0.0, 1.0] };
            assert_eq!(index.get(-3).expect("a document"), stored);
            assert_eq!(index.get(9).expect("a document").content, "");
        }
        index.delete(&[7]).expect("deleted");
        assert!(index.get(7).is_err() && index.delete(&[7]).is_err() && index.len() == 2);
        // The id is free again.
        index.add(&[document(7, "south", &[0.0, -1.0])]).expect("added");
        let before = std::fs::metadata(path.join(DATA)).expect("a file").len();
        index.compact().expect("compacted");
        assert!(std::fs::metadata(path.join(DATA)).expect("a file").len() < before);
        assert_eq!((index.get(7).expect("a document").content.as_str(), index.len()), ("south", 3));
        drop(index);
        let mut index = VectorIndex::open(&path, 2).expect("the same index");
        assert_eq!((index.get(7).expect("a document").content.as_str(), ids(&index, &[1.0, 0.0], 9)), ("south", vec![-3, 7, 9]));
        assert!(!path.join(MOVING).exists() && !path.join("new").exists());
    }

    #[test]
    fn a_move_that_was_cut_short_is_finished() {
        let dir = TempDir::new().expect("a folder");
        let mut index = VectorIndex::open(dir.path(), 1).expect("an index");
        index.add(&[document(1, "one", &[1.0]), document(2, "two", &[1.0])]).expect("added");
        index.delete(&[1]).expect("deleted");
        drop(index);
        let other = TempDir::new().expect("a folder");
        let mut new = VectorIndex::open(other.path(), 1).expect("an index");
        new.add(&[document(2, "two", &[1.0])]).expect("added");
        drop(new);
        // As if it had stopped between the two files.
        std::fs::create_dir(dir.path().join("new")).expect("a folder");
        std::fs::copy(other.path().join(INDEX), dir.path().join("new").join(INDEX)).expect("a copy");
        std::fs::copy(other.path().join(DATA), dir.path().join(DATA)).expect("a copy");
        std::fs::write(dir.path().join(MOVING), "").expect("a mark");
        let mut index = VectorIndex::open(dir.path(), 1).expect("an index");
        assert_eq!((index.get(2).expect("a document").content.as_str(), index.len()), ("two", 1));
    }

    #[test]
    fn what_cannot_be_is_refused_and_changes_nothing() {
        let dir = TempDir::new().expect("a folder");
        let mut index = VectorIndex::open(dir.path(), 2).expect("an index");
        index.add(&[document(1, "one", &[1.0, 0.0])]).expect("added");
        let long = "x".repeat(LONGEST + 1);
        for (wrong, words) in [
            (document(1, "again", &[1.0, 0.0]), "already"),
            (document(2, "short", &[1.0]), "2 numbers"),
            (document(2, "zero", &[0.0, 0.0]), "length"),
            (document(2, "nan", &[f32::NAN, 0.0]), "length"),
            (document(2, &long, &[1.0, 0.0]), "65535"),
        ] {
            let error = index.add(&[document(5, "five", &[1.0, 0.0]), wrong]).expect_err("wrong").to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(index.add(&[document(6, "", &[1.0, 0.0]), document(6, "", &[1.0, 0.0])]).is_err());
        assert_eq!(index.len(), 1);
        let second = VectorIndex::open(dir.path(), 2).map(drop).expect_err("open already").to_string();
        assert!(second.contains("open already"), "{second}");
        drop(index);
        assert!(VectorIndex::open(dir.path(), 3).map(drop).expect_err("another dimension").to_string().contains("not of 3"));
        assert!(VectorIndex::open(dir.path(), 0).is_err());
    }

    /// Cut or changed anywhere, a file is refused or read; it never panics.
    #[test]
    fn damaged_files_are_refused() {
        let dir = TempDir::new().expect("a folder");
        let mut index = VectorIndex::open(dir.path(), 2).expect("an index");
        index.add(&[document(1, "one", &[1.0, 0.0]), document(2, "two", &[0.0, 1.0])]).expect("added");
        drop(index);
        let whole = std::fs::read(dir.path().join(INDEX)).expect("a file");
        let data = std::fs::read(dir.path().join(DATA)).expect("a file");
        for cut in 0..whole.len() {
            std::fs::write(dir.path().join(INDEX), &whole[..cut]).expect("written");
            assert!(VectorIndex::open(dir.path(), 2).is_err(), "{cut} bytes");
        }
        for at in 0..whole.len() {
            let mut other = whole.clone();
            other[at] ^= 0xff;
            std::fs::write(dir.path().join(INDEX), &other).expect("written");
            if let Ok(mut index) = VectorIndex::open(dir.path(), 2) {
                let _ = (index.get(1), index.get(2), index.query(&[1.0, 0.0], 5, -1.0));
            }
        }
        std::fs::write(dir.path().join(INDEX), &whole).expect("written");
        for cut in [0, 3, 8, 12, data.len() - 1] {
            std::fs::write(dir.path().join(DATA), &data[..cut]).expect("written");
            let opened = VectorIndex::open(dir.path(), 2);
            assert!(opened.map_or(true, |mut index| index.get(2).is_err()), "{cut} bytes");
        }
    }
}
