//! Reading a `tokenizer.json`: the vocabulary as ready tables where that can be ([`super::bpe`]), everything around
//! it as the `tokenizers` crate has it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{
    AddedToken, DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Token,
    TokenizerImpl,
};

use super::bpe::{self, BytePairs};
use crate::error::{Error, Kind, Result};

/// From pieces of text to ids.
pub enum Vocabulary {
    BytePairs(BytePairs),
    /// Everything else.
    Crate(Box<ModelWrapper>),
}

/// The crate's tokenizer around it.
pub type Inner = TokenizerImpl<Vocabulary, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Reads a `tokenizer.json` with the tables kept in `image`. They are made again when it was written since.
pub fn open_kept(tokenizer_json: &Path, image: &Path) -> Result<Inner> {
    let source = source(tokenizer_json).unwrap_or_default();
    let kept = std::fs::read(image).ok().and_then(|bytes| BytePairs::open(bytes, &source));
    let inner = match kept {
        Some((vocabulary, rest)) => assemble(Vocabulary::BytePairs(vocabulary), &rest),
        None => {
            let text = std::fs::read_to_string(tokenizer_json).map_err(|e| Error::io("read", tokenizer_json, &e))?;
            parse(&text, &source, |bytes| keep(image, bytes))
        }
    };
    inner.map_err(|e| e.context(tokenizer_json.display()))
}

impl Model for Vocabulary {
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Vocabulary::BytePairs(model) => model.tokenize(text),
            Vocabulary::Crate(model) => model.tokenize(text),
        }
    }
    fn token_to_id(&self, text: &str) -> Option<u32> {
        match self {
            Vocabulary::BytePairs(model) => model.token_to_id(text),
            Vocabulary::Crate(model) => model.token_to_id(text),
        }
    }
    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Vocabulary::BytePairs(model) => model.id_to_token(id),
            Vocabulary::Crate(model) => model.id_to_token(id),
        }
    }
    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Vocabulary::BytePairs(model) => model.get_vocab(),
            Vocabulary::Crate(model) => model.get_vocab(),
        }
    }
    fn get_vocab_size(&self) -> usize {
        match self {
            Vocabulary::BytePairs(model) => model.get_vocab_size(),
            Vocabulary::Crate(model) => model.get_vocab_size(),
        }
    }
    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("vocabularies are not written".into())
    }
    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

/// A `tokenizer.json` with its model left out.
#[derive(Deserialize)]
struct Rest {
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Option<NormalizerWrapper>,
    #[serde(default)]
    pre_tokenizer: Option<PreTokenizerWrapper>,
    #[serde(default)]
    post_processor: Option<PostProcessorWrapper>,
    #[serde(default)]
    decoder: Option<DecoderWrapper>,
}

/// Reads a `tokenizer.json`. `keep` gets the image of the vocabulary, marked with `source`, if there can be one.
pub fn parse(json: &str, source: &str, keep: impl FnOnce(&[u8])) -> Result<Inner> {
    #[derive(Deserialize)]
    struct Split {
        #[serde(rename = "model")]
        _model: IgnoredAny,
        #[serde(flatten)]
        rest: serde_json::Map<String, Value>,
    }
    #[derive(Deserialize)]
    struct Whole {
        model: ModelWrapper,
    }
    let split: Split = serde_json::from_str(json).map_err(unusable)?;
    let rest = Value::Object(split.rest).to_string();
    if let Some(image) = bpe::image(json, &rest, source)? {
        keep(&image);
        if let Some((vocabulary, rest)) = BytePairs::open(image, source) {
            return assemble(Vocabulary::BytePairs(vocabulary), &rest);
        }
    }
    let whole: Whole = serde_json::from_str(json).map_err(unusable)?;
    assemble(Vocabulary::Crate(Box::new(whole.model)), &rest)
}

/// Puts a tokenizer together. The truncation and padding of the training run, which published files may carry,
/// are left out.
fn assemble(vocabulary: Vocabulary, rest: &str) -> Result<Inner> {
    let rest: Rest = serde_json::from_str(rest).map_err(unusable)?;
    if let Some(version) = rest.version.filter(|version| version != "1.0") {
        return Err(unusable(format!("version {version} is unknown")));
    }
    let mut inner = Inner::new(vocabulary);
    inner.with_normalizer(rest.normalizer).map_err(failed)?;
    inner.with_pre_tokenizer(rest.pre_tokenizer);
    inner.with_post_processor(rest.post_processor);
    inner.with_decoder(rest.decoder);
    inner.add_tokens(rest.added_tokens).map_err(failed)?;
    Ok(inner)
}

/// What tells whether a file is still the one that an image was made of.
fn source(path: &Path) -> Option<String> {
    let data = std::fs::metadata(path).ok()?;
    let written = data.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{} bytes, {} ns", data.len(), written.as_nanos()))
}

/// Writes an image if that is possible; nothing depends on it.
fn keep(path: &Path, image: &[u8]) {
    let part = path.with_extension(format!("{}.part", std::process::id()));
    if std::fs::write(&part, image).and_then(|()| std::fs::rename(&part, path)).is_err() {
        let _ = std::fs::remove_file(&part);
    }
}

fn unusable(error: impl ToString) -> Error {
    Error::new(Kind::BadFile, format!("not a usable tokenizer: {}", first_line(error)))
}

pub fn failed(error: tokenizers::Error) -> Error {
    Error::new(Kind::BadFile, format!("cannot tokenize: {}", first_line(error)))
}

fn first_line(error: impl ToString) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}
