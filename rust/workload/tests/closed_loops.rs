//! Closed loops as sources, driven by a loop that knows nothing but when requests end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvrelay_core::request::{Arrival, PromptContent};
use kvrelay_core::time::{Nanos, Time};
use kvrelay_workload::closed::{Sessions, ThinkTime};
use kvrelay_workload::workload::Synthetic;
use kvrelay_workload::{Class, LengthPair, Lengths, Workload};
use proptest::prelude::*;

fn lengths() -> LengthPair {
    LengthPair::independent(Lengths::uniform(1, 900).unwrap(), Lengths::uniform(1, 400).unwrap())
}

fn users(concurrency: usize, think: ThinkTime, num_requests: usize, seed: u64) -> Workload {
    let what = Synthetic { num_requests, lengths: lengths(), class: Class::default(), seed };
    Workload::closed_loop(concurrency, think, &what).unwrap()
}

fn chats(num_sessions: usize, turns: Lengths, think: ThinkTime, seed: u64) -> Sessions {
    let class = Class::default();
    Sessions { num_sessions, rate: 2.0, turns, lengths: lengths(), think, class, seed }
}

/// What arrived, and when it was over.
struct Served {
    arrival: Arrival,
    end: Time,
}

/// Drives a workload: the `index`-th arrival takes `service(index)`.
fn drive(workload: &Workload, service: impl Fn(u64) -> Nanos) -> Vec<Served> {
    let mut source = workload.source();
    let mut served: Vec<Served> = Vec::new();
    let mut running = BinaryHeap::new();
    loop {
        let ends = running.peek().map(|Reverse((end, _))| *end);
        match (source.next_at(), ends) {
            (Some(at), ends) if ends.is_none_or(|end| at <= end) => {
                let arrival = source.pull().unwrap();
                assert_eq!(arrival.at, at);
                assert!(served.last().is_none_or(|last| last.arrival.at <= at), "out of order");
                let index = served.len() as u64;
                let end = at + service(index);
                running.push(Reverse((end, index)));
                served.push(Served { arrival, end });
            }
            (_, Some(end)) => {
                let Reverse((_, index)) = running.pop().unwrap();
                source.completed(index, end);
            }
            (None, None) => return served,
            (Some(_), None) => unreachable!("the first arm takes it"),
        }
    }
}

fn most_at_once(served: &[Served]) -> usize {
    let live = |at: Time| served.iter().filter(|one| one.arrival.at <= at && at < one.end).count();
    served.iter().map(|one| live(one.arrival.at)).max().unwrap()
}

#[test]
fn thinking_lasts_its_time_on_average() {
    for cv in [0.0, 0.5, 1.0] {
        let workload = users(1, ThinkTime { mean: 2.0, cv }, 4_001, 5);
        let served = drive(&workload, |_| Nanos(1_000));
        let pauses: Vec<f64> =
            served.windows(2).map(|pair| (pair[1].arrival.at - pair[0].end).as_secs_f64()).collect();
        let mean = pauses.iter().sum::<f64>() / pauses.len() as f64;
        assert!((mean / 2.0 - 1.0).abs() <= 3.0 * cv / 4_000f64.sqrt(), "cv {cv}: {mean}");
        let square = pauses.iter().map(|pause| (pause - mean) * (pause - mean)).sum::<f64>();
        assert!(((square / pauses.len() as f64).sqrt() / mean - cv).abs() < 0.1, "cv {cv}");
    }
}

#[test]
fn a_turn_s_prompt_begins_with_the_one_before() {
    let workload =
        Workload::sessions(&chats(40, Lengths::uniform(1, 6).unwrap(), ThinkTime::default(), 3)).unwrap();
    let turns = workload.turns().unwrap();
    let hashes = |index: usize, block_tokens| {
        let arrival = &workload.arrivals[index];
        arrival.content.block_hashes(arrival.prompt_tokens, block_tokens)
    };
    let mut first_blocks = std::collections::BTreeSet::new();
    for (index, turn) in turns.iter().enumerate() {
        let arrival = &workload.arrivals[index];
        for block_tokens in [16, 32, 1_000] {
            assert_eq!(hashes(index, block_tokens).len() as u32, arrival.prompt_tokens / block_tokens);
        }
        if turn.number == 0 {
            assert!(hashes(index, 1).first().is_some_and(|first| first_blocks.insert(*first)), "shared");
            continue;
        }
        let before = &workload.arrivals[index - 1];
        assert!(arrival.prompt_tokens > before.prompt_tokens + before.output_tokens);
        for block_tokens in [16, 32, 1_000] {
            assert!(hashes(index, block_tokens).starts_with(&hashes(index - 1, block_tokens)));
        }
    }
    assert_eq!(first_blocks.len(), 40);
    assert!((1..=6).all(|count| turns.iter().any(|turn| turn.number + 1 == count)));
}

#[test]
fn answers_count_as_they_are_cut() {
    let class = Class { max_tokens: Some(10), ..Class::default() };
    let lengths = LengthPair::independent(Lengths::constant(100).unwrap(), Lengths::constant(50).unwrap());
    let what =
        Sessions { class, lengths, ..chats(1, Lengths::constant(3).unwrap(), ThinkTime::default(), 0) };
    let workload = Workload::sessions(&what).unwrap();
    let prompts: Vec<u32> = workload.arrivals.iter().map(|arrival| arrival.prompt_tokens).collect();
    assert_eq!(prompts, [100, 210, 320]);
    assert_eq!(workload.warnings, ["3 outputs are longer than max_tokens: cut there"]);
}

#[test]
fn shorter_lengths_keep_what_turns_share() {
    let workload =
        Workload::sessions(&chats(3, Lengths::constant(4).unwrap(), ThinkTime::default(), 1)).unwrap();
    let short = workload.scaled_lengths(8).unwrap();
    assert!(short.is_closed_loop() && short.turns().is_some());
    for pair in short.arrivals[..4].windows(2) {
        let [a, b] = [&pair[0], &pair[1]].map(|turn| turn.content.block_hashes(turn.prompt_tokens, 1));
        assert!(!a.is_empty() && b.starts_with(&a));
    }
}

#[test]
fn what_needs_known_arrivals_is_refused() {
    let loops = users(3, ThinkTime::default(), 10, 0);
    assert_eq!((loops.rate(), loops.is_closed_loop()), (None, true));
    assert_eq!((0..10).filter(|index| loops.waits(*index)).count(), 7);
    let chats =
        Workload::sessions(&chats(2, Lengths::constant(2).unwrap(), ThinkTime::default(), 0)).unwrap();
    assert_eq!((0..4).map(|index| chats.waits(index)).collect::<Vec<_>>(), [false, true, false, true]);
    for workload in [&loops, &chats] {
        let message = workload.at_rate(3.0).unwrap_err().to_string();
        assert!(message.starts_with("the workload is a closed loop ("), "{message}");
        assert!(message.contains("so they have no rate to set to 3 req/s"), "{message}");
    }
    let open = Workload::poisson(
        1.0,
        &Synthetic { num_requests: 2, lengths: lengths(), class: Class::default(), seed: 0 },
    );
    let message = Workload::merge(&[open.unwrap(), loops]).unwrap_err().to_string();
    assert!(message.starts_with("workloads[1] is a closed loop (10 requests of 3 users"), "{message}");
}

#[test]
fn impossible_loops_name_the_parameter_and_the_numbers() {
    let what = || Synthetic { num_requests: 5, lengths: lengths(), class: Class::default(), seed: 0 };
    let think = |mean, cv| ThinkTime { mean, cv };
    let looped = |concurrency, think, num_requests| {
        let what = Synthetic { num_requests, ..what() };
        Workload::closed_loop(concurrency, think, &what).unwrap_err().to_string()
    };
    assert_eq!(looped(0, think(0.0, 0.0), 5), "concurrency is 0; it must be at least 1");
    assert_eq!(looped(1, think(0.0, 0.0), 0), "num_requests is 0; it must be at least 1");
    assert!(
        looped(1, think(-1.0, 0.0), 5).starts_with("think_time is -1; it must be between 0 and 17280000")
    );
    assert!(looped(1, think(f64::NAN, 0.0), 5).starts_with("think_time is NaN"));
    assert!(looped(1, think(1.0, 1e9), 5).starts_with("think_cv is 1000000000; it must be 0, or between"));
    let one = Lengths::constant(1).unwrap();
    let refused = |what: Sessions| Workload::sessions(&what).unwrap_err().to_string();
    assert!(refused(chats(0, one.clone(), think(0.0, 0.0), 0)).starts_with("num_sessions is 0"));
    assert!(
        refused(Sessions { rate: 0.0, ..chats(1, one.clone(), think(0.0, 0.0), 0) }).starts_with("rate is 0")
    );
    let huge = LengthPair::independent(Lengths::constant(1 << 23).unwrap(), one.clone());
    let long = Sessions { lengths: huge, ..chats(1, Lengths::constant(9).unwrap(), think(0.0, 0.0), 0) };
    assert_eq!(
        refused(long),
        "prompt_tokens of session 0, turn 1 is 16777217; it must be at most 16777216; ask for fewer turns or shorter ones"
    );
    let many = chats(100, Lengths::constant(5_000).unwrap(), think(0.0, 0.0), 0);
    assert_eq!(refused(many), "turns of session 0 is 5000; it must be at most 4096");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn users_have_one_request_each_and_think_between_two(
        seed: u64, concurrency in 1usize..9, num in 1usize..80, mean in 0.0f64..3.0, cv in 0usize..2,
    ) {
        let workload = users(concurrency, ThinkTime { mean, cv: cv as f64 }, num, seed);
        let service = |index: u64| Nanos(1 + (index * 7_919 + seed % 1_000) % 13 * 100_000_000);
        let served = drive(&workload, service);
        prop_assert_eq!(served.len(), num);
        prop_assert!(most_at_once(&served) <= concurrency);
        let lengths = |arrival: &Arrival| (arrival.prompt_tokens, arrival.output_tokens);
        prop_assert!(served.iter().zip(&workload.arrivals).all(|(one, listed)| lengths(&one.arrival) == lengths(listed)));
        if cv == 0 {
            // Each request but the first ones comes exactly a think time after another one's end.
            let mut ends: Vec<Time> = served.iter().map(|one| one.end + Nanos::from_secs_f64(mean)).collect();
            ends.sort();
            let waited = served.iter().skip(concurrency);
            prop_assert!(waited.zip(&ends).all(|(one, end)| one.arrival.at == *end));
        }
        let again = drive(&workload, service);
        prop_assert!(served.iter().zip(&again).all(|(a, b)| a.arrival.at == b.arrival.at));
    }

    #[test]
    fn turns_follow_each_other_after_a_think_time(
        seed: u64, num in 1usize..20, turns in 1i64..6, mean in 0.0f64..3.0, cv in 0usize..2,
    ) {
        let turns = Lengths::uniform(1, turns).unwrap();
        let workload = Workload::sessions(&chats(num, turns, ThinkTime { mean, cv: cv as f64 }, seed)).unwrap();
        let service = |index: u64| Nanos(1 + (index * 7_919 + seed % 1_000) % 13 * 100_000_000);
        let served = drive(&workload, service);
        prop_assert_eq!(served.len(), workload.arrivals.len());
        let place = |arrival: &Arrival| {
            let same = |listed: &Arrival| listed.content == arrival.content && listed.prompt_tokens == arrival.prompt_tokens;
            workload.arrivals.iter().position(same).unwrap()
        };
        let mut ends = vec![None; served.len()];
        for one in &served {
            let index = place(&one.arrival);
            let turn = workload.turns().unwrap()[index];
            prop_assert_ne!(&one.arrival.content, &PromptContent::Unique);
            if turn.number == 0 {
                prop_assert_eq!(one.arrival.at, workload.arrivals[index].at);
            } else {
                let before: Time = ends[index - 1].expect("the turn before it came before");
                prop_assert_eq!(one.arrival.at, before + turn.think);
            }
            ends[index] = Some(one.end);
        }
        prop_assert!(cv == 1 || workload.turns().unwrap().iter().all(|turn| turn.think == Nanos::from_secs_f64(mean)));
    }
}
