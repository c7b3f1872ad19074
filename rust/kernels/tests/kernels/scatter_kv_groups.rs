//! Groups of blocks scattered: the same to the bit, and nothing else of the pool changes.

use kvrelay_kernels::launch::ScatterKvGroups;

use crate::device::Device;
use crate::gather_kv_groups::groups;
use crate::numbers::{Numbers, identical};
use crate::oracle::scatter_kv_groups::scatter;

pub(crate) fn check(device: &Device) {
    for (block_bytes, group) in groups() {
        let mut numbers = Numbers::new(block_bytes as u64);
        let mut pool: Vec<u8> = (0..9 * block_bytes).map(|_| numbers.bits() as u8).collect();
        let blocks = numbers.shuffled(9)[..5].to_vec();
        let buffer: Vec<u8> = (0..blocks.len() * group.len()).map(|_| numbers.bits() as u8).collect();
        let mut pool_there = device.upload(&pool);
        let (buffer_there, blocks_there) = (device.upload(&buffer), device.upload(&blocks));
        let parameters = ScatterKvGroups {
            pool: pool_there.as_view_mut(),
            buffer: buffer_there.as_view(),
            blocks: blocks_there.as_view(),
            block_bytes,
            group: group.clone(),
        };
        parameters.launch(&device.kernels, &device.stream).unwrap();
        let what = format!("scatter of {group:?} of {block_bytes} bytes");
        scatter(&mut pool, &buffer, &blocks, block_bytes, group);
        identical(&what, &device.download(&pool_there), &pool);
    }
}
