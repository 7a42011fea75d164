//! Values for policies to decide about.

use retape_core::{DType, Mark, Policy, Site};

/// An f32 value.
pub fn site<'a>(path: &'a str, op: &'static str, shape: &'a [usize]) -> Site<'a> {
    let bytes = 4 * shape.iter().product::<usize>() as u64;
    Site { id: 0, path, op, output: 0, shape, dtype: DType::F32, bytes, flops: bytes, traffic: 2 * bytes }
}

/// The mark that a policy gives.
pub fn mark_of(policy: &dyn Policy, site: &Site<'_>) -> Option<Mark> {
    policy.mark(site).map(|decision| decision.mark)
}

/// The name of the mark that a policy gives to some value of this path.
pub fn mark_of_path(policy: &dyn Policy, path: &str) -> Option<&'static str> {
    mark_of(policy, &site(path, "gelu", &[2, 8])).map(Mark::name)
}
