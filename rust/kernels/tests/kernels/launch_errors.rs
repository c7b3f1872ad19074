//! Shapes that do not fit are refused before anything is enqueued, with the kernel, the parameter and both
//! numbers.

use half::bf16;
use kvrelay_kernels::launch::{
    Activation, AttentionDecode, AttentionDecodeCombine, AttentionPrefill, DecodePlan, DecodeRows, Embedding,
    Gated, GatherKvGroups, Gemm, HeadNorm, KvLayout, LaunchError, Layer, LayerMut, Output, RmsNorm,
    RopeAppend, RopePairs, Sample, ScatterKvGroups, Split, Weights,
};

use crate::device::Device;

const LAYOUT: KvLayout = KvLayout { block_size: 16, num_layers: 2, kv_heads: 2, head_dim: 64 };

#[track_caller]
fn refused(result: Result<(), LaunchError>, message: &str) {
    assert_eq!(result.expect_err("a refusal").to_string(), message);
}

pub(crate) fn check(device: &Device) {
    rows(device);
    products(device);
    paged(device);
    prefill(device);
    decode(device);
    chosen(device);
    assert!(device.kernels.launched().is_empty(), "nothing was looked up: {:?}", device.kernels.launched());
}

fn rows(device: &Device) {
    let (kernels, stream) = (&device.kernels, &device.stream);
    let ids = device.upload(&[0_i32, 1]);
    let table = device.upload(&[bf16::ONE; 40]);
    let mut out = device.upload(&[bf16::ONE; 30]);
    let parameters = Embedding {
        out: out.as_view_mut(),
        table: Weights::Plain(table.as_view()),
        ids: ids.as_view(),
        vocab: 5,
        dim: 8,
    };
    refused(parameters.launch(kernels, stream), "embedding_bf16: elements of out: expected 16, found 30");

    let x = device.upload(&[bf16::ONE; 32]);
    let parameters =
        RmsNorm { out: out.as_view_mut(), x: x.as_view(), residual: None, weight: x.slice(..15), eps: 1e-5 };
    refused(parameters.launch(kernels, stream), "rms_norm_bf16: elements of x: expected 30, found 32");

    let mut qkv = device.upload(&[bf16::ONE; 33]);
    let parameters = HeadNorm {
        qkv: qkv.as_view_mut(),
        q_weight: x.slice(..8),
        k_weight: x.slice(..7),
        q_heads: 2,
        kv_heads: 1,
        eps: 1e-5,
    };
    refused(parameters.launch(kernels, stream), "head_norm_bf16: elements of k_weight: expected 8, found 7");

    let parameters =
        Gated { out: out.as_view_mut(), gate_up: x.as_view(), width: 10, activation: Activation::Silu };
    refused(parameters.launch(kernels, stream), "swiglu_bf16: elements of gate_up: expected 60, found 32");
}

fn products(device: &Device) {
    let (x, bytes) = (device.upload(&[bf16::ONE; 96]), device.upload(&[0_u8; 68]));
    let mut y = device.upload(&[0.0_f32; 6]);
    let mut launch = |weights, inputs, x_stride| {
        let y = Output::Wide(y.as_view_mut());
        let parameters = Gemm { y, x: x.as_view(), weights, rows: 3, outputs: 2, inputs, x_stride };
        parameters.launch(&device.kernels, &device.stream)
    };
    let q8_0 = || Weights::Q8_0(bytes.as_view());
    refused(
        launch(q8_0(), 33, 40),
        "gemm_bf16_q8_0_few: columns of the weights: expected a positive multiple of 32, found 33",
    );
    refused(launch(q8_0(), 64, 64), "gemm_bf16_q8_0_few: bytes of the weights: expected 136, found 68");
    refused(launch(q8_0(), 32, 24), "gemm_bf16_q8_0_few: x_stride: expected at least 32, found 24");
    refused(launch(q8_0(), 32, 40), "gemm_bf16_q8_0_few: elements of x: expected at least 112, found 96");
    let plain = Weights::Plain(x.as_view());
    refused(launch(plain, 40, 40), "gemm_bf16_few: elements of the weights: expected 80, found 96");
}

fn paged(device: &Device) {
    let (kernels, stream) = (&device.kernels, &device.stream);
    let mut pool = device.upload(&vec![bf16::ONE; LAYOUT.block_len() * 2]);
    let mut qkv = device.upload(&[bf16::ONE; 5 * 64]);
    let (rotations, positions, slots) =
        (device.upload(&[0.0_f32; 128]), device.upload(&[0_i32]), device.upload(&[0_i64, 1]));
    let mut launch = |layer, q_heads| {
        let parameters = RopeAppend {
            qkv: qkv.as_view_mut(),
            kv: LayerMut { pool: pool.as_view_mut(), layout: LAYOUT, layer },
            rotations: rotations.as_view(),
            positions: positions.as_view(),
            slots: slots.as_view(),
            q_heads,
            pairs: RopePairs::Halves,
        };
        parameters.launch(kernels, stream)
    };
    refused(launch(2, 1), "rope_append_bf16: num_layers: expected at least 3, found 2");
    refused(launch(0, 2), "rope_append_bf16: elements of qkv: expected 384, found 320");
    refused(launch(0, 1), "rope_append_bf16: slots: expected 1, found 2");

    let (mut bytes, blocks) = (device.upload(&[0_u8; 128]), device.upload(&[0_i32, 1]));
    let buffer = device.upload(&[0_u8; 48]);
    let mut other = device.upload(&[0_u8; 48]);
    let parameters = GatherKvGroups {
        buffer: other.as_view_mut(),
        pool: bytes.as_view(),
        blocks: blocks.as_view(),
        block_bytes: 64,
        group: 16..48,
    };
    refused(
        parameters.launch(kernels, stream),
        "gather_kv_groups: bytes of the buffer: expected 64, found 48",
    );
    let parameters = ScatterKvGroups {
        pool: bytes.as_view_mut(),
        buffer: buffer.as_view(),
        blocks: blocks.as_view(),
        block_bytes: 64,
        group: 48..80,
    };
    refused(
        parameters.launch(kernels, stream),
        "scatter_kv_groups: end of the group: expected at most 64, found 80",
    );
}

fn prefill(device: &Device) {
    let pool = device.upload(&vec![bf16::ONE; LAYOUT.block_len()]);
    let (q, numbers) = (device.upload(&[bf16::ONE; 512]), device.upload(&[0_i32; 8]));
    let mut out = device.upload(&[bf16::ONE; 512]);
    let mut launch = |layout, q_heads, max_rows, sequences: usize| {
        let parameters = AttentionPrefill {
            out: out.as_view_mut(),
            q: q.as_view(),
            kv: Layer { pool: pool.as_view(), layout, layer: 0 },
            first_rows: numbers.slice(..3),
            contexts: numbers.slice(..sequences),
            tables: numbers.slice(..4),
            rows: 4,
            max_rows,
            q_heads,
            q_stride: q_heads * 64,
            scale: 0.125,
        };
        parameters.launch(&device.kernels, &device.stream)
    };
    let odd = KvLayout { head_dim: 72, ..LAYOUT };
    refused(
        launch(odd, 2, 4, 2),
        "attention_prefill_bf16_hd72: head_dim: expected one of [64, 80, 96, 128, 256], found 72",
    );
    refused(
        launch(LAYOUT, 3, 4, 2),
        "attention_prefill_bf16_hd64: q_heads: expected a positive multiple of 2, found 3",
    );
    refused(launch(LAYOUT, 2, 5, 2), "attention_prefill_bf16_hd64: max_rows: expected at most 4, found 5");
    refused(
        launch(LAYOUT, 2, 1, 2),
        "attention_prefill_bf16_hd64: sequences times max_rows: expected at least 4, found 2",
    );
    refused(launch(LAYOUT, 2, 4, 3), "attention_prefill_bf16_hd64: first_rows: expected 4, found 3");
    let thin = KvLayout { num_layers: 3, ..LAYOUT };
    refused(
        launch(thin, 2, 4, 2),
        "attention_prefill_bf16_hd64: elements of the KV pool: expected a positive multiple of 12288, found 8192",
    );
}

fn decode(device: &Device) {
    let pool = device.upload(&vec![bf16::ONE; LAYOUT.block_len()]);
    let (q, numbers) = (device.upload(&[bf16::ONE; 512]), device.upload(&[0_i32; 8]));
    let (mut outputs, mut sums) = (device.upload(&[0.0_f32; 1024]), device.upload(&[0.0_f32; 7]));
    let mut launch = |max_length, q_heads| {
        let plan = DecodePlan::new(Split::Invariant, 2, 2, q_heads / 2, max_length);
        let parameters = AttentionDecode {
            outputs: outputs.as_view_mut(),
            sums: sums.as_view_mut(),
            q: q.as_view(),
            kv: Layer { pool: pool.as_view(), layout: LAYOUT, layer: 0 },
            rows: DecodeRows {
                lengths: numbers.slice(..2),
                sequences: None,
                tables: numbers.slice(..4),
                max_blocks: 2,
            },
            plan,
            q_heads,
            q_stride: 256,
            scale: 0.125,
        };
        parameters.launch(&device.kernels, &device.stream)
    };
    refused(launch(33, 4), "attention_decode_bf16_hd64_g2: max_length: expected at most 32, found 33");
    refused(launch(32, 4), "attention_decode_bf16_hd64_g2: elements of sums: expected at least 16, found 7");
    refused(
        launch(32, 10),
        "attention_decode_bf16_hd64_g8: elements of outputs: expected at least 1280, found 1024",
    );

    let mut out = device.upload(&[bf16::ONE; 512]);
    let mut plan = DecodePlan::new(Split::Invariant, 2, 2, 2, 32);
    plan.max_splits = 3;
    let parameters = AttentionDecodeCombine {
        out: out.as_view_mut(),
        outputs: outputs.as_view(),
        sums: sums.as_view(),
        lengths: numbers.slice(..2),
        plan,
        q_heads: 4,
        head_dim: 64,
    };
    let message = "attention_decode_combine_bf16: max_splits: expected 1, found 3";
    refused(parameters.launch(&device.kernels, &device.stream), message);
}

fn chosen(device: &Device) {
    let (logits, positions) = (device.upload(&[0.0_f32; 20]), device.upload(&[0_u64; 2]));
    let numbers = device.upload(&[0_i32; 2]);
    let mut tokens = device.upload(&[0_i32; 2]);
    let mut launch = |vocab| {
        let parameters = Sample {
            tokens: tokens.as_view_mut(),
            logits: logits.as_view(),
            temperatures: logits.slice(..2),
            top_ks: numbers.as_view(),
            top_ps: logits.slice(..2),
            seeds: positions.as_view(),
            positions: positions.slice(..1),
            vocab,
        };
        parameters.launch(&device.kernels, &device.stream)
    };
    refused(launch(600_000), "sample: vocab: expected at most 524288, found 600000");
    refused(launch(11), "sample: logits: expected 22, found 20");
    refused(launch(10), "sample: positions: expected 2, found 1");
}
