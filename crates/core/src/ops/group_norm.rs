//! Group norm (Wu and He 2018) of x `[N, C, ..]`: the channels are cut into groups, and each group of each sample is
//! normalised over its channels and all further dimensions; then y = xhat weight + bias with one number a channel.
//!
//! With e = g weight this is layer norm without parameters on rows `[N, groups, rest]`, so
//! dx = rstd (e - mean(e) - xhat mean(e xhat)); dweight and dbias sum g xhat and g over samples and places. They are
//! the parameter gradients of layer norm on the view `[N, places, channels of a group]`, a group at a time, so
//! nothing of x's size is needed for them.

use super::*;
use crate::tape::Var;

/// y = group norm of x. Inputs: x, and `weight`, `bias` (each `[C]`) where flagged. Outputs: y, and the statistics mean
/// and rstd `[N, groups]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupNorm {
    /// How many groups.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
    /// Whether there is a weight.
    pub weight: bool,
    /// Whether there is a bias.
    pub bias: bool,
}

impl GroupNorm {
    fn bias_input(&self) -> usize {
        1 + self.weight as usize
    }

    /// x as `[N, groups, rest]`.
    fn grouped(&self, exec: &Exec<'_>, x: Tensor) -> Result<Tensor> {
        let shape = [x.shape()[0], self.groups, x.shape()[1..].iter().product::<usize>() / self.groups];
        exec.reshape(x, &shape)
    }

    /// One number a channel repeated over x's shape.
    fn per_channel(&self, parameter: &Tensor, shape: &[usize]) -> Result<Tensor> {
        let mut column: Shape = shape.iter().map(|_| 1).collect();
        column[1] = shape[1];
        let parameter = parameter.contiguous(MemoryKind::Workspace)?;
        parameter.view_as(&column)?.expect("a contiguous tensor can always be viewed with another shape").expand(shape)
    }
}

/// The samples that are normalised at a time: all, or one where values of 16 bits are put together in an f32 workspace.
fn pieces(x: &Tensor) -> impl Iterator<Item = (usize, usize)> + use<> {
    let samples = x.shape()[0];
    let n = if x.dtype().computed_in() == x.dtype() { samples.max(1) } else { 1 };
    (0..samples).step_by(n).map(move |from| (from, n))
}

impl OpRule for GroupNorm {
    fn name(&self) -> &'static str {
        "group_norm"
    }

    fn formula(&self) -> &'static str {
        "y = (x - mean) / sqrt(var + eps) weight + bias, by group of channels"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1 + self.weight as usize + self.bias as usize, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let x = &inputs[0].shape;
        if x.len() < 2 {
            return Err("needs x [N, C, ..], at least two dimensions".into());
        }
        if self.groups == 0 || x[1] == 0 || !x[1].is_multiple_of(self.groups) {
            return Err(format!("the {} channels can't be cut into {} equal groups", x[1], self.groups));
        }
        if x[2..].contains(&0) {
            return Err("a channel without elements has no mean".into());
        }
        if let Some(wrong) = inputs[1..].iter().find(|p| p.shape[..] != [x[1]]) {
            return Err(format!("weight and bias must be [{}], got {:?}", x[1], wrong.shape));
        }
        let statistic = || Output::statistic([x[0], self.groups].as_slice(), dtype.computed_in());
        Ok(smallvec![Output::new(x.clone(), dtype), statistic(), statistic()])
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        for (from, n) in pieces(&inputs[0]) {
            let of = |t: &Tensor| t.narrow(0, from, n);
            let (x, y, mean, rstd) = (of(&inputs[0])?, of(&outputs[0])?, of(&outputs[1])?, of(&outputs[2])?);
            let sum = exec.assemble(&y)?;
            exec.run(kernel::LayerNorm {
                x: &self.grouped(exec, x)?,
                weight: None,
                bias: None,
                eps: self.eps,
                out: &self.grouped(exec, sum.clone())?,
                mean: Some(&mean),
                rstd: &rstd,
            })?;
            for (flag, input, f) in [(self.weight, 1, BinaryFn::Mul), (self.bias, self.bias_input(), BinaryFn::Add)] {
                if flag {
                    let parameter = self.per_channel(&inputs[input], y.shape())?;
                    exec.run(kernel::Binary { f, a: &sum, b: &parameter, out: &sum })?;
                }
            }
            exec.put(&sum, &y)?;
        }
        Ok(())
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        let mut slots: SmallVec<[Slot; 4]> = SmallVec::new();
        // The bias's gradient alone reads nothing.
        if needs[0] || (self.weight && needs[1]) {
            slots.extend([Slot::In(0), Slot::Out(1), Slot::Out(2)]);
        }
        if needs[0] && self.weight {
            slots.push(Slot::In(1));
        }
        saves(slots)
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let by_channel: Shape = g.shape().iter().enumerate().map(|(d, &n)| if d == 1 { n } else { 1 }).collect();
        if self.bias && cx.needs(self.bias_input()) {
            let (exec, channels) = (cx.exec(self.bias_input()), g.shape()[1]);
            let sum = exec.sum_to(g.clone(), &by_channel)?;
            cx.set(self.bias_input(), exec.reshape(sum, &[channels])?);
        }
        let need_weight = self.weight && cx.needs(1);
        if !cx.needs(0) && !need_weight {
            return Ok(());
        }
        let (x, mean, rstd) = (cx.saved(Slot::In(0))?, cx.saved(Slot::Out(1))?, cx.saved(Slot::Out(2))?);
        if need_weight {
            let (exec, input) = (cx.exec(1), cx.input(1));
            let dweight = exec.empty_like(input)?;
            let (n, c) = (g.shape()[0], input.shape[0] / self.groups);
            let places = g.shape()[2..].iter().product();
            let rows = |t: &Tensor| exec.reshape(t.clone(), &[n, self.groups * c, places])?.transpose(1, 2);
            let (x, g) = (rows(&x)?, rows(&g)?);
            for group in 0..self.groups {
                let of_group = |t: &Tensor| t.narrow(2, group * c, c);
                let statistic = |t: &Tensor| t.narrow(1, group, 1)?.expand(&[n, places]);
                exec.run(kernel::LayerNormParamGrad {
                    x: &of_group(&x)?,
                    mean: Some(&statistic(&mean)?),
                    rstd: &statistic(&rstd)?,
                    g: &of_group(&g)?,
                    dweight: Some(&dweight.narrow(0, group * c, c)?),
                    dbias: None,
                })?;
            }
            cx.set(1, dweight);
        }
        if cx.needs(0) {
            let exec = cx.exec(0);
            let out = exec.replace(&g)?;
            let weight = if self.weight { Some(cx.saved(Slot::In(1))?) } else { None };
            for (from, n) in pieces(&x) {
                let of = |t: &Tensor| t.narrow(0, from, n);
                let (x, mut e, out, mean, rstd) = (of(&x)?, of(&g)?, of(&out)?, of(&mean)?, of(&rstd)?);
                if let Some(weight) = &weight {
                    let (weight, product) = (self.per_channel(weight, e.shape())?, exec.assemble(&out)?);
                    exec.run(kernel::Binary { f: BinaryFn::Mul, a: &e, b: &weight, out: &product })?;
                    e = product;
                }
                exec.run(kernel::LayerNormGrad {
                    x: &self.grouped(&exec, x)?,
                    weight: None,
                    mean: Some(&mean),
                    rstd: &rstd,
                    g: &self.grouped(&exec, e)?,
                    out: &self.grouped(&exec, out)?,
                })?;
            }
            cx.set(0, out);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(7, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let op = |groups| GroupNorm { groups, eps: 1e-5, weight: true, bias: true };
        let s = |name, groups, input: SampleInput| {
            let c = input.shape[1];
            Sample::smooth(name, op(groups), [input, x(20, &[c]), x(21, &[c])])
        };
        let far = |values: &[f64]| SampleInput::floats(&[1, 2, 2], values);
        vec![
            s("ordinary", 2, x(1, &[2, 6, 3])),
            s("one group", 1, x(2, &[3, 4])),
            s("rank 5", 2, x(3, &[2, 4, 1, 3, 2])),
            s("as many groups as channels", 3, x(4, &[2, 3, 5])),
            s("transposed", 2, x(5, &[2, 4, 6]).lying(Transposed)),
            s("narrowed", 2, x(6, &[2, 4, 6]).lying(Narrowed)),
            s("expanded", 2, x(7, &[2, 4, 6]).lying(Expanded)),
            s("no samples", 2, x(8, &[0, 4, 3])),
            Sample::smooth("plain", GroupNorm { weight: false, bias: false, ..op(2) }, [x(9, &[2, 4, 3])]),
            Sample::smooth("bias only", GroupNorm { weight: false, ..op(2) }, [x(9, &[2, 4, 3]), x(10, &[4])]),
            Sample::kink("large", op(1), [far(&[1e19, 5e18, -2e19, 3e19]), x(20, &[2]), x(21, &[2])]),
            Sample::kink(
                "tiny, eps 0",
                GroupNorm { eps: 0.0, ..op(1) },
                [far(&[1e-25, 3e-25, -2e-25, 0.0]), x(20, &[2]), x(21, &[2])],
            ),
            Sample::kink(
                "far from 0",
                op(1),
                [far(&[1e6, 1e6 + 1.0, 1e6 + 2.0, 1e6 + 2.0625]), x(20, &[2]), x(21, &[2])],
            ),
            Sample::kink("constant", op(1), [SampleInput::floats(&[1, 2, 2], &[3.0; 4]), x(20, &[2]), x(21, &[2])]),
        ]
    }
}

impl Var {
    /// Group norm of x `[N, C, ..]` with `weight` and `bias` `[C]`. Backward reads x, the mean and rstd, and the
    /// weight.
    pub fn group_norm(self, groups: usize, weight: Option<Var>, bias: Option<Var>, eps: f64) -> Result<Var> {
        let op = GroupNorm { groups, eps, weight: weight.is_some(), bias: bias.is_some() };
        self.apply(op, weight.into_iter().chain(bias))
    }
}
