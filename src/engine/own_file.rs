//! Files of the user's own words: nobody else may read them, and they are never half written under their name.

use crate::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

/// Replaces the file at `path` at once by what `write` writes, readable by its owner only.
pub fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
    let failed = |e: &io::Error| Error::io("write", path, e);
    let mut name = path.file_name().ok_or_else(|| Error::usage("no file name to save to"))?.to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(name);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&part).map_err(|e| failed(&e))?;
    let written = write(&mut file).and_then(|()| file.sync_all()).and_then(|()| std::fs::rename(&part, path));
    written.map_err(|e| {
        let _ = std::fs::remove_file(&part);
        failed(&e)
    })
}
