//! Writes the tiny random Llama of the tests: `tiny_model FOLDER` makes `FOLDER/tiny.gguf`.

use kvrelay_model::DType;
use kvrelay_model::testing::TinyLlama;

fn main() -> std::io::Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| ".".to_owned());
    let tiny = TinyLlama { dtype: DType::Q8_0, tied: true, ..TinyLlama::default() };
    let path = tiny.write_gguf(std::path::Path::new(&folder))?;
    println!("{}", path.display());
    Ok(())
}
