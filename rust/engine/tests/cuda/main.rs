//! The CUDA backend and engines of CUDA workers, on the emulator: the kernels' own sources, run on the
//! CPU. It proves logic, never speed. Every test runs in a process of its own, see `kvrelay_emulator`.

mod agreement;
mod backend;
#[path = "../shared/belief.rs"]
mod belief;
mod common;
mod engines;
mod faults;
#[path = "../shared/law.rs"]
mod law;
mod laws;
mod transfers;
