//! GGUF headers are never trusted: each lie is an error that names the field, and memory stays
//! in proportion to the file.

use std::path::Path;

use kvrelay_model::gguf::Gguf;
use kvrelay_model::testing::{GgufWriter, TinyLlama};
use kvrelay_model::{DType, Model};
use proptest::prelude::*;

fn open(bytes: &[u8]) -> Result<Gguf, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lie.gguf");
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(&path).map_err(|e| e.to_string())
}

fn load(bytes: &[u8]) -> Result<Model, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lie.gguf");
    std::fs::write(&path, bytes).unwrap();
    Model::load(&path).map_err(|e| e.to_string())
}

fn small() -> GgufWriter {
    let mut file = GgufWriter::new();
    file.string("general.architecture", "llama");
    file.u32("llama.block_count", 2);
    file.strings("tokenizer.ggml.tokens", &["a", "b", "c"]);
    file.i32s("tokenizer.ggml.token_type", &[1, 1, 3]);
    file.tensor("a.weight", &[2, 32], DType::Q4_1, vec![1; 40]);
    file.tensor("b.weight", &[3], DType::F32, vec![0; 12]);
    file
}

#[test]
fn a_small_file_reads_back() {
    let gguf = open(&small().finish()).unwrap();
    assert_eq!(gguf.unsigned("llama.block_count").unwrap(), Some(2));
    assert_eq!(gguf.strings("tokenizer.ggml.tokens").unwrap().unwrap(), ["a", "b", "c"]);
    assert_eq!(gguf.integers("tokenizer.ggml.token_type").unwrap().unwrap(), [1, 1, 3]);
    let tensor = &gguf.tensors()["a.weight"];
    assert_eq!((tensor.shape(), tensor.rows(), tensor.stored_bytes()), (&[2, 32][..], 2, &[1; 40][..]));
    assert!(gguf.float("llama.block_count").unwrap_err().to_string().contains("llama.block_count"));
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = small().finish();
    // The last tensor ends 20 bytes of padding before the end of the file.
    for length in 0..bytes.len() - 20 {
        let error = open(&bytes[..length]).expect_err("a truncated file");
        assert!(error.contains("lie.gguf"), "{length}: {error}");
    }
    open(&bytes[..bytes.len() - 20]).unwrap();
}

#[test]
fn counts_and_lengths_beyond_the_file_are_named() {
    let bytes = small().finish();
    let with = |at: usize, value: u64| {
        let mut bytes = bytes.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        open(&bytes).unwrap_err()
    };
    for count in [1 << 60, u64::MAX, 1 << 32, 1000] {
        let error = with(8, count);
        assert!(error.contains("tensor count") && error.contains(&count.to_string()), "{error}");
        let error = with(16, count);
        assert!(error.contains("metadata count") && error.contains(&count.to_string()), "{error}");
    }
    for length in [1 << 62, u64::MAX, 1 << 33] {
        let error = with(24, length);
        assert!(error.contains("metadata key 0") && error.contains(&length.to_string()), "{error}");
    }
}

#[test]
fn lies_about_values_are_named() {
    let array = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let long = (1_u64 << 62).to_le_bytes();
    let cases: [(u32, Vec<u8>, &str); 8] = [
        (13, vec![0; 8], "k: value type: expected a value type of 0 to 8 or 10 to 12, found 13"),
        (u32::MAX, vec![0; 8], "k: value type"),
        (7, vec![2], "k: expected a bool of 0 or 1, found 2"),
        (8, long.to_vec(), "k: expected 4611686018427387904 bytes"),
        (9, array(4, 1 << 60), "k: array length"),
        (9, array(8, 1 << 60), "k: array length"),
        (9, array(9, 1), "k: element type"),
        (8, [&2_u64.to_le_bytes()[..], &[0xff, 0xfe]].concat(), "k: expected UTF-8"),
    ];
    for (kind, value, text) in cases {
        let mut file = GgufWriter::new();
        file.raw("k", kind, &value);
        let error = open(&file.finish()).unwrap_err();
        assert!(error.contains(text), "{error} lacks {text}");
    }
    let mut file = small();
    file.u32("llama.block_count", 3);
    assert!(open(&file.finish()).unwrap_err().contains("llama.block_count: expected one entry"));
}

#[test]
fn lies_about_tensors_are_named() {
    let cases: [(&[u64], u32, u64, &str); 11] = [
        (&[1, 1, 1, 1, 1], 0, 0, "tensor w: number of dimensions: expected at most 4, found 5"),
        (&[1 << 32, 1 << 32], 0, 0, "tensor w: shape"),
        (&[u64::MAX, 1], 0, 0, "tensor w: "),
        (&[1 << 40], 0, 0, "tensor w: data: expected 4398046511104 bytes"),
        (&[33], 3, 0, "tensor w: row length: expected a multiple of 32 for Q4_1, found 33"),
        (&[0, 4], 0, 0, "tensor w: shape: expected no empty dimension"),
        (&[256], 12, 0, "tensor w: type = 12 (Q4_K) is not supported"),
        (&[4], 99, 0, "tensor w: type = 99 (unknown)"),
        (&[4], 0, 1 << 62, "tensor w: data"),
        (&[4], 0, u64::MAX - 31, "tensor w: offset"),
        (&[4], 0, 7, "tensor w: offset: expected a multiple of 32, found 7"),
    ];
    for (dims, kind, offset, text) in cases {
        let mut file = GgufWriter::new();
        file.raw_tensor("w", dims, kind, offset);
        let error = open(&file.finish()).unwrap_err();
        assert!(error.contains(text), "{error} lacks {text}");
    }
    // The number of dimensions is read before them, so a huge one reserves nothing.
    let mut file = GgufWriter::new();
    file.raw_tensor("w", &[], 0, 0);
    let mut bytes = file.finish();
    bytes[33..37].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(open(&bytes).unwrap_err().contains("number of dimensions: expected at most 4, found 4294967295"));
}

#[test]
fn alignment_and_version_are_checked() {
    for alignment in [0, 3, 1 << 31] {
        let mut file = small();
        file.u32("general.alignment", alignment);
        let error = open(&file.finish()).unwrap_err();
        assert!(error.contains("general.alignment") && error.contains(&alignment.to_string()), "{error}");
    }
    let mut bytes = small().finish();
    bytes[4] = 1;
    assert!(open(&bytes).unwrap_err().contains("version: expected 2 or 3 (little-endian), found 1"));
    bytes[0] = b'X';
    assert!(open(&bytes).unwrap_err().contains("magic: expected GGUF"));
    assert!(
        Model::load(Path::new("/nonexistent/x.gguf"))
            .unwrap_err()
            .to_string()
            .contains("/nonexistent/x.gguf")
    );
}

/// A tokenizer that would be read wrongly is refused by its name.
#[test]
fn unknown_tokenizers_are_refused_by_name() {
    let bytes = TinyLlama::default().gguf().finish();
    for (from, to, key) in
        [("smollm", "sm0llm", "tokenizer.ggml.pre"), ("gpt2", "bert", "tokenizer.ggml.model")]
    {
        let mut bytes = bytes.clone();
        let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        let error = load(&bytes).unwrap_err();
        assert!(error.contains(key) && error.contains(to), "{error}");
    }
}

/// Whole models, cut at every byte of the header's beginning and at steps through the rest.
#[test]
fn a_truncated_model_is_an_error() {
    let bytes = TinyLlama { num_layers: 1, ..TinyLlama::default() }.gguf().finish();
    load(&bytes).unwrap();
    for length in (0..2000).chain((2000..bytes.len() - 64).step_by(997)) {
        assert!(load(&bytes[..length]).is_err(), "{length}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any damage gives a model or an error, never a panic.
    #[test]
    fn damaged_bytes_never_panic(edits in prop::collection::vec((0_usize..6000, any::<u8>()), 1..6)) {
        let mut bytes = TinyLlama { num_layers: 1, ..TinyLlama::default() }.gguf().finish();
        for (at, byte) in edits {
            bytes[at] = byte;
        }
        if let Err(error) = load(&bytes) {
            prop_assert!(error.contains("lie.gguf") || error.contains("chat template") || error.contains("tokenizer"), "{}", error);
        }
    }
}
