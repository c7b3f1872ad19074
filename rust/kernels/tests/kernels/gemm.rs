//! Products with weights of every format: sums in f32, of which an error is some 1e-6 of the sum of the
//! products' sizes, then one rounding where the output is rounded. And the law: a row is the same to the bit
//! however many rows there are, whichever shape of block is used, and wherever in it the row lies.

use cudarc::driver::CudaSlice;
use half::{bf16, f16};
use kvrelay_kernels::launch::{Element, Gemm, Output, Weights};
use kvrelay_model::DType;

use crate::device::Device;
use crate::embedding::{blocks, of_format};
use crate::numbers::{Numbers, Within, compare, identical, rounded, spacing, wide};
use crate::oracle::gemm::gemm;

pub(crate) fn check(device: &Device) {
    for format in [None, Some(DType::Q4_0), Some(DType::Q4_1), Some(DType::Q8_0)] {
        of_type::<bf16>(device, format);
        of_type::<f16>(device, format);
    }
    random(device);
    // Plain rows need not be whole blocks of 32.
    let mut numbers = Numbers::new(5);
    for (rows, outputs, inputs) in [(1, 1, 8), (3, 65, 72), (17, 64, 200), (70, 129, 136)] {
        compare_with_oracle(device, &Matrix::<bf16>::new(device, &mut numbers, None, outputs, inputs), rows);
        compare_with_oracle(device, &Matrix::<f16>::new(device, &mut numbers, None, outputs, inputs), rows);
    }
}

fn random(device: &Device) {
    let mut shapes = Numbers::of_this_run();
    for format in [None, Some(DType::Q4_0), Some(DType::Q4_1), Some(DType::Q8_0)] {
        let (rows, outputs, inputs) =
            (shapes.between(1, 100), shapes.between(1, 150), 32 * shapes.between(1, 9));
        compare_with_oracle(device, &Matrix::<bf16>::new(device, &mut shapes, format, outputs, inputs), rows);
    }
}

fn of_type<T: Element>(device: &Device, format: Option<DType>) {
    let mut numbers = Numbers::new(4);
    for (rows, outputs, inputs) in
        [(1, 1, 32), (2, 100, 96), (16, 64, 64), (64, 33, 320), (65, 7, 160), (130, 130, 32)]
    {
        compare_with_oracle(device, &Matrix::<T>::new(device, &mut numbers, format, outputs, inputs), rows);
    }
    company_changes_nothing(device, &Matrix::<T>::new(device, &mut numbers, format, 70, 288));
}

/// `[outputs][inputs]` weights.
struct Matrix<T> {
    format: Option<DType>,
    plain: CudaSlice<T>,
    bytes: CudaSlice<u8>,
    outputs: usize,
    inputs: usize,
    /// As the kernel multiplies by them: in the activations' type.
    numbers: Vec<f64>,
}

impl<T: Element> Matrix<T> {
    fn new(
        device: &Device,
        numbers: &mut Numbers,
        format: Option<DType>,
        outputs: usize,
        inputs: usize,
    ) -> Self {
        let count = outputs * inputs;
        let (plain, bytes, unpacked) = match format {
            None => {
                let plain: Vec<T> = numbers.elements(count, 1.0);
                (device.upload(&plain), device.upload(&[]), wide(&plain))
            }
            Some(format) => {
                let (bytes, unpacked) = blocks(numbers, format, count);
                (
                    device.upload(&[]),
                    device.upload(&bytes),
                    unpacked.iter().map(|&x| rounded::<T>(x)).collect(),
                )
            }
        };
        Self { format, plain, bytes, outputs, inputs, numbers: unpacked }
    }

    fn weights(&self) -> Weights<'_, T> {
        match self.format {
            None => Weights::Plain(self.plain.as_view()),
            Some(format) => of_format(format, self.bytes.as_view()),
        }
    }

    /// A row of x is longer than the inputs: what follows them must not be read as any.
    fn x_stride(&self) -> usize {
        self.inputs + 8
    }

    fn launch(&self, device: &Device, x: &[T], rows: usize, y: Output<'_, T>, many: bool) {
        let x = device.upload(x);
        let parameters = Gemm {
            y,
            x: x.as_view(),
            weights: self.weights(),
            rows,
            outputs: self.outputs,
            inputs: self.inputs,
            x_stride: self.x_stride(),
        };
        let launch = if many { Gemm::launch_many } else { Gemm::launch };
        launch(parameters, &device.kernels, &device.stream).unwrap();
    }

    fn sums(&self, device: &Device, x: &[T], rows: usize, many: bool) -> Vec<f32> {
        let mut y = device.unwritten::<f32>(rows * self.outputs);
        self.launch(device, x, rows, Output::Wide(y.as_view_mut()), many);
        device.download(&y)
    }
}

fn compare_with_oracle<T: Element>(device: &Device, matrix: &Matrix<T>, rows: usize) {
    let Matrix { outputs, inputs, .. } = *matrix;
    let mut x: Vec<T> = Numbers::new(rows as u64).elements(rows * matrix.x_stride(), 1.0);
    for row in x.chunks_mut(matrix.x_stride()) {
        row[inputs..].fill(T::from_f32(f32::NAN));
    }
    let inner: Vec<f64> = x.chunks(matrix.x_stride()).flat_map(|row| wide(&row[..inputs])).collect();
    let expected = gemm(&inner, &matrix.numbers, inputs);

    let what = format!("gemm_{} {:?}, {rows} x {outputs} x {inputs}", T::NAME, matrix.format);
    let sums = matrix.sums(device, &x, rows, false);
    let mut y = device.upload(&vec![T::from_f32(7.0); rows * outputs]);
    matrix.launch(device, &x, rows, Output::Rounded(y.as_view_mut()), false);
    let y = wide(&device.download(&y));
    for ((sum, y), product) in sums.iter().zip(&y).zip(expected) {
        let absolute = 4e-6 * product.size;
        compare(&what, &[f64::from(*sum)], &[product.sum], Within { relative: 0.0, absolute });
        compare(
            &what,
            &[*y],
            &[product.sum],
            Within { relative: spacing::<T>() / 2.0, absolute: absolute + 1e-7 },
        );
    }
}

fn company_changes_nothing<T: Element>(device: &Device, matrix: &Matrix<T>) {
    let stride = matrix.x_stride();
    let x: Vec<T> = Numbers::new(8).elements(100 * stride, 1.0);
    let bits = |sums: Vec<f32>| sums.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let all = bits(matrix.sums(device, &x, 100, false));
    let what = |rows| format!("{rows} rows of gemm_{} {:?}", T::NAME, matrix.format);
    for (first, rows) in [(0, 1), (57, 1), (40, 23), (99, 1)] {
        let x = &x[first * stride..(first + rows) * stride];
        let expected = &all[first * matrix.outputs..(first + rows) * matrix.outputs];
        identical(&what(rows), &bits(matrix.sums(device, x, rows, false)), expected);
        identical(&what(rows), &bits(matrix.sums(device, x, rows, true)), expected);
    }
}
