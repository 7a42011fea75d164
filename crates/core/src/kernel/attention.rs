//! Tiled attention and its gradients.

use super::RandomStream;
use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// What an attention kernel computes. All tensors are `[batch, time, heads, head size]`; keys and values may have
/// fewer heads than queries (each serves `heads / kv_heads` query heads in a row).
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct AttentionSpec {
    /// Factor on the scores.
    pub scale: f64,
    /// Query i of Tq sees keys j <= i + Tk - Tq (aligned at the bottom right).
    pub causal: bool,
    /// How many of these keys a query sees, with `causal`: the last ones, j > i + Tk - Tq - window. Tk or more is no
    /// window; with 0 no query sees anything.
    pub window: Option<usize>,
    /// Probability of dropping an attention weight; kept ones are divided by 1 - p. The bit of weight (b, h, i, j) is
    /// that of element ((b H + h) Tq + i) Tk + j of the stream: the same as dropout on the explicit weights.
    pub dropout: f64,
    /// The dropout's stream.
    pub stream: RandomStream,
}

/// Sequences that lie one after the other along the time of a single batch entry (a ragged batch, without padding), by
/// their bounds: sequence s has the queries `queries[s] .. queries[s + 1]` and the keys `keys[s] .. keys[s + 1]`. Both
/// lists begin with 0, never fall, and end with the tensors' times. A query sees keys of its own sequence alone;
/// causality and window count within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequences<'a> {
    /// Bounds of the queries.
    pub queries: &'a [usize],
    /// Bounds of the keys: a list of the same length.
    pub keys: &'a [usize],
}

/// What all passes of attention read.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a> {
    /// `[batch, Tq, heads, size]`.
    pub q: &'a Tensor,
    /// `[batch, Tk, kv heads, size]`.
    pub k: &'a Tensor,
    /// `[batch, Tk, kv heads, size of values]`.
    pub v: &'a Tensor,
    /// `[batch, heads, Tq, Tk]`, repeated by stride 0. It is added to the scaled scores, or, if it is bool, hides where
    /// false; -inf in it hides, too.
    pub mask: Option<&'a Tensor>,
    /// Those of a ragged batch.
    pub sequences: Option<Sequences<'a>>,
    /// Which attention.
    pub spec: AttentionSpec,
}

impl AttentionInputs<'_> {
    /// `[batch, Tq, heads, size of values]`.
    fn out_shape(&self) -> [usize; 4] {
        let q = self.q.shape();
        [q[0], q[1], q[2], self.v.shape()[3]]
    }

    /// `[batch, heads, Tq]`.
    fn rows(&self) -> [usize; 3] {
        let q = self.q.shape();
        [q[0], q[2], q[1]]
    }

    fn check(&self, check: &Check<'_>) -> Result<()> {
        let AttentionInputs { q, k, v, mask, sequences, spec } = *self;
        for (name, t) in [("q", q), ("k", k), ("v", v)] {
            check.rank(name, t, 4)?;
        }
        let (q, k, v) = (q.shape(), k.shape(), v.shape());
        let right =
            k[..3] == v[..3] && q[0] == k[0] && q[3] == k[3] && (k[2] > 0 && q[2].is_multiple_of(k[2]) || q[2] == 0);
        check.must(right, || {
            format!(
                "q {q:?}, k {k:?} and v {v:?} must be [batch, time, heads, size] with one batch, one time and one \
                 number of heads of k and v, which goes into that of q, and one size of q and k"
            )
        })?;
        check
            .must((0.0..1.0).contains(&spec.dropout), || format!("dropout must be in [0, 1), got {}", spec.dropout))?;
        let scores = [q[0], q[2], q[1], k[1]];
        mask.map_or(Ok(()), |mask| check.shape("mask", mask, &scores))?;
        if let Some(Sequences { queries, keys }) = sequences {
            let bounds = |bounds: &[usize], time: usize| {
                bounds.first() == Some(&0) && bounds.last() == Some(&time) && bounds.is_sorted()
            };
            let right = q[0] == 1 && queries.len() == keys.len() && bounds(queries, q[1]) && bounds(keys, k[1]);
            check.must(right, || {
                format!(
                    "the bounds {queries:?} and {keys:?} must rise from 0 to {} and {}, in a batch of 1",
                    q[1], k[1]
                )
            })?;
        }
        Ok(())
    }
}

/// Tiled attention (Dao 2023): out = dropout(softmax(scale q k^T + mask)) v without holding the weights. A hidden pair
/// of a query and a key counts for nothing, even where one of their rows isn't finite (CUDA: only beyond sequences and
/// tensors, see docs/cuda.md).
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// What is read.
    pub inputs: AttentionInputs<'a>,
    /// Written: `[batch, Tq, heads, size of values]`; may be a view with distinct elements.
    pub out: &'a Tensor,
    /// Written: `[batch, heads, Tq, 2]`, of each row's scores m, the largest, and ln of the sum of exp(score - m). A
    /// row that sees nothing: out 0, stats (-inf, 0).
    pub stats: &'a Tensor,
}

impl<'a> Primitive<'a> for Attention<'a> {
    fn name(&self) -> &'static str {
        "attention"
    }
    fn operands(&self) -> Operands<'a> {
        operands![
            self.inputs => q: Read Float, k: Read Float, v: Read Float, mask: Read BoolOrFloat;
            self => out: WriteStrided Float, stats: Write Statistic
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        self.inputs.check(check)?;
        check.shape("out", self.out, &self.inputs.out_shape())?;
        check.row_stats(self.stats, &self.inputs.rows())
    }
}

/// delta = sum over the head size of g o.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDelta<'a> {
    /// What [`Attention`] wrote.
    pub o: &'a Tensor,
    /// Gradient by o.
    pub g: &'a Tensor,
    /// Written: `[batch, heads, Tq]`.
    pub delta: &'a Tensor,
}

impl<'a> Primitive<'a> for AttentionDelta<'a> {
    fn name(&self) -> &'static str {
        "attention_delta"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => o: Read Float, g: Read Float, delta: Write Statistic]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.rank("o", self.o, 4)?;
        check.shape("g", self.g, self.o.shape())?;
        let o = self.o.shape();
        check.shape("delta", self.delta, &[o[0], o[2], o[1]])
    }
}

/// What all gradients of attention read.
#[derive(Debug, Clone, Copy)]
pub struct AttentionGradInputs<'a> {
    /// What [`Attention`] read.
    pub forward: AttentionInputs<'a>,
    /// Gradient by what [`Attention`] wrote.
    pub g: &'a Tensor,
    /// As [`Attention`] wrote it.
    pub stats: &'a Tensor,
    /// As [`AttentionDelta`] wrote it.
    pub delta: &'a Tensor,
}

impl<'a> AttentionGradInputs<'a> {
    fn operands(&self) -> Operands<'a> {
        operands![
            self.forward => q: Read Float, k: Read Float, v: Read Float, mask: Read BoolOrFloat;
            self => g: Read Float, stats: Read Statistic, delta: Read Statistic
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        self.forward.check(check)?;
        check.shape("g", self.g, &self.forward.out_shape())?;
        check.row_stats(self.stats, &self.forward.rows())?;
        check.shape("delta", self.delta, &self.forward.rows())
    }
}

/// Gradients by k and v (deterministic, no atomics; summed over the query heads that a kv head serves).
#[derive(Debug, Clone, Copy)]
pub struct AttentionGradKv<'a> {
    /// What is read.
    pub inputs: AttentionGradInputs<'a>,
    /// Written: of k's shape; may be a view with distinct elements.
    pub dk: &'a Tensor,
    /// Written: of v's shape; may be a view with distinct elements.
    pub dv: &'a Tensor,
}

impl<'a> Primitive<'a> for AttentionGradKv<'a> {
    fn name(&self) -> &'static str {
        "attention_grad_kv"
    }
    fn operands(&self) -> Operands<'a> {
        let mut all = self.inputs.operands();
        all.extend(operands![self => dk: WriteStrided Float, dv: WriteStrided Float]);
        all
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        self.inputs.check(check)?;
        check.shape("dk", self.dk, self.inputs.forward.k.shape())?;
        check.shape("dv", self.dv, self.inputs.forward.v.shape())
    }
}

/// Gradient by q.
#[derive(Debug, Clone, Copy)]
pub struct AttentionGradQ<'a> {
    /// What is read.
    pub inputs: AttentionGradInputs<'a>,
    /// Written: of q's shape; may be a view with distinct elements.
    pub dq: &'a Tensor,
}

impl<'a> Primitive<'a> for AttentionGradQ<'a> {
    fn name(&self) -> &'static str {
        "attention_grad_q"
    }
    fn operands(&self) -> Operands<'a> {
        let mut all = self.inputs.operands();
        all.extend(operands![self => dq: WriteStrided Float]);
        all
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        self.inputs.check(check)?;
        check.shape("dq", self.dq, self.inputs.forward.q.shape())
    }
}

/// Gradient by the scores, which is that by a mask.
#[derive(Debug, Clone, Copy)]
pub struct AttentionGradMask<'a> {
    /// What is read.
    pub inputs: AttentionGradInputs<'a>,
    /// Written: `[batch or 1, heads or 1, Tq or 1, Tk]`, summed where it has size 1; may be a view with distinct
    /// elements.
    pub dmask: &'a Tensor,
}

impl<'a> Primitive<'a> for AttentionGradMask<'a> {
    fn name(&self) -> &'static str {
        "attention_grad_mask"
    }
    fn operands(&self) -> Operands<'a> {
        let mut all = self.inputs.operands();
        all.extend(operands![self => dmask: WriteStrided Float]);
        all
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        self.inputs.check(check)?;
        let (rows, keys) = (self.inputs.forward.rows(), self.inputs.forward.k.shape()[1]);
        check.reduced("dmask", self.dmask, &[rows[0], rows[1], rows[2], keys])?;
        check.must(self.dmask.shape()[3] == keys, || "`dmask` must have a number for each key".into())
    }
}
