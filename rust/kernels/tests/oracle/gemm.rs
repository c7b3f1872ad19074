//! Products with weights.

/// An output, and the sum of its products' sizes, by which errors of summing are measured.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub(crate) sum: f64,
    pub(crate) size: f64,
}

/// `x * w^T` for x `[rows][inputs]` and w `[outputs][inputs]`: `[rows][outputs]`.
pub(crate) fn gemm(x: &[f64], w: &[f64], inputs: usize) -> Vec<Product> {
    let one = |x: &[f64], w: &[f64]| {
        let products = x.iter().zip(w).map(|(a, b)| a * b);
        products.fold(Product { sum: 0.0, size: 0.0 }, |all, p| Product {
            sum: all.sum + p,
            size: all.size + p.abs(),
        })
    };
    x.chunks(inputs).flat_map(|x| w.chunks(inputs).map(move |w| one(x, w))).collect()
}
