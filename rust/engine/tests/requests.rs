//! Requests on a real engine, as their callers see them.

mod common;

use common::{BLOCK, answer, engine, ids, model, submission};
use kvrelay_core::record::{FinishReason, Status};
use kvrelay_engine::EngineError;
use kvrelay_model::SamplingParams;

#[test]
fn a_request_gives_its_tokens_text_and_record() {
    for topology in ["1M", "1P1D"] {
        let engine = engine(topology, "disaggregated");
        let handle = engine.submit(submission(ids(1, 20), 12)).unwrap();
        let answer = answer(&handle);
        assert_eq!(answer.ids.len(), 12);
        assert_eq!(answer.text, model().tokenizer().decode(&answer.ids));
        assert_eq!((answer.record.status, answer.reason), (Status::Finished, Some(FinishReason::Length)));
        assert_eq!((answer.record.prompt_tokens, answer.record.output_tokens), (20, 12));
        engine.check_idle().unwrap();
    }
}
