use super::Source;
use retape_core::ops::conv::Conv;
use retape_core::{Result, Role, Tape, Var, scope};

const WIDTH: usize = 48;

/// A vision transformer: patches by a convolution, and tiled attention. Its blocks aren't named by bare numbers.
pub fn loss(tape: &Tape) -> Result<Var> {
    let from = Source::new(tape);
    let images = from.input(&[2, 3, 32, 32])?;
    let mut x = tape.within(scope("conv_proj").role(Role::Embedding), || {
        let patches = Conv { stride: [4, 4], ..Conv::default() };
        let x = images.conv2d(from.weight(&[WIDTH, 3, 4, 4])?, Some(from.weight(&[WIDTH])?), patches)?;
        x.flatten(2, 3)?.transpose(1, 2)? + from.weight(&[64, WIDTH])?
    })?;
    for i in 0..3 {
        x = x.within(scope(format!("encoder.layers.encoder_layer_{i}")).role(Role::Block), |x| layer(&from, x))?;
    }
    let x = from.layer_norm(x, "encoder.ln")?.mean_dims(&[1], false)?;
    let logits = x.within(scope("heads").role(Role::Head), |x| from.linear(x, 10))?;
    logits.cross_entropy(from.ids(&[2], 10)?, -1)
}

fn layer(from: &Source<'_>, x: Var) -> Result<Var> {
    let y = from.layer_norm(x.clone(), "ln_1")?;
    let x = (x + y.within(scope("self_attention").role(Role::Attention), |y| attention(from, y))?)?;
    let y = from.layer_norm(x.clone(), "ln_2")?;
    x + y.within(scope("mlp").role(Role::FeedForward), |y| from.linear(from.linear(y, 4 * WIDTH)?.gelu()?, WIDTH))?
}

fn attention(from: &Source<'_>, x: Var) -> Result<Var> {
    let shape = x.shape();
    let [q, k, v] = [(); 3].map(|()| from.linear(x.clone(), WIDTH)?.reshape(&[2, 64, 3, WIDTH / 3]));
    from.linear(q?.attention(k?, v?, 0.25, false, 0.0)?.reshape(&shape)?, WIDTH)
}
