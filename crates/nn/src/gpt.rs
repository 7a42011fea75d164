//! GPT-2: token and position embedding, pre-norm blocks, a final norm and a head.

use crate::{Block, Embedding, Error, GptConfig, Initializer, LayerNorm, Parameter, Result};
use retape_core::{DType, Device, Tape, Tensor, Var};

/// A GPT with the names and layouts of transformers' `GPT2LMHeadModel`.
#[derive(Debug, Clone)]
pub struct Gpt {
    config: GptConfig,
    training: bool,
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    /// `[vocab, dim]`, as a head tied to the token embedding has it; `None` where it is tied.
    head: Option<Parameter>,
}

impl Gpt {
    /// Targets with this index don't count in the loss.
    pub const IGNORE: i64 = -100;

    /// A fresh model, initialised as GPT-2 from the seed: normal weights of standard deviation 0.02 (projections to the
    /// residual stream 0.02 / sqrt(2 layers)), norms 1 and 0, biases 0. In training mode.
    pub fn new(device: &Device, config: &GptConfig, seed: u64) -> Result<Gpt> {
        config.validate()?;
        let init = &mut Initializer::new(device, config.parameter_dtype(), seed);
        let std = GptConfig::INIT_STD;
        let wte = Embedding::new(init, "transformer.wte", config.vocab, config.dim, std)?;
        let wpe = Embedding::new(init, "transformer.wpe", config.seq, config.dim, std)?;
        let blocks = (0..config.layers).map(|i| Block::new(init, i, config)).collect::<Result<Vec<_>>>()?;
        let ln_f = LayerNorm::new(init, "transformer.ln_f", config.dim)?;
        let head =
            (!config.tied).then(|| init.normal("lm_head.weight", &[config.vocab, config.dim], std)).transpose()?;
        Ok(Gpt { config: config.clone(), training: true, wte, wpe, blocks, ln_f, head })
    }

    /// What it was built from.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// The blocks.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Switches dropout on (training) or off (evaluation).
    pub fn set_training(&mut self, training: bool) {
        self.training = training;
    }

    /// Whether dropout is on.
    pub fn is_training(&self) -> bool {
        self.training
    }

    /// The probability of dropping now: the configuration's while training, else 0.
    pub fn dropout(&self) -> f64 {
        if self.training { self.config.dropout } else { 0.0 }
    }

    /// Every parameter once: `wte`, `wpe`, the blocks, `ln_f`, and `lm_head` if untied.
    pub fn parameters(&self) -> Vec<Parameter> {
        let blocks = self.blocks.iter().flat_map(Block::parameters);
        let first = [&self.wte.weight, &self.wpe.weight];
        first.into_iter().chain(blocks).chain(self.ln_f.parameters()).chain(&self.head).cloned().collect()
    }

    /// Tokens `[B, T]` (i64, T at most `seq`) -> the residual stream `[B, T, D]` at path `embed`.
    pub fn embed(&self, tape: &Tape, tokens: &Tensor) -> Result<Var> {
        self.check("tokens", tokens)?;
        let time = tokens.shape()[1];
        if time > self.config.seq {
            let reason = format!("{time} tokens in a sequence, the model has {} positions", self.config.seq);
            return Err(Error::Input { layer: "Gpt", reason });
        }
        let _scope = tape.scope("embed");
        let ids = tape.constant(tokens)?;
        let mut x = self.wte.forward(&ids)?;
        drop(ids);
        x = x.add(&self.wpe.first(tape, time)?)?;
        if x.dtype() != self.config.dtype {
            x = x.cast(self.config.dtype)?;
        }
        let dropout = self.dropout();
        if dropout > 0.0 {
            x = x.dropout(dropout)?;
        }
        Ok(x)
    }

    /// The final norm of the residual stream, at path `ln_f`. Takes x: nothing after it needs the stream.
    pub fn norm(&self, x: Var) -> Result<Var> {
        let _scope = x.tape().scope("ln_f");
        self.ln_f.forward(&x)
    }

    /// The normed stream `[B, T, D]` -> logits `[B, T, vocab]` at path `lm_head`.
    pub fn head(&self, x: Var) -> Result<Var> {
        let tape = x.tape().clone();
        let _scope = tape.scope("lm_head");
        let weight = self.head.as_ref().unwrap_or(&self.wte.weight).weight_as(&tape, x.dtype())?;
        Ok(x.linear_transposed(&weight, None)?)
    }

    /// Tokens `[B, T]` (i64) -> logits `[B, T, vocab]`.
    pub fn forward(&self, tape: &Tape, tokens: &Tensor) -> Result<Var> {
        let mut x = self.embed(tape, tokens)?;
        for block in &self.blocks {
            x = block.forward(x, self.dropout())?;
        }
        x = self.norm(x)?;
        self.head(x)
    }

    /// The mean cross-entropy of predicting `targets` `[B, T]` (i64, [`IGNORE`](Gpt::IGNORE) doesn't count): a scalar at
    /// path `loss`, f32 for a model in 16 bits.
    pub fn loss(&self, tape: &Tape, tokens: &Tensor, targets: &Tensor) -> Result<Var> {
        self.check("targets", targets)?;
        if targets.shape() != tokens.shape() {
            let reason = format!("tokens are {:?}, targets {:?}; they must agree", tokens.shape(), targets.shape());
            return Err(Error::Input { layer: "Gpt", reason });
        }
        let logits = self.forward(tape, tokens)?;
        let _scope = tape.scope("loss");
        let targets = tape.constant(targets)?;
        Ok(logits.cross_entropy(&targets, Gpt::IGNORE)?)
    }

    fn check(&self, what: &str, tokens: &Tensor) -> Result<()> {
        if tokens.rank() == 2 && tokens.dtype() == DType::I64 {
            return Ok(());
        }
        let reason = format!("{what} must be i64[batch, time], got {}{:?}", tokens.dtype(), tokens.shape());
        Err(Error::Input { layer: "Gpt", reason })
    }
}
