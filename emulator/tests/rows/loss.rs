//! Cross-entropy and its gradients.

use crate::twins::{FLOATS, LIES, Lie, Side, Twin, compare, compare_errors, numbers};
use retape_core::kernel::{self, CrossEntropySpec, LossReduction};
use retape_core::{DType, Tensor};

const REDUCTIONS: [LossReduction; 3] = [LossReduction::None, LossReduction::Sum, LossReduction::Mean];

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    classes: usize,
    spec: CrossEntropySpec,
    weighted: bool,
    given: bool,
}

impl Case {
    fn loss_shape(&self) -> Vec<usize> {
        if self.spec.reduction == LossReduction::None { vec![self.rows] } else { vec![] }
    }
}

/// Every third row is ignored.
fn classes(case: Case, dtype: DType) -> Twin {
    let class = |r: usize| if r % 3 == 1 { case.spec.ignore } else { ((r * 7 + 2) % case.classes) as i64 };
    Twin::integers(&[case.rows], &(0..case.rows).map(class).collect::<Vec<_>>(), dtype)
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, classes) in [(1, 1), (4, 5), (3, 33), (2, 257), (3, 1100), (65, 8), (0, 4)] {
        for reduction in REDUCTIONS {
            for (smoothing, weighted, given) in
                [(0.0, false, false), (0.1, false, false), (0.1, true, false), (0.0, true, true), (0.2, false, true)]
            {
                let spec = CrossEntropySpec { ignore: -100, reduction, smoothing };
                cases.push(Case { rows, classes, spec, weighted, given });
            }
        }
    }
    cases
}

#[test]
fn losses_and_gradients() {
    for (i, case) in cases().into_iter().enumerate() {
        for dtype in FLOATS {
            check(case, dtype, LIES[i % 3]);
        }
    }
}

fn check(case: Case, dtype: DType, lie: Lie) {
    let Case { rows, classes: n, spec, weighted, given } = case;
    let shape = [rows, n];
    let logits: Vec<f64> = numbers(1, rows * n).iter().map(|v| v * 5.0).collect();
    let logits = Twin::lying(lie, &shape, &logits, dtype);
    let target = if given {
        let shares: Vec<f64> = numbers(2, rows * n).iter().map(|v| (v + 1.0) / n as f64).collect();
        Twin::lying(lie, &shape, &shares, dtype)
    } else {
        classes(case, if lie == Lie::Plain { DType::I64 } else { DType::I32 })
    };
    let weights: Vec<f64> = numbers(3, n).iter().map(|v| v + 1.25).collect();
    let weight = Twin::lying(Lie::Inside, &[n], &weights, dtype);
    let label = format!("cross-entropy of {case:?} {lie:?}");
    let losses = |side: &Side, with_stats: bool| -> Vec<Tensor> {
        let (loss, stats) = (side.out(&case.loss_shape()), side.stat(&[rows, 2]));
        let weight = weighted.then(|| side.input(2));
        let stats_out = with_stats.then_some(&stats);
        let scores = kernel::ClassScores { logits: side.input(0), target: side.input(1), weight, spec };
        side.run(kernel::CrossEntropy { scores, loss: &loss, stats: stats_out });
        if with_stats { vec![loss, stats] } else { vec![loss] }
    };
    compare(&label, dtype, 64.0, &[&logits, &target, &weight], |side| {
        losses(side, true).into_iter().chain(losses(side, false)).collect()
    });
    let stats = Tensor::full(logits.theirs.device(), &[rows, 2], DType::F64, f64::NAN).unwrap();
    let loss = Tensor::full(logits.theirs.device(), &case.loss_shape(), DType::F64, f64::NAN).unwrap();
    let scores = kernel::ClassScores { logits: &logits.theirs, target: &target.theirs, weight: None, spec };
    let kernel = kernel::CrossEntropy { scores, loss: &loss, stats: Some(&stats) };
    logits.theirs.device().run(kernel).unwrap();
    let stat = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let stats = Twin::of(&[rows, 2], &stats.to_vec::<f64>().unwrap(), stat);
    let g = Twin::random(Lie::Plain, &case.loss_shape(), 4, dtype);
    compare(&format!("gradients of {label}"), dtype, 512.0, &[&logits, &target, &weight, &stats, &g], |side| {
        let [logits, target, w, stats, g] = [0, 1, 2, 3, 4].map(|i| side.input(i));
        let weight = weighted.then_some(w);
        // Into columns of a larger tensor, and in place.
        let around = side.out(&[n + 2, rows]);
        let out = around.narrow(0, 1, n).unwrap().transpose(0, 1).unwrap();
        let scores = kernel::ClassScores { logits, target, weight, spec };
        side.run(kernel::CrossEntropyGrad { scores, stats, g, out: &out });
        let own = side.copy_of(0);
        let scores = kernel::ClassScores { logits: &own, target, weight, spec };
        side.run(kernel::CrossEntropyGrad { scores, stats, g, out: &own });
        let by_weight = side.out(&[n]);
        let scores = kernel::ClassScores { logits, target, weight: Some(w), spec };
        side.run(kernel::CrossEntropyWeightGrad { scores, stats: Some(stats), g, out: &by_weight });
        let more = side.out(&[rows, n]);
        if given {
            side.run(kernel::CrossEntropyTargetGrad { logits, weight, stats, g, spec, out: &more });
        } else {
            side.run(kernel::NllLossGrad { target, weight, g, spec, out: &more });
        }
        vec![around, own, by_weight, more]
    });
}

#[test]
fn all_ignored() {
    for reduction in REDUCTIONS {
        let spec = CrossEntropySpec { ignore: 2, reduction, smoothing: 0.1 };
        let logits = Twin::random(Lie::Plain, &[3, 4], 1, DType::F32);
        let target = Twin::integers(&[3], &[2, 2, 2], DType::I64);
        let shape: &[usize] = if reduction == LossReduction::None { &[3] } else { &[] };
        let g = Twin::random(Lie::Plain, shape, 2, DType::F32);
        compare("all ignored", DType::F32, 8.0, &[&logits, &target, &g], |side| {
            let (loss, stats, out) = (side.out(shape), side.stat(&[3, 2]), side.out(&[3, 4]));
            let [logits, target, g] = [0, 1, 2].map(|i| side.input(i));
            let scores = kernel::ClassScores { logits, target, weight: None, spec };
            side.run(kernel::CrossEntropy { scores, loss: &loss, stats: Some(&stats) });
            let scores = kernel::ClassScores { logits, target, weight: None, spec };
            side.run(kernel::CrossEntropyGrad { scores, stats: &stats, g, out: &out });
            vec![loss, stats, out]
        });
    }
}

#[test]
fn logits_of_extremes() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let rows = [[-inf, -inf, -inf], [inf, 0.0, 1.0], [nan, 0.0, 1.0], [-inf, 0.0, -inf], [9.0, -6e4, 9.0], [-1e3; 3]];
    for dtype in FLOATS {
        for smoothing in [0.0, 0.3] {
            let spec = CrossEntropySpec { reduction: LossReduction::None, smoothing, ..CrossEntropySpec::default() };
            let logits = Twin::of(&[6, 3], rows.as_flattened(), dtype);
            let target = Twin::integers(&[6], &[0, 1, 2, 1, 0, 2], DType::I64);
            compare("logits of extremes", dtype, 2e3, &[&logits, &target], |side| {
                let (loss, stats) = (side.out(&[6]), side.stat(&[6, 2]));
                let [logits, target] = [0, 1].map(|i| side.input(i));
                let scores = kernel::ClassScores { logits, target, weight: None, spec };
                side.run(kernel::CrossEntropy { scores, loss: &loss, stats: Some(&stats) });
                vec![loss, stats]
            });
        }
    }
}

/// A target outside the classes is an error, and nothing is written.
#[test]
fn targets_out_of_range() {
    let logits = Twin::random(Lie::Plain, &[700, 4], 1, DType::F32);
    for (bad, dtype) in [(4, DType::I64), (-1, DType::I32), (i64::MAX, DType::I64), (-101, DType::I64)] {
        let mut ids = vec![-100; 700];
        (ids[650], ids[699]) = (bad, 77);
        let target = Twin::integers(&[700], &ids, dtype);
        compare_errors("targets", &[&logits, &target], |side| {
            let (loss, stats) = (side.out(&[]), side.stat(&[700, 2]));
            let spec = CrossEntropySpec::default();
            let [logits, target] = [0, 1].map(|i| side.input(i));
            let scores = kernel::ClassScores { logits, target, weight: None, spec };
            let kernel = kernel::CrossEntropy { scores, loss: &loss, stats: Some(&stats) };
            let error = side.error(kernel);
            assert!(loss.item().unwrap().is_nan() && stats.to_f64_vec().unwrap().iter().all(|v| v.is_nan()));
            error
        });
    }
}
