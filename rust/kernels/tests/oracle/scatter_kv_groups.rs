//! A byte range of each of some blocks, written.

use std::ops::Range;

/// Writes `buffer` (`[blocks][group]`) into a pool of blocks of `block_bytes`.
pub(crate) fn scatter(
    pool: &mut [u8],
    buffer: &[u8],
    blocks: &[i32],
    block_bytes: usize,
    group: Range<usize>,
) {
    for (&block, bytes) in blocks.iter().zip(buffer.chunks(group.len())) {
        let start = block as usize * block_bytes;
        pool[start + group.start..start + group.end].copy_from_slice(bytes);
    }
}
