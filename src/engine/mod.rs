//! From messages to text: tokenizer, chat template, sampler, session, generation.

pub mod chat;
mod python_json;
pub mod sampler;
pub mod stream;
pub mod tokenizer;
