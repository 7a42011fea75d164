//! An op defined outside retape: squared ReLU (So et al., "Primer", 2021). Marks, the ledger, the dry run and the
//! gradient checker work on it as on any other. `cargo run --release --example custom_op`

use retape::check_gradients;
use retape::core::Result;
use retape::kernel::{self, BinaryFn, UnaryFn};
use retape::ops::{Backward, Cost, Exec, Op, OpRule, Output, Outputs, Sample, Saves, Slot, Spec, saves};
use retape::prelude::*;
use std::rc::Rc;

/// y = max(x, 0)^2; dy/dx = 2 max(x, 0).
#[derive(Debug, Clone, Copy)]
struct SquaredRelu;

impl OpRule for SquaredRelu {
    fn name(&self) -> &'static str {
        "squared_relu"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        match inputs {
            [x] if x.dtype.is_float() => Ok([Output::new(x.shape.clone(), x.dtype)].into_iter().collect()),
            _ => Err("takes one float input".into()),
        }
    }
    fn forward(&self, exec: &Exec<'_>, x: &[Tensor], out: &[Tensor]) -> Result<()> {
        exec.run(kernel::Unary { f: UnaryFn::Relu, x: &x[0], out: &out[0] })?;
        exec.run(kernel::Unary { f: UnaryFn::Square, x: &out[0], out: &out[0] })
    }
    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::In(0)])
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.empty(g.shape(), g.dtype())?;
        exec.run(kernel::Unary { f: UnaryFn::Relu, x: &cx.saved(Slot::In(0))?, out: &out })?;
        exec.run(kernel::Unary { f: UnaryFn::Scale(2.0), x: &out, out: &out })?;
        exec.run(kernel::Binary { f: BinaryFn::Mul, a: &out, b: &g, out: &out })?;
        cx.set(0, out);
        Ok(())
    }
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(2, inputs, outputs)
    }
    fn samples() -> Vec<Sample> {
        Vec::new() // of use only to the registry's own tests
    }
}

fn squared_relu(x: Var) -> Result<Var> {
    x.apply(Op::Custom(Rc::new(SquaredRelu)), [])
}

/// Bytes at the peak of a step on this device.
fn step(device: &Device) -> Result<u64> {
    let numbers: Vec<f32> = (0..64 * 32).map(|i| (i as f32 * 0.37).sin()).collect();
    let x = Tensor::from_slice(device, &[64, 32], &numbers)?;
    device.meter().reset_peak();
    let tape = Tape::new(device);
    let h = tape.leaf(&x)?.scale(0.5)?;
    let y = squared_relu(h)?.recompute()?;
    let loss = y.square()?.sum()?;
    println!("{}", tape.ledger()?);
    tape.backward(&loss)?;
    Ok(device.meter().step_peak())
}

fn main() -> Result<()> {
    let device = retape::cpu();
    let x = Tensor::from_slice(&device, &[5], &[-1.5, -0.5, 0.25, 1.0, 2.0])?;
    let check = check_gradients(&device, &[x], 1, |_, x| Ok(vec![squared_relu(x[0].clone())?]))?;
    println!("largest deviation from finite differences: {:.1e}", check.worst());
    assert!(check.worst() < 1e-7);
    let (dry, measured) = (step(&retape::meta())?, step(&device)?);
    println!("peak: {dry} bytes predicted, {measured} measured");
    assert_eq!(dry, measured);
    Ok(())
}
