//! AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) with parameter groups.
//!
//! p -= lr wd p; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps),
//! where t counts the steps of that parameter (those in which it had a gradient).
//!
//! Steps are far smaller than what bf16 and f16 hold beside a weight, and each would be rounded away. So a parameter of
//! 16 bits has f32 moments and an f32 master copy, which the steps add up in; the parameter is the master, rounded
//! (Micikevicius et al., "Mixed precision training", 2018).

use crate::checkpoint::{Cast, NamedTensor};
use crate::{Error, Parameter, Result, checkpoint};
pub use retape_core::kernel::AdamWConfig;
use retape_core::{DType, Device, Gradients, MemoryKind, ParameterId, Tensor, kernel};
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

/// The optimizer. Its state is counted as [`MemoryKind::Optimizer`] and made when a parameter first has a gradient: two
/// moments of its shape, and a master copy where it is bf16 or f16. The state of these is f32, else it has the
/// parameter's dtype.
#[derive(Debug)]
pub struct AdamW {
    groups: Vec<ParameterGroup>,
    state: HashMap<ParameterId, State>,
}

#[derive(Debug)]
struct State {
    m: Tensor,
    v: Tensor,
    /// The parameter before rounding, where it has 16 bits.
    master: Option<Tensor>,
    step: u64,
    /// [`Parameter::replacements`] when the master was last known to be the parameter's; none: not known.
    replacements: Option<u64>,
}

impl State {
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.m, &self.v].into_iter().chain(&self.master)
    }

    fn new(p: &Tensor, replacements: u64) -> Result<State> {
        let dtype = p.dtype().computed_in();
        let zeros = || {
            let tensor = Tensor::uninit(p.device(), p.shape(), dtype, MemoryKind::Optimizer)?;
            p.device().run(kernel::Fill { value: 0.0, out: &tensor })?;
            Ok::<Tensor, Error>(tensor.sealed())
        };
        let (m, v) = (zeros()?, zeros()?);
        let master = if dtype == p.dtype() { None } else { Some(p.cast(dtype, MemoryKind::Optimizer)?) };
        Ok(State { m, v, master, step: 0, replacements: Some(replacements) })
    }

    /// Has each tensor to itself: somebody may hold what [`AdamW::state`] gave.
    fn unshare(&mut self) -> Result<()> {
        let tensors = [&mut self.m, &mut self.v].into_iter().chain(&mut self.master);
        for tensor in tensors.filter(|tensor| !tensor.is_sole_owner()) {
            *tensor = tensor.copy(MemoryKind::Optimizer)?;
        }
        Ok(())
    }

    /// A parameter that was set to other numbers since is followed. One that was set to what the master rounds to, as
    /// when a run is loaded, is not: the master has the bits that the rounding dropped.
    fn follow(&mut self, p: &Tensor, replacements: u64) -> Result<()> {
        if self.replacements == Some(replacements) {
            return Ok(());
        }
        if let Some(master) = &self.master {
            let rounded = master.cast(p.dtype(), MemoryKind::Workspace)?;
            if p.device().computes() && rounded.to_bytes()? != p.to_bytes()? {
                p.device().run(kernel::Copy { x: p, out: master })?;
            }
        }
        self.replacements = Some(replacements);
        Ok(())
    }
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
    pub fn decay_all(parameters: impl IntoIterator<Item = Parameter>, config: AdamWConfig) -> Result<AdamW> {
        let parameters = parameters.into_iter().collect();
        AdamW::new(vec![ParameterGroup { parameters, config }])
    }

    /// Two groups: the weight decay is for tensors of two and more dimensions (matrices and embeddings), the others
    /// (biases and norms) have none.
    pub fn decay_matrices(parameters: impl IntoIterator<Item = Parameter>, config: AdamWConfig) -> Result<AdamW> {
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
    ///
    /// # Errors
    /// [`Error::Optimizer`], with nothing changed, for a gradient that isn't of its parameter's shape, dtype and
    /// device. The same for a `grad_scale` that isn't finite, or isn't a normal number of the arithmetic (f32, or f64
    /// for f64 parameters). Gradients that aren't finite are no error here: [`clip_grad_norm`](crate::clip_grad_norm)
    /// finds them.
    pub fn step(&mut self, gradients: &Gradients, grad_scale: f64) -> Result<()> {
        let given: Vec<(&Parameter, AdamWConfig, &Tensor)> = (self.groups.iter())
            .flat_map(|group| group.parameters.iter().map(|p| (p, group.config)))
            .filter_map(|(p, config)| Some((p, config, gradients.parameter(p.id())?)))
            .collect();
        for (parameter, _, g) in &given {
            check_gradient(parameter, g, grad_scale)?;
        }
        let (mut updates, mut made) = (Vec::new(), HashMap::new());
        for (parameter, config, g) in given {
            let (id, replacements) = (parameter.id(), parameter.replacements());
            let g = g.contiguous(MemoryKind::Workspace)?;
            parameter.with_unique(|p| {
                match self.state.get_mut(&id) {
                    Some(state) => {
                        state.unshare()?;
                        state.follow(p, replacements)?;
                    }
                    None => {
                        made.insert(id, State::new(p, replacements)?);
                    }
                }
                Ok(())
            })?;
            updates.push((parameter, config, g));
        }
        self.state.extend(made);
        for (parameter, config, g) in updates {
            let state = self.state.get_mut(&parameter.id()).expect("made above");
            let (m, v, step) = (&state.m, &state.v, state.step + 1);
            parameter.with_unique(|p| {
                let (device, sum) = (p.device(), state.master.as_ref().unwrap_or(p));
                device.run(kernel::AdamW { p: sum, g: &g, m, v, step, config, grad_scale })?;
                if let Some(master) = &state.master {
                    device.run(kernel::Copy { x: master, out: p })?;
                }
                Ok(())
            })?;
            state.step = step;
        }
        Ok(())
    }

    /// Bytes of the state.
    pub fn state_bytes(&self) -> usize {
        self.state.values().flat_map(State::tensors).map(Tensor::storage_bytes).sum()
    }

    /// The state by name, in the order of the groups: for a parameter `w` that has been updated `w.m`, `w.v`,
    /// `w.master` where it has 16 bits, and `w.step` (i64, a scalar). Errors on the meta device, which has no numbers
    /// to save.
    pub fn state(&self) -> Result<Vec<NamedTensor>> {
        let mut all = Vec::new();
        for (parameter, state) in self.parameters().filter_map(|p| Some((p, self.state.get(&p.id())?))) {
            let step = Tensor::from_slice(&parameter.device(), &[], &[state.step as i64])?;
            let tensors = state.tensors().cloned().chain([step]);
            let named = AdamW::state_names(parameter).into_iter().zip(tensors);
            all.extend(named.map(|(name, tensor)| NamedTensor { name, tensor }));
        }
        Ok(all)
    }

    /// Writes the state to a file, see [`checkpoint::save`].
    pub fn save(&self, path: &Path) -> Result<()> {
        checkpoint::save(path, &self.state()?, &[])
    }

    /// Replaces the state by a file's. All of it is checked before any of it changes: a parameter has all of its
    /// tensors in the file or none, and no other tensor is there. Then one tensor after the other is read; where that
    /// fails (a disk, a limit of memory) the state is a part of the file's.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let file = checkpoint::open(path)?;
        let known: HashSet<String> = self.parameters().flat_map(AdamW::state_names).collect();
        file.only(|name| known.contains(name))?;
        self.load_from(&file)
    }

    pub(crate) fn load_from(&mut self, file: &checkpoint::File) -> Result<()> {
        checkpoint::distinct(self.parameters())?;
        let mut found = Vec::new();
        for parameter in self.parameters() {
            let mut names = AdamW::state_names(parameter);
            if names.iter().any(|name| file.contains(name)) {
                let step = names.pop().expect("the step comes last");
                for name in &names {
                    file.check(name, &parameter.shape(), parameter.dtype().computed_in(), Cast::Refuse)?;
                }
                found.push((parameter.clone(), names, read_step(file, &step, &parameter.device())?));
            }
        }
        self.state.clear();
        for (parameter, names, step) in found {
            let (device, shape, dtype) = (parameter.device(), parameter.shape(), parameter.dtype().computed_in());
            let read = |name: &String| file.tensor(name, &device, &shape, dtype, Cast::Refuse, MemoryKind::Optimizer);
            let (m, v, master) = (read(&names[0])?, read(&names[1])?, names.get(2).map(read).transpose()?);
            self.state.insert(parameter.id(), State { m, v, master, step, replacements: None });
        }
        Ok(())
    }

    /// Names of the state of a parameter in a file, the step last.
    pub(crate) fn state_names(parameter: &Parameter) -> Vec<String> {
        let has_master = parameter.dtype().computed_in() != parameter.dtype();
        let parts: &[&str] = if has_master { &["m", "v", "master", "step"] } else { &["m", "v", "step"] };
        parts.iter().map(|part| format!("{}.{part}", parameter.name())).collect()
    }

    fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.groups.iter().flat_map(|g| &g.parameters)
    }
}

fn read_step(file: &checkpoint::File, name: &str, device: &Device) -> Result<u64> {
    let tensor = file.tensor(name, device, &[], DType::I64, Cast::Refuse, MemoryKind::Workspace)?;
    if !device.computes() {
        return Ok(0);
    }
    let step = tensor.to_vec::<i64>()?[0];
    u64::try_from(step).map_err(|_| Error::Optimizer { reason: format!("`{name}` is {step}, it must count steps") })
}

fn check_gradient(parameter: &Parameter, g: &Tensor, grad_scale: f64) -> Result<()> {
    let p = parameter.tensor();
    let name = parameter.name();
    if (g.shape(), g.dtype(), g.device()) != (p.shape(), p.dtype(), p.device()) {
        let of = |t: &Tensor| format!("{}{:?} on {}", t.dtype(), t.shape(), t.device().name());
        let reason = format!(
            "the gradient of `{name}` is {}, the parameter is {}; a gradient has its parameter's shape, dtype and \
             device",
            of(g),
            of(&p)
        );
        return Err(Error::Optimizer { reason });
    }
    let holds = match p.dtype().computed_in() {
        DType::F64 => f64::MIN_POSITIVE..=f64::MAX,
        _ => f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX),
    };
    if grad_scale != 0.0 && !holds.contains(&grad_scale.abs()) {
        let (low, high) = (holds.start(), holds.end());
        let reason = format!(
            "grad_scale is {grad_scale:e}; for `{name}` ({}) it must be 0 or {low:e} to {high:e}, or the product with \
             the gradient is wrong",
            p.dtype()
        );
        return Err(Error::Optimizer { reason });
    }
    Ok(())
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
