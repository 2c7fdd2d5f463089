//! How much memory there is to spare: what the machine has available, and what the process's control groups allow.
//!
//! A container is killed when its group passes its limit, however much the machine has left, so every group from the
//! process's own up to the hierarchy's root is asked, in version 2 (`memory.max`, `memory.high`) and version 1
//! (`memory.limit_in_bytes`). A group's usage counts its page cache, which the kernel gives up before it kills;
//! without taking that off, a container that has read a large file would seem to be full for ever.
//!
//! A look costs a few reads of small files, a fraction of a millisecond. Where nothing can be read nothing is said:
//! this module knows limits, not what follows from them.

use std::fs;
use std::path::{Path, PathBuf};

/// Above this, a limit is what the kernel writes for "none" in groups of version 1.
const NO_LIMIT: u64 = 1 << 60;

/// What there is to spare.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Headroom {
    /// Bytes that can be had before something else has to give way.
    pub(super) bytes: u64,
    /// Where, for a sentence: "on this machine".
    pub(super) bound: String,
    /// The share of the last ten seconds, in per cent, in which some thread waited for memory; 0 where it is not told.
    pub(super) pressure: f64,
}

/// Where to look.
#[derive(Debug)]
pub(super) struct Observer {
    root: PathBuf,
    groups: Vec<Group>,
}

/// A control group that the process is in, by itself or through a child of it.
#[derive(Debug, PartialEq)]
struct Group {
    directory: PathBuf,
    /// Its name in its hierarchy: `/kubepods/pod7`.
    name: String,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Version {
    One,
    Two,
}

impl Observer {
    /// Finds the process's groups. `root` is where the file system begins: `/`. A process that is moved to another
    /// group later is not followed.
    pub(super) fn new(root: &Path) -> Self {
        let read = |file| fs::read_to_string(root.join(file)).unwrap_or_default();
        let (memberships, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
        let groups = memberships.lines().filter_map(membership).flat_map(|(version, path)| {
            mounts.lines().filter_map(move |line| mount(line, version)).flat_map(move |(top, mounted)| {
                // What is mounted may itself be a group; names of groups outside of it lead nowhere here.
                let inside = path.strip_prefix(top).unwrap_or(Path::new(""));
                let outside = inside.components().any(|part| part.as_os_str() == "..");
                let inside = if outside { Path::new("") } else { inside };
                let mounted = root.join(mounted.strip_prefix("/").unwrap_or(mounted));
                let name = move |path: &Path| format!("/{}", path.display());
                let group = |path: &Path| Group { directory: mounted.join(path), name: name(path), version };
                inside.ancestors().map(group).collect::<Vec<_>>()
            })
        });
        Self { root: root.to_owned(), groups: groups.collect() }
    }

    /// What there is to spare now; `None` where the system says nothing about it.
    pub(super) fn look(&self) -> Option<Headroom> {
        let machine = number_after(&read(&self.root.join("proc/meminfo"))?, "MemAvailable:")
            .map(|kib| (kib * 1024, "on this machine".to_owned()));
        let groups = self.groups.iter().filter_map(|group| {
            Some((group.spare()?, format!("within the memory limit of the control group {}", group.name)))
        });
        let (bytes, bound) = machine.into_iter().chain(groups).min_by_key(|(bytes, _)| *bytes)?;
        Some(Headroom { bytes, bound, pressure: self.pressure() })
    }

    fn pressure(&self) -> f64 {
        let own = self.groups.iter().find(|group| group.version == Version::Two);
        let own = own.and_then(|group| read(&group.directory.join("memory.pressure")));
        let text = own.or_else(|| read(&self.root.join("proc/pressure/memory"))).unwrap_or_default();
        let some = text.lines().find_map(|line| line.strip_prefix("some "));
        let average = some.into_iter().flat_map(str::split_whitespace).find_map(|w| w.strip_prefix("avg10="));
        average.and_then(|average| average.parse().ok()).unwrap_or(0.0)
    }
}

/// Bytes that this process may have before something else has to give way, page cache counted as free; `None` where the
/// system says nothing about it.
pub(crate) fn spare_bytes() -> Option<u64> {
    Observer::new(Path::new("/")).look().map(|headroom| headroom.bytes)
}

impl Group {
    /// Bytes until its limit, page cache counted as free; `None` for a group without one.
    fn spare(&self) -> Option<u64> {
        let number = |file: &str| read(&self.directory.join(file))?.trim().parse::<u64>().ok();
        let (limit, usage, cache) = match self.version {
            // Above `memory.high` a process is slowed down to a crawl instead of killed.
            Version::Two => (
                number("memory.max").into_iter().chain(number("memory.high")).min(),
                "memory.current",
                ["inactive_file ", "active_file "],
            ),
            Version::One => (
                number("memory.limit_in_bytes"),
                "memory.usage_in_bytes",
                ["total_inactive_file ", "total_active_file "],
            ),
        };
        let limit = limit.filter(|limit| *limit < NO_LIMIT)?;
        let statistics = read(&self.directory.join("memory.stat")).unwrap_or_default();
        let cache: u64 = cache.iter().filter_map(|name| number_after(&statistics, name)).sum();
        Some(limit.saturating_sub(number(usage)?.saturating_sub(cache)))
    }
}

fn read(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok()
}

/// The number in the line that begins with `name`.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// The group of a line of `/proc/self/cgroup`: `0::/path`, or `4:memory:/path`.
fn membership(line: &str) -> Option<(Version, &Path)> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, Path::new(fields.next()?));
    match controllers {
        "" => Some((Version::Two, path)),
        list => list.split(',').any(|name| name == "memory").then_some((Version::One, path)),
    }
}

/// Which group a line of `/proc/self/mountinfo` makes visible, and where, if it is the hierarchy for `version`.
fn mount(line: &str, version: Version) -> Option<(&Path, &Path)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (top, at) = (Path::new(place.next()?), Path::new(place.next()?));
    let mut kind = kind.split(' ');
    let (name, options) = (kind.next()?, kind.nth(1).unwrap_or_default());
    let fits = match version {
        Version::Two => name == "cgroup2",
        Version::One => name == "cgroup" && options.split(',').any(|option| option == "memory"),
    };
    fits.then_some((top, at))
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
        let system = system(files);
        Observer::new(system.path()).look()
    }

    const MACHINE: (&str, &str) =
        ("proc/meminfo", "MemTotal: 24681472 kB\nMemFree:  1024 kB\nMemAvailable:    1048576 kB\n");
    const MOUNT_2: &str = "30 23 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const MOUNT_1: &str = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
                           36 31 0:33 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n";

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
            ("proc/self/mountinfo", MOUNT_2),
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
            ("proc/self/mountinfo", MOUNT_2),
            ("sys/fs/cgroup/a/memory.max", "943718400\n"),
            ("sys/fs/cgroup/a/memory.high", "104857600\n"),
            ("sys/fs/cgroup/a/memory.current", "114857600\n"),
        ];
        assert_eq!(look(&files).unwrap().bytes, 0);
    }

    #[test]
    fn a_group_of_version_one_is_found_where_only_a_part_of_the_hierarchy_is_mounted() {
        let files = [
            MACHINE,
            ("proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc/job\n0::/\n"),
            ("proc/self/mountinfo", MOUNT_1),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
            ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "104857600\n"),
            ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "94371840\n"),
            (
                "sys/fs/cgroup/memory/job/memory.stat",
                "active_file 1\ninactive_file 2\ntotal_inactive_file 10485760\ntotal_active_file 0\n",
            ),
        ];
        let headroom = look(&files).unwrap();
        assert_eq!(headroom.bytes, 20 * MIB);
        assert!(headroom.bound.ends_with("group /job"), "{}", headroom.bound);
    }

    #[test]
    fn a_group_outside_of_the_namespace_counts_as_what_is_visible_of_it() {
        let files = [
            MACHINE,
            ("proc/self/cgroup", "0::/../../other\n"),
            ("proc/self/mountinfo", MOUNT_2),
            ("sys/fs/cgroup/memory.max", "104857600\n"),
            ("sys/fs/cgroup/memory.current", "4857600\n"),
        ];
        assert_eq!(look(&files).unwrap().bytes, 100_000_000);
    }

    #[test]
    fn pressure_is_the_group_s_own_where_it_is_told() {
        let of_machine = ("proc/pressure/memory", "some avg10=1.50 avg60=0.00\nfull avg10=9.00 avg60=0\n");
        assert_eq!(look(&[MACHINE, of_machine]).unwrap().pressure, 1.5);
        let files = [
            MACHINE,
            of_machine,
            ("proc/self/cgroup", "0::/a\n"),
            ("proc/self/mountinfo", MOUNT_2),
            ("sys/fs/cgroup/a/memory.pressure", "some avg10=12.25 avg60=0.00 avg300=0.00 total=7\n"),
        ];
        assert_eq!(look(&files).unwrap().pressure, 12.25);
        assert_eq!(look(&[MACHINE]).unwrap().pressure, 0.0);
    }

    #[test]
    fn files_that_hold_anything_else_are_no_panic() {
        let odd = [
            ("proc/meminfo", "MemAvailable:\nMemAvailable: many kB\n"),
            ("proc/self/cgroup", "\n:\n::\n0::relative\n4:memory\n"),
            ("proc/self/mountinfo", "a - b\n - cgroup2\n1 2 3 / /x - cgroup2\n1 2 3 4 5 - cgroup\n"),
        ];
        assert_eq!(look(&odd), None);
    }

    #[test]
    fn on_this_machine_there_is_something_to_spare_and_less_than_there_is() {
        let total = number_after(&fs::read_to_string("/proc/meminfo").unwrap(), "MemTotal:").unwrap() * 1024;
        let headroom = Observer::new(Path::new("/")).look().unwrap();
        assert!(headroom.bytes > 0 && headroom.bytes < total, "{headroom:?}");
    }
}
