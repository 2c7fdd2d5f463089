//! What a request that failed came to: for whoever sends requests, and for whoever asked for them to be sent.

use object_store::Error as StoreError;

use super::retry::TransientError;
use crate::error::Error;

/// Why something was not had.
pub(crate) enum Stop {
    /// The bucket is in this region.
    Region(String),
    /// The object has no bytes.
    Empty,
    /// For the caller.
    Tell(Error),
}

/// Why a single request failed.
pub(crate) enum Fault {
    Store(StoreError),
    /// The answer was not what was asked for, or ended early.
    TransientError(TransientError),
    /// Asking again would bring the same.
    Tell(Error),
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
