//! Tensors on disk, in the safetensors format (little-endian).
//!
//! A file appears whole or not at all: it is written beside its place, flushed to the disk, and renamed.

use crate::{AdamW, Error, Parameter, Result};
use retape_core::{DType, Device, Kind, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, View};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A tensor with the name it has in a file.
#[derive(Debug, Clone)]
pub struct NamedTensor {
    /// The name.
    pub name: String,
    /// The tensor.
    pub tensor: Tensor,
}

/// Whether [`load_parameters`] may convert between f32 and f64 (and the 16-bit floats).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cast {
    /// Another dtype is an error.
    Refuse,
    /// Any float dtype is converted to the parameter's; narrowing rounds to nearest even.
    Allow,
}

/// Writes tensors, and texts beside them, so that the file is there whole or not at all, whenever the process dies.
/// Errors where the file can't be written and on the meta device, which has no numbers.
pub fn save(path: &Path, tensors: &[NamedTensor], metadata: &[(&str, String)]) -> Result<()> {
    let views = tensors.iter().map(|named| Ok((named.name.as_str(), Downloaded::of(&named.tensor)?)));
    let views = views.collect::<Result<Vec<_>>>()?;
    let metadata: HashMap<String, String> = metadata.iter().map(|(k, v)| (k.to_string(), v.clone())).collect();
    let metadata = (!metadata.is_empty()).then_some(metadata);
    write_atomically(path, |temporary| {
        safetensors::serialize_to_file(views, metadata, temporary).map_err(|error| match error {
            safetensors::SafeTensorError::IoError(source) => source,
            other => std::io::Error::other(other),
        })
    })
}

/// Writes the parameters under their names, see [`save`].
pub fn save_parameters(path: &Path, parameters: &[Parameter], metadata: &[(&str, String)]) -> Result<()> {
    save(path, &parameters.iter().map(named).collect::<Vec<_>>(), metadata)
}

/// Replaces the parameters' numbers by a file's, by name. All of them are read and checked before any changes. Errors,
/// each its own: a tensor that is missing, that no parameter has, of another shape, of another dtype.
pub fn load_parameters(path: &Path, parameters: &[Parameter], cast: Cast) -> Result<()> {
    let file = open(path)?;
    let tensors = file.parameters(parameters, cast)?;
    let known: HashSet<&str> = parameters.iter().map(Parameter::name).collect();
    file.only(|name| known.contains(name))?;
    parameters.iter().zip(tensors).try_for_each(|(parameter, tensor)| parameter.set(tensor))
}

/// Writes parameters and optimizer state to one file, so that they can't come from different steps whenever the process
/// dies; see [`save`]. What else a run needs to go on (the step, the configuration) goes into `metadata`.
pub fn save_training(
    path: &Path,
    parameters: &[Parameter],
    optimizer: &AdamW,
    metadata: &[(&str, String)],
) -> Result<()> {
    let mut tensors: Vec<NamedTensor> = parameters.iter().map(named).collect();
    tensors.extend(optimizer.state()?);
    save(path, &tensors, metadata)
}

/// Reads what [`save_training`] wrote, with the same bits; without an optimizer, only the parameters. Returns the
/// metadata. Everything is checked before anything changes; errors as in [`load_parameters`].
pub fn load_training(
    path: &Path,
    parameters: &[Parameter],
    optimizer: Option<&mut AdamW>,
) -> Result<HashMap<String, String>> {
    let file = open(path)?;
    let tensors = file.parameters(parameters, Cast::Refuse)?;
    let known: HashSet<String> =
        parameters.iter().flat_map(|p| AdamW::state_names(p).into_iter().chain([p.name().into()])).collect();
    file.only(|name| known.contains(name))?;
    if let Some(optimizer) = optimizer {
        optimizer.load_from(&file)?;
    }
    parameters.iter().zip(tensors).try_for_each(|(parameter, tensor)| parameter.set(tensor))?;
    Ok(file.metadata)
}

fn named(parameter: &Parameter) -> NamedTensor {
    NamedTensor { name: parameter.name().into(), tensor: parameter.tensor() }
}

/// Reads a file's header and keeps its bytes. Errors where it can't be read or is no safetensors file.
pub fn open(path: &Path) -> Result<File> {
    let bytes = fs::read(path).map_err(|source| Error::File { action: "read", path: path.into(), source })?;
    let not_safetensors =
        |e: safetensors::SafeTensorError| Error::NotSafetensors { path: path.into(), reason: e.to_string() };
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(not_safetensors)?;
    SafeTensors::deserialize(&bytes).map_err(not_safetensors)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    Ok(File { path: path.into(), bytes, metadata })
}

/// An open safetensors file.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    bytes: Vec<u8>,
    metadata: HashMap<String, String>,
}

impl File {
    /// The texts stored beside the tensors.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.parsed().names().into_iter().map(String::from).collect();
        names.sort();
        names
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.parsed().tensor(name).is_ok()
    }

    /// A tensor as it is in the file, counted as [`Kind::Input`].
    pub fn read(&self, name: &str, device: &Device) -> Result<Tensor> {
        let parsed = self.parsed();
        let view = self.view(&parsed, name)?;
        match dtype_of(view.dtype()) {
            Some(dtype) => Ok(Tensor::from_bytes(device, view.shape(), dtype, view.data())?),
            None => Err(Error::NotSafetensors {
                path: self.path.clone(),
                reason: format!("`{name}` has dtype {:?}, which retape doesn't know", view.dtype()),
            }),
        }
    }

    /// A tensor that must have this shape and this dtype (or, with `cast`, any float dtype where a float is asked for).
    pub fn tensor(
        &self,
        name: &str,
        device: &Device,
        shape: &[usize],
        dtype: DType,
        cast: bool,
        kind: Kind,
    ) -> Result<Tensor> {
        {
            let parsed = self.parsed();
            let view = self.view(&parsed, name)?;
            if view.shape() != shape {
                let (found, expected) = (view.shape().to_vec(), shape.to_vec());
                return Err(Error::WrongShape { path: self.path.clone(), name: name.into(), found, expected });
            }
            let found = dtype_of(view.dtype());
            let castable = dtype.is_float() && found.is_some_and(DType::is_float);
            if found != Some(dtype) && !(cast && castable) {
                return Err(Error::WrongDType {
                    path: self.path.clone(),
                    name: name.into(),
                    found: found.map_or_else(|| format!("{:?}", view.dtype()), |d| d.to_string()),
                    expected: dtype,
                    castable,
                });
            }
        }
        let tensor = self.read(name, device)?;
        if tensor.dtype() != dtype {
            return Ok(tensor.cast(dtype, kind)?);
        }
        tensor.storage().set_kind(kind);
        Ok(tensor)
    }

    /// The tensors of these parameters.
    fn parameters(&self, parameters: &[Parameter], cast: Cast) -> Result<Vec<Tensor>> {
        let missing: Vec<&Parameter> = parameters.iter().filter(|p| !self.contains(p.name())).collect();
        if let Some(first) = missing.first() {
            let more = missing.len() - 1;
            return Err(Error::MissingTensor { path: self.path.clone(), name: first.name().into(), more });
        }
        let allow = cast == Cast::Allow;
        let read = |p: &Parameter| self.tensor(p.name(), &p.device(), &p.shape(), p.dtype(), allow, Kind::Parameter);
        parameters.iter().map(read).collect()
    }

    /// Fails where the file has a tensor whose name isn't `known`.
    pub fn only(&self, known: impl Fn(&str) -> bool) -> Result<()> {
        let mut unexpected = self.names();
        unexpected.retain(|name| !known(name));
        match unexpected.first() {
            Some(name) => {
                let more = unexpected.len() - 1;
                Err(Error::UnexpectedTensor { path: self.path.clone(), name: name.clone(), more })
            }
            None => Ok(()),
        }
    }

    fn parsed(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("`open` has parsed these bytes")
    }

    fn view<'a>(&self, parsed: &SafeTensors<'a>, name: &str) -> Result<TensorView<'a>> {
        let missing = |_| Error::MissingTensor { path: self.path.clone(), name: name.into(), more: 0 };
        parsed.tensor(name).map_err(missing)
    }
}

const DTYPES: [(DType, Dtype); 8] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::BF16, Dtype::BF16),
    (DType::F16, Dtype::F16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::U8, Dtype::U8),
    (DType::Bool, Dtype::BOOL),
];

fn dtype_of(dtype: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(_, theirs)| *theirs == dtype).map(|(ours, _)| *ours)
}

/// A tensor's bytes on the host.
struct Downloaded {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Downloaded {
    fn of(tensor: &Tensor) -> Result<Downloaded> {
        let dtype = DTYPES.iter().find(|(ours, _)| *ours == tensor.dtype()).expect("the table lists every dtype").1;
        Ok(Downloaded { dtype, shape: tensor.shape().to_vec(), bytes: tensor.to_bytes()? })
    }
}

impl View for Downloaded {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Lets `write` fill a file beside `path`, flushes it to the disk and renames it to `path`. The temporary file is
/// removed where any of this fails.
pub fn write_atomically(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let result = write(&temporary).and_then(|()| {
        fs::File::open(&temporary)?.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_directory(path)
    });
    result.map_err(|source| {
        // The first error is the one to report; a temporary file that was never made can't be removed.
        let _ = fs::remove_file(&temporary);
        Error::File { action: "write", path: path.into(), source }
    })
}

/// Makes a rename last. Where directories can't be opened (not on Unix) the rename alone must do.
fn sync_directory(path: &Path) -> std::io::Result<()> {
    if cfg!(unix) {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::File::open(parent)?.sync_all()?;
    }
    Ok(())
}
