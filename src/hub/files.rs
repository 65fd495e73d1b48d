//! Which files of a repository make up a checkpoint. The same choice is made from a hub listing (what to
//! fetch) and from a folder in the cache (is it all here).

use std::collections::{BTreeMap, BTreeSet};

/// The files of a checkpoint.
#[derive(Debug, PartialEq)]
pub(super) struct Selection {
    /// Paths inside the repository; weights stand last, so that whoever has the last file has them all.
    pub files: Vec<String>,
    /// The GGUF file to open; `None` when the folder is the checkpoint.
    pub gguf: Option<String>,
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// GGUF kinds, the one to convert from first: 8 bits lose nothing that small weights would keep and load in
/// half the time of 16; below that, more bits are better.
const GGUF_ORDER: &[&str] =
    &["q8_0", "bf16", "f16", "f32", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0"];

/// The shard index that must be read before [`select`], if this repository has one.
pub(super) fn index(names: &[String]) -> Option<&'static str> {
    let has = |name: &str| names.iter().any(|n| n == name);
    (!has(SINGLE) && has(INDEX)).then_some(INDEX)
}

/// The distinct files that a shard index names.
pub(super) fn shards_of(index: &[u8]) -> Result<Vec<String>, String> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index).map_err(|e| format!("{INDEX} cannot be read: {e}"))?;
    let mut shards: Vec<String> = index.weight_map.into_values().collect();
    shards.sort();
    shards.dedup();
    match shards.iter().find(|name| !is_safe(name)) {
        Some(bad) => Err(format!("{INDEX} names the file `{}`, which is not inside the repository", bad.escape_debug())),
        None if shards.is_empty() => Err(format!("{INDEX} names no files")),
        None => Ok(shards),
    }
}

/// Chooses the checkpoint among `names`; `shards` are the files named by the [`index`], if there is one.
/// The error says what is missing.
pub(super) fn select(names: &[String], shards: Option<&[String]>) -> Result<Selection, String> {
    let has = |name: &str| names.iter().any(|n| n == name);
    let weights: Vec<String> = if has(SINGLE) {
        vec![SINGLE.to_string()]
    } else if let Some(shards) = shards {
        if let Some(missing) = shards.iter().find(|shard| !has(shard)) {
            return Err(format!("{missing}, named in {INDEX}, is missing"));
        }
        shards.to_vec()
    } else {
        let loose = |n: &&String| n.ends_with(".safetensors") && !n.contains('/') && !n.starts_with("adapter_");
        names.iter().filter(loose).cloned().collect()
    };
    let mut files: Vec<String> = names.iter().filter(|n| is_companion(n)).cloned().collect();
    files.sort();
    if !weights.is_empty() {
        missing_shard(&weights)?;
        if !has("config.json") {
            return Err("config.json is missing".to_string());
        }
        if !["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"].iter().any(|n| has(n)) {
            return Err("tokenizer.json is missing (or tokenizer.model, vocab.json, vocab.txt)".to_string());
        }
        files.extend(shards.map(|_| INDEX.to_string()));
        files.extend(weights);
        return Ok(Selection { files, gguf: None });
    }
    let parts = gguf(names)?;
    let gguf = parts.first().cloned();
    files.extend(parts);
    Ok(Selection { files, gguf })
}

/// Whether `name` is a path that stays inside the folder it is put in.
pub(super) fn is_safe(name: &str) -> bool {
    name.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        && !name.contains(['\\', ':'])
        && !name.contains(char::is_control)
}

/// Whether `name` is one of the small files that belong to a checkpoint.
fn is_companion(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
    ];
    let is_data = [".json", ".model", ".jinja"].iter().any(|end| name.ends_with(end));
    let begins = name.starts_with("tokenizer") || name.starts_with("chat_template");
    NAMES.contains(&name) || (begins && is_data && !name.contains('/'))
}

/// The GGUF file to convert from, as its parts in order.
fn gguf(names: &[String]) -> Result<Vec<String>, String> {
    let mut sets: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for name in names {
        let lower = name.to_ascii_lowercase();
        let Some(stem) = lower.strip_suffix(".gguf").and_then(|stem| name.get(..stem.len())) else { continue };
        // Vision projectors and importance matrices stand beside models but are none.
        if lower.contains("mmproj") || lower.contains("imatrix") {
            continue;
        }
        sets.entry(shard(stem).map_or(stem, |(set, ..)| set)).or_default().push(name.clone());
    }
    let rank = |set: &str| {
        let lower = set.to_ascii_lowercase();
        GGUF_ORDER.iter().position(|kind| lower.contains(kind)).unwrap_or(GGUF_ORDER.len())
    };
    let mut problem = None;
    let mut sets: Vec<(&str, Vec<String>)> = sets.into_iter().collect();
    sets.sort_by_key(|(set, _)| rank(set));
    for (_, mut parts) in sets {
        parts.sort();
        match missing_shard(&parts) {
            Ok(()) => return Ok(parts),
            Err(missing) => problem = problem.or(Some(missing)),
        }
    }
    Err(problem.unwrap_or_else(|| {
        let other = |n: &&String| [".bin", ".pt", ".pth", ".nemo", ".onnx", ".h5", ".safetensors"].iter().any(|e| n.ends_with(e));
        match names.iter().find(other) {
            Some(other) => format!("no weights as safetensors or gguf (there is {other})"),
            None => "no weights as safetensors or gguf".to_string(),
        }
    }))
}

/// Splits `set-00002-of-00003` (a name without its extension) into set, number and count.
fn shard(stem: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (set, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(number) || !digits(count) {
        return None;
    }
    Some((set, number.parse().ok()?, count.parse().ok()?))
}

/// Checks that every numbered set among `names` has all of its parts.
fn missing_shard(names: &[String]) -> Result<(), String> {
    let present: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let sets: BTreeSet<(&str, usize, &str)> = names
        .iter()
        .filter_map(|name| {
            let (stem, end) = name.rsplit_once('.')?;
            let (set, _, count) = shard(stem)?;
            Some((set, count, end))
        })
        .collect();
    for (set, count, end) in sets {
        for number in 1..=count {
            let wanted = format!("{set}-{number:05}-of-{count:05}.{end}");
            if !present.contains(wanted.as_str()) {
                return Err(format!("{wanted} is missing"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|n| n.to_string()).collect()
    }

    #[test]
    fn takes_what_is_needed_and_nothing_else() {
        let listing = names(&[
            ".gitattributes",
            "README.md",
            "chat_template.jinja",
            "config.json",
            "consolidated.safetensors",
            "model.safetensors",
            "modeling_custom.py",
            "model-Q8_0.gguf",
            "onnx/model.onnx",
            "onnx/tokenizer.json",
            "pytorch_model.bin",
            "tokenizer.json",
            "tokenizer.py",
            "tokenizer_config.json",
        ]);
        let chosen = select(&listing, None).unwrap();
        let wanted = ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];
        assert_eq!(chosen, Selection { files: names(&wanted), gguf: None });
    }

    #[test]
    fn follows_the_index_into_sub_folders_and_names_a_missing_shard() {
        let index_text = br#"{"weight_map": {"a": "w/1.safetensors", "b": "2.safetensors", "c": "w/1.safetensors"}}"#;
        let shards = shards_of(index_text).unwrap();
        assert_eq!(shards, ["2.safetensors", "w/1.safetensors"]);
        let mut listing = names(&["config.json", "tokenizer.model", INDEX, "2.safetensors", "extra.safetensors"]);
        assert_eq!(index(&listing), Some(INDEX));
        assert_eq!(select(&listing, Some(&shards)), Err(format!("w/1.safetensors, named in {INDEX}, is missing")));
        listing.push("w/1.safetensors".to_string());
        let chosen = select(&listing, Some(&shards)).unwrap();
        assert_eq!(chosen.files, ["config.json", "tokenizer.model", INDEX, "2.safetensors", "w/1.safetensors"]);
    }

    #[test]
    fn refuses_names_that_leave_the_folder() {
        for bad in ["../x", "/etc/x", "a//b", "a\\..\\b", "c:x", "", "a/./b", "a\nb"] {
            assert!(!is_safe(bad), "{bad:?}");
            let text = serde_json::json!({"weight_map": {"t": bad}}).to_string();
            assert!(shards_of(text.as_bytes()).is_err(), "{bad:?}");
        }
        assert!(is_safe("a/b-00001-of-00002.safetensors"));
        assert!(shards_of(b"{").is_err() && shards_of(b"{\"weight_map\": {}}").is_err());
    }

    #[test]
    fn numbered_files_without_an_index_must_be_complete() {
        let listing = names(&["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"]);
        assert_eq!(select(&listing, None), Err("model-00001-of-00002.safetensors is missing".to_string()));
        assert_eq!(
            select(&names(&["config.json", "model.safetensors"]), None).unwrap_err().split(' ').next(),
            Some("tokenizer.json")
        );
        assert_eq!(
            select(&names(&["pytorch_model.bin"]), None).unwrap_err(),
            "no weights as safetensors or gguf (there is pytorch_model.bin)"
        );
    }

    #[test]
    fn picks_one_complete_gguf() {
        let listing =
            names(&["mmproj-F16.gguf", "m-Q4_K_M.gguf", "m-Q6_K.gguf", "big/m-Q8_0-00001-of-00002.gguf", "config.json"]);
        let chosen = select(&listing, None).unwrap();
        assert_eq!(chosen, Selection { files: names(&["config.json", "m-Q6_K.gguf"]), gguf: Some("m-Q6_K.gguf".into()) });
        let mut listing = listing;
        listing.push("big/m-Q8_0-00002-of-00002.gguf".to_string());
        assert_eq!(select(&listing, None).unwrap().gguf.as_deref(), Some("big/m-Q8_0-00001-of-00002.gguf"));
        assert_eq!(select(&names(&["a-00001-of-00002.gguf"]), None), Err("a-00002-of-00002.gguf is missing".to_string()));
    }
}
