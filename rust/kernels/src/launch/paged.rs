//! The paged KV of a device, laid out as the pools of every other: so that a whole block, or one
//! layer group of it, is one run of bytes.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut};

use super::check::{Check, elements};
use super::{Element, LaunchError};

/// How a block is laid out: its layers follow each other, each as its keys
/// `[kv_head][token][head_dim]` and then its values in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Tokens in a block.
    pub block_size: usize,
    /// Layers of the model.
    pub num_layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl KvLayout {
    /// Elements of one layer's keys in a block (and of its values).
    pub fn half_layer_len(&self) -> usize {
        elements([self.kv_heads, self.block_size, self.head_dim])
    }

    /// Elements of a block.
    pub fn block_len(&self) -> usize {
        elements([self.num_layers, 2, self.half_layer_len()])
    }

    /// Refuses an empty block, a pool that is not whole blocks, and a layer that is not there; the
    /// element at which the layer begins in block 0.
    fn check(&self, check: &Check<'_>, pool: usize, layer: usize) -> Result<usize, LaunchError> {
        check.at_least("block_size", 1, self.block_size)?;
        check.at_least("kv_heads", 1, self.kv_heads)?;
        check.multiple("head_dim", 8, self.head_dim)?;
        check.at_least("num_layers", layer.saturating_add(1), self.num_layers)?;
        check.multiple("elements of the KV pool", self.block_len(), pool)?;
        check.int("elements of a block", self.block_len())?;
        Ok(layer * 2 * self.half_layer_len())
    }
}

/// One layer of a pool that is read.
#[derive(Debug)]
pub struct Layer<'a, T> {
    /// The whole pool: `[blocks][layout.block_len()]`.
    pub pool: CudaView<'a, T>,
    /// How its blocks are laid out.
    pub layout: KvLayout,
    /// Which layer.
    pub layer: usize,
}

/// One layer of a pool that is written.
#[derive(Debug)]
pub struct LayerMut<'a, T> {
    /// The whole pool: `[blocks][layout.block_len()]`.
    pub pool: CudaViewMut<'a, T>,
    /// How its blocks are laid out.
    pub layout: KvLayout,
    /// Which layer.
    pub layer: usize,
}

impl<T: Element> Layer<'_, T> {
    /// The pool from the layer's keys in block 0 on, which are read 16 bytes at a time.
    pub(super) fn keys(
        &self,
        check: &Check<'_>,
        stream: &CudaStream,
    ) -> Result<CudaView<'_, T>, LaunchError> {
        let start = self.layout.check(check, self.pool.len(), self.layer)?;
        check.begins_at("bytes of the KV pool beyond a 16-byte border", 16, &self.pool, stream)?;
        Ok(self.pool.slice(start..))
    }
}

impl<T: Element> LayerMut<'_, T> {
    /// The pool from the layer's keys in block 0 on.
    pub(super) fn keys(&mut self, check: &Check<'_>) -> Result<CudaViewMut<'_, T>, LaunchError> {
        let start = self.layout.check(check, self.pool.len(), self.layer)?;
        Ok(self.pool.slice_mut(start..))
    }
}
