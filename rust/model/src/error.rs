//! The one error type of the crate: which file, which field, what was expected, what was found.

use std::path::{Path, PathBuf};

/// Why a model, a tokenizer, a template or a sampling parameter was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The operating system refused the file.
    #[error("{path}: cannot read: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A field of a file has a value that cannot be right.
    #[error("{path}: {field}: expected {expected}, found {found}", path = path.display())]
    Field {
        /// The file or folder.
        path: PathBuf,
        /// The header field, metadata key, or tensor.
        field: String,
        /// What would have been right.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// A field asks for something that exists but that kvrelay does not compute.
    #[error("{path}: {field} = {value} is not supported (supported: {supported})", path = path.display())]
    Unsupported {
        /// The file or folder.
        path: PathBuf,
        /// The header field, metadata key, or tensor.
        field: String,
        /// The value by its name.
        value: String,
        /// What could stand there instead.
        supported: String,
    },
    /// The tokenizer's data do not fit together, or a text cannot be encoded.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template does not compile, or refused these messages.
    #[error("chat template: {0}")]
    Template(String),
    /// A sampling parameter is out of its range.
    #[error("{field}: expected {expected}, found {found}")]
    Parameter {
        /// The parameter's name.
        field: &'static str,
        /// Its range.
        expected: &'static str,
        /// The value given.
        found: String,
    },
    /// Logits contain no finite maximum, so no token can be chosen.
    #[error("logits: expected finite numbers, found {found} at token {token}")]
    Logits {
        /// The first offending token.
        token: usize,
        /// Its logit.
        found: f32,
    },
}

impl ModelError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn field(
        path: &Path,
        field: impl Into<String>,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Self::Field {
            path: path.to_owned(),
            field: field.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    pub(crate) fn unsupported(
        path: &Path,
        field: impl Into<String>,
        value: impl ToString,
        supported: impl Into<String>,
    ) -> Self {
        Self::Unsupported {
            path: path.to_owned(),
            field: field.into(),
            value: value.to_string(),
            supported: supported.into(),
        }
    }
}
