//! The layer of an overlay that a file really lies in.
//!
//! Mount options name the layers by paths of whoever mounted them. In a container these usually lead nowhere, or to
//! something else of the same name; so a layer counts only if it holds a file of the same size and modification time.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::mounts::Mount;

/// Layers that are looked into, at most; a container image has a few dozen.
const MOST_LAYERS: usize = 512;

/// Where the file at `path` (absolute, without links), seen through `overlay`, really is.
pub(super) fn look_through(overlay: &Mount, path: &Path) -> Option<PathBuf> {
    let below = path.strip_prefix(&overlay.point).ok()?;
    // The mount may show a directory of the overlay only, or a single file.
    let within = overlay.root.strip_prefix("/").ok()?;
    let inside = if below.as_os_str().is_empty() { within.to_owned() } else { within.join(below) };
    let seen = std::fs::metadata(path).ok()?;
    layers(overlay).take(MOST_LAYERS).map(|layer| layer.join(&inside)).find(|candidate| {
        std::fs::symlink_metadata(candidate).is_ok_and(|found| {
            let modified = |file: &std::fs::Metadata| (file.mtime(), file.mtime_nsec());
            found.is_file() && found.len() == seen.len() && modified(&found) == modified(&seen)
        })
    })
}

/// The directories that are laid over each other, from the top.
fn layers(overlay: &Mount) -> impl Iterator<Item = PathBuf> {
    let upper = overlay.values("upperdir").map(unescaped).collect::<Vec<_>>();
    let lower = overlay.values("lowerdir").flat_map(split).collect::<Vec<_>>();
    // Since Linux 6.8, layers may be given one by one.
    let one_by_one =
        ["lowerdir+", "datadir+"].into_iter().flat_map(|name| overlay.values(name)).map(unescaped);
    let all = upper.into_iter().chain(lower).chain(one_by_one.collect::<Vec<_>>());
    // Relative ones were relative to the mounter's working directory.
    all.filter(|layer| layer.is_absolute())
}

/// Layers are separated by colons; one that belongs to a name is written after a backslash.
fn split(list: &[u8]) -> Vec<PathBuf> {
    let mut cuts = vec![0];
    let mut escaped = false;
    for (at, byte) in list.iter().enumerate() {
        if *byte == b':' && !escaped {
            cuts.push(at + 1);
        }
        escaped = *byte == b'\\' && !escaped;
    }
    cuts.push(list.len() + 1);
    cuts.windows(2).map(|cut| unescaped(&list[cut[0]..cut[1] - 1])).collect()
}

fn unescaped(name: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(name.len());
    let mut bytes = name.iter();
    while let Some(byte) = bytes.next() {
        plain.push(if *byte == b'\\' { *bytes.next().unwrap_or(byte) } else { *byte });
    }
    PathBuf::from(OsStr::from_bytes(&plain))
}

#[cfg(test)]
mod tests {
    use super::super::mounts::parse;
    use super::*;

    fn overlay(options: &str) -> Mount {
        let line = format!("30 29 0:27 / /merged rw - overlay overlay {options}");
        parse(line.as_bytes()).remove(0)
    }

    fn layers_of(options: &str) -> Vec<String> {
        layers(&overlay(options)).map(|layer| layer.display().to_string()).collect()
    }

    #[test]
    fn layers_are_listed_from_the_top() {
        assert_eq!(
            layers_of("rw,lowerdir=/l/B:/l/A,upperdir=/u,workdir=/w,xino=off"),
            ["/u", "/l/B", "/l/A"]
        );
        assert_eq!(layers_of("ro,lowerdir+=/l/B,lowerdir+=/l/A,datadir+=/d"), ["/l/B", "/l/A", "/d"]);
        assert_eq!(
            layers_of("ro,lowerdir=/l/A::/data"),
            ["/l/A", "/data"],
            "data-only layers follow two colons"
        );
    }

    #[test]
    fn colons_and_backslashes_may_belong_to_names() {
        // The mount table escapes the backslash once more.
        assert_eq!(layers_of(r"lowerdir=/a\134:b:/c\134\134d"), ["/a:b", r"/c\d"]);
    }

    #[test]
    fn relative_layers_and_none_at_all_lead_nowhere() {
        assert!(layers_of("rw,lowerdir=l/A:l/B").is_empty());
        assert!(layers_of("rw").is_empty());
    }

    #[test]
    fn a_file_is_found_in_the_layer_that_has_it_and_not_in_a_lookalike() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for layer in ["other", "real", "merged"] {
            std::fs::create_dir(at(layer)).unwrap();
            std::fs::write(at(layer).join("model"), layer).unwrap();
        }
        std::fs::copy(at("real/model"), at("merged/model")).unwrap();
        let modified = std::fs::metadata(at("real/model")).unwrap().modified().unwrap();
        std::fs::File::open(at("merged/model")).unwrap().set_modified(modified).unwrap();
        let mut mount = overlay(&format!("lowerdir={}:{}", at("other").display(), at("real").display()));
        mount.point = at("merged");
        assert_eq!(look_through(&mount, &at("merged/model")), Some(at("real/model")));
        std::fs::remove_file(at("real/model")).unwrap();
        assert_eq!(look_through(&mount, &at("merged/model")), None);
    }
}
