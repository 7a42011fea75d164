//! The planner against brute force over all marks, on random graphs small enough for it.
//!
//! `RETAPE_CASES` is the number of graphs; the last of every 20 has up to 10 values, the others up to 7.

mod graphs;
#[path = "graphs/small.rs"]
mod small;

use graphs::{Dice, Marks};
use retape_core::{DType, Mark, Tape, Tensor, Trace, Var, meta, scope};
use retape_nn::{AttentionForm, Gpt, GptConfig};
use retape_policy::{
    Error, LossyFormat, LossyUse, ModelShape, PRESETS, PlanCache, Planner, PlannerOptions, Profile, RuleSet,
};
use small::SmallGraph;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The marks that a planner may be allowed, each alone and all together.
fn lossy_uses() -> Vec<Vec<Mark>> {
    let lossy: Vec<Mark> = Mark::all().filter(|mark| mark.is_lossy()).collect();
    lossy.iter().map(|&mark| vec![mark]).chain([lossy.clone()]).collect()
}

/// Seconds of a node by the default costs, written down once more.
fn seconds(flops: u64, traffic: u64) -> f64 {
    flops as f64 / 100e9 + traffic as f64 / 10e9
}

/// Peak and overhead in percent of every assignment of marks, the best for each peak: least peak first, overhead
/// falling.
fn brute_force(trace: &Trace, lossy: &[Mark]) -> Vec<(u64, f64)> {
    let free: Vec<_> = trace.values().iter().filter(|v| !v.exact && v.given.is_none()).collect();
    let step: f64 = 3.0 * trace.nodes().iter().map(|n| seconds(n.flops, n.traffic)).sum::<f64>();
    let marks_of = |exactly: bool| {
        let lossy = lossy.iter().copied().filter(move |_| !exactly);
        [Mark::Keep, Mark::Recompute].into_iter().chain(lossy)
    };
    let mut all: Vec<Vec<(u64, Mark)>> = vec![vec![]];
    for value in free {
        let extended = all.iter().flat_map(|marks| {
            marks_of(value.read_exactly).map(move |mark| {
                let mut marks = marks.clone();
                marks.push((value.id, mark));
                marks
            })
        });
        all = extended.collect();
    }
    let mut points: Vec<(u64, f64)> = Vec::new();
    for marks in all {
        let run = trace.run(Some(Rc::new(Marks::new(&marks)))).unwrap();
        let replays = run.replays.iter().map(|&(node, count)| {
            let node = &trace.nodes()[node];
            count as f64 * seconds(node.flops, node.traffic)
        });
        let overhead = replays.sum::<f64>() + seconds(0, run.quantize_traffic);
        points.push((run.peak_bytes, 100.0 * overhead / step));
    }
    points.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut least = f64::INFINITY;
    points.retain(|p| {
        let better = p.1 < least;
        least = least.min(p.1);
        better
    });
    points
}

fn cases(default: usize) -> usize {
    std::env::var("RETAPE_CASES").map_or(default, |n| n.parse().expect("RETAPE_CASES is a number"))
}

/// Never over budget, infeasible exactly where brute force finds nothing, and nearly as cheap as the best.
#[test]
fn nearly_as_cheap_as_the_best_of_all_marks() {
    let (mut gaps, mut of_step) = (Vec::new(), Vec::new());
    let mut missed_smallest = 0;
    let graphs = cases(60);
    for seed in 0..graphs as u64 {
        let mut dice = Dice::new(seed);
        let values = if seed % 20 == 19 { 10 } else { 4 + dice.throw(4) };
        // Every second graph with lossy marks, in turn; all together where there are few values.
        let uses = lossy_uses();
        let lossy = match seed % 2 {
            0 if values > 5 => uses[seed as usize / 2 % (uses.len() - 1)].clone(),
            0 => uses[seed as usize / 2 % uses.len()].clone(),
            _ => Vec::new(),
        };
        let graph = SmallGraph::random(seed, values);
        let best = brute_force(&graph.trace(), &lossy);
        let options = PlannerOptions {
            lossy: (!lossy.is_empty()).then(|| LossyUse::from_iter(lossy)),
            ..PlannerOptions::default()
        };
        let planner = Planner::new(graph.trace(), options).unwrap();
        let (smallest, largest) = (best[0].0, best[best.len() - 1].0);
        missed_smallest += usize::from(planner.smallest() != smallest);
        let below = planner.plan(planner.smallest() - 1);
        assert_eq!(
            below.unwrap_err(),
            Error::Infeasible { budget: planner.smallest() - 1, smallest: planner.smallest() }
        );
        // At every peak that the best plans have, and half-way to the next.
        let mut budgets: Vec<u64> = best.iter().map(|p| p.0).collect();
        budgets.extend(best.windows(2).map(|p| p[0].0.midpoint(p[1].0)));
        budgets.push(2 * largest);
        budgets.sort_unstable();
        let mut last = f64::INFINITY;
        for budget in budgets.into_iter().filter(|&b| b >= planner.smallest()) {
            let plan = planner.plan(budget).unwrap();
            assert!(plan.peak_bytes <= budget, "graph {seed}: {} over {budget}", plan.peak_bytes);
            let again = graph.trace().run(Some(plan.policy())).unwrap();
            assert_eq!((again.peak_bytes, again.saved_bytes), (plan.peak_bytes, plan.saved_bytes), "graph {seed}");
            assert!(plan.overhead_seconds_percent <= last, "graph {seed}: slower with {budget}");
            last = plan.overhead_seconds_percent;
            let least = best[best.partition_point(|p| p.0 <= budget) - 1].1;
            let gap = plan.overhead_seconds_percent - least;
            assert!(gap > -1e-9, "graph {seed}: better than the best by {gap}: brute force is wrong");
            gaps.push(if gap < 1e-9 { 0.0 } else { 100.0 * gap / least.max(1e-3) });
            of_step.push(gap.max(0.0));
        }
    }
    gaps.sort_by(f64::total_cmp);
    of_step.sort_by(f64::total_cmp);
    let quantile = |values: &[f64], q: f64| values[((values.len() - 1) as f64 * q) as usize];
    println!(
        "{graphs} graphs, {} budgets: gap in the plan's cost median {:.3}%, 95% {:.3}%, worst {:.2}%; \
         of the step's time worst {:.3}%; {missed_smallest} times not the least peak",
        gaps.len(),
        quantile(&gaps, 0.5),
        quantile(&gaps, 0.95),
        quantile(&gaps, 1.0),
        quantile(&of_step, 1.0)
    );
    assert_eq!(missed_smallest, 0, "budgets that brute force has plans for");
    assert_eq!(quantile(&gaps, 0.5), 0.0);
    assert!(quantile(&gaps, 0.95) <= 1.0);
}

/// Graphs that leave nothing to plan, or nothing to gain.
#[test]
fn graphs_with_nothing_to_decide() {
    let device = meta();
    let full = |shape: &[usize]| Tensor::full(&device, shape, DType::F32, 0.0).unwrap();
    let (x, one, none) = (full(&[64, 64]), full(&[]), full(&[0, 4]));
    let marked = |tape: &Tape, mark| -> retape_core::Result<Var> {
        let _scope = tape.scope(scope("a").mark(mark));
        tape.leaf(&x)?.gelu()?.square()?.sum()
    };
    type Forward<'a> = &'a dyn Fn(&Tape) -> retape_core::Result<Var>;
    // Whether the peak is the same whatever the marks.
    let graphs: [(&str, bool, Forward<'_>); 8] = [
        ("the leaf is the loss", true, &|tape| tape.leaf(&one)),
        ("one op on one number", true, &|tape| tape.leaf(&one)?.square()),
        ("a sum", true, &|tape| tape.leaf(&x)?.sum()),
        ("no elements", true, &|tape| tape.leaf(&none)?.gelu()?.square()?.sum()),
        ("all kept by the user", true, &|tape| marked(tape, Mark::Keep)),
        ("all recomputed by the user", true, &|tape| marked(tape, Mark::Recompute)),
        ("a detached value", false, &|tape| {
            let h = tape.leaf(&x)?.gelu()?;
            let detached = h.clone().detach()?;
            h.mul(&detached)?.softmax()?.square()?.gelu()?.sum()
        }),
        ("a constant's part", false, &|tape| {
            let c = tape.constant(&x)?.gelu()?.softmax()?;
            tape.leaf(&x)?.mul(&c)?.square()?.gelu()?.sum()
        }),
    ];
    for (name, fixed, forward) in graphs {
        for lossy in [None].into_iter().chain(lossy_uses().into_iter().map(|marks| Some(LossyUse::from_iter(marks)))) {
            let trace = Trace::record(&device, None, forward).unwrap();
            let without = trace.run(None).unwrap().peak_bytes;
            let planner = Planner::new(trace, PlannerOptions { lossy, ..PlannerOptions::default() }).unwrap();
            let (smallest, largest) = (planner.smallest(), planner.largest());
            assert_eq!(largest, without, "{name}");
            assert!(!fixed || smallest == largest, "{name}: {smallest} .. {largest}");
            for budget in [0, 1, smallest - 1] {
                assert_eq!(planner.plan(budget).unwrap_err(), Error::Infeasible { budget, smallest }, "{name}");
            }
            for budget in [smallest, largest, u64::MAX] {
                let plan = planner.plan(budget).unwrap();
                let run = planner.trace().run(Some(plan.policy())).unwrap();
                assert_eq!(run.peak_bytes, plan.peak_bytes, "{name}");
                assert!(plan.overhead_percent.is_finite() && plan.overhead_seconds_percent.is_finite(), "{name}");
            }
        }
    }
}

/// A bound on the error of the gradients holds for every budget; no number, or one below nothing, allows no lossy mark.
#[test]
fn the_gradient_error_stays_within_its_bound() {
    let (mut with_lossy, mut plans) = (0, 0);
    let uses = lossy_uses();
    for seed in 0..cases(60) as u64 {
        let graph = SmallGraph::random(seed, 5 + seed as usize % 5);
        let trace = graph.trace();
        let mut dice = Dice::new(seed);
        let free = trace.values().iter().filter(|v| !v.exact);
        let sensitivity: BTreeMap<String, f64> =
            free.map(|v| (format!("{} {}", v.path, v.op), 1e-3 * (1 + dice.throw(5)) as f64)).collect();
        for (bound, reach) in [(Some(4e-3), 4e-3), (Some(0.0), 0.0), (Some(-1.0), 0.0), (Some(f64::NAN), 0.0)] {
            let format = |&mark: &Mark| LossyFormat { mark, sensitivity: sensitivity.clone().into_iter().collect() };
            let formats = uses[seed as usize % uses.len()].iter().map(format).collect();
            let lossy = Some(LossyUse { formats, max_gradient_error: bound });
            let options = PlannerOptions { lossy, ..PlannerOptions::default() };
            let planner = Planner::new(graph.trace(), options).unwrap();
            let mut last = f64::INFINITY;
            for at in 0..=20 {
                let budget = planner.smallest() + (planner.largest() - planner.smallest()) * at / 20;
                let plan = planner.plan(budget).unwrap();
                let lossy = plan.marks.iter().filter(|m| m.mark.is_lossy());
                let error: f64 = lossy.map(|m| sensitivity[&format!("{} {}", m.path, m.op)]).sum();
                assert!(error <= reach * (1.0 + 1e-9), "graph {seed}: {error} over {bound:?}");
                let promised = plan.gradient_error_bound.expect("all are measured");
                assert!(promised.is_sign_positive() && promised >= error, "graph {seed}: {promised} for {error}");
                assert!(plan.overhead_seconds_percent <= last, "graph {seed}: slower with {budget}");
                last = plan.overhead_seconds_percent;
                with_lossy += usize::from(error > 0.0);
                plans += 1;
            }
        }
    }
    assert!(with_lossy > plans / 50, "{with_lossy} of {plans} plans use lossy marks");
}

/// An error that isn't a number is as good as unknown: a bound forbids lossy marks there.
#[test]
fn an_error_that_is_no_number_is_unknown() {
    for seed in 0..20 {
        let graph = SmallGraph::random(seed, 7);
        let trace = graph.trace();
        let sensitivity = || trace.values().iter().map(|v| (format!("{} {}", v.path, v.op), f64::NAN)).collect();
        let lossy = Mark::all().filter(|mark| mark.is_lossy());
        let formats = lossy.map(|mark| LossyFormat { mark, sensitivity: sensitivity() }).collect();
        let lossy = Some(LossyUse { formats, max_gradient_error: Some(1.0) });
        let planner = Planner::new(graph.trace(), PlannerOptions { lossy, ..PlannerOptions::default() }).unwrap();
        for plan in planner.frontier() {
            assert!(plan.marks.iter().all(|m| !m.mark.is_lossy()), "graph {seed}");
        }
    }
}

/// A plan's file gives the marks of the plan, for every format; a profile of several reads back as it is.
#[test]
fn plans_and_profiles_with_several_formats_read_back() {
    let shape = ModelShape { blocks: 1 };
    let mut seen = std::collections::BTreeSet::new();
    let others = ["int8:group=32", "int8:group=64:rounding=stochastic"].map(|text| vec![text.parse().unwrap()]);
    let uses: Vec<Vec<Mark>> = lossy_uses().into_iter().chain(others).collect();
    for (seed, marks) in (8..24).flat_map(|seed| uses.iter().map(move |marks| (seed, marks.iter().copied()))) {
        let graph = SmallGraph::random(seed, 8);
        let lossy = Some(LossyUse::from_iter(marks));
        let planner = Planner::new(graph.trace(), PlannerOptions { lossy, ..PlannerOptions::default() }).unwrap();
        for plan in planner.frontier() {
            let rules = RuleSet::from_toml(&plan.to_toml(), &shape).unwrap();
            let marks_of = |policy: Rc<dyn retape_core::Policy>| {
                let run = graph.trace().run(Some(policy)).unwrap();
                (run.peak_bytes, run.saved_bytes, run.fingerprint)
            };
            assert_eq!(marks_of(Rc::new(rules)), marks_of(plan.policy()), "graph {seed}");
            seen.extend(plan.marks.iter().map(|m| m.mark.text()));
        }
    }
    let mut expected: Vec<String> = Mark::all().map(Mark::text).collect();
    expected.push("int8:group=32".to_owned());
    assert!(expected.iter().all(|text| seen.contains(text)), "{seen:?}");

    let sensitivity = |error: f64| [("blocks.*.gelu gelu".to_owned(), error), ("a b".to_owned(), f64::INFINITY)];
    let lossy = Mark::all().chain(["int8:group=32".parse().unwrap()]).filter(|mark| mark.is_lossy());
    let sensitivity =
        lossy.zip(1..).map(|(mark, i)| (mark.text(), sensitivity(1e-3 * f64::from(i)).into_iter().collect()));
    let profile = Profile { model: Some("two marks".into()), sensitivity: sensitivity.collect(), ..Profile::default() };
    assert_eq!(Profile::from_toml(&profile.to_toml()).unwrap(), profile);
    assert!(profile.sensitivity.keys().all(|text| text.parse::<Mark>().is_ok_and(|mark| mark.text() == *text)));
}

/// A profile of the first form had errors of int8 alone.
#[test]
fn a_profile_of_the_first_form_reads() {
    let profile = Profile::from_toml("int8_group = 16\n[sensitivity]\n\"a gelu\" = 0.5\n\"b gelu\" = \"inf\"").unwrap();
    let errors: Vec<(&str, f64)> = profile.sensitivity["int8:group=16"].iter().collect();
    assert_eq!(errors, [("a gelu", 0.5), ("b gelu", f64::INFINITY)]);
    let again = Profile::from_toml(&profile.to_toml()).unwrap();
    assert_eq!(again, profile);
    // A mark written in another way is the same; what is no lossy mark has no errors.
    let usual = Profile::from_toml("[sensitivity.\"int8:group=64\"]\n\"a gelu\" = 0.5").unwrap();
    assert_eq!(usual.sensitivity.keys().collect::<Vec<_>>(), ["int8"]);
    assert!(Profile::from_toml("[sensitivity.keep]\n\"a gelu\" = 0.5").is_err());
}

/// Batches of many lengths under one budget: each gets the cheapest plan that fits. Those that fit without marks
/// recompute nothing; none is slower than under the plan for the longest.
#[test]
fn each_length_has_the_cheapest_plan_that_fits() {
    let device = meta();
    let longest = 1024;
    let config = GptConfig {
        seq: longest + 1, // so that all lengths record the same ops
        dim: 64,
        heads: 2,
        kv_heads: 2,
        layers: 3,
        batch: 1,
        attention: AttentionForm::Explicit,
        ..GptConfig::named("tiny").unwrap()
    };
    let model = Gpt::new(&device, &config, 0).unwrap();
    let record = |&length: &usize| -> retape_policy::Result<Trace> {
        let tokens = Tensor::full(&device, &[1, length], DType::I64, 0.0)?;
        Trace::record(&device, None, |tape| Ok(model.loss(tape, &tokens, &tokens).unwrap()))
    };
    let budget = record(&longest).unwrap().run(None).unwrap().peak_bytes / 2;
    let mut plans = PlanCache::new(budget, PlannerOptions::default());
    let for_longest = plans.get(&longest, record).unwrap();
    assert!(for_longest.overhead_percent > 0.0);
    let mut free = 0;
    for length in [64, 96, 128, 256, 512, 700, 768, 1000, 1024] {
        let trace = record(&length).unwrap();
        let own = plans.get(&length, record).unwrap();
        assert!(own.peak_bytes <= budget, "{length}");
        assert_eq!(trace.run(Some(own.policy())).unwrap().peak_bytes, own.peak_bytes, "{length}");
        if trace.run(None).unwrap().peak_bytes <= budget {
            assert_eq!((own.overhead_percent, own.overhead_seconds_percent), (0.0, 0.0), "{length}");
            free += 1;
        }
        let other = trace.run(Some(for_longest.policy())).unwrap();
        let replayed = other.replays.iter().map(|&(node, count)| {
            let node = &trace.nodes()[node];
            count as f64 * seconds(node.flops, node.traffic)
        });
        let step: f64 = 3.0 * trace.nodes().iter().map(|n| seconds(n.flops, n.traffic)).sum::<f64>();
        let others = 100.0 * replayed.sum::<f64>() / step;
        assert!(other.peak_bytes > budget || own.overhead_seconds_percent <= others * (1.0 + 1e-9), "{length}");
    }
    assert!((2..9).contains(&free), "{free} lengths fit as they are");
    assert_eq!(plans.len(), 9, "a plan for each length, made once");
}

/// What an error names as the smallest budget is not above what any exact preset takes, nor what every k-th of a long
/// chain does.
#[test]
fn no_exact_preset_has_a_smaller_peak() {
    for attention in [AttentionForm::Flash, AttentionForm::Explicit] {
        let config =
            GptConfig { layers: 20, dim: 64, seq: 64, batch: 2, attention, ..GptConfig::named("tiny").unwrap() };
        let device = meta();
        let model = Gpt::new(&device, &config, 0).unwrap();
        let tokens = Tensor::full(&device, &[config.batch, config.seq], DType::I64, 0.0).unwrap();
        let trace = Trace::record(&device, None, |tape| model.loss(tape, &tokens, &tokens)).unwrap();
        let context = ModelShape { blocks: config.layers };
        let peaks = PRESETS.iter().filter(|p| !p.name.starts_with("int8")).map(|preset| {
            let policy = retape_policy::presets::preset(preset.name, &context).unwrap();
            (trace.run(Some(Rc::new(policy))).unwrap().peak_bytes, preset.name)
        });
        let (least, name) = peaks.min().unwrap();
        let planner = Planner::new(trace, PlannerOptions::default()).unwrap();
        assert!(planner.smallest() <= least, "{attention:?}: {} above {least} of {name}", planner.smallest());
        let plan = planner.plan(planner.smallest()).unwrap();
        assert_eq!(planner.trace().run(Some(plan.policy())).unwrap().peak_bytes, plan.peak_bytes);
        // The same as a file of rules.
        let rules = RuleSet::from_toml(&plan.to_toml(), &context).unwrap();
        assert_eq!(planner.trace().run(Some(Rc::new(rules))).unwrap().peak_bytes, plan.peak_bytes);
    }
    let device = meta();
    let x = Tensor::full(&device, &[16, 16], DType::F32, 0.0).unwrap();
    let chain = |tape: &Tape| {
        let mut h = tape.leaf(&x)?;
        for _ in 0..256 {
            h = h.gelu()?;
        }
        h.square()?.sum()
    };
    let planner = Planner::new(Trace::record(&device, None, chain).unwrap(), PlannerOptions::default()).unwrap();
    assert!(planner.smallest() < planner.largest() / 7, "{} of {}", planner.smallest(), planner.largest());
}
