//! Finding and fetching checkpoints, and the local cache.
