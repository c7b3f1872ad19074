//! Comparisons of shapes, which name the kernel, the parameter and both numbers.

use cudarc::driver::{CudaStream, DevicePtr};

use super::LaunchError;

/// The shapes of one kernel's launch.
pub(super) struct Check<'a> {
    pub(super) kernel: &'a str,
}

impl Check<'_> {
    fn refuse<T>(&self, what: &'static str, expected: String, found: usize) -> Result<T, LaunchError> {
        Err(LaunchError::Shape { kernel: self.kernel.to_owned(), what, expected, found })
    }

    pub(super) fn equal(&self, what: &'static str, expected: usize, found: usize) -> Result<(), LaunchError> {
        if found == expected { Ok(()) } else { self.refuse(what, expected.to_string(), found) }
    }

    pub(super) fn at_least(&self, what: &'static str, least: usize, found: usize) -> Result<(), LaunchError> {
        if found >= least { Ok(()) } else { self.refuse(what, format!("at least {least}"), found) }
    }

    pub(super) fn at_most(&self, what: &'static str, most: usize, found: usize) -> Result<(), LaunchError> {
        if found <= most { Ok(()) } else { self.refuse(what, format!("at most {most}"), found) }
    }

    /// A positive multiple.
    pub(super) fn multiple(&self, what: &'static str, of: usize, found: usize) -> Result<(), LaunchError> {
        if found > 0 && found.is_multiple_of(of) {
            Ok(())
        } else {
            self.refuse(what, format!("a positive multiple of {of}"), found)
        }
    }

    /// A multiple, 0 included.
    pub(super) fn aligned(&self, what: &'static str, to: usize, found: usize) -> Result<(), LaunchError> {
        if found.is_multiple_of(to) {
            Ok(())
        } else {
            self.refuse(what, format!("a multiple of {to}"), found)
        }
    }

    pub(super) fn one_of(
        &self,
        what: &'static str,
        allowed: &[usize],
        found: usize,
    ) -> Result<(), LaunchError> {
        if allowed.contains(&found) {
            Ok(())
        } else {
            self.refuse(what, format!("one of {allowed:?}"), found)
        }
    }

    /// A view's first byte, at a multiple of `border` bytes: kernels read and write so many at a time.
    pub(super) fn begins_at<T>(
        &self,
        what: &'static str,
        border: u64,
        view: &impl DevicePtr<T>,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        let (address, _in_use) = view.device_ptr(stream);
        self.equal(what, 0, (address % border) as usize)
    }

    /// As kernels count: in 32 bits.
    pub(super) fn int(&self, what: &'static str, found: usize) -> Result<i32, LaunchError> {
        i32::try_from(found).or_else(|_| self.refuse(what, format!("at most {}", i32::MAX), found))
    }
}

/// Elements of a shape; one that no memory holds is larger than any view.
pub(super) fn elements<const N: usize>(shape: [usize; N]) -> usize {
    shape.into_iter().fold(1, usize::saturating_mul)
}
