//! The *table* model: step times read off measurements.
//!
//! A step costs what its tokens cost in the linear layers, a function of their number that is read
//! off a table and interpolated linearly, plus attention and per-row work that are linear in the
//! batch's sums:
//!
//! `table(tokens) + r·rows + q·Σ((prefix + chunk)² − prefix²) + c·Σcontext`
//!
//! where rows are chunks and decodes alike. One form holds for prefill, decode and mixed steps. The
//! table never falls and no coefficient is negative, so more work never takes less time. Beyond the
//! largest step that was measured the last slope goes on; how far one went is kept, for the caller
//! to refuse (see [`Table::farthest`]).

use std::sync::atomic::{AtomicU64, Ordering};

use super::LatencyModel;
use super::fitted::Sample;
use super::least_squares::{Equation, non_negative};
use crate::step::{StepShape, Stretch};
use crate::time::Picos;

/// A day: no step takes so long.
const MOST_MILLISECONDS: f64 = 86_400_000.0;

/// What a table is made of, in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct TableTerms {
    /// Tokens of a step, increasing, and its time.
    pub nodes: Vec<(u64, f64)>,
    /// Per chunk or decode row.
    pub per_row: f64,
    /// Per token², over Σ((prefix + chunk)² − prefix²).
    pub per_square: f64,
    /// Per token of context of the decode rows.
    pub per_context: f64,
    /// The most context tokens that a measured step's decode rows had together.
    pub most_context: u64,
}

/// Why there is no table.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TableError {
    /// Nothing to read off.
    #[error("a latency table needs at least 1 step with a time above 0, found {found}")]
    Empty {
        /// Steps given.
        found: usize,
    },
    /// Nodes that are none.
    #[error(
        "latency table: {tokens} tokens take {milliseconds} ms after {before} tokens took {earlier} ms; tokens must increase and times must not fall"
    )]
    Nodes {
        /// Tokens of the offending node.
        tokens: u64,
        /// Its time.
        milliseconds: f64,
        /// Tokens of the node before.
        before: u64,
        /// Its time.
        earlier: f64,
    },
    /// A coefficient that is none.
    #[error("latency table: {name} is {value} ms; it must be at least 0 and at most {MOST_MILLISECONDS}")]
    Coefficient {
        /// Which.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

/// The table model.
#[derive(Debug)]
pub struct Table {
    terms: TableTerms,
    /// The same in integer picoseconds, so that runs of steps are exact progressions.
    nodes: Vec<(u64, u64)>,
    per_row: u64,
    per_context: u64,
    beyond: AtomicU64,
    beyond_context: AtomicU64,
}

impl Table {
    /// Checks and takes `terms`.
    pub fn new(terms: TableTerms) -> Result<Table, TableError> {
        if terms.nodes.is_empty() {
            return Err(TableError::Empty { found: 0 });
        }
        let values = [
            ("per_row", terms.per_row),
            ("per_square", terms.per_square),
            ("per_context", terms.per_context),
            ("its first time", terms.nodes[0].1),
        ];
        for (name, value) in values {
            if !(0.0..=MOST_MILLISECONDS).contains(&value) {
                return Err(TableError::Coefficient { name, value });
            }
        }
        for pair in terms.nodes.windows(2) {
            let ((before, earlier), (tokens, milliseconds)) = (pair[0], pair[1]);
            if before >= tokens || !(earlier..=MOST_MILLISECONDS).contains(&milliseconds) {
                return Err(TableError::Nodes { tokens, milliseconds, before, earlier });
            }
        }
        let picos = |milliseconds: f64| Picos::from_millis_f64(milliseconds).0;
        Ok(Table {
            nodes: terms.nodes.iter().map(|(tokens, ms)| (*tokens, picos(*ms))).collect(),
            per_row: picos(terms.per_row),
            per_context: picos(terms.per_context),
            beyond: AtomicU64::new(0),
            beyond_context: AtomicU64::new(0),
            terms,
        })
    }

    /// Fits a table to measured steps, by least squares of the relative error, so that a step of
    /// 2 ms counts as much as one of 2 s. Nodes lie at the powers of two between the smallest and
    /// the largest number of tokens, and at these two.
    pub fn fit(samples: &[Sample]) -> Result<Table, TableError> {
        let measured: Vec<&Sample> = samples
            .iter()
            .filter(|sample| sample.duration > Picos::ZERO && sample.shape.num_tokens() > 0)
            .collect();
        let tokens = || measured.iter().map(|sample| sample.shape.num_tokens());
        let (Some(least), Some(most)) = (tokens().min(), tokens().max()) else {
            return Err(TableError::Empty { found: samples.len() });
        };
        let mut nodes = vec![least];
        let mut power = least.next_power_of_two();
        while power < most {
            let last = nodes[nodes.len() - 1];
            // A node without a measurement since the one before it would be a guess.
            if power > last && tokens().any(|tokens| tokens > last && tokens <= power) {
                nodes.push(power);
            }
            power *= 2;
        }
        if most > least {
            nodes.push(most);
        }
        let equations: Vec<Equation> = measured
            .iter()
            .map(|sample| {
                let shape = &sample.shape;
                let milliseconds = sample.duration.0 as f64 * 1e-9;
                let mut terms = vec![1.0];
                terms.extend(nodes.windows(2).map(|pair| ramp(pair[0], pair[1], shape.num_tokens())));
                terms.extend([
                    f64::from(shape.num_rows()),
                    shape.prefill_square as f64,
                    shape.decode_context as f64,
                ]);
                Equation { terms: terms.iter().map(|term| term / milliseconds).collect(), value: 1.0 }
            })
            .collect();
        let x = non_negative(&equations);
        let (steps, linear) = x.split_at(nodes.len());
        let times = steps.iter().scan(0.0, |sum, step| {
            *sum += step;
            Some(*sum)
        });
        Table::new(TableTerms {
            nodes: nodes.iter().copied().zip(times).collect(),
            per_row: linear[0],
            per_square: linear[1],
            per_context: linear[2],
            most_context: measured.iter().map(|sample| sample.shape.decode_context).max().unwrap_or(0),
        })
    }

    /// What it is made of.
    pub fn terms(&self) -> &TableTerms {
        &self.terms
    }

    /// The most tokens, and the most context tokens, of a step that was asked for beyond what was
    /// measured; zero where none was.
    pub fn farthest(&self) -> (u64, u64) {
        (self.beyond.load(Ordering::Relaxed), self.beyond_context.load(Ordering::Relaxed))
    }

    /// Picoseconds of the linear layers.
    fn layers(&self, tokens: u64) -> u64 {
        let first = self.nodes[0];
        let at = self.nodes.partition_point(|(node, _)| *node < tokens).min(self.nodes.len() - 1);
        if at == 0 || tokens <= first.0 {
            // Fewer tokens than were ever measured read the weights all the same.
            return if self.nodes.len() == 1 { in_proportion(first, tokens) } else { first.1 };
        }
        let ((from, start), (to, end)) = (self.nodes[at - 1], self.nodes[at]);
        let slope = u128::from(end - start) * u128::from(tokens - from) / u128::from(to - from);
        start.saturating_add(u64::try_from(slope).unwrap_or(u64::MAX))
    }
}

/// From 0 at `from` to 1 at `to`, and constant outside.
fn ramp(from: u64, to: u64, tokens: u64) -> f64 {
    let tokens = tokens.clamp(from, to);
    (tokens - from) as f64 / (to - from) as f64
}

/// The only node there is, for more tokens than it has.
fn in_proportion((tokens, picos): (u64, u64), wanted: u64) -> u64 {
    let more = u128::from(picos) * u128::from(wanted.max(tokens)) / u128::from(tokens.max(1));
    u64::try_from(more).unwrap_or(u64::MAX)
}

impl LatencyModel for Table {
    fn stretch(&self, shape: &StepShape, max_steps: u32) -> Stretch {
        let tokens = shape.num_tokens();
        if tokens > self.nodes[self.nodes.len() - 1].0 {
            self.beyond.fetch_max(tokens, Ordering::Relaxed);
        }
        let decodes = shape.num_prefill == 0;
        let steps = if decodes { max_steps.max(1) } else { 1 };
        let last = shape.after(u64::from(steps - 1)).decode_context;
        if last > self.terms.most_context {
            self.beyond_context.fetch_max(last, Ordering::Relaxed);
        }
        let square = Picos::from_millis_f64(self.terms.per_square * shape.prefill_square as f64).0;
        let rows = self.per_row.saturating_mul(u64::from(shape.num_rows()));
        let context = self.per_context.saturating_mul(shape.decode_context);
        let terms = [self.layers(tokens), rows, context, square];
        let first = terms.into_iter().fold(0, u64::saturating_add);
        if !decodes {
            return Stretch::single(Picos(first));
        }
        let delta = self.per_context.saturating_mul(u64::from(shape.num_decode));
        Stretch { first: Picos(first), delta: i64::try_from(delta).unwrap_or(i64::MAX), steps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn truth() -> Table {
        Table::new(TableTerms {
            nodes: vec![(1, 4.0), (8, 5.0), (64, 20.0), (512, 130.0)],
            per_row: 0.02,
            per_square: 2e-6,
            per_context: 1e-3,
            most_context: 10_000,
        })
        .unwrap()
    }

    fn shapes() -> Vec<StepShape> {
        let mut shapes: Vec<_> =
            [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 512].map(|chunk| StepShape::prefill(0, chunk)).to_vec();
        shapes.extend([64, 256].map(|chunk| StepShape::prefill(1_000, chunk)));
        for (rows, context) in [(1, 16), (1, 900), (4, 100), (8, 3_000), (16, 500), (64, 9_000)] {
            shapes.push(StepShape::decode(rows, context));
            shapes.push(StepShape::decode(rows, context) + StepShape::prefill(0, 128));
        }
        shapes
    }

    #[test]
    fn a_table_is_found_again_from_what_it_says() {
        let truth = truth();
        let sample = |shape: StepShape| Sample { shape, duration: truth.step(&shape) };
        let found = Table::fit(&shapes().into_iter().map(sample).collect::<Vec<_>>()).unwrap();
        for shape in shapes() {
            let (a, b) = (found.step(&shape).0 as f64, truth.step(&shape).0 as f64);
            assert!((a - b).abs() <= 0.02 * b, "{shape:?}: {a} against {b}");
        }
        assert_eq!(found.farthest(), (0, 0));
        let beyond = found.step(&StepShape::prefill(0, 1_024));
        assert!(beyond > found.step(&StepShape::prefill(0, 512)));
        assert_eq!(found.farthest(), (1_024, 0));
        found.stretch(&StepShape::decode(2, 9_990), 20);
        assert_eq!(found.farthest(), (1_024, 9_990 + 2 * 19));
    }

    #[test]
    fn what_is_no_table_says_so() {
        assert_eq!(Table::fit(&[]).unwrap_err(), TableError::Empty { found: 0 });
        let terms = |nodes| TableTerms { nodes, ..truth().terms().clone() };
        let told = |terms| Table::new(terms).unwrap_err().to_string();
        assert!(
            told(terms(vec![(1, 2.0), (4, 1.0)])).contains("4 tokens take 1 ms after 1 tokens took 2 ms")
        );
        assert!(told(terms(vec![(4, 1.0), (4, 2.0)])).contains("tokens must increase"));
        let negative = TableTerms { per_row: -1.0, ..truth().terms().clone() };
        assert!(told(negative).contains("per_row is -1 ms"));
    }

    proptest! {
        /// Whatever was measured: runs equal single steps, and more work never takes less.
        #[test]
        fn any_fit_is_a_model(durations in prop::collection::vec(1u64..1_000_000_000_000, 25)) {
            let samples = shapes().into_iter().zip(durations);
            let samples: Vec<_> = samples.map(|(shape, ps)| Sample { shape, duration: Picos(ps) }).collect();
            let found = Table::fit(&samples).unwrap();
            let shape = StepShape::decode(7, 700);
            let run = found.stretch(&shape, 50);
            for step in 0..run.steps {
                prop_assert_eq!(run.step(step), found.step(&shape.after(u64::from(step))));
            }
            for chunk in [1, 3, 8, 100, 511, 700] {
                let less = found.step(&StepShape::prefill(0, chunk));
                prop_assert!(less <= found.step(&StepShape::prefill(0, chunk + 1)));
            }
        }
    }
}
