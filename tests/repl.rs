//! The chat, on a terminal of its own, and reasoning: what a user types and sees.
//!
//! The terminal is made by `script` of util-linux; without it these tests are skipped, and say so.

use crate::support::{Home, finish, source};
use serde_json::Value;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A program on a terminal.
struct Screen {
    child: Child,
    keys: ChildStdin,
    shown: Arc<Mutex<Vec<u8>>>,
    /// Bytes of `shown` that were waited for already.
    seen: usize,
}

const ENTER: &str = "\r";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const PASTE: (&str, &str) = ("\x1b[200~", "\x1b[201~");

/// Whether there is a `script` that takes a command and says nothing itself.
fn has_terminal() -> bool {
    let version = Command::new("script").arg("--version").output();
    let found = version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("util-linux"));
    if !found {
        eprintln!("SKIPPED: no `script` of util-linux, so there is no terminal to test the chat on");
    }
    found
}

impl Screen {
    /// `cactus run` with `args`; waits for its prompt.
    fn run(home: &Home, args: &[&str]) -> Screen {
        let mut screen = Screen::start(home, args);
        screen.wait(">>> ");
        screen
    }

    fn start(home: &Home, args: &[&str]) -> Screen {
        let quoted: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
        let line = format!("stty cols 100 rows 30; exec '{}' run {}", env!("CARGO_BIN_EXE_cactus"), quoted.join(" "));
        let like = home.cactus([""]);
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &line, "/dev/null"]);
        for (name, value) in like.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("TERM", "xterm-256color").env("SHELL", "/bin/sh").env_remove("NO_COLOR").env_remove("XDG_DATA_HOME");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("script starts");
        let keys = child.stdin.take().expect("a pipe");
        let mut output = child.stdout.take().expect("a pipe");
        let shown = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = output.read(&mut buffer) {
                sink.lock().expect("a lock").extend_from_slice(&buffer[..len]);
            }
        });
        Screen { child, keys, shown, seen: 0 }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush()).expect("the program listens");
    }

    /// Waits until `text` is shown; gives all that was shown since the last wait, with it.
    fn wait(&mut self, text: &str) -> String {
        let begin = Instant::now();
        loop {
            let shown = self.shown.lock().expect("a lock").clone();
            let new = &shown[self.seen..];
            if let Some(at) = new.windows(text.len()).position(|window| window == text.as_bytes()) {
                let end = at + text.len();
                self.seen += end;
                return String::from_utf8_lossy(&new[..end]).into_owned();
            }
            let new = String::from_utf8_lossy(new);
            assert!(begin.elapsed() < Duration::from_secs(120), "no {text:?} in {new:?}");
            assert!(self.child.try_wait().expect("a child").is_none() || begin.elapsed().as_secs() < 5, "ended: {new:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Types a line and waits for the prompt after what it does.
    fn line(&mut self, text: &str) -> String {
        self.press(text);
        self.press(ENTER);
        self.wait("\r\n");
        self.wait(">>> ")
    }

    /// Waits for the end, and gives the exit code.
    fn end(mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            assert!(begin.elapsed() < Duration::from_secs(30), "the chat does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A model of random weights with a long context, which answers in nonsense; its template is changed by `edit`.
fn model(home: &Home, edit: impl Fn(&str) -> String) -> PathBuf {
    let folder = home.path().join("model");
    std::fs::create_dir_all(&folder).expect("a folder");
    for entry in std::fs::read_dir(source("tests/golden/llama-tied")).expect("a folder").flatten() {
        std::fs::copy(entry.path(), folder.join(entry.file_name())).expect("copied");
    }
    let change = |name: &str, change: &dyn Fn(&mut Value)| {
        let path = folder.join(name);
        let mut value: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        change(&mut value);
        std::fs::write(path, value.to_string()).expect("written");
    };
    change("config.json", &|value| value["max_position_embeddings"] = 16384.into());
    change("tokenizer_config.json", &|value| {
        let template = edit(value["chat_template"].as_str().expect("a template"));
        value["chat_template"] = template.into();
    });
    folder
}

fn plain_model(home: &Home) -> String {
    model(home, str::to_owned).to_string_lossy().into_owned()
}

/// A template that opens a reasoning block, unless it is told not to.
fn thinking_model(home: &Home) -> String {
    let edit = |template: &str| {
        let opening = "{% if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}{{ '<think>\\n' }}";
        format!("{template}{opening}{{% elif false %}}</think>{{% endif %}}")
    };
    model(home, edit).to_string_lossy().into_owned()
}

/// The contents of a saved conversation, role and text.
fn saved(path: &Path) -> Vec<(String, String)> {
    let value: Value = serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    value["messages"].as_array().expect("a list").iter().map(|m| (text(&m["role"]), text(&m["content"]))).collect()
}

#[test]
fn p69_a_pasted_block_is_one_message() {
    if !has_terminal() {
        return;
    }
    let home = Home::new();
    let mut screen = Screen::run(&home, &[&plain_model(&home), "--max-tokens", "4", "--context", "16384"]);
    let lines: Vec<String> = (0..200).map(|i| format!("\t{i}: ünï \u{1f980} {}", i * 7)).collect();
    // Terminals send pasted line ends as carriage returns.
    screen.press(&format!("{}{}{}", PASTE.0, lines.join("\r"), PASTE.1));
    screen.press(ENTER);
    screen.wait("of context");
    screen.wait(">>> ");
    // Typed between delimiters, where Enter is a line end.
    screen.press("\"\"\"one\rtwo\"\"\"\r");
    screen.wait("of context");
    screen.wait(">>> ");
    let path = home.path().join("chat.json");
    screen.line(&format!("/save {}", path.display()));
    let messages = saved(&path);
    assert_eq!(messages.len(), 4, "{messages:?}");
    assert_eq!(messages[0], ("user".to_owned(), lines.join("\n")));
    assert_eq!(messages[2], ("user".to_owned(), "one\ntwo".to_owned()));
    screen.press(CTRL_D);
    assert_eq!(screen.end(), Some(0));

    let data = home.path().join(".local/share/cactus");
    let history = std::fs::read_to_string(data.join("history")).expect("a history");
    assert_eq!(history.lines().filter(|line| line.contains("199: ")).count(), 1);
    assert_eq!(history.lines().count(), 4, "{history}");
    #[cfg(unix)]
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&data.join("history").metadata().expect("a file").permissions()) & 0o777,
        0o600
    );

    // The next chat has it as one entry, and so the message before: up is the command, the second line and the
    // first of that message, then the pasted block.
    let mut screen = Screen::run(&home, &[&plain_model(&home), "--max-tokens", "4", "--context", "16384"]);
    screen.press("\x1b[A\x1b[A\x1b[A\x1b[A\r");
    screen.wait("of context");
    screen.wait(">>> ");
    screen.line(&format!("/save {}", path.display()));
    assert_eq!(saved(&path)[0].1, lines.join("\n"));
}

#[test]
fn p70_an_interrupted_answer_stays_in_the_chat() {
    if !has_terminal() {
        return;
    }
    let home = Home::new();
    let mut screen = Screen::run(&home, &[&plain_model(&home), "--max-tokens", "16000", "--context", "16384", "--stop", "\u{1}"]);
    let path = home.path().join("chat.json");
    screen.press("tell me a long story\r");
    screen.wait("\r\n");
    // Whatever the model says, it says something.
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    screen.press(CTRL_C);
    let shown = screen.wait(">>> ");
    assert!(begin.elapsed() < Duration::from_millis(500), "{:?}", begin.elapsed());
    let answered = shown.contains(", stopped]");
    screen.line(&format!("/save {}", path.display()));
    let messages = saved(&path);
    assert_eq!(messages[0], ("user".to_owned(), "tell me a long story".to_owned()));
    assert!(answered, "{shown}");
    assert_eq!(messages[1].0, "assistant");
    assert!(!messages[1].1.is_empty());
    // What is on the line goes first, then there is a hint, then the end.
    screen.press("half a line");
    screen.wait("line");
    screen.press(CTRL_C);
    screen.wait(">>> ");
    screen.press(CTRL_C);
    assert!(screen.wait(">>> ").contains("Ctrl-C again"));
    screen.press(CTRL_C);
    assert_eq!(screen.end(), Some(0));
}

#[test]
fn a_conversation_comes_back() {
    if !has_terminal() {
        return;
    }
    let home = Home::new();
    let model = plain_model(&home);
    let mut screen = Screen::run(&home, &[&model, "--max-tokens", "5", "--system", "be brief"]);
    screen.line("first");
    screen.line("second");
    assert!(screen.line("/set temperature 0.5").contains("temperature is now 0.5"));
    assert!(screen.line("/set temperature -1").contains("error: temperature is -1"));
    assert!(screen.line("/nonsense").contains("no command /nonsense"));
    assert!(screen.line("/image cat.png").contains("takes text only"));
    assert!(screen.line("/stats").contains("tokens/s"));
    assert!(screen.line("/save story").contains("saved 4 messages"));
    screen.press(CTRL_D);
    assert_eq!(screen.end(), Some(0));

    let mut screen = Screen::run(&home, &[&model, "--max-tokens", "5"]);
    assert!(screen.line("/load").contains("story"));
    assert!(screen.line("/load story").contains("loaded 4 messages"));
    assert!(screen.line("/system").contains("be brief"));
    assert!(screen.line("/set temperature").contains("0.5"));
    assert!(screen.line("/undo").contains("second"));
    screen.line("/regenerate");
    screen.line("/system -");
    let path = home.path().join("chat.json");
    screen.line(&format!("/save {}", path.display()));
    let roles: Vec<String> = saved(&path).into_iter().map(|(role, _)| role).collect();
    assert_eq!(roles, ["user", "assistant"]);
    // Completion.
    screen.press("/cl\t\r");
    assert!(screen.wait("(cleared)").contains("/clear"));
}

#[test]
fn p16_a_full_context_is_never_silent() {
    if !has_terminal() {
        return;
    }
    let home = Home::new();
    let model = plain_model(&home);
    let mut screen = Screen::run(&home, &[&model, "--max-tokens", "4", "--context", "100", "--system", "be brief"]);
    let path = home.path().join("chat.json");
    screen.line("/set overflow stop");
    let refused =
        (0..20).find_map(|_| Some(screen.line("question")).filter(|shown| shown.contains("error: "))).expect("it is full");
    assert!(
        refused.contains("of 100 tokens, too many for another answer") && refused.contains("/set overflow slide"),
        "{refused}"
    );
    let count = |screen: &mut Screen| {
        screen.line(&format!("/save {}", path.display()));
        saved(&path).len()
    };
    let before = count(&mut screen);
    // Asked and refused: the message is taken back.
    screen.line("/set overflow ask");
    screen.press("question\r");
    screen.wait("oldest turn");
    screen.wait("[n]o: ");
    screen.line("n");
    assert_eq!(count(&mut screen), before);
    // Asked and granted: said again what happens; the file keeps everything.
    screen.press("question\r");
    screen.wait("[n]o: ");
    let shown = screen.line("always");
    assert!(shown.contains("no longer shown") && shown.contains("of context"), "{shown}");
    assert_eq!(count(&mut screen), before + 2);
    assert_eq!(saved(&path)[0].1, "be brief");
    assert!(!screen.line("/stats").contains(" 0 of them no longer shown"));
    // From now on without a question.
    let slid = (0..20).find_map(|_| Some(screen.line("question")).filter(|shown| shown.contains("no longer shown")));
    assert!(slid.expect("it slides").contains("of context"));
    // What can never fit is an error with both sizes.
    screen.press(&format!("{}\r", "long ".repeat(40)));
    screen.wait("error: the last message with the system prompt takes ");
    assert!(screen.wait(">>> ").contains("the context of 100 has no room"));
}

#[test]
fn p06_thoughts_are_not_the_answer() {
    let home = Home::new();
    let model = thinking_model(&home);
    let run = |more: &[&str]| home.run(["run", &model, "--prompt", "Hi", "--max-tokens", "6"].iter().chain(more));
    let first = run(&[]);
    assert!(first.stderr.contains("went into thinking"), "{}", first.stderr);
    assert_eq!(first.ok(), "\n");
    let json = |more: &[&str]| serde_json::from_str::<Value>(&run(&[&["--json"], more].concat()).ok()).expect("JSON");
    let value = json(&[]);
    assert_eq!(value["response"], "");
    let thoughts = value["thinking"].as_str().expect("thoughts").to_owned();
    assert!(!thoughts.trim().is_empty());
    assert!(run(&["--think", "on"]).stderr.contains(thoughts.trim()));
    let hidden = run(&["--think", "hide"]);
    assert!(!hidden.stderr.contains(thoughts.trim()) && hidden.stderr.contains("went into thinking"), "{}", hidden.stderr);
    // Without reasoning everything is the answer, and there is no such field.
    let value = json(&["--think", "off"]);
    assert!(value.get("thinking").is_none());
    assert!(!value["response"].as_str().expect("a text").is_empty());
    let mut command = home.cactus(["run", &model, "--think", "perhaps", "--prompt", "Hi"]);
    assert!(finish(&mut command).failed(2).contains("hide"));
}
