//! The whole room against a hub on the loopback interface and a stand-in for `pip`.

#[path = "../../tests/support/hub.rs"]
mod hub;
#[cfg(unix)]
mod pip;

use super::settings::{Settings, Token};
use super::*;
use hub::{COMMIT, Hub, hash};
use std::ffi::OsString;
use std::fs;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const REPO: &str = "owner/model-1b";

fn weights() -> Vec<u8> {
    (0..50_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn model() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("README.md", b"read me".to_vec()),
        ("config.json", b"{\"model_type\":\"llama\"}".to_vec()),
        ("generation_config.json", b"{}".to_vec()),
        ("tokenizer.json", vec![b' '; 3000]),
        ("model.safetensors", weights()),
        ("pytorch_model.bin", vec![7; 4000]),
        ("onnx/model.onnx", vec![8; 4000]),
    ]
}

/// Settings with caches in a new folder and `hub` (or nothing that listens) as the hub.
fn setup(hub: Option<&Hub>) -> (TempDir, Settings) {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().to_path_buf();
    let lookup = |name: &str| match name {
        "HF_HOME" => Some(folder.join("hf").into_os_string()),
        "CACTUS_HOME" => Some(folder.join("ours").into_os_string()),
        _ => None,
    };
    let mut settings = Settings::from_lookup(&lookup).unwrap();
    settings.endpoint = hub.map_or_else(closed_address, |hub| hub.url.clone());
    settings.backoff = Duration::from_millis(5);
    (home, settings)
}

/// An address at which connections are refused (a reserved port).
fn closed_address() -> String {
    "http://127.0.0.1:1".to_string()
}

fn get(settings: &Settings, name: &str) -> Result<Found> {
    find_with(settings, Request::parse(name), &mut |_| {})
}

fn token(text: &str) -> Option<Token> {
    Token::new(text.as_bytes(), "HF_TOKEN".to_string())
}

/// Files under `folder` whose name ends in `end`.
fn files_ending(folder: &Path, end: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            found.extend(files_ending(&path, end));
        } else if path.to_string_lossy().ends_with(end) {
            found.push(path);
        }
    }
    found
}

fn repo_folder(settings: &Settings) -> PathBuf {
    settings.hf_cache.join("models--owner--model-1b")
}

#[test]
fn downloads_what_is_needed_and_then_asks_no_more() {
    let hub = Hub::start(REPO, &model());
    let (_home, settings) = setup(Some(&hub));
    let mut events = Vec::new();
    let found = find_with(&settings, Request::parse(REPO), &mut |event| events.push(format!("{event:?}"))).unwrap();

    let folder = repo_folder(&settings);
    assert_eq!(found.path, folder.join("snapshots").join(COMMIT));
    assert_eq!((found.name.as_str(), found.revision.as_deref(), found.source), (REPO, Some(COMMIT), Source::Hub));
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights());
    let mut names: Vec<String> =
        fs::read_dir(&found.path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]);
    // The layout that Python's tools read.
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(fs::read(folder.join("blobs").join(hash(&weights()))).unwrap(), weights());
    #[cfg(unix)]
    assert_eq!(
        fs::read_link(found.path.join("model.safetensors")).unwrap(),
        PathBuf::from(format!("../../blobs/{}", hash(&weights())))
    );
    assert_eq!(files_ending(&settings.hf_cache, "incomplete"), Vec::<PathBuf>::new());

    let total = 22 + 2 + 3000 + 50_000;
    assert_eq!(events.first().unwrap(), &format!("Start {{ what: {REPO:?}, total_bytes: Some({total}) }}"));
    let advanced: u64 = events.iter().filter_map(|e| e.strip_prefix("Advance(")?.strip_suffix(')')?.parse::<u64>().ok()).sum();
    assert_eq!((advanced, events.last().unwrap().as_str()), (total, "Finish"));

    assert!(hub.take_seen().iter().all(|seen| seen.authorization.is_none() && !seen.path.contains("README")));
    let again = get(&settings, REPO).unwrap();
    assert_eq!(again, Found { source: Source::Cache, ..found });
    assert!(hub.take_seen().is_empty());
}

#[test]
fn a_warm_cache_needs_no_hub_no_network_and_no_good_token() {
    let hub = Hub::start(REPO, &model());
    let (_home, mut settings) = setup(Some(&hub));
    get(&settings, REPO).unwrap();
    hub.faults().busy = 1000;
    hub.take_seen();
    settings.offline = true;
    settings.token = token("bad\u{1}token");
    assert_eq!(get(&settings, REPO).unwrap().source, Source::Cache);

    let error = get(&settings, "owner/other").unwrap_err();
    assert_eq!(error.kind, Kind::NotFound);
    assert!(error.message().contains("HF_HUB_OFFLINE"), "{error}");
    // The starter has a second source, which is no less a download.
    assert!(get(&settings, "smollm2").unwrap_err().message().contains("HF_HUB_OFFLINE"));
    assert!(hub.take_seen().is_empty());
}

#[cfg(unix)]
#[test]
fn a_snapshot_made_by_other_tools_is_used_in_place() {
    let (_home, settings) = setup(None);
    let folder = repo_folder(&settings);
    let commit = "fedcba9876543210fedcba9876543210fedcba98";
    let snapshot = folder.join("snapshots").join(commit);
    for folder in [folder.join("blobs"), folder.join("refs"), snapshot.clone()] {
        fs::create_dir_all(folder).unwrap();
    }
    let index = r#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
    fs::write(folder.join("refs/main"), commit).unwrap();
    fs::write(snapshot.join("config.json"), "{}").unwrap();
    fs::write(snapshot.join("tokenizer.model"), "x").unwrap();
    fs::write(snapshot.join("model.safetensors.index.json"), index).unwrap();
    fs::write(folder.join("blobs/one"), "1").unwrap();
    for (name, blob) in [("model-00001-of-00002.safetensors", "one"), ("model-00002-of-00002.safetensors", "two")] {
        std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
    }
    // The second shard's link leads nowhere, so the set is not complete and the hub would be asked.
    assert_eq!(get(&settings, REPO).unwrap_err().kind, Kind::Network);
    fs::write(folder.join("blobs/two"), "2").unwrap();
    let found = get(&settings, REPO).unwrap();
    assert_eq!((found.path, found.revision.as_deref(), found.source), (snapshot.clone(), Some(commit), Source::Cache));
    assert_eq!(get(&settings, &format!("{REPO}@{commit}")).unwrap().path, snapshot);
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let hub = Hub::start(REPO, &model());
    let (_home, mut settings) = setup(Some(&hub));
    settings.token = token("  hf_secret\n");
    get(&settings, REPO).unwrap();
    let (there, elsewhere): (Vec<_>, Vec<_>) = hub.take_seen().into_iter().partition(|seen| seen.host.starts_with("127.0.0.1"));
    assert!(there.len() > 4 && there.iter().all(|seen| seen.authorization.as_deref() == Some("Bearer hf_secret")));
    assert!(elsewhere.len() == 2 && elsewhere.iter().all(|seen| seen.path.starts_with("/cdn/") && seen.authorization.is_none()));
}

#[test]
fn a_token_is_not_shown_nor_sent_in_the_clear() {
    let (_home, mut settings) = setup(None);
    settings.token = token("hf_sec\u{e9}ret");
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!(error.kind, Kind::Usage);
    assert!(error.message().contains("HF_TOKEN") && !format!("{error:?}{settings:?}").contains("hf_sec"), "{error}");

    settings.token = token("hf_secret");
    settings.endpoint = "http://hub.invalid".to_string();
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!(error.kind, Kind::Usage);
    assert!(error.message().contains("plain http") && !format!("{error:?}").contains("hf_secret"));
    settings.endpoint = "ftp://hub.invalid".to_string();
    assert!(get(&settings, REPO).unwrap_err().message().contains("HF_ENDPOINT"));
}

#[test]
fn a_gated_model_says_what_to_do() {
    let hub = Hub::start(REPO, &model());
    hub.faults().gated = true;
    let (_home, mut settings) = setup(Some(&hub));
    let without = get(&settings, REPO).unwrap_err();
    assert!(without.message().contains("is gated") && without.hint().unwrap().contains("HF_TOKEN"), "{without:?}");
    assert_eq!(hub.take_seen().len(), 2, "no retries");
    settings.token = token("hf_secret");
    let with = get(&settings, REPO).unwrap_err();
    assert!(with.hint().unwrap().contains(&format!("{}/{REPO}", hub.url)), "{with:?}");
    assert_ne!(without.message(), with.message());
    assert!(!format!("{without:?}{with:?}").contains("html") && !format!("{with:?}").contains("hf_secret"));
    assert!(!repo_folder(&settings).join("snapshots").exists());
}

#[test]
fn an_unknown_model_or_revision_is_named() {
    let hub = Hub::start(REPO, &model());
    let (_home, settings) = setup(Some(&hub));
    let error = get(&settings, "Qwen/Qwen3-0.6C").unwrap_err();
    assert_eq!((error.kind, error.message()), (Kind::NotFound, "no model Qwen/Qwen3-0.6C on 127.0.0.1"));
    assert!(error.hint().unwrap().contains("qwen3"), "{error:?}");
    let error = get(&settings, &format!("{REPO}@v9")).unwrap_err();
    assert_eq!((error.kind, error.message()), (Kind::NotFound, "owner/model-1b has no revision v9"));

    hub.take_seen();
    for (name, hint) in [("smolm2", "smollm2"), ("owner/../x", ""), ("a/b/c", ""), ("./nothing.gguf", ""), ("zzzz", "owner/name")]
    {
        let error = get(&settings, name).unwrap_err();
        assert_eq!(error.kind, Kind::NotFound, "{name}");
        assert!(error.hint().unwrap_or_default().contains(hint), "{error:?}");
    }
    assert_eq!(get(&settings, "https://host/owner/name").unwrap_err().kind, Kind::Usage);
    for revision in ["../x", "a b", "", "/etc"] {
        let request = Request { name: REPO, revision: Some(revision) };
        assert_eq!(find_with(&settings, request, &mut |_| {}).unwrap_err().kind, Kind::Usage, "{revision:?}");
    }
    assert!(hub.take_seen().is_empty());
}

#[test]
fn revisions_are_kept_apart() {
    let hub = Hub::start(REPO, &model());
    let (_home, settings) = setup(Some(&hub));
    let found = get(&settings, &format!("{REPO}@refs/pr/1")).unwrap();
    assert_eq!(hub.take_seen()[0].path, format!("/api/models/{REPO}/revision/refs%2Fpr%2F1?blobs=true"));
    assert_eq!(fs::read_to_string(repo_folder(&settings).join("refs/refs/pr/1")).unwrap(), COMMIT);
    assert_eq!(get(&settings, &format!("{REPO}@{COMMIT}")).unwrap().path, found.path);
    assert!(hub.take_seen().is_empty());
    // `main` is not known to be this commit; contents that are here are not fetched again.
    assert_eq!(get(&settings, REPO).unwrap().source, Source::Hub);
    assert!(hub.take_seen().iter().all(|seen| seen.method == "HEAD" || seen.path.starts_with("/api/")));
}

#[test]
fn a_changed_byte_is_noticed_and_not_kept() {
    let hub = Hub::start(REPO, &model());
    hub.faults().corrupt = true;
    let (_home, settings) = setup(Some(&hub));
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!(error.kind, Kind::BadFile);
    assert!(error.message().contains("SHA-256"), "{error}");
    let folder = repo_folder(&settings);
    assert!(!folder.join("snapshots").exists() && !folder.join("refs").exists());
    assert!(files_ending(&folder, "incomplete").is_empty() && !folder.join("blobs").join(hash(&weights())).exists());
    hub.faults().corrupt = false;
    get(&settings, REPO).unwrap();
}

#[test]
fn a_body_that_stops_early_is_continued() {
    for no_ranges in [false, true] {
        let hub = Hub::start(REPO, &model());
        let (_home, settings) = setup(Some(&hub));
        // The tokenizer is a large file too, and comes first: one cut there, three in the weights.
        *hub.faults() = hub::Faults { cut_at: 1200, cuts: 2, no_ranges, ..Default::default() };
        let found = get(&settings, REPO).unwrap();
        assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights());
        assert_eq!(fs::read(found.path.join("tokenizer.json")).unwrap(), vec![b' '; 3000]);
        let ranges: Vec<String> = hub.take_seen().into_iter().filter_map(|seen| seen.range).collect();
        assert!(ranges.contains(&"bytes=1200-".to_string()), "{ranges:?}");
    }
}

#[test]
fn a_body_that_always_stops_is_gone_on_with_next_time() {
    let hub = Hub::start(REPO, &model());
    *hub.faults() = hub::Faults { cut_at: 100, cuts: 1000, ..Default::default() };
    let (_home, settings) = setup(Some(&hub));
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!(error.kind, Kind::Network);
    assert!(error.message().contains("tokenizer.json") && error.message().contains("400 of 3000"), "{error}");
    let folder = repo_folder(&settings);
    assert!(!folder.join("snapshots").exists() && files_ending(&folder, "incomplete").len() == 1);
    assert_eq!(hub.take_seen().iter().filter(|seen| seen.path.starts_with("/cdn/")).count(), 4);
    hub.faults().cuts = 0;
    get(&settings, REPO).unwrap();
    assert_eq!(hub.take_seen().iter().find_map(|seen| seen.range.clone()).as_deref(), Some("bytes=400-"));
    assert!(files_ending(&settings.hf_cache, "incomplete").is_empty());
    assert!(files_ending(&settings.hf_cache, "underway.json").is_empty());
}

#[test]
fn a_changed_file_is_fetched_anew_and_the_old_beginning_removed() {
    let hub = Hub::start(REPO, &model());
    *hub.faults() = hub::Faults { cut_at: 2000, cuts: 1000, ..Default::default() };
    let (_home, settings) = setup(Some(&hub));
    get(&settings, REPO).unwrap_err();
    assert_eq!(files_ending(&settings.hf_cache, "incomplete").len(), 1);
    let mut changed = weights();
    changed[49_999] ^= 1;
    hub.put("model.safetensors", changed.clone());
    hub.take_seen();
    *hub.faults() = hub::Faults::default();
    let found = get(&settings, REPO).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), changed);
    assert!(files_ending(&settings.hf_cache, "incomplete").is_empty());
    assert!(hub.take_seen().iter().all(|seen| seen.range.is_none()));
}

#[test]
fn a_spoilt_beginning_is_noticed_and_fetched_again() {
    let hub = Hub::start(REPO, &model());
    let (_home, settings) = setup(Some(&hub));
    let blobs = repo_folder(&settings).join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    for (have, wrong) in [(1000, 0u8), (50_000, 0), (60_000, 0)] {
        fs::write(blobs.join(format!("{}.incomplete", hash(&weights()))), vec![wrong; have]).unwrap();
        let found = get(&settings, REPO).unwrap();
        assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights(), "{have}");
        assert!(files_ending(&settings.hf_cache, "incomplete").is_empty());
        fs::remove_dir_all(repo_folder(&settings)).unwrap();
        fs::create_dir_all(&blobs).unwrap();
    }
    // A beginning that is right is not fetched again, and a whole one needs no request at all.
    hub.take_seen();
    for (have, asked) in [(20_000, Some("bytes=20000-")), (50_000, None)] {
        fs::write(blobs.join(format!("{}.incomplete", hash(&weights()))), &weights()[..have]).unwrap();
        get(&settings, REPO).unwrap();
        let seen = hub.take_seen();
        let cdn = seen.iter().filter(|seen| seen.path.ends_with(&hash(&weights()))).count();
        assert_eq!(seen.iter().find_map(|seen| seen.range.as_deref()), asked);
        assert_eq!(cdn, usize::from(asked.is_some()));
        fs::remove_dir_all(repo_folder(&settings)).unwrap();
        fs::create_dir_all(&blobs).unwrap();
    }
}

#[test]
fn odd_servers_are_understood() {
    for (gzip, no_length, no_ranges) in [(true, false, false), (false, true, false), (true, true, false), (true, true, true)] {
        for cuts in [0, 2] {
            let hub = Hub::start(REPO, &model());
            let (_home, settings) = setup(Some(&hub));
            *hub.faults() = hub::Faults { gzip, no_length, no_ranges, cuts, cut_at: 1200, ..Default::default() };
            let found = get(&settings, REPO).unwrap_or_else(|e| panic!("{gzip} {no_length} {no_ranges} {cuts}: {e}"));
            for (name, bytes) in model().iter().filter(|(name, _)| found.path.join(name).exists()) {
                assert_eq!(&fs::read(found.path.join(name)).unwrap(), bytes, "{name} {gzip} {no_length} {cuts}");
            }
            assert_eq!(fs::read_dir(&found.path).unwrap().count(), 4);
        }
    }
}

#[test]
fn a_model_that_does_not_fit_on_the_disk_is_refused_before_it_is_fetched() {
    let hub = Hub::start(REPO, &model());
    hub.faults().claimed_bytes = Some(1 << 60);
    let (_home, settings) = setup(Some(&hub));
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!(error.kind, Kind::Io);
    assert!(error.message().contains("MB more") && error.hint().unwrap().contains("HF_HOME"), "{error:?}");
    assert!(hub.take_seen().iter().all(|seen| !seen.path.starts_with("/cdn/")));
}

#[cfg(unix)]
#[test]
fn an_older_complete_revision_stands_in_when_the_newest_cannot_be_had() {
    let hub = Hub::start(REPO, &model());
    let (_home, mut settings) = setup(Some(&hub));
    let old = get(&settings, REPO).unwrap();
    let newest = "fedcba9876543210fedcba9876543210fedcba98";
    fs::write(repo_folder(&settings).join("refs/main"), newest).unwrap();
    fs::create_dir(repo_folder(&settings).join("snapshots").join(newest)).unwrap();
    let mut notes = String::new();
    let mut find = |settings: &Settings, name: &str| {
        find_with(settings, Request::parse(name), &mut |event| {
            if let Event::Note(text) = event {
                notes.push_str(text)
            }
        })
    };
    hub.take_seen();
    settings.offline = true;
    assert_eq!(find(&settings, REPO).unwrap(), Found { source: Source::Cache, ..old.clone() });
    assert!(find(&settings, &format!("{REPO}@{newest}")).is_err(), "a revision that was named is not replaced");
    assert!(hub.take_seen().is_empty());
    settings.offline = false;
    settings.endpoint = closed_address();
    assert_eq!(find(&settings, REPO).unwrap().path, old.path);
    assert!(notes.contains(COMMIT), "{notes}");
}

#[test]
fn a_mirror_serves_everything_and_moved_files_are_followed() {
    let hub = Hub::start(REPO, &model());
    hub.faults().moved = true;
    let (_home, mut settings) = setup(Some(&hub));
    settings.token = token("hf_secret");
    let found = get(&settings, REPO).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights());
    assert!(hub.take_seen().iter().any(|seen| seen.path.starts_with("/mirror/")));
}

#[test]
fn a_checkpoint_is_removed_but_not_what_others_share() {
    let hub = Hub::start(REPO, &model());
    let (_home, settings) = setup(Some(&hub));
    get(&settings, REPO).unwrap();
    let snapshots = Snapshots::new(&settings.hf_cache, REPO);
    let folder = repo_folder(&settings);
    #[cfg(unix)]
    {
        let other = folder.join("snapshots/fedcba9876543210fedcba9876543210fedcba98");
        fs::create_dir(&other).unwrap();
        let blob = format!("../../blobs/{}", hash(&[b' '; 3000]));
        std::os::unix::fs::symlink(blob, other.join("tokenizer.json")).unwrap();
        assert_eq!(snapshots.remove("main").unwrap(), 50_000 + 22 + 2 + 40);
        assert_eq!(fs::read(other.join("tokenizer.json")).unwrap(), vec![b' '; 3000]);
        assert!(!folder.join("refs/main").exists() && get(&Settings { offline: true, ..settings.clone() }, REPO).is_err());
        fs::remove_dir_all(other).unwrap();
        get(&settings, REPO).unwrap();
    }
    assert!(snapshots.remove("main").unwrap() > 53_000);
    assert!(!folder.exists());
    assert_eq!(snapshots.remove("main").unwrap(), 0);
}

#[test]
fn official_bundles_are_found_and_fetched() {
    let name = "Cactus-Compute/model-1b";
    let files = [
        ("config.txt", b"x".to_vec()),
        ("model-1b-cq4.tar.gz", vec![1; 3000]),
        ("model-1b-cq4.zip", vec![4; 3000]),
        ("model-1b-cq3.26.zip", vec![3; 2000]),
        ("model-1b-cqx.zip", vec![5; 2000]),
    ];
    let hub = Hub::start(name, &files);
    hub.answer(&format!("/api/models/{name}/refs"), r#"{"tags":[{"name":"v0.9"},{"name":"v1.0"},{"name":"v9.0"},{"name":"x"}]}"#);
    let (_home, settings) = setup(Some(&hub));
    let found = official::find_with(&settings, "owner/model_1b", &mut |_| {}).unwrap().unwrap();
    assert_eq!((found.repo.as_str(), found.revision.as_str()), (name, "v1.0"));
    let archives: Vec<_> = found.archives.iter().map(|a| (a.bits, a.file.as_str(), a.bytes)).collect();
    assert_eq!(archives, [(3.26, "model-1b-cq3.26.zip", Some(2000)), (4.0, "model-1b-cq4.zip", Some(3000))]);

    let path = official::fetch_with(&settings, &found, 4.0, &mut |_| {}).unwrap();
    assert!(path.ends_with("model-1b-cq4.zip") && fs::read(&path).unwrap() == vec![4; 3000]);
    let error = official::fetch_with(&settings, &found, 2.0, &mut |_| {}).unwrap_err();
    assert_eq!((error.kind, error.hint()), (Kind::NotFound, Some("there are 3.26, 4")));
    assert_eq!(official::find_with(&settings, "owner/other", &mut |_| {}).unwrap(), None);
    let offline = Settings { offline: true, ..settings };
    assert!(official::find_with(&offline, "owner/model_1b", &mut |_| {}).is_err());
}

#[test]
fn a_busy_hub_is_given_time_but_not_for_ever() {
    let hub = Hub::start(REPO, &model());
    let (_home, settings) = setup(Some(&hub));
    *hub.faults() = hub::Faults { busy: 2, busy_status: 429, retry_after: "0".into(), ..Default::default() };
    assert_eq!(get(&settings, REPO).unwrap().source, Source::Hub);

    let (_home, settings) = setup(Some(&hub));
    hub.take_seen();
    *hub.faults() = hub::Faults { busy: 1000, busy_status: 503, retry_after: "soon".into(), ..Default::default() };
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!((error.kind, hub.take_seen().len()), (Kind::Network, 4));
    assert!(error.message().contains("503") && !format!("{error:?}").contains('<'), "{error:?}");

    *hub.faults() = hub::Faults { busy: 1000, busy_status: 429, retry_after: "3600".into(), ..Default::default() };
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!(hub.take_seen().len(), 1);
    assert!(error.hint().unwrap().contains("3600 seconds"), "{error:?}");
}

#[test]
fn all_shards_of_the_index_are_fetched() {
    let index = br#"{"weight_map":{"a":"w/model-a.safetensors","b":"model-b.safetensors"}}"#;
    let mut files = vec![
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
        ("model.safetensors.index.json", index.to_vec()),
        ("consolidated.safetensors", vec![9; 2000]),
        ("model-b.safetensors", vec![2; 2000]),
    ];
    let hub = Hub::start(REPO, &files);
    let (_home, settings) = setup(Some(&hub));
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!(error.kind, Kind::Unsupported);
    assert!(error.message().contains("w/model-a.safetensors"), "{error}");
    assert!(hub.take_seen().iter().all(|seen| !seen.path.starts_with("/cdn/")), "before any weights are fetched");

    files.push(("w/model-a.safetensors", vec![1; 2000]));
    let hub = Hub::start(REPO, &files);
    let settings = Settings { endpoint: hub.url.clone(), ..settings };
    let found = get(&settings, REPO).unwrap();
    assert_eq!(fs::read(found.path.join("w/model-a.safetensors")).unwrap(), vec![1; 2000]);
    assert_eq!(fs::read(found.path.join("model-b.safetensors")).unwrap(), vec![2; 2000]);
    assert!(!found.path.join("consolidated.safetensors").exists());
    hub.take_seen();
    assert_eq!(get(&settings, REPO).unwrap().source, Source::Cache);
    assert!(hub.take_seen().is_empty());
}

#[test]
fn a_gguf_repository_gives_the_file() {
    let files = [("m-Q4_K_M.gguf", vec![4; 2000]), ("m-Q8_0.gguf", vec![8; 2000])];
    let hub = Hub::start(REPO, &files);
    let (_home, settings) = setup(Some(&hub));
    let found = get(&settings, REPO).unwrap();
    assert!(found.path.ends_with("m-Q8_0.gguf") && fs::read(&found.path).unwrap() == vec![8; 2000]);
    assert_eq!(get(&settings, REPO).unwrap(), Found { source: Source::Cache, ..found });
}

#[test]
fn a_listing_cannot_write_outside_the_cache() {
    let hub = Hub::start(REPO, &[("../../../evil.gguf", vec![6; 2000])]);
    let (home, settings) = setup(Some(&hub));
    assert_eq!(get(&settings, REPO).unwrap_err().kind, Kind::Unsupported);
    assert!(files_ending(home.path(), "evil.gguf").is_empty());
}

#[test]
fn two_at_once_download_once() {
    let hub = Hub::start(REPO, &model());
    let (_home, settings) = setup(Some(&hub));
    let found: Vec<Found> = std::thread::scope(|scope| {
        let both: Vec<_> = (0..2).map(|_| scope.spawn(|| get(&settings, REPO).unwrap())).collect();
        both.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(found[0].path, found[1].path);
    assert_eq!(hub.take_seen().iter().filter(|seen| seen.path.starts_with("/cdn/")).count(), 2);
}

#[test]
fn a_local_path_is_returned_as_it_is() {
    let (home, settings) = setup(None);
    let folder = home.path().join("my@model");
    fs::create_dir(&folder).unwrap();
    let typed = folder.to_str().unwrap();
    let found = get(&settings, typed).unwrap();
    assert_eq!((found.path.as_path(), found.source, found.revision), (folder.as_path(), Source::Local, None));
    assert!(Path::new(&found.name).is_absolute());
    let request = Request { name: typed, revision: Some("main") };
    assert_eq!(find_with(&settings, request, &mut |_| {}).unwrap_err().kind, Kind::Usage);
}

#[test]
fn no_hub_is_noticed_at_once() {
    let (_home, settings) = setup(None);
    let start = Instant::now();
    let error = get(&settings, REPO).unwrap_err();
    assert_eq!(error.kind, Kind::Network);
    assert!(error.message().contains(&settings.endpoint), "{error}");
    let settings = Settings { endpoint: "https://hub.invalid".to_string(), ..settings };
    assert_eq!(get(&settings, REPO).unwrap_err().kind, Kind::Network);
    assert!(start.elapsed() < Duration::from_secs(4));
}

#[test]
fn the_environment_is_read_as_python_reads_it() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().to_path_buf();
    fs::write(folder.join("token"), "\n hf_file \n").unwrap();
    let with = |vars: &[(&str, &str)]| {
        let vars: Vec<(String, OsString)> = vars.iter().map(|(name, value)| (name.to_string(), value.into())).collect();
        Settings::from_lookup(&|name| vars.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone())).unwrap()
    };
    let hf_home = folder.to_str().unwrap();
    let settings = with(&[("HF_HOME", hf_home), ("HF_ENDPOINT", "https://mirror/ "), ("HF_HUB_OFFLINE", "TRUE")]);
    assert_eq!(settings.hf_cache, folder.join("hub"));
    assert_eq!((settings.endpoint.as_str(), settings.offline), ("https://mirror", true));
    assert_eq!(settings.token.unwrap().checked().unwrap(), "hf_file");
    let settings = with(&[("HF_HOME", hf_home), ("HF_TOKEN", "hf_env"), ("HF_HUB_CACHE", "/c"), ("HF_HUB_OFFLINE", "0")]);
    assert_eq!((settings.hf_cache.to_str(), settings.offline), (Some("/c"), false));
    assert_eq!(settings.token.unwrap().checked().unwrap(), "hf_env");
    let settings = with(&[("XDG_CACHE_HOME", "/x"), ("HF_TOKEN_PATH", "/none"), ("HF_TOKEN", " "), ("CACTUS_HOME", "/r")]);
    assert_eq!((settings.hf_cache, settings.root), ("/x/huggingface/hub".into(), "/r".into()));
    assert!(settings.token.is_none());
    assert_eq!(settings.endpoint, "https://huggingface.co");
}
