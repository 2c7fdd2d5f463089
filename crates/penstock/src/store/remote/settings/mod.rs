//! What decides how a location is reached: the location itself, variables, and storage options.
//!
//! * `address`: a location taken apart; `s3_hosts`: the hosts of Amazon's buckets.
//! * `environment`: the variables that count for one checkpoint; `options`: storage options, which become variables
//!   (`option_names`).
//!
//! Secrets are in all of them. Nothing here makes a request.

pub(crate) mod address;
pub(crate) mod environment;
pub(crate) mod option_names;
pub(crate) mod options;
pub(crate) mod s3_hosts;
