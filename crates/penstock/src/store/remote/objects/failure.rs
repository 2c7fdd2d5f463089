//! From what went wrong to what to do: asked again, asked elsewhere, or told to the caller.
//!
//! An error names the object (the location, so bucket and key), the HTTP status, the server's own code and message, the
//! request's identifier, where the credentials came from, and what to try. What a server says is shown as far as
//! [`Refusal`] keeps it; nothing secret survives [`Environment::scrub`](crate::store::remote::settings::environment::Environment::scrub).

use object_store::Error as StoreError;

use super::hub_errors;
use crate::error::{Code, Error, ErrorKind};
use crate::store::remote::http::response_recorder::{CredentialFailure, Refusal, Seen};
use crate::store::remote::provider::backend::{Backend, OF_QUERY, OF_USER};
use crate::store::remote::provider::s3::ENDPOINTS;
use crate::store::remote::provider::{azure, gcs, s3};
use crate::store::remote::request::outcome::Stop;
use crate::store::remote::request::retry::{RetriesExhausted, TransientError};
use crate::store::remote::settings::address::Provider;

/// What to do about a failed request.
pub(crate) enum Verdict {
    /// Ask again, after a pause.
    Again(TransientError),
    /// Ask again with new credentials, once; else tell the caller.
    Expired(Error),
    Stop(Stop),
}

/// Codes that say "try again" whatever the status.
const BUSY: [&str; 2] = ["RequestTimeout", "InternalError"];

/// Codes, and statuses, of a server that is asked too often.
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

/// Codes that say that keys are wrong, whatever they may do.
const OF_KEYS: [&str; 3] = ["SignatureDoesNotMatch", "InvalidAccessKeyId", "XAdminUserNotFound"];

/// Azure's word for a key, a signature or a token that it takes for nobody's.
const UNKNOWN_TO_AZURE: &str = "AuthenticationFailed";

/// What `object_store` says of an answer with the whole object to a request for part of it.
const WHOLE: &str = "Received non-partial response when range requested";
/// How what it says of a `Content-Range: bytes 0-99/*` ends.
const NO_TOTAL: &str = "/*\"";

/// Judges a failed request of `backend`. `pinned` says that a version of the object had been seen before.
pub(crate) fn judge(backend: &Backend, error: &StoreError, seen: &Seen, pinned: bool) -> Verdict {
    if let Some(error) = &seen.credentials {
        let why = backend.environment.scrub(&error.why);
        // Whoever gives credentials may be as busy as a store.
        let busy = |refusal: &Refusal| refusal.status == 429 || refusal.status >= 500;
        let passes = matches!(error.class, CredentialFailure::Transient | CredentialFailure::Unreachable);
        if passes || seen.refusal.as_ref().is_some_and(busy) {
            let unreachable = error.class == CredentialFailure::Unreachable
                || seen.transport.as_ref().is_some_and(|lost| lost.unreachable);
            // One that is busy or loses connections is a server that failed: it has not refused anybody.
            let code = if unreachable { Code::Credentials } else { Code::ServerError };
            let remedy = error.remedy.clone().filter(|_| unreachable);
            return Verdict::Again(TransientError { unreachable, code, remedy, ..TransientError::new(why) });
        }
        let remedy = error.remedy.clone().unwrap_or_else(|| no_credentials(backend));
        return told(match error.class {
            CredentialFailure::MissingDependency => Error::new(ErrorKind::Dependency, why).remedy(remedy),
            _ => Error::new(ErrorKind::Access, why).code(Code::Credentials).remedy(remedy),
        });
    }
    if seen.repeats {
        return told(endless_listing(backend.provider.name()));
    }
    if let Some(refusal) = &seen.refusal {
        return refused(backend, refusal, pinned);
    }
    if let Some(lost) = &seen.transport {
        let what = backend.environment.scrub(&lost.what);
        if lost.of_metadata && lost.unreachable {
            let what = format!("no credentials are set, and {METADATA} gives none: {what}");
            return Verdict::Again(TransientError {
                unreachable: true,
                code: Code::Credentials,
                ..TransientError::new(what)
            });
        }
        if let Some(remedy) = lost.in_vain {
            return told(Error::new(ErrorKind::Storage, what).code(Code::Connection).remedy(remedy));
        }
        let code = if lost.timed_out { Code::Timeout } else { Code::Connection };
        return Verdict::Again(TransientError {
            code,
            unreachable: lost.unreachable,
            ..TransientError::new(what)
        });
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let what = backend.environment.scrub(&innermost.to_string());
    match error {
        StoreError::NotSupported { .. } => told(no_ranges(backend.provider)),
        // Where parts were had before, something in between forgot to ask for one.
        _ if what == WHOLE && !pinned => told(no_ranges(backend.provider)),
        _ if what.ends_with(NO_TOTAL) => told(
            Error::new(
                ErrorKind::Storage,
                "the server does not say how large the object is (Content-Range: bytes …/*)",
            )
            .remedy(
                "Have the server, or the proxy in front of it, send the size; or download the files first",
            ),
        ),
        StoreError::InvalidPath { source } => {
            let what = backend.environment.scrub(&source.to_string()).replace(char::is_control, "?");
            told(Error::new(ErrorKind::Storage, format!("the listing holds a key that cannot be read: {what}")).remedy(
                "Give the objects themselves, their shard index, or a prefix without such a key; keys with empty parts \
                 (a//b, /a), `.`, `..` or control characters are not supported",
            ))
        }
        StoreError::Unauthenticated { .. } | StoreError::PermissionDenied { .. } => {
            let error = Error::new(ErrorKind::Access, what).code(Code::Credentials);
            told(error.remedy(no_credentials(backend)))
        }
        // Of this machine: it would say the same again.
        StoreError::Generic { .. } if azure::is_about_identity(&what) => {
            let why = azure::of_identity(&what, &backend.environment);
            let cause = format!("there are no credentials for Azure: {why}");
            let error = Error::new(ErrorKind::Access, cause).code(Code::Credentials);
            told(error.remedy(no_credentials(backend)))
        }
        // An answer that makes no sense, such as another range than was asked for: a proxy in between, perhaps.
        _ => Verdict::Again(TransientError::new(format!("an unusable answer ({what})"))),
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

fn told(error: Error) -> Verdict {
    Verdict::Stop(Stop::Tell(error))
}

fn refused(backend: &Backend, refusal: &Refusal, pinned: bool) -> Verdict {
    let code = refusal.code.as_deref().unwrap_or_default();
    let error = |kind, remedy: String| {
        let error = Error::new(kind, backend.environment.scrub(&sentence(backend, refusal))).remedy(remedy);
        let error = error.detail("status", refusal.status);
        match &refusal.code {
            Some(code) => error.detail("server_code", backend.environment.scrub(code)),
            None => error,
        }
    };
    let tell = |kind, remedy| told(error(kind, remedy));
    let unknown = |remedy| error(ErrorKind::Access, remedy).code(Code::Credentials);
    let replaced = pinned && matches!(refusal.status, 404 | 410 | 416);
    if let Some(page) = backend.page.as_deref().filter(|_| !replaced)
        && let Some((kind, remedy)) = hub_errors::refused(refusal, page, &backend.credentials())
    {
        return match refusal.status == 401 && kind == ErrorKind::Access {
            true => told(unknown(remedy)),
            false => tell(kind, remedy),
        };
    }
    if refusal.of_metadata && (400..500).contains(&refusal.status) && refusal.status != 429 {
        let remedy = format!(
            "Give this machine an identity that may read the {}. Or: {}",
            place(backend.provider),
            no_credentials(backend)
        );
        return told(unknown(remedy));
    }
    let elsewhere =
        refusal.region.as_ref().filter(|region| backend.region.as_ref().is_some_and(|ours| ours != *region));
    match refusal.status {
        _ if BUSY.contains(&code) || TOO_FAST.contains(&code) => again(backend, refusal),
        // Google's storage says no more of a token that has expired than that it is none.
        400 | 401 | 403
            if EXPIRED.contains(&code) || (refusal.status == 401 && backend.provider == Provider::Gcs) =>
        {
            let error = unknown(denied(backend, code));
            if backend.can_renew() { Verdict::Expired(error) } else { told(error) }
        }
        301 | 307 | 400 | 403 if elsewhere.is_some() => {
            Verdict::Stop(Stop::Region(elsewhere.cloned().unwrap_or_default()))
        }
        408 | 425 | 429 | 500 | 502 | 503 | 504 | 509 | 520..=530 => again(backend, refusal),
        412 => told(changed()),
        404 | 410 | 416 if pinned => told(changed()),
        416 => Verdict::Stop(Stop::Empty),
        400 | 404 if is_about_credentials(code) => told(unknown(denied(backend, code))),
        400 if code.starts_with("Invalid") && code.ends_with("Name") => {
            tell(ErrorKind::NotFound, format!("Check the {}'s name", place(backend.provider)))
        }
        404 | 410 => tell(ErrorKind::NotFound, not_found(backend, code)),
        407 => tell(
            ErrorKind::Access,
            "The proxy wants to know who asks: HTTPS_PROXY (or HTTP_PROXY) = http://user:password@host:port; what is to \
             be reached without it goes to NO_PROXY"
                .into(),
        ),
        401 => told(unknown(denied(backend, code))),
        403 if OF_KEYS.contains(&code) || code == UNKNOWN_TO_AZURE => told(unknown(denied(backend, code))),
        409 if code == "PublicAccessNotPermitted" => told(unknown(denied(backend, code))),
        // Archived, and not for want of permissions.
        403 if code == "InvalidObjectState" => tell(
            ErrorKind::Access,
            "Restore the object from its archive (S3 Glacier), or copy it to a storage class that can be read at once"
                .into(),
        ),
        403 if refusal.message.as_ref().is_some_and(|message| message.contains("kms:")) => tell(
            ErrorKind::Access,
            "Let these credentials use the KMS key that the object is encrypted with: kms:Decrypt in their policy, and in the \
             key's"
                .into(),
        ),
        403 => tell(ErrorKind::Access, denied(backend, code)),
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
    let throttled = TOO_FAST_STATUS.contains(&refusal.status)
        || refusal.code.as_ref().is_some_and(|code| TOO_FAST.contains(&&**code));
    let code = if throttled { Code::Throttled } else { Code::ServerError };
    Verdict::Again(TransientError {
        retry_after: refusal.retry_after,
        throttled,
        code,
        ..TransientError::new(what)
    })
}

/// A listing whose pages lead back to one another.
pub(crate) fn endless_listing(who: &str) -> Error {
    Error::new(
        ErrorKind::Storage,
        format!("the listing of {who} has no end: it repeats a continuation token"),
    )
    .code(Code::EndlessListing)
    .remedy("Check the server or the proxy in between; or give the objects themselves, or their shard index")
}

/// An object that is not what it was.
pub(crate) fn changed() -> Error {
    Error::new(ErrorKind::Changed, "the object was replaced or deleted while it was being loaded")
        .remedy("Open the checkpoint again, once whatever writes it is done")
}

/// An object that is stored compressed, or sent so.
pub(crate) fn encoded(provider: Provider, how: &str) -> Error {
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

/// A request whose bytes did not come, however often it was asked for. `loading` says that it was one of a load.
pub(crate) fn gave_up(backend: &Backend, exhausted: &RetriesExhausted, loading: bool) -> Error {
    let cause = exhausted.to_string();
    let TransientError { code, throttled, ref remedy, .. } = exhausted.last;
    if code == Code::Credentials {
        let remedy = remedy.clone().unwrap_or_else(|| no_credentials(backend));
        return Error::new(ErrorKind::Access, cause).code(code).remedy(remedy);
    }
    let remedy = if cause.contains("no connection to the proxy") {
        "Check the proxy that the variable names, or unset the variable; what is to be reached without it goes to NO_PROXY"
    } else if cause.contains("no connection") {
        "Check the endpoint, the network and its proxies (HTTP_PROXY, HTTPS_PROXY, NO_PROXY)"
    } else if throttled && loading {
        "The store is overloaded: load later, or with fewer readers (PENSTOCK_READERS)"
    } else if throttled {
        "The store is overloaded: open the checkpoint later"
    } else {
        "Check the network between here and the store, and load again"
    };
    Error::new(ErrorKind::Storage, cause).code(code).remedy(remedy)
}

fn sentence(backend: &Backend, refusal: &Refusal) -> String {
    let who = if refusal.of_metadata { METADATA } else { backend.provider.name() };
    let mut text = format!("{who} answered HTTP {}", refusal.status);
    // Some servers say the same twice.
    if let Some(code) = refusal.code.as_ref().filter(|code| refusal.message.as_ref() != Some(*code)) {
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

const METADATA: &str = "this machine's metadata service";

/// Whether a code is about who asks. Those in small letters are OAuth's, of token services.
fn is_about_credentials(code: &str) -> bool {
    let parts = ["Token", "Signature", "Credential", "AccessKey", "Auth", "User"];
    code.starts_with("invalid_")
        || code == "unauthorized_client"
        || parts.iter().any(|part| code.contains(part))
}

fn not_found(backend: &Backend, code: &str) -> String {
    match (backend.provider, code) {
        (Provider::S3, "NoSuchBucket") => {
            let set = ENDPOINTS.into_iter().find(|name| backend.environment.get(&[name]).is_some());
            let setting = backend.environment.setting(set.unwrap_or("AWS_ENDPOINT_URL"));
            format!("Check the bucket's name, and that {setting} leads to where it is")
        }
        (provider, "ContainerNotFound" | "NoSuchBucket") => {
            format!("Check the {}'s name, and the account", place(provider))
        }
        // What Azure says of every blob of a container that is not public.
        (Provider::Azure, "ResourceNotFound") if backend.anonymous.is_some() => {
            format!("Check the container's name and the key. {}", no_credentials(backend))
        }
        (Provider::Web | Provider::Hub, _) => "Check the URL".into(),
        _ => "Check the key: it is compared letter by letter, slashes included".into(),
    }
}

fn denied(backend: &Backend, code: &str) -> String {
    match code {
        "RequestTimeTooSkewed" => return "Set this machine's clock".into(),
        _ if EXPIRED.contains(&code) || code == "invalid_grant" => {
            return match &*backend.credentials() {
                "environment variables" => {
                    "The credentials have expired: set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN anew"
                        .into()
                }
                "storage_options" => "The credentials have expired: give new key, secret and token".into(),
                origin => format!("The credentials ({origin}) have expired: sign in again"),
            };
        }
        _ if OF_KEYS.contains(&code) => {
            return "Check the access key and its secret; they must be of this endpoint".into();
        }
        "GatedRepo" | "RepoNotFound" => {
            return "Write the location as hf://org/name@revision/path: what is asked for so carries the token of the hub"
                .into();
        }
        _ => {}
    }
    match backend.provider {
        _ if backend.anonymous.is_some() => no_credentials(backend),
        Provider::S3 => {
            "Check that these credentials may do s3:GetObject and s3:ListBucket here (without the latter, a missing \
             object is denied too); for a public bucket, AWS_SKIP_SIGNATURE=true; for one whose requester pays, \
             AWS_REQUEST_PAYER=requester"
                .into()
        }
        Provider::Azure if code == UNKNOWN_TO_AZURE => format!(
            "Check that the key, signature or token ({}) is of this storage account, whole, and not replaced or expired: \
             `az storage account keys list` shows the account's keys",
            backend.credentials()
        ),
        Provider::Azure if code == "AuthorizationPermissionMismatch" => format!(
            "Give this identity ({}) the role Storage Blob Data Reader on the account or the container",
            backend.credentials()
        ),
        _ => no_credentials(backend),
    }
}

/// What to do where there are no credentials, or not the right ones.
fn no_credentials(backend: &Backend) -> String {
    let (sign_in, public) = match backend.provider {
        Provider::S3 => (s3::SIGN_IN, s3::PUBLIC),
        Provider::Gcs => (gcs::SIGN_IN, gcs::PUBLIC),
        Provider::Azure => (azure::SIGN_IN, azure::PUBLIC),
        provider => return of_page(backend, provider).to_owned(),
    };
    match &backend.anonymous {
        Some(undo) => format!(
            "The {} is read without credentials, as if it were public. If it is not, {undo}. {sign_in}",
            place(backend.provider)
        ),
        None => format!("{sign_in}; {public}"),
    }
}

/// What a store calls the place that holds objects.
fn place(provider: Provider) -> &'static str {
    if provider == Provider::Azure { "container" } else { "bucket" }
}

/// What to do where a server of pages wants to know who asks.
fn of_page(backend: &Backend, provider: Provider) -> &'static str {
    match provider {
        Provider::Hub => "Log in with `hf auth login`, set HF_TOKEN, or give the storage option token",
        _ => match &*backend.credentials() {
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
