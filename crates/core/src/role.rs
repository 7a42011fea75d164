//! Roles: what a part of a model is, whatever its author calls it.

use std::fmt;

/// What the values of a scope are to the model. Layers give their scopes one; presets go by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Role {
    /// One of the parts that a deep model repeats: a transformer's or a ResNet's block.
    Block,
    /// Attention, its projections included.
    Attention,
    /// What follows attention in a transformer's block: the feed-forward network, also called MLP.
    FeedForward,
    /// A normalisation.
    Norm,
    /// Rows of a table, by tokens or positions.
    Embedding,
    /// What makes the model's output, such as logits, of the last hidden values.
    Head,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 6] =
        [Role::Block, Role::Attention, Role::FeedForward, Role::Norm, Role::Embedding, Role::Head];

    /// The name used in rules: `feed_forward`.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Block => "block",
            Role::Attention => "attention",
            Role::FeedForward => "feed_forward",
            Role::Norm => "norm",
            Role::Embedding => "embedding",
            Role::Head => "head",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
