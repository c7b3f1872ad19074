//! What one split of a row's keys gives.

/// The split's largest score, in units of log2; its sum of weights 2^(score - largest); and the sum of
/// its values by those weights.
pub(crate) struct Part {
    pub(crate) largest: f64,
    pub(crate) sum: f64,
    pub(crate) output: Vec<f64>,
}

/// Of the keys and values (`[tokens][head_dim]`) of a split.
pub(crate) fn part(q: &[f64], keys: &[f64], values: &[f64], scale: f64) -> Part {
    let dim = q.len();
    let score =
        |k: &[f64]| std::f64::consts::LOG2_E * scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
    let scores: Vec<f64> = keys.chunks(dim).map(score).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp2()).collect();
    let mut output = vec![0.0; dim];
    for (weight, value) in weights.iter().zip(values.chunks(dim)) {
        for (out, v) in output.iter_mut().zip(value) {
            *out += weight * v;
        }
    }
    Part { largest, sum: weights.iter().sum(), output }
}
