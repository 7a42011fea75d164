use super::Source;
use retape_core::ops::conv::{Conv, Padding};
use retape_core::{Result, Role, Tape, Var, scope};

/// A residual network with group norms: two stages of two blocks each, so blocks of two parents.
pub fn loss(tape: &Tape) -> Result<Var> {
    let from = Source::new(tape);
    let images = from.input(&[2, 3, 16, 16])?;
    let mut x = norm(&from, conv(&from, images, 3, 16, 1)?, "bn1")?.relu()?;
    for (stage, channels, stride) in [(1, 16, 1), (2, 32, 2)] {
        for i in 0..2 {
            let name = scope(format!("layer{stage}.{i}")).role(Role::Block);
            x = x.within(name, |x| block(&from, x, channels, if i == 0 { stride } else { 1 }))?;
        }
    }
    let x = x.mean_dims(&[2, 3], false)?;
    let logits = x.within(scope("fc").role(Role::Head), |x| from.linear(x, 10))?;
    logits.cross_entropy(from.ids(&[2], 10)?, -1)
}

fn block(from: &Source<'_>, x: Var, channels: usize, stride: usize) -> Result<Var> {
    let channels_in = x.shape()[1];
    let y = conv(from, x.clone(), 3, channels, stride)?;
    let y = norm(from, y, "bn1")?.relu()?;
    let y = norm(from, conv(from, y, 3, channels, 1)?, "bn2")?;
    let shortcut = match channels_in == channels {
        true => x,
        false => x.within("downsample", |x| norm(from, conv(from, x, 1, channels, stride)?, "1"))?,
    };
    (y + shortcut)?.relu()
}

fn conv(from: &Source<'_>, x: Var, kernel: usize, channels: usize, stride: usize) -> Result<Var> {
    let weight = from.weight(&[channels, x.shape()[1], kernel, kernel])?;
    let padding = Padding::Zeros([kernel / 2; 2]);
    x.conv2d(weight, None, Conv { stride: [stride; 2], padding, ..Conv::default() })
}

fn norm(from: &Source<'_>, x: Var, name: &str) -> Result<Var> {
    let channels = x.shape()[1];
    x.within(scope(name).role(Role::Norm), |x| {
        x.group_norm(4, Some(from.weight(&[channels])?), Some(from.weight(&[channels])?), 1e-5)
    })
}
