//! Objects and prefixes of a store that is set up.
//!
//! * `opening`: what an object is, and its first bytes; `object`: an open one, whose ranges are read.
//! * `fetch`: one range, resumed where it stopped. `listing`: what is under a prefix.
//! * `upload`: an object written, whole or in parts.
//! * `neighbours`: what lies beside a key that is not there. `failure`: what errors say; `hub_errors`: the same of the Hugging Face hub's refusals.

pub(crate) mod failure;
pub(crate) mod fetch;
pub(crate) mod hub_errors;
pub(crate) mod listing;
pub(crate) mod neighbours;
pub(crate) mod object;
pub(crate) mod opening;
pub(crate) mod upload;
