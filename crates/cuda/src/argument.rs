//! Tensors as kernels take them: the twin of `Tensor` in kernels/tensor.cuh, and the ways to bring tensors of any
//! strides into the few forms that kernels expect.

use crate::device::Gpu;
use retape_core::{DType, Error, Result, Tensor};

/// Dimensions that a kernel can take, after those that can be merged are.
pub(crate) const MAX_RANK: usize = 8;

/// A tensor for a kernel.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct TensorArg {
    pub data: u64,
    pub dtype: i32,
    pub rank: i32,
    pub shape: [i64; MAX_RANK],
    pub strides: [i64; MAX_RANK],
}

impl TensorArg {
    /// An operand that is absent.
    pub const ABSENT: TensorArg =
        TensorArg { data: 0, dtype: 0, rank: -1, shape: [0; MAX_RANK], strides: [0; MAX_RANK] };

    /// The tensor with these dimensions of its own, `(size, stride)` outermost first.
    fn with(gpu: &Gpu, kernel: &'static str, tensor: &Tensor, dims: &[(usize, usize)]) -> Result<TensorArg> {
        if dims.len() > MAX_RANK {
            return Err(Error::Unsupported {
                kernel,
                device: gpu.name().into(),
                reason: format!(
                    "a tensor of shape {:?} with strides {:?} has more than {MAX_RANK} dimensions that can't be \
                     merged; make it contiguous first",
                    tensor.shape(),
                    tensor.layout().strides
                ),
            });
        }
        let dtype = code(tensor.dtype());
        let address = tensor.storage().address() + tensor.layout().offset * tensor.dtype().size();
        let mut arg = TensorArg { data: address as u64, dtype, rank: dims.len() as i32, ..TensorArg::ABSENT };
        for (d, &(size, stride)) in dims.iter().enumerate() {
            (arg.shape[d], arg.strides[d]) = (size as i64, stride as i64);
        }
        Ok(arg)
    }

    /// The tensor with its dimensions as they are.
    pub fn plain(gpu: &Gpu, kernel: &'static str, tensor: &Tensor) -> Result<TensorArg> {
        let layout = tensor.layout();
        let dims: Vec<_> = layout.shape.iter().copied().zip(layout.strides.iter().copied()).collect();
        TensorArg::with(gpu, kernel, tensor, &dims)
    }

    /// As `plain`; ABSENT for None.
    pub fn optional(gpu: &Gpu, kernel: &'static str, tensor: Option<&Tensor>) -> Result<TensorArg> {
        tensor.map_or(Ok(TensorArg::ABSENT), |tensor| TensorArg::plain(gpu, kernel, tensor))
    }

    /// Tensors of one shape, for elementwise kernels: dimensions of size 1 are left out, and neighbours are merged
    /// where that can be done in all of them; contiguous ones come out with one dimension (or none).
    pub fn elementwise<const N: usize>(
        gpu: &Gpu,
        kernel: &'static str,
        tensors: [&Tensor; N],
    ) -> Result<[TensorArg; N]> {
        TensorArg::merged(gpu, kernel, tensors, 0)
    }

    /// Tensors of one shape but for the last `kept` dimensions, which are left as they are and come last; those
    /// before are merged as in `elementwise`. With `kept` 1, kernels see rows: a rank-0 tensor is one row of one
    /// element.
    pub fn merged<const N: usize>(
        gpu: &Gpu,
        kernel: &'static str,
        tensors: [&Tensor; N],
        kept: usize,
    ) -> Result<[TensorArg; N]> {
        let rank = tensors[0].rank();
        let lead = rank.saturating_sub(kept);
        let shape = &tensors[0].shape()[..lead];
        let stride = |i: usize, d: usize| tensors[i].layout().strides[d];
        // Each group of merged dimensions: its size, and its innermost dimension.
        let mut groups: Vec<(usize, usize)> = Vec::new();
        for d in (0..lead).filter(|&d| shape[d] != 1) {
            debug_assert!(tensors.iter().all(|t| t.shape()[d] == shape[d]), "{kernel}: one shape");
            match groups.last_mut() {
                Some((size, last)) if (0..N).all(|i| stride(i, *last) == stride(i, d) * shape[d]) => {
                    (*size, *last) = (*size * shape[d], d);
                }
                _ => groups.push((shape[d], d)),
            }
        }
        let mut args = [TensorArg::ABSENT; N];
        for (i, arg) in args.iter_mut().enumerate() {
            let mut dims: Vec<_> = groups.iter().map(|&(size, last)| (size, stride(i, last))).collect();
            dims.extend((lead..rank).map(|d| (tensors[i].shape()[d], stride(i, d))));
            if kept > rank {
                dims.push((1, 1));
            }
            *arg = TensorArg::with(gpu, kernel, tensors[i], &dims)?;
        }
        Ok(args)
    }

    /// Some of the tensor's dimensions, in this order, as one index: neighbours that can be are merged, and those of
    /// size 1 left out.
    pub fn of_dims(gpu: &Gpu, kernel: &'static str, tensor: &Tensor, dims: &[usize]) -> Result<TensorArg> {
        let mut merged: Vec<(usize, usize)> = Vec::new();
        for &d in dims {
            let (size, stride) = (tensor.shape()[d], tensor.layout().strides[d]);
            match merged.last_mut() {
                _ if size == 1 => (),
                Some(last) if last.1 == stride * size => *last = (last.0 * size, stride),
                _ => merged.push((size, stride)),
            }
        }
        TensorArg::with(gpu, kernel, tensor, &merged)
    }

    /// All dimensions as one index.
    pub fn flat(gpu: &Gpu, kernel: &'static str, tensor: &Tensor) -> Result<TensorArg> {
        TensorArg::elementwise(gpu, kernel, [tensor]).map(|[arg]| arg)
    }

    /// Rows along the last dimension, the others as one index; `None` is ABSENT.
    pub fn rows<'a>(gpu: &Gpu, kernel: &'static str, tensor: impl Into<Option<&'a Tensor>>) -> Result<TensorArg> {
        let rows = |tensor| TensorArg::merged(gpu, kernel, [tensor], 1).map(|[arg]| arg);
        tensor.into().map_or(Ok(TensorArg::ABSENT), rows)
    }

    /// True where packs of elements may be loaded and stored as a whole: they lie together, at multiples of 16 bytes.
    pub fn is_packable(&self) -> bool {
        self.data.is_multiple_of(16) && self.rank <= 1 && (self.rank < 1 || self.strides[0] == 1 || self.shape[0] <= 1)
    }

    /// True where packs of 8 elements along the last dimension lie together, each at a multiple of 16 bytes, or are
    /// one element repeated; so too if absent.
    pub fn reads_in_packs(&self) -> bool {
        let Some(last) = self.rank.checked_sub(1).filter(|&last| last >= 0).map(|last| last as usize) else {
            return self.rank < 0 || self.data.is_multiple_of(16);
        };
        let outer = &self.strides[..last];
        // A row of a matrix is whole packs; a vector may end with a part of one.
        let whole = last == 0 || self.shape[last] % 8 == 0;
        match self.strides[last] {
            0 => whole,
            1 => whole && self.data.is_multiple_of(16) && outer.iter().all(|stride| stride % 8 == 0),
            _ => false,
        }
    }
}

/// The number of a dtype in kernels/tensor.cuh.
pub(crate) fn code(dtype: DType) -> i32 {
    match dtype {
        DType::F64 => 0,
        DType::F32 => 1,
        DType::BF16 => 2,
        DType::F16 => 3,
        DType::I64 => 4,
        DType::I32 => 5,
        DType::U8 => 6,
        DType::Bool => 7,
    }
}

/// `base_f64` for arithmetic in f64, `base_f32` for all other floats.
pub(crate) fn kernel_for(base: &str, tensor: &Tensor) -> String {
    format!("{base}_{}", if tensor.dtype() == DType::F64 { "f64" } else { "f32" })
}

/// Blocks for `items` units of work, `each` to a block.
pub(crate) fn blocks(items: usize, each: usize) -> [u32; 3] {
    // More blocks than any device runs at once: the rest is a loop in the kernel.
    [items.div_ceil(each).min(1 << 20) as u32, 1, 1]
}
