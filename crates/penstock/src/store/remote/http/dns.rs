//! Names of hosts to addresses, so that connections spread over all that a name stands for.
//!
//! An object store's name stands for a handful of hosts, other ones every few seconds, and a client that always takes the
//! first has all its connections at one of them. So addresses are shuffled for every connection. A load begins with
//! dozens of connections at once: one of them asks, and what it is told holds for a few seconds.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::OnceCell;

/// How long an answer holds: S3's own are valid for 5 seconds.
const HOLDS: Duration = Duration::from_secs(5);

type Answer = Arc<OnceCell<Vec<SocketAddr>>>;

/// Addresses of hosts, kept for a few seconds.
#[derive(Debug, Default)]
pub(crate) struct Resolver(Mutex<HashMap<String, (Instant, Answer)>>);

impl Resolver {
    /// The answer for a name, of which whoever comes first has to see to it that it is filled.
    fn answer(&self, name: &str) -> Answer {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, (since, _)| since.elapsed() < HOLDS);
        let (_, answer) = known.entry(name.to_owned()).or_insert_with(|| (Instant::now(), Answer::default()));
        Arc::clone(answer)
    }
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let answer = self.answer(name.as_str());
        Box::pin(async move {
            let ask = async || tokio::net::lookup_host((name.as_str(), 0)).await.map(Iterator::collect);
            let addresses = spread(answer.get_or_try_init(ask).await?.clone());
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// Addresses in an order of chance, but the family that the system prefers first.
fn spread(mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let preferred = addresses.first().is_some_and(SocketAddr::is_ipv6);
    fastrand::shuffle(&mut addresses);
    addresses.sort_by_key(|address| address.is_ipv6() != preferred);
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_comes_first_at_times_and_the_other_family_never() {
        let of = |text: &str| text.parse::<SocketAddr>().unwrap();
        let all = vec![of("10.0.0.1:0"), of("[::1]:0"), of("10.0.0.2:0"), of("10.0.0.3:0")];
        let mut first = std::collections::HashSet::new();
        for _ in 0..500 {
            let spread = spread(all.clone());
            assert_eq!((spread.len(), spread[3]), (4, of("[::1]:0")));
            first.insert(spread[0]);
        }
        assert_eq!(first.len(), 3);
    }

    #[test]
    fn a_name_is_asked_for_once_by_many() {
        let names = Resolver::default();
        assert!(Arc::ptr_eq(&names.answer("a"), &names.answer("a")));
        assert!(!Arc::ptr_eq(&names.answer("a"), &names.answer("b")));
    }
}
