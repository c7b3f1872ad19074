//! GGUF files, versions 2 and 3, little-endian, read from a mapping.
//!
//! The header is never trusted: every count, length, product and offset is compared with what
//! the file holds before it is used, so a damaged or hostile file gives an error that names the
//! field, and memory stays in proportion to the bytes that are really there.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::ModelError;
use crate::tensor::{DType, Mapping, Tensor};

/// The first four bytes of a GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment taken for meant: a large page.
const MAX_ALIGNMENT: u64 = 1 << 21;
const MAX_DIMS: u32 = 4;

/// A parsed GGUF file.
#[derive(Debug)]
pub struct Gguf {
    source: Arc<Mapping>,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

/// A metadata value. Arrays stay in the file and are decoded when they are asked for.
#[derive(Debug, Clone, PartialEq)]
enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Array { kind: Scalar, count: usize, range: Range<usize> },
}

/// Types of metadata values other than arrays, by their numbers in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scalar {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    U64,
    I64,
    F64,
}

impl Scalar {
    fn from_number(number: u32) -> Option<Self> {
        use Scalar::{Bool, F32, F64, I8, I16, I32, I64, String, U8, U16, U32, U64};
        let all = [U8, I8, U16, I16, U32, I32, F32, Bool, String];
        match number {
            0..=8 => Some(all[number as usize]),
            10 => Some(U64),
            11 => Some(I64),
            12 => Some(F64),
            _ => None,
        }
    }

    /// Bytes of a value; for a string those of its length.
    fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
        }
    }
}

/// Reads forward through the header and never past its end.
struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64, field: &str) -> Result<&'a [u8], ModelError> {
        let left = self.bytes.len() - self.at;
        let Some(count) = usize::try_from(count).ok().filter(|&n| n <= left) else {
            let expected = format!("{count} bytes at offset {}", self.at);
            return Err(ModelError::field(
                self.path,
                field,
                expected,
                format!("{left} bytes to the end of the file"),
            ));
        };
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self, field: &str) -> Result<[u8; N], ModelError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, field)?);
        Ok(out)
    }

    fn u32(&mut self, field: &str) -> Result<u32, ModelError> {
        self.number(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &str) -> Result<u64, ModelError> {
        self.number(field).map(u64::from_le_bytes)
    }

    fn string(&mut self, field: &str) -> Result<&'a str, ModelError> {
        let length = self.u64(&format!("{field}: length"))?;
        let bytes = self.take(length, field)?;
        std::str::from_utf8(bytes).map_err(|e| {
            ModelError::field(self.path, field, "UTF-8", format!("an invalid byte at {}", e.valid_up_to()))
        })
    }

    /// A count of things of at least `size` bytes each, as many as can follow.
    fn count(&mut self, field: &str, size: u64) -> Result<u64, ModelError> {
        let count = self.u64(field)?;
        let room = (self.bytes.len() - self.at) as u64 / size;
        if count > room {
            let expected = format!("at most {room} (in a file of {} bytes)", self.bytes.len());
            return Err(ModelError::field(self.path, field, expected, count));
        }
        Ok(count)
    }

    fn scalar_kind(&mut self, field: &str) -> Result<Scalar, ModelError> {
        let number = self.u32(field)?;
        Scalar::from_number(number)
            .ok_or_else(|| ModelError::field(self.path, field, "a value type of 0 to 8 or 10 to 12", number))
    }

    fn scalar(&mut self, kind: Scalar, field: &str) -> Result<Value, ModelError> {
        Ok(match kind {
            Scalar::U8 => Value::Unsigned(self.number::<1>(field)?[0].into()),
            Scalar::I8 => Value::Signed(i8::from_le_bytes(self.number(field)?).into()),
            Scalar::U16 => Value::Unsigned(u16::from_le_bytes(self.number(field)?).into()),
            Scalar::I16 => Value::Signed(i16::from_le_bytes(self.number(field)?).into()),
            Scalar::U32 => Value::Unsigned(self.u32(field)?.into()),
            Scalar::I32 => Value::Signed(i32::from_le_bytes(self.number(field)?).into()),
            Scalar::F32 => Value::Float(f32::from_le_bytes(self.number(field)?).into()),
            Scalar::U64 => Value::Unsigned(self.u64(field)?),
            Scalar::I64 => Value::Signed(i64::from_le_bytes(self.number(field)?)),
            Scalar::F64 => Value::Float(f64::from_le_bytes(self.number(field)?)),
            Scalar::Bool => match self.number::<1>(field)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => {
                    return Err(ModelError::field(self.path, field, "a bool of 0 or 1", other));
                }
            },
            Scalar::String => Value::String(self.string(field)?.to_owned()),
        })
    }

    fn array(&mut self, key: &str) -> Result<Value, ModelError> {
        let kind = self.scalar_kind(&format!("{key}: element type"))?;
        let field = format!("{key}: array length");
        let count = self.count(&field, kind.size() as u64)? as usize;
        let start = self.at;
        if kind == Scalar::String {
            for _ in 0..count {
                self.string(key)?;
            }
        } else {
            self.take((count * kind.size()) as u64, key)?;
        }
        Ok(Value::Array { kind, count, range: start..self.at })
    }

    fn entry(&mut self, index: u64) -> Result<(String, Value), ModelError> {
        let key = self.string(&format!("metadata key {index}"))?.to_owned();
        let field = format!("{key}: value type");
        let number = self.u32(&field)?;
        let value = if number == 9 {
            self.array(&key)?
        } else {
            self.at -= 4;
            let kind = self.scalar_kind(&field)?;
            self.scalar(kind, &key)?
        };
        Ok((key, value))
    }

    fn tensor(&mut self, index: u64) -> Result<TensorInfo, ModelError> {
        let name = self.string(&format!("tensor {index}: name"))?.to_owned();
        let field = |what: &str| format!("tensor {name}: {what}");
        let num_dims = self.u32(&field("number of dimensions"))?;
        if num_dims > MAX_DIMS {
            let expected = format!("at most {MAX_DIMS}");
            return Err(ModelError::field(self.path, field("number of dimensions"), expected, num_dims));
        }
        let mut shape = vec![];
        for dim in 0..num_dims {
            let dim_field = field(&format!("dimension {dim}"));
            let size = self.u64(&dim_field)?;
            let size = usize::try_from(size)
                .map_err(|_| ModelError::field(self.path, dim_field, "a size that fits in memory", size))?;
            shape.insert(0, size);
        }
        let kind = self.u32(&field("type"))?;
        let dtype = dtype_from_number(kind).ok_or_else(|| {
            let supported = DType::ALL.map(DType::name).join(", ");
            ModelError::unsupported(self.path, field("type"), type_name(kind), supported)
        })?;
        let offset = self.u64(&field("offset"))?;
        Ok(TensorInfo { name, shape, dtype, offset })
    }
}

struct TensorInfo {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    offset: u64,
}

fn dtype_from_number(number: u32) -> Option<DType> {
    Some(match number {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        8 => DType::Q8_0,
        30 => DType::BF16,
        _ => return None,
    })
}

/// What ggml calls the tensor types kvrelay does not read.
fn type_name(number: u32) -> String {
    let name = match number {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        _ => return format!("{number} (unknown)"),
    };
    format!("{number} ({name})")
}

impl Gguf {
    /// Whether the file begins as a GGUF file does.
    pub fn is_gguf(path: &Path) -> bool {
        use std::io::Read;
        let mut magic = [0; 4];
        std::fs::File::open(path).and_then(|mut f| f.read_exact(&mut magic)).is_ok() && magic == MAGIC
    }

    /// Maps and checks the whole header of the file at `path`.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let source = Mapping::open(path)?;
        let mut cursor = Cursor { path, bytes: source.bytes(), at: 0 };
        let magic: [u8; 4] = cursor.number("magic")?;
        if magic != MAGIC {
            return Err(ModelError::field(path, "magic", "GGUF", format!("bytes {magic:02x?}")));
        }
        let version = cursor.u32("version")?;
        if !matches!(version, 2 | 3) {
            return Err(ModelError::field(path, "version", "2 or 3 (little-endian)", version));
        }
        // The smallest tensor entry is a name length, a count, a type and an offset; the smallest
        // metadata entry a key length, a type and one byte.
        let num_tensors = cursor.count("tensor count", 24)?;
        let num_entries = cursor.count("metadata count", 13)?;
        let mut metadata = BTreeMap::new();
        for index in 0..num_entries {
            let (key, value) = cursor.entry(index)?;
            if metadata.contains_key(&key) {
                return Err(ModelError::field(path, key, "one entry", "two"));
            }
            metadata.insert(key, value);
        }
        let infos = (0..num_tensors).map(|i| cursor.tensor(i)).collect::<Result<Vec<_>, _>>()?;
        let header_end = cursor.at;
        let mut gguf = Self { source: source.clone(), metadata, tensors: BTreeMap::new() };
        gguf.place(infos, header_end)?;
        Ok(gguf)
    }

    /// Lays the tensors over the data section, which starts at the next multiple of the alignment.
    fn place(&mut self, infos: Vec<TensorInfo>, header_end: usize) -> Result<(), ModelError> {
        const KEY: &str = "general.alignment";
        let path = self.source.path().to_owned();
        let alignment = self.unsigned(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            let expected = format!("a power of two of at most {MAX_ALIGNMENT}");
            return Err(ModelError::field(&path, KEY, expected, alignment));
        }
        let data = (header_end as u64).next_multiple_of(alignment);
        for TensorInfo { name, shape, dtype, offset } in infos {
            let field = format!("tensor {name}: offset");
            if !offset.is_multiple_of(alignment) {
                return Err(ModelError::field(&path, field, format!("a multiple of {alignment}"), offset));
            }
            let start = data.checked_add(offset).and_then(|s| usize::try_from(s).ok());
            let size = self.source.bytes().len();
            let start = start.ok_or_else(|| {
                ModelError::field(&path, &*field, format!("inside a file of {size} bytes"), offset)
            })?;
            let tensor = Tensor::new(&name, dtype, shape, self.source.clone(), start)?;
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(ModelError::field(&path, format!("tensor {name}"), "one entry", "two"));
            }
        }
        Ok(())
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.source.path().to_owned()
    }

    /// Tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// All metadata keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.metadata.keys().map(String::as_str)
    }

    fn wrong_type<T>(&self, key: &str, expected: &str, found: &Value) -> Result<Option<T>, ModelError> {
        let found = match found {
            Value::Array { kind, count, .. } => format!("an array of {count} {kind:?}"),
            other => format!("{other:?}"),
        };
        Err(ModelError::field(self.source.path(), key, expected, found))
    }

    /// A whole number that is not negative, of any width.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(*n)),
            Some(Value::Signed(n)) if *n >= 0 => Ok(Some(n.unsigned_abs())),
            Some(other) => self.wrong_type(key, "a whole number of at least 0", other),
        }
    }

    /// A number.
    pub fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) => Ok(Some(*x)),
            Some(other) => self.wrong_type(key, "a floating point number", other),
        }
    }

    /// A truth value.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => self.wrong_type(key, "a bool", other),
        }
    }

    /// A text.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => self.wrong_type(key, "a string", other),
        }
    }

    /// An array of texts.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Array { kind: Scalar::String, count, range }) => {
                let mut cursor = self.cursor(range);
                (0..*count).map(|_| cursor.string(key)).collect::<Result<_, _>>().map(Some)
            }
            Some(other) => self.wrong_type(key, "an array of strings", other),
        }
    }

    /// An array of whole numbers.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(value @ Value::Array { kind, count, range }) => {
                let mut cursor = self.cursor(range);
                let mut out = Vec::with_capacity(*count);
                for _ in 0..*count {
                    match cursor.scalar(*kind, key)? {
                        Value::Signed(n) => out.push(n),
                        Value::Unsigned(n) if i64::try_from(n).is_ok() => out.push(n as i64),
                        _ => return self.wrong_type(key, "an array of whole numbers", value),
                    }
                }
                Ok(Some(out))
            }
            Some(other) => self.wrong_type(key, "an array of whole numbers", other),
        }
    }

    /// Reads an array again that `open` has already walked.
    fn cursor(&self, range: &Range<usize>) -> Cursor<'_> {
        Cursor { path: self.source.path(), bytes: &self.source.bytes()[..range.end], at: range.start }
    }

    /// Like [`Gguf::unsigned`] for a key that must be there.
    pub fn require_unsigned(&self, key: &str) -> Result<usize, ModelError> {
        match self.unsigned(key)? {
            Some(n) => usize::try_from(n)
                .map_err(|_| ModelError::field(self.source.path(), key, "a size that fits in memory", n)),
            None => Err(self.missing(key)),
        }
    }

    pub(crate) fn missing(&self, key: &str) -> ModelError {
        ModelError::field(self.source.path(), key, "an entry", "none")
    }
}
