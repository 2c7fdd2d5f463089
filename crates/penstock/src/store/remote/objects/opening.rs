//! Opening an object: one request that brings its size, its version and its first bytes.

use std::sync::Arc;

use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta};

use super::failure::changed;
use super::fetch::{Counters, named, once, with_retries};
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::provider::backend::Backend;
use crate::store::remote::provider::connect::in_region;
use crate::store::remote::request::outcome::{Fault, Stop};
use crate::store::remote::settings::address::Address;

/// Bytes of the request that opens an object: the header of nearly every shard is shorter, and on a fast network the
/// bytes cost less than another round trip.
const OPENING_BYTES: u64 = 512 << 10;

/// What to tell of a stop that nothing can be done about.
pub(crate) fn told(stop: Stop) -> Error {
    match stop {
        Stop::Tell(error) => error,
        Stop::Region(region) => Error::new(ErrorKind::Storage, format!("the bucket is in region {region}"))
            .remedy(format!("Set AWS_REGION={region}")),
        Stop::Empty => changed(),
    }
}

/// Does `work`; where the bucket turns out to be in another region, again there. Returns the backend that served.
pub(crate) fn in_its_region<T>(
    address: &Address,
    backend: Arc<Backend>,
    context: &LoadContext,
    work: impl Fn(&Backend) -> Result<T, Stop>,
) -> (Arc<Backend>, Result<T>) {
    match work(&backend) {
        Ok(done) => (backend, Ok(done)),
        Err(Stop::Region(region)) => match in_region(&backend, address, region, context) {
            Ok(backend) => {
                let done = work(&backend).map_err(told);
                (backend, done)
            }
            Err(error) => (backend, Err(error)),
        },
        Err(stop) => (backend, Err(told(stop))),
    }
}

/// What the object is, and its first bytes.
pub(crate) fn open(
    backend: &Backend,
    path: &Path,
    context: &LoadContext,
) -> Result<(ObjectMeta, Vec<u8>), Stop> {
    let opened = context.run(with_retries(backend, context, false, &Counters::default(), async || {
        // Anew for every attempt: until it is complete, no version is pinned.
        let (mut head, mut at) = (Vec::new(), 0);
        let put = |_, bytes: &[u8]| head.extend_from_slice(bytes);
        let meta = once(backend, path, 0..OPENING_BYTES, None, &mut at, put).await;
        meta.map(|meta| (meta, head)).map_err(|fault| (fault, false))
    }));
    match opened {
        // No range of an empty object can be had.
        Err(Stop::Empty) => {
            inspect(backend, path, context).map(|meta| (meta, Vec::new())).map_err(Stop::Tell)
        }
        opened => opened,
    }
}

/// What an object without bytes is.
///
/// Not asked with HEAD: a URL that is signed for reading is not signed for that, and not everyone who may read may ask.
pub(crate) fn inspect(backend: &Backend, path: &Path, context: &LoadContext) -> Result<ObjectMeta> {
    let answer = context.run(with_retries(backend, context, false, &Counters::default(), async || {
        match backend.store.get_opts(path, GetOptions::default()).await {
            Ok(answer) => Ok(named(answer.meta)),
            Err(error) => Err((Fault::Store(error), false)),
        }
    }));
    answer.map_err(told)
}
