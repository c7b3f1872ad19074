//! Traces: every form of one file, every kind of bad row, and the public traces themselves.

use std::io::Write;
use std::path::PathBuf;

use kvrelay_core::request::PromptContent;
use kvrelay_core::time::{Nanos, Time};
use kvrelay_workload::trace::{Format, TimeUnit, Trace, TraceError, TraceOptions, parse, read};
use kvrelay_workload::{Class, Record, Workload, WorkloadError};

const MOONCAKE: &str = "\
{\"timestamp\": 27482, \"input_length\": 700, \"output_length\": 52, \"hash_ids\": [46, 47]}
{\"timestamp\": 30535, \"input_length\": 512, \"output_length\": 26, \"hash_ids\": [18446744073709551615]}
";
const AZURE: &str = "\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
";
const VIDUR: &str = "\
arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
";
const LLMSERVINGSIM: &str = "\
{\"input_toks\": 374, \"output_toks\": 44, \"arrival_time_ns\": 46926808, \"input_tok_ids\": [1, 2]}
{\"input_toks\": 396, \"output_toks\": 109, \"arrival_time_ns\": 4361505808}
";
const QWEN: &str = "\
{\"chat_id\": 1, \"parent_chat_id\": -1, \"timestamp\": 61.114, \"input_length\": 18, \"output_length\": 44, \"turn\": 1, \"hash_ids\": [1, 2]}
{\"chat_id\": 2, \"parent_chat_id\": 1, \"timestamp\": 65.428579, \"input_length\": 34, \"output_length\": 109, \"turn\": 2, \"hash_ids\": [1, 2, 3]}
";

const BURSTGPT: &str = "\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,3.1,ChatGPT,472,18,490,Conversation log
9.314579,2,4.5,GPT-4,1087,230,1317,API log
";

const SPLITWISE: &str = "\
request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0,0.5,1,374,44
1,2,0,4.814579,1,396,109
";
const AIPERF: &str = "\
{\"session_id\": \"a\", \"timestamp\": 1000, \"input_length\": 700, \"output_length\": 40, \"priority\": 3}
{\"session_id\": \"b\", \"timestamp\": 500.5, \"input_length\": 300, \"output_length\": 10}
{\"session_id\": \"a\", \"delay\": 2000, \"input_length\": 150, \"output_length\": 20}
{\"session_id\": \"a\", \"delay\": 0.25, \"timestamp\": 9000, \"input_length\": 10, \"output_length\": 5}
";

fn parsed(text: &str) -> Trace {
    parse("trace", text.as_bytes(), &TraceOptions::default()).unwrap()
}

fn error(text: &str) -> String {
    parse("trace", text.as_bytes(), &TraceOptions::default()).unwrap_err().to_string()
}

fn times(trace: &Trace) -> Vec<u64> {
    trace.records.iter().map(|record| record.at.0).collect()
}

#[test]
fn formats_are_recognised_and_read_in_their_units() {
    for (text, format, gap) in [
        (MOONCAKE, Format::Mooncake, 3_053_000_000),
        (AZURE, Format::Azure, 4_314_579_000),
        (VIDUR, Format::Vidur, 4_314_579_000),
        (LLMSERVINGSIM, Format::LlmServingSim, 4_314_579_000),
        (QWEN, Format::QwenBailian, 4_314_579_000),
        (BURSTGPT, Format::BurstGpt, 4_314_579_000),
        (SPLITWISE, Format::Splitwise, 4_314_579_000),
    ] {
        let trace = parsed(text);
        assert_eq!((trace.format, times(&trace)), (format, vec![0, gap]));
        assert_eq!(trace.warnings, Vec::<String>::new(), "{format:?}");
        let named = TraceOptions { format: Some(format), ..TraceOptions::default() };
        assert_eq!(parse("trace", text.as_bytes(), &named).unwrap(), trace);
        assert_eq!(Format::named(format.name()).unwrap(), format);
    }
    let mooncake = parsed(MOONCAKE);
    let second = &mooncake.records[1];
    assert_eq!((second.prompt_tokens, second.output_tokens), (512, 26));
    let ids = PromptContent::HashIds { ids: [u64::MAX].into(), tokens_per_id: 512 };
    assert_eq!(second.content, ids);
}

/// A byte-order mark, CRLF, blank and trailing lines, a missing last newline, spaces around cells.
#[test]
fn every_form_of_a_file_is_the_same_records() {
    for text in [MOONCAKE, AZURE, VIDUR, LLMSERVINGSIM, QWEN, BURSTGPT, SPLITWISE, AIPERF] {
        let plain = parsed(text);
        let crlf = text.replace('\n', "\r\n");
        let blank = text.replace('\n', "\n\n  \n");
        for variant in [
            format!("\u{FEFF}{text}"),
            crlf.clone(),
            format!("\u{FEFF}{crlf}"),
            blank.clone(),
            format!("\u{FEFF}\r\n{}", blank.replace('\n', "\r\n")),
            text.trim_end().to_owned(),
            format!("{text}\n\n\n"),
        ] {
            assert_eq!(parsed(&variant), plain, "{variant:?}");
        }
    }
    let spaced = VIDUR.replace(',', " , ").replace("374", "\"374\"");
    assert_eq!(parsed(&spaced), parsed(VIDUR));
    assert_eq!(parsed(&VIDUR.replace("374", "374.0")), parsed(VIDUR));
    let offsets =
        AZURE.replace("6805900", "68059+00:00").replace("18:15:50.9951690", "20:15:50.995169+02:00");
    assert_eq!(parsed(&offsets), parsed(AZURE));
}

#[test]
fn rows_out_of_order_are_sorted_stably_and_counted() {
    let rows = [(0, 10), (5, 11), (3, 12), (3, 13), (9, 14)].map(|(at, prompt)| format!("{at},{prompt},1\n"));
    let trace = parsed(&format!("arrived_at,num_prefill_tokens,num_decode_tokens\n{}", rows.concat()));
    let seen: Vec<(u64, u32)> =
        trace.records.iter().map(|record| (record.at.0 / 1_000_000_000, record.prompt_tokens)).collect();
    assert_eq!(seen, [(0, 10), (3, 12), (3, 13), (5, 11), (9, 14)]);
    assert_eq!(trace.warnings, ["2 rows came before an earlier arrival: sorted by time"]);
    let limit = TraceOptions { limit: Some(3), ..TraceOptions::default() };
    let text = format!("arrived_at,num_prefill_tokens,num_decode_tokens\n{}", rows.concat());
    assert_eq!(parse("trace", text.as_bytes(), &limit).unwrap().records, trace.records[..3]);
}

fn vidur(arrivals: &[&str]) -> String {
    let rows: String = arrivals.iter().map(|at| format!("{at},10,5\n")).collect();
    format!("arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")
}

fn mooncake(arrivals: &[&str]) -> String {
    let row = |at: &&str| {
        format!("{{\"timestamp\":{at},\"input_length\":9,\"output_length\":5,\"hash_ids\":[1]}}\n")
    };
    arrivals.iter().map(row).collect()
}

/// Epochs are moved to zero where they are epochs in the format's unit, and refused, with the
/// numbers, where they could only be another unit's. A unit that is given is believed.
#[test]
fn units_that_cannot_be_right_are_refused_until_given() {
    let epoch_seconds = vidur(&["1778000000.25", "1778000001.5", "1778000900"]);
    assert_eq!(times(&parsed(&epoch_seconds)), [0, 1_250_000_000, 899_750_000_000]);
    for (text, right, wrong) in [
        (vidur(&["1778000000000000", "1778000001500000"]), "us", "1778000000000000 s"),
        (vidur(&["1778000000000", "1778000001500"]), "ms", "1778000000000 s"),
        (mooncake(&["1778000000", "1778000001.5"]), "s", "1778000 s"),
        (mooncake(&["1778000000000000", "1778000001500000"]), "us", "1778000000000 s"),
        (LLMSERVINGSIM.replace("46926808", "1778000000").replace("4361505808", "1778000001.5"), "s", "1.778"),
        (
            LLMSERVINGSIM.replace("46926808", "1778000000000").replace("4361505808", "1778000001500"),
            "ms",
            "1778 s",
        ),
    ] {
        let message = error(&text);
        assert!(message.contains("2 arrivals from ") && message.contains(wrong), "{message}");
        assert!(message.contains(&format!("dates of our time in {right};")), "{message}");
        let unit = Some(TimeUnit::named(right).unwrap());
        let trace =
            parse("trace", text.as_bytes(), &TraceOptions { unit, ..TraceOptions::default() }).unwrap();
        assert_eq!(times(&trace), [0, 1_500_000_000]);
    }
    // One row in an epoch, the others relative to a start.
    assert!(error(&vidur(&["0", "1778000000", "3"])).contains("are 56 years"));
    assert!(error(&vidur(&["0", "0.0000001"])).contains("are 100 ns"));
    assert!(error(&mooncake(&["99999999999999999", "99999999999999999"])).contains("no dates of our time"));
    // All at once is a burst, not a mistake; nor is a late start that is no date.
    assert_eq!(times(&parsed(&mooncake(&["7", "7"]))), [0, 0]);
    assert_eq!(times(&parsed(&vidur(&["100000", "100001"]))), [0, 1_000_000_000]);
    let days_300 = vidur(&["0", "25920000"]);
    let seconds = TraceOptions { unit: Some(TimeUnit::Seconds), ..TraceOptions::default() };
    for options in [TraceOptions::default(), seconds] {
        let refused = parse("trace", days_300.as_bytes(), &options).unwrap_err();
        assert!(
            matches!(refused, TraceError::TooLong { seconds, .. } if seconds == 25_920_000.0),
            "{refused}"
        );
    }
    let dates = TraceOptions { unit: Some(TimeUnit::Millis), ..TraceOptions::default() };
    let message = parse("trace", AZURE.as_bytes(), &dates).unwrap_err().to_string();
    assert!(message.contains("`TIMESTAMP` holds date-times"), "{message}");
    assert!(
        TimeUnit::named("minutes").unwrap_err().to_string().contains("s, ms, us, ns")
            || TimeUnit::named("minutes").is_err()
    );
}

#[test]
fn a_bad_row_is_named_with_file_line_field_and_value() {
    for (text, message) in [
        (AZURE.replace("396", "0"), "trace, line 3: ContextTokens is 0; it must be a whole number of tokens"),
        (AZURE.replace("396", "-3"), "trace, line 3: ContextTokens is -3;"),
        (AZURE.replace("396", "3.5"), "trace, line 3: ContextTokens is 3.5;"),
        (AZURE.replace("109", "nan"), "trace, line 3: GeneratedTokens is \"nan\";"),
        (AZURE.replace("109", ""), "trace, line 3: GeneratedTokens is \"\";"),
        (AZURE.replace("109", "99999999999"), "trace, line 3: GeneratedTokens is 99999999999;"),
        (
            AZURE.replace("-16 18:15:50", "-32 18:15:50"),
            "trace, line 3: TIMESTAMP is \"2023-11-32 18:15:50.9951690\";",
        ),
        (
            AZURE.replace(",109", ""),
            "trace, line 3: the line is 2023-11-16 18:15:50.9951690,396 (2 values); it must be 3 values",
        ),
        (
            VIDUR.replace("4.314579", "-1"),
            "trace, line 3: arrived_at is -1; it must be an arrival in s, at least 0",
        ),
        (VIDUR.replace("4.314579", "inf"), "trace, line 3: arrived_at is \"inf\";"),
        (MOONCAKE.replace("30535", "\"30535\""), "trace, line 2: timestamp is \"30535\";"),
        (MOONCAKE.replace("30535", "null"), "trace, line 2: timestamp is null;"),
        (MOONCAKE.replace("\"output_length\": 26, ", ""), "trace, line 2: output_length is missing;"),
        (
            MOONCAKE.replace("18446744073709551615", "18446744073709551616"),
            "trace, line 2: hash_ids is 1.844",
        ),
        (MOONCAKE.replace("18446744073709551615", "-1"), "trace, line 2: hash_ids is -1;"),
        (MOONCAKE.replace("[18446744073709551615]", "7"), "trace, line 2: hash_ids is 7;"),
        (MOONCAKE.replace("[18446744073709551615]}", ""), "trace, line 2: the line is {\"timestamp\": 30535"),
        (format!("{MOONCAKE}garbage\n"), "trace, line 3: the line is garbage; it must be a JSON object"),
        (format!("{MOONCAKE}[1, 2]\n"), "trace, line 3: the line is [1, 2];"),
        (LLMSERVINGSIM.replace("396", "1e99"), "trace, line 2: input_toks is \"1e+99\";"),
        (QWEN.replace("65.428579", "true"), "trace, line 2: timestamp is true;"),
    ] {
        let seen = error(&text);
        assert!(seen.starts_with(message), "{seen}\n{message}");
    }
}

#[test]
fn what_is_no_trace_says_why() {
    let empty = ["", "\u{FEFF}", "\r\n \n", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"];
    for text in empty {
        assert_eq!(error(text), "trace: no requests in it (0 rows)", "{text:?}");
    }
    let message = error("time,prompt,output\n1,2,3\n");
    assert!(
        message.starts_with("trace, line 1: no known trace format has time, prompt, output; known: "),
        "{message}"
    );
    assert!(message.contains("azure (CSV: TIMESTAMP, ContextTokens, GeneratedTokens)"), "{message}");
    assert!(error("{\"a\": 1}\n").contains("no known trace format has a;"));
    let bytes = |bytes: &[u8]| parse("trace", bytes, &TraceOptions::default()).unwrap_err().to_string();
    assert_eq!(bytes(b"a,b\n\xFF\n"), "trace, line 2: not UTF-8");
    assert!(bytes(b"\x1F\x8B\x08").starts_with("trace: cannot be unpacked with gzip: "));
    assert!(bytes(b"\xFF\xFEa\0").contains("UTF-16"));
    let azure = TraceOptions { format: Some(Format::Azure), ..TraceOptions::default() };
    assert!(
        parse("trace", VIDUR.as_bytes(), &azure).unwrap_err().to_string().contains("no known trace format")
    );
    assert!(Format::named("mooncak").unwrap_err().to_string().contains("nearest first: mooncake"));
    let message = read(&PathBuf::from("/no/such/trace.csv"), &azure).unwrap_err().to_string();
    assert!(message.starts_with("/no/such/trace.csv: "), "{message}");
    let none = TraceOptions { limit: Some(0), ..TraceOptions::default() };
    assert_eq!(parse("trace", AZURE.as_bytes(), &none), Err(TraceError::LimitZero));
    let none = TraceOptions { slot: Some(Nanos::ZERO), ..TraceOptions::default() };
    assert_eq!(parse("trace", AZURE.as_bytes(), &none), Err(TraceError::SlotZero));
}

#[test]
fn slots_are_spread_when_asked_and_coarse_clocks_noticed() {
    let text = mooncake(&["0", "0", "2999", "3001", "3000", "9000"]);
    let options = TraceOptions { slot: Some(Nanos(3_000_000_000)), ..TraceOptions::default() };
    let trace = parse("trace", text.as_bytes(), &options).unwrap();
    assert_eq!(times(&trace), [0, 1_500, 3_000, 4_000, 5_000, 9_000].map(|ms| ms * 1_000_000));
    assert_eq!(trace.warnings, ["1 row came before an earlier arrival: sorted by time"]);
    let coarse: Vec<String> = (0..120).map(|i| (i / 3 * 3_000).to_string()).collect();
    let coarse: Vec<&str> = coarse.iter().map(String::as_str).collect();
    assert!(parsed(&mooncake(&coarse)).warnings[0].starts_with("120 arrivals fall on 40 instants"));
}

#[test]
fn what_failed_when_the_trace_was_taken_is_left_out_and_counted() {
    let trace = parsed(&format!("{BURSTGPT}10,3,0.1,GPT-4,55,0,55,API log\n"));
    assert_eq!(trace.records, parsed(BURSTGPT).records);
    assert_eq!(trace.warnings, ["1 requests without a response left out"]);
    assert!(error(&BURSTGPT.replace("1087", "0")).contains("line 3: Request tokens is 0;"));
    let all_failed = BURSTGPT.replace(",18,", ",0,").replace(",230,", ",0,");
    assert!(error(&all_failed).contains("0 rows"));
}

fn packed(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn packed_traces_are_the_same_traces() {
    for text in [MOONCAKE, AZURE, AIPERF, &format!("\u{FEFF}{VIDUR}")] {
        assert_eq!(parse("trace", &packed(text), &TraceOptions::default()).unwrap(), parsed(text));
    }
    let (head, tail) = AZURE.split_at(AZURE.len() - 20);
    let members = [packed(head), packed(tail)].concat();
    assert_eq!(parse("trace", &members, &TraceOptions::default()).unwrap(), parsed(AZURE));
    let whole = packed(AZURE);
    let torn = parse("trace", &whole[..whole.len() - 9], &TraceOptions::default()).unwrap_err().to_string();
    assert!(torn.starts_with("trace: cannot be unpacked with gzip: "), "{torn}");
    let bad_row = packed(&AZURE.replace("396", "x"));
    let named = parse("trace.csv.gz", &bad_row, &TraceOptions::default()).unwrap_err().to_string();
    assert!(named.starts_with("trace.csv.gz, line 3: ContextTokens is \"x\";"), "{named}");
}

#[test]
fn zones_and_fractions_may_be_mixed_and_old_tables_lack_columns() {
    let azure = "\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00+00:00,374,44
2024-05-10 00:00:00.009930+00:00,10,5
2024-05-10 00:00:01.5+00:00,20,6
2024-05-10 02:00:02+02:00,30,7
";
    let trace = parsed(azure);
    assert_eq!(times(&trace), [0, 9_930_000, 1_500_000_000, 2_000_000_000]);
    let old = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n";
    let trace = parsed(old);
    assert_eq!((trace.format, trace.records[0].prompt_tokens), (Format::BurstGpt, 472));
}

#[test]
fn aiperf_sessions_follow_each_other_and_carry_their_conversation() {
    let trace = parsed(AIPERF);
    assert_eq!((trace.format, trace.timed, trace.records.len()), (Format::AiPerf, true, 4));
    let seen: Vec<_> = trace.records.iter().map(|one| (one.at.0, one.prompt_tokens, one.priority)).collect();
    let start = 499_500_000;
    assert_eq!(seen, [(0, 300, None), (start, 700, Some(3)), (start, 890, None), (start, 920, None)]);
    let turns: Vec<_> =
        trace.turns.iter().map(|turn| (turn.session, turn.number, turn.think.0, turn.earliest.0)).collect();
    let later = 8_499_500_000;
    assert_eq!(turns, [(0, 0, 0, 0), (1, 0, 0, start), (1, 1, 2_000_000_000, start), (1, 2, 250_000, later)]);
    let blocks = |index: usize| {
        let record = &trace.records[index];
        record.content.block_hashes(record.prompt_tokens, 16)
    };
    assert!(blocks(2).starts_with(&blocks(1)) && blocks(3).starts_with(&blocks(2)) && blocks(1).len() == 43);
    assert_eq!(trace.warnings, Vec::<String>::new());

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sessions.jsonl.gz");
    std::fs::write(&file, packed(AIPERF)).unwrap();
    let load = |options: &TraceOptions, rate| Workload::from_trace(&file, options, rate, Class::default(), 3);
    let workload = load(&TraceOptions::default(), None).unwrap();
    let mut source = workload.source();
    assert_eq!((source.pull().unwrap().at, source.pull().unwrap().at), (Time(0), Time(start)));
    assert_eq!(source.next_at(), None);
    source.completed(1, Time(600_000_000));
    assert_eq!((source.next_at(), source.pull().unwrap().prompt_tokens), (Some(Time(2_600_000_000)), 890));
    source.completed(2, Time(3_000_000_000));
    // Not before its own timestamp.
    assert_eq!(source.next_at(), Some(Time(later)));
    let message = load(&TraceOptions::default(), Some(2.0)).unwrap_err().to_string();
    assert!(message.contains("is a closed loop (4 requests of sessions.jsonl.gz (aiperf))"), "{message}");
    let slot = TraceOptions { slot: Some(Nanos(1_000)), ..TraceOptions::default() };
    assert!(load(&slot, None).unwrap_err().to_string().contains("slot= cannot spread them"));
    let limit = TraceOptions { limit: Some(3), ..TraceOptions::default() };
    assert_eq!(load(&limit, None).unwrap().turns().unwrap().len(), 3);
}

#[test]
fn aiperf_rows_may_have_ids_texts_or_whole_conversations() {
    let shared = "\
{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 4, \"hash_ids\": [7, 18446744073709551615]}
{\"session_id\": 1, \"timestamp\": 5, \"input_length\": 600, \"output_length\": 4, \"hash_ids\": [7, 8]}
{\"session_id\": 1, \"input_length\": 600, \"output_length\": 4, \"hash_ids\": [9, 10]}
";
    let trace = parsed(shared);
    assert_eq!(trace.format, Format::AiPerf, "sessions begin after rows that look like Mooncake's");
    let ids = |index: usize| match &trace.records[index].content {
        PromptContent::HashIds { ids, tokens_per_id: 512 } => ids.to_vec(),
        other => panic!("{other:?}"),
    };
    assert_eq!((ids(0), ids(1)), (vec![7, u64::MAX], vec![7, 8]));
    assert_eq!((trace.records[2].prompt_tokens, &ids(2)[..2]), (1_204, &[7, 8][..]));
    let whole = shared
        .replace("\"session_id\"", "\"context_mode\": \"message_array_with_responses\", \"session_id\"");
    let trace = parsed(&whole);
    assert_eq!(trace.records[2].prompt_tokens, 600);
    assert!(matches!(&trace.records[2].content, PromptContent::HashIds { ids, .. } if ids[..] == [9, 10]));

    let short = parsed(&shared.replace("[7, 18446744073709551615]", "[7]"));
    assert_eq!(short.warnings, ["1 row has more or fewer hash ids than its prompt has blocks"]);

    let texts = "{\"text_input\": \"What is the capital of France?\", \"output_length\": 20}\n{\"input_length\": 3, \"output_length\": 1}\n";
    let trace = parsed(texts);
    assert_eq!((trace.format, trace.timed, trace.records[0].prompt_tokens), (Format::AiPerf, false, 8));
    assert_eq!(trace.warnings, ["1 prompts are texts: their lengths are taken as 4 bytes a token"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts.jsonl");
    std::fs::write(&file, texts).unwrap();
    let load = |rate| Workload::from_trace(&file, &TraceOptions::default(), rate, Class::default(), 3);
    assert!(load(None).unwrap_err().to_string().contains("without arrivals (input_length, output_length)"));
    assert!(load(Some(4.0)).unwrap().arrivals[1].at > Time::ZERO);

    for (text, message) in [
        (
            AIPERF.replace(", \"timestamp\": 500.5", ""),
            "trace, line 2: timestamp is missing; it must be there:",
        ),
        (AIPERF.replace("2000", "-1"), "trace, line 3: delay is -1; it must be a pause in ms, at least 0"),
        (
            AIPERF.replace("3}", "0.5}"),
            "trace, line 1: priority is 0.5; it must be a whole number of 32 bits",
        ),
        (AIPERF.replace("\"input_length\": 150, ", ""), "trace, line 3: input_length is missing;"),
        (
            AIPERF.replace("150", "16777216"),
            "trace, line 3: the conversation up to input_length is 16777956;",
        ),
        (
            texts.replace("\"What is the capital of France?\"", "5"),
            "trace, line 1: text_input is 5; it must be a text",
        ),
    ] {
        let seen = error(&text);
        assert!(seen.starts_with(message), "{seen}\n{message}");
    }
}

#[test]
fn hash_ids_that_do_not_cover_their_prompt_are_noticed() {
    let trace = parsed(&MOONCAKE.replace("700", "1025"));
    assert_eq!(trace.warnings, ["1 row has more or fewer hash ids than its prompt has blocks"]);
}

#[test]
fn lengths_alone_need_a_rate() {
    let folder = std::env::temp_dir().join(format!("kvrelay-lengths-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("lengths.csv");
    let rows: String = (1..=500).map(|i| format!("{i},{},{},0.5\n", i + 1, 2 * i + 1)).collect();
    std::fs::write(&file, format!("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n{rows}"))
        .unwrap();
    let load = |rate| Workload::from_trace(&file, &TraceOptions::default(), rate, Class::default(), 3);
    let refused = load(None).unwrap_err();
    assert!(matches!(refused, WorkloadError::Trace(TraceError::RateNeeded { .. })), "{refused}");
    let workload = load(Some(8.0)).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(workload.arrivals.len(), 500);
    assert!(workload.arrivals.iter().zip(1..).all(|(arrival, i)| arrival.prompt_tokens == i));
    assert!((workload.rate().unwrap() / 8.0 - 1.0).abs() < 3.0 / 500f64.sqrt());
    assert!(workload.arrivals.is_sorted_by_key(|arrival| arrival.at));
}

/// A public trace beside the repository, or `None`, said aloud, in a clone that stands alone.
fn public(name: &str) -> Option<PathBuf> {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces").join(name);
    if file.exists() {
        return Some(file);
    }
    println!("skipped: {} is not there", file.display());
    None
}

#[test]
fn azures_conversations_are_vidurs() {
    let names = ["AzureLLMInferenceTrace_conv.csv", "vidur_splitwise_conv.csv"];
    let [Some(azure), Some(vidur)] = names.map(public) else { return };
    let [azure, vidur] = [azure, vidur].map(|file| read(&file, &TraceOptions::default()).unwrap());
    assert_eq!((azure.records.len(), azure.format, vidur.format), (19_366, Format::Azure, Format::Vidur));
    assert_eq!((&azure.warnings, &vidur.warnings), (&vec![], &vec![]));
    let rounded = |record: &Record| Record { at: Time((record.at.0 + 500) / 1_000), ..record.clone() };
    for (a, b) in azure.records.iter().zip(&vidur.records) {
        let (a, b) = (rounded(a), rounded(b));
        // Vidur prints microseconds, and where it cut a digit of 100 ns it may be one off.
        assert!(a.at.0.abs_diff(b.at.0) <= 1, "{a:?} {b:?}");
        assert_eq!(Record { at: b.at, ..a }, b);
    }
    assert_eq!(azure.records.len(), vidur.records.len());
}

#[test]
fn the_other_public_traces_load() {
    let Some(file) = public("mooncake_conversation_trace.jsonl") else { return };
    let trace = read(&file, &TraceOptions::default()).unwrap();
    let last = trace.records.last().unwrap();
    assert_eq!(
        (trace.records.len(), trace.format, last.at),
        (12_031, Format::Mooncake, Time(3_536_999_000_000))
    );
    assert_eq!(trace.warnings.len(), 1, "{:?}", trace.warnings);
    assert!(trace.warnings[0].contains("12031 arrivals fall on 1180 instants"));
    let options =
        TraceOptions { slot: Some(Nanos(3_000_000_000)), limit: Some(2_000), ..TraceOptions::default() };
    let spread = read(&file, &options).unwrap();
    assert_eq!((spread.records.len(), spread.warnings.len()), (2_000, 0));
    assert!(spread.records.is_sorted_by_key(|record| record.at));

    let Some(file) = public("llmservingsim_sharegpt-llama-3.1-8b-300-sps10.jsonl") else { return };
    let workload = Workload::from_trace(&file, &TraceOptions::default(), None, Class::default(), 0).unwrap();
    assert_eq!(workload.arrivals.len(), 300);
    assert!((workload.rate().unwrap() - 10.0).abs() < 1.0, "{:?}", workload.rate());

    let Some(file) = public("sarathi_sharegpt_8k_filtered_stats_llama2_tokenizer.csv") else { return };
    let workload =
        Workload::from_trace(&file, &TraceOptions::default(), Some(5.0), Class::default(), 0).unwrap();
    assert_eq!((workload.arrivals.len(), workload.arrivals[0].prompt_tokens), (30_731, 74));
}
