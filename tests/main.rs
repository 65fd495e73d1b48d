//! Everything that is tested from outside, in one binary.
//!
//! `CACTUS_TEST_MODELS=FOLDER` adds the real models in FOLDER (see `real_models`), `CACTUS_TEST_LARGE=1` makes
//! the checkpoint of `convert` 4 GB large.

mod benchmark;
mod c_api;
mod cli;
mod constrain;
mod convert;
mod corpus;
mod embeddings;
mod eval;
mod export;
mod golden;
mod grids;
mod house;
mod hub;
mod models;
mod official;
mod pains;
mod pipes;
mod prompt_cache;
mod real_models;
mod repl;
mod resume;
mod schedule;
mod serve;
mod support;
mod tools;
