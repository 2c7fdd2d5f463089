//! What the hub's refusals mean, and what to do about them.
//!
//! The hub says in `X-Error-Code` what it means; its statuses alone are misleading: a repository that does not exist is
//! answered like one that is private, with 401 where no one is logged in.

use crate::error::ErrorKind;
use crate::store::remote::http::response_recorder::Refusal;

/// The kind of a refusal and what to try, where it is one of the hub's own. `page` is the repository's page.
pub(in crate::store::remote) fn refused(
    refusal: &Refusal,
    page: &str,
    credentials: &str,
) -> Option<(ErrorKind, String)> {
    let anonymous = credentials == "none";
    let log_in = "log in with `hf auth login`, set HF_TOKEN, or give the storage option token";
    let said = |words: &str| refusal.message.as_deref().is_some_and(|message| message.contains(words));
    let code = refusal.code.as_deref().unwrap_or_default();
    Some(match (refusal.status, code) {
        (401 | 403, "GatedRepo") => {
            let then = if anonymous {
                format!(", then {log_in}")
            } else {
                " with the account that the token is of".into()
            };
            (ErrorKind::Access, format!("The repository is gated: accept its conditions at {page}{then}"))
        }
        (_, "RevisionNotFound") => {
            let remedy = format!(
                "Check the revision after the @, in which a slash is written %2F; {page} shows branches and tags"
            );
            (ErrorKind::NotFound, remedy)
        }
        (_, "EntryNotFound") => {
            (ErrorKind::NotFound, format!("Check the path; {page}/tree/main shows what is there"))
        }
        _ if code == "DisabledRepo" || said("is disabled") => {
            (ErrorKind::Access, format!("The repository was disabled: see {page}"))
        }
        (401, _) if said("Invalid credentials") => (
            ErrorKind::Access,
            format!("The token ({credentials}) is not valid, perhaps no longer: {log_in} to another"),
        ),
        (_, "RepoNotFound") | (401 | 404, _) => {
            let who = if anonymous { log_in } else { "the token must be of an account that may read it" };
            (ErrorKind::NotFound, format!("Check the name; if the repository is private, {who}"))
        }
        (403, _) => (
            ErrorKind::Access,
            "The token must allow reading this repository: check its permissions in the hub's settings"
                .into(),
        ),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meant(
        status: u16,
        code: Option<&str>,
        message: Option<&str>,
        credentials: &str,
    ) -> (ErrorKind, String) {
        let refusal = Refusal {
            status,
            code: code.map(str::to_owned),
            message: message.map(str::to_owned),
            ..Refusal::default()
        };
        refused(&refusal, "https://huggingface.co/o/n", credentials).unwrap()
    }

    #[test]
    fn every_refusal_says_what_to_do() {
        for (status, code, message, credentials, kind, says) in [
            (
                401,
                Some("GatedRepo"),
                None,
                "none",
                ErrorKind::Access,
                "accept its conditions at https://huggingface.co/o/n",
            ),
            (403, Some("GatedRepo"), None, "HF_TOKEN", ErrorKind::Access, "the account that the token is of"),
            (404, Some("RepoNotFound"), None, "HF_TOKEN", ErrorKind::NotFound, "Check the name"),
            (401, Some("RepoNotFound"), None, "none", ErrorKind::NotFound, "hf auth login"),
            (401, None, Some("Invalid username or password"), "none", ErrorKind::NotFound, "Check the name"),
            (
                401,
                None,
                Some("Invalid credentials in Authorization header"),
                "HF_TOKEN",
                ErrorKind::Access,
                "HF_TOKEN",
            ),
            (404, Some("RevisionNotFound"), None, "none", ErrorKind::NotFound, "after the @"),
            (404, Some("EntryNotFound"), None, "none", ErrorKind::NotFound, "Check the path"),
            (403, None, Some("Access to this resource is disabled."), "none", ErrorKind::Access, "disabled"),
            (403, None, None, "HF_TOKEN", ErrorKind::Access, "permissions"),
        ] {
            let (found, remedy) = meant(status, code, message, credentials);
            assert_eq!(found, kind, "{status} {code:?}");
            assert!(remedy.contains(says), "{remedy}");
        }
    }

    #[test]
    fn a_busy_hub_is_no_refusal() {
        assert!(refused(&Refusal { status: 429, ..Refusal::default() }, "", "none").is_none());
    }
}
