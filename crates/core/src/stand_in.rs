//! Stand-ins: what a tensor of another device is on the meta device.
//!
//! A tape of the meta device takes a tensor of any device, by its shape alone. A storage of the same bytes and
//! [`MemoryKind`](crate::MemoryKind) stands for the original's. The original holds it, so that it lives as long:
//! there is one per storage and meta device, whichever views of it enter, and on however many tapes.

use crate::device::{Storage, same_device};
use crate::{Device, Result, Tensor};
use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard};

/// The stand-ins of one storage, at most one on each meta device.
#[derive(Debug, Default)]
pub(crate) struct StandIns(Mutex<Vec<StandIn>>);

/// The original's hold on its stand-in.
#[derive(Debug)]
struct StandIn(Arc<Storage>);

impl Drop for StandIn {
    fn drop(&mut self) {
        self.0.device().count_stand_in(-1);
    }
}

impl StandIns {
    fn list(&self) -> MutexGuard<'_, Vec<StandIn>> {
        // The list is whole at every instruction; a poisoned lock is still usable.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The one of `original` on this device.
    fn on(&self, device: &Device, original: &Storage) -> Result<Arc<Storage>> {
        let mut list = self.list();
        if let Some(known) = list.iter().find(|s| s.0.device() == device) {
            return Ok(known.0.clone());
        }
        // Else a model would collect those of all its dry runs.
        list.retain(|s| !s.0.device().has_stand_ins_only());
        let storage = Arc::new(device.allocate_for(original)?);
        device.count_stand_in(1);
        list.push(StandIn(storage.clone()));
        Ok(storage)
    }

    /// The original is counted as another kind.
    pub fn follow_kind(&self, original: &Storage) {
        // Read under the lock: of two threads that change it, the last one's stays.
        let list = self.list();
        list.iter().for_each(|s| s.0.set_kind(original.kind()));
    }
}

impl Tensor {
    /// This tensor for a tape of `device`: itself where it is the device's, and on the meta device what stands for it.
    pub(crate) fn entering(&self, what: &'static str, device: &Device) -> Result<Cow<'_, Tensor>> {
        if device.computes() || self.device() == device {
            same_device(what, self.device(), device)?;
            return Ok(Cow::Borrowed(self));
        }
        let storage = self.storage().stand_ins().on(device, self.storage())?;
        Ok(Cow::Owned(self.in_storage(storage)))
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Tape, Tensor, meta};

    /// Each dry run may be on a new meta device: a model holds the last one's only.
    #[test]
    fn those_of_devices_that_are_gone_go() {
        let x = Tensor::full(&meta(), &[4], DType::F32, 0.0).unwrap();
        let kept = meta();
        for _ in 0..5 {
            Tape::new(&kept).leaf(&x).unwrap();
            Tape::new(&meta()).leaf(&x).unwrap();
        }
        assert_eq!(x.storage().stand_ins().list().len(), 2);
        assert_eq!(kept.meter().live(), 16);
    }
}
