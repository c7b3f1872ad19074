//! `kvrelay._core`: the core, the simulator and the engine as a Python module. No logic here; the
//! pure-Python package on top says what users see.

mod cluster;
mod devices;
mod door;
mod engine;
mod error;
mod latency;
mod objectives;
mod policy;
mod result;
mod sim;
mod view;
mod workload;

use pyo3::prelude::*;

/// The compiled part of kvrelay. Use the `kvrelay` package, not this module.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::cluster::{Cluster, gpu_names, model_names, num_workers, profile_names};
    #[pymodule_export]
    use super::devices::{cpu, cuda};
    #[pymodule_export]
    use super::engine::{Engine, Handle, Piece};
    #[pymodule_export]
    use super::latency::LatencyTable;
    #[pymodule_export]
    use super::policy::BuiltIn;
    #[pymodule_export]
    use super::result::{Result, replication_interval, requests_for_attainment};
    #[pymodule_export]
    use super::sim::{search_rate, simulate};
    #[pymodule_export]
    use super::view::{ClusterView, RequestView, WorkerView};
    #[pymodule_export]
    use super::workload::{Workload, preset_names};

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
