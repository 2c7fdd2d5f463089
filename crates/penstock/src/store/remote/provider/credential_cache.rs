//! Credentials that expire: fetched at the first request, kept, and fetched anew shortly before their end.
//!
//! A load of an hour outlives its first credentials, so `object_store` asks for them before every request. What is kept
//! is handed out until shortly before it expires. Then one reader fetches for all, and if that fails, it fails for all who
//! wait; what is still valid stays in use while the service that renews it is not to be had.
//!
//! Where credentials come from is a [`Source`]'s business; nothing here knows a provider.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use object_store::CredentialProvider;

use crate::store::remote::http::response_recorder::{CredentialError, Lost, Refusal, ResponseRecorder};

/// Credentials are renewed so long before they expire, or half way to their end where they are given for less than twice
/// as long.
const EARLY: Duration = Duration::from_secs(300);

/// Somewhere that credentials come from.
#[async_trait]
pub(crate) trait Source: Send + Sync + 'static {
    type Credential: Send + Sync;

    async fn fetch(&self) -> Result<Fetched<Self::Credential>, CredentialError>;
}

/// Credentials, until when they are good, and where they were found.
pub(crate) struct Fetched<C> {
    pub(crate) credential: C,
    pub(crate) expires: Option<SystemTime>,
    /// For errors.
    pub(crate) origin: String,
}

/// What a backend may do with credentials of whatever kind.
pub(crate) trait Renewable: Send + Sync {
    /// Where the credentials in use come from.
    fn origin(&self) -> Option<String>;

    /// Has them fetched anew, if they are older than `asked`.
    fn forget(&self, asked: Instant);
}

/// The credentials of one provider, as long as they are good.
pub(crate) struct CredentialCache<S: Source> {
    source: S,
    held: Mutex<Option<Held<S::Credential>>>,
    /// Held while they are fetched. The latest failure, and when it was.
    renewing: tokio::sync::Mutex<Option<(Instant, Failure)>>,
}

/// Why there are no credentials, and what was seen of the service that should have given them.
#[derive(Clone)]
struct Failure {
    error: CredentialError,
    refusal: Option<Refusal>,
    transport: Option<Lost>,
}

impl Failure {
    /// That of whoever asked just now.
    fn of(error: CredentialError) -> Self {
        let mut failure = Self { error, refusal: None, transport: None };
        ResponseRecorder::note(|seen| {
            (failure.refusal, failure.transport) = (seen.refusal.clone(), seen.transport.clone());
        });
        failure
    }

    /// As `object_store` is told, and as the request is judged.
    fn told(self) -> object_store::Error {
        let why = self.error.why.clone();
        ResponseRecorder::note(|seen| {
            (seen.refusal, seen.transport, seen.credentials) =
                (self.refusal, self.transport, Some(self.error));
        });
        object_store::Error::Unauthenticated { path: String::new(), source: why.into() }
    }
}

struct Held<C> {
    credential: Arc<C>,
    renew: Option<SystemTime>,
    expires: Option<SystemTime>,
    origin: String,
    since: Instant,
}

impl<S: Source> CredentialCache<S> {
    pub(crate) fn new(source: S) -> Self {
        Self { source, held: Mutex::new(None), renewing: tokio::sync::Mutex::const_new(None) }
    }

    fn held(&self) -> MutexGuard<'_, Option<Held<S::Credential>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is held, if it is not over; unless `even_late`, only if it need not be renewed yet.
    fn usable(&self, even_late: bool) -> Option<Arc<S::Credential>> {
        let held = self.held();
        let held = held.as_ref()?;
        let ends = [held.expires, if even_late { None } else { held.renew }];
        let now = SystemTime::now();
        ends.into_iter().flatten().all(|end| now < end).then(|| Arc::clone(&held.credential))
    }

    /// What is held after a renewal that failed, if it is not over. Not every request tries again: the next one does so
    /// when half of the time that is left has passed.
    fn still_usable(&self) -> Option<Arc<S::Credential>> {
        let credential = self.usable(true)?;
        if let Some(held) = self.held().as_mut() {
            held.renew = held.expires.map(|expires| renewal(SystemTime::now(), expires));
        }
        forget_answers();
        Some(credential)
    }
}

/// What the credentials' service answered is not the store's answer to the request that needs them.
fn forget_answers() {
    ResponseRecorder::note(|seen| (seen.refusal, seen.transport) = (None, None));
}

/// When credentials that are good until `expires` are to be renewed.
fn renewal(now: SystemTime, expires: SystemTime) -> SystemTime {
    let left = expires.duration_since(now).unwrap_or_default();
    now + left.saturating_sub(EARLY.min(left / 2))
}

impl<S: Source> Renewable for CredentialCache<S> {
    fn origin(&self) -> Option<String> {
        self.held().as_ref().map(|held| held.origin.clone())
    }

    fn forget(&self, asked: Instant) {
        let mut held = self.held();
        *held = held.take().filter(|held| held.since > asked);
    }
}

impl<S: Source> std::fmt::Debug for CredentialCache<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CredentialCache").field("origin", &self.origin()).finish_non_exhaustive()
    }
}

#[async_trait]
impl<S: Source> CredentialProvider for CredentialCache<S>
where
    S::Credential: std::fmt::Debug,
{
    type Credential = S::Credential;

    async fn get_credential(&self) -> object_store::Result<Arc<S::Credential>> {
        if let Some(credential) = self.usable(false) {
            return Ok(credential);
        }
        let began = Instant::now();
        let mut latest = match self.renewing.try_lock() {
            Ok(latest) => latest,
            Err(_) => {
                // While someone renews them, what is still valid serves.
                if let Some(credential) = self.usable(true) {
                    return Ok(credential);
                }
                self.renewing.lock().await
            }
        };
        if let Some(credential) = self.usable(false) {
            return Ok(credential);
        }
        // One failure is enough for all who waited meanwhile.
        if let Some((_, failure)) = latest.as_ref().filter(|(at, _)| *at > began) {
            return Err(failure.clone().told());
        }
        match self.source.fetch().await {
            Ok(Fetched { credential, expires, origin }) => {
                let credential = Arc::new(credential);
                let renew = expires.map(|expires| renewal(SystemTime::now(), expires));
                let since = Instant::now();
                *self.held() =
                    Some(Held { credential: Arc::clone(&credential), renew, expires, origin, since });
                forget_answers();
                Ok(credential)
            }
            Err(error) => self.still_usable().ok_or_else(|| {
                let failure = Failure::of(error);
                *latest = Some((Instant::now(), failure.clone()));
                failure.told()
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    use super::*;

    #[test]
    fn credentials_are_renewed_early_but_not_at_once() {
        let now = SystemTime::now();
        let after = |seconds| renewal(now, now + Duration::from_secs(seconds)).duration_since(now).unwrap();
        assert_eq!(after(3600), Duration::from_secs(3300));
        assert_eq!(after(600), Duration::from_secs(300));
        // Given for five minutes, they are not fetched for every request.
        assert_eq!(after(300), Duration::from_secs(150));
        assert_eq!(renewal(now, now - EARLY), now);
    }

    struct Counting(Arc<AtomicU32>, Option<Duration>);

    #[async_trait]
    impl Source for Counting {
        type Credential = u32;

        async fn fetch(&self) -> Result<Fetched<u32>, CredentialError> {
            let number = self.0.fetch_add(1, SeqCst);
            if number > 1 {
                return Err(CredentialError::new("gone"));
            }
            let expires = self.1.map(|lifetime| SystemTime::now() + lifetime);
            Ok(Fetched { credential: number, expires, origin: format!("number {number}") })
        }
    }

    fn ask(keys: &CredentialCache<Counting>) -> Result<u32, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(keys.get_credential()).map(|number| *number).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_held_is_used_until_it_is_forgotten() {
        let asked = Arc::new(AtomicU32::new(0));
        let keys = CredentialCache::new(Counting(Arc::clone(&asked), Some(Duration::from_secs(3600))));
        assert_eq!(keys.origin(), None);
        let before = Instant::now();
        assert_eq!((ask(&keys), ask(&keys), asked.load(SeqCst)), (Ok(0), Ok(0), 1));
        // What was refused is older than what is held: it was renewed meanwhile.
        keys.forget(before);
        assert_eq!(ask(&keys), Ok(0));
        keys.forget(Instant::now());
        assert_eq!((ask(&keys), keys.origin().as_deref()), (Ok(1), Some("number 1")));
    }

    #[test]
    fn what_is_still_valid_is_used_while_it_cannot_be_renewed() {
        let asked = Arc::new(AtomicU32::new(1));
        let keys = CredentialCache::new(Counting(Arc::clone(&asked), Some(Duration::from_secs(3600))));
        assert_eq!(ask(&keys), Ok(1));
        keys.held().as_mut().unwrap().renew = Some(SystemTime::now());
        assert_eq!((ask(&keys), asked.load(SeqCst)), (Ok(1), 3));
        keys.held().as_mut().unwrap().expires = Some(SystemTime::now());
        assert!(ask(&keys).unwrap_err().contains("gone"));
    }

    #[test]
    fn a_renewal_that_failed_is_not_tried_for_every_request() {
        let asked = Arc::new(AtomicU32::new(1));
        let keys = CredentialCache::new(Counting(Arc::clone(&asked), Some(Duration::from_secs(3600))));
        assert_eq!(ask(&keys), Ok(1));
        keys.held().as_mut().unwrap().renew = Some(SystemTime::now());
        assert_eq!([ask(&keys), ask(&keys), ask(&keys)], [Ok(1), Ok(1), Ok(1)]);
        assert_eq!(asked.load(SeqCst), 3, "the first, and one renewal");
    }

    /// Refuses whoever asks, after others had time to ask too.
    struct Refusing(AtomicU32);

    #[async_trait]
    impl Source for Refusing {
        type Credential = u32;

        async fn fetch(&self) -> Result<Fetched<u32>, CredentialError> {
            let number = self.0.fetch_add(1, SeqCst);
            tokio::task::yield_now().await;
            let refusal = Refusal { status: 503, ..Refusal::default() };
            ResponseRecorder::note(|seen| seen.refusal = Some(refusal));
            Err(CredentialError::new(format!("refusal {number}")))
        }
    }

    #[test]
    fn a_failure_is_told_to_all_who_waited_for_it_and_to_no_others() {
        let keys = CredentialCache::new(Refusing(AtomicU32::new(0)));
        let ask = async || {
            let (refused, seen) = ResponseRecorder::watch(keys.get_credential()).await;
            assert_eq!(
                seen.refusal.unwrap().status,
                503,
                "whoever waited may ask again, as the first one may"
            );
            assert!(refused.is_err());
            seen.credentials.unwrap().why
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (first, second, third) = runtime.block_on(async { tokio::join!(ask(), ask(), ask()) });
        assert_eq!([first, second, third], ["refusal 0"; 3]);
        assert_eq!(runtime.block_on(ask()), "refusal 1");
    }
}
