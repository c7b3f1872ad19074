//! kvrelay's simulator beside `aisimulate-core` (Apache-2.0), on the same requests, in one run: CPU
//! time a request, and what both say the requests see. `KVRELAY_REQUESTS` for another number than
//! 20,000, `KVRELAY_ROUNDS` for another than 5.
//!
//! The same: arrivals and lengths, workers and their KV blocks, limits of a batch, step times (the
//! rival asks kvrelay's roofline through its own interface), KV bytes and bandwidth, one record a
//! request, and the statistics that each makes of them. What differs is printed.

mod aisimulate;
mod ours;

use kvrelay_benches::workload_at;

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
* with a prefix cache the rival hashes the tokens of every prompt into blocks; kvrelay, with one too, is told
  that nobody shares these prompts, and counts blocks where nobody can see their names;
* the rival keeps every token's time while it runs, kvrelay the runs of equal gaps;
* the first token: kvrelay's comes from the prefill worker, the rival's from the decode worker, after the
  hand-over and a step there: hence its TTFT, and one decode step more of every request;
* a run begins with empty pools, and making those is part of it: some milliseconds of kvrelay's.";

/// A simulator that runs a case: CPU seconds, and what it says.
type Contender<'a> = (&'static str, Box<dyn Fn() -> anyhow::Result<(f64, Outcome)> + 'a>);

fn main() -> anyhow::Result<()> {
    let count = setting("KVRELAY_REQUESTS", 20_000)?;
    let rounds = setting("KVRELAY_ROUNDS", 5)?;
    println!("aisimulate-core 0.13.0 and kvrelay {}, {}", env!("CARGO_PKG_VERSION"), machine());
    println!(
        "lengths and gaps of azure-conv-2023, llama-3.1-8b on h100, CPU time of the process, {rounds} rounds"
    );
    for case in &CASES {
        let workload = workload_at(case.rate, count);
        let records = workload.records();
        println!("\n{}P{}D at {:.1}/s, {count} requests", case.prefill, case.decode, case.rate);
        let contenders: [Contender<'_>; 3] = [
            ("kvrelay", Box::new(|| ours::run(case, &workload))),
            ("aisimulate-core", Box::new(|| aisimulate::run(case, &records, true))),
            ("  no prefix cache", Box::new(|| aisimulate::run(case, &records, false))),
        ];
        compare(&contenders, count, rounds)?;
    }
    println!("\n{DIFFERENCES}");
    Ok(())
}

/// Runs all of them in every round, each time beginning with another, and prints them side by side, with
/// how many times as long as the first the others took in the same round.
fn compare(contenders: &[Contender<'_>], count: usize, rounds: usize) -> anyhow::Result<()> {
    let mut runs: Vec<Vec<(f64, Outcome)>> = contenders.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for turn in 0..contenders.len() {
            let index = (round + turn) % contenders.len();
            runs[index].push(contenders[index].1()?);
        }
    }
    for (index, ((name, _), own)) in contenders.iter().zip(&runs).enumerate() {
        let per_request = spread(own.iter().map(|(seconds, _)| seconds * 1e6 / count as f64));
        print_row(name, per_request, &own[rounds - 1].1);
        if index == 0 {
            continue;
        }
        let times = own.iter().zip(&runs[0]).map(|(theirs, ours)| theirs.0 / ours.0);
        let [low, median, high] = spread(times);
        println!("{:>20}{median:.1} times kvrelay's (rounds: {low:.1} to {high:.1})", "");
    }
    Ok(())
}

fn print_row(name: &str, [low, median, high]: [f64; 3], outcome: &Outcome) {
    let [ttft, tpot] = outcome.latencies;
    println!(
        "{name:<20}{median:.2} us a request ({low:.2} to {high:.2}), {} finished; \
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
