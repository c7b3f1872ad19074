//! RMSNorm of a row, rounded as Llama rounds.

/// `h / rms(h) * weight`, where `round` is what storing an element does.
pub(crate) fn rms_norm(h: &[f64], weight: &[f64], eps: f64, round: impl Fn(f64) -> f64) -> Vec<f64> {
    let mean = h.iter().map(|x| x * x).sum::<f64>() / h.len() as f64;
    let scale = 1.0 / (mean + eps).sqrt();
    h.iter().zip(weight).map(|(x, w)| round(round(x * scale) * w)).collect()
}
