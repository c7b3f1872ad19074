//! Weights repacked for the vector tier: panels of [`PANEL`] outputs side by side, so that a
//! vector register holds one input's weights of neighbouring outputs and no sum ever crosses
//! lanes. Each output is one chain of fused multiply-adds over the inputs in order, whatever the
//! number of rows or threads.
//!
//! A panel is a run of groups of inputs (32 for the quantised types, 1 for the others); bytes of
//! a group, with `c` the output in the panel:
//! * `F32`, `F16`, `BF16`: the elements, by `c`;
//! * `Q8_0`: the scales (f16) by `c`, then for each input the bytes by `c`;
//! * `Q4_0`, `Q4_1`: the scales, (`Q4_1`) the minima, then for each `j` below 16 one byte by `c`
//!   with input `j` in its low half and input `j + 16` in its high half.
//!
//! The stored sizes stay those of the file.

use std::ops::Range;

use kvrelay_model::{DType, Tensor};

use super::kernels::Isa;

/// Outputs in a panel.
pub(super) const PANEL: usize = 32;
/// Inputs unpacked at a time: with [`PANEL`] outputs half of a first-level cache. A multiple of
/// every block length.
pub(super) const CHUNK: usize = 256;

/// A matrix in panels; missing outputs of the last panel are zero.
pub(super) struct Panels {
    dtype: DType,
    outputs: usize,
    inputs: usize,
    panel_bytes: usize,
    data: Vec<u8>,
}

/// Bytes of a group of inputs in a panel.
const fn group_bytes(dtype: DType) -> usize {
    PANEL * dtype.block_bytes()
}

impl Panels {
    /// Repacks the logical rows of `tensor`.
    pub(super) fn pack(tensor: &Tensor) -> Self {
        let (dtype, outputs, inputs) = (tensor.dtype(), tensor.rows(), tensor.columns());
        let panel_bytes = inputs / dtype.block_len() * group_bytes(dtype);
        let mut data = vec![0; outputs.div_ceil(PANEL) * panel_bytes];
        for output in 0..outputs {
            let panel = &mut data[output / PANEL * panel_bytes..][..panel_bytes];
            let groups = panel.chunks_exact_mut(group_bytes(dtype));
            for (group, block) in groups.zip(tensor.row(output).chunks_exact(dtype.block_bytes())) {
                scatter(dtype, block, group, output % PANEL);
            }
        }
        Self { dtype, outputs, inputs, panel_bytes, data }
    }

    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    pub(super) fn inputs(&self) -> usize {
        self.inputs
    }

    /// The packed weights of `inputs` (whole groups) in a panel.
    fn packed(&self, panel: usize, inputs: Range<usize>) -> &[u8] {
        let bytes = |input: usize| input / self.dtype.block_len() * group_bytes(self.dtype);
        let panel = &self.data[panel * self.panel_bytes..][..self.panel_bytes];
        &panel[bytes(inputs.start)..bytes(inputs.end)]
    }

    /// `y[row][c] = sum over k of x[row][k] * weight[c][k]` for the outputs of `panels`.
    ///
    /// # Safety
    /// The machine has `isa`. `x` points to `rows` rows of at least [`Panels::inputs`] numbers,
    /// `x_stride` apart, that nothing writes; `y` to `rows` rows `y_stride` apart with room for
    /// whole panels, of which nothing else touches those of `panels`.
    pub(super) unsafe fn multiply(
        &self,
        isa: Isa,
        panels: Range<usize>,
        rows: usize,
        (x, x_stride): (*const f32, usize),
        (y, y_stride): (*mut f32, usize),
        unpacked: &mut [f32],
    ) {
        for panel in panels {
            for start in (0..self.inputs).step_by(CHUNK) {
                let end = self.inputs.min(start + CHUNK);
                let packed = self.packed(panel, start..end);
                let weights = &mut unpacked[..(end - start) * PANEL];
                // SAFETY: the caller's contract; `start` is below a row's length, and the panel
                // inside `y`'s rows.
                unsafe {
                    let tile = Tile {
                        x: x.add(start),
                        x_stride,
                        y: y.add(panel * PANEL),
                        y_stride,
                        rows,
                        fresh: start == 0,
                    };
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 => {
                            super::avx512::unpack(self.dtype, packed, weights);
                            super::avx512::multiply(weights, &tile);
                        }
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx2 => {
                            super::avx2::unpack(self.dtype, packed, weights);
                            super::avx2::multiply(weights, &tile);
                        }
                        Isa::Baseline => {
                            unpack(self.dtype, packed, weights);
                            multiply(weights, &tile);
                        }
                    }
                }
            }
        }
    }
}

/// Rows of inputs and outputs for one unpacked chunk of a panel.
pub(super) struct Tile {
    /// The chunk's first input in the first row.
    pub(super) x: *const f32,
    pub(super) x_stride: usize,
    /// The panel's first output in the first row.
    pub(super) y: *mut f32,
    pub(super) y_stride: usize,
    pub(super) rows: usize,
    /// Whether the sums begin here, rather than go on from what `y` holds.
    pub(super) fresh: bool,
}

/// Puts one output's block among those of its group.
fn scatter(dtype: DType, block: &[u8], group: &mut [u8], c: usize) {
    let mut put =
        |at: usize, width: usize, from: &[u8]| group[at + c * width..][..width].copy_from_slice(from);
    let (header, values) = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => return put(0, block.len(), block),
        DType::Q8_0 | DType::Q4_0 => block.split_at(2),
        DType::Q4_1 => block.split_at(4),
    };
    for (i, half) in header.chunks_exact(2).enumerate() {
        put(i * 2 * PANEL, 2, half);
    }
    for (j, value) in values.chunks_exact(1).enumerate() {
        put((header.len() + j) * PANEL, 1, value);
    }
}

/// The plain unpacking: `[input][c]`; the oracle of the vector ones.
pub(super) fn unpack(dtype: DType, packed: &[u8], out: &mut [f32]) {
    let (len, bytes) = (dtype.block_len(), dtype.block_bytes());
    let mut block = vec![0; bytes];
    let mut numbers = vec![0.0; len];
    let header = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => bytes,
        DType::Q8_0 | DType::Q4_0 => 2,
        DType::Q4_1 => 4,
    };
    for (group, out) in packed.chunks_exact(group_bytes(dtype)).zip(out.chunks_exact_mut(len * PANEL)) {
        for c in 0..PANEL {
            if header == bytes {
                block.copy_from_slice(&group[c * bytes..][..bytes]);
            } else {
                for i in 0..header / 2 {
                    block[2 * i..2 * i + 2].copy_from_slice(&group[i * 2 * PANEL + 2 * c..][..2]);
                }
                for j in header..bytes {
                    block[j] = group[j * PANEL + c];
                }
            }
            dtype.dequantise(&block, &mut numbers);
            for (k, x) in numbers.iter().enumerate() {
                out[k * PANEL + c] = *x;
            }
        }
    }
}

/// The plain product; the oracle of the vector ones.
///
/// # Safety
/// As for [`Panels::multiply`], of which `tile` is a part.
pub(super) unsafe fn multiply(weights: &[f32], tile: &Tile) {
    for row in 0..tile.rows {
        // SAFETY: the caller's contract.
        let y = unsafe { std::slice::from_raw_parts_mut(tile.y.add(row * tile.y_stride), PANEL) };
        if tile.fresh {
            y.fill(0.0);
        }
        for (k, weights) in weights.chunks_exact(PANEL).enumerate() {
            // SAFETY: the caller's contract.
            let x = unsafe { *tile.x.add(row * tile.x_stride + k) };
            for (y, w) in y.iter_mut().zip(weights) {
                *y = x.mul_add(*w, *y);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvrelay_model::testing::{GgufWriter, quantise};

    fn tensor(dtype: DType, rows: usize, columns: usize) -> Tensor {
        let numbers: Vec<f32> =
            (0..rows * columns).map(|i| ((i * 7919 % 2003) as f32 - 1000.0) / 700.0).collect();
        let mut file = GgufWriter::new();
        file.tensor("w", &[rows, columns], dtype, quantise(dtype, &numbers));
        let path =
            std::env::temp_dir().join(format!("kvrelay-panels-{}-{}.gguf", std::process::id(), dtype.name()));
        std::fs::write(&path, file.finish()).unwrap();
        let tensor = kvrelay_model::gguf::Gguf::open(&path).unwrap().tensors()["w"].clone();
        std::fs::remove_file(&path).unwrap();
        tensor
    }

    /// Every instruction set this machine has unpacks the same numbers and multiplies to the
    /// same bits as the plain code, for row counts around every tile size.
    #[test]
    fn vector_kernels_match_the_plain_ones() {
        let mut isas = vec![Isa::Baseline];
        #[cfg(target_arch = "x86_64")]
        isas.extend([Isa::Avx2, Isa::Avx512].into_iter().filter(|&isa| isa <= Isa::detect()));
        for dtype in DType::ALL {
            let (outputs, inputs) = (70, 288);
            let tensor = tensor(dtype, outputs, inputs);
            let panels = Panels::pack(&tensor);
            let width = outputs.next_multiple_of(PANEL);
            for rows in [1, 2, 5, 6, 7, 12, 13, 24, 29] {
                let x: Vec<f32> =
                    (0..rows * inputs).map(|i| ((i * 31 % 503) as f32 - 250.0) / 100.0).collect();
                let mut results = vec![];
                for &isa in &isas {
                    let mut y = vec![f32::NAN; rows * width];
                    let mut scratch = vec![0.0; CHUNK * PANEL];
                    // SAFETY: the buffers are as large as the shapes say, and `isa` is there.
                    unsafe {
                        panels.multiply(
                            isa,
                            0..width / PANEL,
                            rows,
                            (x.as_ptr(), inputs),
                            (y.as_mut_ptr(), width),
                            &mut scratch,
                        );
                    }
                    results.push(y.iter().map(|y| y.to_bits()).collect::<Vec<_>>());
                }
                assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{} {rows}", dtype.name());
                let mut weights = vec![0.0; inputs];
                for c in [0, 33, 69] {
                    tensor.dequantise_row(c, &mut weights);
                    let row = &x[(rows - 1) * inputs..];
                    let exact: f64 =
                        row.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let y = f32::from_bits(results[0][(rows - 1) * width + c]);
                    assert!((f64::from(y) - exact).abs() < 2e-3, "{} {y} {exact}", dtype.name());
                }
            }
        }
    }
}
