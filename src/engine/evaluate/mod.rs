//! What fewer bits cost: distance to a reference model on text and chats, and right answers on tasks.
//!
//! Definitions, formulas and their sources are in `docs/evaluation.md`.

mod compare;
pub mod metrics;
pub mod python;
mod reference;
mod score;
pub mod task;
mod text;

pub use compare::{Divergence, Progress, Scores, Summary, reference_key, score, scored, write_reference};
pub use reference::{Key, Reader, Row};
pub use score::{Scorer, Sequence};
pub use text::{chats, chunks};
