//! The orders in which threads get their turn are what their names say, and a seed's is the same always.

use crate::common::{Gpu, emulated, shape};
use cudarc::driver::PushKernelArg;
use kvrelay_emulator::test_name;

/// Three warps, the last one short.
const THREADS: i32 = 70;

/// The turn of every thread of a block.
fn turns() -> Vec<i32> {
    let gpu = Gpu::new(0);
    let mut turns = gpu.stream.alloc_zeros::<i32>(THREADS as usize).unwrap();
    let mut taken = gpu.stream.alloc_zeros::<i32>(1).unwrap();
    let kernel = gpu.kernel("take_turns");
    let mut launch = gpu.stream.launch_builder(&kernel);
    // SAFETY: the kernel's parameters, and as many numbers behind them as it writes.
    unsafe { launch.arg(&mut turns).arg(&mut taken).launch(shape(1, THREADS as u32)) }.unwrap();
    gpu.stream.clone_dtoh(&turns).unwrap()
}

#[test]
fn forward() {
    let child = emulated(test_name!()).set("ORDER", "forward");
    child.run(|| assert_eq!(turns(), (0..THREADS).collect::<Vec<_>>()));
}

#[test]
fn reverse() {
    let child = emulated(test_name!()).set("ORDER", "reverse");
    child.run(|| assert_eq!(turns(), (0..THREADS).rev().collect::<Vec<_>>()));
}

/// Every thread once, and warps one after the other, in an order of their own and of their lanes.
#[test]
fn random() {
    let of_seed = |seed: u32| {
        let child = emulated(test_name!()).set("ORDER", "random").set("SEED", seed);
        let text = child.run(|| println!("turns: {:?};", turns()))?;
        let list = text.split_once("turns: [")?.1.split_once("];")?.0.to_owned();
        Some(list.split(", ").map(|turn| turn.parse().unwrap()).collect::<Vec<i32>>())
    };
    let Some(first) = of_seed(1) else { return };
    let mut sorted = first.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..THREADS).collect::<Vec<_>>());
    assert_ne!(first, sorted);
    assert_eq!(of_seed(1).as_ref(), Some(&first));
    assert_ne!(of_seed(2).as_ref(), Some(&first));
}
