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
    head_counts(device);
    borders(device);
    no_rows(device);
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
    let parameters = GatherKvGroups {
        buffer: other.slice_mut(..32),
        pool: bytes.as_view(),
        blocks: blocks.as_view(),
        block_bytes: 64,
        group: 8..24,
    };
    refused(
        parameters.launch(kernels, stream),
        "gather_kv_groups: begin of the group: expected a multiple of 16, found 8",
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

/// Counts whose sums and products no number holds.
fn head_counts(device: &Device) {
    let weight = device.upload(&[bf16::ONE; 64]);
    let mut qkv = device.upload(&[bf16::ONE; 64]);
    let mut launch = |q_heads, kv_heads, head_dim| {
        let parameters = HeadNorm {
            qkv: qkv.as_view_mut(),
            q_weight: weight.slice(..head_dim),
            k_weight: weight.slice(..head_dim),
            q_heads,
            kv_heads,
            eps: 1e-5,
        };
        parameters.launch(&device.kernels, &device.stream)
    };
    let too_long = format!(
        "head_norm_bf16: elements of a row of qkv: expected at most 2147483647, found {}",
        usize::MAX
    );
    for (q_heads, kv_heads) in [(0, 1 << 63), (1 << 63, 1 << 63), (usize::MAX, 1), (1, usize::MAX)] {
        refused(launch(q_heads, kv_heads, 64), &too_long);
    }
    refused(
        launch(1 << 25, 0, 64),
        "head_norm_bf16: elements of a row of qkv: expected at most 2147483647, found 2147483648",
    );
}

/// What is read or written 16 bytes at a time begins at a border of 16.
fn borders(device: &Device) {
    let (kernels, stream) = (&device.kernels, &device.stream);
    let x = device.upload(&[bf16::ONE; 1032]);
    let bytes = device.upload(&[0_u8; 164]);
    let numbers = device.upload(&[0_i32; 8]);
    let mut out = device.upload(&[bf16::ONE; 1032]);
    let (mut wide, mut sums) = (device.upload(&[0.0_f32; 64]), device.upload(&[0.0_f32; 2]));
    let mut y = device.upload(&[bf16::ONE; 2]);

    let mut gemm = |from, weights, inputs| {
        let y = Output::Rounded(y.as_view_mut());
        let x = x.slice(from..from + inputs);
        Gemm { y, x, weights, rows: 1, outputs: 2, inputs, x_stride: inputs }.launch(kernels, stream)
    };
    refused(
        gemm(1, Weights::Plain(x.slice(..64)), 32),
        "gemm_bf16_few: bytes of x beyond a 16-byte border: expected 0, found 2",
    );
    refused(
        gemm(0, Weights::Plain(x.slice(5..69)), 32),
        "gemm_bf16_few: bytes of the weights beyond a 16-byte border: expected 0, found 10",
    );
    refused(
        gemm(0, Weights::Q8_0(bytes.slice(3..71)), 32),
        "gemm_bf16_q8_0_few: bytes of the weights beyond a 2-byte border: expected 0, found 1",
    );

    let mut embedding = |to: usize, table| {
        let out = out.slice_mut(to..to + 32);
        Embedding { out, table, ids: numbers.slice(..1), vocab: 2, dim: 32 }.launch(kernels, stream)
    };
    refused(
        embedding(7, Weights::Plain(x.slice(..64))),
        "embedding_bf16: bytes of out beyond a 16-byte border: expected 0, found 14",
    );
    refused(
        embedding(0, Weights::Plain(x.slice(4..68))),
        "embedding_bf16: bytes of the weights beyond a 16-byte border: expected 0, found 8",
    );
    refused(
        embedding(0, Weights::Q4_0(bytes.slice(1..37))),
        "embedding_bf16_q4_0: bytes of the weights beyond a 2-byte border: expected 0, found 1",
    );

    let layout = KvLayout { block_size: 1, num_layers: 1, kv_heads: 1, head_dim: 64 };
    let layer = |from: usize| Layer { pool: x.slice(from..from + layout.block_len()), layout, layer: 0 };
    let mut prefill = |out_from: usize, q_from: usize, pool_from| {
        let parameters = AttentionPrefill {
            out: out.slice_mut(out_from..out_from + 64),
            q: x.slice(q_from..q_from + 64),
            kv: layer(pool_from),
            first_rows: numbers.slice(..2),
            contexts: numbers.slice(..1),
            tables: numbers.slice(..1),
            rows: 1,
            max_rows: 1,
            q_heads: 1,
            q_stride: 64,
            scale: 0.125,
        };
        parameters.launch(kernels, stream)
    };
    for (from, what) in [([1, 0, 0], "out"), ([0, 1, 0], "q"), ([0, 0, 1], "the KV pool")] {
        let message = format!(
            "attention_prefill_bf16_hd64: bytes of {what} beyond a 16-byte border: expected 0, found 2"
        );
        refused(prefill(from[0], from[1], from[2]), &message);
    }
    let mut decode = |q_from: usize, pool_from| {
        let parameters = AttentionDecode {
            outputs: wide.slice_mut(..64),
            sums: sums.as_view_mut(),
            q: x.slice(q_from..q_from + 64),
            kv: layer(pool_from),
            rows: DecodeRows {
                lengths: numbers.slice(..1),
                sequences: None,
                tables: numbers.slice(..1),
                max_blocks: 1,
            },
            plan: DecodePlan::new(Split::Invariant, 1, 1, 1, 1),
            q_heads: 1,
            q_stride: 64,
            scale: 0.125,
        };
        parameters.launch(kernels, stream)
    };
    for (from, what) in [([1, 0], "q"), ([0, 1], "the KV pool")] {
        let message = format!(
            "attention_decode_bf16_hd64_g1: bytes of {what} beyond a 16-byte border: expected 0, found 2"
        );
        refused(decode(from[0], from[1]), &message);
    }

    let mut buffer = device.upload(&[0_u8; 48]);
    let mut gather = |to: usize, from: usize| {
        let parameters = GatherKvGroups {
            buffer: buffer.slice_mut(to..to + 16),
            pool: bytes.slice(from..from + 64),
            blocks: numbers.slice(..1),
            block_bytes: 64,
            group: 16..32,
        };
        parameters.launch(kernels, stream)
    };
    refused(
        gather(8, 0),
        "gather_kv_groups: bytes of the buffer beyond a 16-byte border: expected 0, found 8",
    );
    refused(gather(0, 8), "gather_kv_groups: bytes of the pool beyond a 16-byte border: expected 0, found 8");
    let parameters = ScatterKvGroups {
        pool: buffer.slice_mut(1..33),
        buffer: bytes.slice(..16),
        blocks: numbers.slice(..1),
        block_bytes: 32,
        group: 16..32,
    };
    refused(
        parameters.launch(kernels, stream),
        "scatter_kv_groups: bytes of the pool beyond a 16-byte border: expected 0, found 1",
    );
}

/// Nothing is launched for no rows, and nothing refused.
fn no_rows(device: &Device) {
    let (kernels, stream) = (&device.kernels, &device.stream);
    let pool = device.upload(&vec![bf16::ONE; LAYOUT.block_len()]);
    let numbers = device.upload(&[0_i32]);
    let (q, none) = (device.upload::<bf16>(&[]), device.upload::<i32>(&[]));
    let mut out = device.upload::<bf16>(&[]);
    let (mut outputs, mut sums) = (device.upload::<f32>(&[]), device.upload::<f32>(&[]));
    let layer = || Layer { pool: pool.as_view(), layout: LAYOUT, layer: 0 };
    let parameters = AttentionPrefill {
        out: out.as_view_mut(),
        q: q.as_view(),
        kv: layer(),
        first_rows: numbers.as_view(),
        contexts: none.as_view(),
        tables: none.as_view(),
        rows: 0,
        max_rows: 0,
        q_heads: 2,
        q_stride: 128,
        scale: 0.125,
    };
    parameters.launch(kernels, stream).unwrap();
    for sequences in [None, Some(none.as_view())] {
        let parameters = AttentionDecode {
            outputs: outputs.as_view_mut(),
            sums: sums.as_view_mut(),
            q: q.as_view(),
            kv: layer(),
            rows: DecodeRows { lengths: none.as_view(), sequences, tables: none.as_view(), max_blocks: 0 },
            plan: DecodePlan::new(Split::Invariant, 0, 2, 1, 0),
            q_heads: 2,
            q_stride: 128,
            scale: 0.125,
        };
        parameters.launch(kernels, stream).unwrap();
    }
}
