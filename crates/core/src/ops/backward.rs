//! What an op's `backward` works with.

use super::{Exec, KernelClock, Slot, Spec};
use crate::{DType, Device, MemoryKind, Result, Tensor, kernel};
use smallvec::SmallVec;
use std::cell::RefCell;

/// The pass that a [`Backward`] is part of.
pub(crate) trait PassSource {
    /// The tensor of a declared slot; the source gives up its own claim on it.
    fn take(&mut self, slot: Slot) -> Result<Tensor>;
    /// The sum of the gradients of an input so far, to be added to.
    fn sum(&mut self, input: usize) -> Result<GradientSum>;
}

/// The gradient of an input as its uses add up, see [`Backward::sum`].
#[derive(Debug)]
pub struct GradientSum {
    /// Of the input's shape, and written in place: contiguous where it is new, else perhaps a view with distinct
    /// elements. f32 where many uses of a 16-bit input add up.
    pub tensor: Tensor,
    /// True where this use is the first to add: the contents are undefined, and the op writes all of them.
    pub is_new: bool,
}

impl GradientSum {
    /// The tensor, filled with zeros where it is new.
    pub fn zeroed(self, exec: &Exec<'_>) -> Result<Tensor> {
        if self.is_new {
            exec.run(kernel::Fill { value: 0.0, out: &self.tensor })?;
        }
        Ok(self.tensor)
    }
}

/// What an op's `backward` works with. Saved tensors and output gradients are *taken*: each may be asked for once, and
/// dropping it early frees its memory early (the weight's gradient first, then the saved input goes before the
/// input's gradient is allocated).
pub struct Backward<'a> {
    pub(crate) device: &'a Device,
    pub(crate) clock: &'a KernelClock,
    pub(crate) pass: &'a mut dyn PassSource,
    pub(crate) output_grads: SmallVec<[Option<Tensor>; 1]>,
    pub(crate) input_grads: SmallVec<[Option<Tensor>; 3]>,
    /// Inputs whose gradients were added to by [`sum`](Backward::sum).
    pub(crate) summed: SmallVec<[bool; 3]>,
    pub(crate) needs: &'a [bool],
    pub(crate) leaves: &'a [bool],
    pub(crate) inputs: &'a [Spec],
    /// Outputs whose gradient was taken.
    pub(crate) taken: SmallVec<[bool; 1]>,
    /// The first thing that the rule did wrong: the pass fails with it.
    pub(crate) fault: RefCell<Option<String>>,
}

impl<'a> Backward<'a> {
    fn blame(&self, reason: impl FnOnce() -> String) {
        self.fault.borrow_mut().get_or_insert_with(reason);
    }
    /// True for an input that there is.
    fn is_input(&self, input: usize) -> bool {
        let count = self.inputs.len();
        if input >= count {
            self.blame(|| format!("backward speaks of input {input}, and there are {count}, counted from 0"));
        }
        input < count
    }
    /// True where the gradient of this input is wanted.
    pub fn needs(&self, input: usize) -> bool {
        self.is_input(input) && self.needs[input]
    }
    /// Shape and dtype of an input.
    pub fn input(&self, input: usize) -> &'a Spec {
        &self.inputs[if self.is_input(input) { input } else { 0 }]
    }
    /// Takes the gradient of an output; `None` where nothing depends on that output.
    pub fn grad(&mut self, output: usize) -> Option<Tensor> {
        match self.taken.get_mut(output) {
            None => {
                let count = self.taken.len();
                self.blame(|| format!("backward takes the gradient of output {output}, and there are {count}"));
                None
            }
            Some(true) => {
                self.blame(|| format!("backward takes the gradient of output {output} twice"));
                None
            }
            Some(taken) => {
                *taken = true;
                self.output_grads[output].take()
            }
        }
    }
    /// Takes the gradient of the first output, which an op with one output always has. If it is absent, this is an
    /// empty tensor, and the pass fails whatever is done with it.
    pub fn grad0(&mut self) -> Tensor {
        self.grad(0).unwrap_or_else(|| {
            self.blame(|| "backward asks for the gradient of output 0, which has none; use `grad(0)`".into());
            Tensor::uninit(self.device, &[0], DType::F32, MemoryKind::Workspace).expect("no elements take no memory")
        })
    }
    /// Takes a tensor that `saves` declared, replayed or unpacked as its mark says.
    pub fn saved(&mut self, slot: Slot) -> Result<Tensor> {
        self.pass.take(slot)
    }
    /// Sets the gradient of an input.
    pub fn set(&mut self, input: usize, grad: Tensor) {
        if self.is_input(input) && self.input_grads[input].replace(grad).is_some() {
            self.blame(|| format!("backward sets the gradient of input {input} twice"));
        }
    }
    /// The gradient of an input as the uses visited before have added it up, for an op to add its own in place. It
    /// stands for [`set`](Backward::set) where an op reads a small part of its input: making a gradient as large as
    /// the input for each of n parts would take n times as long.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`](crate::Error::InvalidTensor) for an input that needs no gradient, and out of memory.
    pub fn sum(&mut self, input: usize) -> Result<GradientSum> {
        if !self.needs.get(input).is_some_and(|&needs| needs) {
            let reason = format!("input {input} needs no gradient, or the op has no such input");
            return Err(crate::Error::tensor("Backward::sum", reason));
        }
        let sum = self.pass.sum(input)?;
        self.summed[input] = true;
        Ok(sum)
    }
    /// Where to compute the gradient of an input: a leaf's is counted as [`MemoryKind::Gradient`].
    pub fn exec(&self, input: usize) -> Exec<'a> {
        let kind =
            if self.is_input(input) && self.leaves[input] { MemoryKind::Gradient } else { MemoryKind::Activation };
        Exec::new(self.device, kind, self.clock)
    }
}
