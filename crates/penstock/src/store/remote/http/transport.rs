//! How requests travel: one HTTP client for object stores, token servers and AWS's credential services alike.
//!
//! TLS is rustls with aws-lc, which takes a quarter less time than ring to decrypt what comes, and like it builds with
//! nothing but a C compiler. Only HTTP/1.1 is spoken: with HTTP/2 all requests of a client would share one
//! connection, and its throughput. Nothing is decompressed: what is asked for is bytes at offsets.
//!
//! There is no limit on how long a request takes, only on how long nothing comes. Nothing is tried again here: `retry`
//! decides that, and sees every failure through the [`ResponseRecorder`].

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use chrono::DateTime;
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderName, LAST_MODIFIED, RANGE};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::BodyExt;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use reqwest::redirect::Policy;

use super::client_key::{ClientKey, is_of_metadata};
use super::connections::{self, ConnectionPool};
use super::dns::Resolver;
use super::response_recorder::{Lost, MAX_ERROR_BODY, Refusal, ResponseRecorder};
use super::whole;
use crate::error::{Error, ErrorKind, Result};

/// How long the body of a refusal is waited for.
const ERROR_BODY: Duration = Duration::from_secs(5);

/// What is said of a server that answers to a TLS greeting with something else.
const NO_TLS: &str = "the server does not speak TLS";

/// What the HTTP client says of proxies that a tunnel is asked of.
const PROXY_WANTS_A_PASSWORD: &str = "tunnel error: proxy authorization required";
const PROXY_REFUSES: &str = "tunnel error: unsuccessful";

/// The most that is said of a failure.
const MAX_WORDS: usize = 200;

impl ClientKey {
    /// The client of the runtime that drives the task.
    pub(crate) fn client(&self) -> Result<reqwest::Client> {
        connections::client(self, || self.make())
    }

    /// The settings of TLS.
    pub(crate) fn tls(&self) -> Result<rustls::ClientConfig> {
        ConnectionPool::global().tls(&self.bundle)
    }

    fn make(&self) -> Result<reqwest::Client> {
        self.proxies
            .apply(reqwest::Client::builder())?
            .tls_backend_preconfigured(self.tls()?)
            .http1_only()
            .user_agent(concat!("penstock/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(self.policy.connect)
            .read_timeout(self.policy.idle)
            .tcp_nodelay(true)
            .dns_resolver(Arc::new(Resolver))
            .redirect(if self.follow { Policy::limited(10) } else { Policy::none() })
            .referer(false)
            .build()
            .map_err(|error| {
                let cause = causes(&error).last().map_or_else(|| error.to_string(), ToString::to_string);
                Error::new(ErrorKind::Config, format!("the HTTP client could not be set up: {cause}"))
                    .remedy("Check the certificates that are to be trusted (SSL_CERT_FILE)")
            })
    }
}

/// Makes `object_store` send its requests through this module.
#[derive(Debug, Clone)]
pub(crate) struct Connector(pub(crate) ClientKey);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Service(self.0.clone())))
    }
}

/// Sends a request with the client of the context that it is made in, and writes down what comes of it.
#[derive(Debug)]
struct Service(ClientKey);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut parts, body) = request.into_parts();
        // Who says nothing about it leaves it to the server.
        parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let range = parts.headers.get(RANGE).cloned();
        if is_page(&parts.uri) && !ResponseRecorder::is_new_page(&parts.uri) {
            return Err(HttpError::new(HttpErrorKind::Unknown, std::io::Error::other("a page seen before")));
        }
        let host = parts.uri.host().unwrap_or_default().to_owned();
        let key = self.0.for_metadata(is_of_metadata(&host, &parts.headers));
        let client = key.client().map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let url = parts.uri.to_string().parse().map_err(|error: url::ParseError| {
            HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(format!("not a URL: {error}")))
        })?;
        // A user and a password in the URL become a header here, as clients of HTTP do.
        let mut request = client.request::<url::Url>(parts.method, url).headers(parts.headers);
        // One piece, as all that is uploaded here, is not copied for it.
        let bytes = match body.as_bytes() {
            Some(bytes) => bytes.clone(),
            None => body.collect().await?.to_bytes(),
        };
        if !bytes.is_empty() {
            request = request.body(bytes);
        }
        let request = request.build().map_err(http_error)?;
        let (status, headers, body) = send(&self.0, &client, request, &host).await.map_err(http_error)?;
        let mut response = whole::part(status, headers, body, range.as_ref(), &host).await?;
        let (status, headers) = (response.status(), std::mem::take(response.headers_mut()));
        *response.headers_mut() = match status {
            StatusCode::PARTIAL_CONTENT => with_length(with_version(headers))?,
            status if status.is_success() => with_version(headers),
            _ => headers,
        };
        Ok(response)
    }
}

/// Whether a request is for a page of a listing, of S3 and Google or of Azure.
fn is_page(uri: &http::Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|part| part == "list-type=2" || part == "comp=list"))
}

/// Sends a request; a refusal's body is read, so that the recorder knows what it says.
pub(crate) async fn send(
    key: &ClientKey,
    client: &reqwest::Client,
    request: reqwest::Request,
    host: &str,
) -> Result<(StatusCode, HeaderMap, HttpResponseBody), reqwest::Error> {
    let of_metadata = is_of_metadata(host, request.headers());
    let asked = server(request.url());
    let response = match client.execute(request).await {
        Ok(response) => response,
        Err(error) => {
            note_failure(key, &error, &asked, of_metadata);
            return Err(error.without_url());
        }
    };
    // Whoever it was sent on to.
    let host = server(response.url());
    let (mut parts, body) = http::Response::<reqwest::Body>::from(response).into_parts();
    if parts.status.is_success() {
        without_illegible(&mut parts.headers);
        let key = key.clone();
        let body = body.map_err(move |error| {
            note_failure(&key, &error, &host, of_metadata);
            http_error(error.without_url())
        });
        return Ok((parts.status, parts.headers, HttpResponseBody::new(body)));
    }
    let mut text = Vec::new();
    let mut body = std::pin::pin!(body);
    let reading = async {
        while let Some(Ok(frame)) = body.as_mut().frame().await {
            text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            if text.len() > MAX_ERROR_BODY {
                break;
            }
        }
    };
    // What came says enough, and the status was there before.
    let _ = tokio::time::timeout(ERROR_BODY, reading).await;
    let refusal = Refusal { of_metadata, ..Refusal::of(parts.status, &host, &parts.headers, &text) };
    ResponseRecorder::note(|seen| seen.refusal = Some(refusal));
    Ok((parts.status, parts.headers, text.into()))
}

/// Whom a URL leads to, for errors: the host, with the scheme and the port where they are not those of HTTPS.
fn server(url: &url::Url) -> String {
    let host = url.host_str().unwrap_or_default();
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    let scheme = if url.scheme() == "https" { "" } else { "http://" };
    format!("{scheme}{host}{port}")
}

/// Writes down a failure without an answer, in the words of whoever noticed it first, which name no URL.
fn note_failure(key: &ClientKey, error: &reqwest::Error, host: &str, of_metadata: bool) {
    let causes: Vec<_> = causes(error).collect();
    let says = |words: &str| causes.iter().any(|cause| cause.to_string().contains(words));
    if says(PROXY_WANTS_A_PASSWORD) {
        let refusal = Refusal { status: 407, host: host.to_owned(), ..Refusal::default() };
        return ResponseRecorder::note(|seen| seen.refusal = Some(refusal));
    }
    let tls = causes.iter().find_map(|cause| cause.downcast_ref::<rustls::Error>());
    // What came in answer to a TLS greeting was something else.
    let no_tls =
        matches!(tls, Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)));
    let leads_nowhere = error.is_redirect() || error.is_builder();
    // Where a tunnel or a greeting failed, the proxy was reached.
    let tunnel = says("tunnel error") && !says("underlying connection");
    let proxy = error.url().filter(|_| error.is_connect() && !tunnel && tls.is_none());
    let place = match proxy.and_then(|url| key.proxies.for_url(url.as_str())) {
        Some(proxy) => format!("the proxy {proxy} for {host}"),
        None => host.to_owned(),
    };
    let why = match causes.last() {
        _ if no_tls => format!(": {NO_TLS}"),
        Some(cause) if cause.to_string() == PROXY_REFUSES => ": the proxy does not connect to it".into(),
        // A certificate that is refused is shown in full, as bytes, after what is wrong with it.
        Some(cause) => format!(": {}", cause.to_string().chars().take(MAX_WORDS).collect::<String>()),
        None => String::new(),
    };
    let what = match (error.is_timeout(), error.is_connect()) {
        (true, true) => format!("no connection to {place} in time"),
        (true, false) => format!("nothing came from {host} in time"),
        (false, true) => format!("no connection to {place}{why}"),
        (false, false) if leads_nowhere => format!("the redirect cannot be followed{why}"),
        (false, false) => format!("the connection was lost{why}"),
    };
    // Where the same would happen again: a certificate that is not trusted stays so.
    let in_vain = if no_tls {
        Some("Write http:// in the endpoint if it has no TLS, and check the port")
    } else if says("CaUsedAsEndEntity") {
        Some(
            "Check the endpoint's certificate: one that signs itself must not say that it is an authority's (make it with \
             `openssl req -x509 -addext basicConstraints=critical,CA:FALSE`), and goes to AWS_CA_BUNDLE or SSL_CERT_FILE",
        )
    } else if tls.is_some() {
        Some("Check the endpoint's certificate; a private authority's goes to AWS_CA_BUNDLE or SSL_CERT_FILE")
    } else {
        leads_nowhere.then_some(
            "Check where the server redirects to (curl -sIL URL): only http:// and https:// are followed, 10 times",
        )
    };
    // A name without an address, an address where nothing listens, or a proxy that leads nowhere. Metadata services answer
    // immediately or are not there.
    let is_nobody = |cause: &&(dyn std::error::Error + 'static)| {
        use std::io::ErrorKind as Io;
        let kind = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        matches!(kind, Some(Io::ConnectionRefused | Io::NetworkUnreachable | Io::HostUnreachable))
            || matches!(&*cause.to_string(), "dns error" | PROXY_REFUSES)
    };
    // A metadata service that takes a connection and says nothing is none, either.
    let unreachable = of_metadata && (error.is_connect() || error.is_timeout())
        || error.is_connect() && causes.iter().any(is_nobody);
    let lost = Lost { what, in_vain, unreachable, timed_out: error.is_timeout(), of_metadata };
    ResponseRecorder::note(|seen| seen.transport = Some(lost));
}

/// Takes away what is not text to `object_store`, which would refuse the answer for it: names of files that are written
/// in their own alphabet, for whoever saves them.
fn without_illegible(headers: &mut HeaderMap) {
    let illegible =
        |(name, value): (&HeaderName, &HeaderValue)| value.to_str().is_err().then(|| name.clone());
    for name in headers.iter().filter_map(illegible).collect::<Vec<_>>() {
        headers.remove(name);
    }
}

/// Tells the date and the tag of an object's version as `object_store` wants them. It would refuse the answer for a date
/// that is missing or in another form, as the two older ones of HTTP, though nothing hangs on it: the epoch and an empty
/// tag stand for none.
fn with_version(mut headers: HeaderMap) -> HeaderMap {
    let told = headers.get(LAST_MODIFIED).and_then(|date| date.to_str().ok()).unwrap_or_default();
    if DateTime::parse_from_rfc2822(told).is_err() {
        let date = httpdate::parse_http_date(told.trim()).unwrap_or(SystemTime::UNIX_EPOCH);
        if let Ok(date) = HeaderValue::try_from(httpdate::fmt_http_date(date)) {
            headers.insert(LAST_MODIFIED, date);
        }
    }
    headers.entry(ETAG).or_insert(HeaderValue::from_static("\"\""));
    headers
}

/// Tells the length of a part of an object that came without one: in chunks, or until the connection ends. Its range says
/// it; whether so many bytes come is seen where they are counted.
///
/// # Errors
/// Where a length is told that is not the range's: nothing of such a body is what was asked for.
fn with_length(mut headers: HeaderMap) -> Result<HeaderMap, HttpError> {
    let range = headers.get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).unwrap_or_default();
    let ends = range.strip_prefix("bytes ").and_then(|range| range.split('/').next()?.split_once('-'));
    let length = ends.and_then(|(start, end)| {
        let (start, end): (u64, u64) = (start.trim().parse().ok()?, end.trim().parse().ok()?);
        end.checked_add(1)?.checked_sub(start).filter(|length| *length > 0)
    });
    let Some(length) = length else { return Ok(headers) };
    let told = headers.get(CONTENT_LENGTH).and_then(|told| told.to_str().ok()?.trim().parse::<u64>().ok());
    if told.is_some_and(|told| told != length) {
        let cause = std::io::Error::other("a body of another length than its range");
        return Err(HttpError::new(HttpErrorKind::Unknown, cause));
    }
    headers.entry(CONTENT_LENGTH).or_insert_with(|| length.into());
    Ok(headers)
}

pub(crate) fn http_error(error: reqwest::Error) -> HttpError {
    let kind = if error.is_timeout() {
        HttpErrorKind::Timeout
    } else if error.is_connect() {
        HttpErrorKind::Connect
    } else {
        HttpErrorKind::Interrupted
    };
    HttpError::new(kind, error)
}

/// What an error was caused by, outermost first.
fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |error| {
        let error: &(dyn std::error::Error + 'static) = *error;
        match error.downcast_ref::<std::io::Error>() {
            // An I/O error stands for the one inside of it, and says that its cause is that one's.
            Some(io) => io.get_ref().map(|inner| inner as &(dyn std::error::Error + 'static)),
            None => error.source(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_a_date_and_a_tag_whatever_the_server_says() {
        let date = "Sat, 21 Nov 2026 06:47:41 GMT";
        let epoch = "Thu, 01 Jan 1970 00:00:00 GMT";
        for (told, expected) in [
            (Some(date), date),
            (Some("Sat, 21 Nov 2026 06:47:41 +0000"), "Sat, 21 Nov 2026 06:47:41 +0000"),
            // The two older forms of HTTP.
            (Some("Saturday, 21-Nov-26 06:47:41 GMT"), date),
            (Some("Sat Nov 21 06:47:41 2026"), date),
            (Some("2026-11-21T06:47:41Z"), epoch),
            // Of another day of the week.
            (Some("Fri, 21 Nov 2026 06:47:41 GMT"), epoch),
            (Some("0"), epoch),
            (None, epoch),
        ] {
            let mut headers = HeaderMap::new();
            headers.extend(told.map(|told| (LAST_MODIFIED, told.parse().unwrap())));
            let headers = with_version(headers);
            assert_eq!(headers[LAST_MODIFIED], expected, "{told:?}");
            assert_eq!(headers[ETAG], "\"\"");
        }
    }

    #[test]
    fn headers_that_are_no_text_are_dropped() {
        let mut headers = HeaderMap::new();
        let name = HeaderValue::from_bytes(b"inline; filename=\xfc.bin").unwrap();
        headers.insert(http::header::CONTENT_DISPOSITION, name);
        headers.insert(ETAG, HeaderValue::from_static("\"1\""));
        without_illegible(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), [ETAG]);
    }

    #[test]
    fn the_length_of_a_part_is_told_by_its_range() {
        let length = |range: &str, length: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, range.parse().unwrap());
            headers.extend(length.map(|length| (CONTENT_LENGTH, length.parse().unwrap())));
            let told = with_length(headers).ok()?.get(CONTENT_LENGTH).cloned();
            Some(told.map(|value| value.to_str().unwrap().to_owned()))
        };
        let some = |length: &str| Some(Some(length.to_owned()));
        assert_eq!(length("bytes 5-14/100", None), some("10"));
        assert_eq!(length("bytes 5-14/*", None), some("10"));
        assert_eq!(length("bytes 5-14/100", Some("10")), some("10"));
        // Of another length, nothing is taken; and nonsense tells nothing.
        assert_eq!(length("bytes 5-14/100", Some("7")), None);
        for nonsense in ["bytes */100", "bytes 14-5/100", "5-14/100", "bytes 5-18446744073709551616/1", ""] {
            assert_eq!(length(nonsense, None), Some(None), "{nonsense}");
        }
    }
}
