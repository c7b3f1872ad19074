//! Which block holds which prefix. O(1) per lookup.

use std::collections::HashMap;

use super::BlockId;
use crate::request::BlockHash;

/// Maps chained block hashes to the block that holds them.
///
/// Never iterated: the order of a hash map must not reach a decision.
#[derive(Debug, Default)]
pub(super) struct PrefixIndex {
    blocks: HashMap<BlockHash, BlockId>,
}

impl PrefixIndex {
    pub(super) fn get(&self, hash: BlockHash) -> Option<BlockId> {
        self.blocks.get(&hash).copied()
    }

    /// Enters `block` under `hash` unless another block already stands there.
    pub(super) fn insert(&mut self, hash: BlockHash, block: BlockId) -> bool {
        match self.blocks.entry(hash) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(block);
                true
            }
        }
    }

    pub(super) fn remove(&mut self, hash: BlockHash) {
        self.blocks.remove(&hash);
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }
}
