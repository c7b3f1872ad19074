//! A million requests: CPU time, and memory beside the records, of the settings that simulators are
//! compared in. One run each, on one thread; `KVRELAY_REQUESTS` for another number.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvrelay_benches::{cluster, workload_at};
use kvrelay_core::policy::built_in;
use kvrelay_core::record::RequestRecord;
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Options, simulate};

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

fn main() {
    let count = std::env::var("KVRELAY_REQUESTS").ok().and_then(|count| count.parse().ok());
    let count: usize = count.unwrap_or(1_000_000);
    println!("{count} requests of azure-conv-2023, llama-3.1-8b on h100, one thread");
    println!(
        "{:<10}{:<16}{:>10}{:>10}{:>14}{:>16}",
        "", "", "seconds", "us/req", "instants/req", "bytes/req live"
    );
    for (topology, rate, policy) in
        [("12P6D", 40.0, "disaggregated"), ("1P1D", 4.5, "disaggregated"), ("12P6D", 40.0, "goodput")]
    {
        let workload = workload_at(rate, count);
        let mut source = workload.source();
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let started = cpu_seconds();
        let policy_object = built_in(policy).expect("a built-in policy");
        let run =
            simulate(&cluster(topology), &mut *source, policy_object, &Options::default(), &mut Unwatched)
                .expect("it drains");
        let seconds = cpu_seconds() - started;
        assert_eq!(run.log.requests.len(), count);
        let beyond =
            (PEAK.load(Ordering::Relaxed) - before) as f64 / count as f64 - size_of::<RequestRecord>() as f64;
        println!(
            "{topology:<10}{policy:<16}{seconds:>10.2}{:>10.2}{:>14.2}{beyond:>16.0}",
            seconds * 1e6 / count as f64,
            run.num_instants as f64 / count as f64,
        );
    }
}
