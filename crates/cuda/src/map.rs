//! Launches of elementwise kernels: kernels/map.cuh.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters};
use retape_core::{Result, Tensor};

const THREADS: usize = 256;
/// Elements that a thread takes at a time, where it can take packs.
const PACK: usize = 8;

#[derive(Clone, Copy)]
#[repr(C)]
struct Map {
    operands: [TensorArg; 4],
    out: TensorArg,
    constants: [f64; 2],
    function: i32,
    packed: i32,
}
// SAFETY: the fields of `Map` in kernels/map.cuh.
unsafe impl Parameters for Map {}

/// A function of those that a kernel offers, by its number there, and its constants.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    pub number: i32,
    pub constants: [f64; 2],
}

impl Function {
    pub fn with(number: i32, first: f64, second: f64) -> Function {
        Function { number, constants: [first, second] }
    }
}

/// out = function(operands), all of one shape; an operand that is None counts as ones.
pub(crate) fn map<const N: usize>(
    gpu: &Gpu,
    kernel: &'static str,
    function: Function,
    operands: [Option<&Tensor>; N],
    out: &Tensor,
) -> Result<()> {
    // An absent one takes the place of `out` as dimensions are merged.
    let mut all = [out; 5];
    for (place, operand) in all[1..].iter_mut().zip(&operands) {
        *place = operand.unwrap_or(out);
    }
    let [out_arg, mut args @ ..] = TensorArg::elementwise(gpu, kernel, all)?;
    for (i, arg) in args.iter_mut().enumerate() {
        if operands.get(i).is_none_or(|operand| operand.is_none()) {
            *arg = TensorArg::ABSENT;
        }
    }
    let packed = out_arg.reads_in_packs() && args.iter().all(TensorArg::reads_in_packs);
    let Function { number, constants } = function;
    let parameters = Map { operands: args, out: out_arg, constants, function: number, packed: packed.into() };
    let name = kernel_for(kernel, out);
    let grid = blocks(out.len(), if packed { THREADS * PACK } else { THREADS });
    gpu.launch(Launch { kernel: &name, grid, block: THREADS as u32, shared: 0 }, &parameters)
}
