//! The rules of the house that a compiler does not check.

use crate::support::source;
use std::fs;
use std::path::{Path, PathBuf};

/// Rooms of the library and what each may use besides itself and `error`.
const ROOMS: &[(&str, &[&str])] = &[
    ("engine", &["model", "graph", "kernels", "quant"]),
    ("model", &["graph", "kernels", "quant", "hub"]),
    ("graph", &["kernels", "quant"]),
    ("kernels", &["quant"]),
    ("quant", &[]),
    ("hub", &[]),
];

/// Files of `src/commands` that every command may use.
const SHARED_COMMANDS: &[&str] = &["batch", "corpus", "machine", "model_options", "settings", "stats", "terminal"];

/// Where `unsafe` may stand.
const UNSAFE: &[&str] = &["src/kernels/", "src/model/bundle.rs", "src/engine/ffi.rs", "src/engine/ffi/"];

/// A source file, comments taken out.
struct Source {
    /// From the repository root, with `/`.
    path: String,
    code: String,
    /// Where trailing unit tests begin, in bytes of `code`.
    tests_at: usize,
    lines: usize,
}

impl Source {
    /// Path of the module, outermost first: `src/model/import/gguf.rs` is `[model, import, gguf]`.
    fn module(&self) -> Vec<&str> {
        let inner = self.path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
        inner.split('/').filter(|part| !["lib", "main"].contains(part)).collect()
    }

    fn is_test(&self) -> bool {
        self.path.starts_with("tests/") || self.module().iter().any(|part| *part == "tests" || part.ends_with("_tests"))
    }

    fn is_command(&self) -> bool {
        self.path == "src/main.rs" || self.path.starts_with("src/commands/")
    }

    /// The code that is part of the product.
    fn product(&self) -> &str {
        if self.is_test() { "" } else { &self.code[..self.tests_at] }
    }
}

fn read(path: &Path, root: &Path) -> Source {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let code: String = text.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect();
    let relative = path.strip_prefix(root).expect("below the root").to_string_lossy().replace('\\', "/");
    let tests_at = code.find("#[cfg(test)]\nmod ").unwrap_or(code.len());
    Source { path: relative, tests_at, code, lines: text.lines().count() }
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())).flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

fn sources() -> Vec<Source> {
    let root = source("");
    let mut files = Vec::new();
    collect(&root.join("src"), &mut files);
    collect(&root.join("tests"), &mut files);
    files.sort();
    let sources: Vec<Source> = files.iter().map(|path| read(path, &root)).collect();
    assert!(sources.len() > 40, "only {} files found", sources.len());
    sources
}

/// Fails with all of `wrong`, if there are any.
fn report(rule: &str, wrong: Vec<String>) {
    assert!(wrong.is_empty(), "{rule}:\n  {}", wrong.join("\n  "));
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The rests of `code` behind each `word` that stands alone.
fn after<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = &'a str> {
    code.match_indices(word).filter_map(move |(at, _)| {
        let rest = &code[at + word.len()..];
        let goes_on = word.ends_with(is_word) && rest.starts_with(is_word);
        (!goes_on && !code[..at].ends_with(is_word)).then_some(rest)
    })
}

/// First names of what a path goes on with: of `model::Bundle` it is `model`, of `{engine::chat, error}` both.
fn first_names(rest: &str) -> Vec<String> {
    let name = |text: &str| text.trim_start().chars().take_while(|c| is_word(*c)).collect::<String>();
    let Some(group) = rest.strip_prefix('{') else { return vec![name(rest)] };
    let (mut depth, mut names, mut start) = (0, Vec::new(), 0);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.push(name(&group[start..at]));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names
}

/// Names that `source` takes from the root of the library, by `crate::` or by climbing with `super::`.
fn root_names(source: &Source) -> Vec<String> {
    let mut names: Vec<String> = after(&source.code, "crate::").flat_map(first_names).collect();
    let climb = "super::".repeat(source.module().len().max(1));
    names.extend(source.code.match_indices(&climb).flat_map(|(at, _)| first_names(&source.code[at + climb.len()..])));
    names
}

#[test]
fn rooms_look_right_only() {
    let mut wrong = Vec::new();
    for source in sources().iter().filter(|s| s.path.starts_with("src/") && !s.is_command()) {
        let Some(&room) = source.module().first() else { continue };
        let Some((_, allowed)) = ROOMS.iter().find(|(name, _)| *name == room) else {
            assert_eq!(room, "error", "{} belongs to no room", source.path);
            continue;
        };
        for name in root_names(source) {
            let is_room = ROOMS.iter().any(|(room, _)| *room == name);
            if is_room && name != room && !allowed.contains(&name.as_str()) {
                wrong.push(format!("{} uses {name}", source.path));
            }
        }
    }
    report("a file uses its own room and rooms to its right", wrong);
}

#[test]
fn commands_do_not_use_each_other() {
    let sources = sources();
    let commands: Vec<&str> =
        sources.iter().filter(|s| s.path.starts_with("src/commands/")).filter_map(|s| s.module().get(1).copied()).collect();
    let mut wrong = Vec::new();
    for source in sources.iter().filter(|s| s.path.starts_with("src/commands/")) {
        let module = source.module();
        let Some(&own) = module.get(1) else { continue };
        let climb = "super::".repeat(module.len() - 1);
        let paths = ["crate::commands::", climb.as_str()];
        for name in paths.iter().flat_map(|path| after(&source.code, path)).flat_map(first_names) {
            if commands.contains(&name.as_str()) && name != own && !SHARED_COMMANDS.contains(&name.as_str()) {
                wrong.push(format!("{} uses {name}", source.path));
            }
        }
    }
    report("commands share only what is made for that", wrong);
}

#[test]
fn only_commands_print_and_exit() {
    let mut wrong = Vec::new();
    for source in sources().iter().filter(|s| !s.is_command()) {
        for what in ["println!", "eprintln!", "print!", "eprint!", "dbg!", "process::exit", "process::abort"] {
            if after(source.product(), what).next().is_some() {
                wrong.push(format!("{} has {what}", source.path));
            }
        }
    }
    report("only src/main.rs and src/commands print and exit", wrong);
}

#[test]
fn unsafe_stays_where_it_is_needed() {
    let uses = |s: &Source| s.path.starts_with("src/") && after(&s.code, "unsafe").next().is_some();
    let wrong = sources().into_iter().filter(uses).filter(|s| !UNSAFE.iter().any(|place| s.path.starts_with(place)));
    report("unsafe stands only in kernels, the mapping and the C API", wrong.map(|s| s.path).collect());
}

#[test]
fn files_are_short_and_named_after_a_noun() {
    let mut wrong = Vec::new();
    for source in sources() {
        let limit = if source.is_test() { 800 } else { 500 };
        if source.lines > limit {
            wrong.push(format!("{} has {} lines (limit {limit})", source.path, source.lines));
        }
        let words: Vec<&str> = source.path.split(['/', '_', '.']).collect();
        if let Some(word) = words.iter().find(|w| ["util", "utils", "helper", "helpers", "common", "manager"].contains(*w)) {
            wrong.push(format!("{} is called {word}", source.path));
        }
    }
    report("files are short and named after their noun", wrong);
}

/// The parsing above finds what it should find.
#[test]
fn paths_are_understood() {
    let source = |path: &str, code: &str| Source { path: path.into(), code: code.into(), tests_at: code.len(), lines: 1 };
    let names = |path, code| root_names(&source(path, code));
    assert_eq!(names("src/model/import/gguf.rs", "use crate::error::Error;"), ["error"]);
    assert_eq!(names("src/graph/mod.rs", "use crate::{engine::{chat, stream}, quant};"), ["engine", "quant"]);
    assert_eq!(names("src/graph/op.rs", "let x = super::super::model::spec::Rope;"), ["model"]);
    assert_eq!(names("src/graph/op.rs", "use super::tensor::Weight;"), [""; 0]);
    assert_eq!(names("src/quant/mod.rs", "use super::kernels;"), ["kernels"]);
    assert_eq!(after("unsafe_code unsafe {", "unsafe").count(), 1);
}
