//! A named tensor that a layer changes from step to step, without a gradient.

use crate::{Error, Result};
use retape_core::{DType, Device, MemoryKind, StateId, Tape, Tensor, Var};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// State of a layer: a running mean, a cache. A shared cell with a tensor, as a [`Parameter`](crate::Parameter), but no
/// gradient. A forward pass says what it becomes with [`set_later`](State::set_later); [`Tape::commit`] applies that
/// after the step. A tape that isn't committed leaves it as it was, and so does a dry run.
///
/// Its bytes are counted as [`MemoryKind::Parameter`]: it is the model's own memory from step to step, which a step's
/// budget doesn't cover. What waits for the commit belongs to the step until then.
///
/// ```
/// use retape_core::{DType, Tape, Tensor, Trace, Var, meta};
/// use retape_nn::{Parameter, State};
///
/// let device = retape_cpu::device();
/// let w = Parameter::new("w", Tensor::full(&device, &[3], DType::F32, 2.0)?)?;
/// let mean = State::new("mean", Tensor::full(&device, &[3], DType::F32, 0.0)?)?;
/// let x = Tensor::full(&device, &[4, 3], DType::F32, 1.0)?;
/// let loss = |tape: &Tape| -> retape_nn::Result<Var> {
///     let x = tape.constant(&x)?;
///     let now = tape.no_grad(|| x.clone().mean_dims(&[0], false))?;
///     mean.set_later(tape, ((mean.get(tape)? * 0.9)? + now * 0.1)?)?;
///     Ok((x * w.var(tape)?)?.sum()?)
/// };
///
/// // A dry run of this very closure: on the meta device, tensors of the CPU stand there by their shapes.
/// let trace = Trace::record(&meta(), None, &loss)?;
/// let predicted = trace.run(None)?.peak_bytes;
/// assert_eq!(mean.tensor().to_vec::<f32>()?, [0.0; 3]);
///
/// device.meter().reset_peak();
/// let tape = Tape::new(&device);
/// let _gradients = tape.backward(&loss(&tape)?)?;
/// assert_eq!(device.meter().step_peak(), predicted);
/// tape.commit()?;
/// assert_eq!(mean.tensor().to_vec::<f32>()?, [0.1; 3]);
/// # Ok::<(), retape_nn::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct State(Arc<Cell>);

#[derive(Debug)]
struct Cell {
    id: StateId,
    name: String,
    grows: bool,
    tensor: RwLock<Tensor>,
}

impl State {
    /// State of this shape. A view, or a tensor whose storage somebody else holds, is copied first.
    pub fn new(name: impl Into<String>, tensor: Tensor) -> Result<State> {
        State::with(name, tensor, false)
    }

    /// State whose shape may change with every value, as that of a cache of keys that grows.
    pub fn growing(name: impl Into<String>, tensor: Tensor) -> Result<State> {
        State::with(name, tensor, true)
    }

    fn with(name: impl Into<String>, tensor: Tensor, grows: bool) -> Result<State> {
        let tensor = RwLock::new(crate::parameter::own(tensor)?);
        Ok(State(Arc::new(Cell { id: StateId::unique(), name: name.into(), grows, tensor })))
    }

    /// The name. What saves parameters doesn't save state: write it with [`checkpoint::save`](crate::checkpoint::save),
    /// and [`set`](State::set) it when the run is resumed.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What tapes know it by.
    pub fn id(&self) -> StateId {
        self.0.id
    }

    /// The tensor as it is now: as of the last commit.
    pub fn tensor(&self) -> Tensor {
        self.read().clone()
    }

    /// The shape as of the last commit.
    pub fn shape(&self) -> Vec<usize> {
        self.read().shape().to_vec()
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.read().dtype()
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.read().device().clone()
    }

    /// Its value on a tape, a constant: what this tape has collected last, else as of the last commit.
    pub fn get(&self, tape: &Tape) -> Result<Var> {
        match tape.later(self.id())? {
            Some(later) => Ok(later),
            None => Ok(tape.constant(&self.read())?),
        }
    }

    /// It becomes this value when the tape is committed, see [`Tape::set_later`]. No gradient goes through it.
    ///
    /// # Errors
    /// [`Error::WrongReplacement`] where the dtype or the shape isn't this state's; only one that is
    /// [`growing`](State::growing) takes another shape.
    pub fn set_later(&self, tape: &Tape, value: impl Into<Var>) -> Result<()> {
        let value = value.into();
        let device = if tape.device().computes() { tape.device() } else { self.device() };
        self.check(&self.tensor(), &value.shape(), value.dtype(), &device)?;
        let state = self.clone();
        Ok(tape.set_later(self.id(), value, move |tensor| {
            tensor.storage().set_kind(MemoryKind::Parameter);
            *state.write() = tensor;
        })?)
    }

    /// Replaces the tensor at once, as when a checkpoint is loaded: by one of the same dtype and device, and the same
    /// shape unless it is [`growing`](State::growing).
    pub fn set(&self, tensor: Tensor) -> Result<()> {
        let mut current = self.write();
        self.check(&current, tensor.shape(), tensor.dtype(), tensor.device())?;
        *current = crate::parameter::own(tensor)?;
        Ok(())
    }

    fn check(&self, now: &Tensor, shape: &[usize], dtype: DType, device: &Device) -> Result<()> {
        if (shape == now.shape() || self.0.grows) && dtype == now.dtype() && device == now.device() {
            return Ok(());
        }
        let describe = |dtype, shape: &[usize], device: &Device| format!("{dtype}{shape:?} on {}", device.name());
        Err(Error::WrongReplacement {
            name: self.name().into(),
            expected: describe(now.dtype(), now.shape(), now.device()),
            found: describe(dtype, shape, device),
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, Tensor> {
        // The cell holds a whole tensor at every instruction, so a poisoned lock is still usable.
        self.0.tensor.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tensor> {
        self.0.tensor.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
