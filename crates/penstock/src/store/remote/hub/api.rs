//! What the hub's API tells: which commit a revision is, and what a commit holds.

use std::collections::HashSet;

use http::{HeaderMap, Method, header};
use object_store::Error as StoreError;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use url::Url;

use super::address::{HubAddress, is_commit};
use super::redirects::Sender;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::objects::failure::endless_listing;
use crate::store::remote::objects::fetch::{Counters, with_retries};
use crate::store::remote::objects::listing::{ListedObject, Listing};
use crate::store::remote::objects::object;
use crate::store::remote::objects::opening::told;
use crate::store::remote::provider::backend::Backend;
use crate::store::remote::request::outcome::Fault;
use crate::store::remote::request::retry::TransientError;
use crate::store::remote::settings::address::Provider;

/// Pages of one listing, at most: a server whose pages lead back to themselves must not keep us for ever.
const MOST_PAGES: usize = 10_000;

/// A way to ask the API.
pub(super) struct Api<'a> {
    pub(super) backend: &'a Backend,
    pub(super) sender: &'a Sender,
    pub(super) endpoint: &'a str,
    pub(super) context: &'a LoadContext,
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
}

#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    oid: String,
    #[serde(default)]
    size: u64,
    path: String,
    lfs: Option<Lfs>,
}

/// A file that is kept outside of the repository.
#[derive(Deserialize)]
struct Lfs {
    oid: String,
    size: Option<u64>,
}

impl Api<'_> {
    /// The commit that the revision is now.
    pub(super) fn commit(&self, address: &HubAddress) -> Result<String> {
        let (revision, _): (Revision, _) = self.get(&address.revision_url(self.endpoint))?;
        if is_commit(&revision.sha) {
            return Ok(revision.sha);
        }
        Err(nonsense("a revision without a commit"))
    }

    /// What is in the directory that `address` names.
    pub(super) fn tree(&self, address: &HubAddress, commit: &str, recursive: bool) -> Result<Listing> {
        let mut listing = Listing::default();
        let mut url = address.tree_url(self.endpoint, commit, recursive);
        let below = if address.path.is_empty() { String::new() } else { format!("{}/", address.path) };
        let mut asked = HashSet::new();
        for _ in 0..MOST_PAGES {
            if !asked.insert(url.clone()) {
                return Err(endless_listing(Provider::Hub.name()));
            }
            let (page, headers): (Vec<TreeEntry>, _) = self.get(&url)?;
            for entry in page {
                let Some(path) = entry.path.strip_prefix(&below).filter(|path| !path.is_empty()) else {
                    continue;
                };
                let path = path.to_owned();
                if entry.kind != "file" {
                    listing.directories.push(path);
                    continue;
                }
                let (tag, bytes) = match entry.lfs {
                    Some(lfs) => (lfs.oid, lfs.size.unwrap_or(entry.size)),
                    None => (entry.oid, entry.size),
                };
                let location = address.pinned(commit, &entry.path);
                listing.objects.push(ListedObject {
                    location,
                    path,
                    bytes,
                    identity: object::tagged(bytes, &tag),
                });
            }
            match next_page(&headers, &url) {
                Some(next) => url = next,
                None => return Ok(listing),
            }
        }
        Err(endless_listing(Provider::Hub.name()))
    }

    fn get<T: DeserializeOwned>(&self, url: &str) -> Result<(T, HeaderMap)> {
        let url: Url = url.parse().map_err(|_| {
            Error::new(ErrorKind::Config, "HF_ENDPOINT is no URL").remedy("Write HF_ENDPOINT=https://host")
        })?;
        let answered = self.context.run(with_retries(
            self.backend,
            self.context,
            false,
            &Counters::default(),
            async || {
                let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
                    (Fault::Store(StoreError::Generic { store: "hub", source: error }), false)
                };
                let answer = self
                    .sender
                    .send(&Method::GET, url.clone(), None)
                    .await
                    .map_err(|error| failed(Box::new(error)))?;
                if !answer.status.is_success() {
                    return Err(failed(Box::from("refused")));
                }
                let body = answer.body.bytes().await.map_err(|error| failed(Box::new(error)))?;
                // A login page of the network in between, or an answer that was cut off: it may be better next time.
                let parsed = serde_json::from_slice(&body).map_err(|_| {
                    (Fault::TransientError(TransientError::new("an answer that is not the hub's")), false)
                })?;
                Ok((parsed, answer.headers))
            },
        ));
        answered.map_err(told)
    }
}

/// Where the listing goes on, of `Link: <…>; rel="next"`.
fn next_page(headers: &HeaderMap, url: &str) -> Option<String> {
    let links = headers.get_all(header::LINK).iter().filter_map(|value| value.to_str().ok());
    // Proxies write the header anew, some without the quotes.
    let is_next = |link: &&str| ["rel=\"next\"", "rel=next"].iter().any(|relation| link.contains(relation));
    let next = links.flat_map(|value| value.split(", ")).find(is_next)?;
    let target = next.split_once('<')?.1.split_once('>')?.0;
    Some(url.parse::<Url>().ok()?.join(target).ok()?.into())
}

fn nonsense(what: &str) -> Error {
    Error::new(ErrorKind::Storage, format!("the hub answered with {what}"))
        .remedy("Check that HF_ENDPOINT leads to a Hugging Face hub")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_followed_by_their_link() {
        let mut headers = HeaderMap::new();
        assert_eq!(next_page(&headers, "http://h/api"), None);
        headers.insert(
            "link",
            "<http://h/first>; rel=\"first\", </api/x?cursor=a%3D>; rel=\"next\"".parse().unwrap(),
        );
        assert_eq!(next_page(&headers, "http://h/api").as_deref(), Some("http://h/api/x?cursor=a%3D"));
        headers.insert("link", "<?cursor=b>; rel=next".parse().unwrap());
        assert_eq!(
            next_page(&headers, "http://h/api/x?cursor=a").as_deref(),
            Some("http://h/api/x?cursor=b")
        );
        headers.insert("link", "<no end; rel=\"next\"".parse().unwrap());
        assert_eq!(next_page(&headers, "http://h/api"), None);
    }
}
