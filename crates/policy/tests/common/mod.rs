//! Values for policies to decide about.

use retape_core::{BlockScope, DType, Mark, Policy, Role, Roles, ScopeSite, Site};

/// An f32 value outside of all scopes with roles.
pub fn site<'a>(path: &'a str, op: &'static str, shape: &'a [usize]) -> Site<'a> {
    let bytes = 4 * shape.iter().product::<usize>() as u64;
    Site {
        id: 0,
        path,
        op,
        roles: Roles::NONE,
        output_of: Roles::NONE,
        blocks: &[],
        output: 0,
        shape,
        dtype: DType::F32,
        bytes,
        flops: bytes,
        traffic: 2 * bytes,
    }
}

/// Where a value or scope is, in a model whose scopes have these roles: `attn`, `mlp`, `ln_*`, `embed`, `lm_head`, and numbers
/// are blocks.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    path: &'a str,
    roles: Roles,
    output_of: Roles,
    blocks: &'a [BlockScope],
}

impl<'a> Place<'a> {
    pub fn new(path: &'a str) -> Place<'a> {
        let (mut roles, mut output_of, mut blocks, mut end) = (Roles::NONE, Roles::NONE, Vec::new(), 0);
        for segment in path.split('.') {
            end += segment.len();
            let role = match segment {
                "attn" => Some(Role::Attention),
                "mlp" => Some(Role::FeedForward),
                "embed" => Some(Role::Embedding),
                "lm_head" => Some(Role::Head),
                _ if segment.starts_with("ln_") => Some(Role::Norm),
                _ => segment.parse().ok().map(|index| {
                    blocks.push(BlockScope { end, index });
                    Role::Block
                }),
            };
            if end == path.len() {
                output_of = role.into();
            } else {
                roles = roles.and(role);
            }
            end += 1;
        }
        Place { path, roles, output_of, blocks: blocks.leak() }
    }

    /// The value.
    pub fn value(self, op: &'static str, shape: &'a [usize]) -> Site<'a> {
        let Place { path, roles, output_of, blocks } = self;
        Site { roles, output_of, blocks, ..site(path, op, shape) }
    }

    /// The scope.
    pub fn scope(self) -> ScopeSite<'a> {
        ScopeSite { path: self.path, role: self.output_of.iter().next(), blocks: self.blocks }
    }
}

/// The mark that a policy gives.
pub fn mark_of(policy: &dyn Policy, site: &Site<'_>) -> Option<Mark> {
    policy.mark(site).map(|decision| decision.mark)
}

/// The name of the mark that a policy gives to some value of this path, in scopes with roles.
pub fn mark_of_path(policy: &dyn Policy, path: &str) -> Option<&'static str> {
    mark_of(policy, &Place::new(path).value("gelu", &[2, 8])).map(Mark::name)
}
