//! CUDA kernels of kvrelay and the probe that says whether a driver is usable.
