//! GPT-2: token and position embedding, pre-norm blocks, a final norm and a head.

use crate::checkpoint::Cast;
use crate::{Block, Builder, Embedding, Error, GptConfig, Init, LayerNorm, Parameter, Parameters, Result};
use retape_core::{DType, Device, Role, Scope, Tape, Tensor, Var};
use std::path::Path;

/// A GPT with the names and layouts of transformers' `GPT2LMHeadModel`. Values have the paths of the parameters: block
/// 0 is at `transformer.h.0`.
#[derive(Debug, Clone)]
pub struct Gpt {
    config: GptConfig,
    training: bool,
    parameters: Parameters,
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    /// `[vocab, dim]`: the token embedding, where the head is tied to it.
    head: Parameter,
    embed_scope: Scope,
    head_scope: Scope,
    loss_scope: Scope,
}

impl Gpt {
    /// Targets with this index don't count in the loss.
    pub const IGNORE: i64 = -100;

    /// A fresh model, initialised as GPT-2 from the seed: normal weights of standard deviation 0.02 (projections to the
    /// residual stream 0.02 / sqrt(2 layers)), norms 1 and 0, biases 0. In training mode.
    pub fn new(device: &Device, config: &GptConfig, seed: u64) -> Result<Gpt> {
        Gpt::build(&Builder::init(device, config.parameter_dtype(), seed), config)
    }

    /// A model with the numbers of a safetensors file, in training mode. The file has the model's tensors and no
    /// others; of a tied head it may have both names.
    pub fn load(path: &Path, device: &Device, config: &GptConfig, cast: Cast) -> Result<Gpt> {
        let builder = Builder::load(path, device, config.parameter_dtype(), cast)?;
        let model = Gpt::build(&builder, config)?;
        builder.finish()?;
        Ok(model)
    }

    /// A model with the parameters that a builder gives, as a part of another model or alone. In training mode.
    ///
    /// # Errors
    /// [`Error::Config`] where the configuration contradicts itself, or the builder's dtype is another than
    /// [`GptConfig::parameter_dtype`].
    pub fn build(builder: &Builder, config: &GptConfig) -> Result<Gpt> {
        config.validate()?;
        if builder.dtype() != config.parameter_dtype() {
            let (made, needed) = (builder.dtype(), config.parameter_dtype());
            let reason =
                format!("its parameters are {needed}, the builder makes {made}; give it a builder of {needed}");
            return Err(Error::Config { field: "dtype", value: config.dtype.to_string(), reason });
        }
        let init = Init::Normal { std: GptConfig::INIT_STD };
        let (transformer, head) = (builder.pp("transformer"), builder.pp("lm_head"));
        let wte = Embedding::new(&transformer.pp("wte"), config.vocab, config.dim, init)?;
        let wpe = Embedding::new(&transformer.pp("wpe"), config.seq, config.dim, init)?;
        let h = transformer.pp("h");
        let blocks = (0..config.layers).map(|i| Block::new(&h.pp(i), config)).collect::<Result<Vec<_>>>()?;
        let ln_f = LayerNorm::new(&transformer.pp("ln_f"), config.dim)?;
        let weight = if config.tied {
            head.tie("weight", &wte.weight)?;
            wte.weight.clone()
        } else {
            head.parameter("weight", &[config.vocab, config.dim], init)?
        };
        Ok(Gpt {
            config: config.clone(),
            training: true,
            parameters: transformer.parameters().into_iter().chain(head.parameters()).collect(),
            wte,
            wpe,
            blocks,
            ln_f,
            head: weight,
            embed_scope: transformer.pp("embed").scope().role(Role::Embedding),
            head_scope: head.scope().role(Role::Head),
            loss_scope: builder.pp("loss").scope(),
        })
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
    pub fn parameters(&self) -> Parameters {
        self.parameters.clone()
    }

    /// Tokens `[B, T]` (i64, T at most `seq`) -> the residual stream `[B, T, D]` at path `transformer.embed`.
    pub fn embed(&self, tape: &Tape, tokens: &Tensor) -> Result<Var> {
        self.check("tokens", tokens)?;
        let time = tokens.shape()[1];
        if time > self.config.seq {
            let reason = format!("{time} tokens in a sequence, the model has {} positions", self.config.seq);
            return Err(Error::Input { layer: "Gpt", reason });
        }
        let rows = self.wte.forward(tape.constant(tokens)?)?;
        let positions = self.wpe.first(tape, time)?;
        rows.within(&self.embed_scope, |rows| {
            let mut x = rows.add(positions)?;
            if x.dtype() != self.config.dtype {
                x = x.cast(self.config.dtype)?;
            }
            let dropout = self.dropout();
            if dropout > 0.0 { Ok(x.dropout(dropout)?) } else { Ok(x) }
        })
    }

    /// The final norm of the residual stream, at path `transformer.ln_f`.
    pub fn norm(&self, x: Var) -> Result<Var> {
        self.ln_f.forward(x)
    }

    /// The normed stream `[B, T, D]` -> logits `[B, T, vocab]` at path `lm_head`.
    pub fn head(&self, x: Var) -> Result<Var> {
        x.within(&self.head_scope, |x| {
            let weight = self.head.weight_as(x.tape(), x.dtype())?;
            Ok(x.linear_transposed(weight, None)?)
        })
    }

    /// Tokens `[B, T]` (i64) -> logits `[B, T, vocab]`.
    pub fn forward(&self, tape: &Tape, tokens: &Tensor) -> Result<Var> {
        let mut x = self.embed(tape, tokens)?;
        for block in &self.blocks {
            x = block.forward(x, self.dropout())?;
        }
        self.head(self.norm(x)?)
    }

    /// The mean cross-entropy of predicting `targets` `[B, T]` (i64, [`IGNORE`](Gpt::IGNORE) doesn't count): a scalar
    /// at path `loss`, f32 for a model in 16 bits.
    pub fn loss(&self, tape: &Tape, tokens: &Tensor, targets: &Tensor) -> Result<Var> {
        self.check("targets", targets)?;
        if targets.shape() != tokens.shape() {
            let reason = format!("tokens are {:?}, targets {:?}; they must agree", tokens.shape(), targets.shape());
            return Err(Error::Input { layer: "Gpt", reason });
        }
        let logits = self.forward(tape, tokens)?;
        logits.within(&self.loss_scope, |logits| Ok(logits.cross_entropy(tape.constant(targets)?, Gpt::IGNORE)?))
    }

    fn check(&self, what: &str, tokens: &Tensor) -> Result<()> {
        if tokens.rank() == 2 && tokens.dtype() == DType::I64 {
            return Ok(());
        }
        let reason = format!("{what} must be i64[batch, time], got {}{:?}", tokens.dtype(), tokens.shape());
        Err(Error::Input { layer: "Gpt", reason })
    }
}
