//! What an engine will take, reckoned before it takes it.

use kvrelay_model::Model;

use crate::backend::{KvGeometry, Limits};
use crate::config::Numerics;
use crate::error::{EngineError, mebibytes};

/// Bytes of an `f32`.
const F32: u64 = 4;

/// An engine's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Copies of weights; the mapped file itself can be dropped by the system and counts for nothing.
    pub(crate) weights: u64,
    /// KV of all workers.
    pub(crate) kv: u64,
    /// Buffers of all workers.
    pub(crate) buffers: u64,
}

impl Plan {
    pub(crate) fn new(
        model: &Model,
        numerics: Numerics,
        geometry: &KvGeometry,
        limits: &Limits,
        workers: usize,
        kv_blocks: u32,
    ) -> Plan {
        let workers = workers as u64;
        let weights = match numerics {
            Numerics::Invariant => 0,
            Numerics::Fast => model.weights().num_bytes() as u64,
        };
        let block = geometry.block_bytes() as u64;
        let kv = workers.saturating_mul(u64::from(kv_blocks)).saturating_mul(block);
        Plan { weights, kv, buffers: workers * worker_buffers(model, limits) }
    }

    fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.buffers)
    }

    /// Refuses a plan that the machine has no room for.
    pub(crate) fn check(&self, available: Option<u64>) -> Result<(), EngineError> {
        match available {
            Some(available) if self.total() > available => Err(EngineError::Memory {
                needed: self.total(),
                available,
                parts: parts(self.weights, self.kv, self.buffers),
            }),
            _ => Ok(()),
        }
    }
}

/// The parts of a need, in bytes, for people.
pub(crate) fn parts(weights: u64, kv: u64, buffers: u64) -> String {
    format!("weights {}, KV {}, buffers {}", mebibytes(weights), mebibytes(kv), mebibytes(buffers))
}

/// Activations and logits of the largest step.
fn worker_buffers(model: &Model, limits: &Limits) -> u64 {
    let config = model.config();
    let heads = config.num_heads + 2 * config.num_kv_heads;
    let per_token = 4 * config.hidden_size + 2 * config.ffn_size + heads * config.head_dim;
    let per_logits = config.hidden_size + config.vocab_size;
    let tables = limits.max_positions * config.head_dim;
    let numbers = limits.max_tokens * per_token + limits.max_logits * per_logits + tables;
    numbers as u64 * F32
}

/// Bytes that could be had without pushing anybody out; `None` where the system does not say.
pub(crate) fn available() -> Option<u64> {
    let system = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    [system, group_available()].into_iter().flatten().min()
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What is left of a container's limit (control groups, version 2), cached files not counted.
fn group_available() -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    // "max" is no number: then there is no limit.
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let stat = read("memory.stat")?;
    let files = stat.lines().find_map(|line| line.strip_prefix("file ")?.trim().parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_beyond_the_machine_is_refused_with_the_numbers() {
        let plan = Plan { weights: 100 << 20, kv: 1 << 40, buffers: 11 };
        plan.check(None).unwrap();
        plan.check(Some(1 << 41)).unwrap();
        let error = plan.check(Some(1 << 30)).unwrap_err().to_string();
        for number in ["1048677 MiB", "1024 MiB", "weights 100 MiB", "KV 1048576 MiB", "buffers 1 MiB"] {
            assert!(error.contains(number), "{error} lacks {number}");
        }
    }

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        let text = "MemTotal:       8000000 kB\nMemAvailable:   1000 kB\nSwapFree: 1 kB\n";
        assert_eq!(mem_available(text), Some(1_024_000));
        assert_eq!(mem_available("MemFree: 5 kB"), None);
    }
}
