//! What a session remembers goes through a file, and comes back to the bit.

use crate::golden::Golden;
use crate::support::{Home, bundle, source};
use cactus::engine::{Engine, LoadOptions, Restored};
use cactus::graph::CacheFormat;
use cactus::kernels::Level;
use std::path::Path;
use tempfile::TempDir;

fn engine(bundle: &Path, context: usize, cache: CacheFormat) -> Engine {
    let options = LoadOptions { threads: Some(2), context: Some(context), cache: Some(cache), ..Default::default() };
    Engine::load(bundle, &options).expect("a sound bundle")
}

/// In another process's place: another engine, with more and with less room.
#[test]
fn what_comes_back_is_what_was_there() {
    let dir = TempDir::new().expect("a folder");
    for model in ["llama-tied", "gemma3-text", "qwen3"] {
        let (golden, path, file) = (Golden::read(model), dir.path().join(model), dir.path().join(format!("{model}.cache")));
        bundle(&golden.folder, &path, 4);
        let ids: Vec<u32> = golden.ids.iter().cycle().take(150).copied().collect();
        for cache in [CacheFormat::F16, CacheFormat::Int8] {
            let first = engine(&path, 160, cache);
            let mut session = first.session();
            session.feed(&ids[..100], &|| false).expect("room");
            session.save(&file).expect("saved");
            let expected = session.feed(&ids, &|| false).expect("room").logits.to_vec();
            for context in [256, 150] {
                let other = engine(&path, context, cache);
                let mut session = other.session();
                session.step(3).expect("room");
                assert_eq!(session.restore(&file).expect("read"), Restored::Tokens(100));
                assert_eq!(session.ids(), &ids[..100]);
                let fed = session.feed(&ids, &|| false).expect("room");
                assert_eq!(fed.reused, 100);
                assert!(fed.logits == expected, "{model} {cache} {context}");
            }
            let small = engine(&path, 70, cache);
            let mut session = small.session();
            assert_eq!(session.restore(&file).expect("read"), Restored::Tokens(70));
            let mut fresh = small.session();
            let expected = fresh.feed(&ids[..70], &|| false).expect("room").logits.to_vec();
            let fed = session.feed(&ids[..70], &|| false).expect("room");
            assert!(fed.reused == 69 && fed.logits == expected, "{model} {cache}");
        }
    }
}

#[test]
fn other_files_are_told_apart() {
    let dir = TempDir::new().expect("a folder");
    let (golden, path, file) = (Golden::read("llama-tied"), dir.path().join("model"), dir.path().join("cache"));
    bundle(&golden.folder, &path, 4);
    let engine_int8 = engine(&path, 128, CacheFormat::Int8);
    let mut session = engine_int8.session();
    assert_eq!(session.restore(&file).expect("no file"), Restored::Nothing);
    session.feed(&golden.ids, &|| false).expect("room");
    session.save(&file).expect("saved");
    let whole = std::fs::read(&file).expect("written");

    assert_eq!(engine(&path, 128, CacheFormat::F16).session().restore(&file).expect("read"), Restored::Foreign);
    if Level::best(None) != Level::Scalar {
        let scalar = LoadOptions { ceiling: Some(Level::Scalar), cache: Some(CacheFormat::Int8), ..Default::default() };
        let scalar = Engine::load(&path, &scalar).expect("a sound bundle");
        assert_eq!(scalar.session().restore(&file).expect("read"), Restored::Foreign);
    }
    let eight = dir.path().join("eight");
    bundle(&golden.folder, &eight, 8);
    assert_eq!(engine(&eight, 128, CacheFormat::Int8).session().restore(&file).expect("read"), Restored::Foreign);

    for at in [56, 60, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        std::fs::write(&file, damaged).expect("written");
        assert_eq!(session.restore(&file).expect("read"), Restored::Damaged, "byte {at}");
        assert!(session.ids().is_empty());
    }
    for len in [16, 40, 57, whole.len() - 1] {
        std::fs::write(&file, &whole[..len]).expect("written");
        assert_eq!(session.restore(&file).expect("read"), Restored::Damaged, "{len} bytes");
    }
    std::fs::write(&file, [&whole[..], b"!"].concat()).expect("written");
    assert_eq!(session.restore(&file).expect("read"), Restored::Damaged);
    for other in [&b""[..], b"cactus", b"a letter to a friend"] {
        std::fs::write(&file, other).expect("written");
        assert!(session.restore(&file).expect_err("something else").to_string().contains("not a prompt cache"));
    }
}

#[test]
fn a_later_call_reads_only_what_is_new() {
    let home = Home::new();
    bundle(&source("tests/golden/llama-tied"), &home.path().join("tiny"), 4);
    let call = |more: &[&str]| {
        let mut command = home.cactus(["run", "tiny", "--max-tokens", "8", "--stats"]);
        crate::support::finish(command.args(more).current_dir(home.path()))
    };
    let known = |stderr: &str| -> usize {
        let (before, _) = stderr.split_once(" more known").expect("statistics");
        before.rsplit('(').next().and_then(|n| n.parse().ok()).expect("a number")
    };
    let cached = |prompt: &str| call(&["--prompt-cache", "kept", "--prompt", prompt]);
    let plain = call(&["--prompt", "one two three four"]);
    let (first, again) = (cached("one two three four"), cached("one two three four"));
    assert_eq!(known(&first.stderr), 0);
    assert!(known(&again.stderr) > 3, "{}", again.stderr);
    assert_eq!((&plain.stdout, &first.stdout), (&again.stdout, &again.stdout));
    assert!([plain.code, first.code, again.code] == [Some(0); 3], "{}", again.stderr);
    let other = cached("one two three five");
    assert!(known(&other.stderr) > 0 && known(&other.stderr) < known(&again.stderr), "{}", other.stderr);

    // A batch with a line that fails keeps what the others ran.
    std::fs::write(home.path().join("lines"), "{\"prompt\": \"one two three six\"}\n{\"prompt\": 7}\n").expect("written");
    assert_eq!(call(&["--prompt-cache", "batch", "--batch", "lines"]).code, Some(1));
    assert!(known(&call(&["--prompt-cache", "batch", "--prompt", "one two three six"]).stderr) > 3);

    let foreign = call(&["--kv", "f16", "--prompt-cache", "kept", "--prompt", "one two three four"]);
    assert_eq!(foreign.code, Some(0));
    assert!(foreign.stderr.contains("made with another model, CPU or --kv"), "{}", foreign.stderr);
    std::fs::write(home.path().join("mine"), "a letter").expect("written");
    assert!(call(&["--prompt-cache", "mine", "--prompt", "x"]).failed(1).contains("not a prompt cache"));
    assert_eq!(std::fs::read_to_string(home.path().join("mine")).expect("still there"), "a letter");
    assert!(call(&["--prompt-cache", "no/where", "--prompt", "x"]).failed(2).contains("there is no folder no"));
    assert!(call(&["--prompt-cache", ".", "--prompt", "x"]).failed(1).contains("not a prompt cache"));
}
