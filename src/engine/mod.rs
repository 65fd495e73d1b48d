//! From messages to text: tokenizer, chat template, sampler, session, generation.

mod bpe;
pub mod calibration_text;
pub mod chat;
pub mod confidence;
pub mod constrain;
pub mod conversation;
pub mod draft;
mod draft_model;
pub mod embed;
pub mod evaluate;
pub mod ffi;
pub mod fields;
pub mod generate;
pub mod handle;
pub mod load;
mod own_file;
mod prompt_cache;
mod python_json;
pub mod response;
pub mod retrieve;
pub mod sampler;
pub mod schedule;
pub mod self_text;
pub mod service;
pub mod session;
pub mod stream;
pub mod thinking;
pub mod tokenizer;
pub mod tools;
mod vocabulary;
pub mod writing;

pub use embed::{Embedder, Embedding};
pub use generate::{Answer, Finish, Request, generate};
pub use load::{Engine, Footprint, LoadOptions, LoadTimes};
pub use prompt_cache::Restored;
pub use session::Session;
