//! What a mount's options say of its speed, and what is worth saying about them.
//!
//! A note is made only where a person can do something, and says what. The words are in docs/storage.md, too.

use super::kind::{StorageKind, shown};
use super::mounts::Mount;

/// What was read from a mount's options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Described {
    /// The file system, and what stands out: `nfs4 (nconnect missing)`.
    pub(super) name: String,
    /// Connections to the server.
    pub(super) connections: usize,
    pub(super) notes: Vec<String>,
}

/// Requests that are smaller than this cost more in round trips than they carry.
const SMALL_REQUEST: u64 = 256 << 10;
/// What Linux before 5.15 and since take for 9p where nothing is said; it is not shown then.
const P9_DEFAULT: u64 = 128 << 10;

/// Describes a mount of a file system of class `kind`.
pub(super) fn describe(mount: &Mount, kind: StorageKind) -> Described {
    let mut described =
        Described { name: shown(&mount.fs_type, &mount.source), connections: 1, notes: Vec::new() };
    match kind {
        StorageKind::Nfs => nfs(mount, &mut described),
        StorageKind::Smb => smb(mount, &mut described),
        StorageKind::Fuse => fuse(mount, &mut described),
        StorageKind::NineP => nine_p(mount, &mut described),
        StorageKind::Memory
        | StorageKind::Disk
        | StorageKind::Parallel
        | StorageKind::Virtiofs
        | StorageKind::Image
        | StorageKind::Remote => {}
    }
    described
}

fn nfs(mount: &Mount, described: &mut Described) {
    let version = mount.option("vers").and_then(|version| version.chars().next());
    let name = match version {
        Some(version) => format!("nfs{version}"),
        None if mount.fs_type == "nfs4" => "nfs4".to_owned(),
        None => "nfs3".to_owned(),
    };
    let connections = mount.number("nconnect");
    let point = mount.point.display();
    let says = match connections {
        Some(connections @ 2..) => Some(format!("nconnect={connections}")),
        _ if mount.option("proto") == Some("rdma") => Some("rdma".to_owned()),
        // Several addresses of the server stand in for several connections.
        _ if mount.option("remoteports").is_some() => None,
        // A proxy of this machine, or a service that serves every client one connection.
        _ if one_connection_only(mount) => None,
        _ => {
            described.notes.push(format!(
                "{point} is NFS over one TCP connection, which carries less than the network: unmount it and mount it \
                 with nconnect=16"
            ));
            Some(connections.map_or("nconnect missing".to_owned(), |one| format!("nconnect={one}")))
        }
    };
    described.connections = connections.and_then(|number| number.try_into().ok()).unwrap_or(1).max(1);
    described.name = match says {
        Some(says) => format!("{name} ({says})"),
        None => name,
    };
    small_requests(mount, "rsize", described);
}

fn one_connection_only(mount: &Mount) -> bool {
    let local = |address: &str| address.starts_with("127.") || address == "::1" || address == "localhost";
    let server = mount.source.split(":/").next().unwrap_or_default();
    local(server) || mount.option("addr").is_some_and(local) || server.contains(".efs.")
}

fn smb(mount: &Mount, described: &mut Described) {
    let channels = mount.number("max_channels").unwrap_or(1);
    "cifs".clone_into(&mut described.name);
    if channels > 1 {
        described.connections = usize::try_from(channels).unwrap_or(1);
        described.name = format!("cifs (max_channels={channels})");
    } else {
        described.name = "cifs (multichannel missing)".to_owned();
        described.notes.push(format!(
            "{} is SMB over one TCP connection: mount it with multichannel,max_channels=4 if the server has multichannel",
            mount.point.display()
        ));
    }
    small_requests(mount, "rsize", described);
}

fn fuse(mount: &Mount, described: &mut Described) {
    small_requests(mount, "max_read", described);
}

fn small_requests(mount: &Mount, option: &str, described: &mut Described) {
    if let Some(bytes) = mount.number(option).filter(|bytes| (1..SMALL_REQUEST).contains(bytes)) {
        described.notes.push(format!(
            "{} cuts reads into requests of {} KiB ({option}={bytes}): mount it with {option}=1048576",
            mount.point.display(),
            bytes >> 10
        ));
    }
}

fn nine_p(mount: &Mount, described: &mut Described) {
    let point = mount.point.display();
    if mount.option("aname").is_some_and(|name| name.starts_with("drvfs")) || mount.source == "drvfs" {
        described.notes.push(format!(
            "{point} is a Windows drive seen from WSL, which is slow to read: copy the files to the Linux file system"
        ));
    } else if mount.number("msize").unwrap_or(P9_DEFAULT) < SMALL_REQUEST {
        described.notes.push(format!(
            "{point} is 9p with small messages: mount it with msize=1048576, or share it by virtiofs"
        ));
    }
}
