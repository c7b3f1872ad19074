//! A byte range of each of some blocks.

use std::ops::Range;

/// `[blocks][group]` out of a pool of blocks of `block_bytes`.
pub(crate) fn gather(pool: &[u8], blocks: &[i32], block_bytes: usize, group: Range<usize>) -> Vec<u8> {
    let of = |&block: &i32| {
        let start = block as usize * block_bytes;
        pool[start + group.start..start + group.end].to_vec()
    };
    blocks.iter().flat_map(of).collect()
}
