//! The meta device: shapes and bytes, no numbers. A dry run executes the very same engine code on it, so its meter
//! shows what a real device's meter will show.

use crate::device::{Backend, Buffer, Device};
use crate::kernel::Launch;
use crate::{Error, Result};

#[derive(Debug)]
struct Meta;

/// A new meta device with its own meter.
pub fn meta() -> Device {
    Device::new(Meta)
}

// SAFETY: it has no memory, and its kernels touch none.
unsafe impl Backend for Meta {
    fn name(&self) -> String {
        "meta".into()
    }
    fn computes(&self) -> bool {
        false
    }
    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Ok(Buffer::nowhere(bytes))
    }
    fn release(&self, _: Buffer) {}
    fn upload(&self, _: &mut Buffer, _: usize, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn download(&self, _: &Buffer, _: usize, _: &mut [u8]) -> Result<()> {
        Err(Error::NoNumbers { what: "reading a tensor".into() })
    }
    fn run(&self, _: &Launch<'_>) -> Result<()> {
        Ok(())
    }
}
