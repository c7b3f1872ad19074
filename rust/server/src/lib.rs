//! HTTP over the kvrelay engine.
