//! A million requests: CPU time, and memory beside the records, of the settings that simulators are
//! compared in; few workers against a thousand; and a trace with prefix caching. One run each, on one
//! thread; `KVRELAY_REQUESTS` for another number, `KVRELAY_CASE` for the cases whose names hold a text.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvrelay_benches::{cluster, workload_at};
use kvrelay_core::policy::built_in;
use kvrelay_core::record::{Detail, RequestRecord};
use kvrelay_core::request::PromptContent;
use kvrelay_core::time::{Nanos, Time};
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Options, SimCluster, simulate};
use kvrelay_workload::trace::TraceOptions;
use kvrelay_workload::{Class, Workload};

/// Counts live bytes, and the most there were.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let live = LIVE.fetch_add(size, Ordering::Relaxed) + size - layout.size();
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// CPU time of this thread, so that what else the machine does counts less.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux tells");
    let nanos = text.split_whitespace().next().and_then(|nanos| nanos.parse::<f64>().ok());
    nanos.expect("CPU time is the first number") / 1e9
}

/// A setting: its name, the cluster, the requests.
struct Case {
    name: String,
    cluster: SimCluster,
    workload: Workload,
    policy: &'static str,
}

impl Case {
    /// Lengths of Azure's conversations at `rate` requests per second.
    fn azure(topology: &str, rate: f64, count: usize, policy: &'static str) -> Case {
        let workload = workload_at(rate, count);
        Case {
            name: format!("azure, {topology} at {rate:.1}/s"),
            cluster: cluster(topology),
            workload,
            policy,
        }
    }

    /// As [`Case::azure`], with pools that are small enough for a thousand of them.
    fn many_workers(num_prefill: u32, count: usize) -> Case {
        let topology = format!("{num_prefill}P{}D", num_prefill / 2);
        let mut case = Case::azure(&topology, 3.3 * f64::from(num_prefill), count, "disaggregated");
        for worker in &mut case.cluster.workers {
            worker.num_blocks = 3_000;
        }
        case
    }

    /// Mooncake's conversation trace, tiled: times shifted, prefixes of each tile its own but for the
    /// first block, which is in every request. `None` where the trace is not there.
    fn mooncake(tiles: u64) -> Option<Case> {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../shared/traces/mooncake_conversation_trace.jsonl");
        let options = TraceOptions { slot: Some(Nanos::from_secs_f64(3.0)), ..TraceOptions::default() };
        let trace = kvrelay_workload::trace::read(&path, &options).ok()?;
        let span = trace.records.last()?.at.0 + 3_000_000_000;
        let mut records = Vec::with_capacity(trace.records.len() * tiles as usize);
        for tile in 0..tiles {
            records.extend(trace.records.iter().cloned().map(|mut record| {
                record.at = Time(record.at.0 + tile * span);
                if let PromptContent::HashIds { ids, .. } = &mut record.content {
                    *ids = ids.iter().map(|id| if *id == 0 { 0 } else { id + (tile << 40) }).collect();
                }
                record
            }));
        }
        let workload = Workload::from_records(records, vec![Class::default()], 0).ok()?;
        let mut cluster = cluster("12P12D");
        cluster.limits.block_tokens = 512;
        for worker in &mut cluster.workers {
            worker.num_blocks /= 32;
        }
        Some(Case { name: format!("mooncake x {tiles}, 12P12D"), cluster, workload, policy: "disaggregated" })
    }

    fn measure(&self) {
        let mut source = self.workload.source();
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let policy = built_in(self.policy).expect("a built-in policy");
        let options = Options { detail: Detail::RequestsOnly, ..Options::default() };
        let started = cpu_seconds();
        let run = simulate(&self.cluster, &mut *source, policy, &options, &mut Unwatched).expect("it drains");
        let seconds = cpu_seconds() - started;
        let count = run.log.requests.len() as f64;
        let beyond =
            (PEAK.load(Ordering::Relaxed) - before) as f64 / count - size_of::<RequestRecord>() as f64;
        println!(
            "{:<26}{:<16}{count:>10}{seconds:>9.2}{:>9.2}{:>9.2}{:>10.2}{beyond:>10.0}",
            self.name,
            self.policy,
            seconds * 1e6 / count,
            run.num_instants as f64 / count,
            seconds * 1e6 / run.num_instants as f64,
        );
    }
}

fn main() {
    let count = std::env::var("KVRELAY_REQUESTS").ok().and_then(|count| count.parse().ok());
    let count: usize = count.unwrap_or(1_000_000);
    println!("llama-3.1-8b on h100, one thread; bytes are the most that were live beside the records");
    println!(
        "{:<26}{:<16}{:>10}{:>9}{:>9}{:>9}{:>10}{:>10}",
        "", "", "requests", "CPU s", "us/req", "inst/req", "us/inst", "bytes/req"
    );
    let cases = [
        Case::azure("12P6D", 40.0, count, "disaggregated"),
        Case::azure("1P1D", 4.5, count, "disaggregated"),
        Case::azure("12P6D", 40.0, count, "goodput"),
        Case::many_workers(6, count),
        Case::many_workers(666, count),
    ];
    let wanted = std::env::var("KVRELAY_CASE").unwrap_or_default();
    for case in cases.into_iter().chain(Case::mooncake(9)).filter(|case| case.name.contains(&wanted)) {
        case.measure();
    }
}
