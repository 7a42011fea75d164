//! Values as users hold them.

use super::Tape;
use super::graph::Graph;
use super::marking::Marking;
use super::value::{Exactness, Value, ValueKey};
use crate::kernel::RandomStream;
use crate::layout::Shape;
use crate::ops::Op;
use crate::trace::Event;
use crate::{DType, Error, Int8Spec, Mark, Result, Tensor};
use slotmap::Key;
use std::fmt;
use std::rc::Rc;

/// A value on a tape: a counted handle. When the last handle of a value (and of the views of it) goes, the tape stores,
/// packs, drops or frees it.
///
/// # The last use ends a handle
///
/// Ops take their operands by value, so `let h = h.relu()?` lets go of the old value. To use a value again, give a
/// clone (a counted handle, no copy of numbers) or a reference where an op takes `impl Into<Var>`, and the value itself
/// at the end:
///
/// ```
/// # use retape_core::{DType, Result, Tape, Tensor, Var, meta};
/// # fn f(x: Var) -> Result<Var> { x.gelu() }
/// # let device = meta();
/// # let tape = Tape::new(&device);
/// # let x = tape.leaf(&Tensor::full(&device, &[4, 4], DType::F32, 0.0)?)?;
/// let y = f(x.clone())?;
/// let x = x.add(y)?; // a residual
/// let x = (&x * &x)?; // two uses; also `x.square()?` and `x.clone().mul(x)?`
/// let x = (1.0 - x)?.exp()?.recompute()?; // a mark in the same statement is in time
/// # Ok::<(), retape_core::Error>(())
/// ```
///
/// What an op was given by value ends when the op has been recorded, the first operand first. It *settles* when the
/// tape is next used, before that call allocates. What doesn't count: marks and facts of the op's results, views of
/// them, and the closing of scopes. So `layer.forward(x)?.recompute()?` is in time, too. Of several results all must be
/// held until then. An op that fails records nothing and takes no random number. What it was given by value is dropped:
/// to try again, give clones.
///
/// # What the compiler says
///
/// *Use of moved value*: an earlier line has ended `x`. Give that line `x.clone()` or, as an argument, `&x`.
///
/// ```compile_fail,E0382
/// # use retape_core::{Result, Var};
/// fn residual(x: Var) -> Result<Var> {
///     let y = x.gelu()?; // remedy: x.clone().gelu()?
///     x.add(y)
/// }
/// ```
///
/// *Cannot move out of `*x`*: an op would end a value that is only borrowed. Call it on `x.clone()`, or take `x: Var`.
///
/// ```compile_fail,E0507
/// # use retape_core::{Result, Var};
/// fn activation(x: &Var) -> Result<Var> {
///     x.gelu() // remedy: x.clone().gelu()
/// }
/// ```
///
/// *Mismatched types* of errors: ops return core's error, and a function of yours another one. Let `?` convert it:
/// `Ok(x.add(y)?)`. Where a closure in `within` ends so, name its error: `Ok::<_, Error>(x.add(y)?)`.
///
/// *Type annotations needed* for `None`: a function of your own takes an `Option` of any type that becomes a `Var`, and
/// `None` doesn't say which. Take `Option<Var>`, as ops do; then `None` is enough, and a bias that is used again is
/// `Some(bias.clone())`.
///
/// ```compile_fail,E0283
/// # use retape_core::{Result, Var};
/// fn shifted(x: Var, bias: Option<impl Into<Var>>) -> Result<Var> { // remedy: bias: Option<Var>
///     match bias {
///         Some(bias) => x.add(bias),
///         None => Ok(x),
///     }
/// }
/// fn plain(x: Var) -> Result<Var> {
///     shifted(x, None)
/// }
/// ```
pub struct Var {
    pub(super) tape: Tape,
    pub(super) key: ValueKey,
}

impl Clone for Var {
    fn clone(&self) -> Var {
        self.tape.settled().retain_handle(self.key);
        Var { tape: self.tape.clone(), key: self.key }
    }
}

impl Drop for Var {
    fn drop(&mut self) {
        // No key: the tape has taken over the handle.
        if !self.key.is_null() {
            drop(self.tape.settled());
            self.tape.let_go([self.key]);
        }
    }
}

/// One more handle, as [`clone`](Clone::clone) makes it.
impl From<&Var> for Var {
    fn from(var: &Var) -> Var {
        var.clone()
    }
}

impl fmt::Debug for Var {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, spec) = self.of_value(|v| (v.path.clone(), v.spec.clone()));
        write!(f, "Var(`{path}`, {spec})")
    }
}

impl Var {
    pub(crate) fn key(&self) -> ValueKey {
        self.key
    }
    pub(crate) fn is_of(&self, tape: &Tape) -> bool {
        Rc::ptr_eq(&self.tape.0, &tape.0)
    }
    /// The handle for the tape to let go of.
    pub(super) fn into_key(mut self) -> ValueKey {
        std::mem::take(&mut self.key)
    }

    /// The tape it belongs to.
    pub fn tape(&self) -> &Tape {
        &self.tape
    }
    /// Sizes of the dimensions.
    pub fn shape(&self) -> Shape {
        self.of_value(|v| v.spec.shape.clone())
    }
    /// The elements' type.
    pub fn dtype(&self) -> DType {
        self.of_value(|v| v.spec.dtype)
    }
    /// Scopes and name, `blocks.3.attn.softmax`.
    pub fn path(&self) -> String {
        self.of_value(|v| v.path.to_string())
    }
    /// Whether backward reaches it.
    pub fn requires_grad(&self) -> bool {
        self.of_value(|v| v.requires_grad)
    }
    fn of_value<T>(&self, fact: impl FnOnce(&Value) -> T) -> T {
        fact(&self.tape.settled_for(self.key).values[self.key])
    }
    /// The tensor: always the exact one, whatever the mark. On a tape of the meta device it is a tensor of the meta
    /// device, also where a leaf's own is another's.
    pub fn tensor(&self) -> Result<Tensor> {
        let mut graph = self.tape.settled_for(self.key);
        graph.note_taken(self.key);
        Ok(graph.live(self.key).clone())
    }
    /// The number in a tensor of one element.
    ///
    /// # Errors
    /// [`Error::NoNumbers`] on the meta device, as in a dry run: it says what to do instead.
    pub fn item(&self) -> Result<f64> {
        self.tensor()?.item().map_err(|error| match error {
            Error::NoNumbers { .. } => Error::NoNumbers { what: format!("item of `{}`", self.path()) },
            other => other,
        })
    }

    /// The same tensor as a constant: no gradient goes through it, and it holds nothing of what made it.
    pub fn detach(self) -> Result<Var> {
        self.tape.constant(&self.tensor()?)
    }

    /// Drop this value when its last handle goes, and replay its op when backward asks for it.
    pub fn recompute(self) -> Result<Var> {
        self.set_mark(Mark::Recompute)?;
        Ok(self)
    }
    /// Store this value as int8 (group 64) when its last handle goes.
    pub fn int8(self) -> Result<Var> {
        self.set_mark(Mark::Int8(Int8Spec::default()))?;
        Ok(self)
    }
    /// Store this value as bf16 when its last handle goes.
    pub fn bf16(self) -> Result<Var> {
        self.set_mark(Mark::Bf16)?;
        Ok(self)
    }
    /// Store this value in full, also where it is only replayed from.
    pub fn keep(self) -> Result<Var> {
        self.set_mark(Mark::Keep)?;
        Ok(self)
    }

    /// Marks this value (a view marks the value that owns the storage), over any scope and policy.
    ///
    /// # Errors
    /// [`Error::MarkTooLate`] once the value has settled or a pass has begun since it was recorded, and where a change
    /// from keep or a lossy mark to recompute finds an input gone. [`Error::MarkNotAllowed`] on leaves, integers,
    /// statistics (kept exactly), and for a lossy mark where a reader needs the exact value. [`Error::Unseeded`] for
    /// stochastic rounding on a tape without a seed. [`Error::Reentrant`] in a policy or a rule.
    pub fn set_mark(&self, mark: Mark) -> Result<()> {
        drop(self.tape.settled_for(self.key));
        let _busy = self.tape.occupy("mark")?;
        self.tape.check("mark", Some(self.key))?;
        let mut graph = self.tape.graph();
        let root = graph.root(self.key);
        graph.may_mark(root, mark)?;
        graph.roots[root].marking = Marking::by_value(mark);
        graph.update_recipe(root);
        graph.tell(|g| Event::Mark(g.values[self.key].id, mark));
        Ok(())
    }

    /// Records an op of one visible output with this value as its first input. Op files and custom ops build on it.
    pub fn apply(self, op: impl Into<Op>, others: impl IntoIterator<Item = Var>) -> Result<Var> {
        Ok(self.apply_all(op, others)?.swap_remove(0))
    }

    /// Records an op with this value as its first input; all visible outputs.
    pub fn apply_all(self, op: impl Into<Op>, others: impl IntoIterator<Item = Var>) -> Result<Vec<Var>> {
        let tape = self.tape.clone();
        let inputs = std::iter::once(self).chain(others).collect();
        Ok(tape.record(Rc::new(op.into()), inputs)?.into_vec())
    }

    /// As [`apply`](Var::apply) for an op that draws random numbers: it gets the tape's next stream and keeps it, so
    /// that its replay is exact. The stream counts as taken only where the op is recorded, so that one that fails
    /// doesn't change what the next draws.
    ///
    /// # Errors
    /// [`Error::Unseeded`] where the tape has no [`seed`](crate::TapeOptions::seed).
    pub fn apply_random<O: Into<Op>>(
        self,
        op: impl FnOnce(RandomStream) -> O,
        others: impl IntoIterator<Item = Var>,
    ) -> Result<Var> {
        let tape = self.tape.clone();
        let counter = &tape.0.random_counter;
        let taken = counter.get();
        let Some(seed) = tape.0.seed else {
            let op: Op = op(RandomStream { seed: 0, counter: taken }).into();
            let what = op.rule().name();
            drop(tape.enter(what, None)?);
            let path = tape.0.scopes.borrow().path_of(what);
            return Err(Error::Unseeded { what, path });
        };
        counter.set(taken + 1);
        let result = self.apply(op(RandomStream { seed, counter: taken }), others);
        // What gives the other operands may have run another one meanwhile.
        if result.is_err() && counter.get() == taken + 1 {
            counter.set(taken);
        }
        result
    }

    /// An [`Error::InvalidInput`] about a call on this value.
    pub(crate) fn invalid(&self, op: &'static str, reason: impl Into<String>) -> Error {
        let inputs = self.of_value(|v| v.spec.to_string());
        let path = self.tape.0.scopes.borrow().path_of(op);
        Error::InvalidInput { op, path, inputs, reason: reason.into() }
    }
}

impl Graph {
    /// Why a root can't be given this mark, where it can't.
    fn may_mark(&self, key: ValueKey, mark: Mark) -> Result<()> {
        let root = &self.roots[key];
        let (path, op) = self.name_of(key);
        if let Some(reason) = self.not_allowed(key, mark) {
            return Err(Error::MarkNotAllowed { mark: mark.name(), path, op, reason: reason.into() });
        }
        if let Some(what) = mark.format().and_then(|format| format.randomness())
            && self.options.seed.is_none()
        {
            return Err(Error::Unseeded { what, path });
        }
        let reason = if self.mark_is_fixed(key) {
            "a backward pass has begun since; mark before the first one".into()
        } else if !root.is_unsettled() {
            "it has settled; mark it while you hold its first handle".into()
        } else if let Some(input) = self.gone_input(key).filter(|_| mark == Mark::Recompute) {
            format!(
                "its input `{}` was freed, because it was marked {} when recorded; mark it in the statement that makes \
                 it, or change the rule",
                self.values[input].path,
                root.marking.mark.map_or("otherwise", Mark::name)
            )
        } else {
            return Ok(());
        };
        Err(Error::MarkTooLate { mark: mark.name(), path, op, reason })
    }

    fn not_allowed(&self, key: ValueKey, mark: Mark) -> Option<&'static str> {
        if mark == Mark::Keep {
            return None;
        }
        if self.nodes[self.values[key].node].is_leaf() {
            return Some("it is a leaf, which has no op to replay and belongs to you; leaves are kept");
        }
        match self.roots[key].exactness {
            Exactness::KeptExactly => Some("integers and statistics are always kept exactly"),
            Exactness::ReadExactly if mark.is_lossy() && mark.packs(&self.values[key].spec) => {
                Some("an op reads it exactly (tiled attention its q and k); keep or recompute it")
            }
            _ => mark.format()?.check().err(),
        }
    }
}
