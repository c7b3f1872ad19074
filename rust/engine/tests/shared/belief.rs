//! What policies of tests predict with.

use std::sync::Arc;

use kvrelay_core::latency::linear::{DecodeTerms, Linear, PrefillTerms};
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::scheduler::Belief;

/// Any belief will do where no test looks at it; measuring would cost time.
pub(crate) fn belief(workers: usize) -> Belief {
    let decode = DecodeTerms { constant: 0.2, per_context: 1e-4, per_row: 0.1 };
    let model = Linear {
        prefill: PrefillTerms { constant: 0.2, per_token: 0.05, per_square: 0.0 },
        decode_small: decode,
        decode_large: decode,
        large_from: u32::MAX,
    };
    let model: Arc<dyn LatencyModel> = Arc::new(model);
    Belief { steps: vec![model; workers], link: Link::INSTANT, kv_bytes_per_token: 1024 }
}
