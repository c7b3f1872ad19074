//! `gelu(gate) * up` by the approximation with tanh, the activation rounded before the product.

/// One row: `gate_up` is `[2][width]`.
pub(crate) fn geglu(gate_up: &[f64], round: impl Fn(f64) -> f64) -> Vec<f64> {
    let (gate, up) = gate_up.split_at(gate_up.len() / 2);
    let gelu = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        0.5 * x * (1.0 + inner.tanh())
    };
    gate.iter().zip(up).map(|(&g, u)| round(round(gelu(g)) * u)).collect()
}
