//! Tiled attention (Dao, "FlashAttention-2", 2023): o = softmax(scale q k^T + mask) v without ever holding the weights.
//!
//! Forward keeps o and two numbers of each row of scores S: m, the largest, and l = ln sum exp(S - m). Backward
//! recomputes each tile of weights P = exp((S - m) - l) and, with D = the row sums of g o (which equal those of P dP,
//! because o = P v): dv = P^T g; dP = g v^T; dS = P (dP - D); dq = scale dS k; dk = scale dS^T q. An additive mask
//! has the gradient of the scores, dS, summed where it was repeated; a bool mask hides where it is false. With
//! dropout (mask M, factor 1/(1-p)) P becomes M P / (1-p) in o and dv, and dP becomes M (g v^T) / (1-p); D stays.
//!
//! m + l in one number would lose l where scores are large (docs/architecture.md, "Row statistics").
//! m and l belong to the exact q and k, so these are read exactly: lossy formats are refused for them.

use super::*;
use crate::kernel::{AttentionInputs, AttentionSpec, Sequences};
use crate::tape::Var;
use std::rc::Rc;

/// o = attention(q, k, v), each `[batch, time, heads, head size]`; k and v may have fewer heads (grouped queries), v a
/// head size of its own. With `mask` a fourth input `[batch, heads, Tq, Tk]`, each 1 where it repeats: added to the
/// scores, or, of dtype bool, hiding where it is false. Outputs: o, and as a statistic `[batch, heads, Tq, 2]` the
/// largest score of each row and ln of the sum of exponentials relative to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Scale, causality, window, dropout.
    pub spec: AttentionSpec,
    /// Whether there is a mask.
    pub mask: bool,
    /// The sequences of a ragged batch, which lie one after the other in a batch of one.
    pub ragged: Option<Rc<Ragged>>,
}

/// Lengths of the sequences of a ragged batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ragged {
    queries: Vec<usize>,
    keys: Vec<usize>,
}

impl Ragged {
    /// From the number of queries and of keys of each sequence (0 is ordinary). None where the lists differ in length.
    pub fn new(queries: &[usize], keys: &[usize]) -> Option<Ragged> {
        let bounds = |lengths: &[usize]| {
            let mut end = 0usize;
            let next = |&n| {
                end = end.saturating_add(n);
                end
            };
            std::iter::once(0).chain(lengths.iter().map(next).collect::<Vec<_>>()).collect()
        };
        (queries.len() == keys.len()).then(|| Ragged { queries: bounds(queries), keys: bounds(keys) })
    }

    /// Bounds of the sequences.
    pub fn sequences(&self) -> Sequences<'_> {
        Sequences { queries: &self.queries, keys: &self.keys }
    }

    fn totals(&self) -> [usize; 2] {
        [&self.queries, &self.keys].map(|bounds| bounds[bounds.len() - 1])
    }

    /// Pairs of a query and a key of one sequence.
    fn pairs(&self) -> usize {
        let lengths = |bounds: &[usize], s: usize| bounds[s + 1] - bounds[s];
        let of = |s| lengths(&self.queries, s).saturating_mul(lengths(&self.keys, s));
        (0..self.queries.len() - 1).map(of).fold(0, usize::saturating_add)
    }
}

/// The mask repeated to all scores.
fn every_score(mask: &Tensor, q: &[usize], k: &[usize]) -> Result<Tensor> {
    mask.expand(&[q[0], q[2], q[1], k[1]])
}

impl OpRule for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn formula(&self) -> &'static str {
        "o = softmax(scale q k^T + mask) v"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(3 + self.mask as usize, inputs)?;
        let dtype = one_float_dtype(&inputs[..3])?;
        super::dropout::check_probability(self.spec.dropout)?;
        if !(self.spec.scale > 0.0 && self.spec.scale.is_finite()) {
            return Err(format!("the scale must be positive, got {}; 1/sqrt(head size) is usual", self.spec.scale));
        }
        let (q, k, v) = (&inputs[0].shape, &inputs[1].shape, &inputs[2].shape);
        if q.len() != 4 || k.len() != 4 || v.len() != 4 || v[..3] != k[..3] {
            return Err("needs q [batch, Tq, heads, size] and k, v that agree in [batch, Tk, kv heads, ..]".into());
        }
        if q[0] != k[0] || q[3] != k[3] {
            return Err("q and k must agree in batch (dimension 0) and head size (dimension 3)".into());
        }
        if (k[2] == 0 && q[2] != 0) || (k[2] != 0 && !q[2].is_multiple_of(k[2])) {
            return Err(format!("the {} query heads must be a multiple of the {} key heads", q[2], k[2]));
        }
        if let Some(ragged) = &self.ragged
            && (q[0] != 1 || ragged.totals() != [q[1], k[1]])
        {
            let [queries, keys] = ragged.totals();
            return Err(format!(
                "the sequences have {queries} queries and {keys} keys in all, and lie in a batch of one: q must be [1, \
                 {queries}, ..] and k [1, {keys}, ..]"
            ));
        }
        if self.spec.window.is_some() && !self.spec.causal {
            return Err("a window of keys goes back from the query's own place: it needs `causal`".into());
        }
        if let Some(mask) = inputs.get(3) {
            let scores = [q[0], q[2], q[1], k[1]];
            let fits = mask.shape.len() == 4 && mask.shape.iter().zip(scores).all(|(&m, s)| m == s || m == 1);
            if !fits || (mask.dtype != dtype && mask.dtype != DType::Bool) {
                return Err(format!("the mask must be {dtype} or bool, and each of its sizes that of {scores:?} or 1"));
            }
        }
        let out = [q[0], q[1], q[2], v[3]];
        let stats = Output::statistic([q[0], q[2], q[1], 2].as_slice(), dtype.computed_in());
        Ok(smallvec![Output::new(out.as_slice(), dtype), stats])
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        let mask = inputs.get(3).map(|m| every_score(m, q.shape(), k.shape())).transpose()?;
        let mask = mask.as_ref();
        let sequences = self.ragged.as_ref().map(|ragged| ragged.sequences());
        let inputs = AttentionInputs { q, k, v, mask, sequences, spec: self.spec };
        exec.run(kernel::Attention { inputs, out: &outputs[0], stats: &outputs[1] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        let save = |slot, exact| Save { slot, exact };
        let mut saves = smallvec![
            save(Slot::In(0), true),
            save(Slot::In(1), true),
            save(Slot::In(2), false),
            save(Slot::Out(0), false),
            save(Slot::Out(1), true),
        ];
        saves.extend(self.mask.then(|| save(Slot::In(3), true)));
        saves
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let stats = cx.saved(Slot::Out(1))?;
        let delta = cx.exec(0).workspace(&stats.shape()[..3], stats.dtype())?;
        let o = cx.saved(Slot::Out(0))?;
        cx.exec(0).run(kernel::AttentionDelta { o: &o, g: &g, delta: &delta })?;
        drop(o);
        let (q, k, v) = (&cx.saved(Slot::In(0))?, &cx.saved(Slot::In(1))?, &cx.saved(Slot::In(2))?);
        let mask = if self.mask { Some(every_score(&cx.saved(Slot::In(3))?, q.shape(), k.shape())?) } else { None };
        let sequences = self.ragged.as_ref().map(|ragged| ragged.sequences());
        let forward = AttentionInputs { q, k, v, mask: mask.as_ref(), sequences, spec: self.spec };
        let inputs = kernel::AttentionGradInputs { forward, g: &g, stats: &stats, delta: &delta };
        if self.mask && cx.needs(3) {
            let (exec, of_mask) = (cx.exec(3), cx.input(3));
            // The kernel sums over all that the mask repeats but the keys.
            let rows = &of_mask.shape[..3];
            let dmask = exec.terms(&Spec::new([rows, &[k.shape()[1]]].concat(), q.dtype()), of_mask)?;
            exec.run(kernel::AttentionGradMask { inputs, dmask: &dmask })?;
            cx.set(3, exec.sum_terms(dmask, of_mask)?);
        }
        if cx.needs(1) || cx.needs(2) {
            let dk = cx.exec(1).empty_like(cx.input(1))?;
            let dv = cx.exec(2).empty_like(cx.input(2))?;
            cx.exec(1).run(kernel::AttentionGradKv { inputs, dk: &dk, dv: &dv })?;
            for (input, grad) in [(1, dk), (2, dv)] {
                if cx.needs(input) {
                    cx.set(input, grad);
                }
            }
        }
        if cx.needs(0) {
            let dq = cx.exec(0).empty_like(cx.input(0))?;
            cx.exec(0).run(kernel::AttentionGradQ { inputs, dq: &dq })?;
            cx.set(0, dq);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        // Two products of Tq x Tk x size per head, counted dense (a causal kernel does about half).
        let (q, k, v) = (&inputs[0].shape, &inputs[1].shape, &inputs[2].shape);
        let pairs = self.ragged.as_ref().map_or_else(|| q[0].saturating_mul(q[1]).saturating_mul(k[1]), |r| r.pairs());
        Cost {
            flops: Cost::times(&[2, pairs, q[2], q[3].saturating_add(v[3])]),
            traffic: Cost::touched(inputs, outputs),
        }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let stream = RandomStream { seed: 7, counter: 2 };
        let spec = |causal, dropout| Attention {
            spec: AttentionSpec { scale: 0.5, causal, window: None, dropout, stream },
            mask: false,
            ragged: None,
        };
        let ragged = |name, causal, dropout, queries: &[usize], keys: &[usize]| {
            let ragged = Ragged::new(queries, keys).map(Rc::new);
            let [tq, tk] = [queries, keys].map(|lengths| lengths.iter().sum::<usize>());
            let op = Attention { ragged, ..spec(causal, dropout) };
            Sample::smooth(name, op, [x(1, &[1, tq, 2, 3]), x(2, &[1, tk, 1, 3]), x(3, &[1, tk, 1, 3])])
        };
        let masked = |name, causal, mask: SampleInput| {
            let op = Attention { mask: true, ..spec(causal, 0.0) };
            Sample::smooth(name, op, [x(1, &[2, 4, 2, 3]), x(2, &[2, 5, 2, 3]), x(3, &[2, 5, 2, 3]), mask])
        };
        let window = |name, window, t: usize| {
            let mut op = spec(true, 0.0);
            op.spec.window = Some(window);
            Sample::smooth(name, op, [x(1, &[1, t, 1, 2]), x(2, &[1, t + 3, 1, 2]), x(3, &[1, t + 3, 1, 2])])
        };
        // Small integers times a factor: scores are exact, so that large ones are the same in all dtypes, some equal.
        let steps = |seed: u64, shape: &[usize], factor: f64| {
            let stream = RandomStream { seed, counter: 0 };
            let value = |i: usize| (f64::from(stream.word(i as u64) % 5) - 2.0) * factor;
            SampleInput::floats(shape, &(0..shape.iter().product()).map(value).collect::<Vec<_>>())
        };
        let large = |name, kv_heads: usize, factors: [f64; 2]| {
            let (q, k) = ([1, 6, 2, 3], [1, 6, kv_heads, 3]);
            Sample::kink(name, spec(true, 0.0), [steps(1, &q, factors[0]), steps(2, &k, factors[1]), x(3, &k)])
        };
        // Each row of the mask in turn: all of it, every other key, nothing.
        let saturated = |name, causal, hidden: f64, factors: [f64; 2]| {
            let value = |i: usize| match i / 5 % 3 {
                0 => hidden,
                1 if i.is_multiple_of(2) => hidden,
                _ => 0.0,
            };
            let mask = SampleInput::floats(&[1, 2, 4, 5], &(0..40).map(value).collect::<Vec<_>>());
            let (q, k) = ([2, 4, 2, 3], [2, 5, 2, 3]);
            let op = Attention { mask: true, ..spec(causal, 0.0) };
            Sample::kink(name, op, [steps(1, &q, factors[0]), steps(2, &k, factors[1]), x(3, &k), mask])
        };
        let hiding = |shape: &[usize]| {
            let len = shape.iter().product::<usize>();
            SampleInput::new(shape, SampleValues::Bools((0..len).map(|i| i % 5 > 1 && i % 7 > 0).collect()))
        };
        let s = |name, causal, p, q: [usize; 4], k: [usize; 4]| {
            Sample::smooth(name, spec(causal, p), [x(1, &q), x(2, &k), x(3, &k)])
        };
        vec![
            s("ordinary", false, 0.0, [2, 5, 2, 4], [2, 5, 2, 4]),
            s("causal", true, 0.0, [1, 6, 2, 3], [1, 6, 2, 3]),
            s("dropout", true, 0.3, [1, 5, 2, 3], [1, 5, 2, 3]),
            s("more keys", true, 0.0, [1, 3, 2, 4], [1, 5, 2, 4]),
            s("rows that see nothing", true, 0.0, [1, 5, 1, 4], [1, 3, 1, 4]),
            s("grouped queries", true, 0.0, [1, 4, 4, 3], [1, 4, 2, 3]),
            s("across tiles", true, 0.0, [1, 70, 1, 2], [1, 70, 1, 2]),
            Sample::smooth(
                "another size of values",
                spec(true, 0.0),
                [x(1, &[2, 4, 2, 3]), x(2, &[2, 4, 1, 3]), x(3, &[2, 4, 1, 5])],
            ),
            masked("additive mask", false, x(4, &[2, 2, 4, 5])),
            masked("additive mask, causal", true, x(4, &[1, 1, 4, 5])),
            masked("mask of the heads", false, x(5, &[1, 2, 4, 5])),
            masked("mask of the keys", false, x(6, &[2, 1, 1, 5])),
            // A number added to all scores of a query changes nothing: the gradient is rounding.
            Sample { smooth: false, ..masked("mask of the queries", false, x(7, &[1, 1, 4, 1])) },
            masked("strided mask", false, x(8, &[2, 2, 4, 5]).lying(Transposed)),
            masked("bool mask", false, hiding(&[1, 1, 4, 5])),
            masked(
                "bool mask that hides all",
                false,
                SampleInput::new(&[1, 1, 1, 1], SampleValues::Bools(vec![false])),
            ),
            large("scores of 1e4", 2, [64.0, 32.0]),
            large("scores of 5e8", 1, [8192.0, 16384.0]),
            saturated("mask of -1e4", false, -1e4, [1.0, 0.25]),
            saturated("mask of -1e5", false, -1e5, [1.0, 0.25]),
            saturated("mask of -1e9", false, -1e9, [16.0, 8.0]),
            saturated("mask of -1e9, causal", true, -1e9, [16.0, 8.0]),
            saturated("mask of the least number", false, f32::MIN.into(), [1.0, 0.25]),
            saturated("mask of -inf", false, f64::NEG_INFINITY, [1.0, 0.25]),
            window("window", 2, 5),
            window("window of one", 1, 5),
            window("window of none", 0, 5),
            window("window of all keys", 8, 5),
            window("window of more than there can be", usize::MAX, 5),
            window("window across tiles", 70, 300),
            ragged("ragged", false, 0.0, &[3, 1, 4], &[2, 3, 4]),
            ragged("ragged, causal, dropout", true, 0.3, &[3, 5, 1], &[3, 5, 1]),
            ragged("ragged, empty sequences, rows that see nothing", true, 0.0, &[0, 3, 2, 0], &[2, 0, 1, 0]),
            ragged("ragged across tiles", true, 0.0, &[70, 3, 80], &[70, 3, 300]),
            ragged("no sequences", false, 0.0, &[], &[]),
            s("one", false, 0.0, [1, 1, 1, 1], [1, 1, 1, 1]),
            s("no queries", false, 0.0, [1, 0, 2, 4], [1, 3, 2, 4]),
            s("no keys", false, 0.0, [1, 3, 2, 4], [1, 0, 2, 4]),
            Sample::smooth(
                "strided",
                spec(true, 0.0),
                [
                    x(1, &[1, 4, 4, 4]).lying(Transposed),
                    x(2, &[1, 4, 4, 4]).lying(Narrowed),
                    x(3, &[1, 4, 4, 4]).lying(Transposed),
                ],
            ),
        ]
    }
}

use crate::kernel::RandomStream;

/// Attributes of [`Var::scaled_dot_product_attention`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AttentionOptions {
    /// Factor on the scores; 1/sqrt(head size) if absent.
    pub scale: Option<f64>,
    /// Whether a query sees only keys up to its own place.
    pub causal: bool,
    /// How many of these keys a query sees, with `causal`: the last ones. A window that isn't smaller than the number
    /// of keys has no effect; with 0 no query sees anything, and the output is 0.
    pub window: Option<usize>,
    /// Probability of dropping an attention weight; above 0 it takes the tape's next random counter.
    pub dropout: f64,
    /// Whether k and v may have fewer heads than q, each serving a run of query heads.
    pub grouped: bool,
}

impl AttentionOptions {
    fn spec(self, head_size: usize) -> AttentionSpec {
        AttentionSpec {
            scale: self.scale.unwrap_or(1.0 / (head_size as f64).sqrt()),
            causal: self.causal,
            window: self.window,
            dropout: self.dropout,
            stream: NO_STREAM,
        }
    }
}

/// What attention without dropout draws from.
pub(super) const NO_STREAM: RandomStream = RandomStream { seed: 0, counter: 0 };

impl Var {
    /// Attention to `others` (k, v and perhaps a mask), with the tape's next stream where it drops.
    fn attend(self, spec: AttentionSpec, ragged: Option<Ragged>, others: SmallVec<[Var; 3]>) -> Result<Var> {
        let (mask, ragged) = (others.len() > 2, ragged.map(Rc::new));
        if spec.dropout > 0.0 {
            self.apply_random(|stream| Attention { spec: AttentionSpec { stream, ..spec }, mask, ragged }, others)
        } else {
            self.apply(Attention { spec, mask, ragged }, others)
        }
    }

    /// Attention within each sequence of a ragged batch, whose sequences lie one after the other without padding: q
    /// (`self`) `[all queries, heads, size]`, k and v `[all keys, kv heads, size]` -> q's shape. `queries` and `keys`
    /// are the lengths of the sequences, 0 among them. Nothing is computed between sequences; causality is aligned at
    /// each one's end. Of the options, `grouped` is ignored: k and v may have fewer heads than q.
    ///
    /// # Errors
    /// [`Error::InvalidInput`](crate::Error::InvalidInput) where the lengths don't add up to the tensors' sizes, or
    /// the shapes don't fit together.
    pub fn attention_ragged(
        self,
        k: impl Into<Var>,
        v: impl Into<Var>,
        queries: &[usize],
        keys: &[usize],
        options: AttentionOptions,
    ) -> Result<Var> {
        const OP: &str = "attention_ragged";
        super::dropout::check_probability(options.dropout).map_err(|reason| self.invalid(OP, reason))?;
        let Some(ragged) = Ragged::new(queries, keys) else {
            let reason = format!("there are {} lengths of queries and {} of keys", queries.len(), keys.len());
            return Err(self.invalid(OP, reason));
        };
        let (k, v, shape) = (k.into(), v.into(), self.shape());
        if [&shape, &k.shape(), &v.shape()].iter().any(|shape| shape.len() != 3) {
            return Err(self.invalid(OP, format!("needs q, k and v [time, heads, size], got q {shape:?}")));
        }
        let spec = options.spec(shape[2]);
        let [q, k, v] = [self, k, v].map(|x| x.unsqueeze(0));
        let o = q?.attend(spec, Some(ragged), smallvec![k?, v?])?;
        let shape = o.shape();
        o.reshape(&shape[1..])
    }

    /// Tiled attention of queries (`self`) to `k` and `v`, all `[batch, time, heads, head size]` -> q's shape.
    /// `scale` is usually 1/sqrt(head size); causal alignment is bottom-right; k and v may have fewer heads, each
    /// serving a run of query heads. Backward reads q and k (exactly), v, the output and two numbers a row. With
    /// `dropout > 0` it takes the tape's next random counter.
    pub fn attention(
        self,
        k: impl Into<Var>,
        v: impl Into<Var>,
        scale: f64,
        causal: bool,
        dropout: f64,
    ) -> Result<Var> {
        super::dropout::check_probability(dropout).map_err(|reason| self.invalid("attention", reason))?;
        let spec = AttentionSpec { scale, causal, window: None, dropout, stream: NO_STREAM };
        self.attend(spec, None, smallvec![k.into(), v.into()])
    }

    /// PyTorch's `scaled_dot_product_attention` by tiled attention: q (`self`) `[.., heads, Tq, size]`, k `[..,
    /// heads, Tk, size]`, v `[.., heads, Tk, any size]`, leading dimensions broadcast. The mask broadcasts to `[..,
    /// heads, Tq, Tk]`; it is added to the scores, or, if bool, hides where it is false. Causal alignment is
    /// bottom-right (PyTorch's is top-left where Tq and Tk differ).
    pub fn scaled_dot_product_attention(
        self,
        k: impl Into<Var>,
        v: impl Into<Var>,
        mask: Option<Var>,
        options: AttentionOptions,
    ) -> Result<Var> {
        const OP: &str = "scaled_dot_product_attention";
        let wrong = |reason: String| Err(self.invalid(OP, reason));
        if let Err(reason) = super::dropout::check_probability(options.dropout) {
            return wrong(reason);
        }
        let (k, v) = (k.into(), v.into());
        let shapes = [self.shape(), k.shape(), v.shape()];
        if let Some(shape) = shapes.iter().find(|s| s.len() < 2) {
            return wrong(format!("needs q, k and v [.., T, size], got {shape:?}"));
        }
        // Without a dimension of heads there is one head; with grouped queries heads don't broadcast.
        let lead = |s: &Shape| Shape::from_slice(&s[..s.len() - 2]);
        let mut leads = shapes.each_ref().map(lead);
        let mut heads = [1; 3];
        if options.grouped {
            if leads.iter().any(|l| l.is_empty()) {
                return wrong("grouped queries need a dimension of heads".into());
            }
            heads = leads.each_mut().map(|l| l.pop().expect("not empty"));
        }
        let broadcast = |a, b: &Shape| Option::and_then(a, |a: Shape| crate::layout::broadcast_shapes(&a, b));
        let Some(mut batch) = leads.iter().fold(Some(Shape::new()), broadcast) else {
            return wrong(format!("the leading dimensions of q, k and v don't broadcast: {leads:?}"));
        };
        let out_lead: Shape =
            if options.grouped { batch.iter().copied().chain([heads[0]]).collect() } else { batch.clone() };
        if !options.grouped {
            let shared = batch.pop().unwrap_or(1);
            heads = [shared; 3];
        }
        let samples = crate::layout::element_count(&batch)?;
        let four = |x: Var, i: usize| -> Result<Var> {
            let (t, size) = (shapes[i][shapes[i].len() - 2], shapes[i][shapes[i].len() - 1]);
            let full = [&batch[..], &heads[i..][..out_lead.len() - batch.len()], &[t, size]];
            x.expand(&full.concat())?.reshape(&[samples, heads[i], t, size])?.transpose(1, 2)
        };
        let mask = match mask {
            None => None,
            Some(mask) => {
                let (shape, rank) = (mask.shape(), out_lead.len() + 2);
                if shape.len() > rank {
                    return wrong(format!("the mask {shape:?} has more dimensions than the scores"));
                }
                let mut full: Shape = smallvec![1; rank.max(4)];
                let at = full.len() - shape.len();
                full[at..].copy_from_slice(&shape);
                let cut = full.len() - 3;
                let mut mask = mask.reshape(&full)?;
                if full[..cut].iter().any(|&n| n != 1) && cut > 1 {
                    full[..cut].copy_from_slice(&batch);
                    mask = mask.expand(&full)?;
                }
                let samples = full[..cut].iter().product();
                Some(mask.reshape(&[&[samples], &full[cut..]].concat())?)
            }
        };
        let size = shapes[0][shapes[0].len() - 1];
        let spec = options.spec(size);
        let (q, k, v) = (four(self, 0)?, four(k, 1)?, four(v, 2)?);
        let o = q.attend(spec, None, [k, v].into_iter().chain(mask).collect())?;
        let (t, size) = (o.shape()[1], o.shape()[3]);
        o.transpose(1, 2)?.reshape(&[&out_lead[..], &[t, size]].concat())
    }
}
