//! Names of KV blocks by their content.
//!
//! The digest, version 1: a block's hash is the first 128 bits, read as a little-endian number, of
//! `SHA-256("kvrelay-kv-block-v1" || previous || ids)`, where `previous` is the hash of the block
//! before it (16 bytes, little-endian; zero for the first) and `ids` are the block's token ids (4
//! bytes each, little-endian). So it is the same in every process and on every machine, and equal
//! hashes mean equal prefixes.

use kvrelay_core::request::BlockHash;
use sha2::{Digest, Sha256};

const VERSION: &[u8] = b"kvrelay-kv-block-v1";

/// Hashes a growing sequence of tokens, block by block.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    block_tokens: usize,
    hashes: Vec<BlockHash>,
}

impl BlockHasher {
    /// For blocks of `block_tokens` tokens.
    ///
    /// # Panics
    /// When `block_tokens` is 0.
    pub fn new(block_tokens: u32) -> BlockHasher {
        assert!(block_tokens > 0, "a block holds at least 1 token");
        BlockHasher { block_tokens: block_tokens as usize, hashes: Vec::new() }
    }

    /// Hashes the full blocks of `tokens` that were not there before; `tokens` continues what was
    /// given the last time.
    pub fn extend(&mut self, tokens: &[u32]) -> &[BlockHash] {
        for block in tokens.chunks_exact(self.block_tokens).skip(self.hashes.len()) {
            let previous = self.hashes.last().map_or(0, |hash| hash.0);
            self.hashes.push(chain(previous, block));
        }
        &self.hashes
    }
}

fn chain(previous: u128, ids: &[u32]) -> BlockHash {
    let mut digest = Sha256::new();
    digest.update(VERSION);
    digest.update(previous.to_le_bytes());
    for id in ids {
        digest.update(id.to_le_bytes());
    }
    let digest = digest.finalize();
    let mut first = [0; 16];
    first.copy_from_slice(&digest[..16]);
    BlockHash(u128::from_le_bytes(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_prefixes_have_equal_hashes_and_nothing_else_has() {
        let tokens: Vec<u32> = (0..70).collect();
        let all = BlockHasher::new(16).extend(&tokens).to_vec();
        assert_eq!(all.len(), 4);
        let mut grown = BlockHasher::new(16);
        for end in [3, 16, 47, 70] {
            assert_eq!(grown.extend(&tokens[..end]), &all[..end / 16]);
        }
        let mut other = tokens.clone();
        other[20] = 9_999;
        let other = BlockHasher::new(16).extend(&other).to_vec();
        assert_eq!(other[0], all[0]);
        assert!(all[1..].iter().all(|hash| !other.contains(hash)));
    }

    /// The digest is a promise to other processes: this number never changes.
    #[test]
    fn the_digest_is_pinned() {
        let hashes = BlockHasher::new(2).extend(&[1, 2, 3, 4]).to_vec();
        assert_eq!(hashes, PINNED.map(BlockHash));
    }

    /// `hashlib.sha256(b"kvrelay-kv-block-v1" + previous + ids).digest()[:16]`, little-endian.
    const PINNED: [u128; 2] = [0x6d072fdbacfe1bf8ae8e8c4bb3128e26, 0x2e3e6e3d8e304221e54ab381e17b0502];
}
