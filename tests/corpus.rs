//! `--corpus`: user report P79, and passages against answers that are known.

use crate::support::{Home, bundle, source};
use cactus::engine::retrieve::{By, Corpus, Report};
use cactus::engine::{Embedder, LoadOptions};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A folder for files and an embedding model.
struct Place {
    dir: TempDir,
    embedder: Embedder<'static>,
}

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().expect("a folder");
        bundle(&source("tests/golden/bert"), &dir.path().join("model"), 16);
        fs::create_dir(dir.path().join("files")).expect("a folder");
        let options = LoadOptions { threads: Some(2), ..Default::default() };
        Place { embedder: Embedder::load(&dir.path().join("model"), &options).expect("a model"), dir }
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.dir.path().join("files").join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, content).expect("written");
    }

    fn open(&self) -> cactus::error::Result<(Corpus, Report)> {
        let (files, index) = (self.dir.path().join("files"), self.dir.path().join("index"));
        Corpus::open(&files, Some(&index), &self.embedder, &mut |_, _| {}, &|| false)
    }
}

#[test]
fn p79_files_without_text_are_counted_and_skipped() {
    let place = Place::new();
    place.write("a.txt", "The bridge over the river is made of stone.\n");
    place.write("picture.png", b"\x89PNG\0\0\0");
    place.write("latin.txt", b"caf\xe9 in the town");
    place.write("app.min.js", "var a=1;");
    place.write("data.json", format!("[{}]", "1,".repeat(2000)));
    place.write(".git/config", "hidden");
    let (corpus, report) = place.open().expect("a corpus");
    assert_eq!((report.files, report.binary, report.unfit, report.changed), (1, 2, 2, 1));
    assert_eq!(report.skipped(), "2 without text, 2 minified or too large");
    assert_eq!(corpus.passages()[0].place(), "a.txt:1-1");
}

#[test]
#[cfg(unix)]
fn p79_links_in_circles_end() {
    let place = Place::new();
    place.write("deep/er/a.txt", "stone");
    let files = place.dir.path().join("files");
    std::os::unix::fs::symlink(&files, files.join("deep/er/up")).expect("a link");
    std::os::unix::fs::symlink(files.join("deep/er/a.txt"), files.join("again.txt")).expect("a link");
    std::os::unix::fs::symlink(files.join("nowhere"), files.join("broken.txt")).expect("a link");
    let (corpus, report) = place.open().expect("a corpus");
    assert_eq!((corpus.passages().len(), report.unreadable.len()), (1, 1));
    assert!(report.unreadable[0].starts_with("broken.txt"), "{:?}", report.unreadable);
}

#[test]
fn p79_empty_and_missing_folders_are_said() {
    let place = Place::new();
    assert!(place.open().err().expect("an error").to_string().ends_with("holds no text files"));
    place.write("x.bin", [0, 1]);
    assert!(place.open().err().expect("an error").to_string().ends_with("holds no text files (1 without text skipped)"));
    let home = Home::new();
    let chat = source("tests/golden/llama-tied");
    let run = |dir: &Path| home.run(["run".as_ref(), chat.as_os_str(), "hello".as_ref(), "--corpus".as_ref(), dir.as_os_str()]);
    assert!(run(&place.dir.path().join("none")).failed(1).contains("none"));
    assert!(run(&place.dir.path().join("files/x.bin")).failed(2).contains("is no folder"));
}

/// One file that cannot be read leaves the others.
#[test]
#[cfg(unix)]
fn p79_unreadable_files_are_named() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    place.write("a.txt", "stone");
    place.write("b.txt", "secret");
    let path = place.dir.path().join("files/b.txt");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("permissions");
    // The superuser reads all.
    if fs::read(&path).is_err() {
        let (corpus, report) = place.open().expect("a corpus");
        assert_eq!((corpus.passages().len(), report.unreadable.len()), (1, 1));
    }
}

#[test]
fn p79_paths_are_relative_to_the_caller_and_sources_are_cited() {
    let (place, home) = (Place::new(), Home::new());
    place.write("notes/river.md", "# River\n\nThe bridge over the river is made of stone.\n");
    let (chat, embedding) = (source("tests/golden/llama-tied"), source("tests/golden/bert"));
    let args = |more: &[&str]| {
        let chat = chat.to_str().expect("a path").to_owned();
        let fixed = ["bridge of stone?", "--corpus", "files", "--max-tokens", "4", "--embedding-model"].map(str::to_owned);
        let embedding = embedding.to_str().expect("a path").to_owned();
        let mut args = vec!["run".to_owned(), chat];
        args.extend(fixed);
        args.push(embedding);
        args.extend(more.iter().map(|s| (*s).to_owned()));
        args
    };
    let done = crate::support::finish(home.cactus(args(&[])).current_dir(place.dir.path()));
    assert!(done.stderr.contains("sources:\n  notes/river.md:1-3"), "{}", done.stderr);
    done.ok();
    let done = crate::support::finish(home.cactus(args(&["--json"])).current_dir(place.dir.path()));
    let answer: serde_json::Value = serde_json::from_str(&done.ok()).expect("JSON");
    let source = &answer["sources"][0];
    assert_eq!((&source["file"], &source["first_line"], &source["last_line"]), (&"notes/river.md".into(), &1.into(), &3.into()));
    assert!(source["score"].is_number() && answer["sources"].as_array().is_some_and(|list| list.len() == 1), "{answer}");
    let kept = fs::read_dir(home.path().join("cactus/corpora")).expect("a folder").count();
    assert_eq!(kept, 1);
}

#[test]
fn only_changed_files_are_read_again() {
    let place = Place::new();
    place.write("a.txt", "stone bridge\n");
    place.write("b.txt", "green garden\n");
    assert_eq!(place.open().expect("a corpus").1.changed, 2);
    assert_eq!(place.open().expect("a corpus").1.changed, 0);
    place.write("b.txt", "green garden in summer\n");
    let (corpus, report) = place.open().expect("a corpus");
    assert_eq!((report.changed, report.files), (1, 2));
    assert_eq!(corpus.search("summer", By::Words, 5, &place.embedder).expect("hits")[0].passage.file, "b.txt");
    fs::remove_file(place.dir.path().join("files/a.txt")).expect("removed");
    let (corpus, report) = place.open().expect("a corpus");
    assert_eq!((report.changed, corpus.passages().len()), (0, 1));
    // A damaged index is made again.
    let index = place.dir.path().join("index");
    let bytes = fs::read(&index).expect("an index");
    for cut in [0, 7, 12, bytes.len() - 1] {
        fs::write(&index, &bytes[..cut]).expect("written");
        assert_eq!(place.open().expect("a corpus").1.changed, 1, "cut at {cut}");
    }
}

/// Every line of a file is in a passage, under its own number, and passages are not long.
#[test]
fn passages_hold_all_lines() {
    let place = Place::new();
    let mut text = String::new();
    for n in 0..300 {
        text += &match n % 30 {
            0 => format!("# Part {n}\n"),
            1 | 15 => "\n".to_owned(),
            _ => format!("line {n} of the letter to the city\n"),
        };
    }
    text += &"word ".repeat(3000);
    place.write("long.md", &text);
    let (corpus, _) = place.open().expect("a corpus");
    let lines: Vec<&str> = text.lines().collect();
    let mut covered = vec![false; lines.len()];
    for passage in corpus.passages() {
        assert!(place.embedder.tokenizer().encode(&passage.text, false).expect("ids").len() < 260, "{}", passage.place());
        if passage.last < lines.len() {
            assert_eq!(passage.text, lines[passage.first - 1..passage.last].join("\n"), "{}", passage.place());
        }
        (passage.first..=passage.last).for_each(|n| covered[n - 1] = true);
    }
    assert!((0..lines.len()).all(|n| covered[n] || lines[n].is_empty()));
}

#[test]
fn likeness_finds_the_same_text() {
    let place = Place::new();
    for (name, text) in [("a.txt", "cold water in winter"), ("b.txt", "the garden is green"), ("c.txt", "a letter from the city")]
    {
        place.write(name, text);
    }
    let (corpus, _) = place.open().expect("a corpus");
    for by in [By::Meaning, By::Both] {
        let hits = corpus.search("b.txt\nthe garden is green", by, 2, &place.embedder).expect("hits");
        assert_eq!((hits[0].passage.file.as_str(), hits.len()), ("b.txt", 2), "{by:?}");
    }
}

#[test]
fn the_server_answers_from_files_that_change() {
    use crate::support::server::Server;
    use serde_json::{Value, json};
    let home = crate::tools::home();
    let files = home.path().join("files");
    std::fs::create_dir(&files).expect("a folder");
    std::fs::write(files.join("rivers.md"), "The Elbe flows into the North Sea.\n").expect("written");
    std::fs::write(files.join("photo.jpg"), b"\xff\xd8\xff\x00").expect("written");
    let server = Server::start(&home, "tiny", &["--corpus", "files", "--context", "4096"]);
    assert!(server.log().contains("1 files, 1 passages; skipped: 1 without text"), "{}", server.log());
    let asked = |text: &str, more: Value| {
        let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]);
        let mut body = json!({"messages": messages, "max_tokens": 4, "temperature": 0});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        server.post("/v1/chat/completions", &body)
    };
    let first = asked("Where does the Elbe flow?", json!({})).json();
    let source = &first["sources"][0];
    assert_eq!(
        (&source["file"], &source["first_line"], &source["last_line"]),
        (&json!("rivers.md"), &json!(1), &json!(1)),
        "{first}"
    );
    // The passages are in the prompt.
    std::fs::write(files.join("bread.md"), "Bread is baked at 230 degrees.\n".repeat(3)).expect("written");
    let second = asked("How is bread baked?", json!({})).json();
    assert_eq!(
        (&second["sources"][0]["file"], second["sources"].as_array().map(Vec::len)),
        (&json!("bread.md"), Some(2)),
        "{second}"
    );
    assert!(second["usage"]["prompt_tokens"].as_u64() > first["usage"]["prompt_tokens"].as_u64());
    let events = asked("How is bread baked?", json!({"stream": true})).events();
    assert_eq!(events.last().expect("an event")["sources"], second["sources"]);
    let response = server.post("/v1/responses", &json!({"input": "How is bread baked?", "max_output_tokens": 4})).json();
    assert_eq!(response["sources"][0]["file"], "bread.md", "{response}");
    // A folder that is gone is told, and the server goes on.
    std::fs::remove_dir_all(&files).expect("removed");
    let gone = asked("How is bread baked?", json!({}));
    assert!(gone.status >= 400 && gone.json()["error"]["message"].as_str().expect("words").contains("files"), "{}", gone.body);
    assert_eq!(server.get("/health").status, 200);
    drop(server);
    let error = home.run(["serve", home.path().join("tiny").to_str().expect("text"), "--port", "0", "--corpus", "/nowhere"]);
    assert!(error.stderr.contains("/nowhere") && error.code == Some(1), "{error:?}");
}
