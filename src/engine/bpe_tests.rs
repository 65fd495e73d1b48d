use super::*;
use serde_json::{Value, json};
use tokenizers::models::bpe::BPE;

/// A stream of numbers below `n` (a linear congruential generator).
fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed;
    move |n| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    }
}

/// A vocabulary of a few letters, with merges that compete; some letters and some bytes are missing.
fn model(seed: u64, fuse: bool, bytes: bool, ignore: bool, unknown: bool, lines: bool) -> Value {
    let mut random = random(seed);
    let mut texts: Vec<String> = ["<unk>", "a", "b", "c", "é", "▁"].map(str::to_owned).to_vec();
    if bytes {
        // All bytes of `ü`, one of those of `ß`.
        texts.extend(["<0xC3>", "<0xBC>", "<0x9F>"].map(str::to_owned));
        texts.retain(|t| seed.is_multiple_of(2) || t != "<0x9F>");
    }
    let mut merges: Vec<(String, String)> = Vec::new();
    for _ in 0..40 {
        let (a, b) = (texts[1 + random(texts.len() - 1)].clone(), texts[1 + random(texts.len() - 1)].clone());
        let joined = format!("{a}{b}");
        if joined.len() < 12 && !joined.contains('<') {
            if !texts.contains(&joined) {
                texts.push(joined);
            }
            merges.push((a, b));
        }
    }
    let vocab: serde_json::Map<String, Value> = texts.into_iter().enumerate().map(|(id, text)| (text, json!(id))).collect();
    let merges: Vec<Value> = merges.iter().map(|(a, b)| if lines { json!(format!("{a} {b}")) } else { json!([a, b]) }).collect();
    json!({"type": "BPE", "dropout": null, "unk_token": unknown.then_some("<unk>"), "continuing_subword_prefix": null,
           "end_of_word_suffix": null, "fuse_unk": fuse, "byte_fallback": bytes, "ignore_merges": ignore,
           "vocab": vocab, "merges": merges})
}

fn open(model: &Value) -> BytePairs {
    let image = image(&json!({"model": model}).to_string(), "{}", "here").unwrap().unwrap();
    BytePairs::open(image, "here").unwrap().0
}

#[test]
fn tokens_are_those_of_the_crate() {
    use tokenizers::Model;
    for seed in 0..64 {
        let switch = |bit: u64| seed >> bit & 1 == 1;
        let model = model(seed * 7 + 3, switch(0), switch(1), switch(2), switch(3), switch(4));
        let truth: BPE = serde_json::from_str(&model.to_string()).unwrap();
        let ours = open(&model);
        assert_eq!(ours.get_vocab(), truth.get_vocab());
        assert_eq!(ours.get_vocab_size(), truth.get_vocab_size());
        let mut random = random(seed);
        for _ in 0..60 {
            let length = random(24);
            let text: String = (0..length).map(|_| ['a', 'b', 'c', 'é', '▁', 'ü', 'ß', 'x'][random(8)]).collect();
            let (a, b) = (ours.tokenize(&text).unwrap(), truth.tokenize(&text).unwrap());
            assert_eq!(a, b, "seed {seed}: {text}");
        }
        for id in 0..ours.get_vocab_size() as u32 + 2 {
            assert_eq!(ours.id_to_token(id), truth.id_to_token(id));
        }
        assert_eq!((ours.token_to_id("é"), ours.token_to_id("nowhere")), (truth.token_to_id("é"), None));
    }
}

#[test]
fn ids_may_have_gaps() {
    use tokenizers::Model;
    let model = json!({"type": "BPE", "vocab": {"a": 2, "b": 5, "ab": 9}, "merges": ["a b"]});
    let ours = open(&model);
    assert_eq!(ours.tokenize("abb").unwrap().iter().map(|t| t.id).collect::<Vec<_>>(), [9, 5]);
    assert_eq!([0, 2, 3, 9, 10].map(|id| ours.id_to_token(id)), [None, Some("a".into()), None, Some("ab".into()), None]);
}

#[test]
fn what_is_not_plain_byte_pairs_is_left_to_the_crate() {
    let plain = json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]});
    let image_of = |model: &Value| image(&json!({"model": model}).to_string(), "{}", "");
    assert!(image_of(&plain).unwrap().is_some());
    let with = |key: &str, value: Value| {
        let mut model = plain.clone();
        model[key] = value;
        image_of(&model).unwrap()
    };
    for (key, value) in [
        ("type", json!("WordPiece")),
        ("dropout", json!(0.1)),
        ("continuing_subword_prefix", json!("##")),
        ("end_of_word_suffix", json!("</w>")),
        ("unk_token", json!("?")),
        ("vocab", json!({"a": 0, "b": 0, "ab": 2})),
        ("vocab", json!({"a": 0, "b": 1, "ab": 4_000_000_000u32})),
    ] {
        assert!(with(key, value).is_none(), "{key}");
    }
    let mut broken = plain.clone();
    broken["merges"] = json!(["a c"]);
    assert_eq!(
        image_of(&broken).err().unwrap().to_string(),
        "not a usable tokenizer: a merge has `c`, which is not in the vocabulary"
    );
}

#[test]
fn other_and_damaged_images_are_not_used() {
    use tokenizers::Model;
    let model = model(5, true, true, false, true, false);
    let image = image(&json!({"model": model}).to_string(), "{\"rest\": 1}", "one").unwrap().unwrap();
    assert_eq!(BytePairs::open(image.clone(), "one").unwrap().1, "{\"rest\": 1}");
    assert!(BytePairs::open(image.clone(), "two").is_none());
    for length in 0..image.len() {
        assert!(BytePairs::open(image[..length].to_vec(), "one").is_none());
    }
    // Whatever stands in the tables, nothing panics or hangs.
    for at in 0..image.len() {
        let mut damaged = image.clone();
        damaged[at] ^= 0xff;
        if let Some((tables, _)) = BytePairs::open(damaged, "one") {
            let _ = (tables.tokenize("abcab▁üxé"), tables.get_vocab(), tables.id_to_token(7));
        }
    }
}
