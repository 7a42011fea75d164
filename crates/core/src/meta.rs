//! The meta device: shapes and bytes, no numbers. A dry run executes the very same engine code on it, so its meter
//! shows what a real device's meter will show.

use crate::device::{Backend, Buffer, Device};
use crate::kernel::Kernel;
use crate::{Error, Result};

#[derive(Debug)]
struct Meta;

/// A new meta device with its own meter.
pub fn meta() -> Device {
    Device::new(Meta)
}

impl Backend for Meta {
    fn name(&self) -> String {
        "meta".into()
    }
    fn computes(&self) -> bool {
        false
    }
    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Ok(Buffer { address: 0, bytes })
    }
    fn release(&self, _: Buffer) {}
    fn upload(&self, _: &Buffer, _: usize, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn download(&self, _: &Buffer, _: usize, _: &mut [u8]) -> Result<()> {
        Err(Error::NoNumbers { what: "reading a tensor" })
    }
    fn run(&self, _: &Kernel<'_>) -> Result<()> {
        Ok(())
    }
}
