//! The planner against an integer linear program of the engine's rules, solved to the proven optimum.
//!
//! `RETAPE_ILP_SECONDS` bounds the time of a solve, and asks for larger models.

#[path = "../graphs/mod.rs"]
mod graphs;
mod linear;
mod model;
mod solve;
mod timeline;

use graphs::Dice;
use model::{Choice, Model};
use retape_core::{DType, Device, Int8Spec, Mark, Tensor, Trace, meta};
use retape_nn::{AttentionForm, Gpt, GptConfig};
use retape_policy::{LossyUse, Plan, Planner, PlannerOptions};
use std::time::Duration;

/// A GPT, with what its user holds during a step.
struct Recorded {
    device: Device,
    model: Gpt,
    tokens: Tensor,
    targets: Tensor,
}

impl Recorded {
    fn gpt(layers: usize, attention: AttentionForm) -> Recorded {
        let size = GptConfig { dim: 64, heads: 4, kv_heads: 4, seq: 128, batch: 1, ..GptConfig::default() };
        let config = GptConfig { layers, attention, ..size };
        let device = meta();
        let model = Gpt::new(&device, &config, 1).unwrap();
        let ids = || Tensor::full(&device, &[config.batch, config.seq], DType::I64, 0.0).unwrap();
        let (tokens, targets) = (ids(), ids());
        Recorded { device, model, tokens, targets }
    }

    fn trace(&self) -> Trace {
        Trace::record(&self.device, None, |tape| self.model.loss(tape, &self.tokens, &self.targets)).unwrap()
    }
}

/// A plan's marks as choices of the model's items.
fn choices(plan: &Plan) -> Vec<Choice> {
    let of = |mark: &Mark| match mark {
        Mark::Keep => Choice::Keep,
        Mark::Recompute => Choice::Recompute,
        _ => Choice::Int8,
    };
    plan.marks.iter().map(|m| of(&m.mark)).collect()
}

/// For random marks the model has the engine's peak, to the byte, and its cost.
#[test]
fn the_model_has_the_engines_peak() {
    for (layers, attention, int8) in [
        (1, AttentionForm::Flash, true),
        (2, AttentionForm::Flash, false),
        (2, AttentionForm::Flash, true),
        (4, AttentionForm::Flash, true),
    ] {
        let gpt = Recorded::gpt(layers, attention);
        let trace = gpt.trace();
        let model = Model::new(&trace, gpt.device.meter(), int8);
        let runs = 300;
        for seed in 0..runs {
            let mut dice = Dice::new(seed);
            let odds = 1 + dice.throw(8);
            let throw = |item: &model::Item| match (dice.throw(9) < odds, item.int8_bytes) {
                (false, Some(_)) if dice.throw(2) == 0 => Choice::Int8,
                (false, _) => Choice::Keep,
                (true, _) => Choice::Recompute,
            };
            let choices: Vec<Choice> = model.items.iter().map(throw).collect();
            let (run, cost) = model.run(&choices);
            let (peak, predicted) = model.predict(&choices);
            assert!((cost - predicted).abs() < 1e-9 * model.step, "{seed}: cost {cost}, {predicted} predicted");
            assert_eq!(peak as u64, run.peak_bytes, "{seed}: peak at {:?}", run.peak_moment);
        }
        println!(
            "{layers} layers, int8 {int8}: {} values, {} variables, {} rows of memory, {} rules; the engine's peak in \
             {runs} of {runs} runs",
            model.items.len(),
            model.variables.len(),
            model.rows.len(),
            model.rules.len()
        );
    }
}

/// The planner against the optimum, or where `limit` ends before that is proven against the solver's bound. A row for
/// each budget, from the smallest up.
fn compare(layers: usize, int8: bool, budgets: u64, limit: Duration) {
    let gpt = Recorded::gpt(layers, AttentionForm::Flash);
    let trace = gpt.trace();
    let model = Model::new(&trace, gpt.device.meter(), int8);
    let options = PlannerOptions {
        lossy: int8.then(|| LossyUse::from_iter([Mark::Int8(Int8Spec::default())])),
        without_segments: true,
        ..PlannerOptions::default()
    };
    let planner = Planner::new(gpt.trace(), options).unwrap();
    let what = if int8 { "with int8" } else { "exact" };
    println!("{layers} layers, {what}: {} values, {} variables", model.items.len(), model.variables.len());
    println!("| budget | plan % | best % | bound % | proven | gap of the step % | gap of the overhead % | nodes | s |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for at in 0..budgets {
        let budget = planner.smallest() + (planner.largest() - planner.smallest()) * at / budgets;
        let plan = planner.plan(budget).unwrap();
        let own = choices(&plan);
        let (peak, cost) = model.predict(&own);
        assert_eq!(peak as u64, plan.peak_bytes);
        assert!((cost - plan.overhead_seconds_percent / 100.0 * model.step).abs() < 1e-9 * model.step);
        let solved = solve::solve(&model, budget, &own, limit);
        if let Some((best, cost)) = &solved.best {
            let (run, measured) = model.run(best);
            assert!(run.peak_bytes <= budget, "the solver's marks take {} of {budget}", run.peak_bytes);
            assert!((cost - measured).abs() < 1e-6 * model.step, "the solver's marks cost {measured}, not {cost}");
        }
        let percent = |seconds: f64| 100.0 * seconds / model.step;
        // Less than that is the solver's tolerance.
        let over = if (cost - solved.bound).abs() < 1e-6 * model.step { 0.0 } else { cost - solved.bound };
        let of_step = 100.0 * over / (model.step + solved.bound);
        println!(
            "| {budget} | {:.3} | {:.3} | {:.3} | {} | {of_step:.3} | {:.2} | {} | {:.1} |",
            percent(cost),
            solved.best.as_ref().map_or(f64::NAN, |best| percent(best.1)),
            percent(solved.bound),
            if solved.proven { "yes" } else { "no" },
            100.0 * over / solved.bound.max(1e-12),
            solved.nodes,
            solved.elapsed.as_secs_f64()
        );
        assert!(of_step > -1e-4, "the plan beats the optimum: the program is wrong");
        assert!(
            of_step <= 2.0 || !solved.proven,
            "{layers} layers, {what}, {budget} bytes: {of_step}% over the optimum"
        );
    }
}

/// Within 2% of the optimum of a step's time.
#[test]
fn a_plan_is_nearly_as_cheap_as_the_optimum() {
    let seconds = std::env::var("RETAPE_ILP_SECONDS").ok();
    let seconds = seconds.map(|s| s.parse().expect("RETAPE_ILP_SECONDS is a number"));
    let limit = Duration::from_secs(seconds.unwrap_or(60));
    compare(1, false, 8, limit);
    compare(1, true, 8, limit);
    compare(2, false, if seconds.is_some() { 8 } else { 4 }, limit);
    if seconds.is_some() {
        for (layers, int8) in [(3, false), (2, true), (4, false), (6, false), (8, false), (12, false)] {
            compare(layers, int8, if layers <= 4 { 8 } else { 4 }, limit);
        }
    }
}
