// Products with quantised weights; see gemm.cuh.
#include "gemm.cuh"

GEMM_QUANTISED(bf16, Q4_0, q4_0)
GEMM_QUANTISED(bf16, Q4_1, q4_1)
GEMM_QUANTISED(bf16, Q8_0, q8_0)
GEMM_QUANTISED(f16, Q4_0, q4_0)
GEMM_QUANTISED(f16, Q4_1, q4_1)
GEMM_QUANTISED(f16, Q8_0, q8_0)
