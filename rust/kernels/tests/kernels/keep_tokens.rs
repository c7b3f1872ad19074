//! Tokens kept by slot: the same to the bit, and no other slot changes.

use kvrelay_kernels::launch::KeepTokens;

use crate::device::Device;
use crate::numbers::{Numbers, identical};
use crate::oracle::keep_tokens::keep;

pub(crate) fn check(device: &Device) {
    let random = Numbers::of_this_run().between(2, 700);
    for count in [1, 2, 255, 256, 257, random] {
        let mut numbers = Numbers::new(count as u64);
        let mut last: Vec<i32> = (0..count + 5).map(|_| numbers.below(1000) as i32).collect();
        let mut slots = numbers.shuffled(count + 5)[..count].to_vec();
        let mut tokens: Vec<i32> = (0..count).map(|_| numbers.below(50_000) as i32).collect();
        for (slot, token) in slots.iter_mut().zip(&mut tokens) {
            match numbers.below(4) {
                0 => *slot = -1,
                1 => *token = -1 - *token,
                _ => {}
            }
        }
        let mut last_there = device.upload(&last);
        let (tokens_there, slots_there) = (device.upload(&tokens), device.upload(&slots));
        let parameters = KeepTokens {
            last: last_there.as_view_mut(),
            tokens: tokens_there.as_view(),
            slots: slots_there.as_view(),
        };
        parameters.launch(&device.kernels, &device.stream).unwrap();
        keep(&mut last, &tokens, &slots);
        identical(&format!("{count} tokens"), &device.download(&last_there), &last);
    }
}
