//! Where things are kept on this machine, and how two processes stay out of each other's way.

use super::Event;
use super::settings::Settings;
use crate::error::{Error, Kind, Result};
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Our cache folder: `CACTUS_HOME`, else `cactus` in the user's cache folder.
pub fn root() -> Result<PathBuf> {
    Ok(Settings::from_env()?.root)
}

/// The folder that holds converted models.
pub fn bundles() -> Result<PathBuf> {
    Ok(root()?.join("bundles"))
}

/// The folder of one converted model. `name` is the name of a [`super::Found`]: a hub name (`owner/name`, or
/// `owner/name@revision` to keep a revision apart) gives `owner--name-cq4`; a path gives its last part and a
/// mark made from the whole path, so that two folders called `model` do not share a bundle. `bits_label` is
/// the weight format, such as `cq4`.
pub fn bundle_dir(name: &str, bits_label: &str) -> Result<PathBuf> {
    Ok(bundles()?.join(bundle_name(name, bits_label)?))
}

/// The name that stands in bundle folders for what a user typed: `owner/name`, with `@revision` if that was
/// typed, or the whole path of a local checkpoint.
pub fn name_of(typed: &str) -> Result<String> {
    let request = super::Request::parse(typed);
    if let Some(found) = super::local(request)? {
        return Ok(found.name);
    }
    let repo = super::repo_of(request.name)?;
    Ok(request.revision.map_or_else(|| repo.to_string(), |revision| format!("{repo}@{revision}")))
}

/// The converted models with this [`name_of`], as weight format label and folder, in order of the labels.
pub fn bundles_of(name: &str) -> Result<Vec<(String, PathBuf)>> {
    bundles_in(&bundles()?, name)
}

fn bundles_in(folder: &Path, name: &str) -> Result<Vec<(String, PathBuf)>> {
    let start = bundle_name(name, "x")?;
    let start = start.trim_end_matches('x');
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(label) = name.strip_prefix(start).filter(|label| is_label(label)) {
            found.push((label.to_string(), entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// Whether `label` can name a weight format.
fn is_label(label: &str) -> bool {
    !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '.')
}

/// File in a bundle whose time of change is when the bundle was last used.
const LAST_USED: &str = "last_used";

/// Notes that a bundle is used now. A bundle that cannot be written to is no reason to stop.
pub fn touch(bundle: &Path) {
    let _ = std::fs::write(bundle.join(LAST_USED), "");
}

/// When a bundle was last used; `None` if it never was.
pub fn last_used(bundle: &Path) -> Option<SystemTime> {
    std::fs::metadata(bundle.join(LAST_USED)).and_then(|meta| meta.modified()).ok()
}

/// Bytes in the files of a folder and the folders in it; what links point to is not counted.
pub fn size(folder: &Path) -> u64 {
    let sizes = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => size(&entry.path()),
        Ok(meta) if meta.is_file() => meta.len(),
        _ => 0,
    });
    sizes.sum()
}

/// Removes a converted model and gives the number of bytes freed. It is moved aside first, so that no half of
/// it is ever seen under its name.
pub fn remove_bundle(bundle: &Path) -> Result<u64> {
    let bytes = size(bundle);
    let name = bundle.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let aside = bundle.with_file_name(format!(".{name}.removed-{}", std::process::id()));
    std::fs::rename(bundle, &aside).map_err(|e| Error::io("remove", bundle, &e))?;
    std::fs::remove_dir_all(&aside).map_err(|e| Error::io("remove", &aside, &e))?;
    Ok(bytes)
}

/// Bytes that a user may still write to the disk of `path`, or of the nearest folder above that exists; `None`
/// where the system does not tell.
#[cfg(unix)]
pub fn free_bytes(path: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(path.ancestors().find(|p| p.exists())?).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
pub fn free_bytes(_path: &Path) -> Option<u64> {
    None
}

/// Refuses to begin writing `bytes` to a disk that has no room for them.
pub fn check_room(path: &Path, bytes: u64, what: &str) -> Result<()> {
    match free_bytes(path) {
        Some(free) if free < bytes => {
            let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
            Err(Error::new(
                Kind::Io,
                format!("{what} needs {} more, but {} has only {} free", mb(bytes), path.display(), mb(free)),
            )
            .with_hint("free some space (cactus rm removes models), or set CACTUS_HOME or HF_HOME to a folder on a larger disk"))
        }
        _ => Ok(()),
    }
}

fn bundle_name(name: &str, bits_label: &str) -> Result<String> {
    if !is_label(bits_label) {
        return Err(Error::usage(format!("`{bits_label}` is not a weight format label")));
    }
    let hub_name = name.split('@').next().unwrap_or(name);
    if super::is_repo_id(hub_name) {
        return Ok(format!("{}-{bits_label}", plain(&name.replace('/', "--"))));
    }
    let last = Path::new(name).file_name().map(|last| last.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = last.strip_suffix(".gguf").unwrap_or(&last);
    let mark = hex(&Sha256::digest(name.as_bytes())[..4]);
    Ok(format!("local--{}-{mark}-{bits_label}", plain(stem)))
}

/// `text` with everything that might trouble a file system replaced.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || "._-@".contains(c) { c } else { '-' }).collect()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Creates `folder` and what is above it.
pub(super) fn make_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, &e))
}

/// Holds a lock file; other processes wait. The lock ends when the value is dropped, or with the process.
pub struct Lock(#[allow(dead_code, reason = "held for its lock")] File);

impl Lock {
    /// For the making of a bundle in our cache, so that two processes do not convert the same model at once.
    pub fn for_bundle(bundle: &Path, on_event: &mut dyn FnMut(Event)) -> Result<Lock> {
        let name = bundle.file_name().unwrap_or_default().to_string_lossy();
        Self::take(&bundle.with_file_name(format!(".{name}.lock")), &name, on_event)
    }

    /// Takes the lock at `path`, waiting for another holder if there is one.
    pub(super) fn take(path: &Path, what: &str, on_event: &mut dyn FnMut(Event)) -> Result<Lock> {
        if let Some(folder) = path.parent() {
            make_folder(folder)?;
        }
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(|e| Error::io("open", path, &e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                on_event(Event::Note(&format!("another process is busy with {what}; waiting for it")));
                file.lock().map_err(|e| Error::io("lock", path, &e))?;
            }
            Err(TryLockError::Error(e)) => return Err(Error::io("lock", path, &e)),
        }
        Ok(Lock(file))
    }
}

/// A file that is being written under a temporary name, and is gone again unless it is kept.
pub(super) struct Partial {
    pub file: File,
    path: PathBuf,
    kept: bool,
}

impl Partial {
    /// Starts (over) the file at `path`, which is not the final name.
    pub fn create(path: PathBuf) -> Result<Partial> {
        let file = File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
        Ok(Partial { file, path, kept: false })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the finished file its final name.
    pub fn keep(mut self, final_name: &Path) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("write", &self.path, &e))?;
        std::fs::rename(&self.path, final_name).map_err(|e| Error::io("create", final_name, &e))?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p49_a_disk_without_room_is_an_error_before_anything_is_written() {
        let folder = std::env::temp_dir();
        assert!(check_room(&folder, 1, "a model").is_ok());
        if free_bytes(&folder).is_some() {
            let error = check_room(&folder.join("not/there/yet"), u64::MAX, "a model").unwrap_err();
            assert!(
                error.kind == Kind::Io && error.message().contains("a model needs") && error.message().contains("free"),
                "{error}"
            );
        }
    }

    #[test]
    fn bundle_names_are_plain_and_distinct() {
        assert_eq!(bundle_name("Qwen/Qwen3-0.6B", "cq4").unwrap(), "Qwen--Qwen3-0.6B-cq4");
        assert_eq!(bundle_name("Qwen/Qwen3-0.6B@refs/pr/1", "cq4").unwrap(), "Qwen--Qwen3-0.6B@refs--pr--1-cq4");
        let (a, b) = (bundle_name("/a/model", "cq2").unwrap(), bundle_name("/b/model", "cq2").unwrap());
        assert!(a.starts_with("local--model-") && a.ends_with("-cq2"), "{a}");
        assert_ne!(a, b);
        let odd = bundle_name("/models/../my model.gguf", "cq4").unwrap();
        assert!(odd.starts_with("local--my-model-"), "{odd}");
        for label in ["", "../x", "a/b"] {
            assert!(bundle_name("Qwen/Qwen3-0.6B", label).is_err());
        }
    }

    #[test]
    fn bundles_of_a_model_are_those_of_no_other() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["o--m-cq4", "o--m-f16", "o--m-2-cq4", "o--m@v1-cq4", ".o--m-cq2.partial-7", "o--m-cq3.26"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let labels = |name| bundles_in(folder.path(), name).unwrap().into_iter().map(|(label, _)| label).collect::<Vec<_>>();
        assert_eq!(labels("o/m"), ["cq3.26", "cq4", "f16"]);
        assert_eq!(labels("o/m@v1"), ["cq4"]);
        assert!(labels("o/other").is_empty());
        let bundle = folder.path().join("o--m-cq4");
        assert_eq!(last_used(&bundle), None);
        touch(&bundle);
        assert!(last_used(&bundle).unwrap().elapsed().unwrap().as_secs() < 60);
        std::fs::write(bundle.join("w"), [0; 10]).unwrap();
        assert_eq!((remove_bundle(&bundle).unwrap(), labels("o/m")), (10, vec!["cq3.26".to_string(), "f16".to_string()]));
    }

    #[test]
    fn an_abandoned_partial_file_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (partial, done) = (folder.path().join("x.incomplete"), folder.path().join("x"));
        drop(Partial::create(partial.clone()).unwrap());
        assert!(!partial.exists());
        Partial::create(partial.clone()).unwrap().keep(&done).unwrap();
        assert!(done.exists() && !partial.exists());
    }
}
