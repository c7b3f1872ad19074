//! Tensors as views of a mapped file, and the block formats they are stored in.
//!
//! Block layouts are those of ggml: `Q8_0` is an f16 scale `d` and 32 signed bytes (`d * q`);
//! `Q4_0` an f16 scale and 32 nibbles (`d * (q - 8)`); `Q4_1` an f16 scale, an f16 minimum `m`
//! and 32 nibbles (`d * q + m`). Byte `j` of the nibbles holds element `j` in its low half and
//! element `j + 16` in its high half.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::Mmap;

use crate::ModelError;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an `F32`.
    BF16,
    /// 32 signed bytes and a scale.
    Q8_0,
    /// 32 nibbles around 8 and a scale.
    Q4_0,
    /// 32 nibbles, a scale and a minimum.
    Q4_1,
}

impl DType {
    /// All formats, in no particular order of merit.
    pub const ALL: [Self; 6] = [Self::F32, Self::F16, Self::BF16, Self::Q8_0, Self::Q4_0, Self::Q4_1];

    /// Elements in one block; a row is a whole number of blocks.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => 32,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
        }
    }

    /// Bytes of a row of `len` elements, or `None` when that is no whole number of blocks or
    /// more than an address can hold.
    pub const fn row_bytes(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }

    /// The name users know it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
        }
    }

    /// Writes the elements of `bytes` (whole blocks) to `out`, one by one: the plain oracle of
    /// every faster unpacking.
    ///
    /// # Panics
    /// If `bytes` is not exactly the storage of `out.len()` elements.
    #[inline]
    pub fn dequantise(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(Some(bytes.len()), self.row_bytes(out.len()), "bytes of a {} row", self.name());
        let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
        match self {
            Self::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Self::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = f16::from_le_bytes(*b).to_f32();
                }
            }
            Self::BF16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = bf16::from_le_bytes(*b).to_f32();
                }
            }
            Self::Q8_0 => {
                for (o, b) in out.as_chunks_mut::<32>().0.iter_mut().zip(bytes.as_chunks::<34>().0) {
                    let d = half(&b[..2]);
                    for (o, &q) in o.iter_mut().zip(&b[2..]) {
                        *o = d * f32::from(q.cast_signed());
                    }
                }
            }
            Self::Q4_0 => {
                for (o, b) in out.as_chunks_mut::<32>().0.iter_mut().zip(bytes.as_chunks::<18>().0) {
                    let d = half(&b[..2]);
                    for (j, &q) in b[2..].iter().enumerate() {
                        o[j] = d * (f32::from(q & 15) - 8.0);
                        o[j + 16] = d * (f32::from(q >> 4) - 8.0);
                    }
                }
            }
            Self::Q4_1 => {
                for (o, b) in out.as_chunks_mut::<32>().0.iter_mut().zip(bytes.as_chunks::<20>().0) {
                    let (d, m) = (half(&b[..2]), half(&b[2..4]));
                    for (j, &q) in b[4..].iter().enumerate() {
                        o[j] = d * f32::from(q & 15) + m;
                        o[j + 16] = d * f32::from(q >> 4) + m;
                    }
                }
            }
        }
    }
}

/// A mapped file that tensors keep alive.
#[derive(Debug)]
pub struct Mapping {
    path: PathBuf,
    map: Mmap,
}

impl Mapping {
    /// Maps the file at `path` for reading.
    pub fn open(path: &Path) -> Result<Arc<Self>, ModelError> {
        let file = File::open(path).map_err(|e| ModelError::io(path, e))?;
        let kind = file.metadata().map_err(|e| ModelError::io(path, e))?;
        if !kind.is_file() {
            return Err(ModelError::field(path, "file type", "a regular file", "something else"));
        }
        // SAFETY: the mapping is private and read-only. Truncating a model file while it is
        // loaded ends the process with SIGBUS, as it does for every program that maps one.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e))?;
        Ok(Arc::new(Self { path: path.to_owned(), map }))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// A view of a tensor in a mapped file: one or two dimensions that matter, rows contiguous.
///
/// The shape is outermost first (`[rows, columns]`), as Hugging Face writes it and the reverse
/// of GGUF. Rows may be stored in another order than they are counted in, see
/// [`Tensor::with_paired_rows`]; [`Tensor::row`] always gives the row by its logical number.
#[derive(Debug, Clone)]
pub struct Tensor {
    name: Arc<str>,
    dtype: DType,
    shape: Vec<usize>,
    source: Arc<Mapping>,
    start: usize,
    row_bytes: usize,
    paired_head: Option<usize>,
}

impl Tensor {
    /// A view of `source` from byte `start`; every number is checked against the file.
    pub fn new(
        name: &str,
        dtype: DType,
        shape: Vec<usize>,
        source: Arc<Mapping>,
        start: usize,
    ) -> Result<Self, ModelError> {
        let path = source.path();
        let len = byte_len(path, name, dtype, &shape)?;
        let size = source.bytes().len();
        if start.checked_add(len).is_none_or(|end| end > size) {
            return Err(ModelError::field(
                path,
                format!("tensor {name}: data"),
                format!("{len} bytes from offset {start}"),
                format!("a file of {size} bytes"),
            ));
        }
        let columns = shape.last().copied().unwrap_or(1);
        let row_bytes = dtype.row_bytes(columns).unwrap_or(len);
        Ok(Self { name: name.into(), dtype, shape, source, start, row_bytes, paired_head: None })
    }

    /// The same tensor with rows counted in half-split order within each head of `head_dim`
    /// rows, where the file stores rotary pairs next to each other: logical row `i` of the lower
    /// half is stored at `2i`, its partner `i + head_dim / 2` at `2i + 1`. (llama.cpp's converter
    /// permutes the query and key rows of the Llama family this way.)
    pub fn with_paired_rows(mut self, head_dim: usize) -> Self {
        self.paired_head = Some(head_dim);
        self
    }

    /// Its name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How its elements are stored.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements in a row.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows of [`Tensor::columns`] elements.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Bytes in the file.
    pub fn num_bytes(&self) -> usize {
        self.rows() * self.row_bytes
    }

    /// The file it lies in.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// All its bytes in stored order.
    pub fn stored_bytes(&self) -> &[u8] {
        &self.source.bytes()[self.start..self.start + self.num_bytes()]
    }

    /// Row number of the file that holds logical row `index`.
    pub fn stored_row(&self, index: usize) -> usize {
        match self.paired_head {
            None => index,
            Some(dim) => {
                let (head, i) = (index / dim, index % dim);
                let half = dim / 2;
                head * dim + if i < half { 2 * i } else { 2 * (i - half) + 1 }
            }
        }
    }

    /// The bytes of logical row `index`.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row(&self, index: usize) -> &[u8] {
        assert!(index < self.rows(), "row {index} of {} in {}", self.rows(), self.name);
        let start = self.start + self.stored_row(index) * self.row_bytes;
        &self.source.bytes()[start..start + self.row_bytes]
    }

    /// Logical row `index` as numbers.
    ///
    /// # Panics
    /// If there is no such row or `out` is not [`Tensor::columns`] long.
    pub fn dequantise_row(&self, index: usize, out: &mut [f32]) {
        self.dtype.dequantise(self.row(index), out);
    }

    /// All rows as numbers, in logical order.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows() * self.columns()];
        for (index, row) in out.chunks_exact_mut(self.columns()).enumerate() {
            self.dequantise_row(index, row);
        }
        out
    }
}

/// Bytes of a tensor of this type and shape; no product is trusted.
pub(crate) fn byte_len(path: &Path, name: &str, dtype: DType, shape: &[usize]) -> Result<usize, ModelError> {
    let field = |what: &str| format!("tensor {name}: {what}");
    let (&columns, outer) = shape.split_last().unwrap_or((&1, &[]));
    if shape.contains(&0) {
        return Err(ModelError::field(path, field("shape"), "no empty dimension", format!("{shape:?}")));
    }
    let row = dtype.row_bytes(columns).ok_or_else(|| {
        ModelError::field(
            path,
            field("row length"),
            format!("a multiple of {} for {}", dtype.block_len(), dtype.name()),
            columns,
        )
    })?;
    outer.iter().try_fold(row, |bytes, &n| bytes.checked_mul(n)).ok_or_else(|| {
        ModelError::field(path, field("shape"), "a size below 2^64 bytes", format!("{shape:?}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dequantises_known_blocks() {
        let one = f16::from_f32(0.5).to_le_bytes();
        let min = f16::from_f32(-2.0).to_le_bytes();
        let nibbles = [0x1f_u8; 16];
        let mut out = [0.0; 32];

        let q4_1: Vec<u8> = one.iter().chain(&min).chain(&nibbles).copied().collect();
        DType::Q4_1.dequantise(&q4_1, &mut out);
        assert_eq!((out[0], out[15], out[16], out[31]), (5.5, 5.5, -1.5, -1.5));

        let q4_0: Vec<u8> = one.iter().chain(&nibbles).copied().collect();
        DType::Q4_0.dequantise(&q4_0, &mut out);
        assert_eq!((out[0], out[16]), (3.5, -3.5));

        let mut q8_0: Vec<u8> = one.to_vec();
        q8_0.extend((0..32_i8).map(|q| (q - 16).cast_unsigned()));
        DType::Q8_0.dequantise(&q8_0, &mut out);
        assert_eq!((out[0], out[16], out[31]), (-8.0, 0.0, 7.5));

        let mut two = [0.0; 2];
        DType::BF16.dequantise(&[0x80, 0x3f, 0x00, 0xc0], &mut two);
        assert_eq!(two, [1.0, -2.0]);
        DType::F16.dequantise(&[0x00, 0x3c, 0x00, 0xc0], &mut two);
        assert_eq!(two, [1.0, -2.0]);
    }

    #[test]
    fn sizes_never_wrap() {
        let path = Path::new("x.gguf");
        for shape in [vec![usize::MAX, 32], vec![1 << 40, 1 << 40], vec![usize::MAX]] {
            let error = byte_len(path, "w", DType::F32, &shape).unwrap_err().to_string();
            assert!(error.contains("x.gguf: tensor w"), "{error}");
        }
        assert!(byte_len(path, "w", DType::Q4_1, &[2, 33]).unwrap_err().to_string().contains("found 33"));
        assert_eq!(byte_len(path, "w", DType::Q4_1, &[2, 64]).unwrap(), 80);
    }
}
