//! Addresses that a browser shows on the hub, which are of pages and not of files.

use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::settings::address::{Address, Provider};

/// How URLs of the hub itself begin.
const HUB: [&str; 3] = ["https://huggingface.co/", "https://www.huggingface.co/", "https://hf.co/"];
/// What the paths of URLs hold that are not of pages.
const FILES: [&str; 3] = ["/resolve/", "/raw/", "/api/"];

/// Refuses the URL of a page, which looks like that of a directory or a file.
///
/// # Errors
/// `NotFound`.
pub(in crate::store::remote) fn refuse_page(address: &Address) -> Result<()> {
    let url = address.url();
    let has = |part: &&str| url.contains(*part);
    if address.provider != Provider::Web
        || !HUB.iter().any(|hub| url.starts_with(hub))
        || FILES.iter().any(has)
    {
        return Ok(());
    }
    Err(Error::new(ErrorKind::NotFound, "this is a page of the Hugging Face hub, not a file")
        .object(address.shown())
        .remedy("Write hf://org/name, hf://org/name@revision or hf://org/name@revision/path"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_the_hub_are_told_from_files() {
        for (url, is_page) in [
            ("https://huggingface.co/org/name", true),
            ("https://hf.co/org/name/", true),
            ("https://huggingface.co/datasets/org/name?x=1", true),
            ("https://huggingface.co/org/name/blob/main/a/m%20x.safetensors", true),
            ("https://huggingface.co/org/name/resolve/main/m.safetensors", false),
            ("https://huggingface.co/api/models/org", false),
            ("https://huggingface.co.evil.example/org/name", false),
        ] {
            assert_eq!(refuse_page(&Address::parse(url).unwrap()).is_err(), is_page, "{url}");
        }
    }
}
