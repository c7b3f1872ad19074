//! Attention of one query of one head over the keys that it sees.

/// `softmax(scale * q K^T) V`; keys and values are `[tokens][head_dim]`.
pub(crate) fn attention(q: &[f64], keys: &[f64], values: &[f64], scale: f64) -> Vec<f64> {
    let dim = q.len();
    let scores: Vec<f64> =
        keys.chunks(dim).map(|k| scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| libm::exp(s - largest)).collect();
    let total: f64 = weights.iter().sum();
    let mut out = vec![0.0; dim];
    for (weight, value) in weights.iter().zip(values.chunks(dim)) {
        for (out, v) in out.iter_mut().zip(value) {
            *out += weight / total * v;
        }
    }
    out
}
