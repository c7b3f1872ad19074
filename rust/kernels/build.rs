//! Embeds the compiled kernels: the fatbin that `KVRELAY_CUDA_FATBIN` names, made by
//! `build_kernels.py`. Where it is unset or empty the crate builds without kernels.

use std::path::{Path, PathBuf};
use std::{env, fs};

const VARIABLE: &str = "KVRELAY_CUDA_FATBIN";
/// How a fatbin begins.
const MAGIC: [u8; 4] = 0xBA55_ED50_u32.to_le_bytes();

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let image = match env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(path) => read(Path::new(&path)),
        None => Vec::new(),
    };
    fs::write(out.join("kernels.fatbin"), image).expect("OUT_DIR can be written to");
}

fn read(path: &Path) -> Vec<u8> {
    println!("cargo::rerun-if-changed={}", path.display());
    let image = fs::read(path).unwrap_or_else(|error| panic!("{VARIABLE} names {}: {error}", path.display()));
    assert!(
        image.starts_with(&MAGIC),
        "{VARIABLE} names {}, which is not a fatbin: it begins with {:02x?}, not {MAGIC:02x?}",
        path.display(),
        &image[..image.len().min(4)],
    );
    let expected = whole(&image);
    assert!(
        expected == Some(image.len() as u128),
        "{VARIABLE} names {}, a damaged fatbin of {} bytes{}: build it again",
        path.display(),
        image.len(),
        expected.map_or_else(String::new, |bytes| format!(", which should be {bytes}")),
    );
    image
}

/// How many bytes a fatbin has by its header: magic (4), version (2), bytes of the header (2), and of what
/// is behind it (8). `None` if it ends before.
fn whole(image: &[u8]) -> Option<u128> {
    let header = u16::from_le_bytes(image.get(6..8)?.try_into().ok()?);
    let behind = u64::from_le_bytes(image.get(8..16)?.try_into().ok()?);
    Some(u128::from(header) + u128::from(behind))
}
