//! One file of the hub as an HTTP object like any other, for `object_store`.
//!
//! The first request asks the hub, which sends on to a signed URL; that URL serves the following ones, so that a load of
//! a thousand ranges asks the hub once. When it has expired, the hub is asked again, and must name the same version.
//! What comes out carries the hub's own name of the version as its tag, whoever delivers the bytes.

use async_trait::async_trait;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_MATCH, LAST_MODIFIED, RANGE};
use http::{HeaderValue, Method, StatusCode};
use object_store::ClientOptions;
use object_store::client::{HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService};
use std::sync::Arc;
use tokio::sync::{Mutex, MutexGuard};
use url::Url;

use super::redirects::{Response, Sender, strange};
use crate::store::remote::http::response_recorder::ResponseRecorder;
use crate::store::remote::http::whole;

/// Makes `object_store` ask for one file of the hub.
#[derive(Debug, Clone)]
pub(super) struct FileConnector(Arc<FileService>);

impl FileConnector {
    pub(super) fn new(sender: Sender) -> Self {
        Self(Arc::new(FileService { sender, delivery: Mutex::default() }))
    }
}

impl HttpConnector for FileConnector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Shared(Arc::clone(&self.0))))
    }
}

#[derive(Debug)]
struct Shared(Arc<FileService>);

#[async_trait]
impl HttpService for Shared {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        self.0.call(&request).await
    }
}

/// Where the bytes are to be had, until that expires.
#[derive(Debug, Clone)]
struct Delivery {
    url: Url,
    tag: Option<String>,
}

#[derive(Debug)]
struct FileService {
    sender: Sender,
    delivery: Mutex<Option<Delivery>>,
}

impl FileService {
    async fn call(&self, request: &HttpRequest) -> Result<HttpResponse, HttpError> {
        let asked: Url = request.uri().to_string().parse().map_err(|_| strange("no URL"))?;
        let (method, range) = (request.method(), request.headers().get(RANGE));
        let (answer, tag) = match self.by_delivery(method, range).await? {
            Some(answered) => answered,
            None => self.by_hub(method, &asked, range).await?,
        };
        let wanted = request.headers().get(IF_MATCH).and_then(|tag| tag.to_str().ok());
        if answer.status.is_success()
            && let (Some(wanted), Some(tag)) = (wanted, &tag)
            && wanted.trim_matches('"') != tag
        {
            let host = answer.url.host_str().unwrap_or_default();
            return Ok(whole::refusal(StatusCode::PRECONDITION_FAILED, host));
        }
        let (total, linked_size) = (total(&answer), answer.linked_size);
        if answer.status.is_success()
            && let (Some(total), Some(linked)) = (total, linked_size)
            && total != linked
        {
            return Err(strange("the delivery network has another size than the hub"));
        }
        finish(answer, tag, range).await
    }

    /// Asks where the bytes were last time; nothing where that is not known or not valid any more.
    async fn by_delivery(
        &self,
        method: &Method,
        range: Option<&HeaderValue>,
    ) -> Result<Option<(Response, Option<String>)>, HttpError> {
        let Some(known) = self.delivery.lock().await.clone() else { return Ok(None) };
        let answer = self.sender.send(method, known.url.clone(), range).await?;
        if !matches!(answer.status.as_u16(), 400 | 401 | 403 | 404 | 410) {
            return Ok(Some((answer, known.tag)));
        }
        let mut delivery = self.delivery.lock().await;
        if delivery.as_ref().is_some_and(|now| now.url == known.url) {
            *delivery = None;
        }
        ResponseRecorder::note(|seen| seen.refusal = None);
        Ok(None)
    }

    /// Asks the hub. One at a time: the others wait to hear where it sends.
    async fn by_hub(
        &self,
        method: &Method,
        asked: &Url,
        range: Option<&HeaderValue>,
    ) -> Result<(Response, Option<String>), HttpError> {
        let mut delivery: MutexGuard<'_, Option<Delivery>> = self.delivery.lock().await;
        let from = delivery.as_ref().map_or_else(|| asked.clone(), |known| known.url.clone());
        let known = delivery.as_ref().and_then(|known| known.tag.clone());
        let answer = self.sender.send(method, from, range).await?;
        let tag = known.or_else(|| answer.tag.clone());
        if answer.status.is_success() {
            *delivery = Some(Delivery { url: answer.url.clone(), tag: tag.clone() });
        }
        Ok((answer, tag))
    }
}

/// The answer as one of the file itself.
async fn finish(
    answer: Response,
    tag: Option<String>,
    range: Option<&HeaderValue>,
) -> Result<HttpResponse, HttpError> {
    let Response { status, mut headers, body, url, .. } = answer;
    // Mirrors of a delivery network have dates of their own.
    headers.remove(LAST_MODIFIED);
    headers.remove(ETAG);
    if let Some(tag) = tag.and_then(|tag| HeaderValue::from_str(&format!("\"{tag}\"")).ok()) {
        headers.insert(ETAG, tag);
    }
    // The hub keeps no large files that are not on a delivery network, which answers to ranges.
    whole::part(status, headers, body, range, url.host_str().unwrap_or_default()).await
}

/// The size of the whole file, as the answer says it.
fn total(answer: &Response) -> Option<u64> {
    let text = |name| answer.headers.get(name)?.to_str().ok();
    match answer.status {
        StatusCode::PARTIAL_CONTENT => text(CONTENT_RANGE)?.rsplit_once('/')?.1.parse().ok(),
        _ => text(CONTENT_LENGTH)?.parse().ok(),
    }
}
