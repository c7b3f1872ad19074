//! Which devices an engine's workers compute on.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kvrelay_kernels::Driver;
use kvrelay_model::Model;

use crate::backend::cuda::{CudaDevice, supports};
use crate::error::EngineError;

/// What a caller asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// This machine's CPU.
    #[default]
    Cpu,
    /// One CUDA device, for all workers.
    Cuda(usize),
    /// Every CUDA device that the kernels run on; workers are dealt round.
    AllCuda,
    /// CUDA where it is usable and the kernels are made for the model, the CPU otherwise.
    Auto,
}

impl FromStr for DeviceChoice {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        let ordinal = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        match (text, ordinal) {
            ("cpu", _) => Ok(Self::Cpu),
            ("auto", _) => Ok(Self::Auto),
            ("cuda", _) => Ok(Self::AllCuda),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(EngineError::Config {
                what: "device",
                expected: "one of cpu, auto, cuda, cuda:0, cuda:1, …".into(),
                found: format!("{text:?}"),
            }),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::AllCuda => f.write_str("cuda"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl DeviceChoice {
    /// The CUDA devices, opened, at most one a worker; none for the CPU.
    pub(crate) fn open(self, model: &Model, workers: usize) -> Result<Vec<Arc<CudaDevice>>, EngineError> {
        if self == Self::Cpu || (self == Self::Auto && supports(model.config()).is_err()) {
            return Ok(Vec::new());
        }
        let devices = match Driver::probe() {
            Ok(devices) => devices,
            Err(_) if self == Self::Auto => return Ok(Vec::new()),
            Err(reason) => return Err(EngineError::NoCuda { device: self, reason }),
        };
        supports(model.config())?;
        let ordinals = match self {
            Self::Cuda(ordinal) => vec![ordinal],
            _ => devices.usable(),
        };
        let used = ordinals.into_iter().take(workers);
        Ok(used.map(|ordinal| CudaDevice::open(&devices, ordinal)).collect::<Result<_, _>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_are_written() {
        for text in ["cpu", "auto", "cuda", "cuda:0", "cuda:12"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        for text in ["", "tpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda0"] {
            let error = text.parse::<DeviceChoice>().unwrap_err().to_string();
            assert_eq!(
                error,
                format!("device: expected one of cpu, auto, cuda, cuda:0, cuda:1, …, found {text:?}")
            );
        }
    }
}
