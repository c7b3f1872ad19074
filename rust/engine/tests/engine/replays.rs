//! Law 6: what a real engine recorded, given to a fresh scheduler, is decided the same way again.

use kvrelay_core::event::{Action, Event};
use kvrelay_core::policy::{Chunked, Policy, built_in};
use kvrelay_core::request::{Arrival, PromptContent, Scheduled};
use kvrelay_core::slo::Slo;
use kvrelay_core::time::{Nanos, Time};
use kvrelay_core::watch::Unwatched;
use kvrelay_engine::{
    Engine, EngineConfig, Entry, Handle, Recording, ReplayError, RunOptions, Submission, replay,
};

use crate::common::{answer, config, ids, model, next, submission, troubled};
use crate::doubles::Trouble;

fn recorded(topology: &str) -> EngineConfig {
    EngineConfig { record: true, kv_blocks: Some(24), ..config(topology) }
}

/// Two objectives, one of them tight.
fn slo(i: u64) -> Slo {
    let milliseconds = if i.is_multiple_of(2) { 2 } else { 200 };
    Slo {
        ttft: Some(Nanos(milliseconds * 1_000_000)),
        tpot: Some(Nanos(milliseconds * 100_000)),
        ..Slo::default()
    }
}

/// A burst in which some clients leave.
fn burst(engine: &Engine) {
    let submit = |i: u64| {
        let prompt = ids(i % 4, 5 + (i as u32 * 23) % 90);
        // Those that are to be left have long to go.
        let max_tokens = if i % 5 < 2 { 150 } else { 3 + (i as u32 * 7) % 30 };
        engine.submit(Submission { slo: slo(i), ..submission(prompt, max_tokens) }).unwrap()
    };
    let handles: Vec<Handle> = (0..20).map(submit).collect();
    for (i, handle) in handles.into_iter().enumerate() {
        match i % 5 {
            0 => drop(handle),
            1 => {
                next(&handle);
                handle.cancel();
            }
            _ => {
                answer(&handle);
            }
        }
    }
    engine.check_idle().unwrap();
}

fn num(recording: &Recording, wanted: impl Fn(&Event) -> bool) -> usize {
    let events = recording.entries.iter().flat_map(|entry| match entry {
        Entry::Handle { events, .. } => &events[..],
        Entry::PolicyExchanged => &[],
    });
    events.filter(|event| wanted(event)).count()
}

#[test]
fn recordings_replay() {
    type Make = fn() -> Box<dyn Policy>;
    let cases: [(&str, Make); 6] = [
        ("1M", || built_in("fcfs").unwrap()),
        ("2M", || Box::new(Chunked { token_budget: 24 })),
        ("1P1D", || built_in("disaggregated").unwrap()),
        ("2P2D", || built_in("disaggregated").unwrap()),
        ("1P1D", || built_in("goodput").unwrap()),
        ("1P1D1M", || built_in("goodput").unwrap()),
    ];
    let mut num_cancelled = 0;
    for (topology, make) in cases {
        let engine = Engine::new(model(), recorded(topology), make()).unwrap();
        burst(&engine);
        let arrival = |i: u64| Arrival {
            at: Time(i * 300_000),
            prompt_tokens: 10 + (i as u32 * 31) % 80,
            output_tokens: 2 + (i as u32 * 5) % 20,
            max_tokens: 30,
            slo: slo(i),
            content: PromptContent::HashIds { ids: [i % 3, 7 * i].into(), tokens_per_id: 32 },
            ..Arrival::default()
        };
        let source = Box::new(Scheduled::new((0..20).map(arrival).collect()));
        let options = RunOptions { seed: 9, ..RunOptions::default() };
        engine.run(source, Some(make()), options, &mut Unwatched).unwrap();
        let recordings = engine.recordings().unwrap();
        assert_eq!(recordings.len(), 3, "serving, the run, and serving again");
        num_cancelled += num(&recordings[0], |event| matches!(event, Event::Cancelled(_)));
        assert!(num(&recordings[1], |event| matches!(event, Event::Arrived(_))) == 20);
        for recording in &recordings {
            replay(recording, make()).unwrap();
        }
    }
    assert!(num_cancelled > 0, "nobody left before the end");
}

/// Lost workers and what comes of them are events like any other.
#[test]
fn the_loss_of_a_worker_replays() {
    let engine = troubled(recorded("2M"), 1, Trouble::Fail(7), "fcfs");
    burst(&engine);
    let recordings = engine.recordings().unwrap();
    assert_eq!(num(&recordings[0], |event| matches!(event, Event::WorkerDown { .. })), 1);
    replay(&recordings[0], built_in("fcfs").unwrap()).unwrap();
}

#[test]
fn a_replay_that_differs_says_where() {
    let engine = Engine::new(model(), recorded("1M"), built_in("fcfs").unwrap()).unwrap();
    burst(&engine);
    engine.set_policy(built_in("chunked").unwrap()).unwrap();
    let mut recording = engine.recordings().unwrap().remove(0);
    let exchanged = recording.entries.len() - 1;
    let error = replay(&recording, built_in("fcfs").unwrap()).unwrap_err();
    assert!(matches!(error, ReplayError::PolicyExchanged { .. }), "{error}");
    recording.entries.truncate(exchanged);
    recording.entries.retain(|entry| !matches!(entry, Entry::PolicyExchanged));
    replay(&recording, built_in("fcfs").unwrap()).unwrap();
    let Some((index, actions)) =
        recording.entries.iter_mut().enumerate().find_map(|(index, entry)| match entry {
            Entry::Handle { actions, .. } if !actions.is_empty() => Some((index, actions)),
            _ => None,
        })
    else {
        panic!("nothing was ordered");
    };
    actions.push(Action::WakeAt(Time::MAX));
    let error = replay(&recording, built_in("fcfs").unwrap()).unwrap_err();
    assert!(matches!(error, ReplayError::Differs { entry, .. } if entry == index), "{error}");
}
