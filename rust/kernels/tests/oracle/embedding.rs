//! Rows of a table.

/// The rows of `ids`; zeros for ids outside the table.
pub(crate) fn embedding(table: &[f64], dim: usize, ids: &[i32]) -> Vec<f64> {
    let vocab = table.len() / dim;
    let row = |&id: &i32| match usize::try_from(id) {
        Ok(id) if id < vocab => table[id * dim..(id + 1) * dim].to_vec(),
        _ => vec![0.0; dim],
    };
    ids.iter().flat_map(row).collect()
}
