//! Plans for batches of many shapes under one budget.

use super::{Plan, Planner, PlannerOptions};
use crate::Result;
use retape_core::Trace;
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;

/// Plans by the shape of the batch, each made when first asked for: under one budget short batches recompute nothing,
/// long ones as much as they must.
///
/// ```
/// use retape_core::{DType, Tensor, Trace, meta};
/// use retape_policy::{PlanCache, PlannerOptions};
///
/// let device = meta();
/// let record = |rows: &usize| -> retape_policy::Result<Trace> {
///     let x = Tensor::full(&device, &[*rows, 256], DType::F32, 0.0)?;
///     Ok(Trace::record(&device, None, |tape| {
///         let mut h = tape.leaf(&x)?;
///         for _ in 0..8 {
///             h = h.gelu()?;
///         }
///         h.square()?.sum()
///     })?)
/// };
/// let mut plans = PlanCache::new(1_500_000, PlannerOptions::default());
/// assert_eq!(plans.get(&16, record)?.overhead_percent, 0.0);
/// assert!(plans.get(&200, record)?.overhead_percent > 0.0);
/// # Ok::<(), retape_policy::Error>(())
/// ```
#[derive(Debug)]
pub struct PlanCache<K> {
    budget: u64,
    options: PlannerOptions,
    plans: HashMap<K, Rc<Plan>>,
}

impl<K: Eq + Hash + Clone> PlanCache<K> {
    /// An empty cache for a budget of `budget` bytes.
    pub fn new(budget: u64, options: PlannerOptions) -> PlanCache<K> {
        PlanCache { budget, options, plans: HashMap::new() }
    }

    /// The plan for a shape; `record` gives the forward pass on a batch of this shape if there is none yet.
    ///
    /// # Errors
    /// What `record` returns, and [`Error::Infeasible`](crate::Error::Infeasible) where no plan fits this shape.
    pub fn get<E>(&mut self, shape: &K, record: impl FnOnce(&K) -> std::result::Result<Trace, E>) -> Result<Rc<Plan>, E>
    where
        E: From<crate::Error>,
    {
        if let Some(plan) = self.plans.get(shape) {
            return Ok(plan.clone());
        }
        let planner = Planner::new(record(shape)?, self.options.clone())?;
        let plan = Rc::new(planner.plan(self.budget)?);
        self.plans.insert(shape.clone(), plan.clone());
        Ok(plan)
    }

    /// How many shapes have a plan.
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// True before the first plan.
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }
}
