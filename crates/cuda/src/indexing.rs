//! Elements by their position: kernels/indexing.cu.
//!
//! Scatter-add sorts a key of 8 bytes for each entry, in the workspace that the op declares, where entries may meet.
//! An entry is one element of the source, or a row of such where the index repeats along it.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::copy;
use crate::device::{Gpu, Launch, Parameters};
use crate::indices::{self, Allowed, Bad, CHECK_BYTES};
use crate::sort;
use retape_core::layout::Shape;
use retape_core::layout::position_of_first;
use retape_core::{Error, Result, Tensor, kernel};

const THREADS: usize = 256;
/// Index tensors of one call: MAX_INDICES in kernels/indexing.cu.
const MAX_INDICES: usize = 8;
/// Elements that lie along a line from which on neighbouring threads take neighbouring lines.
const INNER: usize = 32;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Indices {
    index: [TensorArg; MAX_INDICES],
    sizes: [i64; MAX_INDICES],
    strides: [i64; MAX_INDICES],
    count: i32,
    padding: i32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Gather {
    x: TensorArg,
    out: TensorArg,
    indices: Indices,
}
// SAFETY: the fields of `Gather` in kernels/indexing.cu.
unsafe impl Parameters for Gather {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Scatter {
    out_entry: TensorArg,
    out_column: TensorArg,
    source_entry: TensorArg,
    source_column: TensorArg,
    indices: Indices,
    keys: u64,
    entries: i64,
    columns: i64,
    alpha: f64,
}
// SAFETY: the fields of `Scatter` in kernels/indexing.cu.
unsafe impl Parameters for Scatter {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct MaxIndex {
    others: TensorArg,
    line: TensorArg,
    values: TensorArg,
    indices: TensorArg,
    lines: i64,
    length: i64,
    team: i32,
    padding: i32,
}
// SAFETY: the fields of `MaxIndex` in kernels/indexing.cu.
unsafe impl Parameters for MaxIndex {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct MaxIndexGrad {
    indices: TensorArg,
    g: TensorArg,
    out: TensorArg,
    length: i64,
    inner: i64,
}
// SAFETY: the fields of `MaxIndexGrad` in kernels/indexing.cu.
unsafe impl Parameters for MaxIndexGrad {}

/// One thread an item.
fn each(kernel: &str, items: usize) -> Launch<'_> {
    Launch { kernel, grid: blocks(items, THREADS), block: THREADS as u32, shared: 0 }
}

/// `base_1`, `base_2`, `base_4` or `base_8`, by the size of elements, for moving them.
fn by_size(base: &str, tensor: &Tensor) -> String {
    format!("{base}_{}", tensor.dtype().size())
}

/// True where no index differs along dimension `d`.
fn repeats(indices: &[&Tensor], d: usize) -> bool {
    indices.iter().all(|index| index.layout().strides[d] == 0)
}

/// Fails where an index lies outside its dimension of `tensor`.
fn check(gpu: &Gpu, kernel: &'static str, tensor: &Tensor, indices: &[&Tensor], wrap: bool) -> Result<()> {
    let workspace = gpu.workspace(CHECK_BYTES)?;
    for (k, index_tensor) in indices.iter().enumerate() {
        let n = tensor.shape()[k] as i64;
        let first = if wrap { -n } else { 0 };
        let mut once: Tensor = (*index_tensor).clone();
        for d in (0..index_tensor.rank()).filter(|&d| repeats(indices, d)) {
            once = once.narrow(d, 0, 1)?;
        }
        let allowed = Allowed { low: first, end: n, ignore: None };
        if let Some(Bad { index, position }) = indices::find_bad(gpu, kernel, &once, allowed, workspace.address())? {
            let position = position_of_first(position, once.shape(), index_tensor.shape());
            let reason = format!(
                "index {index} at position {position} is outside a dimension of size {n}; allowed are {first}..{n}"
            );
            return Err(Error::InvalidValue { kernel, reason });
        }
    }
    Ok(())
}

/// The indices by some of their dimensions, which index the first ones of `tensor`.
fn arguments(gpu: &Gpu, kernel: &'static str, tensor: &Tensor, indices: &[&Tensor], dims: &[usize]) -> Result<Indices> {
    if indices.len() > MAX_INDICES {
        let reason = format!("{} index tensors; there may be {MAX_INDICES}", indices.len());
        return Err(Error::Unsupported { kernel, device: gpu.name().into(), reason });
    }
    let mut arg = Indices {
        index: [TensorArg::ABSENT; MAX_INDICES],
        sizes: [0; MAX_INDICES],
        strides: [0; MAX_INDICES],
        count: indices.len() as i32,
        padding: 0,
    };
    for (k, index) in indices.iter().enumerate() {
        arg.index[k] = TensorArg::of_dims(gpu, kernel, index, dims)?;
        (arg.sizes[k], arg.strides[k]) = (tensor.shape()[k] as i64, tensor.layout().strides[k] as i64);
    }
    Ok(arg)
}

pub(crate) fn gather(gpu: &Gpu, k: &kernel::Gather<'_>) -> Result<()> {
    let kernel::Gather { x, indices, wrap, out } = *k;
    let name = "gather";
    if out.is_empty() {
        return Ok(());
    }
    check(gpu, name, x, indices, wrap)?;
    let dims: Shape = (0..out.rank()).collect();
    let behind: Shape = (indices.len()..x.rank()).collect();
    let p = Gather {
        x: TensorArg::of_dims(gpu, name, x, &behind)?,
        out: TensorArg::flat(gpu, name, out)?,
        indices: arguments(gpu, name, x, indices, &dims)?,
    };
    gpu.launch(each(&by_size(name, x), out.len()), &p)
}

pub(crate) fn scatter_add(gpu: &Gpu, k: &kernel::ScatterAdd<'_>) -> Result<()> {
    if k.source.is_empty() {
        return Ok(());
    }
    check(gpu, "scatter_add", k.out, k.indices, k.wrap)?;
    add_at("scatter_add", gpu, k)
}

/// Scatter-add of a source that isn't empty, where indices are in range or to be left out.
pub(crate) fn add_at(name: &'static str, gpu: &Gpu, k: &kernel::ScatterAdd<'_>) -> Result<()> {
    let kernel::ScatterAdd { source, indices, alpha, order, out, .. } = *k;
    let behind = |d: usize| d + indices.len();
    let met = |d: usize| out.layout().strides[behind(d)] == 0;
    // Columns: each place of out is in one of them, and all have the same indices. Entries are numbered such that
    // those that may meet, which differ only where out repeats, keep their order.
    let sized = (0..source.rank()).filter(|&d| source.shape()[d] > 1);
    let (columns, rest): (Shape, Shape) = sized.partition(|&d| !met(d) && repeats(indices, d));
    let (own, meeting): (Shape, Shape) = rest.into_iter().partition(|&d| !met(d));
    let sorted = !meeting.is_empty();
    let entries: Shape = own.into_iter().chain(meeting).collect();
    let shifted = |dims: &[usize]| dims.iter().map(|&d| behind(d)).collect::<Shape>();
    let count = |dims: &[usize]| dims.iter().map(|&d| source.shape()[d]).product::<usize>();
    let places = out.layout().span();
    if places.checked_mul(count(&entries)).is_none_or(|keys| keys > i64::MAX as usize) {
        let reason = format!("{} entries for {places} places have more keys than 63 bits can count", count(&entries));
        return Err(Error::Unsupported { kernel: name, device: gpu.name().into(), reason });
    }
    let p = Scatter {
        out_entry: TensorArg::of_dims(gpu, name, out, &shifted(&entries))?,
        out_column: TensorArg::of_dims(gpu, name, out, &shifted(&columns))?,
        source_entry: TensorArg::of_dims(gpu, name, source, &entries)?,
        source_column: TensorArg::of_dims(gpu, name, source, &columns)?,
        indices: arguments(gpu, name, out, indices, &entries)?,
        keys: if sorted {
            (order.storage().address() + order.layout().offset * order.dtype().size()) as u64
        } else {
            0
        },
        entries: count(&entries) as i64,
        columns: count(&columns) as i64,
        alpha,
    };
    if sorted {
        gpu.launch(each("scatter_keys", count(&entries)), &p)?;
        sort::sort(gpu, p.keys, count(&entries))?;
    }
    gpu.launch(each(&kernel_for("scatter_add", out), source.len()), &p)
}

pub(crate) fn flip(gpu: &Gpu, k: &kernel::Flip<'_>) -> Result<()> {
    let kernel::Flip { x, dims, out } = *k;
    if out.is_empty() {
        return Ok(());
    }
    let mut x_arg = TensorArg::plain(gpu, "flip", x)?;
    for &d in dims {
        let last = (x_arg.shape[d] - 1) * x_arg.strides[d] * x.dtype().size() as i64;
        (x_arg.data, x_arg.strides[d]) = (x_arg.data + last as u64, -x_arg.strides[d]);
    }
    copy::copy_elements(gpu, x_arg, TensorArg::flat(gpu, "flip", out)?, out)
}

/// Threads that share a line along `dim`: neighbouring lines go to neighbouring threads where they lie side by side,
/// else a warp has one. The shape alone decides.
pub(crate) fn line_team(x: &Tensor, dim: usize) -> usize {
    if x.shape()[dim + 1..].iter().product::<usize>() >= INNER || x.shape()[dim] == 1 { 1 } else { 32 }
}

/// All dimensions but one.
pub(crate) fn others(x: &Tensor, dim: usize) -> Shape {
    (0..x.rank()).filter(|&d| d != dim).collect()
}

pub(crate) fn max_index(gpu: &Gpu, k: &kernel::MaxIndex<'_>) -> Result<()> {
    let kernel::MaxIndex { x, dim, values, indices } = *k;
    let name = "max_index";
    let team = line_team(x, dim);
    let p = MaxIndex {
        others: TensorArg::of_dims(gpu, name, x, &others(x, dim))?,
        line: TensorArg::of_dims(gpu, name, x, &[dim])?,
        values: TensorArg::flat(gpu, name, values)?,
        indices: TensorArg::flat(gpu, name, indices)?,
        lines: values.len() as i64,
        length: x.shape()[dim] as i64,
        team: team as i32,
        padding: 0,
    };
    gpu.launch(each(&kernel_for(name, x), values.len() * team), &p)
}

pub(crate) fn max_index_grad(gpu: &Gpu, k: &kernel::MaxIndexGrad<'_>) -> Result<()> {
    let kernel::MaxIndexGrad { indices, g, dim, out } = *k;
    let name = "max_index_grad";
    let p = MaxIndexGrad {
        indices: TensorArg::flat(gpu, name, &indices.expand(out.shape())?)?,
        g: TensorArg::flat(gpu, name, &g.expand(out.shape())?)?,
        out: TensorArg::flat(gpu, name, out)?,
        length: out.shape()[dim] as i64,
        inner: out.shape()[dim + 1..].iter().product::<usize>().max(1) as i64,
    };
    gpu.launch(each(&kernel_for(name, out), out.len()), &p)
}
