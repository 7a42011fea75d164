//! Random graphs of a few values.

use crate::graphs::Dice;
use retape_core::{DType, Device, Result, Tape, Tensor, Trace, Var, meta};

/// A straight-line program of `ops` ops, the last of which is a sum. What nobody uses is gone, so it may have fewer
/// values.
pub struct SmallGraph {
    device: Device,
    ops: Vec<(usize, usize, usize)>,
    leaf: Tensor,
    weights: Vec<Tensor>,
}

impl SmallGraph {
    /// One with `values` values that marks can be given to.
    pub fn random(seed: u64, values: usize) -> SmallGraph {
        let some = (0..).map(|attempt| SmallGraph::of_ops(seed + 1_000_003 * attempt, values + attempt as usize % 3));
        let is_free = |v: &&retape_core::TraceValue| !v.exact;
        some.into_iter().find(|g| g.trace().values().iter().filter(is_free).count() == values).expect("one has")
    }

    fn of_ops(seed: u64, ops: usize) -> SmallGraph {
        let mut dice = Dice::new(seed ^ 0x5eed);
        let device = meta();
        let size = |dice: &mut Dice| [8, 16, 32, 64, 128, 256][dice.throw(6)];
        let rows = size(&mut dice);
        let zeros = |shape: &[usize]| Tensor::full(&device, shape, DType::F32, 0.0).unwrap();
        let leaf = zeros(&[rows, size(&mut dice)]);
        let ops: Vec<_> = (0..ops - 1).map(|_| (dice.throw(9), dice.throw(3), dice.throw(64))).collect();
        let columns: Vec<usize> = (0..ops.len()).map(|_| size(&mut dice)).collect();
        let mut weights = Vec::new();
        // A weight for each width that a product may meet.
        for from in [8, 16, 32, 64, 128, 256] {
            weights.extend(columns.iter().map(|&to| zeros(&[from, to])));
        }
        SmallGraph { device, ops, leaf, weights }
    }

    pub fn trace(&self) -> Trace {
        Trace::record(&self.device, None, |tape| self.forward(tape)).unwrap()
    }

    pub fn forward(&self, tape: &Tape) -> Result<Var> {
        let mut values = vec![tape.leaf(&self.leaf)?];
        for (at, &(op, near, any)) in self.ops.iter().enumerate() {
            // Mostly the last one, so that most values matter to the loss; at times an earlier one, which forks the
            // graph.
            let back = if any < 44 { 0 } else { near };
            let x = &values[values.len() - 1 - back.min(values.len() - 1)];
            let alike = values.iter().rev().filter(|v| v.shape() == x.shape());
            let other = alike.skip(1).nth(any % 3).unwrap_or(x);
            let y = match op {
                0 => x.clone().gelu()?,
                1 => x.clone().softmax()?,
                2 => x.clone().tanh()?,
                3 => x.clone().square()?,
                4 => x.clone().mul(other)?,
                5 => x.clone().add(other)?,
                6 => x.clone().layer_norm(None, None, 1e-5)?,
                _ => {
                    let width = x.shape()[1];
                    let of_width = self.weights.iter().filter(|w| w.shape()[0] == width);
                    let weight = of_width.clone().nth(at).expect("there is one of each width for each op");
                    x.clone().matmul(&tape.leaf(weight)?)?
                }
            };
            // An old handle goes now and then, as in a model; the others when forward ends.
            if any % 3 == 0 && values.len() > 3 {
                values.remove(1);
            }
            values.push(y);
        }
        values.pop().expect("there is the leaf").sum()
    }
}
