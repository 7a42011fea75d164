//! The vocabulary between ops and backends: every primitive kernel, as data.
//!
//! Conventions, for every kernel unless its line says otherwise:
//! - inputs may have any strides (0 included) and offset; `out` is contiguous and wholly written;
//! - float kernels take f64 tensors, or f32, bf16 and f16 ones, each operand of its own dtype among these: bf16 and f16 are
//!   widened as they are read, arithmetic and whole sums are in f32, and what is stored is rounded once, to nearest even;
//!   statistics are f32, and f64 with f64 tensors;
//! - zero-sized dimensions are ordinary: nothing is read, sums are 0;
//! - *in place*: where noted, `out` may be the very tensor (same storage and layout) given as the named input; nothing else
//!   that is read overlaps what is written;
//! - results don't depend on the number of threads, and equal inputs give equal bits.

mod check;
mod functions;

use crate::Tensor;
pub use check::Launch;
pub use functions::{BinaryFn, TernaryFn, UnaryFn};
pub(crate) use functions::{binary_functions, unary_functions};

/// An input of a clamp with tensors as bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[allow(missing_docs)]
pub enum ClampInput {
    X,
    Low,
    High,
}

/// Reductions of n elements, each with its derivative by x_i.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum ReduceFn {
    /// The sum; 0 of nothing. Derivative 1.
    Sum,
    /// The largest; -inf of nothing, NaN if any is NaN. Derivative: 1 shared evenly among those equal to y;
    /// NaN where y is.
    Max,
    /// The smallest; inf of nothing, NaN if any is NaN. Derivative as Max.
    Min,
    /// The product; 1 of nothing. Derivative: the product of the others (no division: exact with zeros).
    Prod,
    /// ln sum e^x, without overflow; -inf of nothing. Derivative: the softmax e^(x_i - m) / sum e^(x - m) with m the largest;
    /// 0 in a group of only -inf.
    LogSumExp,
    /// sum (x - mean)^2 / max(n - correction, 0). Derivative 2 (x_i - mean) / (n - correction); with n <= correction
    /// NaN where x_i is the mean, else infinite.
    Var {
        /// 1 for the unbiased estimate, 0 for the population's variance.
        correction: f64,
    },
    /// The root of Var. Derivative (x_i - mean) / (y (n - correction)), 0 where y = 0.
    Std {
        /// As in Var.
        correction: f64,
    },
    /// (sum |x|^ord)^(1/ord); ord 0 counts what isn't 0, inf and -inf take the largest and smallest magnitude.
    /// Derivative sign(x_i) |x_i|^(ord-1) y^(1-ord), 0 where x_i or y is 0; for ord 0 nothing; for inf and -inf
    /// sign(x_i) shared evenly among those of magnitude y.
    Norm {
        /// Which norm.
        ord: f64,
    },
}

/// Running folds along a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum ScanFn {
    /// The sum of all up to here.
    Sum,
    /// The sum of all from here to the end.
    SumToEnd,
    /// The product of all up to here.
    Prod,
}

/// Elementwise losses of a prediction x and a target t, with d = x - t; each derivative by t is -(that by x) unless said.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum LossFn {
    /// d^2; by x: 2d.
    Squared,
    /// |d|; by x: sign(d), 0 at 0.
    Absolute,
    /// d^2 / (2 beta) where |d| < beta, else |d| - beta/2, for beta > 0; by x: d / beta limited to +-1. (Girshick 2015.)
    SmoothL1(f64),
    /// d^2 / 2 where |d| <= delta, else delta (|d| - delta/2); by x: d limited to +-delta. (Huber 1964.)
    Huber(f64),
    /// Of log-probabilities x and probabilities t: t (ln t - x), 0 where t = 0; by x: -t; by t: ln t + 1 - x.
    KlDivergence,
    /// Of log-probabilities x and t: e^t (t - x), 0 where e^t = 0; by x: -e^t; by t: e^t (t - x + 1).
    KlDivergenceLog,
    /// Binary cross-entropy of logits x: (1-t) max(x, 0) + w t max(-x, 0) + l ln(1 + e^-|x|) with l = 1 + (w-1) t. The
    /// third operand w weighs the positives (1 if absent). By x: (1-t) sigmoid(x) - w t sigmoid(-x); by t:
    /// -x + (w-1) softplus(-x); by w: t softplus(-x).
    BinaryLogits,
}

/// How a loss comes from the losses of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum LossReduction {
    /// Each by itself.
    None,
    /// Their sum.
    Sum,
    /// Their sum divided by what counts: see [`CrossEntropySpec`].
    Mean,
}

/// Cross-entropy of class scores: with q the target distribution of a row, (1 - smoothing) p + smoothing / classes where
/// p is the given distribution or all on the target class, and class weights w (1 if absent), the loss of a row is
/// sum over c of w_c q_c (-ln p_c), p the softmax: a class without a share counts 0, were its score -inf. A row of only
/// -inf has the loss inf and gradients 0. Rows whose target is `ignore` have loss 0. The mean divides by the sum of the
/// targets' weights over rows that count; with distributions as targets by the number of rows.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct CrossEntropySpec {
    /// The class index of rows that don't count.
    pub ignore: i64,
    /// What is returned.
    pub reduction: LossReduction,
    /// Share of the target that is spread evenly over all classes (Szegedy et al. 2016).
    pub smoothing: f64,
}

/// The mean, -100 ignored, no smoothing.
impl Default for CrossEntropySpec {
    fn default() -> CrossEntropySpec {
        CrossEntropySpec { ignore: -100, reduction: LossReduction::Mean, smoothing: 0.0 }
    }
}

/// A window that slides over the last two dimensions: output (y, x) sees the inputs at
/// (y, x) stride - before + (i, j) dilation for (i, j) within `kernel`; what lies outside the input is padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[allow(missing_docs)]
pub struct Window {
    pub kernel: [usize; 2],
    pub stride: [usize; 2],
    /// Padding before the first row and column.
    pub before: [usize; 2],
    pub dilation: [usize; 2],
}

/// What an average over a window divides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum PoolDivisor {
    /// The elements inside the input.
    Inside,
    /// The elements inside the input and its padding, which is as wide behind as before.
    Padded,
    /// This number.
    Fixed(i64),
}

/// A position in the counter-based random stream: Philox4x32-10 keyed by `seed`, one stream per `counter`.
/// Element i of a random tensor is word i % 4 of block i / 4 of its stream, see [`crate::rng`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub struct RandomStream {
    /// The tape's seed.
    pub seed: u64,
    /// The op's number among random ops.
    pub counter: u64,
}

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

/// One primitive kernel with its operands.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // operands are described with their kernel
pub enum Kernel<'a> {
    /// out = value, any dtype (converted as a cast of f64, see [`Tensor::cast`]).
    Fill { value: f64, out: &'a Tensor },
    /// out = x, any pair of dtypes (see [`Tensor::cast`]); `out` may be a strided view with distinct elements.
    Copy { x: &'a Tensor, out: &'a Tensor },
    /// out = f(x). In place: x.
    Unary { f: UnaryFn, x: &'a Tensor, out: &'a Tensor },
    /// out = g f'(.), where `saved` is y = f(x) or x, as [`UnaryFn::grad_reads_output`] says ([`UnaryFn::is_affine`] ones don't
    /// read it). In place: saved, g.
    UnaryGrad { f: UnaryFn, saved: &'a Tensor, g: &'a Tensor, out: &'a Tensor },
    /// out = f(a, b). In place: either that is contiguous.
    Binary { f: BinaryFn, a: &'a Tensor, b: &'a Tensor, out: &'a Tensor },
    /// Gradient of Maximum or Minimum by the first argument: out = g where a wins or either is NaN, g/2 on a tie,
    /// else 0. In place: g.
    ExtremumGrad { f: BinaryFn, a: &'a Tensor, b: &'a Tensor, g: &'a Tensor, out: &'a Tensor },
    /// out = f(a, b, c). In place: any of them that is contiguous.
    Ternary { f: TernaryFn, a: &'a Tensor, b: &'a Tensor, c: &'a Tensor, out: &'a Tensor },
    /// Gradient of min(max(x, low), high) by one of its inputs: out = g where the condition holds, else 0. X: neither
    /// x < low nor x > high (so too for NaN); Low: x < low (and low < high); High: x > high or high < low. In place: g.
    ClampGrad {
        by: ClampInput,
        x: &'a Tensor,
        low: Option<&'a Tensor>,
        high: Option<&'a Tensor>,
        g: &'a Tensor,
        out: &'a Tensor,
    },
    /// out = a where cond (bool) else b. In place: a, b.
    Select { cond: &'a Tensor, a: &'a Tensor, b: &'a Tensor, out: &'a Tensor },
    /// out = f over the dimensions where `out` (of x's rank) has size 1 and x has not.
    Reduce { f: ReduceFn, x: &'a Tensor, out: &'a Tensor },
    /// Gradient of a reduction f: out = g times the derivative. g and y have size 1 in the reduced dimensions; y is x reduced
    /// by [`ReduceFn::in_grad`]. f is none of Sum (whose gradient is g, repeated).
    ReduceGrad { f: ReduceFn, x: &'a Tensor, y: &'a Tensor, g: &'a Tensor, out: &'a Tensor },
    /// The largest along `dim` (which isn't empty) and where it first stands (i64); a NaN counts as the largest.
    /// `values` and `indices` have size 1 in `dim`.
    MaxIndex { x: &'a Tensor, dim: usize, values: &'a Tensor, indices: &'a Tensor },
    /// out = g at the given index along `dim`, else 0. `indices` (i64) and g have size 1 in `dim`.
    MaxIndexGrad { indices: &'a Tensor, g: &'a Tensor, dim: usize, out: &'a Tensor },
    /// out = running fold of x along `dim`. In place: x.
    Scan { f: ScanFn, x: &'a Tensor, dim: usize, out: &'a Tensor },
    /// Gradient of ScanFn::Prod: out_i = sum over k >= i of g_k times the product of all x up to k but x_i (no division:
    /// exact with zeros).
    CumprodGrad { x: &'a Tensor, g: &'a Tensor, dim: usize, out: &'a Tensor },
    /// out (+)= alpha a b: `[.., m, k] x [.., k, n] -> [.., m, n]`, batch dimensions equal (stride 0 repeats).
    /// With `accumulate` it adds to `out`. With k = 0 the product is 0.
    Matmul { a: &'a Tensor, b: &'a Tensor, alpha: f64, accumulate: bool, out: &'a Tensor },
    /// Softmax over the last dimension. A row of only -inf gives zeros; NaN and +inf pass as NaN.
    Softmax { x: &'a Tensor, out: &'a Tensor },
    /// out = y (g - sum(g y)) over the last dimension. In place: g.
    SoftmaxGrad { y: &'a Tensor, g: &'a Tensor, out: &'a Tensor },
    /// Logarithm of the softmax over the last dimension: x - ln sum e^x. A row of only -inf stays so; NaN and +inf pass as
    /// NaN.
    LogSoftmax { x: &'a Tensor, out: &'a Tensor },
    /// out = g - e^y sum(g) over the last dimension; 0 in a row of only -inf. In place: g.
    LogSoftmaxGrad { y: &'a Tensor, g: &'a Tensor, out: &'a Tensor },
    /// x `[.., rows, columns]`; out = x where j - i <= diagonal (>= with `upper`), else value. In place: x.
    Triangle { x: &'a Tensor, upper: bool, diagonal: isize, value: f64, out: &'a Tensor },
    /// `out[i] = x[n - 1 - i]` along each of `dims` (without repeats). Any dtype.
    Flip { x: &'a Tensor, dims: &'a [usize], out: &'a Tensor },
    /// `out[i] = x[indices[0][i], indices[1][i], .., i]`: x has one leading dimension for each index tensor (i64 or i32, of
    /// out's shape), then out's dimensions. Any dtype. An index outside its dimension is an InvalidValue error; with
    /// `wrap`, -n..0 count from the end. Indices that repeat (stride 0) along a dimension are read once.
    Gather { x: &'a Tensor, indices: &'a [&'a Tensor], wrap: bool, out: &'a Tensor },
    /// `out[indices[0][i], indices[1][i], .., i] += alpha source[i]`: Gather's counterpart, with the indices and the source
    /// of one shape. What meets in one place is summed in the row-major order of i, 16 at a time in the arithmetic's dtype
    /// and these sums in f64, then added and rounded once. `out` is updated, not wholly written, and may be a view whose
    /// trailing dimensions repeat (stride 0): there everything meets in one place. `order` is a workspace for putting
    /// together what meets: i64, of [`meeting`] elements.
    ScatterAdd {
        source: &'a Tensor,
        indices: &'a [&'a Tensor],
        wrap: bool,
        alpha: f64,
        order: &'a Tensor,
        out: &'a Tensor,
    },
    /// out = 0 where the element's uniform number is below p, else x / (1 - p). In place: x.
    Dropout { x: &'a Tensor, p: f64, stream: RandomStream, out: &'a Tensor },
    /// Layer norm over the last dimension (n elements): mean, rstd = 1/sqrt(var + eps) (one each a row, biased
    /// variance), out = (x - mean) rstd weight + bias. `weight` and `bias` are `[n]` and may be absent. Without `mean`
    /// nothing is centred: RMS norm, rstd = 1/sqrt(mean of squares + eps); so too in the gradients.
    LayerNorm {
        x: &'a Tensor,
        weight: Option<&'a Tensor>,
        bias: Option<&'a Tensor>,
        eps: f64,
        out: &'a Tensor,
        mean: Option<&'a Tensor>,
        rstd: &'a Tensor,
    },
    /// Gradient by x. With xhat = (x - mean) rstd and e = g weight: out = rstd (e - mean(e) - xhat mean(e xhat)), without the term
    /// mean(e) where nothing was centred. In place: g.
    LayerNormGrad {
        x: &'a Tensor,
        weight: Option<&'a Tensor>,
        mean: Option<&'a Tensor>,
        rstd: &'a Tensor,
        g: &'a Tensor,
        out: &'a Tensor,
    },
    /// Gradients by weight (sum over rows of g xhat) and bias (sum of g), each if present. Rows are summed in an order
    /// that doesn't depend on threads. Neighbouring rows whose `mean` is one element that repeats were normalised as
    /// one.
    LayerNormParamGrad {
        x: &'a Tensor,
        mean: Option<&'a Tensor>,
        rstd: &'a Tensor,
        g: &'a Tensor,
        dweight: Option<&'a Tensor>,
        dbias: Option<&'a Tensor>,
    },
    /// out[.., :] = table[ids[..], :], ids i64 or i32; an id outside the table is an InvalidValue error.
    Embedding { table: &'a Tensor, ids: &'a Tensor, out: &'a Tensor },
    /// out (the table's shape) = sum of g's rows by id, as ScatterAdd sums; rows that no id names are 0. `order` is a
    /// workspace, i64, with an element for each id.
    EmbeddingGrad { ids: &'a Tensor, g: &'a Tensor, order: &'a Tensor, out: &'a Tensor },
    /// out = f(x, t), elementwise; all of one shape.
    Loss { f: LossFn, x: &'a Tensor, target: &'a Tensor, weight: Option<&'a Tensor>, out: &'a Tensor },
    /// out = g times the derivative of f by x (`by` 0), the target (1) or the weight (2). In place: g.
    LossGrad {
        f: LossFn,
        by: usize,
        x: &'a Tensor,
        target: &'a Tensor,
        weight: Option<&'a Tensor>,
        g: &'a Tensor,
        out: &'a Tensor,
    },
    /// logits `[.., classes]`; target class indices `[..]` (i64 or i32) or distributions `[.., classes]`; weight
    /// `[classes]`; loss `[]`, or `[..]` unreduced, as the spec says (a mean over nothing is NaN). `stats` `[.., 2]` is
    /// written for every row: its largest logit m and log = ln sum e^(x - m), so that ln p = (x - m) - log; (-inf, 0) of a
    /// row of only -inf. (Their sum in one number would lose the second where logits are large.) Without `stats` the logits
    /// are log-probabilities. A target outside the classes (and not ignored) is an InvalidValue error.
    CrossEntropy {
        logits: &'a Tensor,
        target: &'a Tensor,
        weight: Option<&'a Tensor>,
        spec: CrossEntropySpec,
        loss: &'a Tensor,
        stats: Option<&'a Tensor>,
    },
    /// Gradient by the logits: out = g (softmax sum(w q) - w q) / count with softmax = exp((logits - m) - log), 0 in
    /// ignored rows (all rows 0 if every one is ignored) and in those of only -inf. g has the loss's shape; `out` may
    /// have any strides. In place: logits.
    CrossEntropyGrad {
        logits: &'a Tensor,
        target: &'a Tensor,
        weight: Option<&'a Tensor>,
        stats: &'a Tensor,
        g: &'a Tensor,
        spec: CrossEntropySpec,
        out: &'a Tensor,
    },
    /// Gradient by log-probabilities of class indices: out = -g w / count at the target, 0 elsewhere; any strides.
    NllLossGrad {
        target: &'a Tensor,
        weight: Option<&'a Tensor>,
        g: &'a Tensor,
        spec: CrossEntropySpec,
        out: &'a Tensor,
    },
    /// Gradient by target distributions: out = g (1 - smoothing) w ((m - logits) + log) / count.
    CrossEntropyTargetGrad {
        logits: &'a Tensor,
        weight: Option<&'a Tensor>,
        stats: &'a Tensor,
        g: &'a Tensor,
        spec: CrossEntropySpec,
        out: &'a Tensor,
    },
    /// Gradient by the class weights, the mean's divisor included; `stats` as in CrossEntropy.
    CrossEntropyWeightGrad {
        logits: &'a Tensor,
        target: &'a Tensor,
        weight: &'a Tensor,
        stats: Option<&'a Tensor>,
        g: &'a Tensor,
        spec: CrossEntropySpec,
        out: &'a Tensor,
    },
    /// x `[n, channels, height, width]`; out `[n, channels, kernel height, kernel width, out height, out width]` = what
    /// each place of the window sees, 0 in the padding.
    Im2col { x: &'a Tensor, window: Window, out: &'a Tensor },
    /// The transpose of Im2col: out `[n, channels, height, width]` = the sum of all places that see an element. `cols` is
    /// contiguous.
    Col2im { cols: &'a Tensor, window: Window, out: &'a Tensor },
    /// out = the largest that the window sees in x `[n, channels, height, width]` (NaN if it sees one), index (i64 or
    /// i32) = where it lies in its plane, the first of equals. Padding is never the largest.
    MaxPool { x: &'a Tensor, window: Window, out: &'a Tensor, index: &'a Tensor },
    /// out `[n, channels, height, width]` = the sum of g over the outputs whose index an element is. Each lies in its
    /// output's window.
    MaxPoolGrad { index: &'a Tensor, g: &'a Tensor, window: Window, out: &'a Tensor },
    /// out = the sum of what the window sees in x, divided as said.
    AvgPool { x: &'a Tensor, window: Window, divisor: PoolDivisor, out: &'a Tensor },
    /// The transpose of AvgPool.
    AvgPoolGrad { g: &'a Tensor, window: Window, divisor: PoolDivisor, out: &'a Tensor },
    /// Tiled attention (Dao 2023): out = dropout(softmax(scale q k^T + mask)) v without holding the weights, and `stats`
    /// `[batch, heads, Tq, 2]`: of each row's scores, m the largest and ln of the sum of exp(score - m). A row that sees
    /// nothing: out 0, stats (-inf, 0). The mask `[batch, heads, Tq, Tk]` (repeated by stride 0) is added to the scaled
    /// scores, or, if it is bool, hides where false; -inf in it hides, too. A hidden pair of a query and a key counts for
    /// nothing, even where one of their rows isn't finite (CUDA: only beyond sequences and tensors, see docs/cuda.md).
    /// `out`, and the gradients below, may be views with distinct elements.
    Attention {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        mask: Option<&'a Tensor>,
        sequences: Option<Sequences<'a>>,
        spec: AttentionSpec,
        out: &'a Tensor,
        stats: &'a Tensor,
    },
    /// delta `[batch, heads, Tq]` = sum over the head size of g o.
    AttentionDelta { o: &'a Tensor, g: &'a Tensor, delta: &'a Tensor },
    /// dk, dv with the shapes of k, v (deterministic, no atomics; summed over the query heads that a kv head serves).
    AttentionGradKv {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        mask: Option<&'a Tensor>,
        sequences: Option<Sequences<'a>>,
        g: &'a Tensor,
        stats: &'a Tensor,
        delta: &'a Tensor,
        spec: AttentionSpec,
        dk: &'a Tensor,
        dv: &'a Tensor,
    },
    /// dq with the shape of q.
    AttentionGradQ {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        mask: Option<&'a Tensor>,
        sequences: Option<Sequences<'a>>,
        g: &'a Tensor,
        stats: &'a Tensor,
        delta: &'a Tensor,
        spec: AttentionSpec,
        dq: &'a Tensor,
    },
    /// dmask `[batch or 1, heads or 1, Tq or 1, Tk]` = the gradient of the scores, summed where it has size 1.
    AttentionGradMask {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        mask: Option<&'a Tensor>,
        sequences: Option<Sequences<'a>>,
        g: &'a Tensor,
        stats: &'a Tensor,
        delta: &'a Tensor,
        spec: AttentionSpec,
        dmask: &'a Tensor,
    },
    /// Symmetric absmax int8 by groups of `group` consecutive elements of the last dimension (the last group of a row
    /// may be short). The scale is the group's largest magnitude itself, which its dtype holds exactly, and a step is
    /// scale / 127: q = round-to-nearest-even((x / scale) 127) in [-127, 127] as bytes (u8 holding i8); with `rounding`,
    /// q = floor((x / scale) 127 + u) where u in [0, 1) is word i of the stream for element i in row-major order, so that
    /// q steps are x on average. Each operation is one in the scales' dtype: f32, and f64 for f64. A zero group has scale
    /// 0 and q 0. x f64, f32, bf16 or f16. A group with a NaN or infinity gets scale NaN (the engine looks for it) and
    /// q 0. rank 0 counts as one row of one element.
    Quantize { x: &'a Tensor, group: usize, rounding: Option<RandomStream>, q: &'a Tensor, scales: &'a Tensor },
    /// out = (q (1/127)) scale, in the original's dtype and shape: finite for every finite group, exact at the largest
    /// magnitude, and within half a step of x (and the rounding of out) from the subnormal numbers to the largest.
    Dequantize { q: &'a Tensor, scales: &'a Tensor, group: usize, out: &'a Tensor },
    /// out = uniform numbers in [0, 1): 24 random bits for f32, word i as in [`RandomStream`]; likewise 32 bits for f64, 11 for
    /// f16, 8 for bf16.
    Uniform { stream: RandomStream, out: &'a Tensor },
    /// out = normal numbers of mean 0 and standard deviation `std` (Box-Muller on words 2i, 2i+1 of the stream; f64 arithmetic).
    Normal { stream: RandomStream, std: f64, out: &'a Tensor },
    /// One AdamW step in place on p, m, v (Loshchilov and Hutter 2019), decoupled decay:
    /// p -= lr wd p; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
    /// g is multiplied by `grad_scale` first (gradient clipping). All have one shape; g may have any strides; the
    /// arithmetic is in the dtype that they are computed in, and what p, m and v hold is rounded to their own.
    AdamW {
        p: &'a Tensor,
        g: &'a Tensor,
        m: &'a Tensor,
        v: &'a Tensor,
        step: u64,
        config: AdamWConfig,
        grad_scale: f64,
    },
    /// out `[]` (f64) = sum of squares of x, accumulated in f64.
    SquaredNorm { x: &'a Tensor, out: &'a Tensor },
}

/// How many elements of a [`Kernel::ScatterAdd`]'s source are put in order before they are added: a number for each
/// combination of the dimensions in which an index differs or `out` repeats, and none where no two elements can meet.
pub fn meeting(source: &Tensor, indices: &[&Tensor], out: &Tensor) -> usize {
    let shape = source.shape();
    let fits = out.rank() == indices.len() + shape.len() && indices.iter().all(|i| i.rank() == shape.len());
    if !fits {
        return 0; // the kernel says what is wrong
    }
    let places = &out.layout().strides[indices.len()..];
    let meets = |d: usize| places[d] == 0;
    let differs = |d: usize| indices.iter().any(|i| i.layout().strides[d] != 0);
    let sized = || (0..shape.len()).filter(|&d| shape[d] != 1);
    if sized().filter(|&d| meets(d)).map(|d| shape[d]).product::<usize>() <= 1 {
        return 0;
    }
    sized().filter(|&d| meets(d) || differs(d)).map(|d| shape[d]).product()
}

/// Settings of [`Kernel::AdamW`].
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct AdamWConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    /// PyTorch's.
    fn default() -> AdamWConfig {
        AdamWConfig { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

impl Kernel<'_> {
    /// The kernel's name, for errors, traces and profiles.
    pub fn name(&self) -> &'static str {
        match self {
            Kernel::Fill { .. } => "fill",
            Kernel::Copy { .. } => "copy",
            Kernel::Unary { .. } => "unary",
            Kernel::UnaryGrad { .. } => "unary_grad",
            Kernel::Binary { .. } => "binary",
            Kernel::ExtremumGrad { .. } => "extremum_grad",
            Kernel::Select { .. } => "select",
            Kernel::Reduce { .. } => "reduce",
            Kernel::Ternary { .. } => "ternary",
            Kernel::ClampGrad { .. } => "clamp_grad",
            Kernel::ReduceGrad { .. } => "reduce_grad",
            Kernel::MaxIndex { .. } => "max_index",
            Kernel::MaxIndexGrad { .. } => "max_index_grad",
            Kernel::Scan { .. } => "scan",
            Kernel::CumprodGrad { .. } => "cumprod_grad",
            Kernel::LogSoftmax { .. } => "log_softmax",
            Kernel::LogSoftmaxGrad { .. } => "log_softmax_grad",
            Kernel::Matmul { .. } => "matmul",
            Kernel::Softmax { .. } => "softmax",
            Kernel::SoftmaxGrad { .. } => "softmax_grad",
            Kernel::Triangle { .. } => "triangle",
            Kernel::Flip { .. } => "flip",
            Kernel::Gather { .. } => "gather",
            Kernel::ScatterAdd { .. } => "scatter_add",
            Kernel::Dropout { .. } => "dropout",
            Kernel::LayerNorm { .. } => "layer_norm",
            Kernel::LayerNormGrad { .. } => "layer_norm_grad",
            Kernel::LayerNormParamGrad { .. } => "layer_norm_param_grad",
            Kernel::Embedding { .. } => "embedding",
            Kernel::EmbeddingGrad { .. } => "embedding_grad",
            Kernel::Loss { .. } => "loss",
            Kernel::LossGrad { .. } => "loss_grad",
            Kernel::CrossEntropy { .. } => "cross_entropy",
            Kernel::CrossEntropyGrad { .. } => "cross_entropy_grad",
            Kernel::NllLossGrad { .. } => "nll_loss_grad",
            Kernel::CrossEntropyTargetGrad { .. } => "cross_entropy_target_grad",
            Kernel::CrossEntropyWeightGrad { .. } => "cross_entropy_weight_grad",
            Kernel::Im2col { .. } => "im2col",
            Kernel::Col2im { .. } => "col2im",
            Kernel::MaxPool { .. } => "max_pool",
            Kernel::MaxPoolGrad { .. } => "max_pool_grad",
            Kernel::AvgPool { .. } => "avg_pool",
            Kernel::AvgPoolGrad { .. } => "avg_pool_grad",
            Kernel::Attention { .. } => "attention",
            Kernel::AttentionDelta { .. } => "attention_delta",
            Kernel::AttentionGradKv { .. } => "attention_grad_kv",
            Kernel::AttentionGradQ { .. } => "attention_grad_q",
            Kernel::AttentionGradMask { .. } => "attention_grad_mask",
            Kernel::Quantize { .. } => "quantize",
            Kernel::Dequantize { .. } => "dequantize",
            Kernel::Uniform { .. } => "uniform",
            Kernel::Normal { .. } => "normal",
            Kernel::AdamW { .. } => "adamw",
            Kernel::SquaredNorm { .. } => "squared_norm",
        }
    }
}

impl ReduceFn {
    /// The reduction whose result the gradient of this one reads. Of a logarithm of sums and of norms, whose own result
    /// may have lost what the gradient needs, or overflow, it is the number that they are taken relative to.
    pub const fn in_grad(self) -> ReduceFn {
        match self {
            ReduceFn::LogSumExp => ReduceFn::Max,
            ReduceFn::Norm { ord } if ord < 0.0 => ReduceFn::Norm { ord: f64::NEG_INFINITY },
            ReduceFn::Norm { .. } => ReduceFn::Norm { ord: f64::INFINITY },
            other => other,
        }
    }
}
