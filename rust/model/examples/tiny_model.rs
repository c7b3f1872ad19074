//! Writes the tiny random Llamas of the tests: `tiny_model FOLDER` makes `FOLDER/tiny.gguf`, and
//! `FOLDER/tiny_cuda.gguf`, whose heads are as large as CUDA kernels need.

use std::path::{Path, PathBuf};

use kvrelay_model::DType;
use kvrelay_model::testing::TinyLlama;

fn main() -> std::io::Result<()> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".to_owned()));
    let tiny = TinyLlama { dtype: DType::Q8_0, tied: true, ..TinyLlama::default() };
    let large_heads = TinyLlama {
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 64,
        ffn_size: 64,
        ..tiny.clone()
    };
    for (name, model) in [("tiny.gguf", tiny), ("tiny_cuda.gguf", large_heads)] {
        write(&folder.join(name), &model)?;
    }
    Ok(())
}

fn write(path: &Path, model: &TinyLlama) -> std::io::Result<()> {
    std::fs::write(path, model.gguf().finish())?;
    println!("{}", path.display());
    Ok(())
}
