//! Small models of other kinds than GPT, in plain ops. Their scopes have the names that such models usually have, none
//! like another's, and roles: what finds values by roles finds them in each.

mod encoder;
mod llama;
mod plain;
mod resnet;
mod vit;

use crate::{floats, numbers};
use retape_core::{DType, Result, Role, Tape, Tensor, Var, scope};
use std::cell::Cell;

/// One of the models.
#[derive(Debug, Clone, Copy)]
pub struct Model {
    /// Its name.
    pub name: &'static str,
    /// Records a step up to its loss.
    pub loss: fn(&Tape) -> Result<Var>,
    /// How many blocks it has, of one parent.
    pub blocks: usize,
    /// Whether it has attention that stores its scores.
    pub explicit_attention: bool,
    /// Whether it has a feed-forward network.
    pub feed_forward: bool,
}

/// All of them.
pub const MODELS: [Model; 5] = [
    Model { name: "encoder", loss: encoder::loss, blocks: 3, explicit_attention: true, feed_forward: true },
    Model { name: "llama", loss: llama::loss, blocks: 4, explicit_attention: true, feed_forward: true },
    Model { name: "vit", loss: vit::loss, blocks: 3, explicit_attention: false, feed_forward: true },
    Model { name: "resnet", loss: resnet::loss, blocks: 2, explicit_attention: false, feed_forward: false },
    Model { name: "plain", loss: plain::loss, blocks: 3, explicit_attention: false, feed_forward: false },
];

/// Makes a model's parameters and inputs: the same numbers on every tape, in the order in which they are asked for.
struct Source<'a> {
    tape: &'a Tape,
    made: Cell<u64>,
}

impl<'a> Source<'a> {
    fn new(tape: &'a Tape) -> Source<'a> {
        Source { tape, made: Cell::new(0) }
    }

    fn tensor(&self, shape: &[usize]) -> Result<Tensor> {
        let (len, seed) = (shape.iter().product(), self.made.get());
        self.made.set(seed + 1);
        Ok(floats(&self.tape.device(), shape, &numbers(seed, len, -0.2, 0.2), DType::F32))
    }

    /// A parameter.
    fn weight(&self, shape: &[usize]) -> Result<Var> {
        self.tape.leaf(&self.tensor(shape)?)
    }

    /// An input without a gradient.
    fn input(&self, shape: &[usize]) -> Result<Var> {
        self.tape.constant(&self.tensor(shape)?)
    }

    /// Token ids or classes below `below`.
    fn ids(&self, shape: &[usize], below: i64) -> Result<Var> {
        let ids: Vec<i64> = (0..shape.iter().product::<usize>() as i64).map(|i| 7 * i % below).collect();
        self.tape.constant(&Tensor::from_slice(&self.tape.device(), shape, &ids)?)
    }

    /// x W + b.
    fn linear(&self, x: Var, to: usize) -> Result<Var> {
        let from = x.shape().last().copied().unwrap_or(1);
        x.linear(self.weight(&[from, to])?, Some(self.weight(&[to])?))
    }

    /// A layer norm in a scope of this name.
    fn layer_norm(&self, x: Var, name: &str) -> Result<Var> {
        let width = x.shape().last().copied().unwrap_or(1);
        x.within(scope(name).role(Role::Norm), |x| {
            x.layer_norm(Some(self.weight(&[width])?), Some(self.weight(&[width])?), 1e-5)
        })
    }
}

/// `[batch, time, width]` as `[batch, heads, time, width / heads]`.
fn split_heads(x: Var, heads: usize) -> Result<Var> {
    let (batch, time, width) = (x.shape()[0], x.shape()[1], x.shape()[2]);
    x.reshape(&[batch, time, heads, width / heads])?.transpose(1, 2)
}
