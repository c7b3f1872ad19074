//! What each kernel computes, in plain Rust and in f64: one file a kernel, named as the kernel.

pub mod attention_decode;
pub mod attention_decode_combine;
pub mod attention_prefill;
pub mod embedding;
pub mod gather_kv_groups;
pub mod geglu;
pub mod gemm;
pub mod head_norm;
pub mod paged;
pub mod rms_norm;
pub mod rope_append;
pub mod sample;
pub mod scatter_kv_groups;
pub mod swiglu;
