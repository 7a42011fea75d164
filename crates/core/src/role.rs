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

    /// The role of this name.
    pub fn from_name(name: &str) -> Option<Role> {
        Role::ALL.into_iter().find(|role| role.name() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of roles: those of all scopes around a value, say.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Roles(u8);

impl Roles {
    /// No role.
    pub const NONE: Roles = Roles(0);

    /// Whether this role is in the set.
    pub const fn contains(self, role: Role) -> bool {
        self.0 & 1 << role as u8 != 0
    }

    /// Whether all roles of `other` are in the set.
    pub const fn contains_all(self, other: Roles) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether there is no role in it.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The set with these roles too: `roles.and(Role::Block)`, `roles.and(others)`.
    #[must_use]
    pub fn and(self, roles: impl Into<Roles>) -> Roles {
        Roles(self.0 | roles.into().0)
    }

    /// Its roles, in the order of [`Role::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Role> {
        Role::ALL.into_iter().filter(move |&role| self.contains(role))
    }
}

impl From<Role> for Roles {
    fn from(role: Role) -> Roles {
        Roles(1 << role as u8)
    }
}

impl From<Option<Role>> for Roles {
    fn from(role: Option<Role>) -> Roles {
        role.map_or(Roles::NONE, Roles::from)
    }
}

impl FromIterator<Role> for Roles {
    fn from_iter<I: IntoIterator<Item = Role>>(roles: I) -> Roles {
        roles.into_iter().fold(Roles::NONE, Roles::and)
    }
}

impl fmt::Debug for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// A list of names: `["block", "attention"]`.
impl serde::Serialize for Roles {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::{Role, Roles};

    #[test]
    fn sets() {
        let all: Roles = Role::ALL.into_iter().collect();
        let two = Roles::from(Role::Block).and(Role::Norm).and(Some(Role::Norm)).and(None);
        assert!(all.contains_all(two) && !two.contains_all(all) && two.contains_all(Roles::NONE));
        assert!(Roles::NONE.is_empty() && !two.is_empty());
        assert_eq!(two.iter().collect::<Vec<_>>(), [Role::Block, Role::Norm]);
        assert_eq!(format!("{two:?}"), "{Block, Norm}");
        for role in Role::ALL {
            assert_eq!(Role::from_name(role.name()), Some(role));
            assert_eq!(two.contains(role), two.iter().any(|r| r == role), "{role}");
        }
        assert_eq!(Role::from_name("mlp"), None);
    }
}
