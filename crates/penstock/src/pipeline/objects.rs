//! The objects of a load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::store::Object;

/// A checkpoint's objects, each opened by the first reader that needs it.
pub(super) struct Objects {
    checkpoint: Arc<Checkpoint>,
    open: Vec<OnceLock<Result<Arc<dyn Object>>>>,
    avoid_direct: AtomicBool,
}

impl Objects {
    pub(super) fn of(checkpoint: Arc<Checkpoint>) -> Self {
        let open = checkpoint.objects().iter().map(|_| OnceLock::new()).collect();
        Self { checkpoint, open, avoid_direct: AtomicBool::new(false) }
    }

    /// Says that direct reads gain nothing, of objects that are opened from now on.
    pub(super) fn avoid_direct(&self) {
        self.avoid_direct.store(true, Ordering::Relaxed);
    }

    /// The object with that index, which is the version whose header was read.
    pub(super) fn get(&self, index: u32) -> Result<&Arc<dyn Object>> {
        let index = index as usize;
        let opened = self.open[index].get_or_init(|| {
            let object = self.checkpoint.open_object(index)?;
            if self.avoid_direct.load(Ordering::Relaxed) {
                object.avoid_direct();
            }
            Ok(object)
        });
        opened.as_ref().map_err(Clone::clone)
    }

    /// Fails if an object that was read from is no longer the version that was opened.
    pub(super) fn verify_unchanged(&self) -> Result<()> {
        self.open
            .iter()
            .filter_map(|open| open.get()?.as_ref().ok())
            .try_for_each(|object| object.verify_unchanged())
    }

    /// Has reads that wait for the storage end now.
    pub(super) fn interrupt(&self) {
        self.open.iter().filter_map(|open| open.get()?.as_ref().ok()).for_each(|object| object.interrupt());
    }

    /// What reading them came upon; several objects may have the same to say.
    pub(super) fn remarks(&self) -> Vec<String> {
        self.open
            .iter()
            .filter_map(|open| open.get()?.as_ref().ok())
            .flat_map(|object| object.remarks())
            .collect()
    }

    /// Closes all of them.
    pub(super) fn close(&mut self) {
        self.open.iter_mut().for_each(|open| drop(open.take()));
    }

    pub(super) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }
}
