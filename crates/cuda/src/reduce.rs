//! Reductions over dimensions, sums of squares, and gradients of reductions: kernels/reduce.cu.
//!
//! A group that is cut into pieces leaves its parts, in f64, in the workspace; groups are cut only for a number of
//! blocks, so that is at most 2 MiB. The gradients that need a number for each group take 8 bytes for it there.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters};
use crate::numbers::reduce::*;
use crate::rows::{FOLD_BYTES, PACK, RowPlan, has_packed_rows};
use crate::scan;
use retape_core::kernel::{self, ReduceFn};
use retape_core::layout::{Shape, contiguous_strides};
use retape_core::{DType, Result, Tensor};

/// Elements of one piece of a group.
const PIECE: usize = 16 * 1024;
/// Threads of a block that reduces columns.
const THREADS: usize = 256;
/// Fewest columns for which columns are reduced as such, and fewest rows of a piece of them.
const COLUMNS: usize = 4;
const ROWS: usize = 64;
/// Blocks that groups and rows are cut for.
const BLOCKS: usize = 512;

/// One of `Kind` in kernels/reduce.cu, and the number that goes with it.
#[derive(Debug, Clone, Copy)]
struct Kind(i32, f64);

impl Kind {
    const SQUARES: Kind = Kind(SQUARES, 0.0);

    fn of(f: ReduceFn) -> Kind {
        match f {
            ReduceFn::Sum => Kind(SUM, 0.0),
            ReduceFn::Max => Kind(MAX, 0.0),
            ReduceFn::Min => Kind(MIN, 0.0),
            ReduceFn::Prod => Kind(PROD, 0.0),
            ReduceFn::LogSumExp => Kind(LOG_SUM_EXP, 0.0),
            ReduceFn::Var { correction } => Kind(VAR, correction),
            ReduceFn::Std { correction } => Kind(STD, correction),
            ReduceFn::Norm { ord: 0.0 } => Kind(COUNT, 0.0),
            ReduceFn::Norm { ord: 1.0 } => Kind(NORM_1, 0.0),
            ReduceFn::Norm { ord: 2.0 } => Kind(NORM_2, 0.0),
            ReduceFn::Norm { ord: f64::INFINITY } => Kind(NORM_MAX, 0.0),
            ReduceFn::Norm { ord: f64::NEG_INFINITY } => Kind(NORM_MIN, 0.0),
            ReduceFn::Norm { ord } => Kind(NORM, ord),
        }
    }
    fn is_plain(self) -> bool {
        matches!(self.0, SUM | MAX | MIN | PROD)
    }
    /// Those of two passes, and norms whose sum of powers f64 may not hold.
    fn takes_two_passes(self, x: &Tensor) -> bool {
        let powers = match self.0 {
            NORM_2 => 2.0,
            NORM => self.1.abs(),
            _ => 0.0,
        };
        matches!(self.0, LOG_SUM_EXP | VAR | STD) || powers > if x.dtype() == DType::F64 { 0.0 } else { 6.0 }
    }
    /// Whose gradient needs a number for each group.
    fn needs_stat(self) -> bool {
        matches!(self.0, MAX | MIN | LOG_SUM_EXP | VAR | STD | NORM_2 | NORM | NORM_MAX | NORM_MIN)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ReduceRows {
    kept: TensorArg,
    reduced: TensorArg,
    out: TensorArg,
    parts: u64,
    outputs: i64,
    group: i64,
    piece: i64,
    pieces: i64,
    parameter: f64,
    kind: i32,
    team: i32,
    packs: i32,
    padding: i32,
}
// SAFETY: the fields of `ReduceRows` in kernels/reduce.cu.
unsafe impl Parameters for ReduceRows {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ReduceColumns {
    outer: TensorArg,
    rows: TensorArg,
    columns: TensorArg,
    out: TensorArg,
    parts: u64,
    outers: i64,
    count: i64,
    width: i64,
    piece: i64,
    pieces: i64,
    parameter: f64,
    kind: i32,
    lanes: i32,
    packs: i32,
    padding: i32,
}
// SAFETY: the fields of `ReduceColumns` in kernels/reduce.cu.
unsafe impl Parameters for ReduceColumns {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ReduceParts {
    out: TensorArg,
    parts: u64,
    outputs: i64,
    pieces: i64,
    parameter: f64,
    kind: i32,
    padding: i32,
}
// SAFETY: the fields of `ReduceParts` in kernels/reduce.cu.
unsafe impl Parameters for ReduceParts {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ReduceStat {
    x: ReduceRows,
    y: TensorArg,
}
// SAFETY: the fields of `ReduceStat` in kernels/reduce.cu.
unsafe impl Parameters for ReduceStat {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ReduceGrad {
    x: TensorArg,
    y: TensorArg,
    g: TensorArg,
    out: TensorArg,
    stat: TensorArg,
    group: i64,
    parameter: f64,
    kind: i32,
    padding: i32,
}
// SAFETY: the fields of `ReduceGrad` in kernels/reduce.cu.
unsafe impl Parameters for ReduceGrad {}

/// The dimensions that `out` reduces, and the others.
pub(crate) fn split_dims(x: &Tensor, out: &Tensor) -> (Shape, Shape) {
    (0..x.rank()).partition(|&d| out.shape()[d] == 1 && x.shape()[d] != 1)
}

fn count(x: &Tensor, dims: &[usize]) -> usize {
    dims.iter().map(|&d| x.shape()[d]).product()
}

pub(crate) fn reduce(gpu: &Gpu, k: &kernel::Reduce<'_>) -> Result<()> {
    let kernel::Reduce { f, x, out } = *k;
    let (kind, (reduced, kept)) = (Kind::of(f), split_dims(x, out));
    // The kept dimensions behind all reduced ones.
    let cut = kept.partition_point(|&d| reduced.last().is_some_and(|&r| d < r));
    if kind.is_plain() && count(x, &kept[cut..]) >= COLUMNS && !x.is_empty() && !reduced.is_empty() {
        return columns(gpu, kind, x, (&kept[..cut], &reduced, &kept[cut..]), out);
    }
    rows(gpu, "reduce", kind, x, (&reduced, &kept), out)
}

pub(crate) fn squared_norm(gpu: &Gpu, k: &kernel::SquaredNorm<'_>) -> Result<()> {
    let all: Shape = (0..k.x.rank()).collect();
    rows(gpu, "squared_norm", Kind::SQUARES, k.x, (&all, &[]), k.out)
}

/// x as groups, without an output; a team for each group.
fn groups(
    gpu: &Gpu,
    kernel: &'static str,
    kind: Kind,
    x: &Tensor,
    (reduced, kept): (&[usize], &[usize]),
) -> Result<ReduceRows> {
    let kept_arg = TensorArg::of_dims(gpu, kernel, x, kept)?;
    let reduced_arg = TensorArg::of_dims(gpu, kernel, x, reduced)?;
    let group = count(x, reduced);
    Ok(ReduceRows {
        kept: kept_arg,
        reduced: reduced_arg,
        out: TensorArg::ABSENT,
        parts: 0,
        outputs: count(x, kept) as i64,
        group: group as i64,
        piece: group as i64,
        pieces: 1,
        parameter: kind.1,
        kind: kind.0,
        team: RowPlan::new(0, group, &[]).team,
        packs: is_packed(&kept_arg, &reduced_arg, x.dtype()).into(),
        padding: 0,
    })
}

/// True where the elements of each group lie together, and every group starts on 16 bytes.
fn is_packed(kept: &TensorArg, inner: &TensorArg, dtype: DType) -> bool {
    let aligned = |d: usize| kept.strides[d] * dtype.size() as i64 % 16 == 0;
    inner.rank <= 1 && has_packed_rows(inner) && (0..kept.rank as usize).all(aligned)
}

fn rows(
    gpu: &Gpu,
    kernel: &'static str,
    kind: Kind,
    x: &Tensor,
    dims: (&[usize], &[usize]),
    out: &Tensor,
) -> Result<()> {
    let mut p = groups(gpu, kernel, kind, x, dims)?;
    p.out = TensorArg::flat(gpu, kernel, out)?;
    let (outputs, group) = (p.outputs as usize, p.group as usize);
    if kind.takes_two_passes(x) {
        let plan = RowPlan::new(outputs, group, &[]);
        return gpu.launch(plan.launch(&kernel_for("reduce_twice", x)), &p);
    }
    let wanted = (BLOCKS / outputs.max(1)).max(1);
    let piece = group.div_ceil(wanted).max(PIECE).next_multiple_of(PACK);
    let pieces = group.div_ceil(piece).max(1);
    (p.piece, p.pieces) = (piece as i64, pieces as i64);
    let plan = RowPlan::new(outputs * pieces, group.min(piece), &[]);
    p.team = plan.team;
    let launch = |gpu: &Gpu, p: &ReduceRows| {
        let name = if kind.is_plain() { "reduce_rows" } else { "reduce_norms" };
        gpu.launch(plan.launch(&kernel_for(name, x)), p)
    };
    if pieces == 1 {
        return launch(gpu, &p);
    }
    let workspace = gpu.workspace(outputs * pieces * 8)?;
    p.parts = workspace.address() as u64;
    launch(gpu, &p)?;
    put_together(gpu, kind, p.parts, (outputs, pieces), p.out)
}

fn columns(
    gpu: &Gpu,
    kind: Kind,
    x: &Tensor,
    (before, reduced, behind): (&[usize], &[usize], &[usize]),
    out: &Tensor,
) -> Result<()> {
    let arg = |dims| TensorArg::of_dims(gpu, "reduce", x, dims);
    let [outer, rows, columns] = [arg(before)?, arg(reduced)?, arg(behind)?];
    let [outers, count, width] = [before, reduced, behind].map(|dims| count(x, dims));
    let lanes = width.div_ceil(PACK).next_power_of_two().min(32);
    let steps = (THREADS / lanes).min(count.next_power_of_two());
    let block = (lanes * steps).max(32);
    let strips = width.div_ceil(lanes * PACK);
    let wanted = (BLOCKS / (outers * strips).max(1)).max(1);
    let piece = count.div_ceil(wanted).max(ROWS);
    let pieces = count.div_ceil(piece);
    let packs = is_packed(&outer, &columns, x.dtype()) && is_packed(&rows, &columns, x.dtype());
    let mut p = ReduceColumns {
        outer,
        rows,
        columns,
        out: TensorArg::flat(gpu, "reduce", out)?,
        parts: 0,
        outers: outers as i64,
        count: count as i64,
        width: width as i64,
        piece: piece as i64,
        pieces: pieces as i64,
        parameter: kind.1,
        kind: kind.0,
        lanes: lanes as i32,
        packs: packs.into(),
        padding: 0,
    };
    let kernel = kernel_for("reduce_columns", x);
    let grid = blocks(outers * strips * pieces, 1);
    let launch = Launch { kernel: &kernel, grid, block: block as u32, shared: (block * PACK * 8) as u32 };
    if pieces == 1 {
        return gpu.launch(launch, &p);
    }
    let outputs = outers * width;
    let workspace = gpu.workspace(outputs * pieces * 8)?;
    p.parts = workspace.address() as u64;
    gpu.launch(launch, &p)?;
    put_together(gpu, kind, p.parts, (outputs, pieces), p.out)
}

fn put_together(gpu: &Gpu, kind: Kind, parts: u64, (outputs, pieces): (usize, usize), out: TensorArg) -> Result<()> {
    let launch = Launch { kernel: "reduce_parts", grid: blocks(outputs, 4), block: 128, shared: FOLD_BYTES };
    let (outputs, pieces, parameter) = (outputs as i64, pieces as i64, kind.1);
    gpu.launch(launch, &ReduceParts { out, parts, outputs, pieces, parameter, kind: kind.0, padding: 0 })
}

pub(crate) fn reduce_grad(gpu: &Gpu, k: &kernel::ReduceGrad<'_>) -> Result<()> {
    let kernel::ReduceGrad { f, x, y, g, out } = *k;
    let name = "reduce_grad";
    if x.is_empty() {
        return Ok(());
    }
    let (kind, (reduced, kept)) = (Kind::of(f), split_dims(x, y));
    if f == ReduceFn::Prod {
        return scan::product_grad(gpu, name, x, g, (&kept, &reduced), true, out);
    }
    let flat = |tensor: &Tensor| TensorArg::flat(gpu, name, tensor);
    let mut p = ReduceGrad {
        x: flat(x)?,
        y: flat(&y.expand(x.shape())?)?,
        g: flat(&g.expand(x.shape())?)?,
        out: flat(out)?,
        stat: TensorArg::ABSENT,
        group: count(x, &reduced) as i64,
        parameter: kind.1,
        kind: kind.0,
        padding: 0,
    };
    let kernel = kernel_for("reduce_grad", x);
    let launch = Launch { kernel: &kernel, grid: blocks(x.len(), THREADS), block: THREADS as u32, shared: 0 };
    if !kind.needs_stat() {
        return gpu.launch(launch, &p);
    }
    let outputs = count(x, &kept);
    let workspace = gpu.workspace(outputs * 8)?;
    // A number for each group, repeated over it.
    let own = contiguous_strides(&kept.iter().map(|&d| x.shape()[d]).collect::<Shape>());
    let mut stat = TensorArg::plain(gpu, name, x)?;
    (stat.data, stat.dtype, stat.strides) = (workspace.address() as u64, 0, TensorArg::ABSENT.strides);
    kept.iter().zip(own).for_each(|(&d, stride)| stat.strides[d] = stride as i64);
    p.stat = stat;
    let mut each = groups(gpu, name, kind, x, (&reduced, &kept))?;
    each.out = TensorArg { rank: 1, ..stat };
    (each.out.shape[0], each.out.strides[0]) = (outputs as i64, 1);
    let plan = RowPlan::new(outputs, each.group as usize, &[]);
    let y = TensorArg::of_dims(gpu, name, y, &kept)?;
    gpu.launch(plan.launch(&kernel_for("reduce_stat", x)), &ReduceStat { x: each, y })?;
    gpu.launch(launch, &p)
}
