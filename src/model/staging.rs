//! A bundle under construction: nothing is visible under the final name before it is whole.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A folder beside the target, removed again unless it is published or kept.
pub struct Staging {
    pub dir: PathBuf,
    /// Locked while this process lives, so that others can tell a leftover from work in progress.
    lock: File,
    kept: bool,
}

/// In a staging folder: the record that its work needs to go on after its process has ended. Names of files that
/// belong to it begin with this.
pub const RECORD: &str = "progress";
/// How long other conversions leave a folder with a record alone.
const RECORD_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);

const LOCK: &str = ".lock";
/// Stands in the names of bundles under construction.
const PARTIAL: &str = ".partial-";
/// Ends the name under which a bundle waits while its successor takes its place.
const OLD: &str = ".old";

impl Staging {
    /// A new, empty folder. What earlier conversions to this target left behind is removed.
    pub fn create(target: &Path) -> Result<Self> {
        let (parent, prefix) = place(target)?;
        fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, &e))?;
        Self::take_over(target, |_| None::<()>)?;
        // A folder that was taken over may hold the name that is ours now.
        let mut suffix = String::new();
        for more in 1.. {
            let dir = parent.join(format!("{prefix}{}{suffix}", std::process::id()));
            fs::create_dir_all(&dir).map_err(|e| Error::io("create", &dir, &e))?;
            let path = dir.join(LOCK);
            let lock = File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
            match lock.try_lock() {
                Ok(()) => return Ok(Staging { dir, lock, kept: false }),
                Err(fs::TryLockError::WouldBlock) => suffix = format!("-{more}"),
                Err(fs::TryLockError::Error(e)) => return Err(Error::io("lock", &path, &e)),
            }
        }
        unreachable!("names do not end")
    }

    /// A folder that a dead process left behind and in which `usable` finds what it needs. Other leftovers of
    /// this target are removed.
    pub fn take_over<T>(target: &Path, usable: impl Fn(&Path) -> Option<T>) -> Result<Option<(Self, T)>> {
        let (parent, prefix) = place(target)?;
        let mut taken = None;
        let mut folders: Vec<PathBuf> = fs::read_dir(parent).into_iter().flatten().flatten().map(|e| e.path()).collect();
        folders.sort();
        for dir in folders {
            let name = dir.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let own = name.starts_with(&prefix);
            if own && name.ends_with(OLD) {
                put_back(&dir, target);
                continue;
            }
            if !name.starts_with('.') || !name.contains(PARTIAL) {
                continue;
            }
            let Some(staging) = Self::abandoned(&dir) else { continue };
            let found = if own && taken.is_none() { usable(&dir) } else { None };
            match found {
                Some(found) => taken = Some((staging, found)),
                None if !own && has_fresh_record(&dir) => staging.keep(),
                None => drop(staging),
            }
        }
        Ok(taken)
    }

    /// A folder in which no living process works, from now on ours.
    fn abandoned(dir: &Path) -> Option<Self> {
        let path = dir.join(LOCK);
        let lock = File::open(&path).ok()?;
        // The second look: while we opened it, somebody may have removed or published the folder.
        let free = lock.try_lock().is_ok() && path.exists();
        free.then(|| Staging { dir: dir.to_path_buf(), lock, kept: false })
    }

    /// Leaves the folder for a later [`take_over`](Self::take_over).
    pub fn keep(mut self) {
        self.kept = true;
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
        if !self.kept {
            let _ = fs::remove_dir_all(&self.dir);
        }
        let _ = self.lock.unlock();
    }
}

/// The folder that a bundle stands in, and what names of its staging folders begin with.
fn place(target: &Path) -> Result<(&Path, String)> {
    let name = target.file_name().and_then(|n| n.to_str()).filter(|n| !n.is_empty());
    let name = name.ok_or_else(|| Error::usage(format!("{} is no name for a bundle", target.display())))?;
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((parent, format!(".{name}{PARTIAL}")))
}

/// Puts back a bundle that a killed conversion had moved away but not yet replaced.
fn put_back(old: &Path, target: &Path) {
    if !target.exists() {
        let _ = fs::rename(old, target);
    } else {
        let _ = fs::remove_dir_all(old);
    }
}

fn has_fresh_record(dir: &Path) -> bool {
    let modified = fs::metadata(dir.join(RECORD)).and_then(|data| data.modified());
    modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age < RECORD_LIFE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_belongs_to_one_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("model");
        let first = Staging::create(&target).unwrap();
        fs::write(first.dir.join(RECORD), "x").unwrap();
        assert!(Staging::take_over(&target, |_| Some(())).unwrap().is_none(), "it is being worked in");
        let second = Staging::create(&target).unwrap();
        assert!(first.dir != second.dir && first.dir.exists());
        drop(second);
        let dir = first.dir.clone();
        first.keep();
        let (taken, text) = Staging::take_over(&target, |dir| fs::read_to_string(dir.join(RECORD)).ok()).unwrap().unwrap();
        assert!(taken.dir == dir && text == "x");
        assert!(Staging::take_over(&target, |_| Some(())).unwrap().is_none(), "it is taken");
        drop(taken);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn leftovers_of_another_target_wait_if_they_can_be_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        let create = |record: Option<&str>| {
            let staging = Staging::create(&other).unwrap();
            record.iter().for_each(|name| fs::write(staging.dir.join(name), "x").unwrap());
            staging.keep();
        };
        for (record, left) in [(None, 0), (Some(RECORD), 1)] {
            create(record);
            Staging::create(&one).unwrap().publish(&one).unwrap();
            assert_eq!(names(folder.path()).len(), left + 1);
            fs::remove_dir(&one).unwrap();
        }
        // For its own target it is of no use without the right record.
        drop(Staging::create(&other).unwrap());
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn folders_of_others_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["photos", "model", ".git", ".model.partialness"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join(LOCK), "").unwrap();
        }
        drop(Staging::create(&folder.path().join("model")).unwrap());
        assert_eq!(names(folder.path()), [".git", ".model.partialness", "model", "photos"]);
    }
}
