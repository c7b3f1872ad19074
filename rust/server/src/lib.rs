//! Empty so far: nothing is served over HTTP yet. The OpenAI-compatible face of the engine will live
//! here, on top of `kvrelay-engine`; until then an engine is used from Python or from Rust.
