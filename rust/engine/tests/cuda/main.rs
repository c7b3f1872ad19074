//! The CUDA backend and engines of CUDA workers, on the emulator: the kernels' own sources, run on the
//! CPU. It proves logic, never speed. Every test runs in a process of its own, see `kvrelay_emulator`.

mod agreement;
mod backend;
mod common;
mod engines;
mod faults;
mod laws;
mod transfers;
