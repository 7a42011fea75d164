//! The layers let go of every value as soon as it has been used: forward's peak is, to the byte, what a list of the
//! values that must be there says. One handle too many in a layer shows here.

use crate::small;
use retape_core::{
    DType, Decision, Device, Mark, MemoryMeter, Policy, RuleInfo, Site, Tape, TapeOptions, Tensor, meta,
};
use retape_nn::{AttentionForm, Gpt, GptConfig};
use std::rc::Rc;

/// Recomputes all that lies strictly inside a block.
#[derive(Debug)]
struct InsideBlocks;

impl Policy for InsideBlocks {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        let inside = site.path.strip_prefix("blocks.").is_some_and(|rest| rest.contains('.'));
        inside.then_some(Decision { mark: Mark::Recompute, rule: 0 })
    }
    fn rules(&self) -> &[RuleInfo] {
        static RULES: std::sync::OnceLock<Vec<RuleInfo>> = std::sync::OnceLock::new();
        RULES.get_or_init(|| vec![RuleInfo { name: "inside".into(), origin: retape_core::Origin::Preset }])
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
    /// The last norm's output and statistics, the logits, their log-sum-exp, the loss.
    fn end(&self) -> usize {
        self.stream + 2 * self.rows + self.rows * self.vocab + self.rows + 1
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
    // and the log-sum-exp.
    let block = 16 * s.stream + 4 * s.rows + s.rows * s.heads;
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
    let statistics = 4 * s.rows + s.rows * s.heads;
    let end = (s.layers + 1) * s.stream + s.layers * statistics + s.end();
    let (peak, live) = forward(&flash, Some(Rc::new(InsideBlocks)));
    assert_eq!(live, end);
    // The last block's gelu is made beside c_fc, with the first sum waiting.
    let gelu = s.layers * (s.stream + statistics) + 9 * s.stream;
    assert!(gelu > end, "the sizes are chosen so that the peak lies there");
    assert_eq!(peak, gelu);

    let explicit = config(AttentionForm::Explicit);
    let (peak, _) = forward(&explicit, Some(Rc::new(InsideBlocks)));
    // Two stages of the weights beside q, k, v; the last block's second norm is still to come.
    let weights = s.layers * (s.stream + 4 * s.rows) - 2 * s.rows + 3 * s.stream + 2 * s.weights;
    assert_eq!(peak, weights);
    let with_dropout = GptConfig { dropout: 0.1, ..explicit };
    assert_eq!(forward(&with_dropout, Some(Rc::new(InsideBlocks))).0, weights, "dropout takes the softmax's turn");
}
