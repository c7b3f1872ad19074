//! Text from a model, prefilled on one worker and decoded on another:
//! `generate MODEL [PROMPT] [TOPOLOGY] [POLICY]`.

use std::io::Write;
use std::sync::Arc;

use kvrelay_core::policy::built_in;
use kvrelay_core::step::StepShape;
use kvrelay_engine::{Engine, EngineConfig, Output, Submission};
use kvrelay_model::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = Arc::new(Model::load(args.next().ok_or("which model?")?)?);
    let prompt = args.next().unwrap_or_else(|| "The capital of France is".into());
    let topology = args.next().unwrap_or_else(|| "1P1D".into()).parse()?;
    let policy = args.next().unwrap_or_else(|| "disaggregated".into());
    let policy = built_in(&policy).ok_or("which policy?")?;
    let engine = Engine::new(model.clone(), EngineConfig::new(topology), policy)?;
    for worker in engine.workers() {
        println!("{worker:?}");
    }
    let belief = engine.belief();
    for (what, shape) in [
        ("prefill of 128 tokens", StepShape::prefill(0, 128)),
        ("prefill of 512 tokens", StepShape::prefill(0, 512)),
        ("decode of 1 row at 128", StepShape::decode(1, 128)),
        ("decode of 8 rows at 128", StepShape::decode(8, 8 * 128)),
    ] {
        println!("{what}: {:.1} ms predicted", belief.steps[0].step(&shape).as_secs_f64() * 1e3);
    }
    println!("KV transfer: {:.1} GB/s", belief.link.bandwidth * 1e-9);
    let prompt = model.tokenizer().encode(&prompt, true)?;
    let handle = engine.submit(Submission { prompt, max_tokens: 32, ..Submission::default() })?;
    while let Some(output) = handle.recv() {
        match output {
            Output::Token { text, .. } => print!("{text}"),
            Output::Finished { record, .. } => println!("\n{record:#?}"),
        }
        std::io::stdout().flush()?;
    }
    Ok(())
}
