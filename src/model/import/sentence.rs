//! What the sentence-transformers library keeps beside the weights of an embedding model: which steps follow the
//! network, how hidden states become a vector, how long texts may be.

use super::folder::read_json;
use crate::error::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// The files as far as they are there.
#[derive(Clone, Debug, Default)]
pub struct SentenceFiles {
    /// Type names of the steps in `modules.json`, the part after the last dot: `Transformer`, `Pooling`, `Normalize`.
    pub steps: Option<Vec<String>>,
    /// `config.json` in the folder of the step `Pooling`.
    pub pooling: Option<Value>,
    /// `max_seq_length` of `sentence_bert_config.json`: tokens of a text, special tokens included.
    pub max_tokens: Option<usize>,
    /// `do_lower_case` of the same file: text is made lower case before it is tokenised.
    pub lower_case: bool,
}

/// Reads what is in `dir`.
pub(super) fn read(dir: &Path) -> Result<SentenceFiles> {
    let path = dir.join("modules.json");
    let mut files = SentenceFiles::default();
    let mut pooling = "1_Pooling".to_owned();
    if let Some(text) = super::folder::read_text(&path)? {
        let modules: Vec<Value> = super::folder::parse_json(&path, &text)?;
        let mut steps = Vec::new();
        for module in &modules {
            let Some(kind) = module["type"].as_str() else {
                return Err(Error::bad_file(&path, "a step without a type"));
            };
            let kind = kind.rsplit('.').next().unwrap_or_default();
            if let Some(folder) = module["path"].as_str().filter(|folder| kind == "Pooling" && is_name(folder)) {
                pooling = folder.to_owned();
            }
            steps.push(kind.to_owned());
        }
        files.steps = Some(steps);
    }
    files.pooling = read_json(&dir.join(pooling).join("config.json"))?;
    if let Some(limits) = read_json(&dir.join("sentence_bert_config.json"))? {
        files.max_tokens = limits["max_seq_length"].as_u64().and_then(|n| usize::try_from(n).ok());
        files.lower_case = limits["do_lower_case"] == true;
    }
    Ok(files)
}

/// Whether a folder is named that lies in the model's own.
fn is_name(folder: &str) -> bool {
    !folder.is_empty() && !folder.contains(['/', '\\', ':']) && folder != ".." && folder != "."
}
