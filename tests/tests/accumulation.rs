//! Gradients of many uses: sums of 16 bits are rounded once, and small parts add to the gradient that is there.

use retape_core::ops::{Backward, Cost, Exec, Op, OpRule, Output, Outputs, Sample, Saves, Spec, saves};
use retape_core::{
    BackwardOptions, DType, Device, Mark, MemoryKind, ParameterId, Result, Tape, Tensor, Var, kernel, meta,
};
use retape_tests::accumulation::{PARTS, Part, USES, Use, many_uses_are_rounded_once, parts_add_up, sum_of_parts};
use retape_tests::{floats, gradient_bytes, wrapped};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

#[test]
fn many_uses_of_16_bits_are_rounded_once() {
    let mut mixtures: Vec<&[Use]> = USES.chunks(1).collect();
    mixtures.extend([&USES[..], &USES[3..], &USES[..4]]);
    many_uses_are_rounded_once(&cpu(), &mixtures);
}

#[test]
fn parts_add_up_to_the_gradient_of_all() {
    parts_add_up(&cpu());
}

#[test]
fn a_parameter_of_many_leaves_is_rounded_once() {
    let device = cpu();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let (tape, id) = (Tape::new(&device), ParameterId::unique());
        let mut sum = tape.constant(&Tensor::full(&device, &[], DType::F32, 0.0).unwrap()).unwrap();
        for uses in 1..=150 {
            // It was updated since, and so has another leaf.
            let tensor = floats(&device, &[4], &[uses as f64; 4], dtype);
            for _ in 0..2 {
                let p = tape.parameter(id, &tensor, true).unwrap();
                sum = sum.add(p.cast(DType::F32).unwrap().sum().unwrap()).unwrap();
            }
        }
        let gradients = tape.backward(&sum).unwrap();
        assert_eq!(gradients.parameter(id).unwrap().to_f64_vec().unwrap(), [300.0; 4], "{dtype}");
        assert_eq!(gradients.parameter(id).unwrap().dtype(), dtype);
        assert_eq!(gradients.parameter(id).unwrap().storage().kind(), MemoryKind::Gradient);
    }
}

#[test]
fn many_seeds_of_one_value_are_rounded_once() {
    let device = cpu();
    for dtype in [DType::BF16, DType::F16] {
        let tape = Tape::new(&device);
        let x = tape.leaf(&floats(&device, &[4], &[1.0; 4], dtype)).unwrap();
        let y = x.clone().shift(1.0).unwrap();
        let one = floats(&device, &[4], &[1.0; 4], dtype);
        let seeds: Vec<(&Var, &Tensor)> = (0..300).map(|_| (&y, &one)).collect();
        let gradients = tape.backward_from(&seeds, BackwardOptions::RETAIN).unwrap();
        assert_eq!(gradients.of(&x).unwrap().to_f64_vec().unwrap(), [300.0; 4]);
        // The inner value's own.
        let seeds: Vec<(&Var, &Tensor)> = (0..300).map(|_| (&x, &one)).collect();
        assert_eq!(
            tape.backward_from(&seeds, BackwardOptions::default()).unwrap().of(&x).unwrap().to_f64_vec().unwrap(),
            [300.0; 4]
        );
        assert_eq!(one.to_f64_vec().unwrap(), [1.0; 4]);
        // The gradient of an inner value.
        let tape = Tape::new(&device);
        let x = tape.leaf(&one).unwrap();
        let y = x.shift(1.0).unwrap();
        let loss = used_flat(&y, 300).unwrap();
        assert_eq!(tape.grad(&loss, &[&y]).unwrap()[0].to_f64_vec().unwrap(), [300.0; 4]);
    }
}

fn used_flat(x: &Var, count: usize) -> Result<Var> {
    let mut sum = x.clone().cast(DType::F32)?.sum()?;
    for _ in 1..count {
        sum = sum.add(&x.clone().cast(DType::F32)?.sum()?)?;
    }
    Ok(sum)
}

/// One use, or two (whose sum is rounded once where they meet), take no memory beyond the gradients; from three on
/// there is one sum in f32, counted as the step's.
#[test]
fn a_sum_in_f32_is_there_only_where_three_meet() {
    for device in [cpu(), meta()] {
        let tensor = floats(&device, &[1024], &[1.0; 1024], DType::BF16);
        let peak = |uses: usize| {
            let tape = Tape::new(&device);
            let x = tape.leaf(&tensor).unwrap();
            let seeds: Vec<Var> = (0..uses).map(|_| x.clone().scale(2.0).unwrap()).collect();
            let pairs: Vec<(&Var, &Tensor)> = seeds.iter().map(|v| (v, &tensor)).collect();
            device.meter().reset_peak();
            let before = device.meter().live();
            let gradients = tape.backward_from(&pairs, BackwardOptions::RETAIN).unwrap();
            assert_eq!(gradients.of(&x).unwrap().storage_bytes(), 2048);
            drop(gradients);
            assert_eq!(device.meter().live(), before);
            (device.meter().peak() - before, device.meter().step_peak() - device.meter().step_live())
        };
        assert_eq!(peak(1), (2048, 0));
        assert_eq!(peak(2), (4096, 0));
        // Two gradients of 16 bits, and the sum.
        assert_eq!(peak(3), (8192, 4096));
        assert_eq!(peak(30), (8192, 4096));
    }
}

/// Bytes that backward's kernels touch where a loop takes `n` parts of a value of n rows.
fn work(part: Part, n: usize) -> u64 {
    let watch = Arc::new(wrapped::Watch::default());
    let device = wrapped::device(watch.clone());
    let tape = Tape::new(&device);
    let x = tape.leaf(&floats(&device, &[n, 4], &vec![1.0; 4 * n], DType::F64)).unwrap();
    let sum = sum_of_parts(part, &x).unwrap();
    let before = watch.bytes.load(Ordering::Relaxed);
    tape.backward(&sum).unwrap();
    watch.bytes.load(Ordering::Relaxed) - before
}

#[test]
fn a_loop_over_parts_takes_linear_work() {
    for part in PARTS {
        let (few, many) = (work(part, 500), work(part, 4000));
        assert!(few > 0 && many < 9 * few, "{}: {few} bytes for 500 parts, {many} for 4000", part.0);
    }
}

/// A part's gradient added to one that is there has the bits of any marks, handles and passes.
#[test]
fn marks_don_t_show_where_parts_add_up() {
    let device = cpu();
    for dtype in [DType::F32, DType::BF16] {
        let tensor = retape_tests::random(&device, &[8, 4], 5, dtype);
        let run = |mark: Option<Mark>| {
            let tape = Tape::new(&device);
            let x = tape.leaf(&tensor).unwrap();
            let y = x.clone().gelu().unwrap();
            let mut sum = y.clone().square().unwrap().sum().unwrap();
            for t in 0..8 {
                let part = y.clone().select(0, t).unwrap().tanh().unwrap();
                if let Some(mark) = mark {
                    part.set_mark(mark).unwrap();
                }
                sum = sum.add(part.square().unwrap().sum().unwrap()).unwrap();
            }
            if let Some(mark) = mark {
                y.set_mark(mark).unwrap();
            }
            drop(y);
            let first =
                gradient_bytes(&tape.backward_with(&sum, BackwardOptions::RETAIN).unwrap(), std::slice::from_ref(&x))
                    .unwrap();
            let second = gradient_bytes(&tape.backward(&sum).unwrap(), &[x]).unwrap();
            assert_eq!(first, second);
            first
        };
        assert_eq!(run(Some(Mark::Recompute)), run(None));
        assert_eq!(run(Some(Mark::Keep)), run(None));
    }
}

/// An op that adds half of its gradient, in a way that the contract doesn't allow.
#[derive(Debug, Clone, Copy)]
struct Sums {
    input: usize,
    sets_too: bool,
}

impl OpRule for Sums {
    fn name(&self) -> &'static str {
        "sums"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        Ok([Output::new(inputs[0].shape.clone(), inputs[0].dtype)].into_iter().collect())
    }
    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Copy { x: &inputs[0], out: &outputs[0] })
    }
    fn saves(&self, _: &[bool]) -> Saves {
        saves([])
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let sum = cx.sum(self.input)?.zeroed(&exec)?;
        exec.add_to(&sum, &g)?;
        if self.sets_too {
            cx.set(0, g);
        }
        Ok(())
    }
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(1, inputs, outputs)
    }
    fn samples() -> Vec<Sample> {
        vec![]
    }
}

#[test]
fn a_custom_op_may_add_to_the_sum_and_is_told_where_it_may_not() {
    let device = cpu();
    let run = |rule: Sums| {
        let tape = Tape::new(&device);
        let x = tape.leaf(&floats(&device, &[4], &[1.0; 4], DType::F64))?;
        let op = Op::Custom(Rc::new(rule));
        let loss = x.clone().apply(op.clone(), [])?.add(&x.clone().apply(op, [])?)?.add(&x)?.sum()?;
        tape.backward(&loss)?.of(&x).unwrap().to_f64_vec()
    };
    assert_eq!(run(Sums { input: 0, sets_too: false }), Ok(vec![3.0; 4]));
    let both = run(Sums { input: 0, sets_too: true }).unwrap_err();
    assert!(both.to_string().contains("both set and added"), "{both}");
    let none = run(Sums { input: 7, sets_too: false }).unwrap_err();
    assert!(none.to_string().contains("input 7"), "{none}");
    assert_eq!(device.meter().live(), 0);
}
