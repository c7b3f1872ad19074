//! Tokens fed from the host and from slots: the same to the bit.

use kvrelay_kernels::launch::FeedTokens;

use crate::device::Device;
use crate::numbers::{Numbers, identical};
use crate::oracle::feed_tokens::feed;

pub(crate) fn check(device: &Device) {
    let random = Numbers::of_this_run().between(2, 700);
    for count in [1, 2, 255, 256, 257, random] {
        let mut numbers = Numbers::new(count as u64);
        let last: Vec<i32> = (0..9).map(|_| numbers.below(1000) as i32).collect();
        let source = |numbers: &mut Numbers| match numbers.below(3) {
            0 => -1,
            1 => -2 - numbers.below(last.len()) as i32,
            _ => numbers.below(50_000) as i32,
        };
        let sources: Vec<i32> = (0..count).map(|_| source(&mut numbers)).collect();
        let (sources_there, last_there) = (device.upload(&sources), device.upload(&last));
        let mut ids = device.unwritten::<i32>(count);
        let parameters = FeedTokens {
            ids: ids.as_view_mut(),
            sources: sources_there.as_view(),
            last: last_there.as_view(),
        };
        parameters.launch(&device.kernels, &device.stream).unwrap();
        identical(&format!("{count} ids"), &device.download(&ids), &feed(&sources, &last));
    }
}
