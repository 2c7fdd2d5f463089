//! What becomes of requests that fail or are slow.
//!
//! * `retry`: when to ask again, and the budget of a load; `outcome`: what one request came to.
//! * `latency`: when a range is slow enough for a hedged request.
//!
//! State machines, which know no client and no clock but those that they are given.

pub(crate) mod latency;
pub(crate) mod outcome;
pub(crate) mod retry;
