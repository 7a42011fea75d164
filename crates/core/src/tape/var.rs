//! Values as users hold them, and the gradients that a pass gives them.

use super::graph::{MarkSource, Stored, Value, ValueKey};
use super::trace::Event;
use super::{EMPTY_GROUP, ParameterId, STOCHASTIC, Tape};
use crate::kernel::RandomStream;
use crate::layout::Shape;
use crate::mark::{Int8Spec, Rounding};
use crate::ops::Op;
use crate::{DType, Error, Mark, Result, Tensor};
use slotmap::Key;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

/// A value on a tape: a counted handle. When the last handle of a value (and of the views of it) goes, the tape stores,
/// quantizes, drops or frees it.
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
        match self.tape.try_graph("clone") {
            Ok(mut graph) => graph.retain_handle(self.key),
            Err(_) => self.tape.0.cloned.borrow_mut().push(self.key),
        }
        Var { tape: self.tape.clone(), key: self.key }
    }
}

impl Drop for Var {
    fn drop(&mut self) {
        // No key: the tape has taken over the handle.
        if !self.key.is_null() {
            self.tape.release(self.key);
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
        match self.tape.graph_at(self.key, "debug") {
            Ok(graph) => {
                let value = &graph.values[self.key];
                write!(f, "Var(`{}`, {}{:?})", value.path, value.spec.dtype, value.spec.shape)
            }
            Err(_) => write!(f, "Var(in use)"),
        }
    }
}

impl Var {
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
        self.of_value("shape", |v| v.spec.shape.clone()).unwrap_or_default()
    }
    /// The elements' type.
    pub fn dtype(&self) -> DType {
        self.of_value("dtype", |v| v.spec.dtype).unwrap_or(DType::F32)
    }
    /// Scopes and name, `blocks.3.attn.softmax`.
    pub fn path(&self) -> String {
        self.of_value("path", |v| v.path.to_string()).unwrap_or_default()
    }
    /// Whether backward reaches it.
    pub fn requires_grad(&self) -> bool {
        self.of_value("requires_grad", |v| v.requires_grad).unwrap_or(false)
    }
    /// A fact of the value; none where the tape's policy asks, see [`Tape`].
    fn of_value<T>(&self, what: &'static str, fact: impl FnOnce(&Value) -> T) -> Option<T> {
        let graph = self.tape.or_park(what, self.tape.graph_at(self.key, what));
        graph.map(|graph| fact(&graph.values[self.key]))
    }
    /// The tensor: always the exact one, whatever the mark. On a tape of the meta device it is a tensor of the meta
    /// device, also where a leaf's own is another's.
    pub fn tensor(&self) -> Result<Tensor> {
        let mut graph = self.tape.graph_at(self.key, "tensor")?;
        graph.note_taken(self.key);
        Ok(graph.values[self.key].live.clone().expect("a value with a handle has its tensor"))
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
    /// Store this value in full, also where it is only replayed from.
    pub fn keep(self) -> Result<Var> {
        self.set_mark(Mark::Keep)?;
        Ok(self)
    }

    /// Marks this value (a view marks the value that owns the storage), over any scope and policy.
    ///
    /// # Errors
    /// [`Error::MarkTooLate`] once the value has settled or a pass has begun since it was recorded, and where a change from keep or int8 to
    /// recompute finds an input gone. [`Error::MarkNotAllowed`] on leaves, integers, statistics (kept exactly), and for
    /// int8 where a reader needs the exact value. [`Error::Unseeded`] for stochastic rounding on a tape without a seed.
    pub fn set_mark(&self, mark: Mark) -> Result<()> {
        let mut graph = self.tape.graph_at(self.key, "mark")?;
        graph.check("mark", Some(self.key))?;
        let root = graph.root(self.key);
        let v = &graph.values[root];
        let op = graph.nodes[v.node].op_name();
        let path = v.path.to_string();
        let not_allowed =
            |reason: &str| Error::MarkNotAllowed { mark: mark.name(), path: path.clone(), op, reason: reason.into() };
        let too_late = |reason: String| Error::MarkTooLate { mark: mark.name(), path: path.clone(), op, reason };
        if mark != Mark::Keep {
            if graph.nodes[v.node].is_leaf() {
                return Err(not_allowed("it is a leaf, which has no op to replay and belongs to you; leaves are kept"));
            }
            if v.exact {
                return Err(not_allowed("integers and statistics are always kept exactly"));
            }
        }
        if let Mark::Int8(spec) = mark {
            if v.read_exactly {
                return Err(not_allowed("an op reads it exactly (tiled attention its q and k); keep or recompute it"));
            }
            if spec.group == 0 {
                return Err(not_allowed(EMPTY_GROUP));
            }
            if spec.rounding == Rounding::Stochastic && self.tape.0.seed.is_none() {
                return Err(Error::Unseeded { what: STOCHASTIC, path });
            }
        }
        if graph.mark_is_fixed(root) {
            return Err(too_late("a backward pass has begun since; mark before the first one".into()));
        }
        if !matches!(v.stored, Stored::Unsettled) {
            return Err(too_late("it has settled; mark it while you hold its first handle".into()));
        }
        if mark == Mark::Recompute && !v.holds_recipe {
            let inputs = graph.nodes[v.node].inputs.clone();
            let gone = inputs.iter().find(|&&i| matches!(graph.values[graph.root(i)].stored, Stored::Freed));
            if let Some(&input) = gone {
                let input = &graph.values[graph.root(input)].path;
                return Err(too_late(format!(
                    "its input `{input}` was freed, because it was marked {} when recorded; mark it in the statement that \
                     makes it, or change the rule",
                    v.mark.map_or("otherwise", Mark::name)
                )));
            }
        }
        let v = &mut graph.values[root];
        (v.mark, v.source, v.may_drop_outside) = (Some(mark), MarkSource::Value, false);
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

    /// As [`apply`](Var::apply) for an op that draws random numbers: it gets the tape's next stream and keeps it, so that
    /// its replay is exact. The stream counts as taken only where the op is recorded, so that one that fails doesn't change
    /// what the next draws.
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
            let mut graph = tape.try_graph(what)?;
            graph.check(what, None)?;
            let path = graph.scopes.last().expect("the top scope never closes").path_of(what);
            return Err(Error::Unseeded { what, path });
        };
        counter.set(taken + 1);
        let result = self.apply(op(RandomStream { seed, counter: taken }), others);
        // A user's rule may have run another one meanwhile.
        if result.is_err() && counter.get() == taken + 1 {
            counter.set(taken);
        }
        result
    }

    /// An [`Error::InvalidInput`] about a call on this value.
    pub(crate) fn invalid(&self, op: &'static str, reason: impl Into<String>) -> Error {
        let graph = match self.tape.try_graph(op) {
            Ok(graph) => graph,
            Err(error) => return error,
        };
        Error::InvalidInput {
            op,
            path: graph.scopes.last().expect("the top scope never closes").path_of(op),
            inputs: graph.values[self.key].spec.to_string(),
            reason: reason.into(),
        }
    }
}

/// The gradients of one backward pass: tensors, not values of a tape. One that is put on a tape with `leaf` starts there,
/// without the history that made it; a gradient of a gradient is [`Error::SecondOrder`], see
/// [`grad_with`](Tape::grad_with).
#[derive(Debug, Default)]
pub struct Gradients {
    /// The tape's id.
    pub(super) tape: u64,
    // Ordered, so that they are freed in the same order on every run.
    pub(super) by_value: BTreeMap<ValueKey, Tensor>,
    pub(super) by_parameter: BTreeMap<ParameterId, Tensor>,
}

impl Gradients {
    /// The gradient of a leaf; `None` where the loss doesn't depend on it, as with a leaf of another tape.
    pub fn of(&self, leaf: &Var) -> Option<&Tensor> {
        self.by_value.get(&leaf.key).filter(|_| self.tape == leaf.tape.0.id)
    }
    /// The gradient of a parameter; `None` where the loss doesn't depend on it.
    pub fn parameter(&self, id: ParameterId) -> Option<&Tensor> {
        self.by_parameter.get(&id)
    }
    /// The relative L2 distance of all gradients together from those of another pass of the same program, the reference. 0
    /// only where all numbers are equal.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] where the passes don't have gradients of the same leaves.
    pub fn distance(&self, reference: &Gradients) -> Result<f64> {
        let spec = |t: &Tensor| (t.dtype(), t.shape().to_vec());
        let same = self.len() == reference.len()
            && self.by_value.values().zip(reference.by_value.values()).all(|(a, b)| spec(a) == spec(b));
        if !same {
            let reason = "the passes have gradients of different leaves; compare passes of the same program".into();
            return Err(Error::InvalidTensor { what: "distance of gradients", reason });
        }
        let (mut error, mut norm) = (0.0, 0.0);
        for (a, b) in self.by_value.values().zip(reference.by_value.values()) {
            for (a, b) in a.to_f64_vec()?.into_iter().zip(b.to_f64_vec()?) {
                error += (a - b) * (a - b);
                norm += b * b;
            }
        }
        Ok(if error == 0.0 { 0.0 } else { (error / norm).sqrt() })
    }

    /// How many leaves have a gradient.
    pub fn len(&self) -> usize {
        self.by_value.len()
    }
    /// True where no leaf has one.
    pub fn is_empty(&self) -> bool {
        self.by_value.is_empty()
    }
}
