//! Writes GGUF version 3.

use crate::DType;

const ALIGNMENT: usize = 32;

/// A GGUF file in the making.
#[derive(Debug, Clone, Default)]
pub struct GgufWriter {
    num_entries: u64,
    entries: Vec<u8>,
    num_tensors: u64,
    infos: Vec<u8>,
    data: Vec<u8>,
}

impl GgufWriter {
    /// With no metadata and no tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// A metadata entry whose value is already encoded; `kind` is the format's number.
    pub fn raw(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.num_entries += 1;
        push_string(&mut self.entries, key);
        self.entries.extend(kind.to_le_bytes());
        self.entries.extend(value);
    }

    /// A `u32`.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.raw(key, 4, &value.to_le_bytes());
    }

    /// An `f32`.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.raw(key, 6, &value.to_le_bytes());
    }

    /// A bool.
    pub fn boolean(&mut self, key: &str, value: bool) {
        self.raw(key, 7, &[u8::from(value)]);
    }

    /// A string.
    pub fn string(&mut self, key: &str, value: &str) {
        let mut bytes = vec![];
        push_string(&mut bytes, value);
        self.raw(key, 8, &bytes);
    }

    /// An array of strings.
    pub fn strings<S: AsRef<str>>(&mut self, key: &str, values: &[S]) {
        let mut bytes = array(8, values.len());
        for value in values {
            push_string(&mut bytes, value.as_ref());
        }
        self.raw(key, 9, &bytes);
    }

    /// An array of `i32`.
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        let mut bytes = array(5, values.len());
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        self.raw(key, 9, &bytes);
    }

    /// A tensor of `shape`, outermost dimension first.
    pub fn tensor(&mut self, name: &str, shape: &[usize], dtype: DType, bytes: Vec<u8>) {
        let dims: Vec<u64> = shape.iter().rev().map(|&n| n as u64).collect();
        let kind = match dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Q4_0 => 2,
            DType::Q4_1 => 3,
            DType::Q8_0 => 8,
            DType::BF16 => 30,
        };
        let offset = self.data.len() as u64;
        self.raw_tensor(name, &dims, kind, offset);
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
    }

    /// A tensor entry of arbitrary numbers, without data.
    pub fn raw_tensor(&mut self, name: &str, dims: &[u64], kind: u32, offset: u64) {
        self.num_tensors += 1;
        push_string(&mut self.infos, name);
        self.infos.extend((dims.len() as u32).to_le_bytes());
        self.infos.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
    }

    /// The file.
    pub fn finish(&self) -> Vec<u8> {
        let mut file = crate::gguf::MAGIC.to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(self.num_tensors.to_le_bytes());
        file.extend(self.num_entries.to_le_bytes());
        file.extend(&self.entries);
        file.extend(&self.infos);
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(&self.data);
        file
    }
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn array(kind: u32, count: usize) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend((count as u64).to_le_bytes());
    bytes
}
