//! The objects of a load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::queue::ReadKind;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::plan::Block;
use crate::store::{Object, Store};

/// A checkpoint's objects, each opened by the first reader that needs it.
pub(super) struct Objects {
    checkpoint: Arc<Checkpoint>,
    store: Arc<dyn Store>,
    open: Vec<OnceLock<Result<Arc<dyn Object>>>>,
    /// Those that could not tell what of them is cached, at least once.
    silent: Vec<AtomicBool>,
    avoid_direct: AtomicBool,
}

impl Objects {
    pub(super) fn of(checkpoint: Arc<Checkpoint>) -> Self {
        let open = checkpoint.objects().iter().map(|_| OnceLock::new()).collect();
        let silent = checkpoint.objects().iter().map(|_| AtomicBool::new(false)).collect();
        let store = checkpoint.store_for_load();
        Self { checkpoint, store, open, silent, avoid_direct: AtomicBool::new(false) }
    }

    /// Says that direct reads gain nothing, of objects that are opened from now on.
    pub(super) fn avoid_direct(&self) {
        self.avoid_direct.store(true, Ordering::Relaxed);
    }

    /// The object with that index, which is the version whose header was read.
    pub(super) fn get(&self, index: u32) -> Result<&Arc<dyn Object>> {
        let index = index as usize;
        let opened = self.open[index].get_or_init(|| {
            let object = self.checkpoint.open_object_in(&*self.store, index)?;
            if self.avoid_direct.load(Ordering::Relaxed) {
                object.avoid_direct();
            }
            Ok(object)
        });
        opened.as_ref().map_err(Clone::clone)
    }

    /// Whether the block is in the page cache, where its object can tell and can be opened.
    pub(super) fn is_cached(&self, block: &Block) -> Option<bool> {
        let object = self.get(block.object).ok()?;
        if object.pinned(&block.range).is_some() {
            return Some(true);
        }
        let cached = object.is_cached(&block.range);
        if cached.is_none() {
            self.silent[block.object as usize].store(true, Ordering::Relaxed);
        }
        cached
    }

    /// What [`Objects::is_cached`] said of a block that is now read as work of that kind, so that its object need not
    /// find out again.
    pub(super) fn was_cached(&self, block: &Block, kind: ReadKind) -> Option<bool> {
        match kind {
            ReadKind::Copy => Some(true),
            ReadKind::Fetch => (!self.silent[block.object as usize].load(Ordering::Relaxed)).then_some(false),
        }
    }

    /// Fails if an object that was read from is no longer the version that was opened.
    pub(super) fn verify_unchanged(&self) -> Result<()> {
        self.open
            .iter()
            .filter_map(|open| open.get()?.as_ref().ok())
            .try_for_each(|object| object.verify_unchanged())
    }

    /// The store that they are read from.
    pub(super) fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store)
    }

    /// What reading them came upon; several objects may have the same to say.
    pub(super) fn notes(&self) -> Vec<String> {
        self.open
            .iter()
            .filter_map(|open| open.get()?.as_ref().ok())
            .flat_map(|object| object.notes())
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
