//! A model of your own, trained, with two marks. `cargo run --release --example own_model`

use retape::prelude::*;

struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn new(builder: &Builder) -> Result<Mlp, retape::Error> {
        let up = Linear::new(&builder.pp("up"), 1, 256, true, Init::Normal { std: 1.0 })?;
        let down = Linear::new(&builder.pp("down"), 256, 1, true, Init::Normal { std: 0.05 })?;
        Ok(Mlp { up, down })
    }

    fn forward(&self, x: Var) -> Result<Var, retape::Error> {
        let h = self.up.forward(x)?.recompute()?; // dropped after its last use; backward computes it again
        let h = h.gelu()?.int8()?; // stored in about a quarter of its bytes; without a mark it is kept
        Ok(self.down.forward(h)?)
    }
}

fn main() -> Result<(), retape::Error> {
    let device = retape::cpu();
    let builder = Builder::init(&device, DType::F32, 0);
    let model = Mlp::new(&builder)?;
    let mut optimizer = AdamW::decay_all(builder.parameters(), AdamWConfig::default())?;
    let numbers: Vec<f32> = (0..512).map(|i| i as f32 / 64.0 - 4.0).collect();
    let sines: Vec<f32> = numbers.iter().map(|x| x.sin()).collect();
    let (x, y) = (Tensor::from_slice(&device, &[512, 1], &numbers)?, Tensor::from_slice(&device, &[512, 1], &sines)?);
    for step in 0..=300 {
        let tape = Tape::new(&device);
        let loss = model.forward(tape.constant(&x)?)?.mse_loss(tape.constant(&y)?, LossReduction::Mean)?;
        if step % 100 == 0 {
            println!("step {step}: loss {:.4}, {} bytes saved for backward", loss.item()?, tape.saved_bytes());
        }
        optimizer.step(&tape.backward(&loss)?, 1.0)?;
    }
    Ok(())
}
