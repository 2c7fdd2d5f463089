//! What to say when there is nothing to load.
//!
//! "No such file" at night is not enough: these errors say what was found instead of weights and how to get from there
//! to something that loads.

use super::location::{self, LocationKind, classify, shown};
use super::source::INDEX_SUFFIX;
use crate::closest::closest;
use crate::error::{Error, ErrorKind};
use crate::store::{Store, is_known_scheme, location_of};

/// How many names an error lists before it only counts.
const LISTED: usize = 8;

const CONVERT: &str = "Fetch the safetensors version of the model, or convert it: load it with transformers and call \
                       save_pretrained(..., safe_serialization=True)";

/// Endings that say what a directory without weights holds, and what to do about it.
const HELD: &[(&[&str], &str)] = &[
    (
        &[".incomplete", ".part", ".aria2", ".crdownload", ".safetensors.tmp"],
        "A download is under way or was cut off: finish it",
    ),
    (&[".bin", ".pt", ".pth", ".ckpt"], CONVERT),
    (
        &[".h5", ".msgpack", ".onnx"],
        "Fetch the safetensors version of the model: this is another framework's",
    ),
    (&[".gguf"], "Penstock reads safetensors: use llama.cpp, or fetch the safetensors version of the model"),
];

/// The refusal of a directory that holds these objects, none of them weights.
pub(super) fn no_weights(store: &dyn Store, directory: &str, locations: &[String]) -> Error {
    let names: Vec<_> = locations.iter().map(|location| location::name(location).to_owned()).collect();
    let directories = store.directories(location::or_here(directory));
    let held = match (names.is_empty(), directories.is_empty()) {
        (true, true) => "is empty".into(),
        (false, true) => format!("holds {}", list(&names)),
        (true, false) => format!("holds only the directories {}", list(&directories)),
        (false, false) => format!("holds {} and the directories {}", list(&names), list(&directories)),
    };
    let remedy = HELD
        .iter()
        .find(|(ends, _)| names.iter().any(|name| ends.iter().any(|end| name.ends_with(end))))
        .map_or("Name the directory that holds the .safetensors files", |(_, remedy)| remedy);
    Error::new(ErrorKind::NotFound, format!("no .safetensors file is there: the directory {held}"))
        .object(location::shown(directory))
        .remedy(remedy)
}

/// The refusal of a path that does not exist.
pub(super) fn missing(store: &dyn Store, location: &str) -> Error {
    if location.is_empty() {
        return Error::new(ErrorKind::NotFound, "the location is empty")
            .remedy("Give the path of a file or directory, or a URL");
    }
    let error = Error::new(ErrorKind::NotFound, "no such file or directory").object(shown(location));
    if shown(location) != location {
        return error.remedy("Check the path; a URL begins with its scheme, such as https://");
    }
    if location.starts_with('~') {
        return error.remedy("`~` stands for no directory here: give the full path");
    }
    let directory = location::parent(location);
    if classify(location::or_here(directory)) != LocationKind::Directory {
        return match typed(location).split('/').collect::<Vec<_>>()[..] {
            [owner, model] if !owner.is_empty() && !model.is_empty() && !owner.starts_with('.') => error
                .remedy(format!(
                    "For a model on the Hugging Face Hub, write hf://{owner}/{model}; else check the path"
                )),
            _ => error.remedy(format!("The directory {directory} does not exist either: check the path")),
        };
    }
    let entries = store.list(location::or_here(directory)).unwrap_or_default();
    let candidates: Vec<_> = entries
        .iter()
        .map(|entry| location::name(&entry.location).to_owned())
        .filter(|name| name.ends_with(".safetensors") || name.ends_with(INDEX_SUFFIX))
        .collect();
    let name = location::name(location);
    let directories = store.directories(location::or_here(directory));
    let like = closest(name, candidates.iter().chain(&directories).map(String::as_str));
    let like = like.iter().map(|like| location::join(directory, like)).collect::<Vec<_>>().join(" or ");
    let like = if like.is_empty() { like } else { format!("Did you mean {like}? ") };
    if candidates.is_empty() {
        return error.remedy(format!("{like}Check the path"));
    }
    error.remedy(format!("{like}Check the path: its directory holds {}", list(&candidates)))
}

/// A path as it was typed, most likely: relative to the working directory where it is below that.
fn typed(location: &str) -> &str {
    let here = std::env::current_dir().map(location_of).unwrap_or_default();
    location.strip_prefix(&here).and_then(|rest| rest.strip_prefix('/')).unwrap_or(location)
}

/// Whether a path is a slash or two short of a URL.
pub fn is_nearly_url(location: &str) -> bool {
    let scheme = location.split_once(':').map_or("", |(scheme, _)| scheme);
    scheme.eq_ignore_ascii_case("file") || is_known_scheme(scheme)
}

/// The refusal of a path that does not exist and is a slash or two short of a URL: of `s3:/bucket/model`.
pub(super) fn nearly_url(location: &str) -> Option<Error> {
    let (scheme, rest) = location.split_once(':')?;
    let known = is_nearly_url(location);
    let rest = rest.trim_start_matches('/');
    if !known || rest.is_empty() {
        return None;
    }
    let slash = if scheme.eq_ignore_ascii_case("file") { "/" } else { "" };
    // It may carry a signature, as the URL would.
    let url = format!("{scheme}://{slash}{rest}");
    let meant = shown(&url);
    Some(
        Error::new(
            ErrorKind::NotFound,
            "no such file or directory: this is taken for a path of this machine",
        )
        .object(meant.replacen("://", ":", 1))
        .remedy(format!("The scheme of a URL ends in ://. Write {meant}")),
    )
}

/// The names, or the first few and how many more there are.
fn list(names: &[String]) -> String {
    let shown = names.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
