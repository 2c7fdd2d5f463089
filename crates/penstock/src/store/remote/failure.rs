//! From what went wrong to what to do: asked again, asked elsewhere, or told to the caller.
//!
//! An error names the object (the location, so bucket and key), the HTTP status, the server's own code and message, the
//! request's identifier, where the credentials came from, and what to try. What a server says is shown as far as
//! [`Refusal`] keeps it; nothing secret survives [`Environment::scrub`](super::environment::Environment::scrub).

use object_store::Error as StoreError;

use super::address::Provider;
use super::backend::{Backend, OF_QUERY, OF_USER};
use super::retry::{GivenUp, Trouble};
use super::transport::NO_TLS;
use super::witness::{Refusal, Seen};
use super::{azure, gcs, hub};
use crate::error::{Error, ErrorKind};

/// What to do about a failed request.
pub(super) enum Verdict {
    /// Ask again, after a pause.
    Again(Trouble),
    /// Ask again, signed for this region.
    Region(String),
    /// The object has no bytes: no range of it can be had.
    Empty,
    /// Ask again with new credentials, once; else tell the caller.
    Expired(Error),
    /// Tell the caller.
    Tell(Error),
}

/// Codes that say "too fast" or "try again" whatever the status.
const BUSY: [&str; 8] = [
    "SlowDown",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "ServerBusy",
    "OperationTimedOut",
    "Throttling",
    "RequestLimitExceeded",
];

/// Those, and statuses, of a server that is asked too often.
const TOO_FAST: [&str; 6] = [
    "SlowDown",
    "ServiceUnavailable",
    "ServerBusy",
    "OperationTimedOut",
    "Throttling",
    "RequestLimitExceeded",
];
const TOO_FAST_STATUS: [u16; 3] = [429, 503, 509];

/// Codes that say that credentials are of the past, though they did not say so themselves.
const EXPIRED: [&str; 3] = ["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"];

/// What `object_store` says of an answer with the whole object to a request for part of it.
const WHOLE: &str = "Received non-partial response when range requested";

/// Judges a failed request of `backend`. `pinned` says that a version of the object had been seen before.
pub(super) fn judge(backend: &Backend, error: &StoreError, seen: &Seen, pinned: bool) -> Verdict {
    if let Some(lack) = &seen.credentials {
        let why = backend.environment.scrub(&lack.why);
        if lack.passes {
            return Verdict::Again(Trouble::new(why));
        }
        let remedy = lack.remedy.clone().unwrap_or_else(|| no_credentials(backend).to_owned());
        return Verdict::Tell(Error::new(ErrorKind::Access, why).remedy(remedy));
    }
    if let Some(refusal) = &seen.refusal {
        return refused(backend, refusal, pinned);
    }
    if let Some((what, in_vain)) = &seen.transport {
        let what = backend.environment.scrub(what);
        if *in_vain {
            let remedy = match what.contains(NO_TLS) {
                true => "Write http:// in the endpoint if it has no TLS, and check the port",
                false => {
                    "Check the endpoint's certificate; a private authority's goes to AWS_CA_BUNDLE or SSL_CERT_FILE"
                }
            };
            return Verdict::Tell(Error::new(ErrorKind::Storage, what).remedy(remedy));
        }
        return Verdict::Again(Trouble::new(what));
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let what = backend.environment.scrub(&innermost.to_string());
    match error {
        StoreError::NotSupported { .. } => Verdict::Tell(no_ranges(backend.provider)),
        // Where parts were had before, something in between forgot to ask for one.
        _ if what == WHOLE && !pinned => Verdict::Tell(no_ranges(backend.provider)),
        StoreError::InvalidPath { .. } => Verdict::Tell(
            Error::new(ErrorKind::Storage, format!("the listing holds a key that cannot be read: {what}")).remedy(
                "Give the objects themselves, their shard index, or a prefix without such a key; keys with empty parts \
                 (a//b, /a), `.` or `..` are not supported",
            ),
        ),
        StoreError::Unauthenticated { .. } | StoreError::PermissionDenied { .. } => {
            Verdict::Tell(Error::new(ErrorKind::Access, what).remedy(no_credentials(backend)))
        }
        // Of this machine: it would say the same again.
        StoreError::Generic { .. } if azure::is_about_identity(&what) => {
            let what = what.lines().next().unwrap_or_default().trim();
            let cause = format!("there are no credentials for Azure: {what}");
            Verdict::Tell(Error::new(ErrorKind::Access, cause).remedy(no_credentials(backend)))
        }
        // An answer that makes no sense, such as another range than was asked for: a proxy in between, perhaps.
        _ => Verdict::Again(Trouble::new(format!("an unusable answer ({what})"))),
    }
}

fn no_ranges(provider: Provider) -> Error {
    Error::new(ErrorKind::Storage, "the server does not answer requests for part of an object").remedy(match provider {
        Provider::Gcs => "If it was uploaded compressed (Content-Encoding: gzip), upload it as it is",
        _ => {
            "Serve the files with a server that supports HTTP ranges, such as nginx, Caddy or `rclone serve http` (`python -m \
             http.server` does not), or download them first"
        }
    })
}

fn refused(backend: &Backend, refusal: &Refusal, pinned: bool) -> Verdict {
    let code = refusal.code.as_deref().unwrap_or_default();
    let tell = |kind, remedy: String| {
        Verdict::Tell(Error::new(kind, backend.environment.scrub(&sentence(backend, refusal))).remedy(remedy))
    };
    let replaced = pinned && matches!(refusal.status, 404 | 410 | 416);
    if let Some(page) = backend.page.as_deref().filter(|_| !replaced)
        && let Some((kind, remedy)) = hub::refused(refusal, page, &backend.credentials())
    {
        return tell(kind, remedy);
    }
    let elsewhere =
        refusal.region.as_ref().filter(|region| backend.region.as_ref().is_some_and(|ours| ours != *region));
    match refusal.status {
        _ if BUSY.contains(&code) => again(backend, refusal),
        // Google's storage says no more of a token that has expired than that it is none.
        400 | 401 | 403
            if EXPIRED.contains(&code) || (refusal.status == 401 && backend.provider == Provider::Gcs) =>
        {
            match tell(ErrorKind::Access, denied(backend, code)) {
                Verdict::Tell(error) if backend.can_renew() => Verdict::Expired(error),
                verdict => verdict,
            }
        }
        301 | 307 | 400 | 403 if elsewhere.is_some() => {
            Verdict::Region(elsewhere.cloned().unwrap_or_default())
        }
        408 | 425 | 429 | 500 | 502 | 503 | 504 | 509 | 520..=530 => again(backend, refusal),
        412 => Verdict::Tell(changed()),
        404 | 410 | 416 if pinned => Verdict::Tell(changed()),
        416 => Verdict::Empty,
        400 | 404 if is_about_credentials(code) => tell(ErrorKind::Access, denied(backend, code)),
        400 if code.starts_with("Invalid") && code.ends_with("Name") => {
            tell(ErrorKind::NotFound, "Check the bucket's name".into())
        }
        404 | 410 => tell(ErrorKind::NotFound, not_found(backend, code)),
        407 => tell(
            ErrorKind::Access,
            "The proxy wants to know who asks: HTTPS_PROXY (or HTTP_PROXY) = http://user:password@host:port; what is to \
             be reached without it goes to NO_PROXY"
                .into(),
        ),
        401 | 403 => tell(ErrorKind::Access, denied(backend, code)),
        501 if backend.provider == Provider::Gcs => tell(
            ErrorKind::Storage,
            "What STORAGE_EMULATOR_HOST leads to must know the XML interface of Google's storage, as fake-gcs-server does"
                .into(),
        ),
        300..=399 => tell(
            ErrorKind::Storage,
            "The server sends elsewhere: check the endpoint, and the region (AWS_REGION)".into(),
        ),
        _ => tell(
            ErrorKind::Storage,
            "The server will not answer this request however often it is asked".into(),
        ),
    }
}

fn again(backend: &Backend, refusal: &Refusal) -> Verdict {
    let what = match (&refusal.code, &refusal.message) {
        (Some(code), Some(message)) => format!("HTTP {} {code} ({message})", refusal.status),
        (Some(word), None) | (None, Some(word)) => format!("HTTP {} {word}", refusal.status),
        (None, None) => format!("HTTP {}", refusal.status),
    };
    let what = backend.environment.scrub(&what);
    let pushes_back = TOO_FAST_STATUS.contains(&refusal.status)
        || refusal.code.as_ref().is_some_and(|code| TOO_FAST.contains(&&**code));
    Verdict::Again(Trouble { what, retry_after: refusal.retry_after, pushes_back })
}

/// An object that is not what it was.
pub(super) fn changed() -> Error {
    Error::new(ErrorKind::Changed, "the object was replaced or deleted while it was being loaded")
        .remedy("Open the checkpoint again, once whatever writes it is done")
}

/// An object that is stored compressed, or sent so.
pub(super) fn encoded(provider: Provider, how: &str) -> Error {
    let (is, remedy) = match provider {
        Provider::Web => {
            ("sent", "Have the server send it as it is: what is compressed cannot be read in parts")
        }
        Provider::Gcs => (
            "stored",
            "Upload it as it is (with gsutil without -z or -Z): what is compressed cannot be read in parts",
        ),
        _ => ("stored", "Upload it as it is: what is compressed cannot be read in parts"),
    };
    Error::new(ErrorKind::Storage, format!("the object is {is} compressed (Content-Encoding: {how})"))
        .remedy(remedy)
}

/// A request whose bytes did not come, however often it was asked for.
pub(super) fn gave_up(given_up: &GivenUp) -> Error {
    let cause = given_up.to_string();
    let remedy = if cause.contains("no connection") {
        "Check the endpoint, the network and its proxies (HTTP_PROXY, HTTPS_PROXY, NO_PROXY)"
    } else if cause.contains("HTTP 429") || cause.contains("SlowDown") || cause.contains("HTTP 503") {
        "The store is overloaded: load later, or with fewer readers (PENSTOCK_READERS)"
    } else {
        "Check the network between here and the store, and load again"
    };
    Error::new(ErrorKind::Storage, cause).remedy(remedy)
}

fn sentence(backend: &Backend, refusal: &Refusal) -> String {
    let mut text = format!("{} answered HTTP {}", backend.provider.name(), refusal.status);
    if let Some(code) = &refusal.code {
        text.push_str(&format!(" {code}"));
    }
    if let Some(message) = &refusal.message {
        text.push_str(&format!(": {message}"));
    }
    let mut notes = vec![format!("host {}", refusal.host), format!("credentials: {}", backend.credentials())];
    if let Some(region) = &backend.region {
        notes.push(format!("region {region}"));
    }
    if let Some(id) = &refusal.request_id {
        notes.push(format!("request {id}"));
    }
    format!("{text} ({})", notes.join(", "))
}

/// Codes of token services, which are those of OAuth. The third is Azure's where a machine has no identity.
const OAUTH: [&str; 6] = [
    "invalid_grant",
    "invalid_client",
    "invalid_request",
    "invalid_resource",
    "invalid_scope",
    "unauthorized_client",
];

fn is_about_credentials(code: &str) -> bool {
    let parts = ["Token", "Signature", "Credential", "AccessKey", "Auth", "User"];
    OAUTH.contains(&code) || parts.iter().any(|part| code.contains(part))
}

fn not_found(backend: &Backend, code: &str) -> String {
    match (backend.provider, code) {
        (Provider::S3, "NoSuchBucket") => {
            "Check the bucket's name, and that AWS_ENDPOINT_URL leads to where it is".into()
        }
        (_, "ContainerNotFound" | "NoSuchBucket") => "Check the bucket's name, and the account".into(),
        (Provider::Web | Provider::Hub, _) => "Check the URL".into(),
        _ => "Check the key: it is compared letter by letter, slashes included".into(),
    }
}

fn denied(backend: &Backend, code: &str) -> String {
    match code {
        "RequestTimeTooSkewed" => return "Set this machine's clock".into(),
        "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" | "invalid_grant" => {
            return "The credentials have expired: sign in again".into();
        }
        "SignatureDoesNotMatch" | "InvalidAccessKeyId" | "XAdminUserNotFound" => {
            return "Check the access key and its secret; they must be of this endpoint".into();
        }
        "GatedRepo" | "RepoNotFound" => {
            return "Write the location as hf://org/name@revision/path: what is asked for so carries the token of the hub"
                .into();
        }
        _ => {}
    }
    match backend.provider {
        Provider::S3 if backend.credentials().starts_with("none") => {
            "The bucket is not public: unset AWS_SKIP_SIGNATURE and give credentials".into()
        }
        Provider::S3 => {
            "Check that these credentials may do s3:GetObject and s3:ListBucket here (without the latter, a missing \
             object is denied too); for a public bucket, AWS_SKIP_SIGNATURE=true; for one whose requester pays, \
             AWS_REQUEST_PAYER=requester"
                .into()
        }
        _ => no_credentials(backend).to_owned(),
    }
}

/// What to do where there are no credentials, or not the right ones.
fn no_credentials(backend: &Backend) -> &'static str {
    match backend.provider {
        Provider::S3 => {
            "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws sso login`; for a public \
             bucket set AWS_SKIP_SIGNATURE=true"
        }
        Provider::Gcs => gcs::REMEDY,
        Provider::Azure => azure::REMEDY,
        Provider::Hub => "Log in with `hf auth login`, or set HF_TOKEN",
        Provider::Web => match &*backend.credentials() {
            OF_USER => {
                "Check the user and the password in the URL; what is special in them is escaped (%40 for @)"
            }
            OF_QUERY => "Check the signature in the URL's query: it may have expired",
            _ => {
                "The server wants to know who asks: give a URL that carries a signature, or a user and a password \
                 (https://user:password@host/path)"
            }
        },
    }
}
