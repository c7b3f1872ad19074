//! Least squares with coefficients that are not negative: the active-set method of Lawson and Hanson
//! (Solving Least Squares Problems, 1974, chapter 23), over the normal equations.

/// One measurement: its terms, and what they should add up to.
#[derive(Clone, Debug)]
pub(super) struct Equation {
    pub(super) terms: Vec<f64>,
    pub(super) value: f64,
}

/// The normal equations, their columns scaled to unit length: a token² term is 10⁶ times a constant.
struct Normal {
    norms: Vec<f64>,
    gram: Vec<Vec<f64>>,
    target: Vec<f64>,
}

impl Normal {
    fn of(equations: &[Equation]) -> Normal {
        let size = equations.first().map_or(0, |equation| equation.terms.len());
        let norm =
            |term: usize| equations.iter().map(|equation| equation.terms[term].powi(2)).sum::<f64>().sqrt();
        let norms: Vec<f64> = (0..size).map(norm).collect();
        let scaled = |equation: &Equation, term: usize| {
            if norms[term] > 0.0 { equation.terms[term] / norms[term] } else { 0.0 }
        };
        let sum = |of: &dyn Fn(&Equation) -> f64| equations.iter().map(of).sum::<f64>();
        let gram = (0..size)
            .map(|a| (0..size).map(|b| sum(&|equation| scaled(equation, a) * scaled(equation, b))).collect())
            .collect();
        let target = (0..size).map(|a| sum(&|equation| scaled(equation, a) * equation.value)).collect();
        Normal { norms, gram, target }
    }

    /// The coefficient of a term, from that of its scaled column.
    fn unscaled(&self, term: usize, value: f64) -> f64 {
        if self.norms[term] > 0.0 { value / self.norms[term] } else { 0.0 }
    }
}

/// The non-negative coefficients with the least sum of squared errors; zero for terms that tell
/// nothing.
pub(super) fn non_negative(equations: &[Equation]) -> Vec<f64> {
    let normal = Normal::of(equations);
    let x = active_set(&normal.gram, &normal.target);
    x.into_iter().enumerate().map(|(term, value)| normal.unscaled(term, value)).collect()
}

/// The coefficients of `terms`, of any sign, with the least sum of squared errors; zero for all other
/// terms. `None` if the equations do not determine them.
pub(super) fn over(equations: &[Equation], terms: &[usize]) -> Option<Vec<f64>> {
    if equations.is_empty() {
        return None;
    }
    let normal = Normal::of(equations);
    let mut x = vec![0.0; normal.norms.len()];
    for (term, value) in terms.iter().zip(solve(&normal.gram, &normal.target, terms)?) {
        x[*term] = normal.unscaled(*term, value);
    }
    Some(x)
}

/// Minimises ½ xᵀ G x − tᵀ x over x ≥ 0.
fn active_set(gram: &[Vec<f64>], target: &[f64]) -> Vec<f64> {
    const TOLERANCE: f64 = 1e-10;
    let size = target.len();
    let mut x = vec![0.0; size];
    let mut free = vec![false; size];
    // Each round frees one term; more rounds than this would be turning in circles of rounding.
    for _ in 0..3 * size {
        let gain =
            |term: usize| target[term] - (0..size).map(|other| gram[term][other] * x[other]).sum::<f64>();
        let best = (0..size).filter(|term| !free[*term]).max_by(|a, b| gain(*a).total_cmp(&gain(*b)));
        let Some(best) = best.filter(|term| gain(*term) > TOLERANCE) else { break };
        free[best] = true;
        loop {
            let terms: Vec<usize> = (0..size).filter(|term| free[*term]).collect();
            let Some(solution) = solve(gram, target, &terms) else {
                // It says what the others say already.
                free[best] = false;
                x[best] = 0.0;
                break;
            };
            let negative = terms.iter().zip(&solution).filter(|(_, value)| **value <= 0.0);
            let step =
                negative.map(|(term, value)| x[*term] / (x[*term] - value)).fold(f64::INFINITY, f64::min);
            if step == f64::INFINITY {
                for (term, value) in terms.iter().zip(&solution) {
                    x[*term] = *value;
                }
                break;
            }
            for (term, value) in terms.iter().zip(&solution) {
                x[*term] += step.min(1.0) * (value - x[*term]);
                if x[*term] <= TOLERANCE && *value <= 0.0 {
                    (x[*term], free[*term]) = (0.0, false);
                }
            }
            if !free[best] && !free.contains(&true) {
                break;
            }
        }
    }
    x
}

/// Solves G x = t over `terms`, by Gaussian elimination; `None` if they are (nearly) dependent.
fn solve(gram: &[Vec<f64>], target: &[f64], terms: &[usize]) -> Option<Vec<f64>> {
    const SINGULAR: f64 = 1e-10;
    let size = terms.len();
    let mut rows: Vec<Vec<f64>> =
        terms.iter().map(|a| terms.iter().map(|b| gram[*a][*b]).chain([target[*a]]).collect()).collect();
    for pivot in 0..size {
        let best = (pivot..size).max_by(|a, b| rows[*a][pivot].abs().total_cmp(&rows[*b][pivot].abs()))?;
        rows.swap(pivot, best);
        if rows[pivot][pivot].abs() < SINGULAR {
            return None;
        }
        let pivot_row = rows[pivot].clone();
        for row in rows.iter_mut().skip(pivot + 1) {
            let factor = row[pivot] / pivot_row[pivot];
            for (value, above) in row.iter_mut().zip(&pivot_row).skip(pivot) {
                *value -= factor * above;
            }
        }
    }
    let mut x = vec![0.0; size];
    for i in (0..size).rev() {
        let known: f64 = (i + 1..size).map(|j| rows[i][j] * x[j]).sum();
        x[i] = (rows[i][size] - known) / rows[i][i];
    }
    Some(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The conditions of Karush, Kuhn and Tucker: no term is negative, the gradient vanishes
        /// where a term counts, and points outward where it does not.
        #[test]
        fn no_other_coefficients_are_better(
            rows in prop::collection::vec(prop::collection::vec(-3.0f64..3.0, 4), 5..12),
            values in prop::collection::vec(-3.0f64..3.0, 12),
        ) {
            let equations: Vec<_> =
                rows.iter().zip(&values).map(|(terms, value)| Equation { terms: terms.clone(), value: *value }).collect();
            let x = non_negative(&equations);
            for term in 0..4 {
                let gradient: f64 = equations
                    .iter()
                    .map(|equation| {
                        let sum: f64 = equation.terms.iter().zip(&x).map(|(a, b)| a * b).sum();
                        equation.terms[term] * (sum - equation.value)
                    })
                    .sum();
                prop_assert!(x[term] >= 0.0);
                prop_assert!(gradient > -1e-6, "more of term {term} is better: {gradient}");
                prop_assert!(x[term] == 0.0 || gradient.abs() < 1e-6, "less of term {term} is better: {gradient}");
            }
        }
    }
}
