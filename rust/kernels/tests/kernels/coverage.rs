//! Which kernels there are, by the manifest that is compiled with them, and which are tested.

use std::env;
use std::fs;
use std::path::PathBuf;

use crate::FAMILIES;
use crate::device::Device;

/// The names of all kernels; `None` where they have not been built.
fn names() -> Option<Vec<String>> {
    let fatbin = env::var_os("KVRELAY_CUDA_FATBIN").filter(|value| !value.is_empty())?;
    let path = PathBuf::from(fatbin).with_extension("json");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    let kernels = manifest["kernels"].as_array().unwrap();
    assert!(!kernels.is_empty(), "{} lists no kernel", path.display());
    Some(kernels.iter().map(|kernel| kernel["name"].as_str().unwrap().to_owned()).collect())
}

/// The longest family that a kernel's name begins with.
fn family_of(name: &str) -> Option<&'static str> {
    let fits = |family: &&&str| name == **family || name.starts_with(&format!("{family}_"));
    FAMILIES.iter().filter(fits).max_by_key(|family| family.len()).copied()
}

/// Fails if a kernel has no test against an oracle.
pub(crate) fn assert_all_known() {
    let Some(names) = names() else {
        return println!("skipped: KVRELAY_CUDA_FATBIN is not set (make test-cuda sets it)");
    };
    let unknown: Vec<_> = names.iter().filter(|name| family_of(name).is_none()).collect();
    assert!(unknown.is_empty(), "kernels without an oracle and its test: {unknown:?}");
    let empty = |family: &&&str| !names.iter().any(|name| family_of(name) == Some(**family));
    let empty: Vec<_> = FAMILIES.iter().filter(empty).collect();
    assert!(empty.is_empty(), "families without a kernel: {empty:?}");
}

/// Fails if the test of a family has left out one of its kernels.
pub(crate) fn assert_all_launched(device: &Device, family: &str) {
    let names = names().expect("whoever sets the emulator's folder sets KVRELAY_CUDA_FATBIN");
    let mut expected: Vec<_> = names.iter().filter(|name| family_of(name) == Some(family)).collect();
    expected.sort();
    let launched = device.kernels.launched();
    let missing: Vec<_> = expected.iter().filter(|name| !launched.contains(name)).collect();
    assert!(missing.is_empty(), "the test of {family} launches all of its kernels but {missing:?}");
}
