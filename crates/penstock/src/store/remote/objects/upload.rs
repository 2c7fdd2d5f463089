//! An object written: whole, where nothing is of that name, or in parts. And taken away again.
//!
//! Every request is repeated as those of loads are. A request whose answer was lost may have done its work: what it left is
//! looked at before that is taken for someone else's.

use std::sync::Arc;

use bytes::Bytes;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{Error as StoreError, GetOptions, MultipartId, ObjectStoreExt, PutMode, PutOptions};

use super::fetch::{Counters, with_retries};
use super::opening::told;
use crate::error::{Code, Error, ErrorKind, Result};
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::provider::backend::Backend;
use crate::store::remote::request::outcome::Fault;
use crate::store::remote::settings::address::Provider;

/// What came of a request to make an object where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Created {
    Made,
    /// One of that name was there.
    WasThere,
}

/// Writes a small object where nothing is of that name: the store decides, in one step (`If-None-Match`, or Google's
/// generation 0).
pub(crate) fn create(
    backend: &Backend,
    path: &Path,
    bytes: &Bytes,
    context: &LoadContext,
) -> Result<Created> {
    let mut asked = 0;
    let created = work(backend, context, async || {
        asked += 1;
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match backend.store.put_opts(path, bytes.clone().into(), options).await {
            Ok(_) => Ok(Created::Made),
            Err(StoreError::AlreadyExists { .. } | StoreError::Precondition { .. }) => {
                // Of an earlier request of ours, whose answer was lost?
                let ours = asked > 1 && holds(backend, path, bytes).await?;
                Ok(if ours { Created::Made } else { Created::WasThere })
            }
            Err(error) => Err(error.into()),
        }
    });
    created.map_err(|error| for_writing(backend, error))
}

async fn holds(backend: &Backend, path: &Path, bytes: &Bytes) -> Result<bool, StoreError> {
    let there = backend.store.get_opts(path, GetOptions::default()).await?;
    Ok(there.meta.size == bytes.len() as u64 && there.bytes().await? == *bytes)
}

/// Writes an object whole, whatever was there.
pub(crate) fn put(backend: &Backend, path: &Path, bytes: &Bytes, context: &LoadContext) -> Result<()> {
    let put = work(backend, context, async || {
        backend.store.put(path, bytes.clone().into()).await.map(drop).map_err(Fault::from)
    });
    put.map_err(|error| for_writing(backend, error))
}

/// Takes an object away, if it is there.
pub(crate) fn delete(backend: &Backend, path: &Path, context: &LoadContext) -> Result<()> {
    let deleted = work(backend, context, async || match backend.store.delete(path).await {
        Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    });
    deleted.map_err(|error| for_writing(backend, error))
}

/// An upload in parts.
pub(crate) struct Upload {
    store: Arc<dyn MultipartStore>,
    id: MultipartId,
}

impl Upload {
    /// Begins one.
    pub(crate) fn begin(backend: &Backend, path: &Path, context: &LoadContext) -> Result<Self> {
        let Some(store) = backend.uploads.clone() else { return Err(not_writable(backend.provider)) };
        let id = work(backend, context, async || store.create_multipart(path).await.map_err(Fault::from))
            .map_err(|error| for_writing(backend, error))?;
        Ok(Self { store, id })
    }

    /// Sends the part with that number.
    pub(crate) fn part(
        &self,
        backend: &Backend,
        path: &Path,
        number: usize,
        bytes: &Bytes,
        context: &LoadContext,
    ) -> Result<PartId> {
        let sent = work(backend, context, async || {
            self.store.put_part(path, &self.id, number, bytes.clone().into()).await.map_err(gone)
        });
        sent.map_err(|error| for_writing(backend, error))
    }

    /// Makes one object of all parts. `bytes` is its size: where an answer was lost, the object says whether that was done.
    pub(crate) fn complete(
        &self,
        backend: &Backend,
        path: &Path,
        parts: &[PartId],
        bytes: u64,
        context: &LoadContext,
    ) -> Result<()> {
        let mut asked = 0;
        let completed = work(backend, context, async || {
            asked += 1;
            match self.store.complete_multipart(path, &self.id, parts.to_vec()).await {
                Ok(_) => Ok(()),
                Err(error @ StoreError::NotFound { .. }) if asked > 1 => {
                    let there = backend.store.head(path).await;
                    let is_done = there.is_ok_and(|there| there.size == bytes);
                    if is_done { Ok(()) } else { Err(gone(error)) }
                }
                Err(error) => Err(gone(error)),
            }
        });
        completed.map_err(|error| for_writing(backend, error))
    }

    /// Gives it up: the store forgets its parts.
    pub(crate) fn abort(&self, backend: &Backend, path: &Path, context: &LoadContext) -> Result<()> {
        work(backend, context, async || match self.store.abort_multipart(path, &self.id).await {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        })
    }
}

/// Does `attempt` until it succeeds or is given up, in the calling thread.
fn work<T>(
    backend: &Backend,
    context: &LoadContext,
    mut attempt: impl AsyncFnMut() -> Result<T, Fault>,
) -> Result<T> {
    let counters = Counters::default();
    let asked = with_retries(backend, context, true, &counters, async || {
        attempt().await.map_err(|fault| (fault, false))
    });
    context.run::<T>(asked).map_err(told)
}

/// What a store says of an upload that it does not know.
fn gone(error: StoreError) -> Fault {
    match error {
        StoreError::NotFound { .. } => Fault::Tell(
            Error::new(
                ErrorKind::Storage,
                "the store does not know this upload any more: someone aborted it",
            )
            .remedy("Save again; a lifecycle rule that aborts uploads should wait for days"),
        ),
        error => error.into(),
    }
}

/// Errors speak of loads; what is asked for here are other permissions.
fn for_writing(backend: &Backend, error: Error) -> Error {
    if error.kind() == ErrorKind::Changed {
        return Error::new(
            ErrorKind::NotFound,
            format!("{} has no such bucket or container", backend.provider.name()),
        )
        .remedy("Check its name, and make it before you save to it");
    }
    if error.kind() != ErrorKind::Access || error.error_code() != Code::AccessDenied {
        return error;
    }
    let remedy = match backend.provider {
        Provider::S3 => {
            "Check that these credentials may write here: s3:PutObject, s3:DeleteObject, s3:ListBucket and \
             s3:AbortMultipartUpload"
        }
        Provider::Gcs => "Give this identity the role Storage Object Admin on the bucket",
        _ => "Give this identity the role Storage Blob Data Contributor on the account or the container",
    };
    Error::new(ErrorKind::Access, error.cause().to_owned()).remedy(remedy)
}

/// The refusal of a place that can only be read.
pub(crate) fn not_writable(provider: Provider) -> Error {
    Error::new(ErrorKind::Config, format!("{} cannot be saved to", provider.name()))
        .remedy("Save to a directory of this machine, or to s3://, gs:// or az://")
}
