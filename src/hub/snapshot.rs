//! One repository in the Hugging Face cache, in the layout that Python's tools share
//! (<https://huggingface.co/docs/huggingface_hub/guides/manage-cache>): contents under `blobs/<etag>`, a
//! folder of links per commit under `snapshots/<commit>`, and `refs/<revision>` naming the commit.

use super::cache::{make_folder, size};
use super::files;
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// A repository's part of the cache; nothing is created until something is put in.
pub(super) struct Snapshots {
    cache: hf_hub::Cache,
    repo: String,
}

/// A checkpoint that is complete on disk.
#[derive(Debug)]
pub(super) struct Complete {
    /// The folder, or the GGUF file to open.
    pub path: PathBuf,
    pub commit: String,
}

impl Snapshots {
    pub fn new(hf_cache: &Path, repo: &str) -> Snapshots {
        Snapshots { cache: hf_hub::Cache::new(hf_cache.to_path_buf()), repo: repo.to_string() }
    }

    fn folder(&self) -> PathBuf {
        self.cache.path().join(self.folder_name())
    }

    fn folder_name(&self) -> String {
        hf_hub::Repo::model(self.repo.clone()).folder_name()
    }

    /// Whether the cache holds anything of this repository.
    pub fn exists(&self) -> bool {
        self.folder().is_dir()
    }

    /// The lock that keeps two of us from downloading the same repository.
    pub fn lock_path(&self) -> PathBuf {
        self.cache.path().join(".locks").join(self.folder_name()).join("cactus.lock")
    }

    /// The lock that Python's client takes for one blob.
    pub fn blob_lock(&self, etag: &str) -> PathBuf {
        self.lock_path().with_file_name(format!("{etag}.lock"))
    }

    /// The record of which files are underway.
    pub fn underway_path(&self) -> PathBuf {
        self.lock_path().with_file_name("cactus.underway.json")
    }

    /// The newest complete checkpoint of any revision.
    pub fn any_complete(&self) -> Option<Complete> {
        let mut snapshots: Vec<_> = fs::read_dir(self.folder().join("snapshots")).into_iter().flatten().flatten().collect();
        snapshots.sort_by_key(|entry| std::cmp::Reverse(entry.metadata().and_then(|meta| meta.modified()).ok()));
        snapshots.iter().find_map(|entry| self.lookup(entry.file_name().to_str()?).ok())
    }

    /// Looks for a complete checkpoint of `revision` without any request. `Ok(Err(..))` says what is missing.
    pub fn lookup(&self, revision: &str) -> Result<Complete, String> {
        let commit = match fs::read_to_string(self.folder().join("refs").join(revision)) {
            Ok(commit) => commit.trim().to_string(),
            Err(_) => revision.to_string(),
        };
        if !is_commit(&commit) {
            return Err("it is not in the cache".to_string());
        }
        let folder = self.snapshot(&commit);
        let mut names = Vec::new();
        list(&folder, "", 3, &mut names);
        if names.is_empty() {
            return Err("it is not in the cache".to_string());
        }
        let shards = match files::index(&names) {
            None => None,
            Some(index) => {
                let text = fs::read(folder.join(index)).map_err(|e| format!("cannot read {index}: {e}"))?;
                Some(files::shards_of(&text)?)
            }
        };
        let chosen = files::select(&names, shards.as_deref())
            .map_err(|missing| format!("{} is incomplete: {missing}", folder.display()))?;
        Ok(Complete { path: chosen.gguf.map_or(folder.clone(), |file| folder.join(file)), commit })
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.cache.model(self.repo.clone()).pointer_path(commit)
    }

    /// Where contents are kept; the folder is created.
    pub fn blobs(&self) -> Result<PathBuf> {
        let blobs = self.folder().join("blobs");
        make_folder(&blobs)?;
        Ok(blobs)
    }

    /// Where the content with this etag is kept; its folder is created.
    pub fn blob(&self, etag: &str) -> Result<PathBuf> {
        Ok(self.blobs()?.join(etag))
    }

    /// The model card of `revision`, if some tool fetched it.
    pub fn card(&self, revision: &str) -> Option<String> {
        let commit = fs::read_to_string(self.folder().join("refs").join(revision)).ok()?;
        let commit = commit.trim();
        is_commit(commit).then(|| fs::read_to_string(self.snapshot(commit).join("README.md")).ok())?
    }

    /// Removes the checkpoint of `revision` and every content that no other revision shares; gives the number
    /// of bytes freed. The caller holds the lock of the repository.
    pub fn remove(&self, revision: &str) -> Result<u64> {
        let folder = self.folder();
        let refs = folder.join("refs");
        let commit = fs::read_to_string(refs.join(revision)).unwrap_or_else(|_| revision.to_string());
        let commit = commit.trim();
        let snapshot = self.snapshot(commit);
        if !is_commit(commit) || !snapshot.is_dir() {
            return Ok(0);
        }
        let before = size(&folder);
        fs::remove_dir_all(&snapshot).map_err(|e| Error::io("remove", &snapshot, &e))?;
        let mut names = Vec::new();
        list(&refs, "", 3, &mut names);
        for file in names.iter().map(|name| refs.join(name)) {
            if fs::read_to_string(&file).is_ok_and(|text| text.trim() == commit) {
                fs::remove_file(&file).map_err(|e| Error::io("remove", &file, &e))?;
            }
        }
        let mut shared = BTreeSet::new();
        linked(&folder.join("snapshots"), 4, &mut shared);
        for blob in fs::read_dir(folder.join("blobs")).into_iter().flatten().flatten() {
            if !shared.contains(&blob.file_name()) {
                fs::remove_file(blob.path()).map_err(|e| Error::io("remove", &blob.path(), &e))?;
            }
        }
        if fs::read_dir(folder.join("snapshots")).is_ok_and(|mut entries| entries.next().is_none()) {
            fs::remove_dir_all(&folder).map_err(|e| Error::io("remove", &folder, &e))?;
        }
        Ok(before.saturating_sub(size(&folder)))
    }

    /// Makes the blob `etag` visible as the file `name` of `commit`.
    pub fn link(&self, commit: &str, name: &str, etag: &str) -> Result<()> {
        let file = self.snapshot(commit).join(name);
        if let Some(folder) = file.parent() {
            make_folder(folder)?;
        }
        if fs::symlink_metadata(&file).is_ok() {
            fs::remove_file(&file).map_err(|e| Error::io("replace", &file, &e))?;
        }
        // `snapshots/<commit>/` and the folders inside `name`.
        let up = "../".repeat(2 + name.matches('/').count());
        link(&PathBuf::from(format!("{up}blobs/{etag}")), &self.folder().join("blobs").join(etag), &file)
            .map_err(|e| Error::io("create", &file, &e))
    }

    /// Records that `revision` is `commit`; done last, when every file is in place.
    pub fn set_revision(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let file = self.folder().join("refs").join(revision);
        make_folder(file.parent().unwrap_or(&file))?;
        let partial = self.folder().join("revision.incomplete");
        fs::write(&partial, commit).map_err(|e| Error::io("write", &partial, &e))?;
        fs::rename(&partial, &file).map_err(|e| Error::io("create", &file, &e))
    }
}

/// Whether `text` is a full commit hash, and so also a safe folder name.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(unix)]
fn link(relative: &Path, _blob: &Path, file: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(relative, file)
}

/// Symbolic links need a privilege on Windows; a second name for the same file does not.
#[cfg(not(unix))]
fn link(_relative: &Path, blob: &Path, file: &Path) -> std::io::Result<()> {
    fs::hard_link(blob, file).or_else(|_| fs::copy(blob, file).map(|_| ()))
}

/// Adds the files under `folder` to `names`, as paths with `/`; a link to nothing does not count.
fn list(folder: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        match fs::metadata(&path) {
            Ok(meta) if meta.is_file() => names.push(format!("{prefix}{name}")),
            Ok(meta) if meta.is_dir() && depth > 0 => list(&path, &format!("{prefix}{name}/"), depth - 1, names),
            _ => {}
        }
    }
}

/// Adds the names of the contents that links under `folder` lead to.
fn linked(folder: &Path, depth: usize, names: &mut BTreeSet<OsString>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if let Ok(target) = fs::read_link(&path) {
            names.extend(target.file_name().map(|name| name.to_owned()));
        } else if path.is_dir() && depth > 0 {
            linked(&path, depth - 1, names);
        }
    }
}
