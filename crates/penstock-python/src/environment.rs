//! The environment that remote stores are set up from.

use penstock::store::{Environment, is_remote, set_google_token_command};
use pyo3::prelude::*;

use crate::errors::Outcome;

/// Storage options, by name.
pub type Options = Vec<(String, String)>;

/// The environment for whoever opens `locations`, with storage options laid over it.
///
/// Copies the process's variables, so it must be called with the GIL held: `os.environ` may not change meanwhile.
pub fn environment(locations: &[String], options: Option<Options>) -> Outcome<Environment> {
    let any = locations.iter().any(|location| is_remote(location));
    let command = |py: Python<'_>| py.import("penstock.google_tokens")?.getattr("COMMAND")?.extract();
    if any && let Ok(command) = Python::attach(command) {
        set_google_token_command(command);
    }
    let own = if any { Environment::of_process() } else { Environment::default() };
    Ok(own.with_options(&options.unwrap_or_default(), locations)?)
}
