//! How fast the CPU backend runs a model here: `cpu_speed MODEL [THREADS] [scalar|vector]`.

use std::sync::Arc;
use std::time::Duration;

use kvrelay_engine::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use kvrelay_engine::backend::{Backend, Input, Limits, Logits, Row};
use kvrelay_model::{Model, SamplingParams};

const BLOCK: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("which model?")?;
    let threads = args.next().map_or(Ok(1), |n| n.parse())?;
    let tier = if args.next().as_deref() == Some("scalar") { Tier::Scalar } else { Tier::Vector };
    let weights = Arc::new(CpuWeights::new(&Model::load(path)?, tier));
    let limits =
        Limits { max_rows: 16, max_tokens: 2048, max_logits: 16, max_positions: 4096, max_slots: 16 };
    let config = CpuConfig { threads, num_blocks: 16 * 2048 / BLOCK, ..CpuConfig::default() };
    let mut backend = CpuBackend::new(weights, &config, limits)?;
    println!("{}, {threads} threads", backend.name());
    for tokens in [128, 512, 1024] {
        let time = best(&mut backend, 1, tokens)?.0;
        println!("prefill {tokens}: {:.0} tokens/s", tokens as f64 / time.as_secs_f64());
    }
    for (rows, context) in [(1, 128), (1, 1024), (4, 128), (8, 128), (16, 128)] {
        let time = best(&mut backend, rows, context)?.1;
        println!("decode {rows} rows, context {context}: {:.0} tokens/s", rows as f64 / time.as_secs_f64());
    }
    Ok(())
}

/// The shortest prefill and the shortest decode step of a few.
fn best(
    backend: &mut CpuBackend,
    rows: usize,
    tokens: usize,
) -> Result<(Duration, Duration), Box<dyn std::error::Error>> {
    let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 97 % 40_000 + 20).collect();
    let per_row = 2048 / BLOCK;
    let tables: Vec<Vec<u32>> =
        (0..rows).map(|r| (r * per_row..(r + 1) * per_row).map(|b| b as u32).collect()).collect();
    let sample = Some(SamplingParams::default());
    let (mut prefill, mut decode) = (Duration::MAX, Duration::MAX);
    for _ in 0..2 {
        for (slot, blocks) in (0..).zip(&tables) {
            let row =
                Row { slot, input: Input::Tokens(&ids), start: 0, blocks, sample, logits: Logits::Nothing };
            let ticket = backend.enqueue(&[row])?;
            prefill = prefill.min(backend.wait(ticket)?.busy);
        }
        for step in 0..16 {
            let start = (tokens + step) as u32;
            let row = |(slot, blocks)| Row {
                slot,
                input: Input::LastSampled,
                start,
                blocks,
                sample,
                logits: Logits::Nothing,
            };
            let batch: Vec<Row<'_>> = (0..).zip(tables.iter().map(Vec::as_slice)).map(row).collect();
            let ticket = backend.enqueue(&batch)?;
            decode = decode.min(backend.wait(ticket)?.busy);
        }
    }
    Ok((prefill, decode))
}
