//! A short list of well-known models, so that a short name is enough and a typing error gets an answer.

/// One well-known model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Short name to type.
    pub alias: &'static str,
    /// `owner/name` on the hub.
    pub repo: &'static str,
    /// Number of parameters, as people write it ("135M").
    pub parameters: &'static str,
    pub family: &'static str,
    /// The licence, as the hub names it.
    pub licence: &'static str,
    /// What it is good for, or what to know before choosing it.
    pub note: &'static str,
}

const fn model(
    alias: &'static str,
    repo: &'static str,
    parameters: &'static str,
    family: &'static str,
    licence: &'static str,
    note: &'static str,
) -> Model {
    Model { alias, repo, parameters, family, licence, note }
}

/// The smallest model, for a first try; it can also be had without the hub.
pub const STARTER: Model = model(
    "smollm2",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "135M",
    "llama",
    "apache-2.0",
    "the starter: tiny, quick, for a first try",
);

/// The model to suggest to someone who wants good answers from a small one.
pub const RECOMMENDED: Model =
    model("qwen3", "Qwen/Qwen3-0.6B", "0.6B", "qwen3", "apache-2.0", "recommended: best answers for its size");

/// The model for vectors.
pub const EMBEDDING: Model = model(
    "minilm",
    "sentence-transformers/all-MiniLM-L6-v2",
    "23M",
    "bert",
    "apache-2.0",
    "vectors of English text, for `cactus embed` and --corpus",
);

/// All well-known models, small ones of a family first.
pub const MODELS: &[Model] = &[
    STARTER,
    model("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "360M", "llama", "apache-2.0", "short answers in English"),
    model("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7B", "llama", "apache-2.0", "general use in English"),
    RECOMMENDED,
    model("qwen3-1.7b", "Qwen/Qwen3-1.7B", "1.7B", "qwen3", "apache-2.0", "many languages, tools, can think first"),
    model("qwen3-4b", "Qwen/Qwen3-4B", "4B", "qwen3", "apache-2.0", "many languages, tools, can think first; wants 4 GB"),
    model("qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct", "0.5B", "qwen2", "apache-2.0", "many languages"),
    model("qwen2.5-coder", "Qwen/Qwen2.5-Coder-0.5B-Instruct", "0.5B", "qwen2", "apache-2.0", "code completion"),
    model("gemma3-270m", "google/gemma-3-270m-it", "270M", "gemma3", "gemma", "needs the Gemma licence accepted on the hub"),
    model("gemma3", "google/gemma-3-1b-it", "1B", "gemma3", "gemma", "needs the Gemma licence accepted on the hub"),
    model(
        "llama3.2",
        "meta-llama/Llama-3.2-1B-Instruct",
        "1B",
        "llama",
        "llama3.2",
        "needs the Llama licence accepted on the hub",
    ),
    EMBEDDING,
];

/// The well-known model that `name` means: its alias, its hub name, or the part of that after the slash; the
/// case of letters does not matter.
pub fn lookup(name: &str) -> Option<&'static Model> {
    MODELS.iter().find(|m| names(m).iter().any(|known| known.eq_ignore_ascii_case(name)))
}

/// The well-known models whose name, family or note has all of `words`; the case of letters does not matter.
pub fn search(words: &str) -> Vec<&'static Model> {
    let words: Vec<String> = words.split_whitespace().map(str::to_ascii_lowercase).collect();
    let text = |m: &Model| format!("{} {} {} {}", m.alias, m.repo, m.family, m.note).to_ascii_lowercase();
    MODELS.iter().filter(|m| words.iter().all(|word| text(m).contains(word.as_str()))).collect()
}

/// Aliases of up to three well-known models whose name looks like `name`, nearest first.
pub fn near(name: &str) -> Vec<&'static str> {
    let typed = name.to_ascii_lowercase();
    let allowed = (typed.chars().count() / 3).max(1);
    let mut close: Vec<(usize, &'static str)> = MODELS
        .iter()
        .filter_map(|m| {
            let distance = names(m).iter().map(|known| distance(&typed, &known.to_ascii_lowercase())).min()?;
            let begins = typed.len() >= 3 && m.alias.starts_with(&typed);
            (begins || distance <= allowed).then_some((if begins { 0 } else { distance }, m.alias))
        })
        .collect();
    close.sort_by_key(|&(distance, _)| distance);
    close.into_iter().take(3).map(|(_, alias)| alias).collect()
}

/// The forms in which people write the name of `m`.
fn names(m: &Model) -> [&'static str; 3] {
    [m.alias, m.repo, m.repo.split('/').next_back().unwrap_or(m.repo)]
}

/// Levenshtein distance: the fewest single-character insertions, deletions and replacements from `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_one_model_each() {
        for m in MODELS {
            assert!(crate::hub::is_repo_id(m.repo), "{}", m.repo);
            for name in names(m) {
                assert_eq!(lookup(&name.to_ascii_uppercase()), Some(m));
            }
        }
        assert_eq!(lookup("nothing"), None);
    }

    #[test]
    fn words_find_models() {
        let aliases = |words| search(words).iter().map(|m| m.alias).collect::<Vec<_>>();
        assert_eq!(aliases("Qwen CODE"), ["qwen2.5-coder"]);
        assert_eq!(aliases("gemma"), ["gemma3-270m", "gemma3"]);
        assert!(aliases("zebra").is_empty());
    }

    #[test]
    fn distances_match_hand_counts() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("flaw", "lawn"), 2);
    }

    #[test]
    fn a_typing_error_finds_the_model() {
        assert_eq!(near("smolm2").first(), Some(&"smollm2"));
        assert_eq!(near("qwen").first(), Some(&"qwen3"));
        assert_eq!(near("Qwen/Qwen3-0.6").first(), Some(&"qwen3"));
        assert!(near("mixtral-8x22b").is_empty());
    }
}
