//! What is kept on this machine and what the hub has: `list`, `show`, `rm`, `search`, `download`.

use crate::support::hub::{COMMIT, Hub};
use crate::support::{Home, finish, source};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

const REPO: &str = "owner/tiny-llama";

/// A hub with a model of random weights that can be converted.
fn hub() -> Hub {
    let files: Vec<(String, Vec<u8>)> = fs::read_dir(source("tests/golden/llama-tied"))
        .expect("a folder")
        .flatten()
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).expect("a file")))
        .collect();
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    Hub::start(REPO, &files)
}

fn cactus(home: &Home, hub: &Hub, args: &[&str]) -> Command {
    let mut command = home.cactus(args);
    command.env("HF_ENDPOINT", &hub.url).env_remove("HF_HUB_OFFLINE");
    command
}

fn json(text: &str) -> Value {
    assert_eq!(text.matches('\n').count(), 1, "one line: {text}");
    serde_json::from_str(text).expect("JSON")
}

/// Converts the model to each of `bits`.
fn convert(home: &Home, hub: &Hub, bits: &[&str]) {
    for bits in bits {
        let mut command = cactus(home, hub, &["convert", REPO, "--bits", bits, "--calibrate", "none", "-q"]);
        finish(&mut command).ok();
    }
}

#[test]
fn list_tells_where_and_when() {
    let (home, hub) = (Home::new(), hub());
    assert_eq!(json(&home.run(["list", "--json"]).ok()), json!([]));
    convert(&home, &hub, &["4"]);
    let row = &json(&home.run(["list", "--json"]).ok())[0];
    let path = home.path().join("cactus/bundles/owner--tiny-llama-cq4");
    assert_eq!(row["name"], REPO);
    assert_eq!((row["bits"].as_u64(), row["revision"].as_str(), &row["last_used"]), (Some(4), Some(COMMIT), &Value::Null));
    assert_eq!(row["path"], path.to_str().expect("a path"));
    assert!(row["bytes"].as_u64().expect("a size") > 1000);
    assert!(home.run(["list"]).ok().contains("last used"));

    cactus::hub::cache::touch(&path);
    let row = &json(&home.run(["list", "--json"]).ok())[0];
    assert!(row["last_used"].as_str().is_some_and(|time| time.ends_with('Z')), "{row}");
    assert!(home.run(["list"]).ok().contains("just now"));
}

#[test]
fn show_tells_of_bundles_checkpoints_and_the_hub() {
    let (home, hub) = (Home::new(), hub());
    hub.answer("/api/models/Cactus-Compute/tiny-llama/refs", json!({ "tags": [{ "name": "v2.2.0" }] }));
    hub.answer(
        "/api/models/Cactus-Compute/tiny-llama/revision/v2.2.0",
        json!({ "sha": COMMIT, "siblings": [{ "rfilename": "tiny-llama-cq4.zip", "size": 77 }] }),
    );
    let config: Value =
        serde_json::from_slice(&fs::read(source("tests/golden/llama-tied/config.json")).expect("a file")).expect("JSON");

    // Not here: the hub is asked, nothing is stored.
    let shown = finish(&mut cactus(&home, &hub, &["show", REPO])).ok();
    assert!(
        shown.contains("licence         mit") && shown.contains("Cactus-Compute/tiny-llama has bundles of 4 bits"),
        "{shown}"
    );
    let about = json(&finish(&mut cactus(&home, &hub, &["show", REPO, "--json"])).ok());
    assert_eq!((&about["kind"], &about["supported"], &about["downloads"]), (&json!("hub"), &json!(true), &json!(1234)));
    assert_eq!((&about["context"], &about["official"]["archives"][0]["bytes"]), (&config["max_position_embeddings"], &json!(77)));
    assert!(about["download_bytes"].as_u64().expect("a size") > 10_000);
    assert!(!home.path().join(".cache/huggingface").exists());
    assert!(home.run(["show", REPO]).failed(1).contains("HF_HUB_OFFLINE"));

    // Downloaded, then converted: no request any more.
    finish(&mut cactus(&home, &hub, &["download", REPO, "-q"])).ok();
    hub.take_seen();
    let about = json(&finish(&mut cactus(&home, &hub, &["show", REPO, "--json"])).ok());
    assert_eq!((&about["kind"], &about["source"]["revision"]), (&json!("checkpoint"), &json!(COMMIT)));
    convert(&home, &hub, &["2", "4"]);
    let about = json(&finish(&mut cactus(&home, &hub, &["show", REPO, "--json", "--bits", "2"])).ok());
    assert_eq!((&about["kind"], &about["bits"], &about["bundles"]), (&json!("bundle"), &json!(2), &json!(["cq2", "cq4"])));
    assert_eq!(about["spec"]["layers"], config["num_hidden_layers"]);
    assert_eq!((&about["spec"]["dim"], &about["context"]), (&config["hidden_size"], &config["max_position_embeddings"]));
    let tensors = about["tensors"].as_array().expect("tensors");
    assert!(tensors.iter().any(|t| t["format"] == "tcq2" && t["bits_per_weight"].as_f64().is_some_and(|b| b > 2.0 && b < 3.0)));
    let path = about["path"].as_str().expect("a path").to_owned();
    assert!(home.run(["show", &path]).ok().contains("context"));
    assert!(hub.take_seen().is_empty());
    let asked = json(&finish(&mut cactus(&home, &hub, &["show", REPO, "--json", "--hub"])).ok());
    assert_eq!((&asked["kind"], &asked["licence"]), (&json!("bundle"), &json!("mit")));
    assert_eq!(asked["official"]["revision"], "v2.2.0");
}

#[test]
fn rm_removes_what_was_named_and_says_what_is_free() {
    let (home, hub) = (Home::new(), hub());
    convert(&home, &hub, &["2", "4", "8"]);
    let bundles = || {
        let list = json(&home.run(["list", "--json"]).ok());
        list.as_array().expect("rows").iter().map(|row| row["bits"].as_u64().expect("bits")).collect::<Vec<_>>()
    };
    // Without a terminal there is no question; without bits it must be clear which.
    assert!(home.run(["rm", REPO, "--bits", "4"]).failed(2).contains("--yes"));
    assert!(home.run(["rm", REPO, "--yes"]).failed(2).contains("cq2, cq4, cq8"));
    assert!(home.run(["rm", REPO, "--yes", "--bits", "3"]).failed(1).contains("3 bits"));
    assert!(home.run(["rm", "owner/other", "--yes"]).failed(1).contains("owner/other"));
    assert!(home.run(["rm", REPO, "owner/other", "--yes", "--all-bits"]).failed(1).contains("owner/other"));
    assert_eq!(bundles(), [2, 4, 8], "nothing is removed when something is wrong");

    let removed = home.run(["rm", REPO, "--bits", "4", "--yes"]);
    assert!(removed.stderr.contains("1 converted model") && removed.stderr.contains("MB are free"), "{}", removed.stderr);
    assert_eq!((removed.ok().as_str(), bundles()), ("", vec![2, 8]));
    home.run(["rm", "owner--tiny-llama-cq8", "-y", "-q"]).ok();
    assert_eq!(bundles(), [2]);
    let checkpoint = home.path().join(".cache/huggingface/hub/models--owner--tiny-llama");
    assert!(checkpoint.exists());
    home.run(["rm", REPO, "--all-bits", "--checkpoint", "--yes"]).ok();
    assert!(bundles().is_empty() && !checkpoint.exists());

    // Bundles of a local checkpoint go, the checkpoint stays.
    let local = source("tests/golden/llama-tied");
    let local = local.to_str().expect("a path");
    home.run(["convert", local, "--calibrate", "none", "-q"]).ok();
    assert!(home.run(["rm", local, "--checkpoint", "--yes"]).failed(2).contains("--checkpoint"));
    assert_eq!(bundles(), [4]);
    home.run(["rm", local, "--yes"]).ok();
    assert!(bundles().is_empty() && Path::new(local).join("config.json").exists());
}

#[test]
fn search_knows_the_catalogue_and_asks_the_hub() {
    let (home, hub) = (Home::new(), hub());
    hub.answer(
        "/api/models",
        json!([
            { "id": "Qwen/Qwen3-0.6B", "downloads": 900, "likes": 9, "config": { "architectures": ["Qwen3ForCausalLM"] } },
            { "id": "x/qwen3-awq", "downloads": 5, "likes": 0, "tags": ["awq"],
              "config": { "architectures": ["Qwen3ForCausalLM"] } },
            { "id": "x/qwen3-moe", "downloads": 4, "gated": "manual", "config": { "architectures": ["Qwen3MoeForCausalLM"] } },
            { "id": "x/qwen3-gguf", "downloads": 3, "tags": ["gguf"] },
            { "id": "../evil", "downloads": 3 },
        ]),
    );
    let rows = json(&finish(&mut cactus(&home, &hub, &["search", "qwen3", "--json"])).ok());
    let seen = hub.take_seen();
    assert!(seen.len() == 1 && seen[0].path.starts_with("/api/models?search=qwen3&filter=text-generation"), "{seen:?}");
    let find = |name: &str| rows.as_array().expect("rows").iter().find(|row| row["name"] == name).expect("a row");
    let known = find("Qwen/Qwen3-0.6B");
    assert_eq!((&known["alias"], &known["downloads"], &known["supported"]), (&json!("qwen3"), &json!(900), &json!(true)));
    assert_eq!(rows[0]["name"], "Qwen/Qwen3-0.6B");
    assert_eq!((&find("x/qwen3-awq")["supported"], &find("x/qwen3-moe")["supported"]), (&json!(false), &json!(false)));
    assert_eq!((&find("x/qwen3-gguf")["supported"], &find("x/qwen3-moe")["gated"]), (&Value::Null, &json!(true)));
    assert!(!rows.to_string().contains("evil"));
    let table = finish(&mut cactus(&home, &hub, &["search", "qwen3"])).ok();
    assert!(table.lines().next().is_some_and(|line| line.starts_with("model") && line.contains("supported")), "{table}");

    // Without a hub the well-known models remain.
    let offline = home.run(["search", "gemma"]);
    assert!(offline.stderr.contains("HF_HUB_OFFLINE"), "{}", offline.stderr);
    assert!(offline.ok().contains("google/gemma-3-1b-it"));
    home.run(["search", "no-such-thing"]).failed(1);
}

#[test]
fn download_prints_the_path_and_takes_a_revision() {
    let (home, hub) = (Home::new(), hub());
    let path = finish(&mut cactus(&home, &hub, &["download", REPO, "--revision", "v1.0"])).ok();
    assert!(path.trim_end().ends_with(COMMIT) && Path::new(path.trim_end()).join("model.safetensors").exists(), "{path}");
    assert!(hub.take_seen()[0].path.contains("/revision/v1.0"));
    let again = home.run(["download", &format!("{REPO}@v1.0")]);
    assert!(again.stderr.contains("here already"), "{}", again.stderr);
    assert_eq!(again.ok(), path);
    assert!(home.run(["download", &format!("{REPO}@v1.0"), "--revision", "main"]).failed(2).contains("revision"));
    assert!(finish(&mut cactus(&home, &hub, &["download", REPO, "--revision", "v9"])).failed(1).contains("v9"));
    assert!(home.run(["download", "smolm2"]).failed(1).contains("did you mean smollm2"));
}
