// Products with weights of the activations' own type; see gemm.cuh.
#include "gemm.cuh"

GEMM_PLAIN(bf16)
GEMM_PLAIN(f16)
