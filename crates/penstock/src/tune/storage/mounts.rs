//! The mount table, as `/proc/self/mountinfo` has it (proc_pid_mountinfo(5)).
//!
//! Lines that make no sense are passed over: one odd mount must not hide the others.

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    id: u64,
    /// Major and minor number of the file system; major 0 where it has no block device.
    device: (u32, u32),
    pub(super) fs_type: String,
    pub(super) source: String,
}

/// The mount that has this number; else the last of the file system on that device. Kernels tell the number since Linux
/// 5.8.
pub(super) fn holding(table: &[u8], id: Option<u64>, device: (u32, u32)) -> Option<Mount> {
    let table = String::from_utf8_lossy(table);
    let mut mounts: Vec<_> = table.lines().filter_map(parse).collect();
    let found = mounts
        .iter()
        .position(|mount| Some(mount.id) == id)
        .or_else(|| mounts.iter().rposition(|mount| mount.device == device));
    found.map(|found| mounts.swap_remove(found))
}

/// One line of the table.
pub(super) fn parse(line: &str) -> Option<Mount> {
    // Blanks within a field are escaped.
    let (of_mount, of_file_system) = line.split_once(" - ")?;
    let mut of_mount = of_mount.split(' ');
    let id = of_mount.next()?.parse().ok()?;
    let (major, minor) = of_mount.nth(1)?.split_once(':')?;
    let (fs_type, rest) = of_file_system.split_once(' ')?;
    let source = rest.split_once(' ').map_or(rest, |(source, _)| source);
    Some(Mount {
        id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        fs_type: fs_type.to_owned(),
        source: source.to_owned(),
    })
}
