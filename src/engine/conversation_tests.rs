use super::*;

fn settings() -> Settings {
    let request = Request { max_tokens: 100, ..Request::default() };
    Settings { request, think: Think::Auto, overflow: Overflow::Ask }
}

fn chat() -> Conversation {
    let mut chat = Conversation::new("m", Some("be brief"), settings());
    for i in 0..3 {
        chat.ask(format!("q{i}"));
        chat.answer(format!("a{i}"));
    }
    chat
}

fn contents(messages: &[Message]) -> Vec<&str> {
    messages.iter().map(|m| m.content.as_str()).collect()
}

#[test]
fn turns_are_taken_back_whole() {
    let mut chat = chat();
    assert_eq!(chat.turns(), 3);
    assert!(chat.take_back_answer());
    assert_eq!(contents(chat.messages()), ["q0", "a0", "q1", "a1", "q2"]);
    assert_eq!(chat.undo().as_deref(), Some("q2"));
    assert_eq!(chat.undo().as_deref(), Some("q1"));
    assert_eq!(contents(&chat.shown(0)), ["be brief", "q0", "a0"]);
    chat.clear();
    assert_eq!((chat.undo(), chat.take_back_answer(), chat.system()), (None, false, Some("be brief")));
}

#[test]
fn passed_turns_stay_in_the_file() {
    let mut chat = chat();
    chat.slide(&Slide { turns: 2, before: 0, after: 0, passed: 4 });
    assert_eq!(chat.passed_turns(), 2);
    assert_eq!(contents(&chat.shown(chat.passed)), ["be brief", "q2", "a2"]);
    let again = Conversation::from_json(&chat.to_json(), &settings()).unwrap();
    assert_eq!((again.messages(), again.system(), again.passed), (chat.messages(), chat.system(), 0));
    chat.undo();
    assert_eq!(contents(&chat.shown(chat.passed)), ["be brief", "q0", "a0", "q1", "a1"]);
}

#[test]
fn a_file_holds_everything() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.json");
    let mut chat = chat();
    chat.ask("ü \"\n\u{1f980}");
    for (name, value) in [("temperature", "0.7"), ("top_k", "5"), ("seed", "18446744073709551615"), ("think", "hide")] {
        chat.settings.set(name, value).unwrap();
    }
    chat.save(&path).unwrap();
    chat.save(&path).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    #[cfg(unix)]
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions()) & 0o777, 0o600);
    let value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(value["messages"][0], json!({"role": "system", "content": "be brief"}));
    assert_eq!(value["messages"][2], json!({"role": "assistant", "content": "a0"}));
    assert_eq!((&value["settings"]["temperature"], &value["settings"]["top_k"]), (&json!(0.7), &json!(5)));
    let again = Conversation::load(&path, &settings()).unwrap();
    assert_eq!(again.to_json(), value);
    assert_eq!(again.settings.request.sampling.seed, u64::MAX);
    assert_eq!(again.messages(), chat.messages());
}

#[test]
fn bad_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.json");
    let fails = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let message = Conversation::load(&path, &settings()).unwrap_err().to_string();
        assert!(message.contains("chat.json"), "{message}");
        message
    };
    assert!(fails("{").contains("not JSON"));
    assert!(fails("[]").contains("no JSON object"));
    assert!(fails("{}").contains("no messages"));
    assert!(fails(r#"{"messages":[{"role":"robot"}]}"#).contains("robot"));
    assert!(fails(r#"{"messages":[],"settings":{"top_p":7}}"#).contains("top_p is 7"));
    assert!(fails(r#"{"messages":[],"settings":{"colour":1}}"#).contains("no setting \"colour\""));
    assert!(fails(r#"{"messages":[],"cactus_chat":2}"#).contains("another version"));
    assert!(Conversation::load(&folder.path().join("none"), &settings()).is_err());
}

#[test]
fn settings_refuse_nonsense_and_keep_their_value() {
    let mut settings = settings();
    settings.set("temperature", "0.5").unwrap();
    for (name, value) in [("temperature", "-1"), ("temperature", "hot"), ("top-p", "0"), ("top-k", "-3"), ("think", "x")] {
        assert!(settings.set(name, value).is_err(), "{name} {value}");
    }
    assert_eq!(settings.get("temperature").as_deref(), Some("0.5"));
    assert_eq!(settings.get("colour"), None);
    for name in Settings::NAMES {
        let value = settings.get(name).unwrap();
        settings.set(name, &value).unwrap();
    }
}
