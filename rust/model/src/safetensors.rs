//! Safetensors files: one, or the shards that `model.safetensors.index.json` lists.
//!
//! All shards are mapped and their headers checked before a tensor is handed out, so a
//! half-downloaded or over-long shard is an error that names it and both sizes, and nothing is
//! partly loaded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use crate::ModelError;
use crate::tensor::{DType, Mapping, Tensor};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Largest header taken for meant; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// All tensors of a Hugging Face folder by name.
pub fn open_folder(folder: &Path) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let index = folder.join(INDEX);
    if index.exists() {
        return open_index(folder, &index);
    }
    let single = folder.join(SINGLE);
    if !single.exists() {
        let expected = format!("{SINGLE} or {INDEX}");
        return Err(ModelError::field(folder, "weights", expected, "neither"));
    }
    open_file(&single)
}

fn open_index(folder: &Path, path: &Path) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let text = std::fs::read(path).map_err(|e| ModelError::io(path, e))?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|e| ModelError::field(path, "weight_map", "tensor names and their shards", e))?;
    let mut shards: BTreeMap<&str, BTreeMap<String, Tensor>> = BTreeMap::new();
    for (name, shard) in &index.weight_map {
        if shards.contains_key(shard.as_str()) {
            continue;
        }
        let file = PathBuf::from(shard);
        let field = format!("weight_map: {name}");
        // A shard lies in the folder itself; nothing an index says may lead out of it.
        if file.file_name() != Some(file.as_os_str()) {
            return Err(ModelError::field(path, field, "a file name", shard));
        }
        let file = folder.join(file);
        if !file.exists() {
            return Err(ModelError::field(
                path,
                field,
                format!("the shard {}", file.display()),
                "no such file",
            ));
        }
        shards.insert(shard, open_file(&file)?);
    }
    let mut tensors = BTreeMap::new();
    for (name, shard) in &index.weight_map {
        let tensor = shards.get_mut(shard.as_str()).and_then(|s| s.remove(name)).ok_or_else(|| {
            ModelError::field(
                &folder.join(shard),
                format!("tensor {name}"),
                "an entry (the index says so)",
                "none",
            )
        })?;
        tensors.insert(name.clone(), tensor);
    }
    match shards.iter().find_map(|(shard, rest)| rest.keys().next().map(|name| (shard, name))) {
        Some((shard, name)) => Err(ModelError::field(
            path,
            format!("weight_map: {name}"),
            format!("an entry (it lies in {shard})"),
            "none",
        )),
        None => Ok(tensors),
    }
}

/// All tensors of one file by name.
pub fn open_file(path: &Path) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let source = Mapping::open(path)?;
    let bytes = source.bytes();
    let size = bytes.len();
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(ModelError::field(path, "header length", "8 bytes", format!("a file of {size} bytes")));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(ModelError::field(path, "header length", format!("at most {MAX_HEADER}"), length));
    }
    let length = length as usize;
    let Some(header) = rest.get(..length) else {
        let expected = format!("a file of at least {} bytes", length + 8);
        return Err(ModelError::field(path, "header", expected, format!("{size} bytes")));
    };
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(header).map_err(|e| ModelError::field(path, "header", "JSON", e))?;
    let mut entries = vec![];
    for (name, value) in header {
        if name == "__metadata__" {
            continue;
        }
        let entry: Entry = serde_json::from_value(value).map_err(|e| {
            ModelError::field(path, format!("tensor {name}"), "dtype, shape and data_offsets", e)
        })?;
        entries.push((name, entry));
    }
    place(path, &source, entries, length + 8)
}

/// Checks that the tensors tile the data section exactly, and makes views of them.
fn place(
    path: &Path,
    source: &Arc<Mapping>,
    mut entries: Vec<(String, Entry)>,
    data: usize,
) -> Result<BTreeMap<String, Tensor>, ModelError> {
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    let end = entries.iter().map(|(_, e)| e.data_offsets.1).max().unwrap_or(0);
    let size = source.bytes().len();
    if data.checked_add(end) != Some(size) {
        let expected = format!("{} bytes (by its header)", data as u128 + end as u128);
        return Err(ModelError::field(path, "file size", expected, format!("{size} bytes")));
    }
    let mut tensors = BTreeMap::new();
    let mut next = 0;
    for (name, entry) in entries {
        let field = |what: &str| format!("tensor {name}: {what}");
        let dtype = match entry.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            other => {
                return Err(ModelError::unsupported(path, field("dtype"), other, "F32, F16, BF16"));
            }
        };
        let (start, stop) = entry.data_offsets;
        if start != next {
            return Err(ModelError::field(path, field("data_offsets"), format!("a start of {next}"), start));
        }
        let bytes = crate::tensor::byte_len(path, &name, dtype, &entry.shape)?;
        if stop.checked_sub(start) != Some(bytes) {
            let found = format!("{start}..{stop}");
            let expected = format!("{bytes} bytes for {:?} of {}", entry.shape, dtype.name());
            return Err(ModelError::field(path, field("data_offsets"), expected, found));
        }
        next = stop;
        let tensor = Tensor::new(&name, dtype, entry.shape, source.clone(), data + start)?;
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}
