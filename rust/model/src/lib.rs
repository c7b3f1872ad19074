//! Model files, tokenizers, chat templates and sampling for kvrelay.
