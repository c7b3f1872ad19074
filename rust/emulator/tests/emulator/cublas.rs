//! The stand-in of cuBLAS: right products, in the order of their stream, and no dead process.

use crate::common::{Gpu, emulated, error};
use cudarc::cublas::sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
use cudarc::cublas::{CudaBlas, Gemm, GemmConfig};
use cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
use half::{bf16, f16};
use kvrelay_emulator::test_name;

const ROWS: usize = 5;
const OUTPUTS: usize = 7;
const INPUTS: usize = 33;

/// Small whole numbers, whose products and sums are exact in every type used here.
fn numbers(count: usize, step: usize) -> impl Iterator<Item = f32> {
    (0..count).map(move |at| (at * step % 7) as f32 - 3.0)
}

/// What each type is tried with: `y = x wᵀ`, rows of `x` and of `w` in memory one after the other.
fn product<T>(from: impl Fn(f32) -> T, to: impl Fn(T) -> f32)
where
    T: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits + Copy,
    CudaBlas: Gemm<T>,
{
    let gpu = Gpu::new(0);
    let x: Vec<f32> = numbers(ROWS * INPUTS, 5).collect();
    let w: Vec<f32> = numbers(OUTPUTS * INPUTS, 3).collect();
    let input = gpu.stream.clone_htod(&x.iter().map(|&one| from(one)).collect::<Vec<T>>()).unwrap();
    let weight = gpu.stream.clone_htod(&w.iter().map(|&one| from(one)).collect::<Vec<T>>()).unwrap();
    let mut out = gpu.stream.alloc_zeros::<T>(ROWS * OUTPUTS).unwrap();
    let blas = CudaBlas::new(gpu.stream.clone()).unwrap();
    let config = GemmConfig {
        transa: CUBLAS_OP_T,
        transb: CUBLAS_OP_N,
        m: OUTPUTS as i32,
        n: ROWS as i32,
        k: INPUTS as i32,
        alpha: from(2.0),
        lda: INPUTS as i32,
        ldb: INPUTS as i32,
        beta: from(0.0),
        ldc: OUTPUTS as i32,
    };
    // SAFETY: the sizes that the configuration says.
    unsafe { blas.gemm(config, &weight, &input, &mut out) }.unwrap();
    let seen = gpu.stream.clone_dtoh(&out).unwrap();
    for row in 0..ROWS {
        for output in 0..OUTPUTS {
            let pairs = x[row * INPUTS..].iter().zip(&w[output * INPUTS..]).take(INPUTS);
            let expected = to(from(2.0 * pairs.map(|(a, b)| a * b).sum::<f32>()));
            assert_eq!(to(seen[row * OUTPUTS + output]), expected, "row {row}, output {output}");
        }
    }
}

#[test]
fn products() {
    emulated(test_name!()).set("JITTER_US", 200).run(|| {
        product(bf16::from_f32, bf16::to_f32);
        product(f16::from_f32, f16::to_f32);
    });
}

#[test]
fn a_matrix_that_is_too_small() {
    let text = emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let blas = CudaBlas::new(gpu.stream.clone()).unwrap();
        let small = gpu.stream.alloc_zeros::<f16>(16).unwrap();
        let mut out = gpu.stream.alloc_zeros::<f16>(16).unwrap();
        let n = 10_000;
        let (alpha, beta) = (f16::ONE, f16::ZERO);
        let (transa, transb) = (CUBLAS_OP_N, CUBLAS_OP_N);
        let config = GemmConfig { transa, transb, m: 1, n: 1, k: n, alpha, lda: 1, ldb: n, beta, ldc: 1 };
        // SAFETY: not at all, which is what is tested; the emulator keeps it from this process.
        unsafe { blas.gemm(config, &small, &small, &mut out) }.unwrap();
        assert_eq!(error(gpu.stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    assert!(text.is_none_or(|text| text.contains("a product of matrices: it touches the address")));
}
