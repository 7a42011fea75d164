//! The least cost within a budget, by branch and bound of an integer program.

use crate::model::{Choice, Model, Variable};
use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOptions, SolveOutcome, TerminationReason};
use std::time::Duration;

/// What the solver found within its time.
#[derive(Debug)]
pub struct Solved {
    /// The best marks, with their seconds; none where time ended first.
    pub best: Option<(Vec<Choice>, f64)>,
    /// No marks take fewer seconds.
    pub bound: f64,
    /// The best is the optimum.
    pub proven: bool,
    pub nodes: u64,
    pub elapsed: Duration,
}

/// Minimises the model's cost for peaks of at most `budget`, starting from a plan that is known.
pub fn solve(model: &Model<'_>, budget: u64, known: &[Choice], limit: Duration) -> Solved {
    // The solver's tolerances are absolute: bytes count in the largest item's, seconds in a step's hundredths.
    let unit = model.items.iter().map(|i| i.bytes).fold(1.0, f64::max);
    let hundredth = model.step / 100.0;
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let variables: Vec<microlp::Variable> = model
        .variables
        .iter()
        .enumerate()
        .map(|(number, variable)| {
            let cost = model.cost.terms.get(&number).copied().unwrap_or(0.0) / hundredth;
            match variable {
                Variable::Recompute(_) | Variable::Int8(_) => problem.add_binary_var(cost),
                _ => problem.add_var(cost, (0.0, 1.0)),
            }
        })
        .collect();
    let mut state = |row: &crate::linear::Linear, op: ComparisonOp, right: f64, unit: f64| {
        let terms = row.terms.iter().filter(|(_, f)| **f != 0.0);
        let terms: Vec<_> = terms.map(|(&v, f)| (variables[v], f / unit)).collect();
        problem.add_constraint(&terms[..], op, (right - row.constant) / unit);
    };
    model.rules.iter().for_each(|rule| state(rule, ComparisonOp::Ge, 0.0, 1.0));
    for row in model.rows.iter().filter(|row| row.most() > budget as f64) {
        state(row, ComparisonOp::Le, budget as f64, unit);
    }
    let mut options = SolveOptions::default();
    options.time_limit = Some(limit);
    options.warm_start = Some(variables.iter().copied().zip(model.values(known)).collect());
    let outcome = problem.solve_with(options).expect("a plan fits, so that there is a solution");
    let stats = outcome.stats();
    let proven = outcome.termination_reason() == TerminationReason::ProvenOptimal;
    let mut bound = stats.best_bound.unwrap_or(0.0) * hundredth;
    let best = match &outcome {
        SolveOutcome::Solution(solution) => {
            if proven {
                bound = solution.objective() * hundredth;
            }
            let mut choices = vec![Choice::Keep; model.items.len()];
            for (variable, &number) in model.variables.iter().zip(&variables) {
                match variable {
                    Variable::Recompute(i) if solution.var_value(number) > 0.5 => choices[*i] = Choice::Recompute,
                    Variable::Int8(i) if solution.var_value(number) > 0.5 => choices[*i] = Choice::Int8,
                    _ => {}
                }
            }
            Some((choices, solution.objective() * hundredth))
        }
        SolveOutcome::Interrupted(_) => None,
    };
    Solved { best, bound, proven, nodes: stats.nodes_solved, elapsed: stats.elapsed }
}
