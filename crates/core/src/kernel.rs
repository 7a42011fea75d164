//! The vocabulary between ops and backends: every primitive kernel, as data. A kernel is a struct of its operands, in
//! the file of its family; [`Kernel`] is any of them.
//!
//! Conventions, for every kernel unless its line says otherwise:
//! - inputs may have any strides (0 included) and offset; `out` is contiguous and wholly written;
//! - float kernels take f64 tensors, or f32, bf16 and f16 ones, each operand of its own dtype among these: bf16 and f16
//!   are widened as they are read, arithmetic and whole sums are in f32, and what is stored is rounded once, to nearest
//!   even; statistics are f32, and f64 with f64 tensors;
//! - zero-sized dimensions are ordinary: nothing is read, sums are 0;
//! - *in place*: an input that may be `out` may be the very tensor (same storage and layout) that is written; nothing
//!   else that is read overlaps what is written;
//! - results don't depend on the number of threads, and equal inputs give equal bits.

mod attention;
mod check;
mod copy;
mod cross_entropy;
mod elementwise;
mod embedding;
mod functions;
mod indexing;
mod loss;
mod matmul;
mod norm;
mod optimizer;
mod quantize;
mod random;
mod reduce;
mod scan;
mod softmax;
mod window;

pub use attention::*;
pub use check::Launch;
pub use copy::*;
pub use cross_entropy::*;
pub use elementwise::*;
pub use embedding::*;
pub use functions::*;
pub use indexing::*;
pub use loss::*;
pub use matmul::*;
pub use norm::*;
pub use optimizer::*;
pub use quantize::*;
pub use random::*;
pub use reduce::*;
pub use scan::*;
pub use softmax::*;
pub use window::*;

use check::Primitive;

/// Makes [`Kernel`] of the structs that are kernels.
macro_rules! kernels {
    ($($kernel:ident),* $(,)?) => {
        /// One primitive kernel with its operands: any of the structs of this module that are kernels.
        #[derive(Debug, Clone, Copy)]
        #[allow(missing_docs)] // each is described with its struct
        pub enum Kernel<'a> {
            $($kernel($kernel<'a>),)*
        }

        $(
            impl<'a> From<$kernel<'a>> for Kernel<'a> {
                fn from(kernel: $kernel<'a>) -> Kernel<'a> {
                    Kernel::$kernel(kernel)
                }
            }
        )*

        impl<'a> Kernel<'a> {
            /// What core knows of it.
            fn primitive(&self) -> &dyn Primitive<'a> {
                match self {
                    $(Kernel::$kernel(kernel) => kernel,)*
                }
            }
        }
    };
}

kernels![
    Fill,
    Copy,
    Unary,
    UnaryGrad,
    Binary,
    ExtremumGrad,
    Ternary,
    ClampGrad,
    Select,
    Loss,
    LossGrad,
    Reduce,
    ReduceGrad,
    SquaredNorm,
    Scan,
    CumprodGrad,
    Matmul,
    Softmax,
    SoftmaxGrad,
    LogSoftmax,
    LogSoftmaxGrad,
    Triangle,
    CrossEntropy,
    CrossEntropyGrad,
    NllLossGrad,
    CrossEntropyTargetGrad,
    CrossEntropyWeightGrad,
    LayerNorm,
    LayerNormGrad,
    LayerNormParamGrad,
    Embedding,
    EmbeddingGrad,
    Flip,
    Gather,
    ScatterAdd,
    MaxIndex,
    MaxIndexGrad,
    Im2col,
    Col2im,
    MaxPool,
    MaxPoolGrad,
    AvgPool,
    AvgPoolGrad,
    Attention,
    AttentionDelta,
    AttentionGradKv,
    AttentionGradQ,
    AttentionGradMask,
    Quantize,
    Dequantize,
    Uniform,
    Normal,
    Dropout,
    AdamW,
];

impl Kernel<'_> {
    /// The kernel's name, for errors, traces and profiles.
    pub fn name(&self) -> &'static str {
        self.primitive().name()
    }
}
