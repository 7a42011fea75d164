//! Tiled attention (Dao, "FlashAttention-2", 2023): o = softmax(scale q k^T + mask) v without ever holding the weights.
//!
//! Forward keeps o and the log-sum-exp of each row's scores, L. Backward recomputes each tile of weights
//! P = exp(scale q k^T - L) and, with D = the row sums of g o (which equal the row sums of P dP, because o = P v):
//! dv = P^T g; dP = g v^T; dS = P (dP - D); dq = scale dS k; dk = scale dS^T q.
//! With dropout (mask M, factor 1/(1-p)) P becomes M P / (1-p) in o and dv, and dP becomes M (g v^T) / (1-p); D stays.
//!
//! L belongs to the exact q and k, so these are read exactly: int8 is refused for them.

use super::*;
use crate::kernel::AttentionSpec;
use crate::tape::Var;

/// o = attention(q, k, v), each `[batch, time, heads, head size]`; k and v may have fewer heads (grouped queries).
/// Outputs: o with q's shape, and the log-sum-exp `[batch, heads, Tq]` as a statistic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention(pub AttentionSpec);

impl Rule for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(3, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        super::dropout::check_probability(self.0.dropout)?;
        if !(self.0.scale > 0.0 && self.0.scale.is_finite()) {
            return Err(format!("the scale must be positive, got {}; 1/sqrt(head size) is usual", self.0.scale));
        }
        let (q, k, v) = (&inputs[0].shape, &inputs[1].shape, &inputs[2].shape);
        if q.len() != 4 || k.len() != 4 || v != k {
            return Err("needs q [batch, Tq, heads, size] and k, v of one shape [batch, Tk, kv heads, size]".into());
        }
        if q[0] != k[0] || q[3] != k[3] {
            return Err("q and k must agree in batch (dimension 0) and head size (dimension 3)".into());
        }
        if (k[2] == 0 && q[2] != 0) || (k[2] != 0 && q[2] % k[2] != 0) {
            return Err(format!("the {} query heads must be a multiple of the {} key heads", q[2], k[2]));
        }
        Ok(smallvec![Output::new(q.clone(), dtype), Output::statistic([q[0], q[2], q[1]].as_slice(), dtype)])
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        exec.run(Kernel::Attention { q, k, v, spec: self.0, out: &outputs[0], lse: &outputs[1] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        let save = |slot, exact| Save { slot, exact };
        smallvec![
            save(Slot::In(0), true),
            save(Slot::In(1), true),
            save(Slot::In(2), false),
            save(Slot::Out(0), false),
            save(Slot::Out(1), true),
        ]
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let lse = cx.saved(Slot::Out(1))?;
        let delta = cx.exec(0).workspace(lse.shape(), lse.dtype())?;
        let o = cx.saved(Slot::Out(0))?;
        cx.exec(0).run(Kernel::AttentionDelta { o: &o, g: &g, delta: &delta })?;
        drop(o);
        let (q, k, v) = (cx.saved(Slot::In(0))?, cx.saved(Slot::In(1))?, cx.saved(Slot::In(2))?);
        let (lse, delta, spec) = (&lse, &delta, self.0);
        if cx.needs(1) || cx.needs(2) {
            let dk = cx.exec(1).empty_like(cx.input(1))?;
            let dv = cx.exec(2).empty_like(cx.input(2))?;
            let kernel = Kernel::AttentionGradKv { q: &q, k: &k, v: &v, g: &g, lse, delta, spec, dk: &dk, dv: &dv };
            cx.exec(1).run(kernel)?;
            for (input, grad) in [(1, dk), (2, dv)] {
                if cx.needs(input) {
                    cx.set(input, grad);
                }
            }
        }
        if cx.needs(0) {
            let dq = cx.exec(0).empty_like(cx.input(0))?;
            cx.exec(0).run(Kernel::AttentionGradQ { q: &q, k: &k, v: &v, g: &g, lse, delta, spec, dq: &dq })?;
            cx.set(0, dq);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        // Two products of Tq x Tk x size per head, counted dense (a causal kernel does about half).
        let (q, k) = (&inputs[0].shape, &inputs[1].shape);
        Cost { flops: 4 * (q.iter().product::<usize>() * k[1]) as u64, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let stream = RandomStream { seed: 7, counter: 2 };
        let spec = |causal, dropout| Attention(AttentionSpec { scale: 0.5, causal, dropout, stream });
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

impl Var {
    /// Tiled attention of queries (`self`) to `k` and `v`, all `[batch, time, heads, head size]` -> q's shape.
    /// `scale` is usually 1/sqrt(head size); causal alignment is bottom-right; k and v may have fewer heads, each
    /// serving a run of query heads. Backward reads q and k (exactly), v, the output and the log-sum-exp. With
    /// `dropout > 0` it takes the tape's next random counter.
    pub fn attention(&self, k: &Var, v: &Var, scale: f64, causal: bool, dropout: f64) -> Result<Var> {
        super::dropout::check_probability(dropout).map_err(|reason| self.invalid("attention", reason))?;
        let stream = if dropout > 0.0 { self.tape().next_stream() } else { RandomStream { seed: 0, counter: 0 } };
        self.apply(Attention(AttentionSpec { scale, causal, dropout, stream }), &[k, v])
    }
}
