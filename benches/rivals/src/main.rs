//! kvrelay's simulator beside `aisimulate-core` (Apache-2.0), on the same requests, in one run: CPU
//! time a request, and what both say the requests see. `KVRELAY_REQUESTS` for another number than
//! 10,000, `KVRELAY_PAIRS` for another than 5.
//!
//! The same: arrivals and lengths, workers and their KV blocks, limits of a batch, step times (the
//! rival asks kvrelay's roofline through its own interface), KV bytes and bandwidth, prefix caching,
//! one record a request, and the statistics that each makes of them. What differs is printed.

mod aisimulate;
mod ours;

use kvrelay_benches::workload_at;
use kvrelay_workload::Record;

/// A cluster and the load that it gets.
struct Case {
    prefill: usize,
    decode: usize,
    rate: f64,
}

/// What a simulator says of a run.
struct Outcome {
    /// Requests that finished.
    finished: usize,
    /// TTFT, then TPOT: mean, median, p90, in milliseconds.
    latencies: [[f64; 3]; 2],
}

const CASES: [Case; 2] =
    [Case { prefill: 1, decode: 1, rate: 4.5 }, Case { prefill: 12, decode: 6, rate: 40.0 }];

const DIFFERENCES: &str = "\
What differs:
* where prompts and decodes go: kvrelay's `disaggregated` to whoever has least to do, the rival in turn;
* time: kvrelay in whole picoseconds and many steps at once, the rival in f64 milliseconds, step by step;
* the rival's step times are asked with the mean length of a batch, kvrelay's with its exact sums;
* the rival hashes the tokens of every prompt into blocks; kvrelay is told that nobody shares them, and
  counts blocks where nobody can see their names;
* the rival keeps every token's time while it runs, kvrelay the runs of equal gaps;
* the first token: kvrelay's comes from the prefill worker, the rival's from the decode worker, a step and a
  hand-over later (so its TTFT), and it decodes one step more of every request;
* a run begins with empty pools, and making those is part of it: some milliseconds of kvrelay's.";

fn main() -> anyhow::Result<()> {
    let count = setting("KVRELAY_REQUESTS", 10_000)?;
    let pairs = setting("KVRELAY_PAIRS", 5)?;
    println!("aisimulate-core 0.13.0 and kvrelay {}, {}", env!("CARGO_PKG_VERSION"), machine());
    println!(
        "lengths and gaps of azure-conv-2023, llama-3.1-8b on h100, CPU time of the process, {pairs} pairs"
    );
    for case in &CASES {
        let workload = workload_at(case.rate, count);
        println!("\n{}P{}D at {:.1}/s, {count} requests", case.prefill, case.decode, case.rate);
        compare(case, &workload.records(), pairs, || ours::run(case, &workload))?;
    }
    println!("\n{DIFFERENCES}");
    Ok(())
}

/// Runs both in pairs, the order turned from pair to pair, and prints them side by side.
fn compare(
    case: &Case,
    records: &[Record],
    pairs: usize,
    ours: impl Fn() -> anyhow::Result<(f64, Outcome)>,
) -> anyhow::Result<()> {
    let theirs = || aisimulate::run(case, records);
    let (mut seconds, mut last) = (Vec::new(), None);
    for pair in 0..pairs {
        let (first, second);
        if pair % 2 == 0 {
            first = ours()?;
            second = theirs()?;
        } else {
            second = theirs()?;
            first = ours()?;
        }
        seconds.push((first.0, second.0));
        last = Some((first.1, second.1));
    }
    let (ours, theirs) = last.ok_or_else(|| anyhow::anyhow!("KVRELAY_PAIRS is 0; at least 1"))?;
    let per_request = |seconds: f64| seconds * 1e6 / records.len() as f64;
    print_row("kvrelay", spread(seconds.iter().map(|pair| per_request(pair.0))), &ours);
    print_row("aisimulate-core", spread(seconds.iter().map(|pair| per_request(pair.1))), &theirs);
    let [low, median, high] = spread(seconds.iter().map(|pair| pair.1 / pair.0));
    println!("the rival takes {median:.0} times as long (pairs: {low:.0} to {high:.0})");
    Ok(())
}

fn print_row(name: &str, [low, median, high]: [f64; 3], outcome: &Outcome) {
    let [ttft, tpot] = outcome.latencies;
    println!(
        "{name:<16}{median:>8.2} us a request ({low:.2} to {high:.2}), {} finished; \
         TTFT mean/p50/p90 {:.1}/{:.1}/{:.1} ms, TPOT {:.2}/{:.2}/{:.2} ms",
        outcome.finished, ttft[0], ttft[1], ttft[2], tpot[0], tpot[1], tpot[2],
    );
}

/// Least, median and largest.
fn spread(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [values[0], values[values.len() / 2], values[values.len() - 1]]
}

/// A whole number from the environment.
fn setting(name: &str, default: usize) -> anyhow::Result<usize> {
    match std::env::var(name) {
        Err(_) => Ok(default),
        Ok(text) => match text.parse() {
            Ok(number) if number > 0 => Ok(number),
            _ => anyhow::bail!("{name} is {text:?}; it must be a whole number above 0"),
        },
    }
}

/// The processor, as Linux names it.
fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} x {}", name.map_or("an unnamed processor", |(_, name)| name))
}

/// CPU seconds of all threads of this process, so that what else the machine does counts less.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live timespec, which the call fills.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(code, 0, "Linux has a CPU clock a process");
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
