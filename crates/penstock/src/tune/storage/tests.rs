//! Mount tables of real systems, and what is made of them.

use super::*;

/// The mount at `point`, as a table writes that; of several the last, which hides the others.
fn mount_at(table: &[u8], point: &str) -> Mount {
    let table = String::from_utf8_lossy(table);
    let line = table.lines().rfind(|line| line.split(' ').nth(4) == Some(point));
    mounts::parse(line.unwrap()).unwrap()
}

/// Looks up mount points in a table, and compares class and name.
fn check(table: &[u8], rows: &[(&str, StorageKind, &str)]) {
    for (point, kind, name) in rows {
        let found = Storage::on(&mount_at(table, point));
        assert_eq!((found.kind, found.name.as_str()), (*kind, *name), "{point}");
    }
}

#[test]
fn a_server_with_local_disks() {
    check(
        include_bytes!("fixtures/server-ext4.mountinfo"),
        &[
            ("/", StorageKind::Disk, "ext4"),
            ("/dev/shm", StorageKind::Memory, "tmpfs"),
            ("/dev/hugepages", StorageKind::Memory, "hugetlbfs"),
            ("/data", StorageKind::Disk, "xfs"),
            ("/snap/core20/2318", StorageKind::Image, "squashfs"),
            ("/mnt/windows", StorageKind::Disk, "fuseblk"),
            ("/pool", StorageKind::Disk, "btrfs"),
        ],
    );
}

#[test]
fn file_servers_over_nfs() {
    let table = include_bytes!("fixtures/nfs.mountinfo");
    for point in ["/models", "/fast", "/efs", "/efs-plain"] {
        check(table, &[(point, StorageKind::Nfs, "nfs4")]);
    }
    for point in ["/nas", "/rdma", "/vast"] {
        check(table, &[(point, StorageKind::Nfs, "nfs")]);
    }
}

#[test]
fn a_container_with_nested_mounts() {
    check(
        include_bytes!("fixtures/docker.mountinfo"),
        &[
            ("/models", StorageKind::Disk, "ext4"),
            ("/models/shared", StorageKind::Nfs, "nfs4"),
            ("/models/shared/hot", StorageKind::Memory, "tmpfs"),
            ("/dev/shm", StorageKind::Memory, "tmpfs"),
            ("/", StorageKind::Disk, "overlay"),
        ],
    );
}

#[test]
fn a_pod_with_volumes_of_several_kinds() {
    check(
        include_bytes!("fixtures/kubernetes.mountinfo"),
        &[
            ("/scratch", StorageKind::Disk, "xfs"),
            ("/dev/shm", StorageKind::Memory, "tmpfs"),
            ("/models", StorageKind::Nfs, "nfs4"),
            ("/bucket", StorageKind::Fuse, "fuse.gcsfuse"),
            ("/etc/hosts", StorageKind::Disk, "ext4"),
            ("/", StorageKind::Disk, "overlay"),
        ],
    );
}

#[test]
fn fuse_is_told_apart_by_subtype_or_source() {
    check(
        include_bytes!("fixtures/fuse.mountinfo"),
        &[
            ("/gcs", StorageKind::Fuse, "fuse.gcsfuse"),
            ("/s3", StorageKind::Fuse, "fuse.mountpoint-s3"),
            ("/jfs", StorageKind::Fuse, "fuse.juicefs"),
            ("/s3fs", StorageKind::Fuse, "fuse.s3fs"),
            ("/rclone", StorageKind::Fuse, "fuse.rclone"),
            ("/sshfs", StorageKind::Fuse, "fuse.sshfs"),
            ("/blob", StorageKind::Fuse, "fuse.blobfuse2"),
            ("/rootless", StorageKind::Disk, "fuse.fuse-overlayfs"),
            ("/something", StorageKind::Fuse, "fuse"),
        ],
    );
}

#[test]
fn a_cluster_with_parallel_file_systems_and_shares() {
    check(
        include_bytes!("fixtures/cluster.mountinfo"),
        &[
            ("/lustre", StorageKind::Parallel, "lustre"),
            ("/fsx", StorageKind::Parallel, "lustre"),
            ("/gpfs", StorageKind::Parallel, "gpfs"),
            ("/ceph", StorageKind::Parallel, "ceph"),
            ("/weka", StorageKind::Parallel, "wekafs"),
            ("/beegfs", StorageKind::Parallel, "beegfs"),
            ("/share", StorageKind::Smb, "cifs"),
            ("/share-wide", StorageKind::Smb, "cifs"),
            ("/dfuse", StorageKind::Fuse, "fuse.daos"),
        ],
    );
}

#[test]
fn a_virtual_machine_with_its_hosts_files() {
    check(
        include_bytes!("fixtures/virtual-machine.mountinfo"),
        &[
            ("/host", StorageKind::Virtiofs, "virtiofs"),
            ("/host9p", StorageKind::NineP, "9p"),
            ("/mnt/c", StorageKind::NineP, "9p"),
            ("/image", StorageKind::Image, "erofs"),
        ],
    );
}

#[test]
fn lines_that_make_no_sense_hide_nothing() {
    let table = include_bytes!("fixtures/garbage.mountinfo");
    let names = |id| mounts::holding(table, Some(id), (u32::MAX, 0)).map(|mount| mount.fs_type);
    // A mount without a type or a source, or with a device that is none.
    assert_eq!([29, 31, 32, 33].map(names), [const { None }; 4]);
    // A parent that is no number is not looked at, nor is a path that is no text.
    let kept = [(99, "ext4"), (34, "tmpfs"), (35, "tmpfs"), (36, "ramfs"), (37, "nfs4")];
    for (id, name) in kept {
        assert_eq!(names(id).as_deref(), Some(name), "{id}");
    }
}

#[test]
fn a_mount_number_decides_before_the_device_does() {
    let table = include_bytes!("fixtures/mounts-over-mounts.mountinfo");
    let name = |id, device| mounts::holding(table, id, device).map(|mount| mount.fs_type);
    // A file that was opened before the second mount hid the first.
    assert_eq!(name(Some(82), (8, 17)).as_deref(), Some("tmpfs"));
    // Before Linux 5.8, or with the table of other mounts than this process has.
    assert_eq!(name(None, (8, 17)).as_deref(), Some("xfs"));
    assert_eq!(name(Some(4711), (0, 81)).as_deref(), Some("nfs4"));
    assert_eq!(name(None, (7, 7)), None);
}

#[test]
fn what_is_not_there_is_unknown_storage() {
    assert_eq!(Storage::of(Path::new("/no/such/path")), Storage::unknown());
    assert_eq!(Storage::of(Path::new("")), Storage::unknown());
    assert_eq!(Storage::of(Path::new("nul\0byte")), Storage::unknown());
}

proptest::proptest! {
    #[test]
    fn no_table_at_all_is_a_panic(table in proptest::collection::vec(proptest::num::u8::ANY, 0..400)) {
        mounts::holding(&table, Some(1), (8, 1));
    }

    #[test]
    fn nearly_right_lines_are_no_panic(line in r"[0-9 :/\\,=a-z.\-]{0,120}") {
        for line in [format!("1 2 0:3 / /m rw - {line}"), line] {
            if let Some(mount) = mounts::parse(&line) {
                Storage::on(&mount);
            }
        }
    }
}
