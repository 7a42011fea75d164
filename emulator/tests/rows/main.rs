//! Kernels that work along rows, lines and windows, on the CUDA backend against the CPU's in f64: every float dtype,
//! shapes with edges, strided operands, NaN and infinity, equal bits from run to run.

mod indexing;
mod loss;
mod norm;
mod reduce;
mod softmax;
mod twins;
mod window;
