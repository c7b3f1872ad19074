//! `silu(gate) * up`, the activation rounded before the product.

/// One row: `gate_up` is `[2][width]`.
pub(crate) fn swiglu(gate_up: &[f64], round: impl Fn(f64) -> f64) -> Vec<f64> {
    let (gate, up) = gate_up.split_at(gate_up.len() / 2);
    gate.iter().zip(up).map(|(g, u)| round(round(g / (1.0 + libm::exp(-g))) * u)).collect()
}
