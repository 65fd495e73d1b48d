//! CQ weight formats: what the bytes mean, how they are made.
