//! Text as bytes, and windows of it.

use crate::{Error, Result};
use retape_core::kernel::RandomStream;
use retape_core::{Device, Tensor};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// Number of byte tokens.
pub const VOCAB: usize = 256;

/// The tokens of a text: its bytes.
pub fn encode(text: &str) -> Vec<i64> {
    text.bytes().map(i64::from).collect()
}

/// The text of tokens; what isn't UTF-8 shows as U+FFFD. A token that is no byte is an error.
pub fn decode(tokens: &[i64]) -> Result<String> {
    let byte = |(position, &token)| u8::try_from(token).map_err(|_| Error::NotAByte { token, position });
    let bytes = tokens.iter().enumerate().map(byte).collect::<Result<Vec<u8>>>()?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A text, read as bytes. Clones share it.
#[derive(Debug, Clone)]
pub struct ByteText {
    name: String,
    bytes: Arc<Cow<'static, [u8]>>,
}

impl ByteText {
    /// The built-in text: the first megabyte of Moby Dick (public domain, CC0; see `data/NOTICE`).
    pub fn moby_dick() -> ByteText {
        let bytes: &[u8] = include_bytes!("../data/moby-dick-1m.txt");
        ByteText { name: "Moby Dick".into(), bytes: Arc::new(Cow::Borrowed(bytes)) }
    }

    /// A file's text. Errors where it can't be read or isn't UTF-8.
    pub fn from_file(path: impl AsRef<Path>) -> Result<ByteText> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| Error::File { action: "read", path: path.into(), source })?;
        if let Err(error) = std::str::from_utf8(&bytes) {
            return Err(Error::NotUtf8 { path: path.into(), offset: error.valid_up_to() });
        }
        Ok(ByteText { name: path.display().to_string(), bytes: Arc::new(Cow::Owned(bytes)) })
    }

    /// A text in memory; the name is for messages.
    pub fn from_text(name: impl Into<String>, text: impl Into<String>) -> ByteText {
        ByteText { name: name.into(), bytes: Arc::new(Cow::Owned(text.into().into_bytes())) }
    }

    /// The file, or what the text was called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Batches of `batch` windows of `seq` tokens. Errors where the text hasn't `seq + 1` bytes, or `seq` or `batch` is
    /// 0.
    pub fn batches(&self, seq: usize, batch: usize, seed: u64) -> Result<Batches> {
        if seq == 0 || batch == 0 {
            let reason = format!("{batch} windows of {seq} tokens asked for; both must be at least 1");
            return Err(Error::Input { layer: "batches", reason });
        }
        if self.bytes.len() <= seq {
            return Err(Error::TextTooShort { name: self.name.clone(), bytes: self.bytes.len(), seq });
        }
        Ok(Batches { text: self.clone(), seq, batch, seed })
    }
}

/// Windows of a text with their next tokens, in batches. A batch is a pure function of (text, seed, step): a run can
/// stop and go on anywhere.
#[derive(Debug, Clone)]
pub struct Batches {
    text: ByteText,
    seq: usize,
    batch: usize,
    seed: u64,
}

/// Sets the windows' random numbers apart from those of parameters and dropout with the same seed.
const WINDOWS: u64 = 0x7769_6e64_6f77_7321;

impl Batches {
    /// Batch `step` of the training stream: each window starts anywhere with the same probability, drawn by Philox
    /// from 64 bits keyed by (seed, step, row).
    pub fn batch(&self, step: u64) -> Batch {
        let starts = (self.text.bytes.len() - self.seq) as u128;
        let stream = RandomStream { seed: self.seed ^ WINDOWS, counter: step };
        self.windows((0..self.batch as u64).map(|row| {
            let words = stream.block(row);
            let word = (words[1] as u128) << 32 | words[0] as u128;
            ((word * starts) >> 64) as usize
        }))
    }

    /// Batch `index` of the text from its start to its end, windows side by side, for evaluation; `None` past the last
    /// window. The last batch may have fewer windows.
    pub fn consecutive(&self, index: usize) -> Option<Batch> {
        let windows = (self.text.bytes.len() - 1) / self.seq;
        let first = index.checked_mul(self.batch).filter(|&first| first < windows)?;
        Some(self.windows((first..windows.min(first + self.batch)).map(|window| window * self.seq)))
    }

    fn windows(&self, starts: impl Iterator<Item = usize>) -> Batch {
        let mut batch = Batch { seq: self.seq, tokens: Vec::new(), targets: Vec::new() };
        for start in starts {
            let window = &self.text.bytes[start..=start + self.seq];
            batch.tokens.extend(window[..self.seq].iter().map(|&b| i64::from(b)));
            batch.targets.extend(window[1..].iter().map(|&b| i64::from(b)));
        }
        batch
    }
}

/// Windows and their targets: `targets[i]` follows `tokens[i]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Tokens per window.
    pub seq: usize,
    /// Windows one after the other.
    pub tokens: Vec<i64>,
    /// The token after each.
    pub targets: Vec<i64>,
}

impl Batch {
    /// Tokens and targets on a device, each i64 `[windows, seq]`.
    pub fn tensors(&self, device: &Device) -> Result<(Tensor, Tensor)> {
        let shape = [self.tokens.len() / self.seq, self.seq];
        Ok((Tensor::from_slice(device, &shape, &self.tokens)?, Tensor::from_slice(device, &shape, &self.targets)?))
    }
}
