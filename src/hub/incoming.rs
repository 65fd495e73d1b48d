//! Contents on their way into the cache, which outlive the process that fetches them.

use super::cache::hex;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// A blob of which the beginning is here: `blobs/<etag>.incomplete`, the name that Python's client uses too.
/// Because it is named after its content, what is in it stays right when the remote file changes.
pub(super) struct Incoming {
    file: File,
    path: PathBuf,
    hash: Sha256,
    /// Bytes that are here.
    pub have: u64,
}

impl Incoming {
    /// Opens what an earlier process left, or begins. The caller holds the lock of the blob.
    pub fn open(blob: &Path) -> Result<Incoming> {
        let path = partial_of(blob);
        let mut options = OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).open(&path).map_err(|e| Error::io("create", &path, &e))?;
        let (mut hash, mut have) = (Sha256::new(), 0u64);
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = file.read(&mut buffer).map_err(|e| Error::io("read", &path, &e))?;
            if read == 0 {
                return Ok(Incoming { file, path, hash, have });
            }
            hash.update(&buffer[..read]);
            have += read as u64;
        }
    }

    /// Throws away what is here.
    pub fn restart(&mut self) -> Result<()> {
        self.file.set_len(0).map_err(|e| Error::io("write", &self.path, &e))?;
        (self.hash, self.have) = (Sha256::new(), 0);
        Ok(())
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| {
            Error::io("write", &self.path, &e)
                .with_hint("free some space (cactus rm removes models) and run the same command again; it goes on from here")
        })?;
        self.hash.update(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }

    /// SHA-256 of what is here, in hexadecimal.
    pub fn sha256(&self) -> String {
        hex(&self.hash.clone().finalize())
    }

    /// Gives the finished content its final name.
    pub fn keep(self, blob: &Path) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("write", &self.path, &e))?;
        fs::rename(&self.path, blob).map_err(|e| Error::io("create", blob, &e))
    }

    pub fn discard(self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Where the beginning of `blob` is kept.
pub(super) fn partial_of(blob: &Path) -> PathBuf {
    let mut name = blob.as_os_str().to_owned();
    name.push(".incomplete");
    PathBuf::from(name)
}

/// Remembers which file is being fetched under which etag, so that the beginning of an old version is removed
/// when the file has changed on the hub. The caller holds the lock of the repository.
pub(super) struct Underway {
    path: PathBuf,
    etags: Map<String, Value>,
}

impl Underway {
    /// Reads the record at `path`; one that cannot be read counts as empty.
    pub fn open(path: PathBuf) -> Underway {
        let text = fs::read(&path).unwrap_or_default();
        Underway { path, etags: serde_json::from_slice(&text).unwrap_or_default() }
    }

    /// Notes that `name` of `revision` is being fetched into `blob`. `stale` tells where the blob of another
    /// etag would be, or `None` if that cannot be one.
    pub fn begin(&mut self, revision: &str, name: &str, etag: &str, stale: impl Fn(&str) -> Option<PathBuf>) -> Result<()> {
        let old = self.etags.insert(format!("{revision}:{name}"), Value::from(etag));
        if let Some(old) = old.as_ref().and_then(Value::as_str).filter(|old| *old != etag)
            && let Some(blob) = stale(old)
        {
            let _ = fs::remove_file(partial_of(&blob));
        }
        self.save()
    }

    /// Notes that `name` of `revision` is here.
    pub fn end(&mut self, revision: &str, name: &str) -> Result<()> {
        self.etags.remove(&format!("{revision}:{name}"));
        self.save()
    }

    fn save(&self) -> Result<()> {
        if self.etags.is_empty() {
            let _ = fs::remove_file(&self.path);
            return Ok(());
        }
        let text = Value::from(self.etags.clone()).to_string();
        fs::write(&self.path, text).map_err(|e| Error::io("write", &self.path, &e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_earlier_process_left_is_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let blob = folder.path().join("etag");
        let mut first = Incoming::open(&blob).unwrap();
        first.write(b"ab").unwrap();
        drop(first);
        let mut second = Incoming::open(&blob).unwrap();
        assert_eq!(second.have, 2);
        second.write(b"c").unwrap();
        // The test vector of FIPS 180-2.
        assert_eq!(second.sha256(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        second.keep(&blob).unwrap();
        assert_eq!((fs::read(&blob).unwrap(), partial_of(&blob).exists()), (b"abc".to_vec(), false));
        let mut third = Incoming::open(&folder.path().join("other")).unwrap();
        third.write(b"x").unwrap();
        third.restart().unwrap();
        third.write(b"abc").unwrap();
        assert_eq!((third.have, &third.sha256()[..8]), (3, "ba7816bf"));
        third.discard();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_beginning_of_an_old_version_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("underway.json");
        let blob = |etag: &str| Some(folder.path().join(etag));
        Underway::open(record.clone()).begin("main", "w", "old", blob).unwrap();
        for name in ["old.incomplete", "other.incomplete"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        let mut underway = Underway::open(record.clone());
        underway.begin("main", "w", "new", blob).unwrap();
        underway.begin("v1", "w", "other", blob).unwrap();
        assert!(!folder.path().join("old.incomplete").exists() && folder.path().join("other.incomplete").exists());
        underway.end("main", "w").unwrap();
        underway.end("v1", "w").unwrap();
        assert!(!record.exists());
    }
}
