//! KV blocks of a worker: how they are laid out, where they lie, and how they are copied.
//!
//! A block holds `block_size` tokens of every layer and is contiguous; in it the layers follow
//! each other, each as its keys `[kv_head][token][head_dim]` and then its values in the same
//! order. Layers are gathered in *layer groups* of neighbours, so that a whole block, or one
//! group of it, is one run of bytes.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use kvrelay_model::{DType, LlamaConfig};

use super::BackendError;
use super::cuda::{CudaDevice, DeviceMemory};

/// Layer groups of a block unless the model has fewer layers.
pub const DEFAULT_LAYER_GROUPS: usize = 8;

/// The layout of a block, compared by peers before the first byte moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGeometry {
    /// How a key or value element is stored.
    pub dtype: DType,
    /// Tokens in a block.
    pub block_size: usize,
    /// Layers of the model.
    pub num_layers: usize,
    /// KV heads of a layer.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Layer groups of a block.
    pub num_layer_groups: usize,
    /// Identity of the weights that made the KV.
    pub model_digest: u64,
}

impl KvGeometry {
    /// The layout for a model: `f32` elements, [`DEFAULT_LAYER_GROUPS`] groups at most.
    pub fn new(config: &LlamaConfig, model_digest: u64, block_size: usize) -> Self {
        Self {
            dtype: DType::F32,
            block_size,
            num_layers: config.num_layers,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            num_layer_groups: DEFAULT_LAYER_GROUPS.min(config.num_layers),
            model_digest,
        }
    }

    /// The same layout of elements stored as `dtype`.
    #[must_use]
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// Elements of one layer's keys in a block (and of its values).
    pub fn half_layer_len(&self) -> usize {
        self.num_kv_heads * self.block_size * self.head_dim
    }

    /// Elements of a block.
    pub fn block_len(&self) -> usize {
        self.num_layers * 2 * self.half_layer_len()
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_len() * self.dtype.block_bytes()
    }

    /// Bytes of KV that a token needs.
    pub fn token_bytes(&self) -> usize {
        self.block_bytes() / self.block_size
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Layers of a group, as even as whole layers allow.
    pub fn layers_of(&self, group: usize) -> Range<usize> {
        let start = |g: usize| g * self.num_layers / self.num_layer_groups;
        start(group)..start(group + 1)
    }

    /// Elements of a block that belong to a layer group.
    pub fn group_range(&self, group: usize) -> Range<usize> {
        let layers = self.layers_of(group);
        let layer = 2 * self.half_layer_len();
        layers.start * layer..layers.end * layer
    }

    /// Refuses a peer whose blocks mean something else, naming both values (law 5).
    pub fn check_peer(&self, peer: &Self) -> Result<(), BackendError> {
        let fields = [
            ("dtype", self.dtype.name().to_owned(), peer.dtype.name().to_owned()),
            ("block size", self.block_size.to_string(), peer.block_size.to_string()),
            ("layers", self.num_layers.to_string(), peer.num_layers.to_string()),
            ("KV heads", self.num_kv_heads.to_string(), peer.num_kv_heads.to_string()),
            ("head dimension", self.head_dim.to_string(), peer.head_dim.to_string()),
            ("layer groups", self.num_layer_groups.to_string(), peer.num_layer_groups.to_string()),
            ("model", format!("{:016x}", self.model_digest), format!("{:016x}", peer.model_digest)),
        ];
        for (what, here, there) in fields {
            if here != there {
                return Err(BackendError::Peer { what, here, there });
            }
        }
        Ok(())
    }

    /// Refuses an empty layout, and elements other than `dtype`.
    fn check(&self, dtype: DType) -> Result<(), BackendError> {
        let fields = [
            ("block size", self.block_size),
            ("layers", self.num_layers),
            ("KV heads", self.num_kv_heads),
            ("head dimension", self.head_dim),
            ("layer groups", self.num_layer_groups),
        ];
        for (what, found) in fields {
            if found == 0 {
                return Err(BackendError::Config { what, expected: "at least 1".into(), found: "0".into() });
            }
        }
        if self.num_layer_groups > self.num_layers {
            return Err(BackendError::Config {
                what: "layer groups",
                expected: format!("at most {} (one a layer)", self.num_layers),
                found: self.num_layer_groups.to_string(),
            });
        }
        if self.dtype != dtype {
            return Err(BackendError::Config {
                what: "KV dtype",
                expected: dtype.name().into(),
                found: self.dtype.name().into(),
            });
        }
        Ok(())
    }
}

/// The KV blocks of one worker.
///
/// The memory is shared between the backend, which computes in it, and transfers, which copy
/// blocks in and out while steps run. No lock guards it: that a block has one writer and no
/// reader beside it is the scheduler's block accounting (a block belongs to its request *and* to
/// the transfer until both let go), so every way to touch a pool from outside its backend is
/// `unsafe` and states that contract.
pub struct KvPool {
    geometry: KvGeometry,
    num_blocks: usize,
    memory: Memory,
}

/// Where the blocks of a pool lie.
enum Memory {
    Host(HostMemory),
    Device(DeviceMemory),
}

/// Where the blocks of a pool lie, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// In the memory of this machine.
    Host,
    /// In that of a CUDA device.
    Cuda {
        /// Its number.
        ordinal: usize,
    },
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Memory of this machine: a boxed slice taken apart.
struct HostMemory {
    start: NonNull<f32>,
    len: usize,
}

// SAFETY: plain memory, reached through the pool's `unsafe` calls alone, whose contract excludes
// conflicting access, see the pool's documentation.
unsafe impl Send for HostMemory {}
// SAFETY: as above; the safe methods read only fields that never change.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn new(len: usize) -> Self {
        let memory = Box::into_raw(vec![0.0_f32; len].into_boxed_slice());
        // A box is never null.
        Self { start: NonNull::new(memory.cast::<f32>()).unwrap_or(NonNull::dangling()), len }
    }

    /// The element at `index`.
    fn at(&self, index: usize) -> *mut f32 {
        assert!(index < self.len, "element {index} of {}", self.len);
        // SAFETY: the index was checked, so the offset stays inside the allocation.
        unsafe { self.start.as_ptr().add(index) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let slice = std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.len);
        // SAFETY: pointer and length are those of the box that `new` took apart.
        drop(unsafe { Box::from_raw(slice) });
    }
}

impl KvPool {
    /// A pool of `num_blocks` zeroed blocks in the host's memory, of `f32` elements; the system commits
    /// the memory as it is used.
    pub fn new(geometry: KvGeometry, num_blocks: usize) -> Result<Self, BackendError> {
        let len = checked_len(&geometry, DType::F32, num_blocks)?;
        Ok(Self { geometry, num_blocks, memory: Memory::Host(HostMemory::new(len)) })
    }

    /// A pool of `num_blocks` zeroed blocks in a device's memory, of `BF16` elements.
    pub fn on_device(
        geometry: KvGeometry,
        num_blocks: usize,
        device: &Arc<CudaDevice>,
    ) -> Result<Self, BackendError> {
        let len = checked_len(&geometry, DType::BF16, num_blocks)?;
        Ok(Self { geometry, num_blocks, memory: Memory::Device(DeviceMemory::new(device, len)?) })
    }

    /// Where the blocks lie.
    pub fn location(&self) -> Location {
        match &self.memory {
            Memory::Host(_) => Location::Host,
            Memory::Device(memory) => Location::Cuda { ordinal: memory.device().ordinal() },
        }
    }

    /// The memory of a pool on a device.
    pub(super) fn device(&self) -> Option<&DeviceMemory> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device(memory) => Some(memory),
        }
    }

    /// How blocks are laid out.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The element at which a block begins.
    fn start_of(&self, block: u32) -> usize {
        assert!((block as usize) < self.num_blocks, "block {block} of {}", self.num_blocks);
        block as usize * self.geometry.block_len()
    }

    /// The start of a block in the host's memory.
    ///
    /// # Panics
    /// If there is no such block, or the pool lies elsewhere.
    pub(crate) fn block(&self, block: u32) -> *mut f32 {
        match &self.memory {
            Memory::Host(memory) => memory.at(self.start_of(block)),
            Memory::Device(_) => panic!("a pool in device memory has no address here"),
        }
    }

    /// Copies a block out, for transports and tests.
    ///
    /// # Safety
    /// Nothing may write the block's `group` while this runs.
    ///
    /// # Panics
    /// If there is no such block or group, `out` is not as long as the group, or the device fails.
    pub unsafe fn read_group(&self, block: u32, group: usize, out: &mut [f32]) {
        let range = self.geometry.group_range(group);
        assert_eq!(out.len(), range.len(), "elements of a layer group");
        let start = self.start_of(block) + range.start;
        match &self.memory {
            // SAFETY: source and length lie inside the block; the caller excludes writers; `out` is
            // exclusively borrowed and cannot overlap the pool.
            Memory::Host(memory) => unsafe {
                std::ptr::copy_nonoverlapping(memory.at(start), out.as_mut_ptr(), range.len());
            },
            // SAFETY: as above.
            Memory::Device(memory) => unsafe {
                memory.read(start..start + range.len(), out).unwrap_or_else(|error| panic!("{error}"));
            },
        }
    }

    /// Copies a block in.
    ///
    /// # Safety
    /// Nothing may read or write the block's `group` while this runs.
    ///
    /// # Panics
    /// If there is no such block or group, `from` is not as long as the group, or the device fails.
    pub unsafe fn write_group(&self, block: u32, group: usize, from: &[f32]) {
        let range = self.geometry.group_range(group);
        assert_eq!(from.len(), range.len(), "elements of a layer group");
        let start = self.start_of(block) + range.start;
        match &self.memory {
            // SAFETY: as in `read_group`, with the caller excluding readers too.
            Memory::Host(memory) => unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), memory.at(start), range.len());
            },
            // SAFETY: as above.
            Memory::Device(memory) => unsafe {
                memory.write(start, from).unwrap_or_else(|error| panic!("{error}"));
            },
        }
    }
}

/// Elements of a pool, if such a pool can be.
fn checked_len(geometry: &KvGeometry, dtype: DType, num_blocks: usize) -> Result<usize, BackendError> {
    geometry.check(dtype)?;
    let len = geometry.block_len().checked_mul(num_blocks).filter(|&n| n <= isize::MAX as usize / 4);
    len.filter(|&n| n > 0 && num_blocks <= i32::MAX as usize).ok_or_else(|| BackendError::Config {
        what: "KV blocks",
        expected: "between 1 and what memory can hold".into(),
        found: num_blocks.to_string(),
    })
}

impl fmt::Debug for KvPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvPool")
            .field("geometry", &self.geometry)
            .field("num_blocks", &self.num_blocks)
            .field("location", &self.location())
            .finish()
    }
}

/// Copies layer group `group` (`None`: whole blocks) of each `(source, destination)` pair from
/// one pool to another, after the peers have compared their layouts.
///
/// # Safety
/// While this runs nothing may write these groups of the source blocks, and nothing may read or
/// write those of the destination blocks; within one pool no block may be on both sides.
pub unsafe fn copy_blocks(
    source: &KvPool,
    destination: &KvPool,
    pairs: &[(u32, u32)],
    group: Option<usize>,
) -> Result<(), BackendError> {
    source.geometry.check_peer(&destination.geometry)?;
    let groups = source.geometry.num_layer_groups;
    if let Some(found) = group.filter(|&g| g >= groups) {
        return Err(BackendError::Limit { what: "layer group", limit: groups - 1, found });
    }
    for &(from, to) in pairs {
        for (block, pool) in [(from, source), (to, destination)] {
            if block as usize >= pool.num_blocks {
                let limit = pool.num_blocks - 1;
                return Err(BackendError::Limit { what: "block", limit, found: block as usize });
            }
        }
    }
    let range = group.map_or(0..source.geometry.block_len(), |g| source.geometry.group_range(g));
    let runs = pairs.iter().map(|&(from, to)| {
        (source.start_of(from) + range.start, destination.start_of(to) + range.start, range.len())
    });
    match (&source.memory, &destination.memory) {
        (Memory::Host(here), Memory::Host(there)) => {
            for (from, to, len) in runs {
                // SAFETY: blocks and range were checked; the caller excludes every other access.
                unsafe { std::ptr::copy_nonoverlapping(here.at(from), there.at(to), len) };
            }
            Ok(())
        }
        // SAFETY: as above.
        (Memory::Device(here), Memory::Device(there)) => unsafe { here.copy_to(there, runs) },
        // Their elements differ too, so the peers have been refused already.
        _ => Err(BackendError::Peer {
            what: "memory",
            here: source.location().to_string(),
            there: destination.location().to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(num_layers: usize) -> KvGeometry {
        KvGeometry {
            dtype: DType::F32,
            block_size: 4,
            num_layers,
            num_kv_heads: 2,
            head_dim: 8,
            num_layer_groups: DEFAULT_LAYER_GROUPS.min(num_layers),
            model_digest: 7,
        }
    }

    #[test]
    fn groups_tile_a_block() {
        for layers in 1..70 {
            let geometry = geometry(layers);
            let mut next = 0;
            for group in 0..geometry.num_layer_groups {
                let range = geometry.group_range(group);
                assert_eq!(range.start, next);
                assert!(!range.is_empty());
                next = range.end;
            }
            assert_eq!(next, geometry.block_len());
        }
    }

    #[test]
    fn peers_name_both_values() {
        let here = geometry(9);
        here.check_peer(&geometry(9)).unwrap();
        type Change = fn(&mut KvGeometry);
        let cases: [(&str, Change); 7] = [
            ("dtype: here F32, there F16", |g| g.dtype = DType::F16),
            ("block size: here 4, there 16", |g| g.block_size = 16),
            ("layers: here 9, there 10", |g| g.num_layers = 10),
            ("KV heads: here 2, there 3", |g| g.num_kv_heads = 3),
            ("head dimension: here 8, there 64", |g| g.head_dim = 64),
            ("layer groups: here 8, there 4", |g| g.num_layer_groups = 4),
            ("model: here 0000000000000007, there 0000000000000008", |g| g.model_digest = 8),
        ];
        for (text, change) in cases {
            let mut there = geometry(9);
            change(&mut there);
            assert!(here.check_peer(&there).unwrap_err().to_string().contains(text), "{text}");
        }
    }

    #[test]
    fn copies_only_the_group_asked_for() {
        let (a, b) = (KvPool::new(geometry(9), 3).unwrap(), KvPool::new(geometry(9), 2).unwrap());
        let range = a.geometry().group_range(3);
        let numbers: Vec<f32> = (0..range.len()).map(|i| i as f32 + 1.0).collect();
        let mut out = vec![0.0; range.len()];
        // SAFETY: this test is the only user of both pools.
        unsafe {
            a.write_group(2, 3, &numbers);
            copy_blocks(&a, &b, &[(2, 1)], Some(2)).unwrap();
            b.read_group(1, 3, &mut out);
            assert!(out.iter().all(|&x| x == 0.0));
            copy_blocks(&a, &b, &[(2, 1)], None).unwrap();
            b.read_group(1, 3, &mut out);
            assert_eq!(out, numbers);
            assert!(
                copy_blocks(&a, &b, &[(3, 0)], None).unwrap_err().to_string().contains("at most 2, found 3")
            );
            assert!(copy_blocks(&a, &b, &[(0, 2)], None).is_err());
            assert!(copy_blocks(&a, &b, &[], Some(8)).is_err());
        }
    }
}
