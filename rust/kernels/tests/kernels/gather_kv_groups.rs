//! Groups of blocks gathered: the same to the bit.

use kvrelay_kernels::launch::GatherKvGroups;

use crate::device::Device;
use crate::numbers::{Numbers, identical};
use crate::oracle::gather_kv_groups::gather;

pub(crate) fn check(device: &Device) {
    for (block_bytes, group) in groups() {
        let mut numbers = Numbers::new(block_bytes as u64);
        let pool: Vec<u8> = (0..9 * block_bytes).map(|_| numbers.bits() as u8).collect();
        let blocks = [numbers.shuffled(9)[..4].to_vec(), vec![8, 8]].concat();
        let (pool_there, blocks_there) = (device.upload(&pool), device.upload(&blocks));
        let mut buffer = device.unwritten::<u8>(blocks.len() * group.len());
        let parameters = GatherKvGroups {
            buffer: buffer.as_view_mut(),
            pool: pool_there.as_view(),
            blocks: blocks_there.as_view(),
            block_bytes,
            group: group.clone(),
        };
        parameters.launch(&device.kernels, &device.stream).unwrap();
        let what = format!("gather of {group:?} of {block_bytes} bytes");
        identical(&what, &device.download(&buffer), &gather(&pool, &blocks, block_bytes, group));
    }
}

/// Whole blocks, a first, a middle and a last group; longer than one thread block copies at once.
pub(crate) fn groups() -> Vec<(usize, std::ops::Range<usize>)> {
    vec![
        (16, 0..16),
        (4096, 0..4096),
        (4096, 0..512),
        (4096, 1024..1552),
        (4096, 4080..4096),
        (80_000, 160..70_000),
    ]
}
