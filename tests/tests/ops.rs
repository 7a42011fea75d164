//! Loops over the registry: a new op is tested by being listed, with its samples.

use retape_core::kernel::{self, BinaryFn, UnaryFn};
use retape_core::ops::*;
use retape_core::{DType, Device, Result, Tape, Tensor, check_gradients, meta};
use retape_tests::conformance::{FLOATS, label, marks, marks_don_t_show, outputs_are_rounded_once, strides_don_t_show};
use retape_tests::wrapped::{self, Watch};
use retape_tests::{SampleMarks, random, relative_error, run_sample, sample_tensor};
use std::rc::Rc;
use std::sync::Arc;

#[test]
fn every_op_has_samples_and_the_edges_among_them() {
    let samples = Op::all_samples();
    let mut names: Vec<&str> = samples.iter().map(|s| s.op.rule().name()).collect();
    names.sort_unstable();
    names.dedup();
    assert!(names.len() >= 90, "{} ops: {names:?}", names.len());
    for name in names {
        let of = samples.iter().filter(|s| s.op.rule().name() == name);
        let empty = of.clone().any(|s| {
            let spec = |i: &SampleInput| Spec::of(&sample_tensor(&meta(), i, DType::F32));
            let outputs = s.op.rule().infer(&s.inputs.iter().map(spec).collect::<Vec<_>>()).unwrap();
            s.inputs.iter().any(|i| i.shape.contains(&0)) || outputs.iter().any(|o| o.spec.is_empty())
        });
        assert!(empty, "{name} has no zero-sized sample");
        assert!(of.count() >= 4, "{name} has too few samples");
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let device = retape_cpu::device();
    for sample in Op::all_samples().into_iter().filter(|s| s.smooth) {
        let inputs: Vec<Tensor> = sample.inputs.iter().map(|i| sample_tensor(&device, i, DType::F64)).collect();
        let check = check_gradients(&device, &inputs, 5, |_, x| {
            x[0].clone().apply_all(sample.op.clone(), x[1..].iter().cloned())
        });
        let check = check.unwrap_or_else(|e| panic!("{}: {e}", label(&sample)));
        assert!(check.worst() < 1e-7, "{}: {check:?}", label(&sample));
    }
}

#[test]
fn single_precision_agrees_with_double() {
    let device = retape_cpu::device();
    for sample in Op::all_samples() {
        let none = SampleMarks::default();
        let single =
            run_sample(&device, &sample, DType::F32, none, 1).unwrap_or_else(|e| panic!("{}: {e}", label(&sample)));
        let double = run_sample(&device, &sample, DType::F64, none, 1).unwrap();
        // bf16 and f16 results are coarse in themselves.
        let tolerance = if matches!(sample.op, Op::Cast(_)) { 1e-2 } else { 2e-5 };
        for (s, d) in single.numbers.iter().zip(&double.numbers) {
            let finite = |x: &[f64]| x.iter().map(|v| if v.is_finite() { *v } else { 0.0 }).collect::<Vec<_>>();
            assert_eq!(
                s.iter().map(|v| v.is_finite()).collect::<Vec<_>>(),
                d.iter().map(|v| v.is_finite()).collect::<Vec<_>>(),
                "{}",
                label(&sample)
            );
            let error = relative_error(&finite(s), &finite(d));
            assert!(error < tolerance, "{}: {error:e}", label(&sample));
        }
    }
}

/// Every mark on every op's inputs and outputs.
#[test]
fn every_mark_on_every_op() {
    let pairs =
        marks().into_iter().flat_map(|inputs| marks().into_iter().map(move |outputs| SampleMarks { inputs, outputs }));
    let refused = marks_don_t_show(&retape_cpu::device(), &FLOATS, &pairs.collect::<Vec<_>>());
    assert!(refused.is_empty(), "{refused:?}");
}

#[test]
fn sixteen_bits_are_rounded_once() {
    let device = wrapped::device(Arc::new(Watch { poison: true, ..Watch::default() }));
    let refused = outputs_are_rounded_once(&device, &device, &[DType::BF16, DType::F16], false);
    assert!(refused.is_empty(), "{refused:?}");
}

/// New memory holds NaN: nothing is read that wasn't written, and everything is written.
#[test]
fn what_memory_held_doesn_t_show() {
    let poisoned = wrapped::device(Arc::new(Watch { poison: true, ..Watch::default() }));
    let device = retape_cpu::device();
    for dtype in FLOATS {
        for sample in Op::all_samples() {
            let run = |device: &Device| {
                let run = run_sample(device, &sample, dtype, SampleMarks::default(), 1);
                let run = run.unwrap_or_else(|e| panic!("{dtype} {}: {e}", label(&sample)));
                (run.outputs, run.gradients)
            };
            assert_eq!(run(&poisoned), run(&device), "{dtype} {}", label(&sample));
        }
    }
}

#[test]
fn strides_don_t_show_in_the_bits() {
    let refused = strides_don_t_show(&retape_cpu::device(), &FLOATS, 0.0);
    assert!(refused.is_empty(), "{refused:?}");
}

/// A product rule with a fault: what a mistaken op would look like.
#[derive(Debug)]
struct FaultyProduct(Fault);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    Sign,
    Factor,
    MissingTerm,
    SwappedOperands,
    CutGradient,
}

/// y = a b + a.
impl OpRule for FaultyProduct {
    fn name(&self) -> &'static str {
        "faulty_product"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        Ok([Output::new(inputs[0].shape.clone(), inputs[0].dtype)].into_iter().collect())
    }
    fn forward(&self, exec: &Exec<'_>, x: &[Tensor], out: &[Tensor]) -> Result<()> {
        exec.run(kernel::Binary { f: BinaryFn::Mul, a: &x[0], b: &x[1], out: &out[0] })?;
        exec.run(kernel::Binary { f: BinaryFn::Add, a: &out[0], b: &x[0], out: &out[0] })
    }
    fn saves(&self, _: &[bool]) -> Saves {
        saves([Slot::In(0), Slot::In(1)])
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let (mut a, mut b) = (cx.saved(Slot::In(0))?, cx.saved(Slot::In(1))?);
        if self.0 == Fault::SwappedOperands {
            std::mem::swap(&mut a, &mut b);
        }
        let exec = cx.exec(0);
        let (da, db) = (exec.empty(g.shape(), g.dtype())?, exec.empty(g.shape(), g.dtype())?);
        exec.run(kernel::Binary { f: BinaryFn::Mul, a: &g, b: &b, out: &da })?;
        if self.0 != Fault::MissingTerm {
            exec.run(kernel::Binary { f: BinaryFn::Add, a: &da, b: &g, out: &da })?;
        }
        exec.run(kernel::Binary { f: BinaryFn::Mul, a: &g, b: &a, out: &db })?;
        let factor = match self.0 {
            Fault::Sign => -1.0,
            Fault::Factor => 1.01,
            Fault::CutGradient => 0.0,
            _ => 1.0,
        };
        exec.run(kernel::Unary { f: UnaryFn::Scale(factor), x: &db, out: &db })?;
        cx.set(0, da);
        cx.set(1, db);
        Ok(())
    }
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(2, inputs, outputs)
    }
    fn samples() -> Vec<Sample> {
        vec![]
    }
}

#[test]
fn the_checker_catches_planted_faults() {
    let device = retape_cpu::device();
    let inputs = [random(&device, &[3, 4], 1, DType::F64), random(&device, &[3, 4], 2, DType::F64)];
    let check = |fault| {
        let op = Op::Custom(Rc::new(FaultyProduct(fault)));
        check_gradients(&device, &inputs, 5, |_, x| Ok(vec![x[0].clone().apply(op.clone(), [x[1].clone()])?]))
            .unwrap()
            .worst()
    };
    assert!(check(Fault::None) < 1e-7);
    for fault in [Fault::Sign, Fault::Factor, Fault::MissingTerm, Fault::SwappedOperands, Fault::CutGradient] {
        assert!(check(fault) > 5e-3, "{fault:?} passed with {}", check(fault));
    }
}

/// Any op applied by hand to too few or too many inputs.
#[test]
fn a_wrong_number_of_inputs_is_an_error() {
    let device = retape_cpu::device();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[2, 2], 1, DType::F32)).unwrap();
    // `cat` takes any number.
    for sample in Op::all_samples().into_iter().filter(|s| !matches!(s.op, Op::Cat(_))) {
        let n = sample.inputs.len();
        for others in [vec![], vec![x.clone(); n]] {
            if others.len() + 1 != n {
                let error = x.clone().apply_all(sample.op.clone(), others).unwrap_err();
                assert!(error.to_string().contains(&format!("takes {n} input")), "{}: {error}", label(&sample));
            }
        }
    }
}

#[test]
fn an_undeclared_read_is_an_error() {
    #[derive(Debug)]
    struct ReadsMore;
    impl OpRule for ReadsMore {
        fn name(&self) -> &'static str {
            "reads_more"
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
        fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
            let g = cx.saved(Slot::In(0))?;
            cx.set(0, g);
            Ok(())
        }
        fn cost(&self, _: &[Spec], _: &[Output]) -> Cost {
            Cost::default()
        }
        fn samples() -> Vec<Sample> {
            vec![]
        }
    }
    let device: Device = retape_cpu::device();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[3], 1, DType::F32)).unwrap();
    let y = x.apply(Op::Custom(Rc::new(ReadsMore)), []).unwrap().sum().unwrap();
    let error = tape.backward(&y).unwrap_err();
    assert!(error.to_string().contains("`saves` doesn't declare"), "{error}");
}
