//! The shape of a GPT, and the models that have a name.

use crate::{Error, Result};
use retape_core::DType;
use serde::{Deserialize, Serialize};

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionForm {
    /// One tiled op that never holds the weights.
    Flash,
    /// Op by op: scores, scale, mask, softmax, dropout, context.
    Explicit,
}

impl AttentionForm {
    /// The name on the command line: `flash`, `explicit`.
    pub const fn name(self) -> &'static str {
        match self {
            AttentionForm::Flash => "flash",
            AttentionForm::Explicit => "explicit",
        }
    }
}

/// Everything that fixes a GPT and the size of its training step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// Number of blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Query heads; they share `dim`.
    pub heads: usize,
    /// Key and value heads; a divisor of `heads`.
    pub kv_heads: usize,
    /// Context length: the number of learned positions, and tokens per sequence of a step.
    pub seq: usize,
    /// Sequences per step.
    pub batch: usize,
    /// Number of tokens there are.
    pub vocab: usize,
    /// Probability of dropping attention weights, branch outputs and embeddings while training.
    pub dropout: f64,
    /// Whether the linear maps have biases (layer norms always have).
    pub linear_bias: bool,
    /// Whether the output head is the token embedding.
    pub tied: bool,
    /// How attention is computed.
    pub attention: AttentionForm,
    /// The activations' dtype. Parameters have it too, but for bf16 and f16 they are f32 and cast where they are used.
    #[serde(with = "dtype_name")]
    pub dtype: DType,
}

impl Default for GptConfig {
    /// Model `tiny`.
    fn default() -> GptConfig {
        GptConfig::MODELS[0].1.clone()
    }
}

const fn model(layers: usize, dim: usize, heads: usize, seq: usize, batch: usize, vocab: usize) -> GptConfig {
    GptConfig {
        layers,
        dim,
        heads,
        kv_heads: heads,
        seq,
        batch,
        vocab,
        dropout: 0.0,
        linear_bias: true,
        tied: true,
        attention: AttentionForm::Flash,
        dtype: DType::F32,
    }
}

/// As the peers' measurements have it: no linear biases, a head of its own.
const fn plain(config: GptConfig) -> GptConfig {
    GptConfig { linear_bias: false, tied: false, ..config }
}

impl GptConfig {
    /// The named models: GPT-2 and GPT-3 as published, small ones on bytes, and `w1` and `w2` as other engines are
    /// measured.
    pub const MODELS: &'static [(&'static str, GptConfig)] = &[
        ("tiny", model(4, 128, 4, 256, 4, 256)),
        ("w1", plain(model(6, 384, 6, 512, 2, 256))),
        ("w2", plain(model(4, 256, 4, 2048, 1, 256))),
        ("gpt2-small", model(12, 768, 12, 1024, 1, 50257)),
        ("gpt2-medium", model(24, 1024, 16, 1024, 1, 50257)),
        ("gpt2-xl", model(48, 1600, 25, 1024, 1, 50257)),
        ("gpt3-175b", model(96, 12288, 96, 2048, 1, 50257)),
    ];

    /// Standard deviation of fresh weights in GPT-2.
    pub const INIT_STD: f64 = 0.02;

    /// The model of a name, or an error that lists the names.
    pub fn named(name: &str) -> Result<GptConfig> {
        match GptConfig::MODELS.iter().find(|(known, _)| *known == name) {
            Some((_, config)) => Ok(config.clone()),
            None => {
                let names: Vec<&str> = GptConfig::MODELS.iter().map(|(known, _)| *known).collect();
                Err(Error::UnknownModel { name: name.into(), known: names.join(", ") })
            }
        }
    }

    /// This configuration as other engines are measured: no linear biases, an untied head, no dropout.
    pub fn as_peers(self) -> GptConfig {
        GptConfig { dropout: 0.0, ..plain(self) }
    }

    /// Fails where the fields contradict each other, and says what would be right.
    pub fn validate(&self) -> Result<()> {
        let wrong = |field, value: &dyn std::fmt::Display, reason: String| {
            Err(Error::Config { field, value: value.to_string(), reason })
        };
        let sizes = [
            ("layers", self.layers),
            ("dim", self.dim),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("seq", self.seq),
            ("batch", self.batch),
            ("vocab", self.vocab),
        ];
        for (field, value) in sizes {
            if value == 0 {
                return wrong(field, &value, "must be at least 1".into());
            }
        }
        if !self.dim.is_multiple_of(self.heads) {
            return wrong("dim", &self.dim, format!("must be a multiple of the {} heads", self.heads));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let reason = format!("must divide the {} heads: each serves a run of query heads", self.heads);
            return wrong("kv_heads", &self.kv_heads, reason);
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return wrong("dropout", &self.dropout, "must be a probability in [0, 1)".into());
        }
        if !self.dtype.is_float() {
            return wrong("dtype", &self.dtype, "must be a float type".into());
        }
        let largest =
            [self.batch, self.seq, self.dim.max(self.vocab), 32].iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let weights = [self.layers, self.dim, self.dim, 96].iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if largest.and(weights).is_none() {
            return wrong("dim", &self.dim, "this model has more bytes than 64 bits can count".into());
        }
        Ok(())
    }

    /// Width of all key heads (and of all value heads) together.
    pub fn kv_dim(&self) -> usize {
        self.dim / self.heads * self.kv_heads
    }

    /// Standard deviation of fresh weights that write to the residual stream: smaller by the root of their number.
    pub fn projection_std(&self) -> f64 {
        GptConfig::INIT_STD / ((2 * self.layers) as f64).sqrt()
    }

    /// Elements of the matrices of linear maps, the head included even where it is tied.
    fn matrix_elements(&self) -> usize {
        let (dim, packed) = (self.dim, self.dim + 2 * self.kv_dim());
        self.layers * (dim * packed + 9 * dim * dim) + self.vocab * dim
    }

    /// Number of parameters.
    pub fn parameter_count(&self) -> usize {
        let (dim, packed) = (self.dim, self.dim + 2 * self.kv_dim());
        let biases = if self.linear_bias { self.layers * (packed + 6 * dim) } else { 0 };
        let norms = (2 * self.layers + 1) * 2 * dim;
        let embedding = if self.tied { 0 } else { self.vocab * dim };
        self.matrix_elements() + embedding + self.seq * dim + biases + norms
    }

    /// The parameters' dtype: f32 for a model that computes in bf16 or f16.
    pub fn parameter_dtype(&self) -> DType {
        self.dtype.computed_in()
    }

    /// Bytes of the parameters.
    pub fn parameter_bytes(&self) -> usize {
        self.parameter_count() * self.parameter_dtype().size()
    }

    /// FLOPs of forward and backward of one step: 6 for each matrix element and token, and 12 L T^2 D a sequence for
    /// attention, which is counted dense (not halved for the mask).
    pub fn step_flops(&self) -> f64 {
        let tokens = (self.batch * self.seq) as f64;
        let attention = 12.0 * self.layers as f64 * self.seq as f64 * self.dim as f64 * tokens;
        6.0 * self.matrix_elements() as f64 * tokens + attention
    }
}

/// A dtype as its name.
mod dtype_name {
    use retape_core::DType;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(dtype.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
        let name = String::deserialize(deserializer)?;
        DType::ALL
            .into_iter()
            .find(|d| d.name() == name)
            .ok_or_else(|| D::Error::custom(format!("no dtype is named `{name}`")))
    }
}
