//! Paged KV accounting, written once and used by both drivers.

pub mod block_pool;
mod prefix_index;

pub use block_pool::{BlockId, BlockPool, Holder, IntegrityError, Naming, Table};
