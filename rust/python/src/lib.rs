//! kvrelay._core, the Python extension module.
