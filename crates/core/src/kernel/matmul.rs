//! Matrix products.

use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// out (+)= alpha a b: `[.., m, k] x [.., k, n] -> [.., m, n]`, batch dimensions equal (stride 0 repeats). With k = 0
/// the product is 0.
#[derive(Debug, Clone, Copy)]
pub struct Matmul<'a> {
    /// `[.., m, k]`.
    pub a: &'a Tensor,
    /// `[.., k, n]`.
    pub b: &'a Tensor,
    /// Factor on the product.
    pub alpha: f64,
    /// Adds to `out`.
    pub accumulate: bool,
    /// `[.., m, n]`, written or added to.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Matmul<'a> {
    fn name(&self) -> &'static str {
        "matmul"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => a: Read Float, b: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        let (a, b, c) = (self.a.shape(), self.b.shape(), self.out.shape());
        let n = a.len();
        let right = n >= 2
            && b.len() == n
            && c.len() == n
            && (a[..n - 2] == b[..n - 2] && a[..n - 2] == c[..n - 2])
            && (a[n - 1] == b[n - 2] && c[n - 2] == a[n - 2] && c[n - 1] == b[n - 1]);
        check.must(right, || format!("{a:?} by {b:?} to {c:?}; needs [.., m, k] x [.., k, n] -> [.., m, n]"))
    }
}
