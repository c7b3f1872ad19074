//! The backend's contract: queued steps, graphs, progress, refusals, memory.

use std::collections::VecDeque;

use kvrelay_emulator::{Emulated, test_name};
use kvrelay_engine::backend::cuda::{self, CudaBackend, CudaConfig, CudaWeights};
use kvrelay_engine::backend::{Backend, BackendError, Input, Limits, Logits, Row, Ticket};
use kvrelay_model::testing::TinyLlama;
use kvrelay_model::{DType, SamplingParams};

use crate::common::{
    BLOCK, BLOCKS, alone, backend, bits, device, fast, ids, invariant, limits, row, run, spoil, tables, tiny,
    weights,
};

fn sampling(temperature: f32) -> SamplingParams {
    SamplingParams { temperature, top_k: 40, top_p: 0.9, seed: 77 }
}

/// The tokens of a prompt's continuation, one step after the other, with a companion in the batch.
fn by_host(backend: &mut CudaBackend, prompt: &[u32], sample: SamplingParams, count: usize) -> Vec<u32> {
    let table = tables(3, 2);
    let companion = ids(2, count);
    let mut tokens: Vec<u32> = vec![];
    for step in 0..count {
        let fed = tokens.last().map(std::slice::from_ref);
        let start = if step == 0 { 0 } else { prompt.len() + step - 1 };
        let main = Row { sample: Some(sample), ..row(0, fed.unwrap_or(prompt), start, &table[0]) };
        let other = row(5, &companion[step..=step], step, &table[1]);
        let ticket = backend.enqueue(&[other, main]).unwrap();
        let output = backend.wait(ticket).unwrap();
        assert_eq!(output.rows[0].token, None);
        tokens.push(output.rows[1].token.unwrap());
    }
    tokens
}

/// The same with steps enqueued ahead, each fed by the one before.
fn ahead(backend: &mut CudaBackend, prompt: &[u32], sample: SamplingParams, count: usize) -> Vec<u32> {
    let table = tables(3, 2);
    let mut tickets: VecDeque<Ticket> = VecDeque::new();
    let mut tokens = vec![];
    for step in 0..count {
        let sample = Some(sample);
        let row = if step == 0 {
            Row { sample, ..row(3, prompt, 0, &table[0]) }
        } else {
            let start = (prompt.len() + step - 1) as u32;
            let input = Input::LastSampled;
            Row { slot: 3, input, start, blocks: &table[0], sample, logits: Logits::Nothing }
        };
        if tickets.len() == backend.queue_depth() {
            let full = backend.enqueue(&[row]);
            assert!(matches!(full, Err(BackendError::Limit { what: "steps in the queue", .. })));
            tokens.push(backend.wait(tickets.pop_front().unwrap()).unwrap().rows[0].token.unwrap());
        }
        tickets.push_back(backend.enqueue(&[row]).unwrap());
    }
    for ticket in tickets {
        tokens.push(backend.wait(ticket).unwrap().rows[0].token.unwrap());
    }
    tokens
}

#[test]
fn queued_steps_feed_each_other() {
    Emulated::new(test_name!()).set("JITTER_US", 200).run(|| {
        let weights = weights(&tiny(DType::BF16).model());
        let prompt = ids(1, 11);
        for temperature in [0.0, 0.8] {
            let expected = by_host(&mut backend(&weights, &invariant()), &prompt, sampling(temperature), 8);
            let found = ahead(&mut backend(&weights, &invariant()), &prompt, sampling(temperature), 8);
            assert_eq!(found, expected, "at temperature {temperature}");
        }
    });
}

/// Decode steps of 1 to 5 rows over a growing context; the logits of all.
fn decoded(backend: &mut CudaBackend) -> Vec<u32> {
    let table = tables(9, 5);
    let texts: Vec<Vec<u32>> = (0..5).map(|i| ids(40 + i, 30)).collect();
    let mut all = vec![];
    for position in 0..12 {
        let count = 1 + position % 5;
        let rows: Vec<Row<'_>> = (0..count)
            .map(|i| {
                let ids = &texts[i][position..=position];
                Row {
                    logits: Logits::Last,
                    sample: Some(sampling(0.7)),
                    ..row(i as u32, ids, position, &table[i])
                }
            })
            .collect();
        for logits in run(backend, &rows) {
            all.extend(bits(&logits));
        }
    }
    all
}

#[test]
fn graphs_change_no_bit() {
    Emulated::new(test_name!()).set("ORDER", "random").run(|| {
        let weights = weights(&tiny(DType::BF16).model());
        for config in [fast(), CudaConfig { cublas: false, ..fast() }, invariant()] {
            let mut with = backend(&weights, &config);
            let mut without = backend(&weights, &CudaConfig { graphs: false, ..config });
            assert!(decoded(&mut with) == decoded(&mut without), "{}", with.name());
            // Of 1, 2, 4 and 5 rows; 5 are the most there can be.
            assert_eq!((with.num_graphs(), without.num_graphs()), (4, 0));
        }
    });
}

#[test]
fn progress_follows_the_layer_groups() {
    Emulated::new(test_name!()).set("JITTER_US", 200).run(|| {
        let model = tiny(DType::BF16).model();
        let mut backend = backend(&weights(&model), &fast());
        let (progress, pool) = (backend.progress().clone(), backend.pool().clone());
        let blocks: Vec<u32> = (0..BLOCKS as u32).collect();
        let text = ids(4, 60);
        let ticket = backend.enqueue(&[row(0, &text, 0, &blocks)]).unwrap();
        for group in 0..pool.geometry().num_layer_groups {
            progress.wait(ticket, group).unwrap();
            let mut out = vec![0.0; pool.geometry().group_range(group).len()];
            // SAFETY: the step has written this group of the block and writes no more to it.
            unsafe { pool.read_group(0, group, &mut out) };
            assert!(out.iter().all(|&x| x != 0.0), "group {group}");
        }
        backend.wait(ticket).unwrap();
        progress.wait(ticket, 0).unwrap();
        drop(backend);
        let stopped = progress.wait(Ticket(ticket.0 + 1), 0);
        assert!(matches!(stopped, Err(BackendError::Stopped(_))));
    });
}

#[test]
fn a_broken_row_is_an_error_of_its_step() {
    Emulated::new(test_name!()).run(|| {
        let mut backend = backend(&weights(&tiny(DType::BF16).model()), &fast());
        let blocks: Vec<u32> = (0..BLOCKS as u32).collect();
        spoil(&backend);
        // Position 0 was never run, so this row reads garbage.
        let sample = Some(SamplingParams::default());
        let broken = Row { sample, ..row(2, &[5], 1, &blocks) };
        let good = Row { sample, ..row(1, &[5], 0, &blocks[8..]) };
        let ticket = backend.enqueue(&[good, broken]).unwrap();
        let error = backend.wait(ticket).unwrap_err();
        assert!(matches!(error, BackendError::NotFinite { row: 1, slot: 2, .. }), "{error}");
        let ticket = backend.enqueue(&[Row { sample, ..row(2, &[5], 0, &blocks) }]).unwrap();
        assert!(backend.wait(ticket).unwrap().rows[0].token.is_some());
        let ticket = backend.enqueue(&[]).unwrap();
        assert!(backend.wait(ticket).unwrap().rows.is_empty());
    });
}

#[test]
fn what_cannot_run_is_refused_with_both_numbers() {
    Emulated::new(test_name!()).run(|| {
        let model = tiny(DType::BF16).model();
        let weights = weights(&model);
        let mut backend = backend(&weights, &fast());
        let blocks: Vec<u32> = (0..16).collect();
        let refused = |backend: &mut CudaBackend, row: Row<'_>, text: &str| {
            let error = backend.enqueue(&[row]).unwrap_err().to_string();
            assert!(error.contains(text), "{error} lacks {text}");
        };
        refused(&mut backend, row(0, &[288], 0, &blocks), "row 0: token id: expected below 288, found 288");
        refused(&mut backend, row(0, &[1], 0, &[64]), "row 0: block: expected below 64, found 64");
        let unknown = Row { input: Input::LastSampled, ..row(0, &[1], 0, &blocks) };
        refused(&mut backend, unknown, "row 0: input: expected a token sampled for this slot");
        assert!(backend.release(8).unwrap_err().to_string().contains("at most 7, found 8"));
        // A refusal changes nothing.
        alone(&mut backend, &ids(1, 9));

        let long = Limits { max_positions: 257, ..limits() };
        let error = CudaBackend::new(weights.clone(), &fast(), long).unwrap_err().to_string();
        assert!(error.contains("at most 256, the model's context length, found 257"), "{error}");
        let odd = TinyLlama { head_dim: 16, num_heads: 6, num_kv_heads: 2, ..tiny(DType::F32) }.model();
        let error = CudaWeights::new(&device(0), &odd).unwrap_err().to_string();
        assert!(error.contains("head dimension on CUDA: expected one of [64, 80, 96, 128, 256], found 16"));
    });
}

/// What is planned is what is taken, all of it comes back, and what does not fit is refused.
#[test]
fn memory_is_as_planned() {
    let test = Emulated::new(test_name!()).set("MEMORY_MB", 64);
    test.run(|| {
        let model = tiny(DType::Q8_0).model();
        let device = device(0);
        let free = || device.memory().unwrap().0;
        let before = free();
        let weights = CudaWeights::new(&device, &model).unwrap();
        assert_eq!(before - free(), CudaWeights::num_bytes(&model));
        let with_weights = free();
        for config in [fast(), CudaConfig { cublas: false, ..fast() }, invariant()] {
            let backend = backend(&weights, &config);
            let pool = cuda::geometry(model.config(), 0, BLOCK).block_bytes() * BLOCKS;
            let planned = cuda::buffer_bytes(&device, model.config(), &config, &limits()) + pool as u64;
            assert_eq!(with_weights - free(), planned, "{}", backend.name());
            drop(backend);
            assert_eq!(free(), with_weights);
        }
        let large = CudaConfig { num_blocks: 1 << 20, ..fast() };
        let error = CudaBackend::new(weights.clone(), &large, limits()).unwrap_err().to_string();
        let needed = cuda::geometry(model.config(), 0, BLOCK).block_bytes() << 20;
        assert_eq!(error, format!("cuda:0: KV blocks: needs {needed} bytes, {with_weights} are free"));
        assert_eq!(free(), with_weights);
        drop(weights);
        assert_eq!(free(), before);
    });
}
