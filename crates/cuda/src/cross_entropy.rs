//! Cross-entropy, the loss of log-probabilities, and their gradients: kernels/cross_entropy.cu.
//!
//! In the workspace: two totals, 8 bytes for each team of threads where losses are summed, 16 for each class in the
//! gradient by class weights.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters, Workspace};
use crate::indices::{self, Allowed, Bad, CHECK_BYTES};
use crate::numbers;
use crate::rows::{FOLD_BYTES, RowPlan, WARPS, extent};
use retape_core::kernel::{self, ClassScores, LossReduction};
use retape_core::{Error, Result, Tensor};

/// Threads of the kernels that are one block.
const ONE_BLOCK: u32 = 1024;
/// Most blocks of the loss; each of their teams leaves the sum of its rows' losses.
const BLOCKS: u32 = 1024;
/// Where in the workspace what isn't totals starts.
const TOTALS: usize = 256;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ScoresArg {
    plan: RowPlan,
    logits: TensorArg,
    target: TensorArg,
    weight: TensorArg,
    totals: u64,
    ignore: i64,
    keep: f64,
    spread: f64,
    reduction: i32,
    given: i32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Totals {
    scores: ScoresArg,
    totals: u64,
}
// SAFETY: the fields of `Totals` in kernels/cross_entropy.cu.
unsafe impl Parameters for Totals {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CrossEntropy {
    scores: ScoresArg,
    loss: TensorArg,
    stats: TensorArg,
    losses: u64,
    teams: i64,
}
// SAFETY: the fields of `CrossEntropy` in kernels/cross_entropy.cu.
unsafe impl Parameters for CrossEntropy {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CrossEntropyGrad {
    scores: ScoresArg,
    stats: TensorArg,
    g: TensorArg,
    out: TensorArg,
}
// SAFETY: the fields of `CrossEntropyGrad` in kernels/cross_entropy.cu.
unsafe impl Parameters for CrossEntropyGrad {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CrossEntropyWeightGrad {
    scores: ScoresArg,
    stats: TensorArg,
    g: TensorArg,
    out: TensorArg,
    sums: u64,
    counts: u64,
}
// SAFETY: the fields of `CrossEntropyWeightGrad` in kernels/cross_entropy.cu.
unsafe impl Parameters for CrossEntropyWeightGrad {}

impl ScoresArg {
    /// Rows run along the last dimension of the logits.
    fn new(
        gpu: &Gpu,
        kernel: &'static str,
        scores: &ClassScores<'_>,
        out: Option<&TensorArg>,
        totals: u64,
    ) -> Result<ScoresArg> {
        let ClassScores { logits, target, weight, spec } = *scores;
        let (rows, width) = extent(logits);
        let given = target.dtype().is_float();
        let logits = TensorArg::rows(gpu, kernel, logits)?;
        let weight = TensorArg::rows(gpu, kernel, weight)?;
        let target = if given { TensorArg::rows(gpu, kernel, target)? } else { TensorArg::flat(gpu, kernel, target)? };
        let in_rows = if given { target } else { TensorArg::ABSENT };
        let plan = RowPlan::new(rows, width, &[&logits, &weight, &in_rows, out.unwrap_or(&TensorArg::ABSENT)]);
        let reduction = match spec.reduction {
            LossReduction::None => numbers::reduction::EACH,
            LossReduction::Sum => numbers::reduction::SUM,
            LossReduction::Mean => numbers::reduction::MEAN,
        };
        let (keep, spread) = (1.0 - spec.smoothing, spec.smoothing / width as f64);
        let (ignore, given) = (spec.ignore, given.into());
        Ok(ScoresArg { plan, logits, target, weight, totals, ignore, keep, spread, reduction, given })
    }

    /// Queues the kernel that finds the totals.
    fn find_totals(self, gpu: &Gpu, logits: &Tensor) -> Result<()> {
        let kernel = kernel_for("cross_entropy_totals", logits);
        gpu.launch(one_block(&kernel), &Totals { scores: self, totals: self.totals })
    }
}

fn one_block(kernel: &str) -> Launch<'_> {
    Launch { kernel, grid: [1, 1, 1], block: ONE_BLOCK, shared: FOLD_BYTES }
}

pub(crate) fn cross_entropy(gpu: &Gpu, k: &kernel::CrossEntropy<'_>) -> Result<()> {
    let name = "cross_entropy";
    let ClassScores { logits, target, spec, .. } = k.scores;
    let (rows, classes) = extent(logits);
    let summed = spec.reduction != LossReduction::None;
    let after = CHECK_BYTES.max(BLOCKS as usize * WARPS / 32 * 8);
    let workspace = gpu.workspace(TOTALS + after)?;
    let (totals, losses) = (workspace.address() as u64, (workspace.address() + TOTALS) as u64);
    if !target.dtype().is_float() {
        let ignore = spec.ignore;
        let allowed = Allowed { low: 0, end: classes as i64, ignore: Some(ignore) };
        if let Some(Bad { index, position }) = indices::find_bad(gpu, name, target, allowed, losses as usize)? {
            let reason =
                format!("target {index} in row {position} is neither in 0..{classes} nor the ignored value {ignore}");
            return Err(Error::InvalidValue { kernel: name, reason });
        }
    }
    let arg = ScoresArg::new(gpu, name, &k.scores, None, totals)?;
    let stats = k.stats.map_or(Ok(TensorArg::ABSENT), |stats| TensorArg::flat(gpu, name, stats))?;
    let kernel = kernel_for(name, logits);
    let mut launch = arg.plan.launch(&kernel);
    launch.grid[0] = launch.grid[0].min(BLOCKS);
    let teams = (launch.grid[0] as usize * launch.block as usize / arg.plan.team as usize).min(rows) as i64;
    let p = CrossEntropy { scores: arg, loss: TensorArg::flat(gpu, name, k.loss)?, stats, losses, teams };
    gpu.launch(launch, &p)?;
    if summed {
        arg.find_totals(gpu, logits)?;
        gpu.launch(one_block("cross_entropy_sum"), &p)?;
    }
    Ok(())
}

/// The totals, and a row-wise gradient that needs them.
fn gradient(
    gpu: &Gpu,
    name: &'static str,
    scores: ClassScores<'_>,
    stats: Option<&Tensor>,
    g: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let workspace = gpu.workspace(TOTALS)?;
    let out = TensorArg::rows(gpu, name, out)?;
    let arg = ScoresArg::new(gpu, name, &scores, Some(&out), workspace.address() as u64)?;
    arg.find_totals(gpu, scores.logits)?;
    let stats = stats.map_or(Ok(TensorArg::ABSENT), |stats| TensorArg::flat(gpu, name, stats))?;
    let p = CrossEntropyGrad { scores: arg, stats, g: TensorArg::flat(gpu, name, g)?, out };
    gpu.launch(arg.plan.launch(&kernel_for(name, scores.logits)), &p)
}

pub(crate) fn cross_entropy_grad(gpu: &Gpu, k: &kernel::CrossEntropyGrad<'_>) -> Result<()> {
    gradient(gpu, "cross_entropy_grad", k.scores, Some(k.stats), k.g, k.out)
}

/// Log-probabilities aren't read: `out` stands in for them.
pub(crate) fn nll_loss_grad(gpu: &Gpu, k: &kernel::NllLossGrad<'_>) -> Result<()> {
    let scores = ClassScores { logits: k.out, target: k.target, weight: k.weight, spec: k.spec };
    gradient(gpu, "nll_loss_grad", scores, None, k.g, k.out)
}

/// The target isn't read: the logits stand in for it.
pub(crate) fn target_grad(gpu: &Gpu, k: &kernel::CrossEntropyTargetGrad<'_>) -> Result<()> {
    let scores = ClassScores { logits: k.logits, target: k.logits, weight: k.weight, spec: k.spec };
    gradient(gpu, "cross_entropy_target_grad", scores, Some(k.stats), k.g, k.out)
}

pub(crate) fn weight_grad(gpu: &Gpu, k: &kernel::CrossEntropyWeightGrad<'_>) -> Result<()> {
    let (name, logits) = ("cross_entropy_weight_grad", k.scores.logits);
    let (_, classes) = extent(logits);
    let workspace: Workspace<'_> = gpu.workspace(TOTALS + 16 * classes)?;
    let sums = workspace.address() + TOTALS;
    let arg = ScoresArg::new(gpu, name, &k.scores, None, workspace.address() as u64)?;
    arg.find_totals(gpu, logits)?;
    let stats = k.stats.map_or(Ok(TensorArg::ABSENT), |stats| TensorArg::flat(gpu, name, stats))?;
    let (g, out) = (TensorArg::flat(gpu, name, k.g)?, TensorArg::flat(gpu, name, k.out)?);
    let counts = (sums + 8 * classes) as u64;
    let p = CrossEntropyWeightGrad { scores: arg, stats, g, out, sums: sums as u64, counts };
    let kernel = kernel_for("cross_entropy_weight_sums", logits);
    gpu.launch(Launch { kernel: &kernel, grid: blocks(classes, 256), block: 256, shared: 0 }, &p)?;
    gpu.launch(one_block(&kernel_for(name, logits)), &p)
}
