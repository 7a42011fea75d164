//! Element types.

use half::{bf16, f16};
use std::fmt;

/// The type of a tensor's elements. All floats are computed: `f64` and `f32` in themselves, `bf16` and `f16` in f32,
/// with one rounding to nearest even where a kernel stores a result ([`computed_in`](DType::computed_in)). The
/// integers and `bool` are indices, masks and packed values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum DType {
    F64,
    F32,
    BF16,
    F16,
    I64,
    I32,
    U8,
    Bool,
}

impl DType {
    /// Every dtype, for tests that loop over them.
    pub const ALL: [DType; 8] =
        [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 | DType::Bool => 1,
        }
    }

    /// True for the types that can carry a gradient.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::BF16 | DType::F16)
    }

    /// The type of the arithmetic on such elements, of their sums and of their statistics: f32 for bf16 and f16.
    pub const fn computed_in(self) -> DType {
        match self {
            DType::BF16 | DType::F16 => DType::F32,
            other => other,
        }
    }

    /// The usual name, `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A Rust type that is a tensor's element. `bool` is stored as one byte, 0 or 1.
pub trait Element: Copy + Send + Sync + fmt::Debug + PartialEq + 'static {
    /// The dtype of this type.
    const DTYPE: DType;
    /// The elements as bytes, in the machine's order.
    fn to_bytes(values: &[Self]) -> Vec<u8>;
    /// The elements from bytes, in the machine's order; `bytes.len()` is a multiple of the element's size.
    fn from_bytes(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! pod_element {
    ($($t:ty => $d:ident),*) => {$(
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            fn to_bytes(values: &[Self]) -> Vec<u8> {
                bytemuck::cast_slice(values).to_vec()
            }
            fn from_bytes(bytes: &[u8]) -> Vec<Self> {
                bytemuck::pod_collect_to_vec(bytes)
            }
        }
    )*};
}
pod_element!(f64 => F64, f32 => F32, bf16 => BF16, f16 => F16, i64 => I64, i32 => I32, u8 => U8);

impl Element for bool {
    const DTYPE: DType = DType::Bool;
    fn to_bytes(values: &[Self]) -> Vec<u8> {
        values.iter().map(|&b| b as u8).collect()
    }
    fn from_bytes(bytes: &[u8]) -> Vec<Self> {
        bytes.iter().map(|&b| b != 0).collect()
    }
}
