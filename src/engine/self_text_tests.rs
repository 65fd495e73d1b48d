use super::*;
use crate::error::{Error, Kind};
use crate::model::import::Checkpoint;
use std::path::PathBuf;

/// Random weights, a byte-level tokenizer, a ChatML template.
fn golden() -> Checkpoint {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3");
    Checkpoint::open(&path).expect("a sound checkpoint")
}

fn amount(seed: u64) -> Amount {
    Amount { tokens: 600, longest: 100, seed }
}

fn bundle(checkpoint: &Checkpoint, folder: &Path) -> PathBuf {
    let target = folder.join("m");
    let options = Options::plain(Bits::EIGHT, Provenance::default());
    convert::convert(checkpoint, &target, &options, &mut |_| Ok(())).expect("a conversion");
    target
}

#[test]
fn the_same_seed_writes_the_same_with_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(&golden(), folder.path());
    let write = |threads, seed| {
        let engine = Engine::load(&bundle, &LoadOptions { threads: Some(threads), ..Default::default() }).unwrap();
        write_with(&engine, &amount(seed), &mut |_| Ok(())).unwrap()
    };
    let texts = write(1, 0);
    assert_eq!(texts.iter().map(Vec::len).sum::<usize>(), 600);
    assert!(texts.len() >= 6 && texts.iter().all(|text| text.len() <= 100));
    assert!(texts == write(1, 0) && texts == write(3, 0));
    assert!(texts != write(1, 1));
}

/// What the template of the fixture writes, spelled out: turns in order, each begun and ended by its token.
#[test]
fn texts_are_as_the_template_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let engine = Engine::load(&bundle(&golden(), folder.path()), &LoadOptions::default()).unwrap();
    let texts = write_with(&engine, &Amount { tokens: 2000, longest: 200, seed: 3 }, &mut |_| Ok(())).unwrap();
    let spelled = |ids: &[u32]| engine.tokenizer.decode_whole(ids);
    let (mut answered, mut with_system) = (0, 0);
    for text in texts.iter().map(|ids| spelled(ids)) {
        let mut turns = text.strip_prefix("<|im_start|>").expect("the template's beginning").split("<|im_start|>").peekable();
        with_system += usize::from(turns.next_if(|turn| turn.starts_with("system\n")).is_some());
        for (i, turn) in turns.enumerate() {
            let role = ["user\n", "assistant\n"][i % 2];
            assert!(turn.starts_with(role) || role.starts_with(turn), "turn {i} of {text:?}");
            answered += usize::from(i == 1);
        }
    }
    assert!(answered > 0 && with_system > 0 && with_system < texts.len(), "{answered} {with_system} of {}", texts.len());
}

#[test]
fn without_a_template_shipped_text_is_continued() {
    let mut checkpoint = golden();
    checkpoint.tokenizer.chat_template = None;
    let folder = tempfile::tempdir().unwrap();
    let engine = Engine::load(&bundle(&checkpoint, folder.path()), &LoadOptions::default()).unwrap();
    assert!(!engine.template.has_template());
    let texts = write_with(&engine, &amount(0), &mut |_| Ok(())).unwrap();
    assert!(engine.tokenizer.decode(&texts[0]).starts_with("A glacier is a body of ice that"), "{texts:?}");
    assert!(openings().len() > 100 && openings().iter().all(|o| o.chars().count() <= 48));
}

#[test]
fn nothing_is_left_in_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let left = || std::fs::read_dir(folder.path()).unwrap().count();
    let mut written = 0;
    let texts = write(&golden(), &folder.path().join("m"), &amount(0), &mut |n| {
        written += n;
        Ok(())
    });
    assert!(!texts.unwrap().is_empty() && written >= 300 && left() == 0, "{written}");
    // Stopped while it is rounded, and while it writes.
    for least in [0, 50] {
        let mut written = 0;
        let error = write(&golden(), &folder.path().join("m"), &amount(0), &mut |n| {
            written += n;
            if written >= least { Err(Error::new(Kind::Interrupted, "interrupted")) } else { Ok(()) }
        });
        assert_eq!((error.unwrap_err().kind, left()), (Kind::Interrupted, 0));
    }
}
