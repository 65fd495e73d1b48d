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
    let bindings = cbindgen::Builder::new().with_config(config).with_src(source("src/engine/ffi.rs")).generate();
    let mut header = Vec::new();
    bindings.expect("a header").write(&mut header);
    let path = source("include/cactus.h");
    if std::env::var_os("CACTUS_UPDATE").is_some() {
        std::fs::write(&path, &header).expect("written");
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(stored, String::from_utf8(header).expect("text"), "CACTUS_UPDATE=1 writes include/cactus.h anew");
}

fn c_program(home: &Home, linked: &[&str]) -> PathBuf {
    let program = home.path().join("chat");
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-o"]).arg(&program).arg(source("examples/chat.c"));
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
    let shared = c_program(&home, &["-L", &folder, "-lcactus", &format!("-Wl,-rpath,{folder}")]);
    check(finish(Command::new(&shared).arg(home.path().join("tiny"))));
    let archive = format!("{folder}/libcactus.a");
    let fixed = c_program(&home, &[&archive, "-lm", "-lpthread", "-ldl"]);
    check(finish(Command::new(&fixed).arg(home.path().join("tiny"))));
    let wrong = finish(Command::new(&fixed).arg(home.path().join("nothing")));
    assert!(wrong.code == Some(1) && wrong.stderr.contains("is no bundle"), "{}", wrong.stderr);
    // Memory errors and leaks; what libraries make once and keep is none.
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: there is no valgrind");
        return;
    }
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect"]);
    // It does not know the instructions of newer levels.
    command.arg(&fixed).arg(home.path().join("tiny")).env("CACTUS_CPU", "avx2");
    check(finish(&mut command));
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
