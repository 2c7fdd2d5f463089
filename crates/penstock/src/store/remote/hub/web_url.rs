//! Addresses that a browser shows on the hub, which are of pages and not of files.

use percent_encoding::percent_decode_str;
use url::Url;

use super::settings;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::settings::address::{Address, Provider};
use crate::store::remote::settings::environment::Environment;

/// The hosts of the hub itself.
const HOSTS: [&str; 3] = ["huggingface.co", "www.huggingface.co", "hf.co"];

/// Refuses the URL of a page, which looks like that of a directory or a file.
///
/// # Errors
/// `NotFound`, with the location to write.
pub(in crate::store::remote) fn refuse_page(address: &Address, environment: &Environment) -> Result<()> {
    if address.provider != Provider::Web {
        return Ok(());
    }
    match location_of_page(&address.url(), &settings::endpoint(environment).0) {
        Some(location) => {
            Err(Error::new(ErrorKind::NotFound, "this is a page of the Hugging Face hub, not a file")
                .object(address.shown())
                .remedy(format!("Write {location}")))
        }
        None => Ok(()),
    }
}

/// The `hf://` location of what a page of the hub shows: a repository, or a directory or a file of it.
fn location_of_page(url: &str, endpoint: &str) -> Option<String> {
    let page: Url = url.parse().ok()?;
    let endpoint: Url = endpoint.parse().ok()?;
    let is_hub = page.host_str().is_some_and(|host| HOSTS.contains(&host));
    let rest = match is_hub {
        true => page.path(),
        false if page.origin() == endpoint.origin() => {
            page.path().strip_prefix(endpoint.path().trim_end_matches('/'))?
        }
        false => return None,
    };
    let parts: Vec<_> = rest.trim_matches('/').split('/').collect();
    let kind = match parts[0] {
        kind @ ("datasets" | "spaces") => format!("{kind}/"),
        "api" => return None,
        _ => String::new(),
    };
    let [organisation, name, shows @ ..] = &parts[usize::from(!kind.is_empty())..] else { return None };
    let repository = format!("hf://{kind}{organisation}/{name}");
    match shows {
        // A mirror's host may serve other things too.
        [] => is_hub.then_some(repository),
        ["blob" | "tree", revision] => Some(format!("{repository}@{revision}")),
        ["blob" | "tree", revision, path @ ..] => {
            let path = path.join("/");
            Some(format!("{repository}@{revision}/{}", percent_decode_str(&path).decode_utf8().ok()?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_the_hub_show_what_a_location_names() {
        for (url, location) in [
            ("https://huggingface.co/org/name", Some("hf://org/name")),
            ("https://hf.co/org/name/", Some("hf://org/name")),
            ("https://huggingface.co/datasets/org/name?x=1", Some("hf://datasets/org/name")),
            ("https://huggingface.co/org/name/tree/v1%2F2", Some("hf://org/name@v1%2F2")),
            (
                "https://huggingface.co/org/name/blob/main/a/m%20x.safetensors",
                Some("hf://org/name@main/a/m x.safetensors"),
            ),
            ("http://mirror:8000/hf/org/name/tree/main", Some("hf://org/name@main")),
            ("https://huggingface.co/org/name/resolve/main/m.safetensors", None),
            ("https://huggingface.co/api/models/org", None),
            ("https://huggingface.co/org", None),
            ("https://huggingface.co/", None),
            ("http://mirror:8000/hf/org/name", None),
            ("http://mirror:8000/other/org/name/tree/main", None),
            ("http://mirror:8001/hf/org/name/tree/main", None),
            ("https://huggingface.co.evil.example/org/name", None),
        ] {
            assert_eq!(location_of_page(url, "http://mirror:8000/hf").as_deref(), location, "{url}");
        }
    }
}
