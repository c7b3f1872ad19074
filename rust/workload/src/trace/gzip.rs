//! Traces as they are published: compressed with gzip, whatever their name ends with.

use std::borrow::Cow;
use std::io::Read;

use flate2::read::MultiGzDecoder;

use super::TraceError;

const MAGIC: [u8; 2] = [0x1F, 0x8B];

/// The most bytes a file may unpack to: some hundred million rows. A small file can claim any size.
const MOST_BYTES: u64 = 16 << 30;

/// The bytes of `file`, unpacked if they are packed.
pub(super) fn unpacked<'a>(file: &str, bytes: &'a [u8]) -> Result<Cow<'a, [u8]>, TraceError> {
    if !bytes.starts_with(&MAGIC) {
        return Ok(Cow::Borrowed(bytes));
    }
    let failed = |problem: String| TraceError::Packed { file: file.to_owned(), problem };
    let mut unpacked = Vec::new();
    // Several members in a row, as `cat a.gz b.gz` makes them, are one file.
    let mut decoder = MultiGzDecoder::new(bytes).take(MOST_BYTES + 1);
    decoder.read_to_end(&mut unpacked).map_err(|error| failed(error.to_string()))?;
    if unpacked.len() as u64 > MOST_BYTES {
        return Err(failed(format!("it has more than {MOST_BYTES} bytes")));
    }
    Ok(Cow::Owned(unpacked))
}
