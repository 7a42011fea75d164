//! Matrix products: by cuBLASLt where there is one and it takes the operands as they lie, else kernels/matmul_mma.cu
//! (16 bits) and kernels/matmul.cu (all else).

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::copy;
use crate::cublas::{CublasLt, Gemm, Operand};
use crate::device::{Gpu, Launch, Parameters};
use retape_core::{DType, Result, Tensor, kernel};

/// Threads of a block, and the side of a tile, of kernels/matmul.cu.
const THREADS: u32 = 256;
const TILE: usize = 64;
/// Elements of a row of a tile there, and of k at a time.
const ROW: u32 = 68;
const DEPTH: u32 = 16;
/// Products with so few rows or columns are computed element by element, if their operands lie along k.
const FEW: i64 = 4;
/// cuBLASLt takes one batch dimension. Where there are more, it is called for each matrix of the outer ones, at most
/// this often.
const CALLS: i64 = 64;

/// Strides of a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
struct Steps {
    row: i64,
    column: i64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Matmul {
    a: TensorArg,
    b: TensorArg,
    out: TensorArg,
    a_steps: Steps,
    b_steps: Steps,
    out_steps: Steps,
    m: i64,
    n: i64,
    k: i64,
    down: i64,
    across: i64,
    tiles: i64,
    alpha: f64,
    accumulate: i32,
    aligned_a: i32,
    aligned_b: i32,
    aligned_out: i32,
}
// SAFETY: the fields of `Matmul` in kernels/matmul.cuh.
unsafe impl Parameters for Matmul {}

pub(crate) fn matmul(gpu: &Gpu, cublas: &CublasLt, k: &kernel::Matmul<'_>) -> Result<()> {
    let kernel::Matmul { a, b, accumulate, out, .. } = *k;
    if out.is_empty() {
        return Ok(());
    }
    if a.shape()[a.rank() - 1] == 0 {
        return if accumulate { Ok(()) } else { copy::fill(gpu, &kernel::Fill { value: 0.0, out }) };
    }
    let product = Matmul::new(gpu, k)?;
    let dtypes = [a.dtype(), b.dtype(), out.dtype()];
    if product.by_cublas(gpu, cublas, dtypes)? {
        return Ok(());
    }
    product.by_kernel(gpu, [a.dtype(), b.dtype()], out)
}

impl Matmul {
    fn new(gpu: &Gpu, product: &kernel::Matmul<'_>) -> Result<Matmul> {
        let kernel::Matmul { a, b, alpha, accumulate, out } = *product;
        let [a_arg, b_arg, out_arg] = TensorArg::merged(gpu, "matmul", [a, b, out], 2)?;
        let [k, n] = size_of_matrix(&b_arg);
        let [m, _] = size_of_matrix(&out_arg);
        let (mut a_arg, mut a_steps) = split(a_arg);
        let (mut b_arg, mut b_steps) = split(b_arg);
        let (mut out_arg, mut out_steps) = split(out_arg);
        let mut m = m;
        // One b for all: a higher a, if its rows go on from matrix to matrix.
        if b_arg.rank == 1 && b_arg.strides[0] == 0 {
            let goes_on = |arg: &TensorArg, steps: Steps| arg.strides[0] == m * steps.row;
            if m == 1 || goes_on(&a_arg, a_steps) && goes_on(&out_arg, out_steps) {
                if m == 1 {
                    (a_steps.row, out_steps.row) = (a_arg.strides[0], out_arg.strides[0]);
                }
                m *= out_arg.shape[0];
                (a_arg.rank, b_arg.rank, out_arg.rank) = (0, 0, 0);
            }
        }
        a_steps = settled(a_steps, [m, k]);
        b_steps = settled(b_steps, [k, n]);
        out_steps = settled(out_steps, [m, n]);
        if n == 1 {
            out_steps.column = 1; // rows of one element
        }
        Ok(Matmul {
            aligned_a: aligned(&a_arg, a_steps, [m, k], a.dtype()),
            aligned_b: aligned(&b_arg, b_steps, [k, n], b.dtype()),
            aligned_out: aligned(&out_arg, out_steps, [m, n], out.dtype()),
            a: a_arg,
            b: b_arg,
            out: out_arg,
            a_steps,
            b_steps,
            out_steps,
            m,
            n,
            k,
            down: 0,
            across: 0,
            tiles: 0,
            alpha,
            accumulate: accumulate.into(),
        })
    }

    fn batch(&self) -> i64 {
        self.out.shape[..self.out.rank as usize].iter().product()
    }

    /// With tiles of this size.
    fn tiled(mut self, size: i64) -> Matmul {
        (self.down, self.across) = ((self.m + size - 1) / size, (self.n + size - 1) / size);
        self.tiles = self.batch() * self.down * self.across;
        self
    }

    fn by_kernel(self, gpu: &Gpu, [a, b]: [DType; 2], out: &Tensor) -> Result<()> {
        let along_k = (self.a_steps.column == 1, self.b_steps.row == 1);
        if along_k == (true, true) && self.m.min(self.n) <= FEW {
            let product = self.tiled(1);
            let grid = blocks(product.tiles as usize, THREADS as usize / 32);
            let kernel = kernel_for("matmul_dot", out);
            return gpu.launch(Launch { kernel: &kernel, grid, block: THREADS, shared: 0 }, &product);
        }
        let lies = [self.a_steps, self.b_steps].iter().all(|steps| steps.row == 1 || steps.column == 1);
        let short = [self.m, self.n, self.k].iter().all(|&size| i32::try_from(size).is_ok());
        if a == b && matches!(a, DType::BF16 | DType::F16) && lies && short && self.out_steps.column == 1 {
            // The large tiles do more with what they load; the small ones make blocks for more multiprocessors.
            let large = self.tiled(128);
            let enough = large.tiles >= gpu.properties().multiprocessors.into();
            let (product, size, block, shared) =
                if enough { (large, 128, 256, 48 << 10) } else { (self.tiled(64), 64, 128, 24 << 10) };
            let name = if a == DType::BF16 { "bf16" } else { "f16" };
            let lie = |along_k| if along_k { 'k' } else { 'o' };
            let kernel = format!("matmul_mma_{name}_{size}_{}{}", lie(along_k.0), lie(along_k.1));
            let grid = blocks(product.tiles as usize, 1);
            return gpu.launch(Launch { kernel: &kernel, grid, block, shared }, &product);
        }
        let product = self.tiled(TILE as i64);
        let computed = if out.dtype() == DType::F64 { 8 } else { 4 };
        let (kernel, shared) = (kernel_for("matmul_simt", out), 2 * DEPTH * ROW * computed);
        let grid = blocks(product.tiles as usize, 1);
        gpu.launch(Launch { kernel: &kernel, grid, block: THREADS, shared }, &product)
    }

    /// False where cuBLASLt is missing or doesn't take these operands.
    ///
    /// Its matrices are column by column, so it is asked for the transpose: n x m = (n x k) (k x m), where the first
    /// operand is b.
    fn by_cublas(&self, gpu: &Gpu, cublas: &CublasLt, [a, b, out]: [DType; 3]) -> Result<bool> {
        let half = matches!(a, DType::BF16 | DType::F16) && out == DType::F32;
        // With alpha 0 it reads nothing, and NaN in an operand would be lost.
        if a != b || (a != out && !half) || self.alpha == 0.0 {
            return Ok(false);
        }
        // The innermost batch dimension is its own, the others are calls of it.
        let outer = (self.out.rank - 1).max(0) as usize;
        let calls: i64 = self.out.shape[..outer].iter().product();
        let batch = if self.out.rank > 0 { self.out.shape[outer] } else { 1 };
        let sizes = [self.m, self.n, self.k, batch];
        if calls > CALLS || sizes.iter().any(|&size| i32::try_from(size).is_err()) {
            return Ok(false);
        }
        let operand = |arg: &TensorArg, steps: Steps, [rows, columns]: [i64; 2], dtype: DType| {
            let (transposed, ld, least) = match steps {
                Steps { row, column: 1 } => (false, row, columns),
                Steps { row: 1, column } => (true, column, rows),
                _ => return None,
            };
            let batch_stride = if arg.rank > 0 { arg.strides[outer] } else { 0 };
            // The largest power of 2, up to 256, that divides every matrix's address.
            let bytes = arg.strides[..arg.rank as usize].iter().map(|stride| *stride as u64 * dtype.size() as u64);
            let alignment = 1 << bytes.fold(arg.data | 256, |all, bytes| all | bytes).trailing_zeros();
            // Its matrices don't overlap themselves.
            (ld >= least).then_some(Operand { dtype, transposed, ld, batch_stride, alignment })
        };
        let a = operand(&self.a, self.a_steps, [self.m, self.k], a);
        let b = operand(&self.b, self.b_steps, [self.k, self.n], b);
        let out = operand(&self.out, self.out_steps, [self.m, self.n], out).filter(|out| !out.transposed);
        let (Some(a), Some(b), Some(out)) = (a, b, out) else { return Ok(false) };
        let gemm = Gemm { a: b, b: a, out, m: self.n, n: self.m, k: self.k, batch };
        let address =
            |arg: &TensorArg, dtype: DType, call| arg.data + offset(arg, outer, call) as u64 * dtype.size() as u64;
        let addresses = (0..calls).map(|call| {
            [address(&self.b, b.dtype, call), address(&self.a, a.dtype, call), address(&self.out, out.dtype, call)]
        });
        cublas.run(gpu, &gemm, addresses, self.alpha, self.accumulate != 0)
    }
}

/// Position of the matrix that is number `index` in the order of the first `dims` dimensions.
fn offset(arg: &TensorArg, dims: usize, mut index: i64) -> i64 {
    let mut at = 0;
    for d in (0..dims).rev() {
        at += index % arg.shape[d] * arg.strides[d];
        index /= arg.shape[d];
    }
    at
}

fn size_of_matrix(arg: &TensorArg) -> [i64; 2] {
    let batch = arg.rank as usize - 2;
    [arg.shape[batch], arg.shape[batch + 1]]
}

/// The batch dimensions, and the strides of the matrices.
fn split(mut arg: TensorArg) -> (TensorArg, Steps) {
    let batch = arg.rank as usize - 2;
    let steps = Steps { row: arg.strides[batch], column: arg.strides[batch + 1] };
    arg.rank -= 2;
    (arg, steps)
}

/// The strides with those that don't matter, of dimensions of size 1, set to what they would be in a matrix without
/// gaps.
fn settled(steps: Steps, [rows, columns]: [i64; 2]) -> Steps {
    match (rows, columns) {
        (1, 1) => Steps { row: 1, column: 1 },
        (1, _) => Steps { row: if steps.column == 1 { columns } else { 1 }, ..steps },
        (_, 1) => Steps { column: if steps.row == 1 { rows } else { 1 }, ..steps },
        _ => steps,
    }
}

/// 1 where every row (along the dimension of stride 1) starts 16-byte aligned, in every matrix; else 0.
fn aligned(arg: &TensorArg, steps: Steps, [rows, columns]: [i64; 2], dtype: DType) -> i32 {
    let whole = |stride: i64| stride * dtype.size() as i64 % 16 == 0;
    let (step, count) = if steps.column == 1 { (steps.row, rows) } else { (steps.column, columns) };
    let batch = arg.rank as usize;
    (arg.data.is_multiple_of(16)
        && (count == 1 || whole(step))
        && arg.strides[..batch].iter().all(|&stride| whole(stride)))
    .into()
}
