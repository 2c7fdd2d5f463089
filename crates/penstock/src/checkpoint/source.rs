//! From what a user gave to a list of objects.
//!
//! A path may be a file, a directory, a glob, a shard index or a model of a Hugging Face cache. A directory is read as
//! its shard index says; without one, all its safetensors files are the checkpoint, except `consolidated*` copies of
//! the same weights beside others.

use std::path::{Path, PathBuf};

use super::ShardIndex;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Window;
use crate::store::{Lane, Store};

/// The objects of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Where they are, in the form that the store opens.
    pub locations: Vec<String>,
    /// The index that they were found by, and where it is.
    pub index: Option<(String, ShardIndex)>,
}

/// Names of shard indices, the usual ones first.
const INDICES: [&str; 2] = ["model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"];
const INDEX_SUFFIX: &str = ".safetensors.index.json";
const SUFFIX: &str = ".safetensors";

/// Finds the objects that `inputs` name.
///
/// # Errors
/// `NotFound` where there is nothing, or no checkpoint; `Format` for a malformed index; what the store fails with.
pub fn resolve(store: &dyn Store, inputs: &[String]) -> Result<Source> {
    let mut locations = Vec::new();
    let mut found_index = None;
    for input in inputs {
        let source = resolve_one(store, input)?;
        if source.index.is_some() && inputs.len() > 1 {
            return Err(Error::new(ErrorKind::Config, "a shard index cannot be one of several inputs")
                .object(input)
                .remedy("Give the index alone, or the files"));
        }
        found_index = source.index;
        // A file named twice, say by overlapping globs, is still one file.
        locations.extend(source.locations);
    }
    let mut seen = std::collections::HashSet::new();
    locations.retain(|location| seen.insert(location.clone()));
    if locations.is_empty() && found_index.is_none() {
        return Err(
            Error::new(ErrorKind::NotFound, "no checkpoint was named").remedy("Give at least one path")
        );
    }
    Ok(Source { locations, index: found_index })
}

fn resolve_one(store: &dyn Store, input: &str) -> Result<Source> {
    let path = input
        .strip_prefix("file://")
        .map_or_else(|| PathBuf::from(input), |rest| PathBuf::from(unescape(rest)));
    let Some(text) = path.to_str() else {
        return Err(Error::new(ErrorKind::NotFound, "the path is not Unicode").object(input));
    };
    if let Some((scheme, _)) = input.split_once("://").filter(|(scheme, _)| *scheme != "file") {
        return Err(Error::new(ErrorKind::NotFound, format!("{scheme}:// locations are not supported"))
            .object(input)
            .remedy("Give a local path"));
    }
    if path.is_dir() {
        return directory(store, &path, text);
    }
    if text.ends_with(".json") {
        return indexed(store, text);
    }
    if !path.exists() && !path.is_symlink() && text.contains(['*', '?', '[']) {
        return matching(text);
    }
    Ok(Source { locations: vec![text.to_owned()], index: None })
}

fn directory(store: &dyn Store, path: &Path, text: &str) -> Result<Source> {
    if let Some(snapshot) = hub_snapshot(path)? {
        let text = snapshot.to_str().unwrap_or(text).to_owned();
        return directory(store, &snapshot, &text);
    }
    let files: Vec<_> = store.list(text)?.into_iter().map(|entry| entry.location).collect();
    let name = |location: &str| location.rsplit('/').next().unwrap_or(location).to_owned();
    let indices: Vec<_> = files.iter().filter(|file| file.ends_with(INDEX_SUFFIX)).collect();
    let usual = INDICES.iter().find_map(|usual| indices.iter().find(|index| name(index) == *usual));
    if let Some(index) = usual.or_else(|| indices.first().filter(|_| indices.len() == 1)) {
        return indexed(store, index);
    }
    let mut locations: Vec<_> = files.iter().filter(|file| file.ends_with(SUFFIX)).cloned().collect();
    if locations.iter().any(|file| !name(file).starts_with("consolidated")) {
        locations.retain(|file| !name(file).starts_with("consolidated"));
    }
    if locations.is_empty() {
        let mut held: Vec<_> = files.iter().map(|file| name(file)).collect();
        let more = held.len().saturating_sub(8);
        held.truncate(8);
        let mut holds = if held.is_empty() { "no files".to_owned() } else { held.join(", ") };
        if more > 0 {
            holds.push_str(&format!(" and {more} more"));
        }
        let pickled =
            held.iter().any(|file| [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| file.ends_with(end)));
        let remedy = if pickled {
            "Convert the PyTorch files to safetensors"
        } else {
            "Give the directory that holds the *.safetensors files"
        };
        return Err(Error::new(
            ErrorKind::NotFound,
            format!("no *.safetensors in this directory; it holds {holds}"),
        )
        .object(text)
        .remedy(remedy));
    }
    Ok(Source { locations, index: None })
}

fn indexed(store: &dyn Store, location: &str) -> Result<Source> {
    let object = store.open(location)?;
    let bytes = usize::try_from(object.bytes()).ok().filter(|n| *n <= 1 << 30).ok_or_else(|| {
        Error::new(ErrorKind::Format, format!("{} bytes are too many for a shard index", object.bytes()))
            .object(location)
    })?;
    let mut json = vec![0; bytes];
    object.read_into(0, Window::from_slice(&mut json), &mut Lane::default())?;
    let index = ShardIndex::parse(&json).map_err(|error| error.object(location))?;
    let directory = location.rsplit_once('/').map_or("", |(directory, _)| directory);
    let place = |file: &&str| match (directory, location.starts_with('/')) {
        ("", true) => format!("/{file}"),
        ("", false) => (*file).to_owned(),
        _ => format!("{directory}/{file}"),
    };
    let locations = index.files().iter().map(place).collect();
    Ok(Source { locations, index: Some((location.to_owned(), index)) })
}

fn matching(pattern: &str) -> Result<Source> {
    let paths = glob::glob(pattern).map_err(|error| {
        Error::new(ErrorKind::NotFound, format!("not a valid pattern: {error}")).object(pattern)
    })?;
    let mut locations = Vec::new();
    for path in paths {
        let path =
            path.map_err(|error| Error::from_io("matching the pattern", error.error()).object(pattern))?;
        if let Some(text) = path.to_str().filter(|_| !path.is_dir()) {
            locations.push(text.to_owned());
        }
    }
    if locations.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, "nothing matches this pattern")
            .object(pattern)
            .remedy("Check the path; relative paths start at the working directory"));
    }
    Ok(Source { locations, index: None })
}

/// The snapshot to use, if `path` is a model of a Hugging Face cache: what `refs/main` names, or the only one.
fn hub_snapshot(path: &Path) -> Result<Option<PathBuf>> {
    let is_model =
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("models--"));
    let snapshots = path.join("snapshots");
    if !is_model || !snapshots.is_dir() {
        return Ok(None);
    }
    let missing = |cause: String| {
        Err(Error::new(ErrorKind::NotFound, cause)
            .object(path.display().to_string())
            .remedy("Download the model first (hf download), or give a directory below snapshots/"))
    };
    if let Ok(revision) = std::fs::read_to_string(path.join("refs/main")) {
        let revision = revision.trim();
        let snapshot = snapshots.join(revision);
        let plain = !revision.is_empty() && revision.chars().all(|c| c.is_ascii_alphanumeric());
        return if plain && snapshot.is_dir() {
            Ok(Some(snapshot))
        } else {
            missing(format!("refs/main names the revision {revision:?}, of which there is no snapshot"))
        };
    }
    let entries = std::fs::read_dir(&snapshots).map_err(|e| Error::from_io("listing snapshots", &e))?;
    let mut found: Vec<_> =
        entries.filter_map(Result::ok).map(|entry| entry.path()).filter(|p| p.is_dir()).collect();
    match (found.pop(), found.len()) {
        (Some(only), 0) => Ok(Some(only)),
        (None, _) => missing("the cache holds no snapshot of this model".into()),
        (Some(_), more) => missing(format!("there are {} snapshots and no refs/main to choose by", more + 1)),
    }
}

/// Decodes `%41` in the path of a `file://` URL.
fn unescape(path: &str) -> String {
    let bytes = path.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code = path
            .get(at + 1..at + 3)
            .filter(|_| bytes[at] == b'%')
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        decoded.push(code.unwrap_or(bytes[at]));
        at += if code.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&decoded).into_owned()
}
