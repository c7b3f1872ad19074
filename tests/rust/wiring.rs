//! What pipelines, early transfers and unlike ranks change, where it can be said in closed form.

use kvrelay_core::policy::built_in;
use kvrelay_core::record::RequestRecord;
use kvrelay_core::request::{Arrival, Scheduled};
use kvrelay_core::time::{Nanos, Time};
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Conversion, Options, SimCluster, simulate};
use kvrelay_tests::{Kinked, arrival, cluster};
use proptest::prelude::*;

/// Ten nanoseconds a prompt token and thirty a decode row.
const LATENCY: Kinked = Kinked { constant: 0, per_token: 10_000, per_row: 30_000, per_context: 0, kink: 0 };

fn run(cluster: &SimCluster, arrivals: &[Arrival]) -> Vec<RequestRecord> {
    let options = Options { check_integrity: true, ..Options::default() };
    let mut source = Scheduled::new(arrivals.to_vec());
    let policy = built_in("disaggregated").unwrap();
    let mut records = simulate(cluster, &mut source, policy, &options, &mut Unwatched).unwrap().log.requests;
    records.sort_by_key(|record| record.id);
    records
}

fn staged(topology: &str, stages: u32) -> SimCluster {
    let mut cluster = cluster(topology, 400, LATENCY);
    for worker in &mut cluster.workers {
        worker.stages = stages;
    }
    cluster
}

fn first_tokens(records: &[RequestRecord]) -> Vec<u64> {
    records.iter().map(|record| record.first_token.unwrap().0).collect()
}

#[test]
fn prompts_follow_each_other_through_a_pipeline() {
    // Each fills a step alone: 2,400 ns through all stages, and a quarter of that until the next.
    let arrivals = vec![arrival(0, 240, 1); 3];
    assert_eq!(first_tokens(&run(&staged("1P1D", 4), &arrivals)), [2_400, 3_000, 3_600]);
    assert_eq!(first_tokens(&run(&staged("1P1D", 1), &arrivals)), [2_400, 4_800, 7_200]);
}

#[test]
fn a_short_prompt_waits_behind_a_long_one_in_every_stage() {
    let arrivals = [arrival(0, 240, 1), arrival(0, 40, 1)];
    // The short one needs 100 ns a stage, and leaves the last one 100 ns after the long one.
    assert_eq!(first_tokens(&run(&staged("1P1D", 4), &arrivals)), [2_400, 2_500]);
}

#[test]
fn decode_fills_a_pipeline_with_as_many_batches_as_stages() {
    let arrivals = vec![arrival(0, 16, 101); 8];
    let rate = |stages| {
        let records = run(&staged("1M", stages), &arrivals);
        let last = records.iter().map(|record| record.last_token.unwrap().0).max().unwrap();
        800.0 / last as f64
    };
    // Rows cost the same in every batch, so stages add up; what is left is the prompts and the ends.
    let (one, four) = (rate(1), rate(4));
    assert!((3.4..4.0).contains(&(four / one)), "{four} against {one} tokens a nanosecond");
}

#[test]
fn unlike_ranks_delay_a_transfer() {
    let mut cluster = staged("1P1D", 1);
    let took = |cluster: &SimCluster| {
        let record = &run(cluster, &[arrival(0, 160, 5)])[0];
        record.transfer().unwrap()
    };
    // 16,000 bytes at 1 byte a nanosecond, and 700 ns of latency.
    assert_eq!(took(&cluster), Nanos(16_700));
    cluster.conversion = Some(Conversion { ranks: vec![4, 2], bandwidth: 1e9 });
    assert_eq!(took(&cluster), Nanos(16_700 + 8_000));
    cluster.conversion = Some(Conversion { ranks: vec![2, 2], bandwidth: 1e9 });
    assert_eq!(took(&cluster), Nanos(16_700));
}

proptest! {
    /// A transfer that begins beside its prompt ends no later than one after it, nor before the prompt
    /// and one layer group's wire time.
    #[test]
    fn early_transfers_end_no_later(
        shapes in prop::collection::vec((0u64..300_000, 1u32..200, 2u32..9), 1..20),
        groups in 2u32..9,
        bandwidth in prop::sample::select(vec![1e8, 1e9, 1e12]),
    ) {
        let arrivals: Vec<Arrival> = shapes.iter().map(|(at, prompt, output)| arrival(*at, *prompt, *output)).collect();
        let mut cluster = staged("1P1D", 1);
        cluster.links = kvrelay_sim::Links::Apart(kvrelay_core::latency::Link { bandwidth, latency: Nanos(700) });
        let after = run(&cluster, &arrivals);
        cluster.layer_groups = groups;
        let early = run(&cluster, &arrivals);
        for (early, after) in early.iter().zip(&after) {
            prop_assert_eq!(early.first_token, after.first_token);
            let (Some(end), Some(late)) = (early.transfer_end, after.transfer_end) else { continue };
            // Every part's wire time is rounded by itself.
            prop_assert!(end <= late + Nanos(u64::from(groups)), "{:?} after {:?}", end, late);
            let blocks = u64::from(early.prompt_tokens.div_ceil(16) - early.cached_tokens / 16);
            let group = (blocks * 1_600) as f64 / f64::from(groups) / bandwidth;
            let least = early.first_token.unwrap() + Nanos::from_secs_f64(group) + Nanos(700);
            // Of a chunked prompt, less than everything is computed last.
            prop_assert!(end + Nanos(1) >= least || early.prompt_tokens > 256, "{:?}, at least {:?}", end, least);
            prop_assert!(Time(0) < end);
        }
    }
}
