//! Matrix products, int8, random numbers and AdamW on the CUDA backend, against the CPU's.

mod both;
mod cublaslt;
mod int8;
mod matmul;
mod optimizer;
mod random;
