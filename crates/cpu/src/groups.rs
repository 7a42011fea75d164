//! Reductions that look at a group of elements more than once, and the gradients of all. A group is what is reduced
//! to one number. Sums run in f64, in 64 lanes: one fixed order.

use crate::exec::Exec;
use crate::math::{Float, fold_lanes};
use crate::reduce::{Axis, split_dims};
use crate::view::{BLOCK, Span, for_float, unsupported};
use retape_core::kernel::{self, ReduceFn};
use retape_core::layout::Shape;
use retape_core::{Result, Tensor};

/// Elements that one task handles, in whole groups.
const TASK: usize = 16 * 1024;
/// Fewest elements whose products with all others are held at a time.
const PIECE: usize = 512;

/// How many elements of a line of `len` are held at a time, beside a number for each such piece: little of both.
pub(crate) fn piece_of(len: usize) -> usize {
    len.isqrt().max(PIECE)
}

/// The elements of one group.
#[derive(Debug)]
struct Group<'a, T> {
    span: Span<T>,
    base: usize,
    axis: &'a Axis,
}

impl<T: Float> Group<'_, T> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.axis.len
    }

    #[inline(always)]
    fn get(&self, i: usize) -> T {
        self.span.get(self.base + self.axis.offset(i))
    }

    #[inline(always)]
    fn set(&self, i: usize, value: T) {
        self.span.set(self.base + self.axis.offset(i), value)
    }

    /// Folds f of every element in f64.
    #[inline(always)]
    fn fold(&self, start: f64, f: impl Fn(T) -> f64, join: impl Fn(f64, f64) -> f64 + Copy) -> f64 {
        let (mut lanes, n) = ([start; BLOCK], self.len());
        for i in (0..n).step_by(BLOCK) {
            let block = self.axis.load(self.span, self.base, i, n, T::ZERO);
            for j in 0..BLOCK {
                let value = if i + j < n { f(block[j]) } else { start };
                lanes[j] = join(lanes[j], value);
            }
        }
        fold_lanes(lanes, join)
    }

    #[inline(always)]
    fn sum(&self, f: impl Fn(T) -> f64) -> f64 {
        self.fold(
            0.0,
            f,
            #[inline(always)]
            |a, b| a + b,
        )
    }

    #[inline(always)]
    fn mean(&self) -> f64 {
        self.sum(
            #[inline(always)]
            |x| x.wide(),
        ) / self.len() as f64
    }

    /// Sets every element of this group to f of its index.
    #[inline(always)]
    fn write(&self, f: impl Fn(usize) -> T) {
        for i in 0..self.len() {
            self.set(i, f(i));
        }
    }
}

/// A tensor as groups: `reduced` dimensions within, `kept` ones between.
#[derive(Debug)]
struct Groups<T> {
    span: Span<T>,
    kept: Axis,
    reduced: Axis,
}

impl<T: Float> Groups<T> {
    fn of(tensor: &Tensor, (reduced, kept): &(Shape, Shape)) -> Groups<T> {
        Groups { span: Span::of(tensor), kept: Axis::new(tensor, kept), reduced: Axis::new(tensor, reduced) }
    }

    #[inline(always)]
    fn group(&self, k: usize) -> Group<'_, T> {
        Group { span: self.span, base: self.kept.offset(k), axis: &self.reduced }
    }

    /// The one element of a group that was reduced.
    #[inline(always)]
    fn only(&self, k: usize) -> T {
        self.span.get(self.kept.offset(k))
    }
}

/// Calls `body` for each of `count` groups of `len` elements.
#[inline(always)]
fn for_each_group<T: Float>(exec: &Exec, (count, len): (usize, usize), cost: usize, body: impl Fn(usize) + Sync) {
    let batch = (TASK / len.max(1)).max(1);
    exec.run::<T>(
        count.div_ceil(batch),
        count * len * cost,
        #[inline(always)]
        |task| {
            for k in task * batch..((task + 1) * batch).min(count) {
                body(k);
            }
        },
    );
}

/// A sum of powers that f64 holds with all its digits.
#[inline(always)]
fn is_held(sum: f64) -> bool {
    (1e-290..f64::INFINITY).contains(&sum)
}

/// What a norm of this order is taken relative to: the largest magnitude, or of a negative order the smallest.
#[inline(always)]
fn leading<T: Float>(x: &Group<'_, T>, ord: f64) -> f64 {
    let magnitude = |v: T| v.wide().abs();
    if ord < 0.0 {
        x.fold(
            f64::INFINITY,
            magnitude,
            #[inline(always)]
            |a, b| a.smaller(b),
        )
    } else {
        x.fold(
            0.0,
            magnitude,
            #[inline(always)]
            |a, b| a.larger(b),
        )
    }
}

/// (sum |x / most|^ord)^(1/ord): the norm relative to the leading magnitude; 1 where that isn't finite, and so is the
/// norm.
#[inline(always)]
fn relative_norm<T: Float>(x: &Group<'_, T>, ord: f64, most: f64) -> f64 {
    if !most.is_finite() {
        return 1.0;
    }
    if ord == 2.0 {
        return x
            .sum(
                #[inline(always)]
                |v| (v.wide() / most) * (v.wide() / most),
            )
            .sqrt();
    }
    x.sum(
        #[inline(always)]
        |v| (v.wide().abs() / most).powf(ord),
    )
    .powf(1.0 / ord)
}

/// The norm whose sum of powers f64 doesn't hold.
#[cold]
fn far_norm<T: Float>(x: &Group<'_, T>, ord: f64) -> f64 {
    let most = leading(x, ord);
    if most == 0.0 { 0.0 } else { most * relative_norm(x, ord, most) }
}

/// out = f over the dimensions where out has size 1 and x has not, for the functions that need more than one pass or
/// f64.
pub(crate) fn reduce(exec: &Exec, k: &kernel::Reduce<'_>) -> Result<()> {
    for_float!("reduce", k.x.dtype(), T => reduce_of::<T>(exec, k))?
}

fn reduce_of<T: Float>(exec: &Exec, k: &kernel::Reduce<'_>) -> Result<()> {
    let kernel::Reduce { f, x, out } = *k;
    let dims = split_dims(x, out);

    let (xs, outs) = (Groups::<T>::of(x, &dims), Groups::<T>::of(out, &dims));
    let shape = (xs.kept.len, xs.reduced.len);
    macro_rules! go {
        ($cost:expr, |$group:ident| $y:expr) => {
            for_each_group::<T>(
                exec,
                shape,
                $cost,
                #[inline(always)]
                |k| {
                    let $group = xs.group(k);
                    outs.span.set(outs.kept.offset(k), T::of($y));
                },
            )
        };
    }
    match f {
        ReduceFn::LogSumExp => go!(10, |x| {
            let max = x.fold(
                f64::NEG_INFINITY,
                #[inline(always)]
                |v| v.wide(),
                #[inline(always)]
                |a, b| a.larger(b),
            );
            // Of only -inf it is -inf; +inf and NaN pass.
            if !max.is_finite() {
                max
            } else {
                max + x
                    .sum(
                        #[inline(always)]
                        |v| f64::exp(v.wide() - max),
                    )
                    .ln()
            }
        }),
        ReduceFn::Var { correction } => go!(2, |x| variance(&x, correction, 1.0)),
        ReduceFn::Std { correction } => go!(2, |x| {
            let plain = variance(&x, correction, 1.0);
            if is_held(plain) { plain.sqrt() } else { far_deviation(&x, correction, plain) }
        }),
        ReduceFn::Norm { ord } => {
            let magnitude = |v: T| v.wide().abs();
            if ord == 0.0 {
                go!(1, |x| x.sum(
                    #[inline(always)]
                    |v| if v == T::ZERO { 0.0 } else { 1.0 }
                ))
            } else if ord == 1.0 {
                go!(1, |x| x.sum(magnitude))
            } else if ord == 2.0 {
                go!(1, |x| {
                    let sum = x.sum(
                        #[inline(always)]
                        |v| v.wide() * v.wide(),
                    );
                    if is_held(sum) { sum.sqrt() } else { far_norm(&x, ord) }
                })
            } else if ord == f64::INFINITY {
                go!(1, |x| x.fold(
                    0.0,
                    magnitude,
                    #[inline(always)]
                    |a, b| a.larger(b)
                ))
            } else if ord == f64::NEG_INFINITY {
                go!(1, |x| x.fold(
                    f64::INFINITY,
                    magnitude,
                    #[inline(always)]
                    |a, b| a.smaller(b)
                ))
            } else {
                go!(10, |x| {
                    let sum = x.sum(
                        #[inline(always)]
                        |v| v.wide().abs().powf(ord),
                    );
                    if is_held(sum) { sum.powf(1.0 / ord) } else { far_norm(&x, ord) }
                })
            }
        }
        ReduceFn::Sum | ReduceFn::Max | ReduceFn::Min | ReduceFn::Prod => return Err(unsupported("reduce", x.dtype())),
    }
    Ok(())
}

/// sum (x / by - mean)^2 / max(n - correction, 0), with the mean of x / by.
#[inline(always)]
fn variance<T: Float>(x: &Group<'_, T>, correction: f64, by: f64) -> f64 {
    let mean = x.sum(
        #[inline(always)]
        |v| v.wide() / by,
    ) / x.len() as f64;
    let squares = x.sum(
        #[inline(always)]
        |v| (v.wide() / by - mean) * (v.wide() / by - mean),
    );
    squares / (x.len() as f64 - correction).max(0.0)
}

/// The deviation whose squares f64 doesn't hold; `plain` where that isn't why.
#[cold]
fn far_deviation<T: Float>(x: &Group<'_, T>, correction: f64, plain: f64) -> f64 {
    let most = leading(x, 1.0);
    if most == 0.0 || !most.is_finite() { plain.sqrt() } else { most * variance(x, correction, most).sqrt() }
}

/// out = g times the derivative of f by each x; y is x reduced by [`ReduceFn::in_grad`].
pub(crate) fn reduce_grad(exec: &Exec, k: &kernel::ReduceGrad<'_>) -> Result<()> {
    for_float!("reduce_grad", k.x.dtype(), T => reduce_grad_of::<T>(exec, k))?
}

fn reduce_grad_of<T: Float>(exec: &Exec, k: &kernel::ReduceGrad<'_>) -> Result<()> {
    let kernel::ReduceGrad { f, x, y, g, out } = *k;
    let dims = split_dims(x, y);
    if x.is_empty() {
        return Ok(());
    }

    let [xs, ys, gs, outs] = [x, y, g, out].map(|t| Groups::<T>::of(t, &dims));
    let shape = (xs.kept.len, xs.reduced.len);
    macro_rules! go {
        ($cost:expr, |$x:ident, $y:ident, $g:ident, $out:ident| $body:expr) => {
            for_each_group::<T>(
                exec,
                shape,
                $cost,
                #[inline(always)]
                |k| {
                    let ($x, $y, $g, $out) = (xs.group(k), ys.only(k), gs.only(k), outs.group(k));
                    $body
                },
            )
        };
    }
    match f {
        ReduceFn::Sum => return Err(unsupported("reduce_grad of a sum", x.dtype())),
        ReduceFn::Max | ReduceFn::Min => go!(4, |x, y, g, out| {
            let wins = |i: usize| x.get(i) == y;
            let share = g / T::of((0..x.len()).filter(|&i| wins(i)).count() as f64);
            // Of no winner y is NaN, and says so.
            let rest = if y.wide().is_nan() { y } else { T::ZERO };
            out.write(|i| if wins(i) { share } else { rest })
        }),
        ReduceFn::Prod => go!(2, |x, _y, g, out| {
            // The product of all that follow a piece; within the piece both products run.
            let piece = piece_of(x.len());
            let mut scratch = exec.scratch::<f64>(x.len().div_ceil(piece) + piece);
            let (behind, after) = scratch.memory().split_at_mut(x.len().div_ceil(piece));
            behind.fill(g.wide());
            for p in (1..behind.len()).rev() {
                behind[p - 1] =
                    (p * piece..x.len().min((p + 1) * piece)).rev().fold(behind[p], |b, i| b * x.get(i).wide());
            }
            let mut before = 1.0;
            for (p, &behind) in behind.iter().enumerate() {
                let (first, end) = (p * piece, x.len().min((p + 1) * piece));
                let mut rest = behind;
                for i in (first..end).rev() {
                    after[i - first] = rest;
                    rest *= x.get(i).wide();
                }
                for i in first..end {
                    out.set(i, T::of(before * after[i - first]));
                    before *= x.get(i).wide();
                }
            }
        }),
        ReduceFn::LogSumExp => go!(8, |x, most, g, out| {
            let sum = x.sum(
                #[inline(always)]
                |v| Float::exp(v - most).wide(),
            );
            // With inf or NaN there is no sum.
            let share = if most.wide().is_finite() { g / T::of(sum) } else { g };
            let nothing = most == -T::INFINITY;
            out.write(
                #[inline(always)]
                |i| if nothing { T::ZERO } else { share * Float::exp(x.get(i) - most) },
            )
        }),
        ReduceFn::Var { correction } => go!(2, |x, _y, g, out| {
            let (mean, rest) = (x.mean(), (x.len() as f64 - correction).max(0.0));
            let factor = 2.0 * g.wide() / rest;
            out.write(
                #[inline(always)]
                |i| T::of((x.get(i).wide() - mean) * factor),
            )
        }),
        ReduceFn::Std { correction } => go!(2, |x, y, g, out| {
            let (mean, rest) = (x.mean(), (x.len() as f64 - correction).max(0.0));
            let factor = if y == T::ZERO { 0.0 } else { g.wide() / (y.wide() * rest) };
            out.write(
                #[inline(always)]
                |i| T::of((x.get(i).wide() - mean) * factor),
            )
        }),
        ReduceFn::Norm { ord } if ord.is_infinite() => go!(4, |x, y, g, out| {
            let wins = |i: usize| x.get(i).magnitude() == y;
            let share = g / T::of((0..x.len()).filter(|&i| wins(i)).count() as f64);
            out.write(|i| if wins(i) { share * sign(x.get(i)) } else { T::ZERO })
        }),
        ReduceFn::Norm { ord: 0.0 } => go!(1, |_x, _y, _g, out| out.write(|_| T::ZERO)),
        ReduceFn::Norm { ord: 1.0 } => go!(1, |x, _y, g, out| out.write(|i| g * sign(x.get(i)))),
        ReduceFn::Norm { ord: 2.0 } => go!(2, |x, most, g, out| {
            let share = g / T::of(relative_norm(&x, 2.0, most.wide()));
            out.write(|i| if most == T::ZERO { T::ZERO } else { x.get(i) / most * share })
        }),
        ReduceFn::Norm { ord } => go!(20, |x, most, g, out| {
            let most = most.wide();
            let norm = relative_norm(&x, ord, most);
            let derivative = |x: f64| (x.abs() / most / norm).powf(ord - 1.0);
            out.write(|i| {
                let v = x.get(i);
                if v == T::ZERO || most == 0.0 { T::ZERO } else { g * sign(v) * T::of(derivative(v.wide())) }
            })
        }),
    }
    Ok(())
}

/// -1, 0 or 1; NaN of NaN.
#[inline(always)]
fn sign<T: Float>(x: T) -> T {
    if x > T::ZERO {
        T::ONE
    } else if x < T::ZERO {
        -T::ONE
    } else {
        x * T::ZERO
    }
}

/// The largest along `dim` and its first index; a NaN counts as the largest.
pub(crate) fn max_index(exec: &Exec, k: &kernel::MaxIndex<'_>) -> Result<()> {
    for_float!("max_index", k.x.dtype(), T => max_index_of::<T>(exec, k))
}

#[allow(clippy::eq_op)]
fn max_index_of<T: Float>(exec: &Exec, k: &kernel::MaxIndex<'_>) {
    let kernel::MaxIndex { x, dim, values, indices } = *k;
    let dims = along(x, dim);
    let indices = Span::<i64>::of(indices);

    let (xs, values) = (Groups::<T>::of(x, &dims), Span::<T>::of(values));
    for_each_group::<T>(
        exec,
        (xs.kept.len, xs.reduced.len),
        1,
        #[inline(always)]
        |k| {
            let group = xs.group(k);
            let (mut largest, mut at) = (group.get(0), 0);
            for i in 1..group.len() {
                let v = group.get(i);
                if v > largest || (v != v && largest == largest) {
                    (largest, at) = (v, i);
                }
            }
            values.set(k, largest);
            indices.set(k, at as i64);
        },
    );
}

/// out = g at the index along `dim`, else 0.
pub(crate) fn max_index_grad(exec: &Exec, k: &kernel::MaxIndexGrad<'_>) -> Result<()> {
    for_float!("max_index_grad", k.g.dtype(), T => max_index_grad_of::<T>(exec, k))
}

fn max_index_grad_of<T: Float>(exec: &Exec, k: &kernel::MaxIndexGrad<'_>) {
    let kernel::MaxIndexGrad { indices, g, dim, out } = *k;
    let dims = along(out, dim);
    let (index, kept) = (Span::<i64>::of(indices), Axis::new(indices, &dims.1));

    let (gs, outs) = (Groups::<T>::of(g, &dims), Groups::<T>::of(out, &dims));
    for_each_group::<T>(
        exec,
        (outs.kept.len, outs.reduced.len),
        1,
        #[inline(always)]
        |k| {
            let (g, at) = (gs.only(k), index.get(kept.offset(k)) as usize);
            outs.group(k).write(
                #[inline(always)]
                |i| if i == at { g } else { T::ZERO },
            );
        },
    );
}

/// Dimension `dim`, and the others.
fn along(x: &Tensor, dim: usize) -> (Shape, Shape) {
    (0..x.rank()).partition(|&d| d == dim)
}
