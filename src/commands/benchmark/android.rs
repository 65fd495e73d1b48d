//! Measuring on an Android device, through `adb`.

use super::child::{self, Ended};
use super::report::Report;
use super::{DeviceArgs, MeasureArgs};
use crate::commands::terminal::Terminal;
use cactus::error::{Error, Kind, Result};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where programs of the shell user may be written and run.
const TEMPORARY: &str = "/data/local/tmp";
const BUILD: &str = "build one with `cargo build --release --target aarch64-linux-android` and give its path to \
                     --binary; see docs/benchmarking.md";

/// A device that is attached, and the program for it.
pub struct Device {
    serial: String,
    binary: PathBuf,
}

impl Device {
    /// `None` if none was asked for.
    pub fn find(args: &DeviceArgs) -> Result<Option<Device>> {
        let Some(wanted) = &args.android else { return Ok(None) };
        let binary = match &args.binary {
            Some(binary) => binary.clone(),
            None if cfg!(target_arch = "aarch64") => std::env::current_exe().unwrap_or_default(),
            None => {
                let text = format!("this program is for {}, not for the AArch64 of phones", std::env::consts::ARCH);
                return Err(Error::usage(text).with_hint(BUILD));
            }
        };
        check_binary(&binary)?;
        let listed = run(Command::new("adb").arg("devices"), &mut |_| {})?;
        if !listed.success {
            return Err(Error::new(Kind::Io, format!("adb devices failed: {}", listed.last_words())));
        }
        Ok(Some(Device { serial: choose(&devices(&listed.stdout), wanted)?, binary }))
    }

    /// Measures the bundle at `path` there. Nothing stays on the device.
    pub fn measure(&self, path: &Path, name: &str, args: &MeasureArgs, quiet: bool, terminal: &mut Terminal) -> Result<Report> {
        let device = self.model()?;
        let folder = format!("{TEMPORARY}/cactus-bench-{}", std::process::id());
        let place = Place { device: self, folder };
        let folder = &place.folder;
        let files = files(path)?;
        terminal.start(&format!("copying to {device}"), Some(files.iter().map(|(_, bytes)| bytes).sum()), true);
        self.shell(&format!("mkdir -p {folder}/model"), "make a folder")?;
        self.push(&self.binary, &format!("{folder}/cactus"))?;
        self.shell(&format!("chmod 755 {folder}/cactus"), "make the program executable")?;
        for (file, bytes) in files {
            let target = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            self.push(&file, &format!("{folder}/model/{target}"))?;
            terminal.advance(bytes);
        }
        terminal.finish();
        terminal.note(&format!("measuring on {device}"));
        let options = args.to_options().join(" ");
        let script = format!(
            "cd {folder} && HOME={folder} CACTUS_HOME={folder}/home CACTUS_CONFIG=none \
             ./cactus benchmark ./model --json {options}"
        );
        let mut on_line = |line: &str| {
            if !quiet {
                terminal.note(line.trim_end());
            }
        };
        let ended = run(self.adb().arg("shell").arg(script), &mut on_line)?;
        let result = ended.stdout.lines().rfind(|line| line.starts_with('{')).filter(|_| ended.success);
        let Some(result) = result else {
            return Err(Error::new(Kind::Io, format!("the run on {device} failed: {}", ended.last_words())));
        };
        let mut report = Report::parse(result).map_err(|e| e.context(&device))?;
        report.machine.device = Some(device);
        report.model.name = name.to_owned();
        Ok(report)
    }

    /// Marketing name.
    fn model(&self) -> Result<String> {
        let ended = run(self.adb().args(["shell", "getprop ro.product.model"]), &mut |_| {})?;
        if !ended.success {
            return Err(Error::new(Kind::Io, format!("device {} does not answer: {}", self.serial, ended.last_words())));
        }
        let name = ended.stdout.trim();
        Ok(if name.is_empty() { self.serial.clone() } else { name.to_owned() })
    }

    fn adb(&self) -> Command {
        let mut command = Command::new("adb");
        command.args(["-s", &self.serial]);
        command
    }

    fn shell(&self, script: &str, what: &str) -> Result<()> {
        let ended = run(self.adb().args(["shell", script]), &mut |_| {})?;
        if ended.success {
            return Ok(());
        }
        Err(Error::new(Kind::Io, format!("cannot {what} on device {}: {}", self.serial, ended.last_words())))
    }

    fn push(&self, from: &Path, to: &str) -> Result<()> {
        let ended = run(self.adb().arg("push").arg(from).arg(to), &mut |_| {})?;
        if ended.success {
            return Ok(());
        }
        let text = format!("cannot copy {} to device {}: {}", from.display(), self.serial, ended.last_words());
        let error = Error::new(Kind::Io, text);
        let full = [&ended.stdout, &ended.stderr].iter().any(|text| text.contains("No space left"));
        Err(if full { error.with_hint("free space on the device, or use a smaller model or fewer --bits") } else { error })
    }
}

/// The folder on the device, removed whatever happens.
struct Place<'d> {
    device: &'d Device,
    folder: String,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // Also after Ctrl-C, so not by what stops for that.
        let mut command = self.device.adb();
        command.args(["shell", &format!("rm -rf {}", self.folder)]);
        let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

fn run(command: &mut Command, on_line: &mut dyn FnMut(&str)) -> Result<Ended> {
    child::run(command, on_line).map_err(|e| match e.kind {
        Kind::NotFound => Error::not_found("there is no adb in the PATH")
            .with_hint("install the Android SDK platform tools and try `adb devices`"),
        _ => e,
    })
}

/// An ELF program for AArch64, or an error that says how to get one.
fn check_binary(path: &Path) -> Result<()> {
    let mut head = [0; 20];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut head));
    if let Err(e) = read.as_ref()
        && e.kind() != std::io::ErrorKind::UnexpectedEof
    {
        return Err(Error::io("read", path, e));
    }
    // 64-bit, little-endian; machine 183: ELF for the Arm 64-bit Architecture, table 4-1.
    let right = head.starts_with(b"\x7fELF\x02\x01") && head[18..] == [183, 0];
    if right { Ok(()) } else { Err(Error::bad_file(path, "no program for AArch64").with_hint(BUILD)) }
}

/// Serial numbers and states in what `adb devices` prints.
fn devices(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().filter(|line| !line.starts_with('*'));
    lines.filter_map(|line| line.split_once('\t')).map(|(serial, state)| (serial.to_owned(), state.trim().to_owned())).collect()
}

/// The device with the serial number `wanted`, or the only one if that is empty.
fn choose(devices: &[(String, String)], wanted: &str) -> Result<String> {
    let list = || devices.iter().map(|(serial, state)| format!("{serial} ({state})")).collect::<Vec<_>>().join(", ");
    let chosen: Vec<_> = devices.iter().filter(|(serial, _)| wanted.is_empty() || serial == wanted).collect();
    match chosen.as_slice() {
        [(serial, state)] if state == "device" => Ok(serial.clone()),
        [(serial, state)] => Err(Error::new(Kind::Io, format!("device {serial} cannot be used: {state}"))
            .with_hint("unlock it and allow USB debugging for this computer")),
        [] if devices.is_empty() => {
            Err(Error::not_found("adb sees no device")
                .with_hint("attach one and switch USB debugging on in its developer options"))
        }
        [] => Err(Error::not_found(format!("there is no device {wanted}; attached: {}", list()))
            .with_hint("write MODEL before --android, or the serial number behind it")),
        _ => Err(Error::usage(format!("several devices are attached: {}", list())).with_hint("give --android a serial number")),
    }
}

/// The files of a bundle and their bytes.
fn files(path: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let failed = |e: std::io::Error| Error::io("read", path, &e);
    let mut files = Vec::new();
    for entry in path.read_dir().map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        let data = file.metadata().map_err(|e| Error::io("read", &file, &e))?;
        if data.is_file() {
            files.push((file, data.len()));
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_chosen() {
        let text = "* daemon started successfully\nList of devices attached\nABC123\tdevice\nemulator-5554\toffline\n\n";
        let two = devices(text);
        assert_eq!(two, [("ABC123".into(), "device".into()), ("emulator-5554".into(), "offline".into())]);
        assert_eq!(choose(&two, "ABC123").unwrap(), "ABC123");
        let message = |devices: &[(String, String)], wanted| choose(devices, wanted).unwrap_err().to_string();
        assert!(message(&two, "").contains("ABC123 (device), emulator-5554 (offline)"));
        assert!(message(&two, "emulator-5554").contains("offline"));
        assert!(message(&two, "X").contains("no device X"));
        assert!(message(&[], "").contains("no device"));
        assert_eq!(choose(&two[..1], "").unwrap(), "ABC123");
    }
}
