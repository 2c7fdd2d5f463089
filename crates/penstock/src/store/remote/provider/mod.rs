//! The stores behind buckets, and the credentials for them.
//!
//! * `connect` sets up a `backend` by `s3` (with `aws` and `aws_profile`), `gcs` (with `google`) or `azure`.
//! * `credential_cache`: credentials that expire are renewed while a load goes on.

pub(crate) mod aws;
pub(crate) mod aws_profile;
pub(crate) mod azure;
pub(crate) mod backend;
pub(crate) mod connect;
pub(crate) mod credential_cache;
pub(crate) mod gcs;
pub(crate) mod google;
pub(crate) mod s3;
