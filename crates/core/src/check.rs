//! A gradient checker: backward against finite differences, in f64.

use crate::kernel::RandomStream;
use crate::tape::{Tape, TapeOptions, Var};
use crate::{DType, Device, MemoryKind, Result, Tensor};

/// What [`check_gradients`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientCheck {
    /// For each input, the largest deviation between backward and finite differences over the directions, relative to
    /// the larger of the two derivatives and of 1e-3 times the sum of magnitudes that went into them (so that a
    /// derivative that cancels to nearly 0 isn't asked for more digits than there are).
    pub deviations: Vec<f64>,
}

impl GradientCheck {
    /// The largest deviation of all inputs; NaN counts as infinite.
    pub fn worst(&self) -> f64 {
        self.deviations.iter().fold(0.0, |w, &d| if d.is_nan() { f64::INFINITY } else { w.max(d) })
    }
}

/// Compares the gradients of `f` with fourth-order central differences, for each f64 input by itself, in random
/// directions and under a random cotangent. `f` builds its outputs from a leaf per input (inputs of other dtypes are
/// constants) and must be a pure function of them; every output is tested together.
///
/// A right rule deviates by less than 1e-7 at smooth points; a wrong one by 1e-2 and more.
///
/// # Errors
/// Whatever `f` and backward return. Needs a device that computes.
pub fn check_gradients(
    device: &Device,
    inputs: &[Tensor],
    seed: u64,
    f: impl Fn(&Tape, &[Var]) -> Result<Vec<Var>>,
) -> Result<GradientCheck> {
    const DIRECTIONS: u64 = 3;
    const STEP: f64 = 1e-4;
    let is_checked = |t: &Tensor| t.dtype() == DType::F64;
    let run = |inputs: &[Tensor]| -> Result<(Tape, Vec<Var>, Vec<Var>)> {
        let tape = Tape::with(device, TapeOptions { seed: Some(seed), ..TapeOptions::default() });
        let leaf = |t: &Tensor| if is_checked(t) { tape.leaf(t) } else { tape.constant(t) };
        let leaves: Vec<Var> = inputs.iter().map(leaf).collect::<Result<_>>()?;
        let outputs = f(&tape, &leaves)?;
        Ok((tape, leaves, outputs))
    };

    let (tape, leaves, outputs) = run(inputs)?;
    let cotangents: Vec<Vec<f64>> =
        outputs.iter().enumerate().map(|(i, y)| uniform(seed, 1000 + i as u64, y.shape().iter().product())).collect();
    let mut seeds = Vec::new();
    for (y, c) in outputs.iter().zip(&cotangents).filter(|(y, _)| y.requires_grad()) {
        seeds.push((y, Tensor::from_slice(device, &y.shape(), c)?.cast(y.dtype(), MemoryKind::Input)?));
    }
    let pairs: Vec<(&Var, &Tensor)> = seeds.iter().map(|(y, g)| (*y, g)).collect();
    let gradients = if pairs.is_empty() {
        Default::default()
    } else {
        tape.backward_from(&pairs, crate::BackwardOptions::default())?
    };

    // <cotangent, outputs> at the inputs moved by `distance` along `direction` of input `moved`.
    let value = |moved: usize, direction: &[f64], distance: f64| -> Result<f64> {
        let mut inputs = inputs.to_vec();
        let values = inputs[moved].to_vec::<f64>()?;
        let values: Vec<f64> = values.iter().zip(direction).map(|(x, d)| x + distance * d).collect();
        inputs[moved] = Tensor::from_slice(device, inputs[moved].shape(), &values)?;
        let (_tape, _leaves, outputs) = run(&inputs)?;
        let mut sum = 0.0;
        for (y, c) in outputs.iter().zip(&cotangents) {
            sum += y.tensor()?.to_f64_vec()?.iter().zip(c).map(|(y, c)| y * c).sum::<f64>();
        }
        Ok(sum)
    };

    let mut deviations = Vec::new();
    for (moved, input) in inputs.iter().enumerate() {
        let mut worst: f64 = 0.0;
        if is_checked(input) && !input.is_empty() {
            let gradient = match gradients.of(&leaves[moved]) {
                Some(g) => g.to_vec::<f64>()?,
                None => vec![0.0; input.len()],
            };
            for d in 0..DIRECTIONS {
                let direction = uniform(seed, 10 * moved as u64 + d, input.len());
                let at = |k: f64| value(moved, &direction, k * STEP);
                let numeric = (8.0 * (at(1.0)? - at(-1.0)?) - (at(2.0)? - at(-2.0)?)) / (12.0 * STEP);
                let terms = || gradient.iter().zip(&direction).map(|(g, d)| g * d);
                let (analytic, magnitude): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                let scale = analytic.abs().max(numeric.abs()).max(1e-3 * magnitude).max(1e-6);
                let deviation = (analytic - numeric).abs() / scale;
                worst = if deviation.is_nan() { f64::INFINITY } else { worst.max(deviation) };
            }
        }
        deviations.push(worst);
    }
    Ok(GradientCheck { deviations })
}

/// Numbers in [-1, 1), away from 0 so that every element counts.
fn uniform(seed: u64, counter: u64, len: usize) -> Vec<f64> {
    let stream = RandomStream { seed, counter };
    let number = |i| {
        let u = stream.word(i as u64) as f64 / 4_294_967_296.0;
        if u < 0.5 { -0.25 - 1.5 * u } else { 0.25 + 1.5 * (u - 0.5) }
    };
    (0..len).map(number).collect()
}
