//! Attention op by op, with one mark: the softmax is dropped and replayed. `cargo run --release --example marks`

use retape::prelude::*;

fn main() -> Result<(), retape::Error> {
    let device = retape::cpu();
    for recompute in [false, true] {
        let tape = Tape::new(&device);
        let numbers: Vec<f32> = (0..64 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
        let x = tape.leaf(&Tensor::from_slice(&device, &[64, 16], &numbers)?)?;
        let scores = x.clone().matmul(x.clone().transpose(0, 1)?)?.scale(0.25)?;
        let mut weights = scores.softmax()?;
        if recompute {
            weights = weights.recompute()?; // the one line that changes
        }
        let y = weights.matmul(&x)?; // the last use of the weights: now they are stored or dropped
        let loss = y.square()?.sum()?;
        println!("{}", tape.ledger()?);
        let gradients = tape.backward(&loss)?;
        let first = gradients.of(&x).map(|g| g.to_vec::<f32>()).transpose()?.map(|g| g[0]);
        println!("gradient {first:?}, {} kernels replayed\n", tape.stats().replays);
    }
    Ok(())
}
