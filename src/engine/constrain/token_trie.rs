//! A model's tokens as a grammar sees them: the bytes of each, and how forced text becomes tokens.

use super::super::stream::Decoding;
use super::super::tokenizer::Tokenizer;
use super::numbers::Lengthening;
use crate::error::{Error, Result};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use std::sync::Arc;

/// Bytes of a token at most; longer ones are never allowed.
const LONGEST: usize = 1024;

/// Made once for a model and shared by all its answers.
pub struct TokenTrie {
    factory: ParserFactory,
    /// Tokens that begin with white space.
    pub(super) spaces: SimpleVob,
    /// Tokens that could make a number too large.
    pub(super) lengthening: Lengthening,
    /// All tokens but those that end an answer.
    pub(super) no_end: SimpleVob,
    /// The model has a token that ends an answer.
    pub(super) has_end: bool,
    /// Decoding takes away a space that an answer begins with.
    pub(super) drops_space: bool,
    /// Text that a grammar forces can be given as tokens.
    pub(super) forces: bool,
}

impl TokenTrie {
    /// `width`: logits of a token; ids from the end of the vocabulary up to there have no text.
    ///
    /// # Errors
    /// `Unsupported` for a tokenizer whose tokens have no bytes of their own.
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, width: usize) -> Result<Self> {
        let drops_space = match tokenizer.decoding() {
            Decoding::Other => {
                return Err(Error::unsupported("the tokenizer of this model joins tokens in a way that no grammar can follow"));
            }
            Decoding::ByteLevel => false,
            Decoding::Pieces { strip, .. } => *strip > 0,
            Decoding::Metaspace { strip_first, .. } => *strip_first,
        };
        let ends: Vec<TokenId> = tokenizer.eos_ids().iter().copied().filter(|id| (*id as usize) < width).collect();
        let words: Vec<Vec<u8>> = (0..width).map(|id| word(tokenizer, id as u32)).collect();
        let count = u32::try_from(width).map_err(|_| Error::unsupported(format!("a vocabulary of {width} tokens")))?;
        let mut trie = TokTrie::from(&TokRxInfo::new(count, ends.first().copied().unwrap_or(NO_TOKEN)), &words);
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(&ends);
        }
        let (mut spaces, mut no_end) = (SimpleVob::alloc(width), SimpleVob::alloc_ones(width));
        for (id, word) in (0..).zip(&words) {
            if word.first().is_some_and(u8::is_ascii_whitespace) {
                spaces.allow_token(id);
            }
        }
        ends.iter().for_each(|id| no_end.disallow_token(*id));
        let lengthening = Lengthening::new(&words);
        let mut env = Tokens { trie, tokenizer: tokenizer.clone(), canonical: true };
        env.canonical =
            ["{\"name\": \"a b\", \"n\": -1}", " a", "{\n  \"x\":[", "\"é\n"].iter().all(|text| env.encode(text).is_some());
        let forces = env.canonical;
        let factory = factory(Arc::new(env), forces)?;
        Ok(TokenTrie { factory, spaces, lengthening, no_end, has_end: !ends.is_empty(), drops_space, forces })
    }

    /// The bytes of a token; a control token is its spelling.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let trie = self.factory.tok_env().tok_trie();
        let bytes = if (id as usize) < trie.vocab_size() { trie.token(id) } else { &[] };
        bytes.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]).unwrap_or(bytes)
    }

    pub(super) fn matcher(&self, grammar: TopLevelGrammar) -> Matcher {
        Matcher::new(self.factory.create_parser(grammar))
    }
}

/// For a model without a token that ends an answer.
const NO_TOKEN: TokenId = TokenId::MAX;

/// What makes matchers; it writes nothing to the terminal.
pub(super) fn factory(env: TokEnv, forces: bool) -> Result<ParserFactory> {
    let abilities = InferenceCapabilities { ff_tokens: forces, ..Default::default() };
    let made = ParserFactory::new(&env, abilities, &SlicedBiasComputer::general_slices());
    let mut factory = made.map_err(|e| Error::unsupported(format!("no grammars with this tokenizer: {e}")))?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits { verbose_errors: false, ..Default::default() };
    Ok(factory)
}

/// The bytes of a token. A control token is its spelling behind a mark that no text has, so that only a grammar that
/// names it allows it.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = if tokenizer.is_hidden(id) || tokenizer.is_control(id) {
        let text = tokenizer.token_text(id).unwrap_or_default();
        [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat()
    } else {
        // Bytes that are no text, 0xff among them, can be no part of an answer that a grammar describes.
        tokenizer.token_bytes(id).filter(|bytes| !bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER)).unwrap_or_default()
    };
    if bytes.len() <= LONGEST { bytes } else { Vec::new() }
}

struct Tokens {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    canonical: bool,
}

impl Tokens {
    /// The tokens that the model was trained to see for a text; `None` where they do not spell it.
    fn encode(&self, text: &str) -> Option<Vec<TokenId>> {
        let ids = self.tokenizer.encode_within(text).ok()?;
        let spelled = ids.iter().all(|id| (*id as usize) < self.trie.vocab_size());
        (spelled && self.trie.decode_raw(&ids) == text.as_bytes()).then_some(ids)
    }
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| self.encode(text).unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()));
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}
