//! The plain kernels compiled for what this machine has, chosen once at run time.

use super::plain::{self, DOT_ROWS, Fused, KvHead, Separate};

/// Which numbers a backend computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Tier {
    /// The invariant one: a row's logits are, bit for bit, a function of weights, ids and
    /// positions, on every machine, whatever else runs.
    Scalar,
    /// Fused multiply-add over packed weights where the machine has AVX2 or AVX-512; the scalar
    /// tier elsewhere. Its order is fixed as well, but depends on the machine.
    #[default]
    Vector,
}

/// The widest instructions that may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Isa {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            if avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Baseline
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "AVX-512",
        }
    }
}

/// The widest vector instructions that kernels use on this machine: `"AVX2"` or `"AVX-512"`, or
/// `None` where they are compiled for the least that its architecture has.
pub fn vector_instructions() -> Option<&'static str> {
    let isa = Isa::detect();
    (isa != Isa::Baseline).then(|| isa.name())
}

type Norm = unsafe fn(&mut [f32], Option<&[f32]>, &[f32], f32, &mut [f32]);

/// One compiled version of each plain kernel; see [`plain`] for what they do.
///
/// # Safety
/// The functions may be called on a machine for which [`Kernels::new`] chose them; `attend` has
/// the contract of [`plain::attend`] besides.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    pub(super) dots: unsafe fn(&[f32], &[f32], &mut [f32; DOT_ROWS]),
    pub(super) norm: Norm,
    pub(super) swiglu: unsafe fn(&mut [f32], &[f32]),
    pub(super) rotate: unsafe fn(&mut [f32], &[f32]),
    pub(super) attend: unsafe fn(&[f32], KvHead<'_>, &mut [f32], &mut [f32]),
}

macro_rules! compile {
    ($module:ident, $arithmetic:ty $(, $features:literal)?) => {
        mod $module {
            use super::*;

            $(#[target_feature(enable = $features)])?
            unsafe fn dots(x: &[f32], weights: &[f32], out: &mut [f32; DOT_ROWS]) {
                plain::dots::<$arithmetic>(x, weights, out);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn norm(x: &mut [f32], delta: Option<&[f32]>, weight: &[f32], eps: f32, out: &mut [f32]) {
                plain::norm::<$arithmetic>(x, delta, weight, eps, out);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn swiglu(gate: &mut [f32], up: &[f32]) {
                plain::swiglu::<$arithmetic>(gate, up);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn rotate(head: &mut [f32], rotation: &[f32]) {
                plain::rotate::<$arithmetic>(head, rotation);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn attend(query: &[f32], kv: KvHead<'_>, scores: &mut [f32], out: &mut [f32]) {
                // SAFETY: the caller keeps the contract of `plain::attend`.
                unsafe { plain::attend::<$arithmetic>(query, kv, scores, out) };
            }

            pub(super) const KERNELS: Kernels = Kernels { dots, norm, swiglu, rotate, attend };
        }
    };
}

compile!(separate, Separate);
#[cfg(target_arch = "x86_64")]
compile!(separate_avx2, Separate, "avx2");
#[cfg(target_arch = "x86_64")]
compile!(separate_avx512, Separate, "avx512f,avx512bw,avx512dq,avx512vl");
#[cfg(target_arch = "x86_64")]
compile!(fused_avx2, Fused, "avx2,fma");
#[cfg(target_arch = "x86_64")]
compile!(fused_avx512, Fused, "avx512f,avx512bw,avx512dq,avx512vl,fma");

impl Kernels {
    /// The versions for a tier on a machine that has `isa`.
    pub(super) fn new(tier: Tier, isa: Isa) -> Self {
        match (tier, isa) {
            (_, Isa::Baseline) => separate::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Tier::Scalar, Isa::Avx2) => separate_avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Tier::Scalar, Isa::Avx512) => separate_avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Tier::Vector, Isa::Avx2) => fused_avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Tier::Vector, Isa::Avx512) => fused_avx512::KERNELS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| (((i + seed) * 7919 % 2003) as f32 - 1000.0) / 400.0).collect()
    }

    /// The scalar tier's kernels give the same bits whatever they were compiled for.
    #[test]
    fn compiled_versions_agree_bit_for_bit() {
        let base = Kernels::new(Tier::Scalar, Isa::Baseline);
        let mut others = vec![];
        #[cfg(target_arch = "x86_64")]
        others.extend([Isa::Avx2, Isa::Avx512].into_iter().filter(|&isa| isa <= Isa::detect()));
        for n in [1, 17, 64, 96, 576, 1000] {
            let run = |kernels: Kernels| {
                let (mut x, mut out, mut four) = (numbers(n, 1), vec![0.0; n], [0.0; DOT_ROWS]);
                let mut even = numbers(2 * n, 9);
                // SAFETY: only sets that this machine can run are tried.
                unsafe {
                    (kernels.norm)(&mut x, Some(&numbers(n, 2)), &numbers(n, 3), 1e-5, &mut out);
                    (kernels.swiglu)(&mut x, &numbers(n, 4));
                    (kernels.dots)(&numbers(n, 5), &numbers(DOT_ROWS * n, 6), &mut four);
                    (kernels.rotate)(&mut even, &numbers(2 * n, 7));
                }
                [x, out, four.to_vec(), even].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            for &isa in &others {
                assert_eq!(run(base), run(Kernels::new(Tier::Scalar, isa)), "{n} {}", isa.name());
            }
        }
    }
}
