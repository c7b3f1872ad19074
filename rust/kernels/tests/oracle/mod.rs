//! What each kernel computes, in plain Rust and in f64: one file a kernel, named as the kernel.

pub(crate) mod attention_decode;
pub(crate) mod attention_decode_combine;
pub(crate) mod attention_prefill;
pub(crate) mod embedding;
pub(crate) mod gather_kv_groups;
pub(crate) mod geglu;
pub(crate) mod gemm;
pub(crate) mod head_norm;
pub(crate) mod paged;
pub(crate) mod rms_norm;
pub(crate) mod rope_append;
pub(crate) mod sample;
pub(crate) mod scatter_kv_groups;
pub(crate) mod swiglu;
