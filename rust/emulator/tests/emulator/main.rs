//! The emulator itself: what is wrong is caught, what is right passes, and CUDA's calls do what they do.

mod common;
mod cublas;
mod devices;
mod graphs;
mod ipc;
mod limits;
mod orders;
mod streams;
mod wrong_kernels;
