//! retape: tape-based reverse-mode autodiff whose saved tensors are first-class.

pub use retape_core::*;
pub use retape_policy as policy;

pub use retape_cpu::{device as cpu, device_with_threads as cpu_with_threads};
