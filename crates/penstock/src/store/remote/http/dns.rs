//! Names of hosts to addresses, so that connections spread over all that a name stands for.
//!
//! An object store's name stands for a handful of hosts, and a client that always takes the first has all its connections
//! at one of them. So addresses are shuffled for every connection.

use std::net::SocketAddr;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Asks the system, and shuffles what it says.
pub(crate) struct Resolver;

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let addresses = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            Ok(Box::new(spread(addresses).into_iter()) as Addrs)
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
}
