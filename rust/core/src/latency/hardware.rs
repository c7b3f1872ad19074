//! GPU and model tables.
