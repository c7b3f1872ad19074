//! The demo model's logits, teacher-forced, against llama.cpp with F32 weights and F32 KV. Needs
//! the file that the environment variable `KVRELAY_DEMO_GGUF` names.

use std::sync::Arc;

use kvrelay_engine::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use kvrelay_engine::backend::{Backend, Input, Limits, Logits, Row};
use kvrelay_model::Model;
use serde_json::Value;

fn references() -> Vec<Value> {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/llama_cpp/llama_cpp_f32_weights_f32_kv.json");
    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    file["results"].as_array().unwrap().clone()
}

fn list<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Vec<T> {
    value.as_array().unwrap().iter().map(|v| read(v).unwrap()).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    list(value, |v| v.as_u64().map(|id| id as u32))
}

/// The top ten logits within `tolerance`, and the same first choice wherever the reference's
/// margin exceeds `margin`.
fn check(tier: Tier, tolerance: f64, margin: f64) {
    let Some(path) = std::env::var_os("KVRELAY_DEMO_GGUF") else {
        eprintln!("skipped: KVRELAY_DEMO_GGUF does not name the demo model's file");
        return;
    };
    let weights = Arc::new(CpuWeights::new(&Model::load(path).unwrap(), tier));
    let limits = Limits { max_rows: 1, max_tokens: 512, max_logits: 512, max_positions: 512, max_slots: 1 };
    let config = CpuConfig { threads: 2, num_blocks: 32, ..CpuConfig::default() };
    let blocks: Vec<u32> = (0..32).collect();
    let mut backend = CpuBackend::new(weights, &config, limits).unwrap();
    let vocab = backend.vocab_size();
    let (mut worst, mut compared) = (0.0_f64, 0);
    for result in references() {
        let (prompt, output) = (ids(&result["prompt_ids"]), ids(&result["output_ids"]));
        let text = [&prompt[..], &output[..output.len() - 1]].concat();
        let row = Row {
            slot: 0,
            input: Input::Tokens(&text),
            start: 0,
            blocks: &blocks,
            sample: None,
            logits: Logits::All,
        };
        let ticket = backend.enqueue(&[row]).unwrap();
        let step = backend.wait(ticket).unwrap();
        let after = |position: usize| &step.logits[position * vocab..][..vocab];
        let top = &result["last_prompt_pos_top10"];
        let last = after(prompt.len() - 1);
        for (id, reference) in ids(&top["ids"]).iter().zip(list(&top["logits"], Value::as_f64)) {
            worst = worst.max((f64::from(last[*id as usize]) - reference).abs());
        }
        let margins = list(&result["top1_margin_per_step"], Value::as_f64);
        for (step, (&token, found)) in output.iter().zip(margins).enumerate() {
            if found > margin {
                let best = kvrelay_model::sampling::argmax(after(prompt.len() - 1 + step)).unwrap();
                assert_eq!(best, token, "{} step {step}, margin {found}", result["name"]);
                compared += 1;
            }
        }
    }
    eprintln!("{}: top ten within {worst:.5}, {compared} first choices", backend.name());
    assert!(worst < tolerance, "{worst}");
    assert!(compared > 50);
}

#[test]
fn the_scalar_tier_agrees_with_llama_cpp() {
    check(Tier::Scalar, 0.05, 0.5);
}

/// The vector tier's stated tolerance is the same: it rounds differently, but computes in F32.
#[test]
fn the_vector_tier_agrees_with_llama_cpp() {
    check(Tier::Vector, 0.05, 0.5);
}
