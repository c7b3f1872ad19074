//! Every kernel against its oracle, in plain Rust, over made-up shapes, in every order of threads. One
//! test a family of kernels, named as they are; a family's test fails if it leaves one of them out, and
//! one more test fails if a kernel of the manifest is of no family.
//!
//! Tolerances: what is only moved or chosen (embedding, groups, sampling, rows in other batches) must be
//! the same to the bit. What is computed is summed in f32, whose errors are some 1e-6 of the sum of the
//! sizes, and rounded to 16 bits, which is off by half a `spacing` each time. So sums rounded once are
//! within one spacing, and a chain of two roundings, of which a hair can turn the first, within two.

#[path = "../oracle/mod.rs"]
mod oracle;

mod attention_decode;
mod attention_decode_combine;
mod attention_prefill;
mod coverage;
mod device;
mod embedding;
mod gather_kv_groups;
mod geglu;
mod gemm;
mod head_norm;
mod launch_errors;
mod numbers;
mod paged;
mod rms_norm;
mod rope_append;
mod sample;
mod scatter_kv_groups;
mod swiglu;

use kvrelay_emulator::Emulated;

use device::Device;

/// A test for each family, and the list of them.
macro_rules! families {
    ($($family:ident),+ $(,)?) => {
        /// What kernels' names begin with.
        pub(crate) const FAMILIES: &[&str] = &[$(stringify!($family)),+];

        $(
            #[test]
            fn $family() {
                Emulated::new(stringify!($family)).run_in_every_order(|| {
                    let device = Device::open();
                    $family::check(&device);
                    coverage::assert_all_launched(&device, stringify!($family));
                });
            }
        )+
    };
}

families![
    attention_decode,
    attention_decode_combine,
    attention_prefill,
    embedding,
    gather_kv_groups,
    geglu,
    gemm,
    head_norm,
    rms_norm,
    rope_append,
    sample,
    scatter_kv_groups,
    swiglu,
];

#[test]
fn every_kernel_is_of_a_family() {
    coverage::assert_all_known();
}

#[test]
fn shapes_are_refused_by_name() {
    Emulated::new("shapes_are_refused_by_name").run(|| launch_errors::check(&Device::open()));
}
