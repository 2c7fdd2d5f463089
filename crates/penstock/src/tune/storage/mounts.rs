//! The mount table, as `/proc/self/mountinfo` has it (proc_pid_mountinfo(5)).
//!
//! Lines that make no sense are passed over: one odd mount must not hide the others. Paths are bytes, not text, and an
//! option may be there several times (`lowerdir+=`), which is why this is no library's parser: those of crates.io want
//! UTF-8, leave escapes in mount points, and keep options in maps.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) id: u64,
    /// Major and minor number of the file system; major 0 where it has no block device.
    pub(super) device: (u32, u32),
    /// Which directory of the file system is mounted.
    pub(super) root: PathBuf,
    /// Where.
    pub(super) point: PathBuf,
    pub(super) fs_type: String,
    pub(super) source: String,
    /// Options of the file system, not of the mount: `nconnect=16`, `lowerdir=…`.
    options: Vec<(String, OsString)>,
}

/// What is known of a file: which mount it says it is on, and how else that could be found.
#[derive(Debug, Clone, Copy)]
pub(super) struct MountLookup<'a> {
    /// Of `statx(2)`, since Linux 5.8.
    pub(super) mount_id: Option<u64>,
    pub(super) device: (u32, u32),
    /// Absolute, and without links.
    pub(super) path: &'a Path,
}

/// The mount that holds `place`.
///
/// By its number; else the one whose mount point is the longest prefix of the path, and of several there the last,
/// which hides the others. Where that one is of another device, and there is a mount of the right one, the table shows
/// another root than this process has, and the device decides.
pub(super) fn holding<'a>(mounts: &'a [Mount], place: &MountLookup<'_>) -> Option<&'a Mount> {
    if let Some(mount) = place.mount_id.and_then(|id| mounts.iter().find(|mount| mount.id == id)) {
        return Some(mount);
    }
    let by_path = mounts
        .iter()
        .filter(|mount| place.path.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.as_os_str().len());
    if by_path.is_some_and(|mount| mount.device == place.device) {
        return by_path;
    }
    mounts.iter().rfind(|mount| mount.device == place.device).or(by_path)
}

/// The mounts of a table, in its order.
pub(super) fn parse(table: &[u8]) -> Vec<Mount> {
    table.split(|byte| *byte == b'\n').filter_map(line).collect()
}

fn line(line: &[u8]) -> Option<Mount> {
    // Fields are separated by one blank each, and may be empty.
    let mut fields = line.split(|byte| *byte == b' ');
    let id = text(fields.next()?).parse().ok()?;
    let _parent = fields.next()?;
    let device = text(fields.next()?);
    let (major, minor) = device.split_once(':')?;
    let (root, point) = (path(fields.next()?), path(fields.next()?));
    // Options of the mount, then any number of optional fields.
    fields.find(|field| *field == b"-")?;
    let (fs_type, source) = (text(fields.next()?), text(fields.next()?));
    if !point.is_absolute() || fs_type.is_empty() {
        return None;
    }
    let options = fields.next().unwrap_or_default().split(|byte| *byte == b',').map(option).collect();
    Some(Mount {
        id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root,
        point,
        fs_type,
        source,
        options,
    })
}

fn option(option: &[u8]) -> (String, OsString) {
    let cut = option.iter().position(|byte| *byte == b'=').unwrap_or(option.len());
    (text(&option[..cut]), OsString::from_vec(unescaped(option.get(cut + 1..).unwrap_or_default())))
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(&unescaped(field)).into_owned()
}

fn path(field: &[u8]) -> PathBuf {
    OsString::from_vec(unescaped(field)).into()
}

/// Blanks, tabs, line ends, backslashes and some others are written as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', more @ ..] if first == b'\\' => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = more;
            }
            _ => {
                plain.push(first);
                rest = after;
            }
        }
    }
    plain
}

impl Mount {
    /// The value of an option, if it is text; of several, the last.
    pub(super) fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().rfind(|(key, _)| key == name)?.1.to_str()
    }

    /// The number that an option gives.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.option(name)?.parse().ok()
    }

    /// All values of an option, in their order, as bytes.
    pub(super) fn values(&self, name: &'static str) -> impl Iterator<Item = &[u8]> {
        self.options.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_bytes())
    }
}
