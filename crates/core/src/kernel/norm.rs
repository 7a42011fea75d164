//! Layer norm and RMS norm over the last dimension.

use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// Layer norm over the last dimension (n elements): mean, rstd = 1/sqrt(var + eps) (one each a row, biased variance),
/// out = (x - mean) rstd weight + bias. Without `mean` nothing is centred: RMS norm, rstd = 1/sqrt(mean of squares +
/// eps); so too in the gradients.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<'a> {
    /// `[.., n]`.
    pub x: &'a Tensor,
    /// `[n]`; 1 if absent.
    pub weight: Option<&'a Tensor>,
    /// `[n]`; 0 if absent.
    pub bias: Option<&'a Tensor>,
    /// Added to the variance.
    pub eps: f64,
    /// Written; of x's shape.
    pub out: &'a Tensor,
    /// Written: a statistic for each row.
    pub mean: Option<&'a Tensor>,
    /// Written: a statistic for each row.
    pub rstd: &'a Tensor,
}

impl<'a> Primitive<'a> for LayerNorm<'a> {
    fn name(&self) -> &'static str {
        "layer_norm"
    }
    fn operands(&self) -> Operands<'a> {
        operands![
            self => x: Read Float, weight: Read Float, bias: Read Float, out: Write Float, mean: Write Statistic,
            rstd: Write Statistic
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("out", self.out, self.x.shape())?;
        a_column(check, "weight", self.weight, self.x)?;
        a_column(check, "bias", self.bias, self.x)?;
        statistics(check, self.mean, self.rstd, self.x)
    }
}

/// Gradient by x. With xhat = (x - mean) rstd and e = g weight: out = rstd (e - mean(e) - xhat mean(e xhat)), without
/// the term mean(e) where nothing was centred.
#[derive(Debug, Clone, Copy)]
pub struct LayerNormGrad<'a> {
    /// What was normalised.
    pub x: &'a Tensor,
    /// As in [`LayerNorm`].
    pub weight: Option<&'a Tensor>,
    /// As [`LayerNorm`] wrote it.
    pub mean: Option<&'a Tensor>,
    /// As [`LayerNorm`] wrote it.
    pub rstd: &'a Tensor,
    /// Gradient by the result. May be `out`.
    pub g: &'a Tensor,
    /// Written; of x's shape.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for LayerNormGrad<'a> {
    fn name(&self) -> &'static str {
        "layer_norm_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![
            self => x: Read Float, weight: Read Float, mean: Read Statistic, rstd: Read Statistic, g: ReadInPlace Float,
            out: Write Float
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("out", self.out, self.x.shape())?;
        check.shape("g", self.g, self.x.shape())?;
        a_column(check, "weight", self.weight, self.x)?;
        statistics(check, self.mean, self.rstd, self.x)
    }
}

/// Gradients by weight (sum over rows of g xhat) and bias (sum of g), each if present. Rows are summed in an order that
/// doesn't depend on threads. Neighbouring rows whose `mean` is one element that repeats were normalised as one.
#[derive(Debug, Clone, Copy)]
pub struct LayerNormParamGrad<'a> {
    /// What was normalised.
    pub x: &'a Tensor,
    /// As [`LayerNorm`] wrote it.
    pub mean: Option<&'a Tensor>,
    /// As [`LayerNorm`] wrote it.
    pub rstd: &'a Tensor,
    /// Gradient by the result.
    pub g: &'a Tensor,
    /// Written: `[n]`.
    pub dweight: Option<&'a Tensor>,
    /// Written: `[n]`.
    pub dbias: Option<&'a Tensor>,
}

impl<'a> Primitive<'a> for LayerNormParamGrad<'a> {
    fn name(&self) -> &'static str {
        "layer_norm_param_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![
            self => x: Read Float, mean: Read Statistic, rstd: Read Statistic, g: Read Float, dweight: Write Float,
            dbias: Write Float
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("g", self.g, self.x.shape())?;
        a_column(check, "dweight", self.dweight, self.x)?;
        a_column(check, "dbias", self.dbias, self.x)?;
        statistics(check, self.mean, self.rstd, self.x)
    }
}

/// Fails unless a tensor has one number for each element of x's rows.
fn a_column(check: &Check<'_>, name: &str, tensor: Option<&Tensor>, x: &Tensor) -> Result<()> {
    tensor.map_or(Ok(()), |t| check.shape(name, t, &[x.shape().last().copied().unwrap_or(1)]))
}

/// Fails unless the statistics have one number for each row of x.
fn statistics(check: &Check<'_>, mean: Option<&Tensor>, rstd: &Tensor, x: &Tensor) -> Result<()> {
    let rows: usize = x.shape().split_last().map_or(1, |(_, rows)| rows.iter().product());
    let a_row = |name: &str, t: &Tensor| {
        check.must(t.len() == rows, || {
            format!("`{name}` must have one number for each of {rows} rows, got {:?}", t.shape())
        })
    };
    mean.map_or(Ok(()), |mean| a_row("mean", mean))?;
    a_row("rstd", rstd)
}
