//! A bundle under construction: nothing is visible under the final name before it is whole.

use crate::error::{Error, Kind, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A folder beside the target, removed again unless it is published.
pub struct Staging {
    pub dir: PathBuf,
    /// Locked while this process lives, so that others can tell a leftover from work in progress.
    _lock: File,
}

const LOCK: &str = ".lock";
/// Stands in the names of bundles under construction.
const PARTIAL: &str = ".partial-";
/// Ends the name under which a bundle waits while its successor takes its place.
const OLD: &str = ".old";

impl Staging {
    pub fn create(target: &Path) -> Result<Self> {
        let name = target.file_name().and_then(|n| n.to_str()).filter(|n| !n.is_empty());
        let name = name.ok_or_else(|| Error::usage(format!("{} is no name for a bundle", target.display())))?;
        let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, &e))?;
        let prefix = format!(".{name}{PARTIAL}");
        remove_leftovers(parent, &prefix, target);
        let dir = parent.join(format!("{prefix}{}", std::process::id()));
        fs::create_dir_all(&dir).map_err(|e| Error::io("create", &dir, &e))?;
        let path = dir.join(LOCK);
        let lock = File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
        lock.try_lock().map_err(|e| Error::new(Kind::Io, format!("cannot lock {}: {e}", path.display())))?;
        Ok(Staging { dir, _lock: lock })
    }

    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, text).map_err(|e| Error::io("write", &path, &e))
    }

    /// Gives the folder its final name; an older bundle there is moved away first and then removed.
    pub fn publish(self, target: &Path) -> Result<()> {
        let failed = |e: std::io::Error| Error::io("publish", target, &e);
        let _ = fs::remove_file(self.dir.join(LOCK));
        let mut old = self.dir.clone().into_os_string();
        old.push(OLD);
        let old = PathBuf::from(old);
        let replaced = target.exists();
        if replaced {
            fs::rename(target, &old).map_err(failed)?;
        }
        let done = fs::rename(&self.dir, target).map_err(failed);
        if replaced {
            if done.is_err() {
                let _ = fs::rename(&old, target);
            } else {
                let _ = fs::remove_dir_all(&old);
            }
        }
        done
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // After `publish` there is nothing left under this name.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Removes what killed conversions in this folder left behind, and puts back a bundle that one of them had
/// moved away but not yet replaced.
fn remove_leftovers(parent: &Path, prefix: &str, target: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let moved_away = name.starts_with(prefix) && name.ends_with(OLD);
        // Held by a living process as long as it works.
        let abandoned = || File::open(entry.path().join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok());
        if moved_away && !target.exists() {
            let _ = fs::rename(entry.path(), target);
        } else if moved_away || (name.starts_with('.') && name.contains(PARTIAL) && abandoned()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
