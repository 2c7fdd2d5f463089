//! Mount tables of real systems, and what is made of them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::*;

/// A file of which only the path is known, so that the table alone decides.
fn at(path: &Path) -> MountLookup<'_> {
    MountLookup { mount_id: None, device: (u32::MAX, 0), path }
}

/// A machine of which only mount tables are known.
fn no_sysfs() -> System {
    System { mountinfo: "/no/such/table".into(), sys: "/no/such/sysfs".into() }
}

fn storage(mount: &Mount) -> Storage {
    no_sysfs().on(mount, &Seen { mount_id: None, device: (0, 0), preferred_bytes: 4096 })
}

/// Looks up paths in a table, and compares class, name and the beginning of each note.
fn check(table: &[u8], rows: &[(&str, StorageKind, &str, &[&str])]) {
    let mounts = mounts::parse(table);
    for (path, kind, name, notes) in rows {
        let mount = mounts::holding(&mounts, &at(Path::new(path))).unwrap();
        let found = storage(mount);
        assert_eq!((found.kind, found.name.as_str()), (*kind, *name), "{path}");
        assert_eq!(found.notes.len(), notes.len(), "{path}: {:?}", found.notes);
        for (note, part) in found.notes.iter().zip(*notes) {
            assert!(note.contains(part), "{path}: {note:?} says nothing of {part:?}");
        }
    }
}

#[test]
fn a_server_with_local_disks() {
    check(
        include_bytes!("fixtures/server-ext4.mountinfo"),
        &[
            ("/home/me/model.safetensors", StorageKind::Disk, "ext4", &[]),
            ("/dev/shm/model.safetensors", StorageKind::Memory, "tmpfs", &[]),
            ("/dev/hugepages/x", StorageKind::Memory, "hugetlbfs", &[]),
            ("/data/llama/model.safetensors", StorageKind::Disk, "xfs", &[]),
            ("/database/model.safetensors", StorageKind::Disk, "ext4", &[]),
            ("/snap/core20/2318/x", StorageKind::Image, "squashfs", &[]),
            ("/mnt/windows/x", StorageKind::Disk, "fuseblk", &[]),
            ("/pool/x", StorageKind::Disk, "btrfs", &[]),
        ],
    );
}

#[test]
fn nfs_says_how_many_connections_it_has() {
    const ONE: &str = "/models is NFS over one TCP connection";
    check(
        include_bytes!("fixtures/nfs.mountinfo"),
        &[
            ("/models/llama/model.safetensors", StorageKind::Nfs, "nfs4 (nconnect missing)", &[ONE]),
            ("/fast/model.safetensors", StorageKind::Nfs, "nfs4 (nconnect=16)", &[]),
            (
                "/nas/model.safetensors",
                StorageKind::Nfs,
                "nfs3 (nconnect=1)",
                &["nconnect=16", "rsize=65536"],
            ),
            ("/rdma/model.safetensors", StorageKind::Nfs, "nfs3 (rdma)", &[]),
            ("/vast/model.safetensors", StorageKind::Nfs, "nfs3", &[]),
            // Elastic File System takes one connection, with its helper's proxy or without.
            ("/efs/model.safetensors", StorageKind::Nfs, "nfs4", &[]),
            ("/efs-plain/model.safetensors", StorageKind::Nfs, "nfs4", &[]),
        ],
    );
    let mounts = mounts::parse(include_bytes!("fixtures/nfs.mountinfo"));
    let connections = |path| storage(mounts::holding(&mounts, &at(Path::new(path))).unwrap()).connections;
    assert_eq!([connections("/fast/x"), connections("/models/x"), connections("/nas/x")], [16, 1, 1]);
}

#[test]
fn a_container_with_nested_mounts() {
    check(
        include_bytes!("fixtures/docker.mountinfo"),
        &[
            ("/models/model.safetensors", StorageKind::Disk, "ext4", &[]),
            (
                "/models/shared/model.safetensors",
                StorageKind::Nfs,
                "nfs4 (nconnect missing)",
                &["/models/shared is"],
            ),
            ("/models/shared/hot/model.safetensors", StorageKind::Memory, "tmpfs", &[]),
            (
                "/models/shared/hotter/model.safetensors",
                StorageKind::Nfs,
                "nfs4 (nconnect missing)",
                &["nconnect=16"],
            ),
            ("/dev/shm/model.safetensors", StorageKind::Memory, "tmpfs", &[]),
            ("/srv/huggingface/hub/blob", StorageKind::Disk, "overlay", &[]),
        ],
    );
}

#[test]
fn a_pod_with_volumes_of_several_kinds() {
    check(
        include_bytes!("fixtures/kubernetes.mountinfo"),
        &[
            ("/scratch/model.safetensors", StorageKind::Disk, "xfs", &[]),
            ("/dev/shm/model.safetensors", StorageKind::Memory, "tmpfs", &[]),
            ("/models/model.safetensors", StorageKind::Nfs, "nfs4 (nconnect=8)", &[]),
            ("/bucket/model.safetensors", StorageKind::Fuse, "fuse.gcsfuse", &[]),
            ("/etc/hosts", StorageKind::Disk, "ext4", &[]),
            ("/opt/model.safetensors", StorageKind::Disk, "overlay", &[]),
        ],
    );
}

#[test]
fn fuse_is_told_apart_by_subtype_or_source() {
    check(
        include_bytes!("fixtures/fuse.mountinfo"),
        &[
            ("/gcs/x", StorageKind::Fuse, "fuse.gcsfuse", &[]),
            ("/s3/x", StorageKind::Fuse, "fuse.mountpoint-s3", &[]),
            ("/jfs/x", StorageKind::Fuse, "fuse.juicefs", &[]),
            ("/s3fs/x", StorageKind::Fuse, "fuse.s3fs", &[]),
            ("/rclone/x", StorageKind::Fuse, "fuse.rclone", &[]),
            ("/sshfs/x", StorageKind::Fuse, "fuse.sshfs", &["64 KiB (max_read=65536)"]),
            ("/blob/x", StorageKind::Fuse, "fuse.blobfuse2", &[]),
            ("/rootless/x", StorageKind::Disk, "fuse.fuse-overlayfs", &[]),
            ("/something/x", StorageKind::Fuse, "fuse", &[]),
        ],
    );
}

#[test]
fn a_cluster_with_parallel_file_systems_and_shares() {
    check(
        include_bytes!("fixtures/cluster.mountinfo"),
        &[
            ("/lustre/x", StorageKind::Parallel, "lustre", &[]),
            ("/fsx/x", StorageKind::Parallel, "lustre", &[]),
            ("/gpfs/x", StorageKind::Parallel, "gpfs", &[]),
            ("/ceph/x", StorageKind::Parallel, "ceph", &[]),
            ("/weka/x", StorageKind::Parallel, "wekafs", &[]),
            ("/beegfs/x", StorageKind::Parallel, "beegfs", &[]),
            ("/share/x", StorageKind::Smb, "cifs (multichannel missing)", &["multichannel,max_channels=4"]),
            ("/share-wide/x", StorageKind::Smb, "cifs (max_channels=4)", &[]),
            ("/dfuse/x", StorageKind::Fuse, "fuse.daos", &[]),
        ],
    );
}

#[test]
fn a_virtual_machine_with_its_hosts_files() {
    check(
        include_bytes!("fixtures/virtual-machine.mountinfo"),
        &[
            ("/host/x", StorageKind::Virtiofs, "virtiofs", &[]),
            ("/host9p/x", StorageKind::NineP, "9p", &["msize=1048576"]),
            ("/host9p-large/x", StorageKind::NineP, "9p", &[]),
            ("/mnt/c/x", StorageKind::NineP, "9p", &["Windows drive"]),
            ("/image/x", StorageKind::Image, "erofs", &[]),
        ],
    );
}

#[test]
fn of_mounts_over_each_other_the_last_one_counts_and_names_may_hold_anything() {
    check(
        include_bytes!("fixtures/mounts-over-mounts.mountinfo"),
        &[
            ("/net/x", StorageKind::Nfs, "nfs4 (nconnect=4)", &[]),
            ("/models/x", StorageKind::Disk, "xfs", &[]),
            ("/models-old/x", StorageKind::Memory, "tmpfs", &[]),
            ("/my models\t\\/x", StorageKind::Memory, "tmpfs", &[]),
            ("/srv/llama.safetensors", StorageKind::Disk, "ext4", &[]),
            ("/srv/other.safetensors", StorageKind::Disk, "ext4", &[]),
        ],
    );
    let mounts = mounts::parse(include_bytes!("fixtures/mounts-over-mounts.mountinfo"));
    let source = |path| mounts::holding(&mounts, &at(Path::new(path))).unwrap().source.as_str();
    assert_eq!(
        (source("/srv/llama.safetensors"), source("/srv/other.safetensors")),
        ("/dev/sdc1", "/dev/sda1")
    );
    assert_eq!(source("/my models\t\\/x"), "a b");
}

#[test]
fn lines_that_make_no_sense_hide_nothing() {
    let mounts = mounts::parse(include_bytes!("fixtures/garbage.mountinfo"));
    let points: Vec<_> = mounts.iter().map(|mount| mount.point.as_os_str().as_bytes()).collect();
    // A parent that is no number is not looked at; a mount without a source is none.
    let expected: [&[u8]; 5] = [b"/a", b"/kept", br"/bad\9escape\77", b"/caf\xe9\xff", b"/cut"];
    assert_eq!(points, expected);
    let path = PathBuf::from(OsStr::from_bytes(b"/caf\xe9\xff/x"));
    assert_eq!(storage(mounts::holding(&mounts, &at(&path)).unwrap()).name, "ramfs");
    assert_eq!(mounts::holding(&mounts, &at(Path::new("/elsewhere"))), None);
}

#[test]
fn a_mount_number_decides_before_paths_do() {
    let mounts = mounts::parse(include_bytes!("fixtures/mounts-over-mounts.mountinfo"));
    let path = Path::new("/models/x");
    // A file that was opened before the second mount hid the first.
    let hidden = MountLookup { mount_id: Some(82), ..at(path) };
    assert_eq!(mounts::holding(&mounts, &hidden).unwrap().fs_type, "tmpfs");
    let unknown = MountLookup { mount_id: Some(4711), ..at(path) };
    assert_eq!(mounts::holding(&mounts, &unknown).unwrap().fs_type, "xfs");
}

#[test]
fn the_device_decides_where_the_table_is_of_another_root() {
    let mounts = mounts::parse(include_bytes!("fixtures/nfs.mountinfo"));
    // In a chroot to a directory of /fast, with the outer table.
    let place = MountLookup { mount_id: None, device: (0, 55), path: Path::new("/model.safetensors") };
    assert_eq!(mounts::holding(&mounts, &place).unwrap().point, Path::new("/fast"));
}

#[test]
fn without_a_mount_table_the_file_system_is_known_by_its_number() {
    for table in ["/no/such/table", "/dev/null"] {
        let system = System { mountinfo: table.into(), ..no_sysfs() };
        if Storage::of(Path::new("/dev/shm")).kind == StorageKind::Memory {
            let found = system.storage_of(Path::new("/dev/shm"));
            assert_eq!((found.kind, found.name.as_str()), (StorageKind::Memory, "tmpfs"));
        }
        // proc is no file system that models are loaded from, so its number is not known.
        assert_eq!(system.storage_of(Path::new("/proc/self")), Storage::unknown());
    }
}

#[test]
fn a_table_that_lies_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("mountinfo");
    for lie in
        [&b"1 1 0:1 / / rw - nfs4 liar:/ rw,nconnect=many,rsize=-1"[..], &[0xff; 4096], b"", b"\n\n - - -"]
    {
        std::fs::write(&table, lie).unwrap();
        let system = System { mountinfo: table.clone(), ..no_sysfs() };
        assert!(!system.storage_of(folder.path()).name.is_empty());
    }
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
        mounts::parse(&table);
    }

    #[test]
    fn nearly_right_lines_are_no_panic(line in r"[0-9 :/\\,=a-z.\-]{0,120}") {
        for mount in mounts::parse(format!("1 2 0:3 / /m rw - {line}\n{line}").as_bytes()) {
            let found = storage(&mount);
            proptest::prop_assert!(found.connections >= 1);
        }
    }
}
