//! RMSNorm of query and key heads.

use super::rms_norm::rms_norm;

/// A row `[q_heads + 2 * kv_heads][head_dim]` after it.
pub(crate) fn head_norm(
    row: &[f64],
    [q_weight, k_weight]: [&[f64]; 2],
    q_heads: usize,
    kv_heads: usize,
    eps: f64,
    round: impl Fn(f64) -> f64,
) -> Vec<f64> {
    let heads = row.chunks(q_weight.len()).enumerate();
    let normed = heads.flat_map(|(head, x)| match head {
        _ if head < q_heads => rms_norm(x, q_weight, eps, &round),
        _ if head < q_heads + kv_heads => rms_norm(x, k_weight, eps, &round),
        _ => x.to_vec(),
    });
    normed.collect()
}
