//! A buffer of rows that threads write in parts.

use std::ops::Range;

/// A view of a buffer, `[rows][stride]`, whose users keep apart what they touch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    start: *mut f32,
    rows: usize,
    stride: usize,
}

// SAFETY: the view is plain memory; every access is `unsafe` and excludes conflicts itself.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// All of `buffer`, in rows of `stride`.
    pub(super) fn new(buffer: &mut [f32], stride: usize) -> Self {
        Self { start: buffer.as_mut_ptr(), rows: buffer.len() / stride, stride }
    }

    pub(super) fn stride(self) -> usize {
        self.stride
    }

    pub(super) fn as_ptr(self) -> *const f32 {
        self.start
    }

    pub(super) fn as_mut_ptr(self) -> *mut f32 {
        self.start
    }

    /// A row to read.
    ///
    /// # Safety
    /// The buffer is alive, and nothing writes the row meanwhile.
    pub(super) unsafe fn row<'a>(self, row: usize) -> &'a [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row is inside the buffer; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.stride), self.stride) }
    }

    /// Part of a row to write.
    ///
    /// # Safety
    /// The buffer is alive, and nothing else touches this part meanwhile.
    pub(super) unsafe fn columns_mut<'a>(self, row: usize, columns: Range<usize>) -> &'a mut [f32] {
        assert!(row < self.rows && columns.end <= self.stride, "row {row} of {}, {columns:?}", self.rows);
        // SAFETY: the part is inside the buffer; the caller excludes everyone else.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(row * self.stride + columns.start), columns.len())
        }
    }
}
