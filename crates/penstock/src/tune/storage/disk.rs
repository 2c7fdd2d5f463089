//! The block devices under a local file system, as sysfs describes them.
//!
//! Device-mapper and software RAID are followed down to their members. Everything is optional: containers may hide
//! sysfs, and virtual disks say of themselves what their host made up.

use std::path::{Path, PathBuf};

/// What a local file system lies on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// How it is attached: `nvme`, `virtio`, `scsi`, `loop`, … or `disks` for a mixture.
    pub transport: &'static str,
    /// What combines several members: `raid0`, `lvm`, …
    pub combined: Option<String>,
    /// How many disks work together; 1 for a single one.
    pub members: usize,
    /// Whether heads move. Only believed of drives that are known to be real.
    pub rotational: bool,
    /// Whether it is a volume of a cloud, reached over a network, with the throughput that was paid for.
    pub network: bool,
    /// How many requests one member takes at a time, where it says.
    pub queue_depth: Option<usize>,
    /// The unit of direct reads, in bytes.
    pub logical_block_bytes: u64,
    /// The request it prefers, in bytes; 0 where it does not say.
    pub optimal_io_bytes: u64,
}

impl Default for Disk {
    fn default() -> Self {
        Self {
            transport: "disk",
            combined: None,
            members: 1,
            rotational: false,
            network: false,
            queue_depth: None,
            logical_block_bytes: 512,
            optimal_io_bytes: 0,
        }
    }
}

/// Layers of devices that are followed: LVM on encryption on RAID on partitions, and to spare.
const DEPTH: usize = 8;

impl Disk {
    /// The device with that number, in the sysfs mounted at `sys`.
    pub(super) fn find(sys: &Path, (major, minor): (u32, u32)) -> Option<Self> {
        let top = whole(sys.join(format!("dev/block/{major}:{minor}")).canonicalize().ok()?);
        let mut found = Walk::default();
        found.descend(&top, DEPTH);
        let members = found.leaves.iter().map(|leaf| Member::of(leaf)).collect::<Vec<_>>();
        let first = members.first()?;
        let alike = members.iter().all(|member| member.transport == first.transport);
        Some(Self {
            transport: if alike { first.transport } else { "disks" },
            combined: found.combined.filter(|_| members.len() > 1),
            members: members.len(),
            rotational: members.iter().any(|member| member.rotational),
            network: members.iter().any(|member| member.network),
            queue_depth: members.iter().filter_map(|member| member.queue_depth).min(),
            logical_block_bytes: number(&top.join("queue/logical_block_size")).unwrap_or(512),
            optimal_io_bytes: number(&top.join("queue/optimal_io_size")).unwrap_or(0),
        })
    }

    /// A few words for statistics: `nvme`, `raid0 of 4 nvme`, `rotational scsi`.
    pub(super) fn shown(&self) -> String {
        let rotational = if self.rotational { "rotational " } else { "" };
        let network = if self.network { " (network volume)" } else { "" };
        match (&self.combined, self.members) {
            (_, 0 | 1) => format!("{rotational}{}{network}", self.transport),
            (combined, members) => {
                let combined = combined.as_deref().unwrap_or("array");
                format!("{combined} of {members} {rotational}{}{network}", self.transport)
            }
        }
    }
}

/// The disks at the bottom of a device.
#[derive(Default)]
struct Walk {
    leaves: Vec<PathBuf>,
    combined: Option<String>,
}

impl Walk {
    fn descend(&mut self, device: &Path, depth: usize) {
        let mut below: Vec<_> = std::fs::read_dir(device.join("slaves"))
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(whole(entry.ok()?.path().canonicalize().ok()?)))
            .collect();
        below.sort();
        // Two partitions of one disk are one disk.
        below.dedup();
        if word(&device.join("dm/uuid")).is_some_and(|uuid| uuid.starts_with("mpath-")) {
            // Several ways to the same disk.
            below.truncate(1);
        }
        if below.is_empty() || depth == 0 {
            if !self.leaves.iter().any(|leaf| leaf == device) {
                self.leaves.push(device.to_owned());
            }
            return;
        }
        if below.len() > 1 && self.combined.is_none() {
            self.combined = word(&device.join("md/level")).or_else(|| {
                word(&device.join("dm/uuid")).map(|uuid| match uuid.split_once('-') {
                    Some(("LVM", _)) => "lvm".to_owned(),
                    _ => "dm".to_owned(),
                })
            });
        }
        for device in below {
            self.descend(&device, depth - 1);
        }
    }
}

struct Member {
    transport: &'static str,
    rotational: bool,
    network: bool,
    queue_depth: Option<usize>,
}

impl Member {
    fn of(device: &Path) -> Self {
        let name = device.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let transport = transport(name, device);
        let vendor = word(&device.join("device/vendor")).unwrap_or_default();
        let model = word(&device.join("device/model")).unwrap_or_default();
        let says_rotational = number(&device.join("queue/rotational")) == Some(1);
        Self {
            transport,
            // Virtual disks often claim to rotate: virtio and Hyper-V always, QEMU and VMware unless told otherwise.
            rotational: says_rotational && transport == "scsi" && MAKERS.contains(&vendor.as_str()),
            network: transport == "nvme over fabrics" || VOLUMES.iter().any(|name| model.contains(name)),
            queue_depth: number(&device.join("queue/nr_requests")).and_then(|depth| depth.try_into().ok()),
        }
    }
}

/// Makers of drives, as SCSI and SATA disks name them (`ATA` stands for all of SATA).
const MAKERS: [&str; 8] = ["ATA", "SEAGATE", "HGST", "HITACHI", "TOSHIBA", "WDC", "WD", "FUJITSU"];

/// How clouds call their network volumes. ("Amazon EC2 NVMe Instance Storage" and "nvme_card" are local disks.)
const VOLUMES: [&str; 4] =
    ["Amazon Elastic Block Store", "nvme_card-pd", "PersistentDisk", "MSFT NVMe Accelerator"];

fn transport(name: &str, device: &Path) -> &'static str {
    const BY_PREFIX: [(&str, &str); 12] = [
        ("vd", "virtio"),
        ("xvd", "xen"),
        ("sd", "scsi"),
        ("mmcblk", "mmc"),
        ("pmem", "pmem"),
        ("loop", "loop"),
        ("zram", "zram"),
        ("ram", "ram disk"),
        ("rbd", "ceph rbd"),
        ("nbd", "nbd"),
        ("drbd", "drbd"),
        ("sr", "optical"),
    ];
    if name.starts_with("nvme") {
        let over = word(&device.join("device/transport"));
        return match over.as_deref() {
            Some("tcp" | "rdma" | "fc") => "nvme over fabrics",
            _ => "nvme",
        };
    }
    BY_PREFIX.iter().find(|(prefix, _)| name.starts_with(prefix)).map_or("disk", |(_, transport)| transport)
}

/// The disk that a partition belongs to, or the device itself.
fn whole(device: PathBuf) -> PathBuf {
    match device.parent() {
        Some(disk) if device.join("partition").exists() => disk.to_owned(),
        _ => device,
    }
}

fn word(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn number(file: &Path) -> Option<u64> {
    word(file)?.parse().ok()
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
                let files = [("queue/rotational", "0"), ("queue/nr_requests", "1023")];
                self.device(&format!("259:{index}"), &path, &files);
            }
            self
        }

        fn disk(&self, major: u32, minor: u32) -> Option<Disk> {
            Disk::find(self.0.path(), (major, minor))
        }

        fn shown(&self, major: u32, minor: u32) -> String {
            self.disk(major, minor).unwrap().shown()
        }
    }

    #[test]
    fn a_partition_stands_for_its_disk() {
        let sys = Sysfs::new();
        sys.nvmes(1).device("259:9", "pci/nvme0/nvme0n1/nvme0n1p2", &[("partition", "2")]);
        let disk = sys.disk(259, 9).unwrap();
        assert_eq!((disk.shown().as_str(), disk.members, disk.queue_depth), ("nvme", 1, Some(1023)));
    }

    #[test]
    fn a_software_raid_counts_its_members() {
        let sys = Sysfs::new();
        sys.nvmes(4)
            .device("9:0", "virtual/md0", &[("md/level", "raid0"), ("queue/optimal_io_size", "2097152")])
            .slaves(
                "virtual/md0",
                &["pci/nvme0/nvme0n1", "pci/nvme1/nvme1n1", "pci/nvme2/nvme2n1", "pci/nvme3/nvme3n1"],
            );
        let disk = sys.disk(9, 0).unwrap();
        assert_eq!((disk.shown().as_str(), disk.members), ("raid0 of 4 nvme", 4));
        assert_eq!(disk.optimal_io_bytes, 2 << 20);
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
        assert_eq!(sys.shown(253, 1), "raid1 of 2 nvme");
    }

    #[test]
    fn a_logical_volume_on_one_disk_is_that_disk() {
        let sys = Sysfs::new();
        sys.nvmes(1)
            .device("259:5", "pci/nvme0/nvme0n1/nvme0n1p1", &[("partition", "1")])
            .device("259:6", "pci/nvme0/nvme0n1/nvme0n1p2", &[("partition", "2")])
            .device("253:0", "virtual/dm-0", &[("dm/uuid", "LVM-xyz")])
            .slaves("virtual/dm-0", &["pci/nvme0/nvme0n1/nvme0n1p1", "pci/nvme0/nvme0n1/nvme0n1p2"]);
        assert_eq!(sys.shown(253, 0), "nvme");
    }

    #[test]
    fn several_ways_to_one_disk_are_one_disk() {
        let sys = Sysfs::new();
        sys.device("8:0", "pci/host0/sda", &[])
            .device("8:16", "pci/host1/sdb", &[])
            .device("253:0", "virtual/dm-0", &[("dm/uuid", "mpath-3600")])
            .slaves("virtual/dm-0", &["pci/host0/sda", "pci/host1/sdb"]);
        assert_eq!(sys.shown(253, 0), "scsi");
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
        assert_eq!(sys.shown(8, 0), "rotational scsi");
        assert_eq!([sys.shown(8, 16), sys.shown(8, 32), sys.shown(254, 0)], ["scsi", "scsi", "virtio"]);
    }

    #[test]
    fn network_volumes_are_told_from_local_disks() {
        let sys = Sysfs::new();
        sys.device("259:0", "pci/nvme0/nvme0n1", &[("device/model", "Amazon Elastic Block Store")])
            .device("259:1", "pci/nvme1/nvme1n1", &[("device/model", "Amazon EC2 NVMe Instance Storage")])
            .device("259:2", "pci/nvme2/nvme2n1", &[("device/transport", "tcp")]);
        assert_eq!(sys.shown(259, 0), "nvme (network volume)");
        assert_eq!(sys.shown(259, 1), "nvme");
        assert_eq!(sys.shown(259, 2), "nvme over fabrics (network volume)");
    }

    #[test]
    fn nothing_is_known_of_what_sysfs_does_not_list_or_says_in_nonsense() {
        let sys = Sysfs::new();
        assert_eq!(sys.disk(8, 0), None);
        assert_eq!(Disk::find(Path::new("/no/such/sysfs"), (8, 0)), None);
        sys.device("8:0", "pci/sda", &[("queue/nr_requests", "many"), ("queue/logical_block_size", "-1")]);
        assert_eq!(sys.disk(8, 0).unwrap(), Disk { transport: "scsi", ..Disk::default() });
    }
}
