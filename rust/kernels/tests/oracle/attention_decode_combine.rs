//! Splits added up.

use super::attention_decode::Part;

/// The row's output; zeros if there is no split.
pub(crate) fn combined(parts: &[Part], head_dim: usize) -> Vec<f64> {
    let largest = parts.iter().map(|part| part.largest).fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0.0; head_dim];
    let mut total = 0.0;
    for part in parts {
        let shrink = (part.largest - largest).exp2();
        total += part.sum * shrink;
        for (out, x) in out.iter_mut().zip(&part.output) {
            *out += x * shrink;
        }
    }
    if parts.is_empty() { out } else { out.iter().map(|x| x / total).collect() }
}
