//! A rule that breaks its contract in any way that the trait allows, inside a healthy program: a typed error (or the
//! rule's own panic), and the tape goes on as if nothing had been there.

use super::{Mark, cpu, leaf};
use retape_core::kernel::{self, BinaryFn, UnaryFn};
use retape_core::ops::*;
use retape_core::{BackwardOptions, DType, Device, Error, MemoryKind, Result, Tape, TapeOptions, Tensor, Var, meta};
use smallvec::{SmallVec, smallvec};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// What a rule does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    // infer
    InferErrs,
    InferPanics,
    PromisesNothing,
    PromisesStatisticsOnly,
    PromisesMore,
    PromisesAnotherShape,
    PromisesAnotherDType,
    PromisesMoreElementsThanThereAre,
    PromisesMoreBytesThanThereAre,
    // view
    ViewErrs,
    ViewPanics,
    ViewsTooFew,
    ViewsTooMany,
    ViewsAnotherShape,
    ViewsAnotherTensor,
    ViewsAnotherDevice,
    ViewsOtherwiseLater,
    ViewsNothingLater,
    // saves
    SavesPanics,
    SavesAMissingInput,
    SavesAMissingOutput,
    SavesTwice,
    SavesExactlyAMissingInput,
    // forward
    ForwardErrs,
    ForwardPanics,
    ForwardErrsLater,
    ForwardPanicsLater,
    RunsOnAnotherShape,
    RunsOnAnotherDType,
    RunsOnAnotherDevice,
    WritesItsInput,
    WritesWhatItReads,
    WritesRepeatedElements,
    AsksForImpossibleMemory,
    FillsNothing,
    // cost
    CostPanics,
    CostsTooMuch,
    // backward
    BackwardErrs,
    BackwardPanics,
    SetsAMissingInput,
    SetsAnotherShape,
    SetsAnotherDType,
    SetsAnotherDevice,
    SetsTwice,
    SetsNothing,
    TakesWhatIsNotSaved,
    TakesASlotTwice,
    TakesAMissingSlot,
    TakesAMissingGradient,
    TakesAGradientTwice,
    TakesTheFirstGradientTwice,
    NeedsAMissingInput,
    AsksForAMissingInput,
    ComputesForAMissingInput,
    RunsBackwardOnAnotherShape,
    SumsToAnotherShape,
    WritesWhatIsSaved,
    WritesItsOldOutput,
}
use Fault::*;

const FAULTS: [Fault; 59] = [
    None,
    InferErrs,
    InferPanics,
    PromisesNothing,
    PromisesStatisticsOnly,
    PromisesMore,
    PromisesAnotherShape,
    PromisesAnotherDType,
    PromisesMoreElementsThanThereAre,
    PromisesMoreBytesThanThereAre,
    ViewErrs,
    ViewPanics,
    ViewsTooFew,
    ViewsTooMany,
    ViewsAnotherShape,
    ViewsAnotherTensor,
    ViewsAnotherDevice,
    ViewsOtherwiseLater,
    ViewsNothingLater,
    SavesPanics,
    SavesAMissingInput,
    SavesAMissingOutput,
    SavesTwice,
    SavesExactlyAMissingInput,
    ForwardErrs,
    ForwardPanics,
    ForwardErrsLater,
    ForwardPanicsLater,
    RunsOnAnotherShape,
    RunsOnAnotherDType,
    RunsOnAnotherDevice,
    WritesItsInput,
    WritesWhatItReads,
    WritesRepeatedElements,
    AsksForImpossibleMemory,
    FillsNothing,
    CostPanics,
    CostsTooMuch,
    BackwardErrs,
    BackwardPanics,
    SetsAMissingInput,
    SetsAnotherShape,
    SetsAnotherDType,
    SetsAnotherDevice,
    SetsTwice,
    SetsNothing,
    TakesWhatIsNotSaved,
    TakesASlotTwice,
    TakesAMissingSlot,
    TakesAMissingGradient,
    TakesAGradientTwice,
    TakesTheFirstGradientTwice,
    NeedsAMissingInput,
    AsksForAMissingInput,
    ComputesForAMissingInput,
    RunsBackwardOnAnotherShape,
    SumsToAnotherShape,
    WritesWhatIsSaved,
    WritesItsOldOutput,
];

/// When a fault shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shows {
    Never,
    Recording,
    Backward,
}

impl Fault {
    fn shows(self) -> Shows {
        match self {
            // A rule may promise what it doesn't use, leave numbers undefined, and cost what it says.
            None | PromisesMore | FillsNothing | CostsTooMuch => Shows::Never,
            ViewsOtherwiseLater | ViewsNothingLater | ForwardErrsLater | ForwardPanicsLater => Shows::Backward,
            _ if self as usize >= BackwardErrs as usize => Shows::Backward,
            _ => Shows::Recording,
        }
    }
    fn panics(self) -> bool {
        matches!(
            self,
            InferPanics | ViewPanics | SavesPanics | ForwardPanics | ForwardPanicsLater | CostPanics | BackwardPanics
        )
    }
    fn is_view(self) -> bool {
        (ViewErrs as usize..=ViewsNothingLater as usize).contains(&(self as usize))
    }
    /// Whether the engine's own error says that the rule is at fault.
    fn blames_the_rule(self) -> bool {
        !matches!(
            self,
            InferErrs
                | ViewErrs
                | ForwardErrs
                | ForwardErrsLater
                | BackwardErrs
                | PromisesAnotherShape
                | PromisesAnotherDType
                | PromisesMoreElementsThanThereAre
                | PromisesMoreBytesThanThereAre
                | RunsOnAnotherShape
                | RunsOnAnotherDType
                | RunsOnAnotherDevice
                | WritesItsInput
                | WritesWhatItReads
                | WritesRepeatedElements
                | AsksForImpossibleMemory
        )
    }
}

/// a b and a + b; with a view's fault, a as two views.
#[derive(Debug)]
struct Faulty {
    fault: Fault,
    runs: Cell<u32>,
    old_output: RefCell<Option<Tensor>>,
}

fn own_error() -> Error {
    Error::InvalidValue { kernel: "faulty", reason: "the rule's own".into() }
}

impl Faulty {
    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }
    fn panics(&self, fault: Fault) {
        assert!(!self.is(fault), "the rule's own");
    }
    /// True from the second time on.
    fn again(&self) -> bool {
        self.runs.replace(self.runs.get() + 1) > 0
    }
}

impl OpRule for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        self.panics(InferPanics);
        let plain = || Output::new(inputs[0].shape.clone(), inputs[0].dtype);
        Ok(match self.fault {
            InferErrs => return Err("the rule's own".into()),
            PromisesNothing => Outputs::new(),
            PromisesStatisticsOnly => smallvec![Output::statistic(inputs[0].shape.clone(), inputs[0].dtype)],
            PromisesMore => smallvec![plain(), plain(), plain()],
            PromisesAnotherShape => smallvec![Output::new([3, 7].as_slice(), inputs[0].dtype), plain()],
            PromisesAnotherDType => smallvec![Output::new(inputs[0].shape.clone(), DType::I64), plain()],
            PromisesMoreElementsThanThereAre => {
                smallvec![Output::new([usize::MAX, 2].as_slice(), DType::F32), plain()]
            }
            PromisesMoreBytesThanThereAre => smallvec![Output::new([1 << 62].as_slice(), DType::F64), plain()],
            _ => smallvec![plain(), plain()],
        })
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        if !self.fault.is_view() {
            return Option::None;
        }
        self.panics(ViewPanics);
        let again = self.again();
        let other = |device: &Device| Tensor::full(device, x.shape(), x.dtype(), 1.0).unwrap();
        Some(Ok(match self.fault {
            ViewErrs => return Some(Err(own_error())),
            ViewsTooFew => smallvec![x.clone()],
            ViewsTooMany => smallvec![x.clone(), x.clone(), x.clone()],
            ViewsAnotherShape => smallvec![x.narrow(0, 0, 1).unwrap(), x.clone()],
            ViewsAnotherTensor => smallvec![other(x.device()), x.clone()],
            ViewsAnotherDevice => smallvec![other(&meta()), x.clone()],
            ViewsOtherwiseLater if again => smallvec![x.narrow(0, 0, 1).unwrap(), x.narrow(0, 0, 1).unwrap()],
            ViewsNothingLater if again => return Option::None,
            _ => smallvec![x.clone(), x.clone()],
        }))
    }
    fn forward(&self, exec: &Exec<'_>, x: &[Tensor], out: &[Tensor]) -> Result<()> {
        self.panics(ForwardPanics);
        let again = self.again();
        assert!(!(self.is(ForwardPanicsLater) && again), "the rule's own");
        let (a, b) = (&x[0], &x[1]);
        match self.fault {
            ForwardErrs => return Err(own_error()),
            ForwardErrsLater if again => return Err(own_error()),
            RunsOnAnotherShape => {
                exec.run(kernel::Binary { f: BinaryFn::Add, a, b: &b.narrow(0, 0, 1)?, out: &out[0] })?;
            }
            RunsOnAnotherDType => {
                exec.run(kernel::Unary {
                    f: UnaryFn::Exp,
                    x: &a.cast(DType::I32, MemoryKind::Workspace)?,
                    out: &out[0],
                })?;
            }
            RunsOnAnotherDevice => {
                let other = Tensor::full(&meta(), a.shape(), a.dtype(), 1.0)?;
                exec.run(kernel::Unary { f: UnaryFn::Exp, x: &other, out: &out[0] })?;
            }
            WritesItsInput => exec.run(kernel::Fill { value: 7.0, out: a })?,
            WritesWhatItReads => {
                let (n, w) = (out[0].shape()[0], &out[0]);
                exec.run(kernel::Copy { x: &w.narrow(0, 0, n - 1)?, out: &w.narrow(0, 1, n - 1)? })?;
            }
            WritesRepeatedElements => {
                exec.run(kernel::Copy { x: a, out: &out[0].narrow(0, 0, 1)?.expand(a.shape())? })?;
            }
            AsksForImpossibleMemory => drop(exec.workspace(&[usize::MAX], DType::F64)?),
            FillsNothing => return Ok(()),
            _ => {}
        }
        if self.is(WritesItsOldOutput) && !again {
            *self.old_output.borrow_mut() = Some(out[1].clone());
        }
        exec.run(kernel::Binary { f: BinaryFn::Mul, a, b, out: &out[0] })?;
        exec.run(kernel::Binary { f: BinaryFn::Add, a, b, out: &out[1] })
    }
    fn saves(&self, _: &[bool]) -> Saves {
        self.panics(SavesPanics);
        let mut all = if self.fault.is_view() { saves([]) } else { saves([Slot::In(0), Slot::In(1)]) };
        match self.fault {
            SavesAMissingInput => all.extend(saves([Slot::In(usize::MAX)])),
            SavesAMissingOutput => all.extend(saves([Slot::Out(2)])),
            SavesTwice => all.extend(saves([Slot::In(0)])),
            SavesExactlyAMissingInput => all.push(Save { slot: Slot::In(2), exact: true }),
            _ => {}
        }
        all
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        self.panics(BackwardPanics);
        let (exec, spec) = (cx.exec(0), cx.input(0));
        let full = |device: &Device, shape: &[usize], dtype| Tensor::full(device, shape, dtype, 0.0);
        match self.fault {
            BackwardErrs => return Err(own_error()),
            SetsNothing => return Ok(()),
            NeedsAMissingInput => assert!(!cx.needs(7)),
            AsksForAMissingInput => drop(cx.input(7).clone()),
            ComputesForAMissingInput => drop(cx.exec(7)),
            TakesAMissingGradient => assert!(cx.grad(7).is_none()),
            TakesAGradientTwice => drop((cx.grad(0), cx.grad(0))),
            TakesTheFirstGradientTwice => drop((cx.grad0(), cx.grad0())),
            SumsToAnotherShape => drop(exec.sum_to(exec.empty_like(spec)?, &[9, 9, 9, 9, 9])?),
            _ => {}
        }
        let (g0, g1) = (cx.grad(0), cx.grad(1));
        if self.fault.is_view() {
            let zero = exec.empty_like(spec)?;
            exec.run(kernel::Fill { value: 0.0, out: &zero })?;
            let g = g0.or(g1).expect("one of the outputs has a gradient");
            for input in 0..2 {
                cx.set(input, if input == 0 { g.clone() } else { zero.clone() });
            }
            return Ok(());
        }
        let (a, b) = (cx.saved(Slot::In(0))?, cx.saved(Slot::In(1))?);
        match self.fault {
            TakesWhatIsNotSaved => drop(cx.saved(Slot::Out(0))?),
            TakesASlotTwice => drop(cx.saved(Slot::In(0))?),
            TakesAMissingSlot => drop(cx.saved(Slot::In(usize::MAX))?),
            RunsBackwardOnAnotherShape => {
                exec.run(kernel::Unary { f: UnaryFn::Neg, x: &a, out: &exec.empty(&[1], a.dtype())? })?;
            }
            WritesWhatIsSaved => {
                let _held = a.clone();
                exec.run(kernel::Fill { value: 7.0, out: &a })?;
            }
            WritesItsOldOutput => {
                exec.run(kernel::Fill { value: 7.0, out: self.old_output.borrow().as_ref().unwrap() })?;
            }
            _ => {}
        }
        let (device, dtype) = (a.device().clone(), spec.dtype);
        for (input, factor) in [(0, &b), (1, &a)] {
            let wrong = match self.fault {
                SetsAnotherShape => Some(full(&device, &[3], dtype)?),
                SetsAnotherDType => Some(full(&device, &spec.shape, DType::F64)?),
                SetsAnotherDevice => Some(full(&meta(), &spec.shape, dtype)?),
                _ => Option::None,
            };
            if let (1, Some(wrong)) = (input, wrong) {
                cx.set(1, wrong);
                continue;
            }
            let sum = exec.empty_like(spec)?;
            match &g1 {
                Some(g1) => exec.run(kernel::Copy { x: g1, out: &sum })?,
                Option::None => exec.run(kernel::Fill { value: 0.0, out: &sum })?,
            }
            if let Some(g0) = &g0 {
                let term = exec.empty_like(spec)?;
                exec.run(kernel::Binary { f: BinaryFn::Mul, a: g0, b: factor, out: &term })?;
                exec.run(kernel::Binary { f: BinaryFn::Add, a: &sum, b: &term, out: &sum })?;
            }
            cx.set(input, sum);
        }
        match self.fault {
            SetsAMissingInput => cx.set(7, a),
            SetsTwice => cx.set(0, a),
            _ => {}
        }
        Ok(())
    }
    fn cost(&self, _: &[Spec], _: &[Output]) -> Cost {
        self.panics(CostPanics);
        match self.fault {
            CostsTooMuch => Cost { flops: u64::MAX, traffic: u64::MAX },
            _ => Cost::default(),
        }
    }
    fn samples() -> Vec<Sample> {
        vec![]
    }
}

/// The op, what is made of it, and a pass: what went wrong, and when.
fn misuse(h: &Var, x: &Var, fault: Fault) -> (Shows, Option<Error>) {
    let rule = Rc::new(Faulty { fault, runs: Cell::new(0), old_output: RefCell::default() });
    let recorded = catch_unwind(AssertUnwindSafe(|| h.clone().apply_all(Op::Custom(rule), [x.clone()])));
    let outputs = match recorded {
        Err(_) => return (Shows::Recording, Option::None),
        Ok(Err(error)) => return (Shows::Recording, Some(error)),
        Ok(Ok(outputs)) => outputs,
    };
    let passed = catch_unwind(AssertUnwindSafe(|| {
        // Both outputs are read by a later op, and the first must be replayed for it.
        let mut outputs = outputs.into_iter();
        let (mut y, z) = (outputs.next().unwrap(), outputs.next().unwrap());
        if !fault.is_view() {
            y = y.recompute()?;
        }
        let loss = y.clone().square()?.add(&z.clone().square()?)?.sum()?;
        drop((y, z));
        x.tape().ledger()?;
        x.tape().backward_with(&loss, BackwardOptions::RETAIN).map(drop)
    }));
    match passed {
        Err(_) => (Shows::Backward, Option::None),
        Ok(Err(error)) => (Shows::Backward, Some(error)),
        Ok(Ok(())) => (Shows::Never, Option::None),
    }
}

/// The gradients of a program in which, at some time, a rule breaks its contract.
fn session(device: &Device, fault: Option<Fault>, mark: Option<Mark>) -> (Vec<Option<Vec<u8>>>, u64) {
    let tape = Tape::with(device, TapeOptions { seed: Some(9), ..TapeOptions::default() });
    let (x, w) = (leaf(&tape, &[4, 6], 1), leaf(&tape, &[6, 6], 2));
    let h = x.clone().matmul(&w).unwrap().dropout(0.2).unwrap().tanh().unwrap();
    if let Some(mark) = mark {
        h.set_mark(mark).unwrap();
    }
    if let Some(fault) = fault {
        let state = || (tape.node_count(), tape.saved_bytes(), tape.random_counter(), device.meter().live());
        let before = state();
        let (shows, error) = misuse(&h, &x, fault);
        assert_eq!(shows, fault.shows(), "{fault:?} under {mark:?}: {error:?}");
        assert_eq!(error.is_none(), shows == Shows::Never || fault.panics(), "{fault:?} under {mark:?}: {error:?}");
        if let Some(error) = error {
            let text = error.to_string();
            let blamed = matches!(&error, Error::BrokenRule { op: "faulty", path, .. } if path.starts_with("faulty"));
            assert_eq!(blamed, fault.blames_the_rule(), "{fault:?} under {mark:?}: {error:?}");
            let of_a_kernel = matches!(error, Error::Unsupported { .. } | Error::DeviceMismatch { .. });
            assert!(text.contains("faulty") || of_a_kernel, "{text}");
        }
        assert_eq!(state(), before, "{fault:?} under {mark:?}");
    }
    let loss = h.clone().mul(h.clone().dropout(0.3).unwrap()).unwrap().sum().unwrap();
    drop(h);
    let gradients = tape.backward(&loss).unwrap();
    let bytes = [&x, &w].map(|v| gradients.of(v).unwrap().to_bytes().ok()).to_vec();
    (bytes, tape.random_counter())
}

#[test]
fn a_rule_that_breaks_its_contract_breaks_no_tape() {
    assert!(FAULTS.iter().enumerate().all(|(i, fault)| *fault as usize == i), "each fault once, in order");
    for device in [cpu(), meta()] {
        for mark in [Option::None].into_iter().chain(Mark::all().filter(|&mark| mark != Mark::Keep).map(Some)) {
            let healthy = session(&device, Option::None, mark);
            for fault in FAULTS {
                assert_eq!(session(&device, Some(fault), mark), healthy, "after {fault:?} under {mark:?}");
                assert_eq!(device.meter().live(), 0, "{fault:?} under {mark:?}");
            }
        }
    }
}

/// A pass that consumes its tape has consumed it, also where a rule's error or panic ends it.
#[test]
fn a_pass_that_a_rule_ends_has_consumed_the_tape() {
    for fault in [BackwardErrs, BackwardPanics, SetsAMissingInput] {
        let device = cpu();
        let tape = Tape::new(&device);
        let (a, b) = (leaf(&tape, &[4, 6], 1), leaf(&tape, &[4, 6], 2));
        let rule = Faulty { fault, runs: Cell::new(0), old_output: RefCell::default() };
        let loss = a.clone().apply(Op::Custom(Rc::new(rule)), [b.clone()]).unwrap().sum().unwrap();
        assert!(!matches!(catch_unwind(AssertUnwindSafe(|| tape.backward(&loss))), Ok(Ok(_))));
        assert!(matches!(tape.backward(&loss), Err(Error::TapeConsumed { .. })), "{fault:?}");
        assert_eq!(tape.saved_bytes(), 0);
        drop((loss, a, b));
        assert_eq!(device.meter().live(), 0, "{fault:?}");
    }
}
