//! The C API, used as its users use it: a program in C and one in Python.

use crate::support::{Finished, Home, bundle, finish, source};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the libraries were built for tests.
fn built() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_cactus")).parent().expect("a folder").join("deps")
}

fn home() -> Home {
    let home = Home::new();
    bundle(&source("tests/golden/llama-tied"), &home.path().join("tiny"), 4);
    home
}

/// `include/cactus.h` is what the source says; `CACTUS_UPDATE=1` writes it.
#[test]
fn the_header_is_that_of_the_source() {
    let config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        include_guard: Some("CACTUS_H".to_owned()),
        documentation_style: cbindgen::DocumentationStyle::C99,
        header: Some("/* The C API of cactus, made from src/engine/ffi.rs. docs/c-api.md explains it. */".to_owned()),
        line_length: 120,
        usize_is_size_t: true,
        export: cbindgen::ExportConfig {
            rename: [("TokenCallback", "cactus_token_callback"), ("LogCallback", "cactus_log_callback")]
                .map(|(from, to)| (from.to_owned(), to.to_owned()))
                .into_iter()
                .collect(),
            ..Default::default()
        },
        ..Default::default()
    };
    let bindings = cbindgen::Builder::new().with_config(config).with_src(source("src/engine/ffi.rs"));
    let bindings = bindings.with_src(source("src/engine/ffi/index.rs")).generate();
    let mut header = Vec::new();
    bindings.expect("a header").write(&mut header);
    let path = source("include/cactus.h");
    if std::env::var_os("CACTUS_UPDATE").is_some() {
        std::fs::write(&path, &header).expect("written");
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(stored, String::from_utf8(header).expect("text"), "CACTUS_UPDATE=1 writes include/cactus.h anew");
}

fn c_program(home: &Home, name: &str, linked: &[&str]) -> PathBuf {
    let program = home.path().join(name);
    let mut command = Command::new("cc");
    command
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-o"])
        .arg(&program)
        .arg(source(&format!("examples/{name}.c")));
    command.arg("-I").arg(source("include")).args(linked);
    finish(&mut command).ok();
    program
}

/// What `examples/chat.c` prints for a model.
fn check(finished: Finished) {
    let text = finished.ok();
    let objects: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(objects.len(), 6, "{text}");
    let [first, prefill, second, stopped, score, failure] = &objects[..] else { panic!("{text}") };
    assert!(text.starts_with(first["response"].as_str().expect("a text")), "{text}");
    assert!(text.contains(&format!("\n{} bytes came in pieces", first["response"].as_str().expect("a text").len())), "{text}");
    assert_eq!((&first["success"], &first["decode_tokens"]), (&true.into(), &16.into()));
    assert_eq!(prefill["prefill_tokens"], second["prefill_tokens"]);
    assert_eq!((&stopped["success"], &stopped["error"]), (&false.into(), &"interrupted".into()));
    assert!(score["logprob"].as_f64().is_some_and(|p| p < 0.0) && score["tokens"].as_u64().is_some_and(|n| n > 3), "{score}");
    assert_eq!((&failure["success"], &failure["response"]), (&false.into(), &Value::Null));
    assert!(text.contains("messages: expected") && text.contains("the buffer of 8 bytes is too small"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_c_program_talks_to_a_model() {
    let (home, folder) = (home(), built());
    let folder = folder.to_string_lossy();
    let shared = c_program(&home, "chat", &["-L", &folder, "-lcactus", &format!("-Wl,-rpath,{folder}")]);
    check(finish(Command::new(&shared).arg(home.path().join("tiny"))));
    let archive = format!("{folder}/libcactus.a");
    let fixed = c_program(&home, "chat", &[&archive, "-lm", "-lpthread", "-ldl"]);
    check(finish(Command::new(&fixed).arg(home.path().join("tiny"))));
    let wrong = finish(Command::new(&fixed).arg(home.path().join("nothing")));
    assert!(wrong.code == Some(1) && wrong.stderr.contains("is no bundle"), "{}", wrong.stderr);
    let mut command = Command::new(&fixed);
    command.arg(home.path().join("tiny"));
    if let Some(finished) = under_valgrind(&command) {
        check(finished);
    }
}

/// Looks for memory errors and leaks; what libraries make once and keep is none.
#[cfg(target_os = "linux")]
fn under_valgrind(program: &Command) -> Option<Finished> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: there is no valgrind");
        return None;
    }
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect"]);
    // It does not know the instructions of newer levels.
    command.arg(program.get_program()).args(program.get_args()).env("CACTUS_CPU", "avx2");
    Some(finish(&mut command))
}

/// What `examples/assistant.c` prints for a model of random weights.
#[cfg(target_os = "linux")]
fn check_assistant(finished: Finished) {
    let text = finished.ok();
    let objects: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let [called, second, passages, answer] = &objects[..] else { panic!("{text}") };
    let call = &called["function_calls"][0];
    assert!(call["name"] == "set_light" && call["arguments"]["on"].is_boolean(), "{called}");
    assert_eq!((&second["success"], &answer["success"]), (&true.into(), &true.into()));
    let chunks = passages["chunks"].as_array().expect("passages");
    assert!(chunks.len() == 1 && chunks[0]["source"] == "rivers.md:1-1" && chunks[0]["content"].is_string(), "{passages}");
    assert_eq!(
        (&answer["sources"][0]["file"], &answer["sources"][0]["first_line"]),
        (&"rivers.md".into(), &1.into()),
        "{answer}"
    );
    for line in [
        "2 found, first 10, cosine 1.00",
        "The Elbe flows into the North Sea. (river)",
        "35 bytes are needed",
        "there is no document 10",
    ] {
        assert!(text.lines().any(|printed| printed == line), "{line}: {text}");
    }
}

/// A folder of files to answer from.
#[cfg(target_os = "linux")]
fn files(home: &Home) -> PathBuf {
    let folder = home.path().join("files");
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(folder.join("rivers.md"), "The Elbe flows into the North Sea.\n").expect("written");
    std::fs::write(folder.join("bread.md"), "Bread is baked at 230 degrees.\n").expect("written");
    folder
}

#[cfg(target_os = "linux")]
#[test]
fn a_c_program_calls_tools_and_answers_from_files() {
    let (home, folder) = (crate::tools::home(), built());
    let files = files(&home);
    let archive = format!("{}/libcactus.a", folder.to_string_lossy());
    let program = c_program(&home, "assistant", &[&archive, "-lm", "-lpthread", "-ldl"]);
    let command = |index: &str| {
        let mut command = Command::new(&program);
        command.arg(home.path().join("tiny")).arg(&files).arg(home.path().join(index));
        command
    };
    check_assistant(finish(&mut command("first")));
    // What was read of the folder is kept beside it.
    assert!(std::fs::read_dir(files.join(".cactus")).expect("a folder").count() == 1);
    if let Some(finished) = under_valgrind(&command("second")) {
        check_assistant(finished);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_python_program_calls_tools_and_answers_from_files() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return;
    }
    let home = crate::tools::home();
    let files = files(&home);
    let mut command = Command::new("python3");
    command.arg(source("examples/assistant.py")).arg(built().join("libcactus.so")).arg(home.path().join("tiny")).arg(&files);
    let text = finish(command.env("PYTHONDONTWRITEBYTECODE", "1")).ok();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(lines[0][0]["name"] == "set_light" && lines[0][0]["arguments"]["on"].is_boolean(), "{text}");
    assert_eq!((&lines[1]["success"], lines[2].as_f64()), (&true.into(), Some(1.0)));
    assert_eq!(lines[3][0]["file"], "rivers.md", "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_python_program_talks_to_a_model() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return;
    }
    let home = home();
    let mut command = Command::new("python3");
    command.arg(source("examples/chat.py")).arg(built().join("libcactus.so")).arg(home.path().join("tiny"));
    let text = finish(&mut command).ok();
    let answer: Value = serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
    assert_eq!((&answer["success"], &answer["decode_tokens"]), (&true.into(), &16.into()));
    assert!(text.contains("messages: there are none"), "{text}");
}
