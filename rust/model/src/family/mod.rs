//! One file an architecture.

pub mod llama;
