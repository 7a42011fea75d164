//! No layer holds a value longer than it must: forward's peak is, to the byte, what a list of the values that must be
//! there says. One handle too many in a layer shows here. A model written in the plainest way has no higher one.

use crate::small;
use retape_core::{
    DType, Decision, Device, Mark, MemoryMeter, Policy, RuleInfo, Site, Tape, TapeOptions, Tensor, Var, meta,
};
use retape_nn::{AttentionForm, Builder, CausalSelfAttention, Gpt, GptConfig, Init, Linear, Mlp, Parameter, Result};
use std::collections::HashMap;
use std::rc::Rc;

/// Recomputes all that lies strictly inside a block, or everything.
#[derive(Debug)]
struct Recompute {
    everything: bool,
}

impl Policy for Recompute {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        let inside = site.path.strip_prefix("transformer.h.").is_some_and(|rest| rest.contains('.'));
        (inside || self.everything).then_some(Decision { mark: Mark::Recompute, rule: 0 })
    }
    fn rules(&self) -> &[RuleInfo] {
        static RULES: std::sync::OnceLock<Vec<RuleInfo>> = std::sync::OnceLock::new();
        RULES.get_or_init(|| vec![RuleInfo { name: "recompute".into(), origin: retape_core::Origin::Preset }])
    }
}

struct Sizes {
    /// Elements of the residual stream.
    stream: usize,
    /// Rows of it.
    rows: usize,
    /// Elements of all attention weights.
    weights: usize,
    layers: usize,
    heads: usize,
    vocab: usize,
}

impl Sizes {
    fn of(config: &GptConfig) -> Sizes {
        let rows = config.batch * config.seq;
        Sizes {
            stream: rows * config.dim,
            rows,
            weights: rows * config.heads * config.seq,
            layers: config.layers,
            heads: config.heads,
            vocab: config.vocab,
        }
    }
    /// The last norm's output and statistics, the logits, two statistics of each row of these, the loss.
    fn end(&self) -> usize {
        self.stream + 2 * self.rows + self.rows * self.vocab + 2 * self.rows + 1
    }
}

fn inputs(device: &Device, config: &GptConfig) -> Tensor {
    Tensor::full(device, &[config.batch, config.seq], DType::I64, 0.0).unwrap()
}

/// Step bytes (peak, live at the end) of forward, in elements of f32, the tokens apart.
fn forward(config: &GptConfig, policy: Option<Rc<dyn Policy>>) -> (usize, usize) {
    let device = meta();
    let model = Gpt::new(&device, config, 0).unwrap();
    let tokens = inputs(&device, config);
    let before = device.meter().step_live();
    device.meter().reset_peak();
    let tape = Tape::with(&device, TapeOptions { policy, ..TapeOptions::default() });
    let loss = model.loss(&tape, &tokens, &tokens).unwrap();
    let elements = |bytes: fn(&MemoryMeter) -> u64| ((bytes(device.meter()) - before) / 4) as usize;
    let result = (elements(MemoryMeter::step_peak), elements(MemoryMeter::step_live));
    drop(loss);
    result
}

fn config(attention: AttentionForm) -> GptConfig {
    GptConfig { layers: 3, seq: 16, vocab: 4, ..small(attention) }
}

#[test]
fn without_a_policy() {
    let flash = config(AttentionForm::Flash);
    let s = Sizes::of(&flash);
    // The block's input, ln_1, q, k, v, attention, the first sum, ln_2: 8; c_fc and gelu: 8. Statistics of two norms,
    // and attention's.
    let block = 16 * s.stream + 4 * s.rows + 2 * s.rows * s.heads;
    let all = s.layers * block + s.stream + s.end();
    assert_eq!(forward(&flash, None), (all, all));

    let explicit = config(AttentionForm::Explicit);
    // The softmax is read by its own backward and by the product with v; merge stands for attention.
    let block = 16 * s.stream + 4 * s.rows + s.weights;
    let all = s.layers * block + s.stream + s.end();
    let (peak, live) = forward(&explicit, None);
    assert_eq!(live, all);
    // The last block's softmax is made beside the masked scores, when that block has its input, ln_1, q, k, v.
    let softmax = (s.layers - 1) * block + 5 * s.stream + 2 * s.rows + 2 * s.weights;
    assert_eq!(peak, all.max(softmax));

    let with_dropout = GptConfig { dropout: 0.1, ..explicit };
    assert_eq!(forward(&with_dropout, None).1, all + s.layers * s.weights, "and the dropped weights");
}

#[test]
fn recomputing_all_inside_blocks() {
    let flash = config(AttentionForm::Flash);
    let s = Sizes::of(&flash);
    let statistics = 4 * s.rows + 2 * s.rows * s.heads;
    let end = (s.layers + 1) * s.stream + s.layers * statistics + s.end();
    let (peak, live) = forward(&flash, Some(Rc::new(Recompute { everything: false })));
    assert_eq!(live, end);
    // The last block's gelu is made beside c_fc, with the first sum waiting.
    let gelu = s.layers * (s.stream + statistics) + 9 * s.stream;
    assert!(gelu > end, "the sizes are chosen so that the peak lies there");
    assert_eq!(peak, gelu);

    let explicit = config(AttentionForm::Explicit);
    let (peak, _) = forward(&explicit, Some(Rc::new(Recompute { everything: false })));
    // Two stages of the weights beside q, k, v; the last block's second norm is still to come.
    let weights = s.layers * (s.stream + 4 * s.rows) - 2 * s.rows + 3 * s.stream + 2 * s.weights;
    assert_eq!(peak, weights);
    let with_dropout = GptConfig { dropout: 0.1, ..explicit };
    assert_eq!(
        forward(&with_dropout, Some(Rc::new(Recompute { everything: false }))).0,
        weights,
        "dropout takes the softmax's turn"
    );
}

/// Peak of one layer alone, in elements of f32 beyond its input, where nothing needs to be kept.
fn alone(config: &GptConfig, layer: impl FnOnce(&Builder, Var) -> Result<Var>) -> usize {
    let device = meta();
    let builder = Builder::init(&device, DType::F32, 0);
    let x = Tensor::full(&device, &[config.batch, config.seq, config.dim], DType::F32, 0.0).unwrap();
    let policy: Rc<dyn Policy> = Rc::new(Recompute { everything: true });
    let tape = Tape::with(&device, TapeOptions { policy: Some(policy), ..TapeOptions::default() });
    let x = tape.leaf(&x).unwrap();
    let before = device.meter().step_live();
    device.meter().reset_peak();
    let y = layer(&builder, x).unwrap();
    let peak = device.meter().step_peak() - before;
    drop(y);
    (peak / 4) as usize
}

/// Sequences so short that a layer's last stages would make the peak if an early value still lived.
#[test]
fn layers_alone() {
    for dropout in [0.0, 0.1] {
        let attention = |form| {
            let config = GptConfig { seq: 1, ..config(form) };
            let s = Sizes::of(&config);
            let run =
                |builder: &Builder, x| CausalSelfAttention::new(&builder.pp("attn"), &config)?.forward(x, dropout);
            (alone(&config, run), s)
        };
        let (peak, s) = attention(AttentionForm::Flash);
        assert_eq!(peak, 4 * s.stream + 2 * s.rows * s.heads, "q, k, v, the result and its statistics");
        let (peak, s) = attention(AttentionForm::Explicit);
        assert_eq!(peak, 4 * s.stream + s.weights, "q, k, v, the weights and the context");

        let config = config(AttentionForm::Flash);
        let s = Sizes::of(&config);
        let peak = alone(&config, |builder, x| Mlp::new(&builder.pp("mlp"), &config)?.forward(x, dropout));
        assert_eq!(peak, 8 * s.stream, "c_fc and gelu");

        let device = meta();
        let model = Gpt::new(&device, &GptConfig { dropout, ..config.clone() }, 0).unwrap();
        let tokens = inputs(&device, &config);
        let before = device.meter().step_live();
        device.meter().reset_peak();
        let x = model.embed(&Tape::new(&device), &tokens).unwrap();
        assert_eq!(((device.meter().step_peak() - before) / 4) as usize, 2 * s.stream, "one stage and the next");
        drop(x);
    }
}

/// A GPT as one writes it at first: ops on leaves, nothing dropped by hand.
struct Plain<'a> {
    config: &'a GptConfig,
    tape: &'a Tape,
    leaves: HashMap<String, Var>,
}

impl Plain<'_> {
    fn leaf(&self, name: &str) -> &Var {
        &self.leaves[name]
    }

    fn linear(&self, x: Var, name: &str) -> Result<Var> {
        let (weight, bias) = (self.leaf(&format!("{name}.weight")), self.leaf(&format!("{name}.bias")));
        Ok(x.linear(weight, Some(bias.clone()))?)
    }

    fn norm(&self, x: Var, name: &str) -> Result<Var> {
        let (weight, bias) = (self.leaf(&format!("{name}.weight")), self.leaf(&format!("{name}.bias")));
        Ok(x.layer_norm(Some(weight.clone()), Some(bias.clone()), 1e-5)?)
    }

    fn attention(&self, x: Var, name: &str) -> Result<Var> {
        let (batch, time, dim, heads) = (self.config.batch, self.config.seq, self.config.dim, self.config.heads);
        let size = dim / heads;
        let qkv = self.linear(x, &format!("{name}.c_attn"))?;
        let part = |i: usize| qkv.clone().narrow(-1, i * dim, dim)?.reshape(&[batch, time, heads, size]);
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let scale = 1.0 / (size as f64).sqrt();
        let y = match self.config.attention {
            AttentionForm::Flash => q.attention(k, v, scale, true, 0.0)?,
            AttentionForm::Explicit => {
                let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
                let scores = (q.matmul(k.transpose(-2, -1)?)? * scale)?;
                let weights = scores.causal_mask()?.softmax()?;
                weights.matmul(v)?.transpose(1, 2)?.contiguous()?
            }
        };
        self.linear(y.reshape(&[batch, time, dim])?, &format!("{name}.c_proj"))
    }

    fn loss(&self, tokens: &Tensor) -> Result<Var> {
        let ids = self.tape.constant(tokens)?;
        let wte = self.leaf("transformer.wte.weight");
        let mut x = (wte.clone().embedding(ids)? + self.leaf("transformer.wpe.weight"))?;
        for i in 0..self.config.layers {
            let name = format!("transformer.h.{i}");
            let h = self.norm(x.clone(), &format!("{name}.ln_1"))?;
            x = (x + self.attention(h, &format!("{name}.attn"))?)?;
            let h = self.norm(x.clone(), &format!("{name}.ln_2"))?;
            let h = self.linear(h, &format!("{name}.mlp.c_fc"))?.gelu_tanh()?;
            x = (x + self.linear(h, &format!("{name}.mlp.c_proj"))?)?;
        }
        let logits = self.norm(x, "transformer.ln_f")?.linear_transposed(wte, None)?;
        Ok(logits.cross_entropy(self.tape.constant(tokens)?, Gpt::IGNORE)?)
    }
}

/// Highest step bytes of forward, and of forward and backward.
fn peaks(device: &Device, tape: &Tape, forward: impl FnOnce() -> Result<Var>) -> (u64, u64) {
    let before = device.meter().step_live();
    device.meter().reset_peak();
    let loss = forward().unwrap();
    let of_forward = device.meter().step_peak() - before;
    tape.backward(&loss).unwrap();
    (of_forward, device.meter().step_peak() - before)
}

#[test]
fn the_plainest_way_takes_no_more() {
    for form in [AttentionForm::Flash, AttentionForm::Explicit] {
        let config = config(form);
        for everything in [None, Some(true)] {
            let options = || {
                let policy = everything.map(|everything| Rc::new(Recompute { everything }) as Rc<dyn Policy>);
                TapeOptions { policy, ..TapeOptions::default() }
            };
            let device = meta();
            let (model, tokens) = (Gpt::new(&device, &config, 0).unwrap(), inputs(&device, &config));
            let tape = Tape::with(&device, options());
            let of_layers = peaks(&device, &tape, || model.loss(&tape, &tokens, &tokens));

            let tape = Tape::with(&device, options());
            let leaf = |p: &Parameter| (p.name().to_owned(), tape.leaf(&p.tensor()).unwrap());
            let leaves = model.parameters().iter().map(leaf).collect();
            let plain = Plain { config: &config, tape: &tape, leaves };
            let of_plain = peaks(&device, &tape, || plain.loss(&tokens));
            assert!(of_plain.0 <= of_layers.0 && of_plain.1 <= of_layers.1, "{form:?} {of_plain:?} {of_layers:?}");
        }
    }
}

/// A weight that was cast for an op is gone when the op's input is stored as int8.
#[test]
fn a_cast_weight_goes_first() {
    let device = meta();
    let layer = Linear::new(&Builder::init(&device, DType::F32, 0), 64, 64, false, Init::ONES).unwrap();
    let tape = Tape::new(&device);
    let input = Tensor::full(&device, &[64, 64], DType::BF16, 0.0).unwrap();
    let h = tape.leaf(&input).unwrap().neg().unwrap().int8().unwrap();
    let before = device.meter().step_live();
    device.meter().reset_peak();
    let y = layer.forward(h).unwrap();
    assert_eq!(device.meter().step_peak() - before, 2 * 64 * 64 * 2, "the cast weight and y");
    assert_eq!(tape.saved_bytes(), 64 * 64 + 64 * 4, "int8 of h");
    assert_eq!(device.meter().step_live() - before, 64 * 64 + 64 * 4, "y and int8 of h, without h");
    drop(y);
}
