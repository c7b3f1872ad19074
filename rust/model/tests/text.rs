//! Streams of text: characters are never cut, stop strings may span tokens, and a stream says
//! exactly what a one-shot decode says.

use std::path::PathBuf;
use std::sync::Arc;

use kvrelay_model::testing::TinyLlama;
use kvrelay_model::{TextStream, Tokenizer};
use proptest::prelude::*;
use serde_json::json;

fn byte_level() -> Arc<Tokenizer> {
    TinyLlama::default().model().tokenizer().clone()
}

/// A SentencePiece conversion with byte fallback: 256 byte tokens, a few words, one strip.
fn byte_fallback() -> Arc<Tokenizer> {
    let mut vocab = serde_json::Map::new();
    for byte in 0..256 {
        vocab.insert(format!("<0x{byte:02X}>"), byte.into());
    }
    for (id, token) in ["<unk>", "</s>", "▁", "▁the", "a", "DEF", "G", "HI", "J", "한"].iter().enumerate()
    {
        vocab.insert((*token).into(), (256 + id).into());
    }
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 257, "content": "</s>", "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                  "ignore_merges": false, "vocab": vocab, "merges": []},
    });
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("tokenizer.json");
    std::fs::write(&path, json.to_string()).unwrap();
    Arc::new(Tokenizer::from_file(&path).unwrap())
}

fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], stops: &[&str]) -> (Vec<String>, bool) {
    let stops: Vec<String> = stops.iter().map(|&s| s.to_owned()).collect();
    let mut stream = TextStream::new(tokenizer.clone(), &stops);
    let mut pieces: Vec<String> = vec![];
    for &id in ids {
        let piece = stream.push(id);
        pieces.push(piece.text);
        if piece.stopped {
            return (pieces, true);
        }
    }
    let last = stream.finish();
    assert_eq!(stream.finish().text, "", "the tail is flushed once");
    pieces.push(last.text);
    (pieces, last.stopped)
}

#[test]
fn characters_are_never_cut() {
    let text = "한국어 🦀é";
    for tokenizer in [byte_level(), byte_fallback()] {
        let ids = tokenizer.encode(text, false).unwrap();
        assert!(ids.len() > text.chars().count(), "characters span tokens here");
        let (pieces, _) = stream(&tokenizer, &ids, &[]);
        assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')));
        assert_eq!(pieces.concat(), text);
        assert_eq!(tokenizer.decode(&ids), text);
        // Ends inside the last character: one replacement, at the very end.
        let (pieces, _) = stream(&tokenizer, &ids[..ids.len() - 1], &[]);
        assert_eq!(pieces.last().unwrap(), "\u{fffd}");
        assert_eq!(pieces.concat(), "한국어 🦀\u{fffd}");
    }
}

#[test]
fn a_leading_space_is_stripped_once() {
    let tokenizer = byte_fallback();
    assert_eq!(tokenizer.decode(&[259, 259]), "the the");
    assert_eq!(tokenizer.decode(&[258, 258, 260]), " a");
    assert_eq!(tokenizer.decode(&[257, 259, 257]), "the");
    assert_eq!(tokenizer.decode(&[260, 259, 9999]), "a the");
}

#[test]
fn a_stop_string_may_span_tokens() {
    let tokenizer = byte_fallback();
    let ids = [260, 261, 262, 263, 264, 260];
    assert_eq!(
        stream(&tokenizer, &ids, &["DEFGHIJ"]),
        (vec!["a".into(), String::new(), String::new(), String::new(), String::new()], true)
    );
    // Not completed: what was held back comes out as soon as it can no longer be a stop.
    let (pieces, stopped) = stream(&tokenizer, &[261, 262, 260, 261], &["DEFGHIJ", "XYZ"]);
    assert_eq!(
        (pieces, stopped),
        (vec!["".into(), "".into(), "DEFGa".into(), "".into(), "DEF".into()], false)
    );
    // Several stops: the first to be completed ends the text.
    assert_eq!(stream(&tokenizer, &ids, &["HI", "FGH"]).0.concat(), "aDE");
    assert_eq!(stream(&tokenizer, &ids, &["GH", "EFGH"]).0.concat(), "aD");
    // Inside multi-byte text, with the stop's bytes spread over tokens.
    let korean = tokenizer.encode("a한국어b", false).unwrap();
    let (pieces, stopped) = stream(&tokenizer, &korean, &["국"]);
    assert_eq!((pieces.concat().as_str(), stopped), ("a한", true));
    assert_eq!(stream(&tokenizer, &ids, &[""]).0.concat(), "aDEFGHIJa");
}

/// The definition, read off the whole text character by character.
fn one_shot(text: &str, stops: &[String]) -> (String, bool) {
    for (at, c) in text.char_indices() {
        let so_far = &text[..at + c.len_utf8()];
        if let Some(longest) = stops.iter().filter(|s| so_far.ends_with(s.as_str())).map(String::len).max() {
            return (so_far[..so_far.len() - longest].to_owned(), true);
        }
    }
    (text.to_owned(), false)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any ids, invalid UTF-8 and unknown ids included: stream = one-shot = the lossy reading.
    #[test]
    fn a_stream_says_what_one_shot_says(ids in prop::collection::vec(0_u32..300, 0..40)) {
        for tokenizer in [byte_level(), byte_fallback()] {
            let (pieces, _) = stream(&tokenizer, &ids, &[]);
            let mut bytes: Vec<u8> = ids.iter().filter(|&&id| !tokenizer.is_special(id))
                .flat_map(|&id| tokenizer.token_bytes(id).to_vec()).collect();
            if tokenizer.token_to_id("▁the").is_some() && bytes.first() == Some(&b' ') {
                bytes.remove(0);
            }
            prop_assert_eq!(pieces.concat(), String::from_utf8_lossy(&bytes));
            prop_assert_eq!(tokenizer.decode(&ids), String::from_utf8_lossy(&bytes));
        }
    }

    /// Stop strings over a small alphabet: the stream agrees with the definition, and holds back
    /// no more than a true prefix of a stop.
    #[test]
    fn stops_agree_with_the_definition(
        ids in prop::collection::vec(260_u32..265, 0..30),
        stops in prop::collection::vec("[aDEFGHIJ]{1,5}", 0..4),
    ) {
        let tokenizer = byte_fallback();
        let mut stream = TextStream::new(tokenizer.clone(), &stops);
        let (mut out, mut stopped) = (String::new(), false);
        for (n, &id) in ids.iter().enumerate() {
            let piece = stream.push(id);
            out.push_str(&piece.text);
            stopped = piece.stopped;
            if stopped { break; }
            let so_far = tokenizer.decode(&ids[..=n]);
            let held = so_far.strip_prefix(out.as_str()).unwrap();
            prop_assert!(held.is_empty() || stops.iter().any(|s| s.len() > held.len() && s.starts_with(held)));
        }
        if !stopped { out.push_str(&stream.finish().text); }
        prop_assert_eq!((out, stopped), one_shot(&tokenizer.decode(&ids), &stops));
    }

    /// What is encoded decodes to itself.
    #[test]
    fn text_round_trips(text in "\\PC{0,40}") {
        let tokenizer = byte_level();
        prop_assume!(!text.contains("<|"));
        prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text, true).unwrap()), text);
    }
}
