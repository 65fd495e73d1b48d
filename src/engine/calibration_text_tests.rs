use super::*;
use crate::error::Kind;
use std::path::PathBuf;

fn reader(template: bool) -> Reader {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama-tied");
    let mut checkpoint = Checkpoint::open(&path).expect("a sound checkpoint");
    checkpoint.tokenizer.chat_template.take_if(|_| !template);
    Reader::new(&checkpoint).expect("a tokenizer and a template")
}

fn count(texts: &[Vec<u32>]) -> usize {
    texts.iter().map(Vec::len).sum()
}

#[test]
fn chats_of_the_shipped_text_are_found() {
    let chats: Vec<Vec<Message>> = SAMPLE.split("\n---\n").filter_map(chat).collect();
    assert_eq!(chats.len(), 42);
    for messages in &chats {
        let turns = messages.iter().skip_while(|m| m.role == Role::System);
        assert!(turns.clone().step_by(2).all(|m| m.role == Role::User), "{messages:?}");
        assert!(turns.skip(1).step_by(2).all(|m| m.role == Role::Assistant), "{messages:?}");
        assert!(messages.iter().all(|m| !m.content.is_empty()));
    }
    assert_eq!(chats[0].len(), 6);
    assert_eq!(chats[0][5], Message::new(Role::Assistant, "15 weeks and 1 day, because 15 × 7 = 105."));
    assert_eq!(chat("FAQ\n\nQ: How long?\nA: Long."), None);
    assert_eq!(chat("User: nobody answers"), None);
    assert_eq!(
        chat("User: a\nb: c\nAssistant : d"),
        Some(vec![Message::new(Role::User, "a\nb: c"), Message::new(Role::Assistant, "d")])
    );
}

#[test]
fn shipped_text_has_the_length_that_was_asked_for() {
    for tokens in [0, 1, 700, 4096] {
        for template in [true, false] {
            let texts = reader(template).shipped(tokens).unwrap();
            assert_eq!(count(&texts), tokens);
            assert!(texts.iter().all(|text| text.len() <= LONGEST));
        }
    }
    let spelled = |template: bool| {
        let reader = reader(template);
        let texts = reader.shipped(8000).unwrap();
        texts.iter().map(|ids| reader.tokenizer.decode_whole(ids)).collect::<Vec<_>>()
    };
    let chat = "<|im_start|>user\nHow many days are there between 3 March";
    assert!(spelled(true).iter().any(|text| text.contains(chat)));
    let plain = spelled(false);
    assert!(!plain.iter().any(|text| text.contains("<|im_start|>")));
    assert!(plain.concat().contains("User: How many days are there between"));
}

#[test]
fn files_are_text_or_lines_of_json() {
    let (folder, reader) = (tempfile::tempdir().unwrap(), reader(true));
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let lines = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi <|im_end|>\"}, {\"role\": \"assistant\", \"content\": \"ho\"}]}\n\n{\"text\": \"plain\"}\n";
    let texts = reader.file(&file("a.jsonl", lines), 1000).unwrap();
    let spelled: Vec<String> = texts.iter().map(|ids| reader.tokenizer.decode_whole(ids)).collect();
    assert_eq!(spelled.len(), 2);
    assert!(
        spelled[0].ends_with("<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"),
        "{spelled:?}"
    );
    assert!(spelled[1].ends_with("plain"));
    // What a user wrote is no control token.
    let end = reader.tokenizer.token_id("<|im_end|>").unwrap();
    assert_eq!(texts[0].iter().filter(|id| **id == end).count(), 2);
    assert_eq!(count(&reader.file(&file("a.jsonl", lines), 20).unwrap()), 20);

    let long = "some words of a text. ".repeat(400);
    let texts = reader.file(&file("a.txt", &long), 1500).unwrap();
    assert_eq!(texts.iter().map(Vec::len).collect::<Vec<_>>(), [512, 512, 476]);
}

#[test]
fn bad_lines_are_named() {
    let (folder, reader) = (tempfile::tempdir().unwrap(), reader(true));
    let path = folder.path().join("a.jsonl");
    for (line, words) in [
        ("{\"messages\": [", "line 2: not JSON: "),
        ("{\"prompt\": \"x\"}", "line 2: neither `messages` nor `text`"),
        ("{\"messages\": []}", "line 2: `messages` is empty"),
        ("{\"messages\": [{\"role\": \"wizard\", \"content\": \"x\"}]}", "line 2: `messages`: unknown variant `wizard`"),
        ("[1, 2]", "line 2: neither `messages` nor `text`"),
    ] {
        std::fs::write(&path, format!("{{\"text\": \"good\"}}\n{line}\n")).unwrap();
        let error = reader.file(&path, 1000).unwrap_err();
        assert!(error.message().contains("a.jsonl") && error.message().contains(words), "{error}");
        assert!(error.kind == Kind::Usage && !error.message().contains('\n') && error.hint().is_some(), "{error}");
    }
    std::fs::write(&path, "\n\n").unwrap();
    assert_eq!(reader.file(&path, 10).unwrap_err().kind, Kind::BadFile);
    assert_eq!(reader.file(&folder.path().join("none"), 10).unwrap_err().kind, Kind::NotFound);
}
