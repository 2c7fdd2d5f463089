//! How much memory there is to spare: what the machine has available, and what the process's control groups allow.
//!
//! A container is killed when its group passes its limit, however much the machine has left, so every group (of version 2)
//! from the process's own up to the hierarchy's root is asked. A group's usage counts its page cache, which the kernel
//! gives up before it kills; without taking that off, a container that has read a large file would seem to be full for
//! ever.
//!
//! A look costs a few reads of small files, a fraction of a millisecond. Where nothing can be read nothing is said:
//! this module knows limits, not what follows from them.

use std::fs;
use std::path::Path;

/// What there is to spare.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Headroom {
    /// Bytes that can be had before something else has to give way.
    pub(super) bytes: u64,
    /// Where, for a sentence: "on this machine".
    pub(super) bound: String,
}

/// What there is to spare now; `None` where the system says nothing about it. `root` is where the file system begins: `/`.
pub(super) fn look(root: &Path) -> Option<Headroom> {
    let machine = number_after(&read(&root.join("proc/meminfo"))?, "MemAvailable:")
        .map(|kib| (kib * 1024, "on this machine".to_owned()));
    let own = read(&root.join("proc/self/cgroup")).unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    // A container may see no more than its own group, as the root: the names of groups outside lead nowhere there.
    let groups = Path::new(own).ancestors().filter_map(|group| {
        let spare = spare_in(&root.join("sys/fs/cgroup").join(group))?;
        Some((spare, format!("within the memory limit of the control group /{}", group.display())))
    });
    let (bytes, bound) = machine.into_iter().chain(groups).min_by_key(|(bytes, _)| *bytes)?;
    Some(Headroom { bytes, bound })
}

/// Bytes that this process may have before something else has to give way, page cache counted as free; `None` where the
/// system says nothing about it.
pub fn spare_bytes() -> Option<u64> {
    spare_bytes_below(Path::new("/"))
}

/// As [`spare_bytes`], of the system whose file system begins at `root`.
pub fn spare_bytes_below(root: &Path) -> Option<u64> {
    look(root).map(|headroom| headroom.bytes)
}

/// Bytes until the limit of the control group with that directory, page cache counted as free; `None` where it has none.
fn spare_in(group: &Path) -> Option<u64> {
    let number = |file: &str| read(&group.join(file))?.trim().parse::<u64>().ok();
    // Above `memory.high` a process is slowed down to a crawl instead of killed.
    let limit = number("memory.max").into_iter().chain(number("memory.high")).min()?;
    let statistics = read(&group.join("memory.stat")).unwrap_or_default();
    let cache: u64 =
        ["inactive_file ", "active_file "].iter().filter_map(|name| number_after(&statistics, name)).sum();
    Some(limit.saturating_sub(number("memory.current")?.saturating_sub(cache)))
}

fn read(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok()
}

/// The number in the line that begins with `name`.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file system with these files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn look(files: &[(&str, &str)]) -> Option<Headroom> {
        super::look(system(files).path())
    }

    const MACHINE: (&str, &str) =
        ("proc/meminfo", "MemTotal: 24681472 kB\nMemFree:  1024 kB\nMemAvailable:    1048576 kB\n");
    #[test]
    fn without_groups_the_machine_s_available_memory_counts() {
        let headroom = look(&[MACHINE]).unwrap();
        assert_eq!((headroom.bytes, &*headroom.bound), (1024 * MIB, "on this machine"));
        assert_eq!(look(&[]), None);
    }

    #[test]
    fn the_tightest_group_on_the_way_to_the_root_counts_without_its_page_cache() {
        let files = [
            MACHINE,
            ("proc/self/cgroup", "0::/kubepods/pod7/main\n"),
            // The root has no limit files; the container allows 900 MiB, its pod 300 of which 100 are cache.
            ("sys/fs/cgroup/kubepods/memory.max", "max\n"),
            ("sys/fs/cgroup/kubepods/memory.current", "999999999999\n"),
            ("sys/fs/cgroup/kubepods/pod7/memory.max", "314572800\n"),
            ("sys/fs/cgroup/kubepods/pod7/memory.current", "262144000\n"),
            (
                "sys/fs/cgroup/kubepods/pod7/memory.stat",
                "anon 1\nfile 104857600\ninactive_file 73400320\nactive_file 31457280\n",
            ),
            ("sys/fs/cgroup/kubepods/pod7/main/memory.max", "943718400\n"),
            ("sys/fs/cgroup/kubepods/pod7/main/memory.current", "262144000\n"),
        ];
        let headroom = look(&files).unwrap();
        assert_eq!(headroom.bytes, 150 * MIB);
        assert!(headroom.bound.ends_with("control group /kubepods/pod7"), "{}", headroom.bound);
    }

    #[test]
    fn the_limit_at_which_a_group_is_slowed_down_counts_too() {
        let files = [
            MACHINE,
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "943718400\n"),
            ("sys/fs/cgroup/a/memory.high", "104857600\n"),
            ("sys/fs/cgroup/a/memory.current", "114857600\n"),
        ];
        assert_eq!(look(&files).unwrap().bytes, 0);
    }

    #[test]
    fn a_group_outside_of_the_namespace_counts_as_what_is_visible_of_it() {
        let files = [
            MACHINE,
            ("proc/self/cgroup", "0::/../../other\n"),
            ("sys/fs/cgroup/memory.max", "104857600\n"),
            ("sys/fs/cgroup/memory.current", "4857600\n"),
        ];
        assert_eq!(look(&files).unwrap().bytes, 100_000_000);
    }

    #[test]
    fn files_that_hold_anything_else_are_no_panic() {
        let odd = [
            ("proc/meminfo", "MemAvailable:\nMemAvailable: many kB\n"),
            ("proc/self/cgroup", "\n:\n::\n0::relative\n4:memory\n"),
        ];
        assert_eq!(look(&odd), None);
    }

    #[test]
    fn on_this_machine_there_is_something_to_spare_and_less_than_there_is() {
        let total = number_after(&fs::read_to_string("/proc/meminfo").unwrap(), "MemTotal:").unwrap() * 1024;
        let headroom = super::look(Path::new("/")).unwrap();
        assert!(headroom.bytes > 0 && headroom.bytes < total, "{headroom:?}");
    }
}
