//! The wall-clock driver of the kvrelay scheduler: real workers, KV transfer.

pub mod backend;
