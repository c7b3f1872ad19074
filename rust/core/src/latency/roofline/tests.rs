//! The roofline against its contract, published floors and measurements.

use super::super::hardware::{gpu, gpu_names};
use super::super::models::{model, model_names};
use super::*;
use proptest::prelude::*;

fn roofline(name: &str, on: &str, tp: u32, share: Efficiencies) -> Roofline {
    Roofline::new(model(name).unwrap(), &gpu(on).unwrap(), tp, share).unwrap()
}

fn ms(model: &Roofline, shape: StepShape) -> f64 {
    model.step(&shape).as_secs_f64() * 1e3
}

/// Milliseconds in which all weights are read once, as published, on four GPUs.
const FLOORS: &[(&str, [f64; 4])] = &[
    ("opt-13b", [12.6, 7.7, 5.3, 3.3]),
    ("opt-66b", [64.0, 39.0, 27.0, 17.0]),
    ("opt-175b", [171.0, 104.0, 73.0, 45.0]),
    ("llama-2-7b", [6.6, 4.0, 2.8, 1.75]),
    ("llama-2-13b", [12.8, 7.8, 5.4, 3.4]),
    ("llama-2-70b", [68.0, 41.0, 29.0, 18.0]),
    ("llama-3.1-8b", [7.9, 4.8, 3.3, 2.1]),
    ("llama-3.1-70b", [69.0, 42.0, 29.0, 18.0]),
    ("llama-3.1-405b", [398.0, 242.0, 169.0, 105.0]),
    ("qwen3-8b", [8.0, 4.9, 3.4, 2.1]),
    ("qwen3-32b", [32.0, 20.0, 13.7, 8.5]),
    ("qwen3-235b-a22b", [231.0, 140.0, 98.0, 61.0]),
    ("mixtral-8x7b", [46.0, 28.0, 19.5, 12.0]),
    ("deepseek-v3", [658.0, 401.0, 280.0, 174.0]),
];

/// Floors count the embedding table, of which a step reads a few rows; hence 8 % for Llama and
/// Qwen of 8B. Experts are all visited by a batch of 512.
#[test]
fn at_the_speed_of_light_decode_reads_the_weights() {
    for (name, floors) in FLOORS {
        for (on, floor) in ["a100-80gb", "h100", "h200", "b200"].iter().zip(floors) {
            let light = roofline(name, on, 1, Efficiencies::SPEED_OF_LIGHT);
            let bytes = light.model.weight_bytes() as f64 / gpu(on).unwrap().hbm_bandwidth * 1e3;
            assert!((bytes / floor - 1.0).abs() < 0.03, "{name} on {on}: {bytes:.2}, not {floor}");
            let small = light.linear(16.0, 1.0) * 1e3;
            assert!(small <= bytes * 1.001, "{name} on {on}: {small:.2} is above {bytes:.2}");
            if light.model.experts.is_none() {
                assert!(small > bytes * 0.92, "{name} on {on}: {small:.2} is far below {bytes:.2}");
            }
        }
    }
}

/// Vidur's kernels (microsoft/vidur, MIT), all linear layers: milliseconds for 8 and 128 tokens,
/// MFU for 2,048. Within 15 %, but for 128 tokens, where waves are quantised: within 30 %.
#[test]
fn linear_layers_are_near_measured_kernels() {
    for (name, on, tp, at_8, at_128, mfu) in [
        ("llama-2-7b", "a100-80gb", 1, 8.3, 11.3, 0.70),
        ("llama-2-70b", "a100-80gb", 4, 23.7, 30.6, 0.74),
        ("llama-2-7b", "h100", 1, 4.9, 5.8, 0.77),
        ("llama-2-70b", "h100", 4, 13.4, 14.2, 0.74),
    ] {
        let model = roofline(name, on, tp, Efficiencies::default());
        let close = |tokens: f64, measured: f64, tolerance: f64| {
            let ours = model.linear(tokens, 1.0) * 1e3;
            let ratio = ours / measured;
            assert!(
                (ratio - 1.0).abs() < tolerance,
                "{name} on {on}, {tokens}: {ours:.2} against {measured:.2}"
            );
        };
        close(8.0, at_8, 0.15);
        close(128.0, at_128, 0.30);
        let flops = 2.0 * 2_048.0 * model.model.common_params() as f64 / f64::from(tp);
        close(2_048.0, flops / (mfu * gpu(on).unwrap().bf16_flops) * 1e3, 0.15);
    }
}

/// Qwen3-32B on H200 as AIConfigurator 0.12 predicts it from its kernel database (a prompt of
/// 4,000; a batch of 64 at 4,000 to 4,500 tokens each): within 10 %.
#[test]
fn whole_steps_are_near_a_kernel_database() {
    for (tp, prefill, decode) in [(1, 393.0, 36.8), (2, 216.9, 20.1), (4, 127.0, 12.2)] {
        let model = roofline("qwen3-32b", "h200", tp, Efficiencies::default());
        for (ours, theirs) in [
            (ms(&model, StepShape::prefill(0, 4_000)), prefill),
            (ms(&model, StepShape::decode(64, 64 * 4_250)), decode),
        ] {
            assert!((ours / theirs - 1.0).abs() < 0.10, "tp {tp}: {ours:.1} against {theirs}");
        }
    }
}

/// Measured TPOT of Llama-3.1-8B under TensorRT-LLM on one H100 (AIConfigurator's silicon
/// sample), prompts, outputs and concurrency as given. For every output token of a full batch
/// the GPU spends one decode step and rows / outputs prompts. The rows are noisy, and their
/// precision is not stated: within 20 %.
#[test]
fn a_loaded_gpu_is_near_its_measured_tpot() {
    let model = roofline("llama-3.1-8b", "h100", 1, Efficiencies::default());
    for (prompt, output, rows, tpot) in
        [(1_024u32, 128u32, 8u32, 7.9), (1_024, 512, 64, 13.1), (4_096, 512, 64, 30.1)]
    {
        let context = u64::from(rows) * u64::from(prompt + output / 2);
        let decode = ms(&model, StepShape::decode(rows, context));
        let prefill = ms(&model, StepShape::prefill(0, prompt)) - model.constant * 1e3;
        let ours = decode + prefill * f64::from(rows) / f64::from(output);
        assert!((ours / tpot - 1.0).abs() < 0.20, "{prompt}/{output} at {rows}: {ours:.1} against {tpot}");
    }
}

#[test]
fn unusable_parameters_are_refused() {
    let llama = || model("llama-3.1-8b").unwrap();
    let a100 = gpu("a100-80gb").unwrap();
    let refused =
        |model, gpu: &GpuSpec, tp, share| Roofline::new(model, gpu, tp, share).unwrap_err().to_string();
    let share = Efficiencies::default();
    assert!(refused(llama(), &a100, 3, share).contains("32 attention heads, which tp = 3"));
    assert!(refused(llama(), &a100, 0, share).contains("tp = 0"));
    assert!(refused(llama().with_weights(Precision::Fp8), &a100, 1, share).contains("no units"));
    let share = Efficiencies { kv_bandwidth: f64::NAN, ..share };
    assert!(refused(llama(), &a100, 1, share).contains("kv_bandwidth is NaN"));
    let broken = GpuSpec { hbm_bandwidth: 0.0, ..a100 };
    assert!(refused(llama(), &broken, 1, Efficiencies::default()).contains("hbm_bandwidth is 0"));
}

#[test]
fn a_run_ends_where_operations_overtake_bytes() {
    let model = roofline("deepseek-v3", "h200", 16, Efficiencies::default());
    let light = Roofline { decode_flops_picos: 7, decode_bytes_picos: 5, decode_row_picos: 1_000, ..model };
    let run = light.stretch(&StepShape::decode(2, 100), 10_000);
    assert_eq!((run.steps, run.delta), (451, 10));
    let next = light.stretch(&StepShape::decode(2, 100).after(451), 10_000);
    assert_eq!((next.steps, next.delta), (10_000, 14));
}

fn any_model() -> impl Strategy<Value = ModelSpec> {
    let names: Vec<&str> = model_names().collect();
    prop::sample::select(names).prop_map(|name| model(name).unwrap())
}

fn any_gpu() -> impl Strategy<Value = GpuSpec> {
    let names: Vec<&str> = gpu_names().collect();
    prop::sample::select(names).prop_map(|name| gpu(name).unwrap())
}

proptest! {
    #[test]
    fn a_stretch_is_its_single_steps(
        model in any_model(), gpu in any_gpu(), tp in prop::sample::select(vec![1u32, 2, 4, 8]),
        rows in 1u32..600, context in 1u64..4_000_000, max_steps in 1u32..5_000, kv in 0.01f64..1.0,
        picks in prop::collection::vec(0.0f64..1.0, 6),
    ) {
        let share = Efficiencies { kv_bandwidth: kv, ..Efficiencies::default() };
        let Ok(roofline) = Roofline::new(model, &gpu, tp, share) else {
            return Ok(());
        };
        let mut shape = StepShape::decode(rows, context.max(u64::from(rows)));
        // Through several stretches, so that what follows a breakpoint is tried as well.
        for _ in 0..3 {
            let run = roofline.stretch(&shape, max_steps);
            prop_assert!(run.steps >= 1 && run.steps <= max_steps);
            let ends = [0, run.steps / 2, run.steps - 1];
            let inside = picks.iter().map(|x| (x * f64::from(run.steps)) as u32);
            for j in ends.into_iter().chain(inside).map(|j| j.min(run.steps - 1)) {
                prop_assert_eq!(run.step(j), roofline.stretch(&shape.after(u64::from(j)), 1).first);
            }
            shape = shape.after(u64::from(run.steps));
        }
    }

    #[test]
    fn more_work_never_takes_less(
        model in any_model(), gpu in any_gpu(), tp in prop::sample::select(vec![1u32, 2, 4, 8]),
        prefix in 0u32..30_000, chunk in 1u32..8_192, rows in 0u32..256, context in 1u64..2_000,
    ) {
        let Ok(roofline) = Roofline::new(model, &gpu, tp, Efficiencies::default()) else {
            return Ok(());
        };
        let mut shape = StepShape::prefill(prefix, chunk);
        shape.num_decode = rows;
        shape.decode_context = u64::from(rows) * context;
        let step = roofline.step(&shape);
        let mut longer = StepShape::prefill(prefix, chunk + 1);
        longer.num_decode = rows + 1;
        longer.decode_context = shape.decode_context + context;
        prop_assert!(roofline.step(&longer) >= step);
        prop_assert_eq!(roofline.stretch(&shape, 9).steps, 1);
        let light = Roofline::new(roofline.model, &gpu, tp, Efficiencies::SPEED_OF_LIGHT).unwrap();
        prop_assert!(light.step(&shape) <= step);
    }
}
