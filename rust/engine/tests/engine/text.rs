//! Text as it streams: whole characters, stop strings, end of sequence.

use kvrelay_core::record::FinishReason;
use kvrelay_engine::Submission;
use kvrelay_model::SamplingParams;

use crate::common::{alone, answer, engine, ids, model, submission};

/// Hot enough that the tiny model writes all kinds of bytes: halves of characters, too.
fn hot(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 5.0, seed, ..SamplingParams::default() }
}

/// Pieces, concatenated, are the text of all tokens at once, whatever characters are cut.
#[test]
fn pieces_are_the_whole() {
    let engine = engine("1P1D", "disaggregated");
    let submit = |seed| Submission { sampling: hot(seed), ..submission(ids(seed, 12), 60) };
    let handles: Vec<_> = (0..12).map(|seed| engine.submit(submit(seed)).unwrap()).collect();
    let mut broken = 0;
    for handle in &handles {
        let answer = answer(handle);
        assert_eq!(answer.text, model().tokenizer().decode(&answer.ids));
        broken += usize::from(answer.text.ends_with(char::REPLACEMENT_CHARACTER));
    }
    assert!(broken > 0, "some text ends inside a character, or this tests little");
}

/// The text ends before the first stop string to be completed, wherever tokens divide it.
#[test]
fn stop_strings_end_the_text_before_them() {
    let engine = engine("1M", "fcfs");
    for seed in 0..6 {
        let plain = Submission { sampling: hot(seed), ..submission(ids(seed, 12), 60) };
        let whole = answer(&engine.submit(plain.clone()).unwrap());
        let at: Vec<usize> = whole.text.char_indices().map(|(at, _)| at).collect();
        for (from, length) in [(0, 1), (5, 2), (9, 4), (20, 3)] {
            let stop = whole.text[at[from]..at[from + length]].to_owned();
            let first = whole.text.find(&stop).unwrap();
            let stops = vec!["never to be seen".to_owned(), stop, String::new()];
            let stopped = answer(&engine.submit(Submission { stop: stops, ..plain.clone() }).unwrap());
            assert_eq!(stopped.text, whole.text[..first]);
            assert_eq!(stopped.reason, Some(FinishReason::Stop));
            assert_eq!(stopped.ids, whole.ids[..stopped.ids.len()]);
            assert_eq!(stopped.record.output_tokens as usize, stopped.ids.len());
        }
    }
    engine.check_idle().unwrap();
}

/// A stop string that is only begun is text.
#[test]
fn what_only_begins_like_a_stop_string_is_given_at_the_end() {
    let engine = engine("1M", "fcfs");
    let plain = Submission { sampling: hot(3), ..submission(ids(3, 12), 30) };
    let whole = answer(&engine.submit(plain.clone()).unwrap());
    let tail: String = whole.text.chars().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect();
    let stop = vec![tail + "and more"];
    let same = answer(&engine.submit(Submission { stop, ..plain }).unwrap());
    assert_eq!((same.text, same.reason), (whole.text, Some(FinishReason::Length)));
}

/// An end-of-sequence token ends the request and is one of its tokens; `ignore_eos` goes on.
#[test]
fn end_of_sequence_ends_unless_ignored() {
    let engine = engine("1P1D", "disaggregated");
    let ends = model().end_ids().to_vec();
    let mut found = 0;
    for seed in 0..40 {
        let whole = alone(&ids(seed, 10), 100, hot(seed));
        let Some(end) = whole.iter().position(|id| ends.contains(id)) else { continue };
        found += 1;
        let going_on = Submission { sampling: hot(seed), ..submission(ids(seed, 10), 100) };
        let ending = Submission { ignore_eos: false, ..going_on.clone() };
        let ended = answer(&engine.submit(ending).unwrap());
        assert_eq!((&ended.ids[..], ended.reason), (&whole[..=end], Some(FinishReason::Stop)));
        assert_eq!(answer(&engine.submit(going_on).unwrap()).ids, whole);
        if found == 3 {
            return engine.check_idle().unwrap();
        }
    }
    panic!("the tiny model never ends a sequence");
}
