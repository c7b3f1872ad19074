//! Workloads: determinism, rates, merging, classes, round trips.

use kvrelay_core::request::{ClassId, PromptContent};
use kvrelay_core::slo::Slo;
use kvrelay_core::time::{Nanos, Time};
use kvrelay_workload::arrivals::Process;
use kvrelay_workload::workload::Synthetic;
use kvrelay_workload::{Class, LengthPair, Lengths, Record, Workload};
use proptest::prelude::*;

fn class(name: &str, ttft_ms: u64, max_tokens: Option<u32>) -> Class {
    let slo = Slo { ttft: Some(Nanos(ttft_ms * 1_000_000)), ..Slo::default() };
    Class { name: name.to_owned(), slo, priority: 0, max_tokens }
}

fn synthetic(num_requests: usize, seed: u64) -> Synthetic {
    let lengths = LengthPair::correlated(
        Lengths::lognormal(700.0, 900.0).unwrap(),
        Lengths::uniform(1, 400).unwrap(),
        0.3,
    );
    Synthetic { num_requests, lengths: lengths.unwrap(), class: class("chat", 400, None), seed }
}

/// Pinned: these numbers may change only with a deliberate change of the generator.
#[test]
fn a_seed_is_a_workload_forever() {
    let workload = Workload::gamma(4.0, 3.0, &synthetic(4, 7)).unwrap();
    let seen: Vec<(u64, u32, u32)> =
        workload.arrivals.iter().map(|a| (a.at.0, a.prompt_tokens, a.output_tokens)).collect();
    assert_eq!(seen, PINNED);
}

const PINNED: [(u64, u32, u32); 4] =
    [(0, 84, 211), (43_937_933, 131, 203), (43_960_349, 337, 124), (43_961_083, 438, 226)];

#[test]
fn max_tokens_is_the_largest_output_of_the_class_unless_given() {
    let workload = Workload::poisson(4.0, &synthetic(300, 1)).unwrap();
    let longest = workload.arrivals.iter().map(|a| a.output_tokens).max().unwrap();
    assert!(workload.arrivals.iter().all(|a| a.max_tokens == longest));
    assert_eq!(workload.warnings, Vec::<String>::new());

    let what = Synthetic { class: class("chat", 400, Some(100)), ..synthetic(300, 1) };
    let cut = Workload::poisson(4.0, &what).unwrap();
    let longer = workload.arrivals.iter().filter(|a| a.output_tokens > 100).count();
    assert!(cut.arrivals.iter().all(|a| a.max_tokens == 100 && a.output_tokens <= 100));
    assert_eq!(cut.warnings, [format!("{longer} outputs are longer than max_tokens: cut there")]);
}

#[test]
fn presets_have_their_rate_or_ask_for_one() {
    let preset = |name, rate| Workload::preset(name, rate, 4_000, Class::default(), 1);
    let azure = preset("azure-conv-2023", None).unwrap();
    let error = 3.0 * 1.094 / 4_000f64.sqrt();
    assert!((azure.rate().unwrap() / 5.5301 - 1.0).abs() < error, "{:?}", azure.rate());
    assert!((preset("azure-conv-2023", Some(2.0)).unwrap().rate().unwrap() / 2.0 - 1.0).abs() < error);
    let message = preset("sharegpt-8k", None).unwrap_err().to_string();
    assert!(message.contains("no arrival rate is published for \"sharegpt-8k\""), "{message}");
    assert!(preset("sharegpt-8k", Some(2.0)).is_ok());
    assert!(preset("sharegpt", Some(2.0)).unwrap_err().to_string().contains("nearest first: sharegpt-8k"));
}

#[test]
fn merging_keeps_order_classes_and_limits() {
    let chat = Workload::poisson(4.0, &synthetic(200, 1)).unwrap();
    let other = Synthetic { class: class("chat", 900, None), ..synthetic(100, 2) };
    let slower = Workload::poisson(2.0, &other).unwrap();
    let again = Workload::poisson(1.0, &synthetic(50, 3)).unwrap();
    let merged = Workload::merge(&[chat.clone(), slower.clone(), again.clone()]).unwrap();
    assert_eq!(merged.arrivals.len(), 350);
    assert_eq!(merged.class_names, ["chat", "chat-2"]);
    assert!(merged.arrivals.is_sorted_by_key(|a| a.at));
    let of = |class| merged.arrivals.iter().filter(move |a| a.class == ClassId(class));
    assert_eq!((of(0).count(), of(1).count()), (250, 100));
    assert!(of(1).all(|a| a.slo == slower.arrivals[0].slo && a.max_tokens == slower.arrivals[0].max_tokens));
    // One class from two sources: its limit must not tell them apart.
    let limit = chat.arrivals[0].max_tokens.max(again.arrivals[0].max_tokens);
    assert!(of(0).all(|a| a.max_tokens == limit));
    assert!(Workload::merge(&[]).unwrap_err().to_string().contains("number of requests is 0"));
}

#[test]
fn shorter_lengths_keep_what_prompts_share() {
    let content = PromptContent::HashIds { ids: [1, 2].into(), tokens_per_id: 512 };
    let record = Record { prompt_tokens: 1_024, output_tokens: 3, content, ..Record::default() };
    let workload = Workload::from_records(vec![record], vec![Class::default()], 0).unwrap();
    let short = workload.scaled_lengths(8).unwrap();
    let arrival = &short.arrivals[0];
    assert_eq!((arrival.prompt_tokens, arrival.output_tokens, arrival.max_tokens), (128, 1, 1));
    assert_eq!(arrival.content, PromptContent::HashIds { ids: [1, 2].into(), tokens_per_id: 64 });
    let uneven = workload.scaled_lengths(7).unwrap();
    assert_eq!(uneven.arrivals[0].content, PromptContent::Unique);
    assert!(uneven.warnings[0].contains("1 prompts no longer share"));
    assert!(workload.scaled_lengths(0).is_err());
}

#[test]
fn bad_records_are_named_with_their_numbers() {
    let good = || Record { prompt_tokens: 5, output_tokens: 5, ..Record::default() };
    let refused = |record: Record, classes: Vec<Class>| {
        Workload::from_records(vec![good(), record], classes, 0).unwrap_err().to_string()
    };
    let one = || vec![Class::default()];
    let zero = Record { prompt_tokens: 0, ..good() };
    assert!(refused(zero, one()).starts_with("records[1].prompt_tokens is 0; it must be between 1 and"));
    let huge = Record { output_tokens: u32::MAX, ..good() };
    assert!(refused(huge, one()).starts_with("records[1].output_tokens is 4294967295"));
    let unlimited = Record { max_tokens: Some(0), ..good() };
    assert!(refused(unlimited, one()).starts_with("records[1].max_tokens is 0"));
    let stranger = Record { class: ClassId(1), ..good() };
    assert_eq!(
        refused(stranger, one()),
        "records[1].class is 1; it must be one of the 1 classes given (from 0)"
    );
    let epoch = Record { at: Time(1_778_000_000_000_000_000), ..good() };
    assert!(
        refused(epoch, one()).contains("records[1].at spans 1778000000 s; a run holds at most 17280000 s")
    );
    assert!(
        refused(good(), vec![Class::default(), Class::default()])
            .starts_with("classes[1].name is \"default\"")
    );
    let limit = Class { max_tokens: Some(0), ..Class::default() };
    assert!(refused(good(), vec![limit]).starts_with("max_tokens of class \"default\" is 0"));
    assert!(Workload::from_records(Vec::new(), one(), 0).is_err());
    for (arrival, prompt, output, message) in [
        (-1.0, 1, 1, "records[3].arrival is -1; it must be at least 0 s"),
        (f64::NAN, 1, 1, "records[3].arrival is NaN"),
        (f64::INFINITY, 1, 1, "records[3].arrival is inf"),
        (1.778e9, 1, 1, "records[3].arrival spans 1778000000 s"),
        (0.0, -4, 1, "records[3].prompt_tokens is -4"),
        (0.0, 1, 0, "records[3].output_tokens is 0"),
    ] {
        let error = Record::checked(3, arrival, prompt, output).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

#[test]
fn records_out_of_order_are_sorted_with_a_warning() {
    let record =
        |at, prompt_tokens| Record { at: Time(at), prompt_tokens, output_tokens: 1, ..Record::default() };
    let records = vec![record(0, 1), record(5, 2), record(3, 3), record(3, 4), record(9, 5)];
    let workload = Workload::from_records(records, vec![Class::default()], 0).unwrap();
    let order: Vec<u32> = workload.arrivals.iter().map(|a| a.prompt_tokens).collect();
    assert_eq!(order, [1, 3, 4, 2, 5]);
    assert_eq!(workload.warnings.len(), 1);
}

#[test]
fn what_arrives_at_once_has_no_rate() {
    let workload = Workload::poisson(4.0, &synthetic(1, 0)).unwrap();
    assert_eq!(workload.rate(), None);
    let message = workload.at_rate(2.0).unwrap_err().to_string();
    assert!(message.starts_with("1 arrivals over 0 s have no rate"), "{message}");
    let two = Workload::poisson(4.0, &synthetic(2, 0)).unwrap();
    for rate in [0.0, -2.0, f64::NAN, f64::INFINITY] {
        assert!(two.at_rate(rate).unwrap_err().to_string().starts_with("rate is "));
    }
    assert!(two.at_rate(1e-9).unwrap_err().to_string().contains("a run holds at most"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_same_arguments_give_the_same_workload(
        seed: u64, rate in 0.01f64..1e4, cv in 0.1f64..5.0, num in 1usize..200,
    ) {
        let make = || Workload::synthetic(Process::Gamma { cv }, rate, &synthetic(num, seed)).unwrap();
        let (once, twice) = (make(), make());
        prop_assert_eq!(once.records(), twice.records());
        prop_assert_eq!(&once.description, &twice.description);
        let other = Workload::synthetic(Process::Poisson, rate, &synthetic(num, seed)).unwrap();
        let lengths = |w: &Workload| w.records().iter().map(|r| (r.prompt_tokens, r.output_tokens)).collect::<Vec<_>>();
        prop_assert_eq!(lengths(&once), lengths(&other), "arrivals must not move lengths");
    }

    #[test]
    fn a_rate_asked_for_is_the_rate(seed: u64, rate in 0.01f64..1e4, num in 2usize..200) {
        let workload = Workload::poisson(3.0, &synthetic(num, seed)).unwrap();
        let changed = workload.at_rate(rate).unwrap();
        let span = (num - 1) as f64 / rate;
        prop_assert!((changed.span().as_secs_f64() - span).abs() <= 1e-9 + span * 1e-15);
        prop_assert!(changed.arrivals.is_sorted_by_key(|a| a.at));
        prop_assert_eq!(changed.arrivals.len(), num);
        let again = changed.at_rate(rate).unwrap();
        let moved = changed.arrivals.iter().zip(&again.arrivals).map(|(a, b)| a.at.0.abs_diff(b.at.0)).max();
        prop_assert!(moved.unwrap() <= 1);
    }

    #[test]
    fn records_make_the_same_workload_again(
        seed: u64, num in 1usize..100, limit in prop::option::of(1u32..500), own in prop::option::of(1u32..500),
    ) {
        let what = Synthetic { class: class("chat", 400, limit), ..synthetic(num, seed) };
        let chat = Workload::poisson(4.0, &what).unwrap();
        let other = Synthetic { class: class("code", 100, None), ..synthetic(num, seed ^ 1) };
        let code = Workload::poisson(9.0, &other).unwrap();
        let mut records = code.records();
        records[num / 2].max_tokens = own;
        let code = Workload::from_records(records, code.classes().to_vec(), seed).unwrap();
        let merged = Workload::merge(&[chat, code]).unwrap();
        let again = Workload::from_records(merged.records(), merged.classes().to_vec(), merged.seed).unwrap();
        prop_assert_eq!(format!("{:?}", again.arrivals), format!("{:?}", merged.arrivals));
        prop_assert_eq!(again.warnings, Vec::<String>::new());
    }

    #[test]
    fn arrivals_survive_as_seconds(nanos in 0u64..10 * 86_400 * 1_000_000_000) {
        let record = Record::checked(0, Time(nanos).as_secs_f64(), 1, 1).unwrap();
        prop_assert_eq!(record.at, Time(nanos));
    }
}
