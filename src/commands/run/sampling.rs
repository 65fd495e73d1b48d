//! The options that say how tokens are chosen, and how many.

use crate::commands::settings::{self, Key};
use cactus::engine::Request;
use cactus::engine::sampler::Sampling;
use cactus::error::{Error, Result};

/// How tokens are chosen. What is not given comes from the settings.
#[derive(clap::Args, Clone)]
pub struct SamplingArgs {
    /// Tokens of the answer at most [default: 1024]
    #[arg(long, allow_negative_numbers = true)]
    pub max_tokens: Option<usize>,
    /// 0 always takes the likeliest token [default: 0]
    #[arg(long, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Only the K likeliest tokens, 0 for all [default: 0]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together reach this probability [default: 1]
    #[arg(long, allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Only tokens at least this likely in proportion to the likeliest [default: 0]
    #[arg(long, allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Makes tokens of the last 64 less likely, 1 for no effect [default: 1.1]
    #[arg(long, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// The same seed gives the same answer [default: 0]
    #[arg(long, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Ends the answer; may be given several times
    #[arg(long, conflicts_with = "form")]
    pub stop: Vec<String>,
    /// Do not guess tokens from earlier text and check several at once. Answers are the same, but slower where they
    /// repeat what stands before them
    #[arg(long)]
    pub no_draft: bool,
}

impl SamplingArgs {
    pub fn request(&self) -> Result<Request> {
        let set = settings::current();
        let below = set.sampling();
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(below.temperature),
            top_k: self.top_k.unwrap_or(below.top_k),
            top_p: self.top_p.unwrap_or(below.top_p),
            min_p: self.min_p.unwrap_or(below.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(below.repetition_penalty),
            seed: self.seed.unwrap_or(below.seed),
            ..below
        };
        sampling.validate()?;
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::usage("an empty stop text would end every answer at once"));
        }
        let max_tokens = self.max_tokens.or_else(|| set.whole(Key::MaxTokens).map(|n| n as usize)).unwrap_or(1024);
        Ok(Request { sampling, max_tokens, stops: self.stop.clone(), draft: !self.no_draft, ..Request::default() })
    }
}
