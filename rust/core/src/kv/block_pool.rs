//! A worker's KV blocks: who holds them, which are cached, which are free.
//!
//! Every block is *held* (pinned by at least one holder), *cached* (held by nobody, content still
//! indexed, evicted oldest first) or *free*. Allocation, release, pinning and eviction are O(1) a
//! block; a prefix lookup is O(1) a block of the prompt. Nothing here depends on hash order.

use super::prefix_index::PrefixIndex;
use crate::request::BlockHash;

/// Index of a block in its worker's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// Why blocks are held: totals per kind must add up (see [`BlockPool::check_integrity`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A request's block table.
    Request,
    /// A transfer that reads or writes the block.
    Transfer,
    /// A quarantine: a transfer failed and its writer has not confirmed that it stopped.
    Quarantine,
}

const NIL: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Block {
    /// Holders by kind: requests, transfers, quarantine.
    holders: [u32; 3],
    hash: Option<BlockHash>,
    /// Neighbours in the list of cached blocks, oldest first.
    older: u32,
    newer: u32,
    in_cache: bool,
}

impl Block {
    fn held(&self) -> bool {
        self.holders != [0; 3]
    }
}

/// The blocks of one worker.
#[derive(Debug)]
pub struct BlockPool {
    block_tokens: u32,
    blocks: Vec<Block>,
    free: Vec<u32>,
    index: PrefixIndex,
    prefix_caching: bool,
    oldest: u32,
    newest: u32,
    num_cached: u32,
}

/// The books do not balance: a bug in the scheduler, never a user's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV block accounting: {what}: {found}, expected {expected}")]
pub struct IntegrityError {
    /// Which sum or state.
    pub what: String,
    /// What was counted.
    pub found: u64,
    /// What it should be.
    pub expected: u64,
}

impl IntegrityError {
    /// An error unless `found == expected`.
    pub fn check(what: impl Into<String>, found: u64, expected: u64) -> Result<(), IntegrityError> {
        if found == expected { Ok(()) } else { Err(IntegrityError { what: what.into(), found, expected }) }
    }
}

impl BlockPool {
    /// A pool of `num_blocks` blocks of `block_tokens` tokens, all free.
    pub fn new(num_blocks: u32, block_tokens: u32, prefix_caching: bool) -> BlockPool {
        let block = Block { holders: [0; 3], hash: None, older: NIL, newer: NIL, in_cache: false };
        BlockPool {
            block_tokens,
            blocks: vec![block; num_blocks as usize],
            free: (0..num_blocks).rev().collect(),
            index: PrefixIndex::default(),
            prefix_caching,
            oldest: NIL,
            newest: NIL,
            num_cached: 0,
        }
    }

    /// Tokens a block holds.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// All blocks.
    pub fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that can be allocated: free ones, and cached ones that would be evicted.
    pub fn num_available(&self) -> u32 {
        self.free.len() as u32 + self.num_cached
    }

    /// Blocks whose content is kept though nobody holds them.
    pub fn num_cached(&self) -> u32 {
        self.num_cached
    }

    /// Blocks that somebody holds.
    pub fn num_held(&self) -> u32 {
        self.num_blocks() - self.num_available()
    }

    /// Blocks that `tokens` tokens take.
    pub fn blocks_for(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.block_tokens))
    }

    /// The blocks that hold the longest known prefix of `hashes`, at most `limit` of them.
    /// Nothing is pinned.
    pub fn lookup(&self, hashes: &[BlockHash], limit: u32) -> Vec<BlockId> {
        if !self.prefix_caching {
            return Vec::new();
        }
        hashes.iter().take(limit as usize).map_while(|hash| self.index.get(*hash)).collect()
    }

    /// How many blocks [`lookup`](BlockPool::lookup) would find.
    pub fn lookup_len(&self, hashes: &[BlockHash], limit: u32) -> u32 {
        if !self.prefix_caching {
            return 0;
        }
        hashes.iter().take(limit as usize).take_while(|hash| self.index.get(**hash).is_some()).count() as u32
    }

    /// How many of `blocks` are cached now: taking them makes so many fewer available.
    pub fn count_unheld(&self, blocks: &[BlockId]) -> u32 {
        blocks.iter().filter(|block| !self.blocks[block.0 as usize].held()).count() as u32
    }

    /// Takes `count` blocks for `holder`, evicting the oldest cached ones when none are free.
    /// The caller has asked [`num_available`](BlockPool::num_available).
    ///
    /// # Panics
    /// When fewer are available.
    pub fn allocate(&mut self, count: u32, holder: Holder, into: &mut Vec<BlockId>) {
        assert!(
            count <= self.num_available(),
            "allocating {count} blocks of {} available",
            self.num_available()
        );
        for _ in 0..count {
            let id = self.free.pop().unwrap_or_else(|| self.evict_oldest());
            self.blocks[id as usize].holders[holder as usize] += 1;
            into.push(BlockId(id));
        }
    }

    /// Adds a holder to blocks that are cached or held.
    pub fn pin(&mut self, blocks: &[BlockId], holder: Holder) {
        for block in blocks {
            if self.blocks[block.0 as usize].in_cache {
                self.unlink(block.0);
            }
            self.blocks[block.0 as usize].holders[holder as usize] += 1;
        }
    }

    /// Lets go of blocks. Those that nobody holds any more become cached if their content is
    /// indexed, free otherwise; the last of `blocks` is evicted first, so prefixes outlive tails.
    ///
    /// # Panics
    /// When `holder` does not hold one of them.
    pub fn release(&mut self, blocks: &[BlockId], holder: Holder) {
        for block in blocks.iter().rev() {
            let entry = &mut self.blocks[block.0 as usize];
            let count = &mut entry.holders[holder as usize];
            *count = count
                .checked_sub(1)
                .unwrap_or_else(|| panic!("{block:?} released by {holder:?} without being held"));
            if entry.held() {
                continue;
            }
            if entry.hash.is_some() {
                self.link_newest(block.0);
            } else {
                self.free.push(block.0);
            }
        }
    }

    /// Enters held blocks into the prefix index under `hashes`, pairwise. A block whose content is
    /// already indexed elsewhere stays unindexed and is freed on release.
    pub fn index(&mut self, blocks: &[BlockId], hashes: &[BlockHash]) {
        if !self.prefix_caching {
            return;
        }
        for (block, hash) in blocks.iter().zip(hashes) {
            let entry = &mut self.blocks[block.0 as usize];
            debug_assert!(entry.held(), "{block:?} indexed while nobody holds it");
            if entry.hash.is_none() && self.index.insert(*hash, *block) {
                entry.hash = Some(*hash);
            }
        }
    }

    /// Forgets all cached content: those blocks become free.
    pub fn clear_cache(&mut self) {
        while self.oldest != NIL {
            let id = self.evict_oldest();
            self.free.push(id);
        }
    }

    /// Forgets all content, of held blocks too: the worker's memory is gone.
    pub fn forget_all(&mut self) {
        self.clear_cache();
        for block in &mut self.blocks {
            if let Some(hash) = block.hash.take() {
                self.index.remove(hash);
            }
        }
    }

    /// Every block is free, cached or held, and the holders add up to what the caller counted:
    /// block-table entries of requests, blocks of transfers, blocks in quarantine.
    pub fn check_integrity(&self, expected_holders: [u64; 3]) -> Result<(), IntegrityError> {
        fn check(what: impl Into<String>, found: u64, expected: u64) -> Result<(), IntegrityError> {
            IntegrityError::check(what, found, expected)
        }
        let mut free = vec![false; self.blocks.len()];
        for id in &self.free {
            check(
                format!("times block {id} is in the free list before this"),
                u64::from(free[*id as usize]),
                0,
            )?;
            free[*id as usize] = true;
        }
        let (mut cached, mut indexed) = (0u64, 0u64);
        let mut holders = [0u64; 3];
        for (id, block) in self.blocks.iter().enumerate() {
            let states = u64::from(free[id]) + u64::from(block.in_cache) + u64::from(block.held());
            check(format!("states of block {id}"), states, 1)?;
            cached += u64::from(block.in_cache);
            if let Some(hash) = block.hash {
                indexed += 1;
                let found = self.index.get(hash).map_or(u64::MAX, |block| u64::from(block.0));
                check(format!("block that the index names for block {id}"), found, id as u64)?;
                check(format!("free blocks with content ({id})"), u64::from(free[id]), 0)?;
            }
            for (sum, count) in holders.iter_mut().zip(block.holders) {
                *sum += u64::from(count);
            }
        }
        check("cached blocks", cached, u64::from(self.num_cached))?;
        check("indexed blocks", self.index.len() as u64, indexed)?;
        let kinds = ["blocks held by requests", "blocks held by transfers", "blocks in quarantine"];
        for ((kind, found), expected) in kinds.into_iter().zip(holders).zip(expected_holders) {
            check(kind, found, expected)?;
        }
        Ok(())
    }

    fn link_newest(&mut self, id: u32) {
        let older = self.newest;
        let block = &mut self.blocks[id as usize];
        (block.older, block.newer, block.in_cache) = (older, NIL, true);
        match older {
            NIL => self.oldest = id,
            older => self.blocks[older as usize].newer = id,
        }
        self.newest = id;
        self.num_cached += 1;
    }

    fn unlink(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        let (older, newer) = (block.older, block.newer);
        (block.older, block.newer, block.in_cache) = (NIL, NIL, false);
        match older {
            NIL => self.oldest = newer,
            older => self.blocks[older as usize].newer = newer,
        }
        match newer {
            NIL => self.newest = older,
            newer => self.blocks[newer as usize].older = older,
        }
        self.num_cached -= 1;
    }

    fn evict_oldest(&mut self) -> u32 {
        let id = self.oldest;
        self.unlink(id);
        if let Some(hash) = self.blocks[id as usize].hash.take() {
            self.index.remove(hash);
        }
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash(u128::from(n))
    }

    #[test]
    fn a_released_prefix_is_found_again_until_it_is_evicted() {
        let mut pool = BlockPool::new(4, 16, true);
        let mut table = Vec::new();
        pool.allocate(3, Holder::Request, &mut table);
        pool.index(&table, &[hash(1), hash(2)]);
        pool.release(&table, Holder::Request);
        assert_eq!((pool.num_cached(), pool.num_available()), (2, 4));
        assert_eq!(pool.lookup(&[hash(1), hash(2), hash(3)], 9), table[..2]);

        let mut other = Vec::new();
        pool.allocate(3, Holder::Request, &mut other);
        assert_eq!(pool.lookup(&[hash(1), hash(2)], 9), table[..1], "tails go before prefixes");
        pool.check_integrity([3, 0, 0]).unwrap();
    }

    #[test]
    fn a_block_with_a_pending_send_is_not_evicted() {
        let mut pool = BlockPool::new(2, 16, true);
        let (mut table, mut other) = (Vec::new(), Vec::new());
        pool.allocate(2, Holder::Request, &mut table);
        pool.pin(&table, Holder::Transfer);
        pool.release(&table, Holder::Request);
        assert_eq!(pool.num_available(), 0);
        pool.release(&table, Holder::Transfer);
        pool.allocate(2, Holder::Request, &mut other);
        pool.check_integrity([2, 0, 0]).unwrap();
    }

    #[test]
    #[should_panic(expected = "released by Request without being held")]
    fn releasing_twice_is_a_bug_that_says_so() {
        let mut pool = BlockPool::new(1, 16, true);
        let mut table = Vec::new();
        pool.allocate(1, Holder::Request, &mut table);
        pool.release(&table, Holder::Request);
        pool.release(&table, Holder::Request);
    }

    proptest! {
        /// Any sequence of allocations, pins, releases and prefix reuse keeps the books balanced.
        #[test]
        fn books_balance(ops in prop::collection::vec((0u8..5, any::<prop::sample::Index>(), 1u32..5, 0u8..6), 1..120)) {
            let mut pool = BlockPool::new(12, 16, true);
            let mut tables: Vec<(Vec<BlockId>, bool)> = Vec::new();
            for (op, pick, count, family) in ops {
                let hashes: Vec<_> = (0..count as u8).map(|i| hash(family * 16 + i)).collect();
                match op {
                    0 | 1 => {
                        let mut table = pool.lookup(&hashes, count);
                        let missing = count - table.len() as u32;
                        if missing + pool.count_unheld(&table) <= pool.num_available() {
                            pool.pin(&table, Holder::Request);
                            pool.allocate(missing, Holder::Request, &mut table);
                            pool.index(&table, &hashes);
                            tables.push((table, false));
                        }
                    }
                    2 if !tables.is_empty() => {
                        let entry = pick.get(&tables).clone();
                        if !entry.1 {
                            pool.pin(&entry.0, Holder::Transfer);
                            let at = tables.iter().position(|t| *t == entry).unwrap();
                            tables[at].1 = true;
                        }
                    }
                    3 if !tables.is_empty() => {
                        let at = pick.index(tables.len());
                        let (table, sent) = tables.swap_remove(at);
                        pool.release(&table, Holder::Request);
                        if sent { pool.release(&table, Holder::Transfer); }
                    }
                    _ => if count == 4 { pool.clear_cache() },
                }
                let held: u64 = tables.iter().map(|t| t.0.len() as u64).sum();
                let sent: u64 = tables.iter().filter(|t| t.1).map(|t| t.0.len() as u64).sum();
                pool.check_integrity([held, sent, 0]).unwrap();
            }
            for (table, sent) in tables.drain(..) {
                pool.release(&table, Holder::Request);
                if sent { pool.release(&table, Holder::Transfer); }
            }
            prop_assert_eq!(pool.num_available(), 12);
            pool.clear_cache();
            prop_assert_eq!(pool.num_cached(), 0);
        }
    }
}
