//! Makes or loads the parameters of a model, each under its path.

use crate::checkpoint::{self, Cast, File};
use crate::{Error, Init, Parameter, Parameters, Result};
use retape_core::kernel::RandomStream;
use retape_core::{DType, Device, MemoryKind, Scope, Tensor};
use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a layer is built with: it makes the layer's parameters or takes them from a file, records them in order, and
/// gives the layer its scope. A cheap handle: all handles of one model share what was recorded.
///
/// A layer of your own asks for its parameters and opens its scope; it lists nothing by hand:
///
/// ```
/// use retape_core::{DType, Error, Scope, Tape, Tensor, Var};
/// use retape_nn::{AdamW, AdamWConfig, Builder, Init, Linear, Result, clip_grad_norm};
///
/// struct Classifier {
///     scope: Scope,
///     hidden: Linear,
///     output: Linear,
/// }
///
/// impl Classifier {
///     fn new(builder: &Builder) -> Result<Classifier> {
///         let init = Init::Normal { std: 0.3 };
///         Ok(Classifier {
///             scope: builder.scope(),
///             hidden: Linear::new(&builder.pp("hidden"), 2, 16, true, init)?,
///             output: Linear::new(&builder.pp("output"), 16, 2, true, init)?,
///         })
///     }
///
///     fn forward(&self, x: Var) -> Result<Var> {
///         x.within(&self.scope, |x| {
///             let h = self.hidden.forward(x)?.gelu()?;
///             self.output.forward(h)
///         })
///     }
/// }
///
/// let device = retape_cpu::device();
/// let builder = Builder::init(&device, DType::F32, 7);
/// let model = Classifier::new(&builder.pp("classifier"))?;
/// let parameters = builder.parameters();
/// let names: Vec<&str> = parameters.iter().map(|p| p.name()).collect();
/// assert_eq!(names[..2], ["classifier.hidden.weight", "classifier.hidden.bias"]);
///
/// let x = Tensor::from_slice(&device, &[4, 2], &[0.0f32, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])?;
/// let target = Tensor::from_slice(&device, &[4], &[0i64, 1, 1, 0])?;
/// let mut optimizer = AdamW::decay_all(parameters.clone(), AdamWConfig { lr: 0.05, ..AdamWConfig::default() })?;
/// let mut losses = Vec::new();
/// for _ in 0..50 {
///     let tape = Tape::new(&device);
///     let logits = model.forward(tape.constant(&x)?)?;
///     assert_eq!(logits.path(), "classifier");
///     let loss = logits.cross_entropy(tape.constant(&target)?, -100)?;
///     let gradients = tape.backward(&loss)?;
///     let clip = clip_grad_norm(&gradients, &parameters, 1.0)?;
///     losses.push(loss.item()?);
///     optimizer.step(&gradients, clip.scale)?;
/// }
/// assert!(losses[49] < 0.1 * losses[0]);
/// # Ok::<(), retape_nn::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Builder {
    shared: Arc<Shared>,
    path: String,
}

#[derive(Debug)]
struct Shared {
    device: Device,
    dtype: DType,
    source: Source,
    made: Mutex<Made>,
}

#[derive(Debug)]
enum Source {
    Seed(u64),
    File(File, Cast),
}

#[derive(Debug, Default)]
struct Made {
    parameters: Parameters,
    /// Of each path, and of each further name of a tied parameter, the parameter.
    by_name: HashMap<String, Parameter>,
}

impl Builder {
    /// Makes fresh parameters of one dtype on one device. The n-th is drawn from stream n of the seed, so a model's
    /// initial numbers are a pure function of its shape and the seed, on every device. The meta device only allocates.
    pub fn init(device: &Device, dtype: DType, seed: u64) -> Builder {
        Builder::new(device, dtype, Source::Seed(seed))
    }

    /// Takes the parameters from a safetensors file, by path. It reads each when a layer asks for it, so that only one
    /// is in the host's memory at a time. [`finish`](Builder::finish) looks for tensors that no layer asked for.
    ///
    /// # Errors
    /// Where the file can't be read or is no safetensors file.
    pub fn load(path: &Path, device: &Device, dtype: DType, cast: Cast) -> Result<Builder> {
        Ok(Builder::new(device, dtype, Source::File(checkpoint::open(path)?, cast)))
    }

    fn new(device: &Device, dtype: DType, source: Source) -> Builder {
        let shared = Shared { device: device.clone(), dtype, source, made: Mutex::default() };
        Builder { shared: Arc::new(shared), path: String::new() }
    }

    /// The builder of a part: its path is this one's and `name`, which may be a number.
    pub fn pp(&self, name: impl Display) -> Builder {
        Builder { shared: self.shared.clone(), path: self.path_of(&name.to_string()) }
    }

    /// The path, empty at the top.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The parameters' device.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The parameters' dtype.
    pub fn dtype(&self) -> DType {
        self.shared.dtype
    }

    /// The scope of the layer at this path: the layer's values get the path that its parameters have.
    pub fn scope(&self) -> Scope {
        Scope::of_layer(&self.path)
    }

    /// Makes or loads the parameter `{path}.{name}`, and records it. A file's numbers are used as they are, without
    /// `init`.
    ///
    /// # Errors
    /// [`Error::DuplicateName`] for a path that has a parameter, [`Error::Input`] for an `init` out of its range and
    /// for a path that no pattern could name. Of a file: [`Error::MissingTensor`], [`Error::WrongShape`],
    /// [`Error::WrongDType`].
    pub fn parameter(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let Shared { device, dtype, source, .. } = &*self.shared;
        let path = self.path_of(name);
        check_path(&path)?;
        let mut made = self.made();
        made.check_new(&path, || format!("{dtype}{shape:?}"))?;
        init.check(&path, *dtype)?;
        let tensor = match source {
            Source::Seed(seed) => {
                let stream = RandomStream { seed: *seed, counter: made.parameters.len() as u64 };
                init.tensor(device, *dtype, shape, stream)?
            }
            Source::File(file, cast) if device.computes() => {
                file.tensor(&path, device, shape, *dtype, *cast, MemoryKind::Parameter)?
            }
            Source::File(file, cast) => {
                file.check(&path, shape, *dtype, *cast)?;
                Tensor::uninit(device, shape, *dtype, MemoryKind::Parameter)?
            }
        };
        let parameter = Parameter::new(path.clone(), tensor)?;
        made.parameters.push(parameter.clone());
        made.by_name.insert(path, parameter.clone());
        Ok(parameter)
    }

    /// Gives a parameter of this model one more name, `{path}.{name}`, as a head that is tied to an embedding has. It
    /// stays one parameter, saved under its own name. A file may have both names, where they have the same bytes.
    ///
    /// # Errors
    /// [`Error::DuplicateName`] for a path that has a parameter. [`Error::Input`] for a parameter that another builder
    /// has made. [`Error::TiedTensorsDiffer`] for a file of other bytes.
    pub fn tie(&self, name: &str, to: &Parameter) -> Result<()> {
        let path = self.path_of(name);
        check_path(&path)?;
        let mut made = self.made();
        if made.by_name.get(to.name()).is_none_or(|own| own.id() != to.id()) {
            let reason = format!("`{path}` can't be tied to `{}`, which this builder hasn't made", to.name());
            return Err(Error::Input { layer: "Builder", reason });
        }
        made.check_new(&path, || format!("{}{:?}, tied to `{}`", to.dtype(), to.shape(), to.name()))?;
        if let Source::File(file, _) = &self.shared.source
            && file.contains(&path)
        {
            file.check_same(&path, to.name())?;
        }
        made.by_name.insert(path, to.clone());
        Ok(())
    }

    /// The parameters at or under this path, in the order in which they were made.
    pub fn parameters(&self) -> Parameters {
        let is_inside = |name: &str| match name.strip_prefix(&self.path) {
            Some(rest) => self.path.is_empty() || rest.is_empty() || rest.starts_with('.'),
            None => false,
        };
        self.made().parameters.iter().filter(|p| is_inside(p.name())).cloned().collect()
    }

    /// Fails where the file has tensors that nobody asked for: [`Error::UnexpectedTensor`]. Fresh parameters need no
    /// such check.
    pub fn finish(&self) -> Result<()> {
        match &self.shared.source {
            Source::File(file, _) => {
                let made = self.made();
                file.only(|name| made.by_name.contains_key(name))
            }
            Source::Seed(_) => Ok(()),
        }
    }

    fn path_of(&self, name: &str) -> String {
        match (self.path.as_str(), name) {
            ("", _) => name.to_owned(),
            (_, "") => self.path.clone(),
            (path, _) => format!("{path}.{name}"),
        }
    }

    fn made(&self) -> MutexGuard<'_, Made> {
        // What it holds is whole at every instruction, so a poisoned lock is still usable.
        self.shared.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fails for a path that patterns can't name, or a file of tensors can't hold.
fn check_path(path: &str) -> Result<()> {
    let wrong = match path {
        "__metadata__" => "is what a safetensors file calls its texts",
        _ if path.contains('/') => "contains `/`; parts are separated by `.`",
        _ if path.split('.').any(str::is_empty) => "has an empty segment",
        _ => return Ok(()),
    };
    let reason = format!("the parameter's path `{path}` {wrong}; give each part a name, as in `up.weight`");
    Err(Error::Input { layer: "Builder", reason })
}

impl Made {
    /// Fails where the path has a parameter; `second` tells of the one that asks for it.
    fn check_new(&self, path: &str, second: impl FnOnce() -> String) -> Result<()> {
        match self.by_name.get(path) {
            Some(first) => Err(Error::DuplicateName {
                name: path.to_owned(),
                first: format!("{}{:?}", first.dtype(), first.shape()),
                second: second(),
            }),
            None => Ok(()),
        }
    }
}
