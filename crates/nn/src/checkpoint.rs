//! Tensors on disk, in the safetensors format (little-endian).
//!
//! A file appears whole or not at all: it is written beside its place, read back, flushed to the disk, and renamed.
//! Reading and writing hold one tensor at a time in the host's memory.

use crate::{AdamW, Error, Parameter, Result};
use retape_core::{DType, Device, MemoryKind, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo, View};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::hash::Hasher;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

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
/// What was written is read back first: a file that was there is replaced by a good one only.
///
/// # Errors
/// [`Error::DuplicateName`], [`Error::File`] where the file can't be written or reads back otherwise, and an error on
/// the meta device, which has no numbers.
pub fn save(path: &Path, tensors: &[NamedTensor], metadata: &[(&str, String)]) -> Result<()> {
    let mut by_name: HashMap<&str, &Tensor> = HashMap::new();
    for NamedTensor { name, tensor } in tensors {
        if let Some(first) = by_name.insert(name, tensor) {
            return Err(duplicate(name, first, tensor));
        }
    }
    let log = Log::default();
    let metadata: HashMap<String, String> = metadata.iter().map(|(k, v)| (k.to_string(), v.clone())).collect();
    let written = write_atomically(path, |temporary| {
        let views = tensors.iter().map(|named| (named.name.as_str(), Streamed { named, log: &log }));
        let texts = (!metadata.is_empty()).then(|| metadata.clone());
        safetensors::serialize_to_file(views, texts, temporary).map_err(|error| match error {
            safetensors::SafeTensorError::IoError(source) => source,
            other => std::io::Error::other(other),
        })?;
        log.check(temporary, &metadata)
    });
    match log.failed.into_inner() {
        Some(error) => Err(error.into()),
        None => written,
    }
}

/// Writes the parameters under their names, see [`save`]. One that is listed twice, as a tied weight, is saved once.
pub fn save_parameters(path: &Path, parameters: &[Parameter], metadata: &[(&str, String)]) -> Result<()> {
    save(path, &distinct(parameters)?.into_iter().map(named).collect::<Vec<_>>(), metadata)
}

/// Replaces the parameters' numbers by a file's, by name. All names, shapes and dtypes are checked before any number
/// changes; then one tensor after the other is read, so that only one is there twice. Where that fails (a disk, a limit
/// of memory) the first parameters are the file's. Errors, each its own: a tensor that is missing, that no parameter
/// has, of another shape, of another dtype.
pub fn load_parameters(path: &Path, parameters: &[Parameter], cast: Cast) -> Result<()> {
    let parameters = distinct(parameters)?;
    let file = open(path)?;
    file.check_parameters(&parameters, cast)?;
    let known: HashSet<&str> = parameters.iter().map(|p| p.name()).collect();
    file.only(|name| known.contains(name))?;
    file.load_into(&parameters, cast)
}

/// Writes parameters and optimizer state to one file, so that they can't come from different steps whenever the process
/// dies; see [`save`]. What else a run needs to go on (the step, the configuration, [`Random`](crate::Random)) goes
/// into `metadata`.
pub fn save_training(
    path: &Path,
    parameters: &[Parameter],
    optimizer: &AdamW,
    metadata: &[(&str, String)],
) -> Result<()> {
    let mut tensors: Vec<NamedTensor> = distinct(parameters)?.into_iter().map(named).collect();
    tensors.extend(optimizer.state()?);
    save(path, &tensors, metadata)
}

/// Reads what [`save_training`] wrote, with the same bits; without an optimizer, only the parameters. Returns the
/// metadata. Checks and errors as in [`load_parameters`].
pub fn load_training(
    path: &Path,
    parameters: &[Parameter],
    optimizer: Option<&mut AdamW>,
) -> Result<HashMap<String, String>> {
    let parameters = distinct(parameters)?;
    let file = open(path)?;
    file.check_parameters(&parameters, Cast::Refuse)?;
    let names = |p: &&Parameter| AdamW::state_names(p).into_iter().chain([p.name().into()]);
    let known: HashSet<String> = parameters.iter().flat_map(names).collect();
    file.only(|name| known.contains(name))?;
    if let Some(optimizer) = optimizer {
        optimizer.load_from(&file)?;
    }
    file.load_into(&parameters, Cast::Refuse)?;
    Ok(file.metadata)
}

fn named(parameter: &Parameter) -> NamedTensor {
    NamedTensor { name: parameter.name().into(), tensor: parameter.tensor() }
}

/// Each parameter once. Two different ones of one name are an error.
pub(crate) fn distinct<'a>(parameters: impl IntoIterator<Item = &'a Parameter>) -> Result<Vec<&'a Parameter>> {
    let mut by_name: HashMap<&str, &Parameter> = HashMap::new();
    let mut distinct = Vec::new();
    for parameter in parameters {
        match by_name.insert(parameter.name(), parameter) {
            None => distinct.push(parameter),
            Some(first) if first.id() == parameter.id() => {}
            Some(first) => return Err(duplicate(parameter.name(), &first.tensor(), &parameter.tensor())),
        }
    }
    Ok(distinct)
}

fn duplicate(name: &str, first: &Tensor, second: &Tensor) -> Error {
    let of = |t: &Tensor| format!("{}{:?}", t.dtype(), t.shape());
    Error::DuplicateName { name: name.into(), first: of(first), second: of(second) }
}

/// Longest header that is read, as in the format's own library.
const MAX_HEADER: u64 = 100_000_000;

/// Reads a file's header. Errors where it can't be read or is no safetensors file.
pub fn open(path: &Path) -> Result<File> {
    let failed = |source| Error::File { action: "read", path: path.into(), source };
    let wrong = |reason: String| Error::NotSafetensors { path: path.into(), reason };
    let mut source = fs::File::open(path).map_err(failed)?;
    let bytes = source.metadata().map_err(failed)?.len();
    let mut length = [0; 8];
    if bytes < 8 {
        return Err(wrong(format!("it has {bytes} bytes, and the header's length alone takes 8")));
    }
    source.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER.min(bytes - 8) {
        return Err(wrong(format!("its header would have {length} bytes, the file has {bytes}")));
    }
    let mut header = vec![0; length as usize];
    source.read_exact(&mut header).map_err(failed)?;
    let header: Metadata = serde_json::from_slice(&header).map_err(|e| wrong(e.to_string()))?;
    let tensors: HashMap<String, TensorInfo> =
        header.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
    let start = 8 + length;
    let end = tensors.values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
    if start.checked_add(end) != Some(bytes) {
        return Err(wrong(format!("its header tells of {end} bytes of tensors, and there are {}", bytes - start)));
    }
    let metadata = header.metadata().clone().unwrap_or_default();
    let (source, read) = (Mutex::new(source), AtomicU64::new(start));
    Ok(File { path: path.into(), source, start, tensors, metadata, read })
}

/// An open safetensors file. A tensor's bytes are read when they are asked for.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    source: Mutex<fs::File>,
    /// Where the tensors' bytes start.
    start: u64,
    tensors: HashMap<String, TensorInfo>,
    metadata: HashMap<String, String>,
    read: AtomicU64,
}

impl File {
    /// The texts stored beside the tensors.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors.keys().cloned().collect();
        names.sort();
        names
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Bytes that were read so far: the header once, and each tensor as often as it was asked for.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// A tensor as it is in the file, counted as [`MemoryKind::Input`].
    pub fn read(&self, name: &str, device: &Device) -> Result<Tensor> {
        let info = self.info(name)?;
        match dtype_of(info.dtype) {
            Some(dtype) => Ok(Tensor::from_bytes(device, &info.shape, dtype, &self.bytes_of(info)?)?),
            None => Err(Error::NotSafetensors {
                path: self.path.clone(),
                reason: format!("`{name}` has dtype {:?}, which retape doesn't know", info.dtype),
            }),
        }
    }

    /// A tensor that must have this shape and this dtype (or, where the cast is allowed, any float dtype where a float
    /// is asked for).
    pub fn tensor(
        &self,
        name: &str,
        device: &Device,
        shape: &[usize],
        dtype: DType,
        cast: Cast,
        kind: MemoryKind,
    ) -> Result<Tensor> {
        self.check(name, shape, dtype, cast)?;
        let tensor = self.read(name, device)?;
        if tensor.dtype() != dtype {
            return Ok(tensor.cast(dtype, kind)?);
        }
        tensor.storage().set_kind(kind);
        Ok(tensor)
    }

    /// Fails where [`tensor`](File::tensor) would, without reading the numbers.
    pub(crate) fn check(&self, name: &str, shape: &[usize], dtype: DType, cast: Cast) -> Result<()> {
        let info = self.info(name)?;
        if info.shape != shape {
            let (found, expected) = (info.shape.clone(), shape.to_vec());
            return Err(Error::WrongShape { path: self.path.clone(), name: name.into(), found, expected });
        }
        let found = dtype_of(info.dtype);
        let castable = dtype.is_float() && found.is_some_and(DType::is_float);
        if found != Some(dtype) && !(cast == Cast::Allow && castable) {
            return Err(Error::WrongDType {
                path: self.path.clone(),
                name: name.into(),
                found: found.map_or_else(|| format!("{:?}", info.dtype), |d| d.to_string()),
                expected: dtype,
                castable,
            });
        }
        Ok(())
    }

    fn check_parameters(&self, parameters: &[&Parameter], cast: Cast) -> Result<()> {
        let missing: Vec<&&Parameter> = parameters.iter().filter(|p| !self.contains(p.name())).collect();
        if let Some(first) = missing.first() {
            let more = missing.len() - 1;
            return Err(Error::MissingTensor { path: self.path.clone(), name: first.name().into(), more });
        }
        parameters.iter().try_for_each(|p| self.check(p.name(), &p.shape(), p.dtype(), cast))
    }

    fn load_into(&self, parameters: &[&Parameter], cast: Cast) -> Result<()> {
        parameters.iter().try_for_each(|p| {
            p.set(self.tensor(p.name(), &p.device(), &p.shape(), p.dtype(), cast, MemoryKind::Parameter)?)
        })
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

    /// Fails where the tensors of two names of one parameter differ in shape, dtype or a byte.
    pub(crate) fn check_same(&self, name: &str, other: &str) -> Result<()> {
        const CHUNK: usize = 1 << 20;
        let (a, b) = (self.info(name)?, self.info(other)?);
        let same = || {
            if (a.dtype, &a.shape) != (b.dtype, &b.shape) {
                return Ok(false);
            }
            let ((start_a, end), start_b) = (a.data_offsets, b.data_offsets.0);
            for from in (0..end - start_a).step_by(CHUNK) {
                let to = (from + CHUNK).min(end - start_a);
                if self.bytes(start_a + from..start_a + to)? != self.bytes(start_b + from..start_b + to)? {
                    return Ok(false);
                }
            }
            Ok::<bool, Error>(true)
        };
        if same()? {
            return Ok(());
        }
        Err(Error::TiedTensorsDiffer { path: self.path.clone(), name: name.into(), other: other.into() })
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        let missing = || Error::MissingTensor { path: self.path.clone(), name: name.into(), more: 0 };
        self.tensors.get(name).ok_or_else(missing)
    }

    fn bytes_of(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        self.bytes(info.data_offsets.0..info.data_offsets.1)
    }

    fn bytes(&self, range: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let found = source.seek(SeekFrom::Start(self.start + range.start as u64));
        let read = found.and_then(|_| source.read_exact(&mut bytes));
        read.map_err(|source| Error::File { action: "read", path: self.path.clone(), source })?;
        self.read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
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

/// What was written, to be found again.
#[derive(Debug, Default)]
struct Log {
    hashes: RefCell<HashMap<String, u64>>,
    /// A tensor that couldn't be brought to the host.
    failed: RefCell<Option<retape_core::Error>>,
}

impl Log {
    /// Fails where the file isn't what was written.
    fn check(&self, path: &Path, metadata: &HashMap<String, String>) -> std::io::Result<()> {
        let differs = |what: &str| std::io::Error::other(format!("{what} reads back otherwise than it was written"));
        let file = open(path).map_err(std::io::Error::other)?;
        let hashes = self.hashes.borrow();
        if file.tensors.len() != hashes.len() || file.metadata != *metadata {
            return Err(differs("its header"));
        }
        for (name, hash) in hashes.iter() {
            let bytes = file.info(name).and_then(|info| file.bytes_of(info)).map_err(std::io::Error::other)?;
            if hash_of(&bytes) != *hash {
                return Err(differs(&format!("`{name}`")));
            }
        }
        Ok(())
    }
}

fn hash_of(bytes: &[u8]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// A tensor that is brought to the host when its turn to be written comes.
struct Streamed<'a> {
    named: &'a NamedTensor,
    log: &'a Log,
}

impl View for Streamed<'_> {
    fn dtype(&self) -> Dtype {
        let dtype = self.named.tensor.dtype();
        DTYPES.iter().find(|(ours, _)| *ours == dtype).expect("the table lists every dtype").1
    }
    fn shape(&self) -> &[usize] {
        self.named.tensor.shape()
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.named.tensor.to_bytes().unwrap_or_else(|error| {
            self.log.failed.borrow_mut().get_or_insert(error);
            vec![0; self.data_len()]
        });
        self.log.hashes.borrow_mut().insert(self.named.name.clone(), hash_of(&bytes));
        Cow::Owned(bytes)
    }
    fn data_len(&self) -> usize {
        self.named.tensor.len() * self.named.tensor.dtype().size()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Each byte of a file that changes between writing and reading back is found.
    #[test]
    fn what_reads_back_otherwise_is_refused() {
        let device = retape_cpu::device();
        let dir = std::env::temp_dir().join(format!("retape-nn-{}-log", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("tensors");
        let log = Log::default();
        let tensors = ["a", "b"].map(|name| {
            let tensor = Tensor::from_slice(&device, &[3], &[1.0f32, 2.0, 3.0]).unwrap();
            NamedTensor { name: name.into(), tensor }
        });
        let views = tensors.iter().map(|named| (named.name.as_str(), Streamed { named, log: &log }));
        let metadata = HashMap::from([("step".to_owned(), "3".to_owned())]);
        safetensors::serialize_to_file(views, Some(metadata.clone()), &path).unwrap();
        log.check(&path, &metadata).unwrap();
        assert!(log.check(&path, &HashMap::new()).is_err());
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(&path, changed).unwrap();
            assert!(log.check(&path, &metadata).is_err() || whole[at] == b' ', "byte {at}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
