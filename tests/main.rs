//! Everything that is tested from outside, in one binary.
//!
//! `CACTUS_TEST_MODELS=FOLDER` adds the real models in FOLDER (see `real_models`), `CACTUS_TEST_LARGE=1` a
//! checkpoint of 4 GB (see `convert`).

mod golden;
mod house;
mod support;
