//! Rows of plain and quantised tables: the same to the bit.

use half::{bf16, f16};
use kvrelay_kernels::launch::{Element, Embedding, Weights};
use kvrelay_model::DType;

use crate::device::Device;
use crate::numbers::{Numbers, identical, rounded, wide};
use crate::oracle::embedding::embedding;

pub(crate) fn check(device: &Device) {
    for (vocab, dim) in [(1, 32), (7, 96), (40, 1056)] {
        plain::<bf16>(device, vocab, dim);
        plain::<f16>(device, vocab, dim);
        for format in [DType::Q4_0, DType::Q4_1, DType::Q8_0] {
            quantised::<bf16>(device, format, vocab, dim);
            quantised::<f16>(device, format, vocab, dim);
        }
    }
    let mut shapes = Numbers::of_this_run();
    for _ in 0..3 {
        let (vocab, blocks) = (shapes.between(1, 60), shapes.between(1, 40));
        plain::<f16>(device, vocab, blocks * 8);
        quantised::<bf16>(device, DType::Q8_0, vocab, blocks * 32);
    }
}

/// Every row once, some twice, and ids that the table does not have.
fn ids(numbers: &mut Numbers, vocab: usize) -> Vec<i32> {
    let outside = [-1, vocab as i32, i32::MIN, i32::MAX];
    [numbers.shuffled(vocab), vec![0, vocab as i32 - 1], outside.to_vec()].concat()
}

fn plain<T: Element>(device: &Device, vocab: usize, dim: usize) {
    let mut numbers = Numbers::new(dim as u64);
    let table: Vec<T> = numbers.elements(vocab * dim, 3.0);
    let weights = device.upload(&table);
    let ids = ids(&mut numbers, vocab);
    launch(device, &ids, vocab, dim, Weights::Plain(weights.as_view()), &wide(&table));
}

fn quantised<T: Element>(device: &Device, format: DType, vocab: usize, dim: usize) {
    let mut numbers = Numbers::new(dim as u64 + 1);
    let (bytes, table) = blocks(&mut numbers, format, vocab * dim);
    let memory = device.upload(&bytes);
    let ids = ids(&mut numbers, vocab);
    let table: Vec<f64> = table.iter().map(|&x| rounded::<T>(x)).collect();
    launch::<T>(device, &ids, vocab, dim, of_format(format, memory.as_view()), &table);
}

fn launch<T: Element>(
    device: &Device,
    ids: &[i32],
    vocab: usize,
    dim: usize,
    table: Weights<'_, T>,
    numbers: &[f64],
) {
    let on_device = device.upload(ids);
    let mut out = device.upload(&vec![T::from_f32(7.0); ids.len() * dim]);
    let parameters = Embedding { out: out.as_view_mut(), table, ids: on_device.as_view(), vocab, dim };
    parameters.launch(&device.kernels, &device.stream).unwrap();
    let what = format!("embedding of {} in {vocab} x {dim}", T::NAME);
    identical(&what, &wide(&device.download(&out)), &embedding(numbers, dim, ids));
}

/// Made-up blocks of a GGUF format, and the numbers that they hold.
pub(crate) fn blocks(numbers: &mut Numbers, format: DType, count: usize) -> (Vec<u8>, Vec<f64>) {
    let mut bytes = Vec::new();
    for _ in 0..count / 32 {
        let halves = if format == DType::Q4_1 { 2 } else { 1 };
        for _ in 0..halves {
            bytes.extend(f16::from_f32(numbers.float(0.05)).to_le_bytes());
        }
        let rest = format.block_bytes() - 2 * halves;
        bytes.extend((0..rest).map(|_| numbers.bits() as u8));
    }
    let mut out = vec![0.0; count];
    format.dequantise(&bytes, &mut out);
    (bytes, out.into_iter().map(f64::from).collect())
}

pub(crate) fn of_format<T>(format: DType, bytes: cudarc::driver::CudaView<'_, u8>) -> Weights<'_, T> {
    match format {
        DType::Q4_0 => Weights::Q4_0(bytes),
        DType::Q4_1 => Weights::Q4_1(bytes),
        DType::Q8_0 => Weights::Q8_0(bytes),
        other => panic!("no kernel multiplies by {other:?}"),
    }
}
