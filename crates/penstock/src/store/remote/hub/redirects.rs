//! Requests to the hub, and to where it sends them on.
//!
//! The hub answers a request for a large file with the signed URL of a content delivery network, and a request for a
//! repository that was renamed with its new name. Redirects are followed here rather than by the client, since the
//! answers on the way say which commit, version and size the file has. The token goes to the hub's own origin (scheme,
//! host and port) and to no other.

use http::header::{ACCEPT_ENCODING, AUTHORIZATION, ETAG, LOCATION, RANGE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use object_store::client::{HttpError, HttpErrorKind, HttpResponseBody};
use url::{Origin, Url};

use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::response_recorder::ResponseRecorder;
use crate::store::remote::http::transport;

/// Redirects that one request may take.
const MOST_HOPS: usize = 10;

/// Sends requests with the token where it belongs.
#[derive(Debug, Clone)]
pub(super) struct Sender {
    client: ClientKey,
    origin: Origin,
    authorization: Option<HeaderValue>,
}

/// An answer at the end of all redirects, and what was said on the way.
pub(super) struct Response {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: HttpResponseBody,
    /// Where it came from.
    pub(super) url: Url,
    /// The version of the file, as the hub names it: a digest of its content.
    pub(super) tag: Option<String>,
    /// The size of the file, if it is kept outside of the repository.
    pub(super) linked_size: Option<u64>,
}

impl Sender {
    /// A sender whose token is for `endpoint`.
    pub(super) fn new(client: ClientKey, endpoint: &Url, token: Option<&str>) -> Self {
        let authorization = token.and_then(|token| {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Self { client, origin: endpoint.origin(), authorization }
    }

    /// Sends a request without a body and follows where it leads.
    pub(super) async fn send(
        &self,
        method: &Method,
        url: Url,
        range: Option<&HeaderValue>,
    ) -> Result<Response, HttpError> {
        let client = self.client.client().map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let (mut url, mut tag, mut linked_size) = (url, None, None);
        for _ in 0..=MOST_HOPS {
            let mut request = reqwest::Request::new(method.clone(), url.clone());
            request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            if let Some(range) = range {
                request.headers_mut().insert(RANGE, range.clone());
            }
            let at_home = url.origin() == self.origin;
            if let Some(authorization) = self.authorization.as_ref().filter(|_| at_home) {
                request.headers_mut().insert(AUTHORIZATION, authorization.clone());
            }
            let host = url.host_str().unwrap_or_default().to_owned();
            let (status, headers, body) = transport::send(&self.client, &client, request, &host)
                .await
                .map_err(transport::http_error)?;
            if at_home {
                let text = |name: &str| headers.get(name)?.to_str().ok();
                tag = tag.or_else(|| text("x-linked-etag").and_then(bare));
                linked_size = linked_size.or_else(|| text("x-linked-size")?.parse().ok());
            }
            let next = headers.get(LOCATION).filter(|_| status.is_redirection());
            let Some(next) = next else {
                let own = || headers.get(ETAG)?.to_str().ok().and_then(bare);
                let tag = tag.or_else(own);
                return Ok(Response { status, headers, body, url, tag, linked_size });
            };
            let next = next.to_str().ok().and_then(|next| url.join(next).ok());
            url = next
                .filter(|next| matches!(next.scheme(), "http" | "https"))
                .ok_or_else(|| strange("a redirect to nowhere"))?;
            // A redirect is no refusal.
            ResponseRecorder::note(|seen| seen.refusal = None);
        }
        Err(strange("too many redirects"))
    }
}

/// A tag without its quotes and without the mark of a weak one: it is a digest, whoever weakened it on the way.
fn bare(tag: &str) -> Option<String> {
    let tag = tag.trim().trim_start_matches("W/").trim_matches('"');
    (!tag.is_empty()).then(|| tag.to_owned())
}

/// An answer that makes no sense.
pub(super) fn strange(what: &'static str) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(what))
}
