//! The HTTP client of all stores.
//!
//! * `transport`: requests and answers; `client_key`: what tells one client from another; `connections`: the process's
//!   runtimes and idle connections; `context`: what the requests of one load share.
//! * `dns`, `tls`, `proxies`: addresses, certificates, and the way to a host.
//! * `response_recorder`: what errors need of an answer. `whole`: servers without ranges.

pub(crate) mod client_key;
pub(crate) mod connections;
pub(crate) mod context;
pub(crate) mod dns;
pub(crate) mod proxies;
pub(crate) mod response_recorder;
pub(crate) mod tls;
pub(crate) mod transport;
pub(crate) mod whole;
