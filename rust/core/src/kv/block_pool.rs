//! A worker's KV blocks: who holds them, which are cached, which are free.
//!
//! Every block is *held* (pinned by at least one holder), *cached* (held by nobody, content still
//! indexed, evicted oldest first) or *free*. Allocation, release, pinning and eviction are O(1) a
//! block; a prefix lookup is O(1) a block of the prompt. Nothing here depends on hash order.
//!
//! A driver without real memory needs no names for blocks whose content nobody else can have: with
//! [`Naming::Shareable`] those are only counted, and all of a table's together cost O(1). What is
//! available, and what is evicted when, is the same either way.

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

/// Which blocks have names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// All: someone reads and writes them.
    All,
    /// Those whose content others may share; the rest is only counted.
    Shareable,
}

/// Blocks held together, in the order of their tokens: some by name, and then a number of others.
#[derive(Clone, Debug, Default)]
pub struct Table {
    named: Vec<BlockId>,
    lot: Option<u32>,
    unnamed: u32,
}

impl Table {
    /// How many blocks.
    pub fn len(&self) -> u32 {
        self.named.len() as u32 + self.unnamed
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those that have names; they come first.
    pub fn named(&self) -> &[BlockId] {
        &self.named
    }

    /// The table without its first `count` blocks, which have names.
    pub fn skip(&self, count: u32) -> Table {
        Table { named: self.named[count as usize..].to_vec(), ..*self }
    }
}

/// The unnamed blocks of one table.
#[derive(Clone, Copy, Debug)]
struct Lot {
    count: u32,
    holders: [u32; 3],
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
    naming: Naming,
    /// Blocks that are free or unnamed and held: as many of them as `num_unnamed` are taken.
    free: Vec<u32>,
    num_unnamed: u32,
    lots: Vec<Lot>,
    free_lots: Vec<u32>,
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
    pub fn new(num_blocks: u32, block_tokens: u32, prefix_caching: bool, naming: Naming) -> BlockPool {
        let block = Block { holders: [0; 3], hash: None, older: NIL, newer: NIL, in_cache: false };
        BlockPool {
            block_tokens,
            blocks: vec![block; num_blocks as usize],
            naming,
            free: (0..num_blocks).rev().collect(),
            num_unnamed: 0,
            lots: Vec::new(),
            free_lots: Vec::new(),
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
        self.free.len() as u32 + self.num_cached - self.num_unnamed
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
    pub fn lookup(&self, hashes: &[BlockHash], limit: u32) -> Table {
        if !self.prefix_caching {
            return Table::default();
        }
        let found = hashes.iter().take(limit as usize).map_while(|hash| self.index.get(*hash));
        Table { named: found.collect(), ..Table::default() }
    }

    /// How many blocks [`lookup`](BlockPool::lookup) would find.
    pub fn lookup_len(&self, hashes: &[BlockHash], limit: u32) -> u32 {
        if !self.prefix_caching {
            return 0;
        }
        hashes.iter().take(limit as usize).take_while(|hash| self.index.get(**hash).is_some()).count() as u32
    }

    /// How many blocks of `table` are cached now: taking them makes so many fewer available.
    pub fn count_unheld(&self, table: &Table) -> u32 {
        table.named.iter().filter(|block| !self.blocks[block.0 as usize].held()).count() as u32
    }

    /// Makes `table`, which `holder` alone holds, `len` blocks long, evicting the oldest cached ones
    /// when none are free. The content of its first `shareable` blocks may be shared. The caller has
    /// asked [`num_available`](BlockPool::num_available).
    ///
    /// # Panics
    /// When fewer are available.
    pub fn extend(&mut self, table: &mut Table, len: u32, shareable: u32, holder: Holder) {
        let missing = len.saturating_sub(table.len());
        assert!(
            missing <= self.num_available(),
            "allocating {missing} blocks of {} available",
            self.num_available()
        );
        let to_name = match self.naming {
            Naming::All => missing,
            Naming::Shareable if table.lot.is_some() => 0,
            Naming::Shareable => shareable.min(len).saturating_sub(table.len()),
        };
        for _ in 0..to_name {
            self.evict_until_free(1);
            let id = self.free.pop().expect("one was made free");
            self.blocks[id as usize].holders[holder as usize] += 1;
            table.named.push(BlockId(id));
        }
        let unnamed = missing - to_name;
        if unnamed == 0 {
            return;
        }
        self.evict_until_free(unnamed);
        self.num_unnamed += unnamed;
        table.unnamed += unnamed;
        match table.lot {
            Some(lot) => self.lots[lot as usize].count += unnamed,
            None => table.lot = Some(self.new_lot(unnamed, holder)),
        }
    }

    fn new_lot(&mut self, count: u32, holder: Holder) -> u32 {
        let mut lot = Lot { count, holders: [0; 3] };
        lot.holders[holder as usize] = 1;
        if let Some(slot) = self.free_lots.pop() {
            self.lots[slot as usize] = lot;
            return slot;
        }
        self.lots.push(lot);
        self.lots.len() as u32 - 1
    }

    /// Evicts cached blocks until `count` are free.
    fn evict_until_free(&mut self, count: u32) {
        while (self.free.len() as u32) < self.num_unnamed + count {
            let id = self.evict_oldest();
            self.free.push(id);
        }
    }

    /// Lets go of the blocks of `table`, which `holder` alone holds, beyond the first `len`; how many
    /// these were.
    pub fn shrink(&mut self, table: &mut Table, len: u32, holder: Holder) -> u32 {
        let surplus = table.len().saturating_sub(len);
        let unnamed = surplus.min(table.unnamed);
        if let Some(lot) = table.lot.filter(|_| unnamed > 0) {
            self.lots[lot as usize].count -= unnamed;
            self.num_unnamed -= unnamed;
            table.unnamed -= unnamed;
        }
        let keep = table.named.len() - (surplus - unnamed) as usize;
        self.release_named(&table.named[keep..], holder);
        table.named.truncate(keep);
        surplus
    }

    /// Adds a holder to blocks that are cached or held.
    pub fn pin(&mut self, table: &Table, holder: Holder) {
        for block in &table.named {
            if self.blocks[block.0 as usize].in_cache {
                self.unlink(block.0);
            }
            self.blocks[block.0 as usize].holders[holder as usize] += 1;
        }
        if let Some(lot) = table.lot {
            self.lots[lot as usize].holders[holder as usize] += 1;
        }
    }

    /// Lets go of blocks. Those that nobody holds any more become cached if their content is
    /// indexed, free otherwise; the last of them is evicted first, so prefixes outlive tails.
    ///
    /// # Panics
    /// When `holder` does not hold one of them.
    pub fn release(&mut self, table: &Table, holder: Holder) {
        if let Some(slot) = table.lot {
            let lot = &mut self.lots[slot as usize];
            let count = &mut lot.holders[holder as usize];
            *count = count
                .checked_sub(1)
                .unwrap_or_else(|| panic!("lot {slot} released by {holder:?} without being held"));
            if lot.holders == [0; 3] {
                self.num_unnamed -= lot.count;
                lot.count = 0;
                self.free_lots.push(slot);
            }
        }
        self.release_named(&table.named, holder);
    }

    fn release_named(&mut self, blocks: &[BlockId], holder: Holder) {
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
        let mut unnamed = 0u64;
        for lot in &self.lots {
            let held = u64::from(lot.holders != [0; 3]);
            unnamed += held * u64::from(lot.count);
            for (sum, count) in holders.iter_mut().zip(lot.holders) {
                *sum += u64::from(lot.count) * u64::from(count);
            }
        }
        check("unnamed blocks", unnamed, u64::from(self.num_unnamed))?;
        let beyond_free = unnamed.saturating_sub(self.free.len() as u64);
        check("unnamed blocks that are not among the free", beyond_free, 0)?;
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
        let mut pool = BlockPool::new(4, 16, true, Naming::All);
        let mut table = Table::default();
        pool.extend(&mut table, 3, 3, Holder::Request);
        pool.index(table.named(), &[hash(1), hash(2)]);
        pool.release(&table, Holder::Request);
        assert_eq!((pool.num_cached(), pool.num_available()), (2, 4));
        assert_eq!(pool.lookup(&[hash(1), hash(2), hash(3)], 9).named(), &table.named()[..2]);

        let mut other = Table::default();
        pool.extend(&mut other, 3, 3, Holder::Request);
        assert_eq!(
            pool.lookup(&[hash(1), hash(2)], 9).named(),
            &table.named()[..1],
            "tails go before prefixes"
        );
        pool.check_integrity([3, 0, 0]).unwrap();
    }

    #[test]
    fn a_block_with_a_pending_send_is_not_evicted() {
        let mut pool = BlockPool::new(2, 16, true, Naming::All);
        let (mut table, mut other) = (Table::default(), Table::default());
        pool.extend(&mut table, 2, 2, Holder::Request);
        pool.pin(&table, Holder::Transfer);
        pool.release(&table, Holder::Request);
        assert_eq!(pool.num_available(), 0);
        pool.release(&table, Holder::Transfer);
        pool.extend(&mut other, 2, 2, Holder::Request);
        pool.check_integrity([2, 0, 0]).unwrap();
    }

    #[test]
    #[should_panic(expected = "released by Request without being held")]
    fn releasing_twice_is_a_bug_that_says_so() {
        let mut pool = BlockPool::new(1, 16, true, Naming::All);
        let mut table = Table::default();
        pool.extend(&mut table, 1, 1, Holder::Request);
        pool.release(&table, Holder::Request);
        pool.release(&table, Holder::Request);
    }

    /// One sequence of operations, on a pool that names all blocks and on one that names few.
    #[derive(Clone, Copy, Debug)]
    enum Op {
        /// A table of shareable blocks of a family, and further ones.
        Take {
            family: u8,
            shareable: u8,
            others: u8,
        },
        Extend {
            pick: u8,
            by: u8,
        },
        Shrink {
            pick: u8,
            to: u8,
        },
        Send {
            pick: u8,
        },
        Release {
            pick: u8,
        },
        ReleaseSent {
            pick: u8,
        },
        ClearCache,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => (0u8..6, 0u8..5, 0u8..5).prop_map(|(family, shareable, others)| Op::Take {
                family,
                shareable,
                others
            }),
            2 => (any::<u8>(), 1u8..4).prop_map(|(pick, by)| Op::Extend { pick, by }),
            1 => (any::<u8>(), 0u8..6).prop_map(|(pick, to)| Op::Shrink { pick, to }),
            1 => any::<u8>().prop_map(|pick| Op::Send { pick }),
            2 => any::<u8>().prop_map(|pick| Op::Release { pick }),
            1 => any::<u8>().prop_map(|pick| Op::ReleaseSent { pick }),
            1 => Just(Op::ClearCache),
        ]
    }

    /// A table, whether its request holds it, and whether a transfer does.
    type Entry = (Table, bool, bool);

    fn apply(pool: &mut BlockPool, tables: &mut Vec<Entry>, op: Op) {
        let find = |pick: u8, tables: &[Entry], wanted: fn(&Entry) -> bool| {
            let fitting: Vec<_> = (0..tables.len()).filter(|at| wanted(&tables[*at])).collect();
            (!fitting.is_empty()).then(|| fitting[usize::from(pick) % fitting.len()])
        };
        let alone: fn(&Entry) -> bool = |entry| entry.1 && !entry.2;
        match op {
            Op::Take { family, shareable, others } => {
                let hashes: Vec<_> = (0..shareable).map(|i| hash(family * 16 + i)).collect();
                let mut table = pool.lookup(&hashes, u32::from(shareable));
                let len = u32::from(shareable + others);
                if len - table.len() + pool.count_unheld(&table) <= pool.num_available() {
                    pool.pin(&table, Holder::Request);
                    pool.extend(&mut table, len, u32::from(shareable), Holder::Request);
                    pool.index(&table.named()[..usize::from(shareable)], &hashes);
                    tables.push((table, true, false));
                }
            }
            Op::Extend { pick, by } => {
                if let Some(at) = find(pick, tables, alone).filter(|_| u32::from(by) <= pool.num_available())
                {
                    let len = tables[at].0.len() + u32::from(by);
                    pool.extend(&mut tables[at].0, len, 0, Holder::Request);
                }
            }
            Op::Shrink { pick, to } => {
                if let Some(at) = find(pick, tables, alone) {
                    pool.shrink(&mut tables[at].0, u32::from(to), Holder::Request);
                }
            }
            Op::Send { pick } => {
                if let Some(at) = find(pick, tables, alone) {
                    pool.pin(&tables[at].0, Holder::Transfer);
                    tables[at].2 = true;
                }
            }
            Op::Release { pick } => {
                if let Some(at) = find(pick, tables, |entry| entry.1) {
                    pool.release(&tables[at].0, Holder::Request);
                    tables[at].1 = false;
                }
            }
            Op::ReleaseSent { pick } => {
                if let Some(at) = find(pick, tables, |entry| entry.2) {
                    pool.release(&tables[at].0, Holder::Transfer);
                    tables[at].2 = false;
                }
            }
            Op::ClearCache => pool.clear_cache(),
        }
        tables.retain(|entry| entry.1 || entry.2);
        let sum = |held: fn(&Entry) -> bool| -> u64 {
            tables.iter().filter(|entry| held(entry)).map(|entry| u64::from(entry.0.len())).sum()
        };
        pool.check_integrity([sum(|entry| entry.1), sum(|entry| entry.2), 0]).unwrap();
    }

    proptest! {
        /// Any sequence keeps the books balanced, and what is available, cached and found does not
        /// depend on which blocks have names.
        #[test]
        fn books_balance_with_names_and_without(ops in prop::collection::vec(op(), 1..120)) {
            let pool = |naming| BlockPool::new(12, 16, true, naming);
            let (mut all, mut few) = (pool(Naming::All), pool(Naming::Shareable));
            let (mut tables, mut others) = (Vec::new(), Vec::new());
            for op in ops {
                apply(&mut all, &mut tables, op);
                apply(&mut few, &mut others, op);
                prop_assert_eq!(all.num_available(), few.num_available());
                prop_assert_eq!(all.num_cached(), few.num_cached());
                for family in 0..6 {
                    let hashes: Vec<_> = (0..5).map(|i| hash(family * 16 + i)).collect();
                    prop_assert_eq!(all.lookup_len(&hashes, 5), few.lookup_len(&hashes, 5));
                }
            }
            for (table, by_request, by_transfer) in others {
                if by_request { few.release(&table, Holder::Request); }
                if by_transfer { few.release(&table, Holder::Transfer); }
            }
            prop_assert_eq!(few.num_available(), 12);
            few.clear_cache();
            prop_assert_eq!(few.num_cached(), 0);
        }
    }
}
