//! Every op: the list at the end of this file, which tests loop over.

use super::*;
use std::rc::Rc;

macro_rules! registry {
    ($($module:ident :: $op:ident),* $(,)?) => {
        /// Every op.
        #[derive(Debug, Clone)]
        #[allow(missing_docs)]
        pub enum Op {
            $($op($module::$op),)*
            /// An op defined outside this crate.
            Custom(Rc<dyn OpRule>),
        }

        impl Op {
            /// The op's rule.
            pub fn rule(&self) -> &dyn OpRule {
                match self {
                    $(Op::$op(op) => op,)*
                    Op::Custom(rule) => &**rule,
                }
            }

            /// The samples of every op by the file that defines it, in the registry's order.
            pub fn samples_by_file() -> Vec<(&'static str, Vec<Sample>)> {
                vec![$((stringify!($module), <$module::$op as OpRule>::samples())),*]
            }

            /// The samples of every op, for tests that loop over the registry.
            pub fn all_samples() -> Vec<Sample> {
                Op::samples_by_file().into_iter().flat_map(|(_, samples)| samples).collect()
            }
        }

        $(impl From<$module::$op> for Op {
            fn from(op: $module::$op) -> Op {
                Op::$op(op)
            }
        })*
    };
}

registry! {
    unary::UnaryOp,
    binary::BinaryOp,
    ternary::TernaryOp,
    clamp::ClampBetween,
    where_::Where,
    reduce::ReduceOp,
    max_index::MaxIndex,
    scan::ScanOp,
    matmul::Matmul,
    matmul::Linear,
    matmul::AddMatmul,
    softmax::Softmax,
    softmax::LogSoftmax,
    causal_mask::CausalMask,
    dropout::Dropout,
    attention::Attention,
    layer_norm::LayerNorm,
    embedding::Embedding,
    rms_norm::RmsNorm,
    group_norm::GroupNorm,
    cross_entropy::CrossEntropy,
    cross_entropy::NllLoss,
    loss::LossOp,
    conv::Conv2d,
    pool::MaxPool2d,
    pool::AvgPool2d,
    view::Reshape,
    view::Permute,
    view::Expand,
    view::Narrow,
    view::Split,
    join::Cat,
    flip::Flip,
    roll::Roll,
    repeat::Repeat,
    pad::Pad,
    triangle::Triangle,
    glu::Glu,
    gather::Gather,
    gather::ScatterAdd,
    index::Gathered,
    copy::Contiguous,
    copy::Cast,
}
