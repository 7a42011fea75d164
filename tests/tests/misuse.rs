//! Wrong use around backward is a typed error that names the op, the path and what to do instead; and a tape is not
//! broken by a policy or a rule that uses it while it runs.

#[path = "misuse/kernels.rs"]
mod kernels;
#[path = "misuse/rules.rs"]
mod rules;
#[path = "misuse/sizes.rs"]
mod sizes;

use retape_core::ops::*;
use retape_core::{
    BackwardOptions, DType, Decision, Device, Error, Mark, MemoryKind, Origin, Policy, Result, RuleInfo, ScopeSite,
    Site, Tape, TapeOptions, Tensor, Var, kernel, scope,
};
use retape_tests::random;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

fn leaf(tape: &Tape, shape: &[usize], seed: u64) -> Var {
    tape.leaf(&random(&tape.device(), shape, seed, DType::F32)).unwrap()
}

/// A user's op that has no gradient.
#[derive(Debug)]
struct Round;

impl OpRule for Round {
    fn name(&self) -> &'static str {
        "round"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        Ok([Output::new(inputs[0].shape.clone(), inputs[0].dtype)].into_iter().collect())
    }
    fn forward(&self, exec: &Exec<'_>, x: &[Tensor], out: &[Tensor]) -> Result<()> {
        exec.run(kernel::Copy { x: &x[0], out: &out[0] })
    }
    fn saves(&self, _: &[bool]) -> Saves {
        saves([])
    }
    fn backward(&self, _: &mut Backward<'_>) -> Result<()> {
        Ok(())
    }
    fn cost(&self, _: &[Spec], _: &[Output]) -> Cost {
        Cost::default()
    }
    fn samples() -> Vec<Sample> {
        vec![]
    }
}

/// What each mistake says: its kind, the op, the path, and what would be right.
#[test]
fn each_mistake_names_op_path_and_remedy() {
    let device = cpu();
    let create = BackwardOptions { create_graph: true, ..BackwardOptions::default() };
    type Mistake<'a> = (&'a str, fn(&Error) -> bool, Box<dyn Fn(&Tape, &Var) -> Option<Error>>, &'a [&'a str]);
    let no_gradient: fn(&Error) -> bool = |e| matches!(e, Error::NoGradient { .. });
    let mistakes: Vec<Mistake<'_>> = vec![
        (
            "a gradient of a gradient",
            |e| matches!(e, Error::SecondOrder { .. }),
            Box::new(move |tape, x| tape.grad_with(&x.clone().square().unwrap().sum().unwrap(), &[x], create).err()),
            &["ffn.sum", "(sum)", "first derivative with ops", "differences"],
        ),
        (
            "an op without a gradient on the way",
            no_gradient,
            Box::new(|tape, x| {
                let cut = x.clone().cast(DType::I64).unwrap().cast(DType::F32).unwrap();
                tape.backward(&cut.sum().unwrap()).err()
            }),
            &["ffn.sum", "(sum)", "only through `ffn.cast` (cast)", "has no gradient", "constant"],
        ),
        (
            "a user's op without a gradient",
            |e| matches!(e, Error::BrokenRule { .. }),
            Box::new(|tape, x| {
                let y = x.clone().apply(Op::Custom(Rc::new(Round)), []).unwrap();
                tape.backward(&y.sum().unwrap()).err()
            }),
            &["ffn.round", "round at", "no gradient was set for input 0"],
        ),
        (
            "backward from an integer",
            no_gradient,
            Box::new(|tape, x| tape.backward(&x.clone().sum().unwrap().cast(DType::I64).unwrap()).err()),
            &["ffn.cast", "(cast)", "i64 values have no gradient", "start from a float"],
        ),
        (
            "the gradient by an integer",
            no_gradient,
            Box::new(|tape, x| {
                let ids = tape.constant(&Tensor::from_slice(&tape.device(), &[2], &[0i64, 1]).unwrap()).unwrap();
                tape.grad(&x.clone().sum().unwrap(), &[&ids]).err()
            }),
            &["ffn.leaf", "(leaf)", "i64 values have no gradient"],
        ),
        (
            "an integer as a leaf with a gradient",
            no_gradient,
            Box::new(|tape, _| tape.leaf(&Tensor::from_slice(&tape.device(), &[2], &[0i64, 1]).unwrap()).err()),
            &["leaf", "i64", "`constant`", "cast to f32"],
        ),
        (
            "the gradient by a constant",
            no_gradient,
            Box::new(|tape, x| {
                let c = tape.constant(&random(&tape.device(), &[2], 3, DType::F32)).unwrap();
                tape.grad(&x.clone().sum().unwrap(), &[&c]).err()
            }),
            &["ffn.leaf", "(leaf)", "`leaf` or `parameter`"],
        ),
        (
            "an op on a value of another tape",
            |e| matches!(e, Error::OtherTape { .. }),
            Box::new(|tape, x| x.clone().add(leaf(&Tape::new(&tape.device()), &[2, 2], 4)).err()),
            &["add", "`leaf`", "another tape", "with `leaf` or `constant`"],
        ),
        (
            "backward from a value of another tape",
            |e| matches!(e, Error::OtherTape { .. }),
            Box::new(|tape, _| tape.backward(&leaf(&Tape::new(&tape.device()), &[], 4).exp().unwrap()).err()),
            &["backward", "`exp`", "another tape", "record it on this one"],
        ),
        (
            "the gradient by a value of another tape",
            |e| matches!(e, Error::OtherTape { .. }),
            Box::new(|tape, x| {
                tape.grad(&x.clone().sum().unwrap(), &[&leaf(&Tape::new(&tape.device()), &[], 4).exp().unwrap()]).err()
            }),
            &["grad", "`exp`", "another tape"],
        ),
        (
            "a second backward",
            |e| matches!(e, Error::TapeConsumed { .. }),
            Box::new(|tape, x| {
                let loss = x.clone().sum().unwrap();
                tape.backward(&loss).unwrap();
                tape.backward(&loss).err()
            }),
            &["backward at `ffn.sum`", "consumed", "start a new tape", "`backward_with`"],
        ),
        (
            "an op on a consumed tape",
            |e| matches!(e, Error::TapeConsumed { .. }),
            Box::new(|tape, x| {
                tape.backward(&x.clone().sum().unwrap()).unwrap();
                x.clone().gelu().err()
            }),
            &["gelu at `ffn.gelu`", "consumed", "start a new tape"],
        ),
    ];
    for (mistake, is_kind, make, words) in mistakes {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[2, 2], 1);
        let _scope = tape.scope("ffn");
        let error = make(&tape, &x).unwrap_or_else(|| panic!("{mistake} is no error"));
        let text = error.to_string();
        assert!(is_kind(&error), "{mistake}: {error:?}");
        assert!(words.iter().all(|w| text.contains(w)), "{mistake}: {text}, without one of {words:?}");
    }
}

/// Asking for a gradient of a gradient changes nothing; and a gradient put on a tape is a new leaf.
#[test]
fn the_second_derivative_is_refused_at_the_call() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[3], 1);
    let loss = x.clone().square().unwrap().sum().unwrap();
    let retain = BackwardOptions::RETAIN;
    let error = tape.grad_with(&loss, &[&x], BackwardOptions { create_graph: true, ..retain }).unwrap_err();
    assert_eq!(error, Error::SecondOrder { path: "sum".into(), op: "sum" });
    let first = tape.grad_with(&loss, &[&x], retain).unwrap();
    assert_eq!(first[0].to_bytes(), tape.grad(&loss, &[&x]).unwrap()[0].to_bytes());
    let tape = Tape::new(&device);
    let g = tape.leaf(&first[0]).unwrap();
    assert_eq!(tape.backward(&g.clone().sum().unwrap()).unwrap().of(&g).unwrap().to_vec::<f32>().unwrap(), [1.0; 3]);
}

/// A policy that does something to its own tape whenever it is asked.
struct Meddler {
    tape: RefCell<Option<Tape>>,
    value: RefCell<Option<Var>>,
    meddle: fn(&Tape, &Var),
    rules: Vec<RuleInfo>,
}

impl std::fmt::Debug for Meddler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Meddler")
    }
}

impl Meddler {
    fn meddle(&self) {
        if let (Some(tape), Some(value)) = (&*self.tape.borrow(), &*self.value.borrow()) {
            (self.meddle)(tape, value);
        }
    }
}

impl Policy for Meddler {
    fn mark(&self, _: &Site<'_>) -> Option<Decision> {
        self.meddle();
        Some(Decision { mark: Mark::Recompute, rule: 0 })
    }
    fn rules(&self) -> &[RuleInfo] {
        self.meddle();
        &self.rules
    }
    fn is_segment(&self, _: &ScopeSite<'_>) -> bool {
        self.meddle();
        false
    }
    fn lint(&self, _: &retape_core::Ledger) -> Vec<retape_core::Lint> {
        self.meddle();
        vec![]
    }
}

thread_local! {
    static SEEN: RefCell<Vec<Option<Error>>> = const { RefCell::new(vec![]) };
    static HELD: RefCell<Vec<Var>> = const { RefCell::new(vec![]) };
}

fn session_with(meddle: fn(&Tape, &Var)) -> Result<Vec<f32>> {
    let device = cpu();
    let rules = vec![RuleInfo { name: "meddler".into(), origin: Origin::Preset }];
    let policy = Rc::new(Meddler { tape: RefCell::default(), value: RefCell::default(), meddle, rules });
    let tape = Tape::with(&device, TapeOptions { policy: Some(policy.clone()), ..TapeOptions::default() });
    let x = leaf(&tape, &[2, 2], 1);
    *policy.tape.borrow_mut() = Some(tape.clone());
    *policy.value.borrow_mut() = Some(x.clone());
    let run = || {
        let scope = tape.scope("ffn");
        let y = x.clone().gelu()?.tanh()?;
        drop(scope);
        let loss = y.clone().square()?.sum()?;
        tape.ledger()?;
        drop(y);
        tape.backward(&loss)?.of(&x).unwrap().to_vec::<f32>()
    };
    let result = run();
    // Or the two would hold each other.
    (*policy.tape.borrow_mut(), *policy.value.borrow_mut()) = (None, None);
    result
}

#[test]
fn a_policy_that_uses_its_own_tape_gets_errors_and_no_panic() {
    let plain = session_with(|_, _| {}).unwrap();
    // Calls that can fail do, at once, and what the policy is asked for goes on.
    let fail: fn(&Tape, &Var) = |tape, x| {
        let one = Tensor::full(&tape.device(), &[2, 2], DType::F32, 1.0).unwrap();
        SEEN.with_borrow_mut(|seen| {
            seen.push(tape.leaf(&one).err());
            seen.push(tape.constant(&one).err());
            seen.push(x.clone().gelu().err());
            seen.push(tape.commit().err());
            seen.push(tape.on_commit(|| ()).err());
            seen.push(x.set_mark(Mark::Keep).err());
            seen.push(tape.backward(x).err());
            seen.push(tape.backward_from(&[(x, &one)], BackwardOptions::RETAIN).err());
            seen.push(tape.grad(x, &[x]).err());
            seen.push(tape.ledger().err());
        });
    };
    assert_eq!(session_with(fail).unwrap(), plain);
    SEEN.with_borrow(|seen| {
        assert!(!seen.is_empty());
        let reentrant = |e: &Option<Error>| matches!(e, Some(Error::Reentrant { .. }));
        assert!(seen.iter().all(reentrant), "{seen:?}");
        let text = seen[0].as_ref().unwrap().to_string();
        assert!(text.contains("leaf") && text.contains("by its site alone"), "{text}");
    });
    // Facts, clones and drops are all right: no getter answers an empty shape.
    let ask: fn(&Tape, &Var) = |tape, x| {
        HELD.with_borrow_mut(|held| {
            held.push(x.clone());
            held.push(x.clone());
            held.remove(0);
        });
        assert_eq!((x.shape().to_vec(), x.dtype(), x.path()), (vec![2, 2], DType::F32, "leaf".into()));
        assert!(x.requires_grad() && x.tensor().unwrap().len() == 4);
        assert_eq!(format!("{x:?}"), "Var(`leaf`, f32[2, 2])");
        assert!(tape.node_count() > 0 && tape.saved_bytes() < 1 << 20 && tape.stats().replays == 0);
        assert!(format!("{tape:?}").contains("nodes on"));
        assert_eq!(tape.random_counter(), 0);
        tape.no_grad(|| ());
    };
    assert_eq!(session_with(ask).unwrap(), plain);
    HELD.take();
    // What can't return an error leaves it for the tape's next call.
    let open: fn(&Tape, &Var) = |tape, _| drop(tape.scope(scope("inside").mark(Mark::Keep).segment()));
    assert!(matches!(session_with(open), Err(Error::Reentrant { what: "scope" })));
}

/// A rule that asks its tape for facts; recording is refused.
#[derive(Debug)]
struct Nosy {
    x: Var,
    infers: Cell<u32>,
}

impl OpRule for Nosy {
    fn name(&self) -> &'static str {
        "nosy"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        self.infers.set(self.infers.get() + 1);
        assert!(matches!(self.x.clone().scale(2.0), Err(Error::Reentrant { what: "scale" })));
        assert_eq!((self.x.shape(), self.x.path()), (inputs[0].shape.clone(), "leaf".into()));
        Ok([Output::new(inputs[0].shape.clone(), inputs[0].dtype)].into_iter().collect())
    }
    fn forward(&self, exec: &Exec<'_>, x: &[Tensor], out: &[Tensor]) -> Result<()> {
        assert!(self.x.tape().saved_bytes() < 1 << 20);
        exec.run(kernel::Copy { x: &x[0], out: &out[0] })
    }
    fn saves(&self, _: &[bool]) -> Saves {
        assert!(self.x.requires_grad() && self.x.tape().node_count() > 0);
        saves([Slot::In(0)])
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        assert!(self.x.tensor().is_ok());
        assert!(matches!(self.x.tape().backward(&self.x), Err(Error::Reentrant { .. })));
        let g = cx.grad0();
        cx.set(0, g);
        Ok(())
    }
    fn cost(&self, _: &[Spec], _: &[Output]) -> Cost {
        assert_eq!(self.x.dtype(), DType::F32);
        Cost::default()
    }
    fn samples() -> Vec<Sample> {
        vec![]
    }
}

#[test]
fn a_rule_may_ask_its_tape_for_facts() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[2, 2], 1);
    let rule = Rc::new(Nosy { x: x.clone(), infers: Cell::new(0) });
    let y = x.clone().apply(Op::Custom(rule.clone()), []).unwrap();
    assert_eq!(rule.infers.get(), 1);
    let gradient = tape.backward(&y.sum().unwrap()).unwrap().of(&x).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(gradient, [1.0; 4]);
}

/// A random op that fails takes no counter: the next one draws what it would have drawn.
#[test]
fn a_random_op_that_fails_changes_no_later_numbers() {
    let device = cpu();
    let x = random(&device, &[4, 4], 1, DType::F32);
    let ids = Tensor::from_slice(&device, &[2], &[0i64, 1]).unwrap();
    let four = random(&device, &[1, 4, 2, 4], 2, DType::F32);
    let run = |fail: bool| {
        let tape = Tape::with(&device, TapeOptions { seed: Some(9), ..TapeOptions::default() });
        let (x, ids, four) = (tape.leaf(&x).unwrap(), tape.constant(&ids).unwrap(), tape.leaf(&four).unwrap());
        if fail {
            assert!(ids.dropout(0.5).is_err());
            assert!(x.clone().dropout(1.5).is_err());
            assert!(four.clone().attention(&four, &x, 0.5, true, 0.3).is_err());
            assert!(four.clone().attention(&four, &four, -1.0, true, 0.3).is_err());
            assert_eq!(tape.random_counter(), 0);
        }
        let dropped = x.clone().dropout(0.5).unwrap().tensor().unwrap().to_bytes().unwrap();
        let attended =
            four.clone().attention(&four, &four, 0.5, true, 0.3).unwrap().tensor().unwrap().to_bytes().unwrap();
        assert_eq!(tape.random_counter(), 2);
        (dropped, attended, x.tensor().unwrap().storage().kind() == MemoryKind::Input)
    };
    assert_eq!(run(true), run(false));
}
