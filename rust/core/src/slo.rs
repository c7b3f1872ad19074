//! Service-level objectives: what a request must meet to count as good.

use crate::time::{Nanos, Time};

/// The objectives of one request. Each is optional; equality meets an objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    /// Time to first token.
    pub ttft: Option<Nanos>,
    /// Mean time per output token after the first.
    pub tpot: Option<Nanos>,
    /// Arrival to last token.
    pub e2e: Option<Nanos>,
    /// The longest gap between two consecutive tokens.
    pub max_gap: Option<Nanos>,
    /// Also hold token `i` to arrival + `ttft` + `i * tpot`.
    pub token_deadlines: bool,
}

impl Slo {
    /// Whether there is any objective at all; without one a request is on neither side of goodput.
    pub fn is_some(&self) -> bool {
        self.ttft.is_some() || self.tpot.is_some() || self.e2e.is_some() || self.max_gap.is_some()
    }

    /// When the first token is due.
    pub fn first_token_deadline(&self, arrival: Time) -> Option<Time> {
        self.ttft.map(|ttft| arrival + ttft)
    }

    /// When token `index` (0 is the first) is due under `token_deadlines`.
    pub fn token_deadline(&self, arrival: Time, index: u32) -> Option<Time> {
        if !self.token_deadlines {
            return None;
        }
        let (ttft, tpot) = (self.ttft?, self.tpot?);
        Some(arrival + ttft + Nanos(tpot.0.saturating_mul(u64::from(index))))
    }
}
