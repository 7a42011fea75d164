//! Dropout (Srivastava et al. 2014), inverted: y = m x / (1 - p) with m in {0, 1}, P(m = 0) = p; dx = m g / (1 - p).
//! The mask is a pure function of (seed, counter, index), see [`crate::rng`]: backward and a replay draw it again, so
//! nothing is saved and a replay drops the same elements.

use super::attention::NO_STREAM;
use super::*;
use crate::kernel::RandomStream;
use crate::tape::Var;

/// y = x with each element dropped with probability `p`, the others divided by 1 - p.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability of dropping.
    pub p: f64,
    /// Where the mask comes from.
    pub stream: RandomStream,
}

/// Fails unless p is a probability that leaves something.
pub(crate) fn check_probability(p: f64) -> Result<(), String> {
    if (0.0..1.0).contains(&p) { Ok(()) } else { Err(format!("the probability must be in [0, 1), got {p}")) }
}

impl OpRule for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn formula(&self) -> &'static str {
        "y = m x / (1 - p), P(m = 0) = p"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        one_float_dtype(inputs)?;
        check_probability(self.p)?;
        Ok(one(inputs[0].clone()))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Dropout { x: &inputs[0], p: self.p, stream: self.stream, out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.replace(&g)?;
        exec.run(kernel::Dropout { x: &g, p: self.p, stream: self.stream, out: &out })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(1, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        let stream = RandomStream { seed: 5, counter: 3 };
        let mut samples =
            Sample::of_one_input(Dropout { p: 0.3, stream }, |seed| SampleValues::Random { seed, range: 1.0 });
        samples.push(Sample::smooth("p = 0", Dropout { p: 0.0, stream }, [SampleInput::random(9, &[3, 5])]));
        samples
    }
}

impl Var {
    /// Drops each element with probability `p` and divides the others by 1 - p. With `p` above 0 it takes the tape's
    /// next random counter. Backward reads nothing.
    ///
    /// # Errors
    /// [`Error::Unseeded`](crate::Error::Unseeded) where the tape has no seed and `p` isn't 0.
    pub fn dropout(self, p: f64) -> Result<Var> {
        check_probability(p).map_err(|reason| self.invalid("dropout", reason))?;
        if p == 0.0 {
            return self.apply(Dropout { p, stream: NO_STREAM }, []);
        }
        self.apply_random(|stream| Dropout { p, stream }, [])
    }
}
