//! A model of your own, trained, with two marks. `cargo run --release --example own_model`

use retape::prelude::*;

struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn new(builder: &Builder) -> retape::Result<Mlp> {
        let up = Linear::new(&builder.pp("up"), 1, 256, true, Init::Normal { std: 1.0 })?;
        let down = Linear::new(&builder.pp("down"), 256, 1, true, Init::Normal { std: 0.05 })?;
        Ok(Mlp { up, down })
    }
    fn forward(&self, x: Var) -> retape::Result<Var> {
        let h = self.up.forward(x)?.recompute()?; // dropped after its last use; backward computes it again
        Ok(self.down.forward(h.gelu()?.int8()?)?) // stored in about a quarter of its bytes
    }
}

fn main() -> retape::Result<()> {
    let device = retape::cpu();
    let builder = Builder::init(&device, DType::F32, 0);
    let model = Mlp::new(&builder)?;
    let mut optimizer = AdamW::decay_all(builder.parameters(), AdamWConfig::default())?;
    let numbers: Vec<f32> = (0..512).map(|i| i as f32 / 64.0 - 4.0).collect();
    let x = Tensor::from_slice(&device, &[512, 1], &numbers)?;
    for step in 0..=300 {
        let tape = Tape::new(&device);
        let x = tape.constant(&x)?;
        let loss = model.forward(x.clone())?.mse_loss(x.sin()?, LossReduction::Mean)?;
        if step % 100 == 0 {
            println!("step {step}: loss {:.4}, {} bytes saved for backward", loss.item()?, tape.saved_bytes());
        }
        optimizer.step(&tape.backward(&loss)?, 1.0)?;
    }
    Ok(())
}
