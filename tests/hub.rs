//! Downloads as a user meets them: the program against a hub that misbehaves. Names that begin with `p` and a number
//! say which report by users of other programs they answer.

use crate::support::hub::{COMMIT, Faults, Hub, hash};
use crate::support::proxy::{self, Proxy};
use crate::support::{Home, finish};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const REPO: &str = "owner/model-1b";
const TOKEN: &str = "hf_secretsecretsecret";

/// Bytes without a pattern.
fn noise(count: u32) -> Vec<u8> {
    (0..count).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 ^ (i >> 12) as u8).collect()
}

fn model(weights: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("config.json", b"{\"model_type\":\"llama\"}".to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
        ("model.safetensors", weights.to_vec()),
    ]
}

/// `cactus` with `args`, allowed to reach `hub`.
fn cactus(home: &Home, hub: &Hub, args: &[&str]) -> Command {
    let mut command = home.cactus(args);
    command.env("HF_ENDPOINT", &hub.url).env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN_PATH");
    command
}

fn cache(home: &Home) -> PathBuf {
    home.path().join(".cache/huggingface/hub/models--owner--model-1b")
}

/// Where the beginning of a content is kept.
fn partial(home: &Home, content: &[u8]) -> PathBuf {
    cache(home).join("blobs").join(format!("{}.incomplete", hash(content)))
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.len())
}

/// Names of all files that are left half-finished.
fn leftovers(home: &Home) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![home.path().join(".cache/huggingface")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if name.contains("incomplete") || name.contains("underway") {
                names.push(name);
            }
        }
    }
    names
}

#[test]
fn p37_killed_five_times_it_never_fetches_a_byte_again() {
    let weights = noise(6 << 20);
    let hub = Hub::start(REPO, &model(&weights));
    hub.faults().pause = Some(Duration::from_millis(4));
    let home = Home::new();
    let partial = partial(&home, &weights);
    // Five points at which to kill, different in every run.
    let seed = u64::from(std::process::id());
    let mut stopped_at = vec![0];
    for kill in 0..5u64 {
        let wanted = length(&partial) + (300 << 10) + (seed.wrapping_mul(7919 + kill) % (400 << 10));
        let mut command = cactus(&home, &hub, &["download", REPO]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts");
        let begin = Instant::now();
        while length(&partial) < wanted {
            assert!(begin.elapsed() < Duration::from_secs(60), "the download does not get on");
            assert_eq!(child.try_wait().expect("a child"), None, "the download ends early");
            std::thread::sleep(Duration::from_millis(1));
        }
        // SIGKILL on Unix.
        child.kill().expect("a child to kill");
        child.wait().expect("a child");
        stopped_at.push(length(&partial));
    }
    let path = finish(&mut cactus(&home, &hub, &["download", REPO])).ok();
    assert_eq!(path.trim_end(), cache(&home).join("snapshots").join(COMMIT).to_string_lossy());
    let fetched = fs::read(Path::new(path.trim_end()).join("model.safetensors")).expect("the weights");
    assert_eq!(hash(&fetched), hash(&weights));
    assert_eq!(leftovers(&home), [""; 0]);

    // What the server was asked for begins each time exactly where the file on disk ended.
    let mut sent = hub.take_sent();
    sent.sort_by_key(|part| part.from);
    let starts: Vec<u64> = sent.iter().map(|part| part.from as u64).collect();
    assert_eq!(starts, stopped_at);
    for (part, next) in sent.iter().zip(&stopped_at[1..]) {
        assert!((part.from + part.bytes) as u64 >= *next, "{part:?} {next}");
    }
    let last = sent.last().expect("a part");
    assert_eq!(last.from + last.bytes, weights.len());
}

#[test]
fn p37_a_changed_remote_file_is_noticed() {
    let (old, new) = (noise(60_000), noise(70_000));
    let hub = Hub::start(REPO, &model(&old));
    *hub.faults() = Faults { cut_at: 1000, cuts: 1000, ..Faults::default() };
    let home = Home::new();
    let text = finish(&mut cactus(&home, &hub, &["download", REPO, "-q"])).failed(1);
    assert!(text.contains("model.safetensors") && text.contains("goes on from there"), "{text}");
    assert_eq!(length(&partial(&home, &old)), 4000);
    hub.put("model.safetensors", new.clone());
    *hub.faults() = Faults::default();
    let path = finish(&mut cactus(&home, &hub, &["download", REPO, "-q"])).ok();
    assert_eq!(fs::read(Path::new(path.trim_end()).join("model.safetensors")).expect("the weights"), new);
    assert_eq!(leftovers(&home), [""; 0]);
}

#[test]
fn two_processes_at_once_download_once() {
    let weights = noise(1 << 20);
    let hub = Hub::start(REPO, &model(&weights));
    hub.faults().pause = Some(Duration::from_millis(10));
    let home = Home::new();
    let paths: Vec<String> = std::thread::scope(|scope| {
        let run = || finish(&mut cactus(&home, &hub, &["download", REPO])).ok();
        let both = [scope.spawn(run), scope.spawn(run)];
        both.map(|one| one.join().expect("a path")).to_vec()
    });
    assert_eq!(paths[0], paths[1]);
    assert_eq!(hub.take_sent().iter().map(|part| (part.from, part.bytes)).collect::<Vec<_>>(), [(0, weights.len())]);
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_named_and_what_arrived_is_kept() {
    let weights = noise(200_000);
    let hub = Hub::start(REPO, &model(&weights));
    let home = Home::new();
    let plain = cactus(&home, &hub, &["download", REPO]);
    // A limit on the size of files is the nearest thing to a full disk that needs no privilege: 64 blocks of 512
    // or 1024 bytes, by the shell.
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\""]).arg(plain.get_program()).args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    let text = finish(limited.stdin(Stdio::null())).failed(1);
    assert!(text.contains("cannot write") && text.contains("hint: free some space"), "{text}");
    let have = length(&partial(&home, &weights));
    assert!(have > 0 && have < 200_000, "{have}");
    finish(&mut cactus(&home, &hub, &["download", REPO])).ok();
    assert_eq!(hub.take_sent().last().map(|part| part.from as u64), Some(have));
}

#[test]
fn p36_gated_refused_and_unknown_are_three_messages() {
    let hub = Hub::start(REPO, &model(&noise(2000)));
    hub.faults().gated = true;
    let home = Home::new();
    let run = |repo: &str, token: Option<&str>| {
        let mut command = cactus(&home, &hub, &["download", repo]);
        token.map(|token| command.env("HF_TOKEN", token));
        hub.take_seen();
        finish(&mut command).failed(1)
    };
    let page = format!("{}/{REPO}", hub.url);
    let without = run(REPO, None);
    assert!(without.contains("gated") && without.contains("HF_TOKEN") && without.contains(&page), "{without}");
    assert_eq!(hub.take_seen().len(), 2, "the listing and one file, no retries");
    let with = run(REPO, Some(&format!("{TOKEN}\n")));
    assert!(with.contains("accept the licence at") && with.contains(&page) && !with.contains(TOKEN), "{with}");
    assert_eq!(hub.take_seen()[0].authorization, Some(format!("Bearer {TOKEN}")));
    let unknown = run("owner/qwen3", Some(TOKEN));
    assert!(unknown.contains("no model owner/qwen3"), "{unknown}");
    assert!(!without.contains('<') && !with.contains('<'));

    // The standard token file, trimmed; a token that can be none is not printed.
    let folder = home.path().join(".cache/huggingface");
    fs::write(folder.join("token"), format!("{TOKEN}\n\n")).expect("written");
    run(REPO, None);
    assert_eq!(hub.take_seen()[0].authorization, Some(format!("Bearer {TOKEN}")));
    fs::write(folder.join("token"), "hf_sec ret\u{7}").expect("written");
    let text = finish(&mut cactus(&home, &hub, &["download", REPO])).failed(2);
    assert!(text.contains("token") && !text.contains("hf_sec"), "{text}");
    assert!(hub.take_seen().is_empty());
}

#[test]
fn p40_what_is_here_needs_no_hub() {
    let hub = Hub::start(REPO, &model(&noise(2000)));
    let home = Home::new();
    let path = finish(&mut cactus(&home, &hub, &["download", REPO])).ok();
    *hub.faults() = Faults { busy: 1000, busy_status: 429, retry_after: "3600".into(), ..Faults::default() };
    hub.take_seen();
    assert_eq!(finish(&mut cactus(&home, &hub, &["download", REPO])).ok(), path);
    assert_eq!(home.run(["download", REPO]).ok(), path, "offline");
    assert!(hub.take_seen().is_empty());

    let busy = finish(&mut cactus(&home, &hub, &["download", "owner/other"]));
    let text = busy.failed(1);
    assert!(text.contains("429") && text.contains("3600 seconds") && !text.contains('<'), "{text}");
    assert_eq!((text.lines().count(), hub.take_seen().len()), (2, 1));
    *hub.faults() = Faults { busy: 1, busy_status: 503, retry_after: "1".into(), ..Faults::default() };
    let waited = finish(&mut cactus(&home, &hub, &["download", REPO, "--revision", "v1.0"]));
    assert!(waited.stderr.contains("next try in 1 s") && waited.time >= Duration::from_secs(1), "{}", waited.stderr);
    waited.ok();
}

#[cfg(target_os = "linux")]
#[test]
fn p41_proxies_and_their_certificates_are_honoured() {
    let weights = noise(2000);
    let hub = Hub::start(REPO, &model(&weights));
    let home = Home::new();
    if !proxy::certificates(home.path()) {
        println!("skipped: there is no openssl program to make certificates with");
        return;
    }
    let proxy = Proxy::start(&hub.url, home.path());
    let run = |vars: &[(&str, &str)]| {
        let mut command = cactus(&home, &hub, &["download", REPO]);
        for name in ["HTTP_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy", "SSL_CERT_DIR"]
        {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", "https://hub.test").env("HTTPS_PROXY", &proxy.url).env_remove("SSL_CERT_FILE");
        finish(command.envs(vars.iter().copied()))
    };
    let text = run(&[]).failed(1);
    // Where the system has no certificates at all, that is said instead.
    assert!(text.contains("certificate") && text.contains("SSL_CERT_FILE"), "{text}");
    assert!(hub.take_seen().is_empty());

    let authority = home.path().join("authority.pem");
    let authority = authority.to_str().expect("a path");
    let before = proxy.connections();
    let text = run(&[("SSL_CERT_FILE", authority), ("NO_PROXY", "hub.test")]).failed(1);
    assert!(text.contains("cannot reach https://hub.test"), "{text}");
    assert_eq!(proxy.connections(), before);
    assert!(run(&[("SSL_CERT_FILE", "/no/such/file")]).failed(1).contains("/no/such/file"));
    assert!(run(&[("SSL_CERT_FILE", file!())]).failed(1).contains("PEM"));

    let path = run(&[("SSL_CERT_FILE", authority), ("HF_TOKEN", TOKEN)]).ok();
    assert_eq!(fs::read(Path::new(path.trim_end()).join("model.safetensors")).expect("the weights"), weights);
    let (there, elsewhere): (Vec<_>, Vec<_>) = hub.take_seen().into_iter().partition(|seen| seen.host == "hub.test");
    assert!(there.len() >= 5 && there.iter().all(|seen| seen.authorization.is_some()));
    assert!(elsewhere.iter().all(|seen| seen.path.starts_with("/cdn/") && seen.authorization.is_none()), "{elsewhere:?}");
}

#[test]
fn p41_a_mirror_sees_every_request() {
    let hub = Hub::start(REPO, &model(&noise(2000)));
    hub.faults().moved = true;
    let home = Home::new();
    // Whatever did not go to the mirror would go to a proxy that does not exist.
    let mut command = cactus(&home, &hub, &["download", REPO]);
    finish(command.env("HTTPS_PROXY", "http://127.0.0.1:9").env("HTTP_PROXY", "http://127.0.0.1:9")).ok();
    let paths: Vec<String> = hub.take_seen().into_iter().map(|seen| seen.path).collect();
    assert!(paths[0].starts_with("/api/models/") && paths.iter().any(|path| path.starts_with("/mirror/")), "{paths:?}");
}

#[test]
fn p42_the_token_stays_with_the_hub() {
    let hub = Hub::start(REPO, &model(&noise(2000)));
    let home = Home::new();
    let run = |endpoint: &str| {
        let mut command = cactus(&home, &hub, &["download", REPO]);
        command.env("HF_TOKEN", TOKEN).env("HF_ENDPOINT", endpoint).env("RUST_LOG", "trace").env("RUST_BACKTRACE", "1");
        let finished = finish(&mut command);
        assert!(!finished.stdout.contains("secret") && !finished.stderr.contains("secret"), "{finished:?}");
        finished
    };
    assert!(run("http://hub.invalid").failed(2).contains("plain http"));
    hub.faults().gated = true;
    run(&hub.url).failed(1);
    hub.faults().gated = false;
    hub.take_seen();
    run(&hub.url).ok();
    let (cdn, there): (Vec<_>, Vec<_>) = hub.take_seen().into_iter().partition(|seen| seen.path.starts_with("/cdn/"));
    assert!(there.iter().all(|seen| seen.authorization == Some(format!("Bearer {TOKEN}"))), "{there:?}");
    assert!(cdn.len() == 1 && cdn[0].authorization.is_none() && cdn[0].host.starts_with("localhost"), "{cdn:?}");
}

#[test]
fn p43_all_shards_are_fetched_and_a_missing_one_is_named_first() {
    let index = br#"{"weight_map":{"a":"w/model-00001-of-00002.safetensors","b":"w/model-00002-of-00002.safetensors"}}"#;
    let mut files = model(&noise(2000));
    files.retain(|(name, _)| *name != "model.safetensors");
    files.push(("model.safetensors.index.json", index.to_vec()));
    files.push(("w/model-00002-of-00002.safetensors", noise(3000)));
    let hub = Hub::start(REPO, &files);
    let home = Home::new();
    let text = finish(&mut cactus(&home, &hub, &["download", REPO])).failed(1);
    assert!(text.contains("w/model-00001-of-00002.safetensors"), "{text}");
    assert!(hub.take_sent().is_empty());
    hub.put("w/model-00001-of-00002.safetensors", noise(2500));
    let path = finish(&mut cactus(&home, &hub, &["download", REPO])).ok();
    let shard = |number: u32| fs::read(Path::new(path.trim_end()).join(format!("w/model-0000{number}-of-00002.safetensors")));
    assert_eq!((shard(1).expect("a shard"), shard(2).expect("a shard")), (noise(2500), noise(3000)));
}

#[test]
fn official_bundles_are_fetched_when_asked_for() {
    let name = "Cactus-Compute/model-1b";
    let archive = noise(3000);
    let hub = Hub::start(name, &[("config.txt", b"x".to_vec()), ("model-1b-cq4.zip", archive.clone())]);
    hub.answer(&format!("/api/models/{name}/refs"), r#"{"tags":[{"name":"v1.0"}]}"#);
    let home = Home::new();
    let path = finish(&mut cactus(&home, &hub, &["download", "owner/model-1b", "--official", "4", "-q"])).ok();
    assert_eq!(fs::read(path.trim_end()).expect("the archive"), archive);
    let text = finish(&mut cactus(&home, &hub, &["download", "owner/model-1b", "--official", "2", "-q"])).failed(1);
    assert!(text.contains("there are 4"), "{text}");
    let text = finish(&mut cactus(&home, &hub, &["download", "owner/other", "--official", "4", "-q"])).failed(1);
    assert!(text.contains("no official bundles"), "{text}");
}
