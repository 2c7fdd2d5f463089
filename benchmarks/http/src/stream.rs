//! What anyone would write with `object_store`: tasks that take a part, ask for it, and copy its chunks to its place.

use std::sync::Arc;

use futures_util::StreamExt;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{ClientOptions, GetOptions, GetRange, ObjectStore, ObjectStoreExt};

use crate::buffer::{Parts, measure};
use crate::{Failure, Wish};

pub fn run(wish: &Wish) -> Result<serde_json::Value, Failure> {
    let (root, key) = wish.url.rsplit_once('/').ok_or("no path")?;
    // Its usual total time of 30 s for a request says nothing of what it can do.
    let options = ClientOptions::new().with_allow_http(true).with_timeout_disabled();
    let store: Arc<dyn ObjectStore> =
        Arc::new(HttpBuilder::new().with_url(root).with_client_options(options).build()?);
    let path = Path::parse(key)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let size = runtime.block_on(store.head(&path))?.size;
    measure(wish, size, |parts| {
        // SAFETY: every task is joined below, before `measure` gets its parts back.
        let parts: &'static Parts<'static> = unsafe { std::mem::transmute(parts) };
        let tasks: Vec<_> = (0..wish.requests)
            .map(|_| {
                let (store, path) = (Arc::clone(&store), path.clone());
                runtime.spawn(async move { fetch(&*store, &path, parts).await })
            })
            .collect();
        let done: Vec<_> = tasks.into_iter().map(|task| runtime.block_on(task)).collect();
        done.into_iter().try_for_each(|done| done.map_err(Failure::from)?)
    })
}

async fn fetch(store: &dyn ObjectStore, path: &Path, parts: &Parts<'_>) -> Result<(), Failure> {
    while let Some((at, into)) = parts.take() {
        let range = Some(GetRange::Bounded(at..at + into.len() as u64));
        let mut body =
            store.get_opts(path, GetOptions { range, ..GetOptions::default() }).await?.into_stream();
        let mut filled = 0;
        while let Some(chunk) = body.next().await {
            let chunk = chunk?;
            into.get_mut(filled..filled + chunk.len())
                .ok_or("more than was asked for")?
                .copy_from_slice(&chunk);
            filled += chunk.len();
        }
        if filled != into.len() {
            return Err("less than was asked for".into());
        }
    }
    Ok(())
}
