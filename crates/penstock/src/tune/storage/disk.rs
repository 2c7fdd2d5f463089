//! The block devices under a local file system, as sysfs lists them.
//!
//! Device-mapper and software RAID are followed down to their members. Everything is optional: containers may hide
//! sysfs, and virtual disks say of themselves what their host made up.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What a local file system lies on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name of the device: `nvme0n1p2`, `md0`, `dm-3`.
    pub name: String,
    /// How many disks work together; 1 for a single one.
    pub members: usize,
    /// Whether heads move. Only believed of drives that are known to be real.
    pub rotational: bool,
}

/// Layers of devices that are followed: LVM on encryption on RAID on partitions, and to spare.
const DEPTH: usize = 8;

/// Makers of drives, as SCSI and SATA disks name them (`ATA` stands for all of SATA). Virtual disks often claim to
/// rotate: virtio and Hyper-V always, QEMU and VMware unless told otherwise.
const MAKERS: [&str; 8] = ["ATA", "SEAGATE", "HGST", "HITACHI", "TOSHIBA", "WDC", "WD", "FUJITSU"];

impl Disk {
    /// The device with that number, in the sysfs mounted at `sys`.
    pub(super) fn find(sys: &Path, (major, minor): (u32, u32)) -> Option<Self> {
        let device = sys.join(format!("dev/block/{major}:{minor}")).canonicalize().ok()?;
        let name = device.file_name()?.to_string_lossy().into_owned();
        let mut disks = BTreeSet::new();
        descend(device, DEPTH, &mut disks);
        Some(Self { name, members: disks.len(), rotational: disks.iter().any(|disk| rotates(disk)) })
    }
}

/// Adds the disks at the bottom of `device`. Two partitions of one disk are one disk.
fn descend(device: PathBuf, depth: usize, disks: &mut BTreeSet<PathBuf>) {
    let device = match device.parent() {
        Some(disk) if device.join("partition").exists() => disk.to_owned(),
        _ => device,
    };
    let slaves = std::fs::read_dir(device.join("slaves")).into_iter().flatten();
    let below: Vec<_> = slaves.filter_map(|entry| entry.ok()?.path().canonicalize().ok()).collect();
    if below.is_empty() || depth == 0 {
        disks.insert(device);
    } else {
        below.into_iter().for_each(|device| descend(device, depth - 1, disks));
    }
}

fn rotates(disk: &Path) -> bool {
    let says = |file, accepted: &[&str]| {
        std::fs::read_to_string(disk.join(file)).is_ok_and(|text| accepted.contains(&text.trim()))
    };
    says("queue/rotational", &["1"]) && says("device/vendor", &MAKERS)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs of our own making: devices as directories, their numbers as links, like the kernel lays them out.
    struct Sysfs(tempfile::TempDir);

    impl Sysfs {
        fn new() -> Self {
            let sysfs = Self(tempfile::tempdir().unwrap());
            std::fs::create_dir_all(sysfs.0.path().join("dev/block")).unwrap();
            sysfs
        }

        fn device(&self, number: &str, path: &str, files: &[(&str, &str)]) -> &Self {
            let device = self.0.path().join("devices").join(path);
            std::fs::create_dir_all(&device).unwrap();
            for (name, text) in files {
                let file = device.join(name);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, format!("{text}\n")).unwrap();
            }
            symlink(device, self.0.path().join("dev/block").join(number)).unwrap();
            self
        }

        fn slaves(&self, path: &str, slaves: &[&str]) -> &Self {
            let folder = self.0.path().join("devices").join(path).join("slaves");
            std::fs::create_dir_all(&folder).unwrap();
            for slave in slaves {
                let target = self.0.path().join("devices").join(slave);
                symlink(&target, folder.join(target.file_name().unwrap())).unwrap();
            }
            self
        }

        fn nvmes(&self, count: u32) -> &Self {
            for index in 0..count {
                let path = format!("pci/nvme{index}/nvme{index}n1");
                self.device(&format!("259:{index}"), &path, &[("queue/rotational", "0")]);
            }
            self
        }

        fn disk(&self, major: u32, minor: u32) -> Option<Disk> {
            Disk::find(self.0.path(), (major, minor))
        }

        fn members(&self, major: u32, minor: u32) -> usize {
            self.disk(major, minor).unwrap().members
        }
    }

    #[test]
    fn a_partition_stands_for_its_disk() {
        let sys = Sysfs::new();
        sys.nvmes(1).device("259:9", "pci/nvme0/nvme0n1/nvme0n1p2", &[("partition", "2")]);
        let disk = sys.disk(259, 9).unwrap();
        assert_eq!((disk.name.as_str(), disk.members), ("nvme0n1p2", 1));
    }

    #[test]
    fn a_software_raid_counts_its_members() {
        let sys = Sysfs::new();
        sys.nvmes(4).device("9:0", "virtual/md0", &[("md/level", "raid0")]).slaves(
            "virtual/md0",
            &["pci/nvme0/nvme0n1", "pci/nvme1/nvme1n1", "pci/nvme2/nvme2n1", "pci/nvme3/nvme3n1"],
        );
        let disk = sys.disk(9, 0).unwrap();
        assert_eq!((disk.name.as_str(), disk.members), ("md0", 4));
    }

    #[test]
    fn a_logical_volume_on_encryption_on_a_raid_is_followed_to_the_disks() {
        let sys = Sysfs::new();
        sys.nvmes(2)
            .device("9:0", "virtual/md0", &[("md/level", "raid1")])
            .slaves("virtual/md0", &["pci/nvme0/nvme0n1", "pci/nvme1/nvme1n1"])
            .device("253:0", "virtual/dm-0", &[("dm/uuid", "CRYPT-LUKS2-abc-data")])
            .slaves("virtual/dm-0", &["virtual/md0"])
            .device("253:1", "virtual/dm-1", &[("dm/uuid", "LVM-xyz")])
            .slaves("virtual/dm-1", &["virtual/dm-0"]);
        assert_eq!(sys.members(253, 1), 2);
    }

    #[test]
    fn a_logical_volume_on_one_disk_is_that_disk() {
        let sys = Sysfs::new();
        sys.nvmes(1)
            .device("259:5", "pci/nvme0/nvme0n1/nvme0n1p1", &[("partition", "1")])
            .device("259:6", "pci/nvme0/nvme0n1/nvme0n1p2", &[("partition", "2")])
            .device("253:0", "virtual/dm-0", &[("dm/uuid", "LVM-xyz")])
            .slaves("virtual/dm-0", &["pci/nvme0/nvme0n1/nvme0n1p1", "pci/nvme0/nvme0n1/nvme0n1p2"]);
        assert_eq!(sys.members(253, 0), 1);
    }

    #[test]
    fn devices_that_lie_on_themselves_are_no_endless_loop() {
        let sys = Sysfs::new();
        sys.device("253:0", "virtual/dm-0", &[]).slaves("virtual/dm-0", &["virtual/dm-0"]);
        assert_eq!(sys.disk(253, 0).unwrap().members, 1);
    }

    #[test]
    fn only_real_drives_are_believed_to_rotate() {
        let sys = Sysfs::new();
        let rotating = ("queue/rotational", "1");
        sys.device(
            "8:0",
            "pci/sda",
            &[rotating, ("device/vendor", "ATA     "), ("device/model", "ST4000NM0033")],
        )
        .device("8:16", "pci/sdb", &[rotating, ("device/vendor", "QEMU"), ("device/model", "QEMU HARDDISK")])
        .device("8:32", "pci/sdc", &[rotating, ("device/vendor", "Msft"), ("device/model", "Virtual Disk")])
        .device("254:0", "pci/vda", &[rotating, ("device/vendor", "0x1af4")]);
        let rotates = |(major, minor)| sys.disk(major, minor).unwrap().rotational;
        assert_eq!([(8, 0), (8, 16), (8, 32), (254, 0)].map(rotates), [true, false, false, false]);
    }

    #[test]
    fn nothing_is_known_of_what_sysfs_does_not_list_or_says_in_nonsense() {
        let sys = Sysfs::new();
        assert_eq!(sys.disk(8, 0), None);
        assert_eq!(Disk::find(Path::new("/no/such/sysfs"), (8, 0)), None);
        sys.device("8:0", "pci/sda", &[("queue/rotational", "many"), ("device/vendor", "ATA")]);
        assert_eq!(sys.disk(8, 0).unwrap(), Disk { name: "sda".to_owned(), members: 1, rotational: false });
    }
}
