//! AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) with parameter groups.
//!
//! p -= lr wd p; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps),
//! where t counts the steps of that parameter (those in which it had a gradient).

use crate::checkpoint::NamedTensor;
use crate::{Error, Parameter, Result, checkpoint};
pub use retape_core::kernel::AdamWConfig;
use retape_core::{DType, Device, Gradients, Kernel, Kind, ParameterId, Tensor};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Parameters that share settings.
#[derive(Debug, Clone)]
pub struct ParameterGroup {
    /// The parameters.
    pub parameters: Vec<Parameter>,
    /// Learning rate, decay of the moments, epsilon and weight decay.
    pub config: AdamWConfig,
}

/// The optimizer. Its state, two tensors of each parameter's shape, is counted as [`Kind::Optimizer`] and made when a
/// parameter first has a gradient.
#[derive(Debug)]
pub struct AdamW {
    groups: Vec<ParameterGroup>,
    state: HashMap<ParameterId, State>,
}

#[derive(Debug)]
struct State {
    m: Tensor,
    v: Tensor,
    step: u64,
}

impl AdamW {
    /// An optimizer for these groups. Fails where a setting is out of range or a parameter is in two groups.
    pub fn new(groups: Vec<ParameterGroup>) -> Result<AdamW> {
        let mut seen = HashSet::new();
        for group in &groups {
            check(&group.config)?;
            if let Some(twice) = group.parameters.iter().find(|p| !seen.insert(p.id())) {
                return Err(Error::Optimizer { reason: format!("parameter `{}` is given twice", twice.name()) });
            }
        }
        Ok(AdamW { groups, state: HashMap::new() })
    }

    /// One group: the weight decay is for every parameter.
    pub fn decay_all(parameters: Vec<Parameter>, config: AdamWConfig) -> Result<AdamW> {
        AdamW::new(vec![ParameterGroup { parameters, config }])
    }

    /// Two groups: the weight decay is for tensors of two and more dimensions (matrices and embeddings), the others
    /// (biases and norms) have none.
    pub fn decay_matrices(parameters: Vec<Parameter>, config: AdamWConfig) -> Result<AdamW> {
        let (matrices, others) = parameters.into_iter().partition(|p| p.shape().len() >= 2);
        AdamW::new(vec![
            ParameterGroup { parameters: matrices, config },
            ParameterGroup { parameters: others, config: AdamWConfig { weight_decay: 0.0, ..config } },
        ])
    }

    /// The groups.
    pub fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }

    /// Sets the learning rate of every group, for schedules.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        for group in 0..self.groups.len() {
            self.set_config(group, AdamWConfig { lr, ..self.groups[group].config })?;
        }
        Ok(())
    }

    /// Sets the settings of one group.
    pub fn set_config(&mut self, group: usize, config: AdamWConfig) -> Result<()> {
        check(&config)?;
        let count = self.groups.len();
        match self.groups.get_mut(group) {
            Some(group) => group.config = config,
            None => return Err(Error::Optimizer { reason: format!("there is no group {group}, only {count}") }),
        }
        Ok(())
    }

    /// Updates every parameter that has a gradient; the others, and their state, stay untouched. Gradients are
    /// multiplied by `grad_scale` first (1, or [`Clip::scale`](crate::Clip)).
    ///
    /// A parameter is overwritten where nobody else holds its tensor, and replaced where somebody does (a living tape,
    /// a copy of the user's). All memory is taken before the first number changes: a step that fails for lack of it
    /// has changed nothing.
    pub fn step(&mut self, gradients: &Gradients, grad_scale: f64) -> Result<()> {
        if !grad_scale.is_finite() {
            return Err(Error::Optimizer { reason: format!("grad_scale must be finite, got {grad_scale}") });
        }
        let mut updates = Vec::new();
        for group in &self.groups {
            for parameter in &group.parameters {
                let Some(g) = gradients.parameter(parameter.id()) else { continue };
                let g = g.contiguous(Kind::Workspace)?;
                parameter.with_unique(|p| {
                    if let std::collections::hash_map::Entry::Vacant(entry) = self.state.entry(parameter.id()) {
                        entry.insert(State { m: zeros(p)?, v: zeros(p)?, step: 0 });
                    }
                    Ok(())
                })?;
                if let Some(State { m, v, .. }) = self.state.get_mut(&parameter.id()) {
                    for moment in [m, v].into_iter().filter(|moment| !moment.is_sole_owner()) {
                        *moment = moment.copy(Kind::Optimizer)?; // somebody holds what `state` gave
                    }
                }
                updates.push((parameter, &group.config, g));
            }
        }
        for (parameter, &config, g) in updates {
            let state = self.state.get_mut(&parameter.id()).expect("made above");
            let (m, v, step) = (&state.m, &state.v, state.step + 1);
            parameter
                .with_unique(|p| Ok(p.device().run(&Kernel::AdamW { p, g: &g, m, v, step, config, grad_scale })?))?;
            state.step = step;
        }
        Ok(())
    }

    /// Bytes of the state.
    pub fn state_bytes(&self) -> usize {
        self.state.values().map(|s| s.m.storage_bytes() + s.v.storage_bytes()).sum()
    }

    /// The state by name, in the order of the groups: for a parameter `w` that has been updated `w.m`, `w.v` and
    /// `w.step` (i64, a scalar). Errors on the meta device, which has no numbers to save.
    pub fn state(&self) -> Result<Vec<NamedTensor>> {
        let mut all = Vec::new();
        for (parameter, state) in self.parameters().filter_map(|p| Some((p, self.state.get(&p.id())?))) {
            let step = Tensor::from_slice(&parameter.device(), &[], &[state.step as i64])?;
            let tensors = [state.m.clone(), state.v.clone(), step];
            let named = AdamW::state_names(parameter).into_iter().zip(tensors);
            all.extend(named.map(|(name, tensor)| NamedTensor { name, tensor }));
        }
        Ok(all)
    }

    /// Writes the state to a file, see [`checkpoint::save`].
    pub fn save(&self, path: &Path) -> Result<()> {
        checkpoint::save(path, &self.state()?, &[])
    }

    /// Replaces the state by a file's. All of it is checked before any of it changes: a parameter has all three of its
    /// tensors in the file or none, and no other tensor is there.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let file = checkpoint::open(path)?;
        let known: HashSet<String> = self.parameters().flat_map(AdamW::state_names).collect();
        file.only(|name| known.contains(name))?;
        self.load_from(&file)
    }

    pub(crate) fn load_from(&mut self, file: &checkpoint::File) -> Result<()> {
        let mut state = HashMap::new();
        for parameter in self.parameters() {
            let names = AdamW::state_names(parameter);
            if names.iter().any(|name| file.contains(name)) {
                let (device, shape, dtype) = (parameter.device(), parameter.shape(), parameter.dtype());
                let read = |name: &str| file.tensor(name, &device, &shape, dtype, false, Kind::Optimizer);
                let (m, v) = (read(&names[0])?, read(&names[1])?);
                let step = read_step(file, &names[2], &device)?;
                state.insert(parameter.id(), State { m, v, step });
            }
        }
        self.state = state;
        Ok(())
    }

    /// Names of the state of a parameter in a file.
    pub(crate) fn state_names(parameter: &Parameter) -> [String; 3] {
        ["m", "v", "step"].map(|part| format!("{}.{part}", parameter.name()))
    }

    fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.groups.iter().flat_map(|g| &g.parameters)
    }
}

fn read_step(file: &checkpoint::File, name: &str, device: &Device) -> Result<u64> {
    let tensor = file.tensor(name, device, &[], DType::I64, false, Kind::Workspace)?;
    if !device.computes() {
        return Ok(0);
    }
    let step = tensor.to_vec::<i64>()?[0];
    u64::try_from(step).map_err(|_| Error::Optimizer { reason: format!("`{name}` is {step}, it must count steps") })
}

fn zeros(like: &Tensor) -> Result<Tensor> {
    let tensor = Tensor::uninit(like.device(), like.shape(), like.dtype(), Kind::Optimizer)?;
    like.device().run(&Kernel::Fill { value: 0.0, out: &tensor })?;
    Ok(tensor.sealed())
}

fn check(config: &AdamWConfig) -> Result<()> {
    let not_negative = |v: f64| v.is_finite() && v >= 0.0;
    let rules = [
        ("lr", config.lr, not_negative(config.lr), "finite and at least 0"),
        ("beta1", config.beta1, (0.0..1.0).contains(&config.beta1), "in [0, 1)"),
        ("beta2", config.beta2, (0.0..1.0).contains(&config.beta2), "in [0, 1)"),
        ("eps", config.eps, not_negative(config.eps), "finite and at least 0"),
        ("weight_decay", config.weight_decay, not_negative(config.weight_decay), "finite and at least 0"),
    ];
    match rules.into_iter().find(|(_, _, ok, _)| !ok) {
        Some((name, value, _, right)) => {
            Err(Error::Optimizer { reason: format!("{name} must be {right}, got {value}") })
        }
        None => Ok(()),
    }
}
