//! From what the user typed to the objects of a checkpoint.
//!
//! A file, several, a directory, a shard index, a glob: each leads to a list of objects and, where there is one, the
//! index that decides what in them counts. The rules are those of the libraries
//! that wrote these directories; where a directory is ambiguous or holds something else, the error says what is there.
//!
//! Names of models on the Hub are not resolved here. `~` is expanded by the Python package and by shells.

use std::collections::HashMap;
use std::fmt;

use super::ShardIndex;
use super::errors;
use super::local_glob::LocalGlob;
use super::location::{self, LocationKind, classify};
use crate::error::{Error, ErrorKind, Result};
use crate::store::Store;
use crate::store::sink::{INCOMPLETE_MARKER, incomplete, is_unfinished};

/// How a shard index is named.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";
const WEIGHTS_SUFFIX: &str = ".safetensors";
/// Which index a directory means if it holds several: the full-precision ones of transformers and diffusers.
const PREFERRED_INDEXES: [&str; 2] =
    ["model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"];

/// The objects of a checkpoint.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Resolved {
    /// Where the objects are: each once, in the order given, the shards of an index in the order of their names.
    pub objects: Vec<String>,
    /// The indexes that decide which tensors of their shards count.
    pub indexes: Vec<ResolvedIndex>,
}

/// A shard index and the objects it speaks of.
#[derive(Clone, PartialEq, Eq)]
pub struct ResolvedIndex {
    /// Where the index is.
    pub location: String,
    /// What it says.
    pub index: ShardIndex,
    /// For each of its shards, the shard's position in [`Resolved::objects`].
    pub objects: Vec<u32>,
}

impl fmt::Debug for Resolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Locations may carry secrets.
        let objects: Vec<_> = self.objects.iter().map(|location| location::shown(location)).collect();
        f.debug_struct("Resolved").field("objects", &objects).field("indexes", &self.indexes).finish()
    }
}

impl fmt::Debug for ResolvedIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { location, index, objects } = self;
        let location = location::shown(location);
        let mut shown = f.debug_struct("ResolvedIndex");
        shown.field("location", &location).field("index", index).field("objects", objects).finish()
    }
}

/// Finds the objects that `inputs` name.
///
/// # Errors
/// `NotFound` where an input names nothing that can be loaded, `Format` where an index is malformed, and what the
/// store reports.
pub fn resolve(store: &dyn Store, inputs: &[String]) -> Result<Resolved> {
    let mut found = Resolver { store, resolved: Resolved::default(), positions: HashMap::new() };
    if inputs.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, "no file was given"));
    }
    for input in inputs {
        let location = location::without_file_scheme(input)?;
        if location::is_url(&location) && !location::is_http(&location) && location.contains(['*', '[']) {
            found.remote_glob(&location)?;
            continue;
        }
        if !location::is_url(&location) && is_unfinished(&location) {
            return Err(incomplete(location::shown(&location).as_ref()));
        }
        let kind = classify(&location);
        if let Some(refused) = errors::nearly_url(&location).filter(|_| kind == LocationKind::Missing) {
            return Err(refused);
        }
        match kind {
            LocationKind::Object => found.object(&location)?,
            LocationKind::Directory => found.directory(&location)?,
            LocationKind::Missing if location.contains(['*', '?', '[']) => found.glob(&location)?,
            LocationKind::Missing => return Err(errors::missing(store, &location)),
        }
    }
    Ok(found.resolved)
}

/// Whether a file of that name is a shard index: with a variant, as in `model.safetensors.index.fp16.json`, too.
fn is_index(name: &str) -> bool {
    name.ends_with(".index.json") || (name.contains(".safetensors.index.") && name.ends_with(".json"))
}

struct Resolver<'s> {
    store: &'s dyn Store,
    resolved: Resolved,
    positions: HashMap<String, u32>,
}

impl Resolver<'_> {
    /// An object: weights, or an index.
    fn object(&mut self, location: &str) -> Result<()> {
        if is_index(location::name(location)) {
            self.index(location)
        } else {
            self.add(location.to_owned()).map(drop)
        }
    }

    /// Adds weights, unless they are there already; returns their position.
    fn add(&mut self, location: String) -> Result<u32> {
        if let Some(position) = self.positions.get(&location) {
            return Ok(*position);
        }
        let position = u32::try_from(self.resolved.objects.len())
            .map_err(|_| Error::new(ErrorKind::Format, "more files than can be counted"))?;
        self.resolved.objects.push(location.clone());
        self.positions.insert(location, position);
        Ok(position)
    }

    fn index(&mut self, location: &str) -> Result<()> {
        if self.resolved.indexes.iter().any(|known| known.location == location) {
            return Ok(());
        }
        let text = location::read_whole(self.store, location)?;
        let index = ShardIndex::parse(&text).map_err(|error| error.object(location::shown(location)))?;
        let objects = index
            .shards
            .iter()
            .map(|shard| self.add(location::beside(location, shard)))
            .collect::<Result<_>>()?;
        self.resolved.indexes.push(ResolvedIndex { location: location.to_owned(), index, objects });
        Ok(())
    }

    fn directory(&mut self, directory: &str) -> Result<()> {
        let entries = match self.store.list(directory) {
            // A URL does not say whether it names an object or a prefix.
            Err(missing) if missing.kind() == ErrorKind::NotFound && may_be_object(directory) => {
                return match self.store.open(directory) {
                    // A server's own page about a directory.
                    Ok(object) if location::is_http(directory) && location::is_web_page(&*object) => {
                        Err(missing)
                    }
                    Ok(_) => self.add(directory.to_owned()).map(drop),
                    Err(error) if error.kind() == ErrorKind::NotFound => Err(missing),
                    // HTTP servers refuse directories that they do not list, as if it were for want of a password.
                    Err(error) if error.kind() == ErrorKind::Access && location::is_http(directory) => {
                        Err(missing)
                    }
                    Err(error) => Err(error),
                };
            }
            entries => entries?,
        };
        let locations: Vec<_> = entries.into_iter().map(|entry| entry.location).collect();
        refuse_incomplete(directory, &locations)?;
        if let Some(index) = choose_index(directory, &locations)? {
            return self.index(&index);
        }
        let weights = choose_weights(&locations);
        if weights.is_empty() {
            return Err(errors::no_weights(self.store, directory, &locations));
        }
        weights.into_iter().try_for_each(|location| self.add(location).map(drop))
    }

    /// The objects that match a pattern; where none does, what is there under that very name: keys may hold what patterns
    /// are made of.
    fn remote_glob(&mut self, pattern: &str) -> Result<()> {
        let refused = match self.matching(pattern) {
            Err(refused) if matches!(refused.kind(), ErrorKind::NotFound | ErrorKind::Access) => refused,
            done => return done,
        };
        let literally = match classify(pattern) {
            LocationKind::Object => self.store.open(pattern).and_then(|_| self.object(pattern)),
            LocationKind::Directory | LocationKind::Missing => self.directory(pattern),
        };
        literally.map_err(|error| if error.kind() == ErrorKind::NotFound { refused } else { error })
    }

    /// The objects whose names match a pattern, in a prefix that is taken to the letter.
    fn matching(&mut self, pattern: &str) -> Result<()> {
        let refuse = |cause: &str| {
            Error::new(ErrorKind::NotFound, cause.to_owned()).object(location::shown(pattern)).remedy(
                "Check the pattern; in a URL only the last part may hold one, such as s3://bucket/model/*.safetensors",
            )
        };
        let directory = location::parent(pattern);
        let matcher =
            glob::Pattern::new(location::name(pattern)).map_err(|_| refuse("not a valid pattern"))?;
        let listed = self.store.list(directory).map_err(|error| match error.kind() {
            ErrorKind::NotFound if directory.contains(['*', '[']) => {
                refuse("a part before the last holds a pattern")
            }
            _ => error,
        })?;
        let mut matching: Vec<_> = listed.into_iter().map(|entry| entry.location).collect();
        refuse_incomplete(directory, &matching)?;
        match matching.iter().position(|found| location::name(found) == location::name(pattern)) {
            Some(itself) => matching = vec![matching.swap_remove(itself)],
            None => matching.retain(|location| matcher.matches(location::name(location))),
        }
        match (&choose_weights(&matching)[..], &matching[..]) {
            ([], []) => Err(refuse("no object matches the pattern")),
            ([], [object]) => self.object(object),
            ([], _) => Err(refuse("nothing that matches the pattern is a safetensors file")),
            (weights, _) => weights.iter().try_for_each(|location| self.add(location.clone()).map(drop)),
        }
    }

    /// The files that match a pattern; a pattern that matches only one directory means that directory.
    fn glob(&mut self, pattern: &str) -> Result<()> {
        let refuse = |cause: String| {
            Error::new(ErrorKind::NotFound, cause)
                .object(location::shown(pattern))
                .remedy("Check the pattern; quote it if the shell must not expand it")
        };
        let matches = LocalGlob::new(pattern)
            .map_err(|error| refuse(format!("no such file, and not a valid pattern: {error}")))?
            .matches()?;
        let (mut files, mut directories) = (Vec::new(), Vec::new());
        for location in matches {
            if classify(&location) == LocationKind::Directory {
                directories.push(location);
            } else {
                files.push(location);
            }
        }
        let weights = choose_weights(&files);
        match (&weights[..], &files[..], &directories[..]) {
            ([], [file], _) => self.object(file),
            ([], [], [directory]) => self.directory(directory),
            ([], [], []) => Err(refuse("no file matches the pattern".into())),
            ([], ..) => {
                let count = files.len() + directories.len();
                Err(refuse(format!("none of the {count} names that match the pattern is a safetensors file")))
            }
            _ => weights.into_iter().try_for_each(|location| self.add(location).map(drop)),
        }
    }
}

/// Refuses a prefix that a save has not completed.
fn refuse_incomplete(directory: &str, locations: &[String]) -> Result<()> {
    match locations.iter().any(|location| location::name(location) == INCOMPLETE_MARKER) {
        true => Err(incomplete(location::shown(directory).as_ref())),
        false => Ok(()),
    }
}

/// Whether a URL that names no prefix may name an object: one that ends in a slash means a prefix.
fn may_be_object(location: &str) -> bool {
    location::is_url(location) && !location::split_query(location).0.ends_with('/')
}

/// The index that a directory of these objects means.
fn choose_index(directory: &str, locations: &[String]) -> Result<Option<String>> {
    let indexes: Vec<_> = locations.iter().filter(|location| named(location, INDEX_SUFFIX)).collect();
    let preferred = PREFERRED_INDEXES
        .iter()
        .find_map(|wanted| indexes.iter().find(|location| location::name(location) == *wanted));
    match (preferred, &indexes[..]) {
        (Some(index), _) => Ok(Some(index.to_string())),
        (None, []) => Ok(None),
        (None, [index]) => Ok(Some(index.to_string())),
        (None, several) => {
            let names: Vec<_> = several.iter().map(|location| location::name(location)).collect();
            Err(Error::new(
                ErrorKind::NotFound,
                format!("several shard indexes are there: {}", names.join(", ")),
            )
            .object(location::shown(directory))
            .remedy("Name the one to load"))
        }
    }
}

/// The weights among these objects, sorted. A `consolidated` file repeats, in the layout of the model's authors, what
/// the others hold: it counts only where it is alone.
fn choose_weights(locations: &[String]) -> Vec<String> {
    let mut weights: Vec<_> = locations.iter().filter(|location| named(location, WEIGHTS_SUFFIX)).collect();
    let consolidated = |location: &&String| location::name(location).starts_with("consolidated");
    if !weights.iter().all(consolidated) {
        weights.retain(|location| !consolidated(location));
    }
    weights.sort_unstable();
    weights.into_iter().cloned().collect()
}

/// Whether an object's name ends so. Not a hidden one: macOS puts `._name` files, which are no weights, beside those it
/// copies.
fn named(location: &str, suffix: &str) -> bool {
    let name = location::name(location);
    name.ends_with(suffix) && !name.starts_with('.')
}
