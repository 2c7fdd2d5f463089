//! What was seen of the servers during one request.
//!
//! `object_store` turns an answer into an error type that keeps little of it. The transport sees everything, so it
//! writes down what errors and retries need, for whoever asked: status, the server's own code and message, when to come
//! back, which region a bucket is in. Where the caller is in a task, the recorder is found without being handed on.
//!
//! Of a server's answer only its code and its message are kept, never the whole body: some servers repeat the signature
//! they were given.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashSet;
use std::future::Future;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, Uri};
use serde::Deserialize;

/// The most of an error's body that is read.
pub(crate) const MAX_ERROR_BODY: usize = 64 << 10;
/// The most of a server's message that is shown.
const MAX_MESSAGE: usize = 400;

tokio::task_local! {
    static SEEN: RefCell<Seen>;
}

/// An answer that was not a success.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) host: String,
    pub(crate) code: Option<String>,
    pub(crate) message: Option<String>,
    pub(crate) request_id: Option<String>,
    pub(crate) retry_after: Option<Duration>,
    /// S3: where the bucket is.
    pub(crate) region: Option<String>,
    /// Whether it came from the service that gives this machine's credentials, not from the store.
    pub(crate) of_metadata: bool,
}

/// What was seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The last answer that was not a success.
    pub(crate) refusal: Option<Refusal>,
    /// The last failure without an answer.
    pub(crate) transport: Option<Lost>,
    /// Why there are no credentials.
    pub(crate) credentials: Option<CredentialError>,
    /// The pages of a listing that were asked for.
    pages: HashSet<Uri>,
    /// Whether a page of a listing led back to one before it.
    pub(crate) repeats: bool,
}

/// A request without an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lost {
    /// In a few words.
    pub(crate) what: String,
    /// What to do where asking again is in vain.
    pub(crate) in_vain: Option<&'static str>,
    /// Whether nobody is there: an unknown host, a refused connection.
    pub(crate) unreachable: bool,
    pub(crate) timed_out: bool,
    /// Whether it was one to the service that gives this machine's credentials.
    pub(crate) of_metadata: bool,
}

/// Why there are no credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CredentialError {
    pub(crate) why: String,
    /// What to do, where that is known better than for the provider as a whole.
    pub(crate) remedy: Option<String>,
    pub(crate) class: CredentialFailure,
}

/// What kind of failure leaves a store without credentials.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CredentialFailure {
    /// Asking again would bring the same.
    #[default]
    Final,
    /// It may pass: a service that is busy, a connection that is lost.
    Transient,
    /// Nobody is there to give any: an unknown host, a refused connection.
    Unreachable,
    /// A package is not installed.
    MissingDependency,
}

impl CredentialError {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), remedy: None, class: CredentialFailure::Final }
    }

    /// The same, with what to do.
    pub(crate) fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

/// Where the transport writes down what it sees.
pub(crate) struct ResponseRecorder;

impl ResponseRecorder {
    /// Runs `work` with what it sees written down.
    pub(crate) async fn watch<T>(work: impl Future<Output = T>) -> (T, Seen) {
        SEEN.scope(RefCell::default(), async { (work.await, SEEN.with(RefCell::take)) }).await
    }

    /// Writes down a page of a listing. False where it was asked for before: a server whose continuation tokens repeat
    /// would be followed for ever.
    pub(crate) fn is_new_page(page: &Uri) -> bool {
        let mut is_new = true;
        Self::note(|seen| {
            is_new = seen.pages.insert(page.clone());
            seen.repeats |= !is_new;
        });
        is_new
    }

    /// Writes something down, if anyone wants to know.
    pub(crate) fn note(change: impl FnOnce(&mut Seen)) {
        let _ = SEEN.try_with(|seen| change(&mut seen.borrow_mut()));
    }
}

impl Refusal {
    /// What an answer says.
    pub(crate) fn of(status: StatusCode, host: &str, headers: &HeaderMap, body: &[u8]) -> Self {
        let header = |names: &[&str]| {
            names.iter().find_map(|name| headers.get(*name)?.to_str().ok()).map(|value| plain(value.trim()))
        };
        let (code, message) = code_and_message(body);
        Self {
            status: status.as_u16(),
            host: host.to_owned(),
            // The hub's headers say more than its bodies.
            code: header(&["x-error-code"]).or(code).or_else(|| header(&["x-ms-error-code"])),
            message: header(&["x-error-message"]).or(message),
            request_id: header(&[
                "x-amz-request-id",
                "x-ms-request-id",
                "x-guploader-uploadid",
                "x-request-id",
            ]),
            retry_after: header(&["retry-after"])
                .and_then(|text| retry_after(&text))
                .or_else(|| header(&["ratelimit"]).and_then(|text| reset(&text))),
            region: header(&["x-amz-bucket-region"])
                .or_else(|| element(body, "Region"))
                // It becomes part of a host's name.
                .filter(|region| region.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')),
            of_metadata: false,
        }
    }
}

/// What `Retry-After` asks for: seconds, or a date.
fn retry_after(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

/// What a `RateLimit` header says of when there is room again, as the hub writes it: `"api";r=0;t=42`.
fn reset(text: &str) -> Option<Duration> {
    let seconds = text.split(';').find_map(|part| part.trim().strip_prefix("t="))?;
    seconds.parse().ok().map(Duration::from_secs)
}

/// The server's own code and message: from XML as S3, GCS and Azure write it, or JSON as token servers and hubs do.
fn code_and_message(body: &[u8]) -> (Option<String>, Option<String>) {
    if body.trim_ascii_start().starts_with(b"{") {
        let Ok(json) = serde_json::from_slice::<serde_json::Value>(body) else { return (None, None) };
        let text = |value: &serde_json::Value| match value {
            serde_json::Value::String(text) => Some(plain(text)),
            serde_json::Value::Number(number) => Some(number.to_string()),
            _ => None,
        };
        let (error, inner) = (&json["error"], &json["error"]["message"]);
        let code = text(error).or_else(|| text(&error["status"])).or_else(|| text(&error["code"]));
        let message =
            text(inner).or_else(|| text(&json["error_description"])).or_else(|| text(&json["message"]));
        return (code, message);
    }
    let text = |name| element(body, name).map(|text| plain(&text));
    (text("Code"), text("Message"))
}

/// The text of an XML element without attributes.
fn element(body: &[u8], name: &str) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let begin = text.find(&open)? + open.len();
    let length = text[begin..].find(&close)?;
    let text = &text[begin..begin + length];
    Some(quick_xml::escape::unescape(text).map_or_else(|_| text.to_owned(), Cow::into_owned))
}

/// A server's words on one line, of bounded length, without control characters.
fn plain(text: &str) -> String {
    // Azure's messages go on with an identifier and the time, each on a line of its own.
    let text = text.trim().lines().next().unwrap_or("").trim_end_matches('.');
    let mut plain: String = text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE).collect();
    if text.chars().count() > MAX_MESSAGE {
        plain.push('…');
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(body: &str, headers: &[(&'static str, &'static str)]) -> Refusal {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        Refusal::of(StatusCode::FORBIDDEN, "h", &map, body.as_bytes())
    }

    #[test]
    fn s3_says_its_code_its_message_and_where_the_bucket_is() {
        let seen = refusal(
            "<?xml version=\"1.0\"?><Error><Code>AuthorizationHeaderMalformed</Code><Message>wrong &quot;us&quot;.\
             </Message><Region>eu-west-1</Region><StringToSign>SECRET</StringToSign></Error>",
            &[("x-amz-request-id", "R1"), ("retry-after", "3")],
        );
        assert_eq!(seen.code.as_deref(), Some("AuthorizationHeaderMalformed"));
        assert_eq!(seen.message.as_deref(), Some("wrong \"us\""));
        assert_eq!(seen.region.as_deref(), Some("eu-west-1"));
        assert_eq!(seen.request_id.as_deref(), Some("R1"));
        assert_eq!(seen.retry_after, Some(Duration::from_secs(3)));
        assert!(!format!("{seen:?}").contains("SECRET"));
    }

    #[test]
    fn azure_and_token_servers_are_understood() {
        let azure = refusal(
            "\u{feff}<Error><Code>AuthenticationFailed</Code><Message>Server failed.\nRequestId:1\nTime:2</Message>\
             <AuthenticationErrorDetail>SECRET</AuthenticationErrorDetail></Error>",
            &[],
        );
        assert_eq!(
            (azure.code.as_deref(), azure.message.as_deref()),
            (Some("AuthenticationFailed"), Some("Server failed"))
        );
        let head = refusal("", &[("x-ms-error-code", "BlobNotFound")]);
        assert_eq!(head.code.as_deref(), Some("BlobNotFound"));
        let token = refusal(r#"{"error":"invalid_grant","error_description":"Token expired\nmore"}"#, &[]);
        assert_eq!(
            (token.code.as_deref(), token.message.as_deref()),
            (Some("invalid_grant"), Some("Token expired"))
        );
        let gcs = refusal(r#"{"error":{"code":404,"message":"No such object"}}"#, &[]);
        assert_eq!((gcs.code.as_deref(), gcs.message.as_deref()), (Some("404"), Some("No such object")));
    }

    #[test]
    fn the_hubs_headers_say_more_than_its_bodies() {
        let hub = refusal(
            r#"{"error":"Repository not found"}"#,
            &[
                ("x-error-code", "RepoNotFound"),
                ("x-error-message", "No such repository"),
                ("ratelimit", "\"api\";r=0;t=42"),
            ],
        );
        assert_eq!(
            (hub.code.as_deref(), hub.message.as_deref()),
            (Some("RepoNotFound"), Some("No such repository"))
        );
        assert_eq!(hub.retry_after, Some(Duration::from_secs(42)));
    }

    #[test]
    fn a_region_cannot_lead_to_another_host() {
        let seen = refusal("<Region>evil.example/</Region>", &[]);
        assert_eq!(seen.region, None);
    }

    #[test]
    fn references_in_xml_are_resolved_once() {
        for (text, plain) in [
            ("a&amp;lt;b", "a&lt;b"),
            ("&lt;&gt;&quot;&apos;&#65;&#x42;", "<>\"'AB"),
            ("a & b; &none; &#xD800; &", "a & b; &none; &#xD800; &"),
        ] {
            assert_eq!(element(format!("<K>{text}</K>").as_bytes(), "K").as_deref(), Some(plain));
        }
    }

    #[test]
    fn nonsense_says_nothing() {
        for body in ["", "<html>no</html>", "{", "<Code>", "\u{0}"] {
            let seen = refusal(body, &[("retry-after", "soon")]);
            assert_eq!((seen.code, seen.message, seen.retry_after), (None, None, None), "{body:?}");
        }
        let long = refusal(&format!("<Message>{}</Message>", "x".repeat(5000)), &[]);
        assert!(long.message.unwrap().chars().count() <= MAX_MESSAGE + 1);
    }

    #[test]
    fn a_date_to_come_back_at_is_a_wait() {
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(30));
        let wait = retry_after(&date).unwrap();
        assert!(wait > Duration::from_secs(25) && wait <= Duration::from_secs(30), "{wait:?}");
        assert_eq!(retry_after("Thu, 01 Jan 1970 00:00:00 GMT"), Some(Duration::ZERO));
    }
}
