//! Rotary positions.

/// A head turned by `rotation`, its cosines and then its sines.
pub(crate) fn rotated(head: &[f64], rotation: &[f64], interleaved: bool) -> Vec<f64> {
    let half = head.len() / 2;
    let mut out = head.to_vec();
    for pair in 0..half {
        let (low, high) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
        let (cos, sin) = (rotation[pair], rotation[half + pair]);
        out[low] = head[low] * cos - head[high] * sin;
        out[high] = head[high] * cos + head[low] * sin;
    }
    out
}
