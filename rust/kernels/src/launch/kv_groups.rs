//! Layer groups of KV blocks, into one contiguous buffer and back.

use std::ops::Range;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::{Geometry, Kernels, LaunchError, enqueue};

/// Copies the `group` of each of `blocks` from a pool into a buffer.
#[derive(Debug)]
pub struct GatherKvGroups<'a> {
    /// `[blocks][group bytes]`
    pub buffer: CudaViewMut<'a, u8>,
    /// `[pool blocks][block_bytes]`
    pub pool: CudaView<'a, u8>,
    /// Block numbers, each in the pool.
    pub blocks: CudaView<'a, i32>,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// The bytes of a block that are the group.
    pub group: Range<usize>,
}

/// Copies a buffer of groups back into the `group` of each of `blocks`, which are all different.
#[derive(Debug)]
pub struct ScatterKvGroups<'a> {
    /// `[pool blocks][block_bytes]`
    pub pool: CudaViewMut<'a, u8>,
    /// `[blocks][group bytes]`
    pub buffer: CudaView<'a, u8>,
    /// Block numbers, each in the pool.
    pub blocks: CudaView<'a, i32>,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// The bytes of a block that are the group.
    pub group: Range<usize>,
}

/// Bytes that a thread copies at a time.
const WORD: usize = 16;
const THREADS: usize = 256;

/// What the kernels count in: words of a block, and where the group begins in it and how long it is.
struct Words {
    block: i64,
    offset: i64,
    group: i64,
}

impl Words {
    fn new(
        check: &Check<'_>,
        [buffer, pool, blocks]: [usize; 3],
        block_bytes: usize,
        group: &Range<usize>,
    ) -> Result<Self, LaunchError> {
        check.multiple("bytes of a block", WORD, block_bytes)?;
        check.multiple("bytes of the pool", block_bytes, pool)?;
        check.at_most("end of the group", block_bytes, group.end)?;
        check.multiple("bytes of the group", WORD, group.len())?;
        check.aligned("begin of the group", WORD, group.start)?;
        check.equal("bytes of the buffer", elements([blocks, group.len()]), buffer)?;
        let words = |bytes: usize| (bytes / WORD) as i64;
        Ok(Self { block: words(block_bytes), offset: words(group.start), group: words(group.len()) })
    }

    /// Enough shares of a group that one block alone keeps several multiprocessors busy.
    fn geometry(&self, blocks: usize) -> Geometry {
        Geometry::new([blocks, (self.group as usize).div_ceil(4 * THREADS).min(32), 1], THREADS)
    }
}

impl GatherKvGroups<'_> {
    /// Enqueues `gather_kv_groups`; nothing for no blocks.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = "gather_kv_groups";
        let sizes = [self.buffer.len(), self.pool.len(), self.blocks.len()];
        let check = Check { kernel: name };
        let words = Words::new(&check, sizes, self.block_bytes, &self.group)?;
        if self.blocks.is_empty() {
            return Ok(());
        }
        check.begins_at("bytes of the buffer beyond a 16-byte border", 16, &self.buffer, stream)?;
        check.begins_at("bytes of the pool beyond a 16-byte border", 16, &self.pool, stream)?;
        let function = kernels.function(name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.buffer).arg(&self.pool).arg(&self.blocks);
        arguments.arg(&words.block).arg(&words.offset).arg(&words.group);
        // SAFETY: the views have the shapes that were checked; block numbers are the caller's promise.
        unsafe { enqueue(name, &mut arguments, &words.geometry(self.blocks.len())) }
    }
}

impl ScatterKvGroups<'_> {
    /// Enqueues `scatter_kv_groups`; nothing for no blocks.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = "scatter_kv_groups";
        let sizes = [self.buffer.len(), self.pool.len(), self.blocks.len()];
        let check = Check { kernel: name };
        let words = Words::new(&check, sizes, self.block_bytes, &self.group)?;
        if self.blocks.is_empty() {
            return Ok(());
        }
        check.begins_at("bytes of the buffer beyond a 16-byte border", 16, &self.buffer, stream)?;
        check.begins_at("bytes of the pool beyond a 16-byte border", 16, &self.pool, stream)?;
        let function = kernels.function(name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.pool).arg(&self.buffer).arg(&self.blocks);
        arguments.arg(&words.block).arg(&words.offset).arg(&words.group);
        // SAFETY: the views have the shapes that were checked; block numbers are the caller's promise.
        unsafe { enqueue(name, &mut arguments, &words.geometry(self.blocks.len())) }
    }
}
