//! Storage as the kernel really describes it, and loads from it: memory, disks, overlays, images and FUSE.
//!
//! The tables of other systems are tested with the code (`src/tune/storage/tests.rs`); here things are mounted. Without
//! the right to mount, tests are skipped and say so.
#![allow(unsafe_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

mod failing;
mod mounted;
mod permissions;
mod recording_fuse;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fuser::MountOption;
use mounted::{Mounted, or_skip, run, text};
use penstock::Error;
use penstock::checkpoint::Checkpoint;
use penstock::config::Config;
use penstock::pipeline::{Next, Session, Target};
use penstock::plan::{Plan, Selection};
use penstock::stats::LoadStats;
use penstock::store::LocalStore;
use penstock::tune::{Readers, Settings, Storage, StorageKind, Survey};
use recording_fuse::{Read, RecordingFuse};

const MIB: usize = 1 << 20;
const FILE: &str = "model.safetensors";

/// A file with tensors of `sizes` bytes each, and bytes that differ from those around them.
fn file_of(sizes: &[usize]) -> Vec<u8> {
    let (mut entries, mut end) = (Vec::new(), 0);
    for (number, size) in sizes.iter().enumerate() {
        entries.push(format!(
            r#""t{number:03}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{end},{}]}}"#,
            end + size
        ));
        end += size;
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..end as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8));
    bytes
}

/// Loads all of the checkpoint at `path` as the storage wants it, and checks every byte against `file`.
fn load(path: &Path, file: &[u8]) -> LoadStats {
    try_load(&open(path), file).unwrap()
}

fn open(path: &Path) -> Arc<Checkpoint> {
    let store = Arc::new(LocalStore::default());
    Arc::new(Checkpoint::open(store, &[text(path).to_owned()]).unwrap())
}

fn try_load(checkpoint: &Arc<Checkpoint>, file: &[u8]) -> Result<LoadStats, Error> {
    run_to_the_end(checkpoint, file, begin(checkpoint, &Config::default()))
}

fn run_to_the_end(
    checkpoint: &Arc<Checkpoint>,
    file: &[u8],
    (mut session, plan): (Session, Arc<Plan>),
) -> Result<LoadStats, Error> {
    loop {
        match session.next(Duration::from_secs(30))? {
            Next::Landed(tensor) => {
                let name = &plan.tensors()[tensor as usize].name;
                let range = checkpoint.require(name)?.range.clone();
                let (start, end) =
                    (usize::try_from(range.start).unwrap(), usize::try_from(range.end).unwrap());
                let mut memory = session.take_host(tensor).unwrap();
                let filled = memory.window();
                // SAFETY: the tensor has landed, so all of it is filled.
                let same = unsafe { filled.assume_filled(0, end - start) } == &file[start..end];
                assert!(same, "{name}");
            }
            Next::Waiting => panic!("nothing landed in 30 s"),
            Next::Done => return session.finish(),
        }
    }
}

/// A load of all tensors, begun.
fn begin(checkpoint: &Arc<Checkpoint>, config: &Config) -> (Session, Arc<Plan>) {
    let path = checkpoint.objects()[0].location.as_str();
    let storage = Survey::default().heaviest([(path, checkpoint.bytes())]);
    let settings = Settings::choose(config, &storage, false);
    let wanted = checkpoint.tensors().iter().map(|tensor| (tensor, Selection::all(tensor))).collect();
    let plan = Arc::new(Plan::new(wanted, settings.block_bytes, settings.coalesce_gap_bytes));
    // As the tuner begins; what it tries afterwards is its own affair.
    let Readers { per_reader_ranges, fetches, .. } = settings.readers;
    let readers = Readers { per_reader_ranges, ..Readers::fixed(fetches.start) };
    let mut session =
        Session::start(Arc::clone(checkpoint), Arc::clone(&plan), Target::Slab, readers).unwrap();
    session.on_storage(&storage, &settings);
    session.attach_slab(plan.tensors().len()).unwrap();
    (session, plan)
}

/// Writes a checkpoint to the folder and loads it.
fn load_from(folder: &Path) -> LoadStats {
    let file = file_of(&[3 * MIB + 5, 100, 2 * MIB]);
    let path = folder.join(FILE);
    fs::write(&path, &file).unwrap();
    load(&path, &file)
}

#[test]
fn memory() {
    let Some(tmpfs) = or_skip("memory", Mounted::new(&["-t", "tmpfs", "none"])) else { return };
    assert_eq!(Storage::of(tmpfs.path()).kind, StorageKind::Memory);
    let stats = load_from(tmpfs.path());
    assert_eq!((stats.storage.as_str(), stats.direct_bytes), ("tmpfs", 0));
}

#[test]
fn images_of_disks_on_a_loop_device() {
    let makes: [(&str, &[&str]); 3] = [
        ("ext4", &["mkfs.ext4", "-q", "-F"]),
        ("xfs", &["mkfs.xfs", "-q"]),
        ("btrfs", &["mkfs.btrfs", "-q"]),
    ];
    for (name, make) in makes {
        let Some(image) = or_skip(&format!("images, {name}"), Mounted::image(make)) else { continue };
        let found = Storage::of(image.path());
        // A btrfs, which may be of several disks, has no device of its own.
        let shown = if name == "btrfs" { "btrfs".to_owned() } else { format!("{name} on loop") };
        assert!(found.kind == StorageKind::Disk && found.name.starts_with(&shown), "{found:?}");
        assert_eq!(load_from(image.path()).storage, found.name);
    }
}

#[test]
fn an_overlay_is_a_disk_whatever_its_layers_lie_on() {
    let Some(tmpfs) = or_skip("overlay", Mounted::new(&["-t", "tmpfs", "none"])) else { return };
    for folder in ["upper", "work", "lower"] {
        fs::create_dir(tmpfs.path().join(folder)).unwrap();
    }
    let file = file_of(&[MIB]);
    fs::write(tmpfs.path().join("lower").join(FILE), &file).unwrap();
    let options = format!("lowerdir={0}/lower,upperdir={0}/upper,workdir={0}/work", text(tmpfs.path()));
    let overlay = Mounted::new(&["-t", "overlay", "overlay", "-o", &options]);
    let Some(overlay) = or_skip("overlay", overlay) else { return };
    let at = |name: &str| overlay.path().join(name);
    fs::write(at("written.safetensors"), &file).unwrap();
    for name in [FILE, "written.safetensors"] {
        let found = Storage::of(&at(name));
        assert_eq!((found.kind, found.name.as_str()), (StorageKind::Disk, "overlay"));
        assert_eq!(load(&at(name), &file).storage, "overlay");
    }
}

#[test]
fn mounts_within_and_over_mounts_and_mounts_of_single_files() {
    let test = "mounts over mounts";
    let Some(outer) = or_skip(test, Mounted::new(&["-t", "tmpfs", "none"])) else { return };
    let folder = outer.path().join("a name\twith\\odd\ncharacters");
    fs::create_dir(&folder).unwrap();
    let disk = tempfile::tempdir().unwrap();
    let elsewhere = Storage::of(disk.path()).name;
    fs::write(disk.path().join(FILE), "x").unwrap();

    let name = |path: &Path| Storage::of(path).name;
    let Some(first) = or_skip(test, Mounted::at(&folder, &["-t", "ramfs", "none"])) else { return };
    assert_eq!(name(&folder), "ramfs");
    let second = Mounted::at(&folder, &["--bind", text(disk.path())]).unwrap();
    assert_eq!(name(&folder.join(FILE)), elsewhere, "the later mount hides the earlier");
    drop(second);
    assert_eq!(name(&folder), "ramfs");
    drop(first);
    assert_eq!(name(&folder), "tmpfs");

    let single = outer.path().join(FILE);
    fs::write(&single, "y").unwrap();
    let _bound = Mounted::at(&single, &["--bind", text(&disk.path().join(FILE))]).unwrap();
    assert_eq!((name(&single), name(outer.path())), (elsewhere, "tmpfs".to_owned()));
}

#[test]
fn a_compressed_image_is_read_through_the_page_cache() {
    let test = "compressed image";
    let (folder, file) = (tempfile::tempdir().unwrap(), file_of(&[3 * MIB]));
    fs::create_dir(folder.path().join("files")).unwrap();
    fs::write(folder.path().join("files").join(FILE), &file).unwrap();
    let (files, image) = (folder.path().join("files"), folder.path().join("image"));
    for (name, make) in [
        ("squashfs", vec!["mksquashfs", text(&files), text(&image), "-quiet", "-no-progress", "-noappend"]),
        ("erofs", vec!["mkfs.erofs", "-zlz4", text(&image), text(&files)]),
    ] {
        let made = run(make[0], &make[1..]).and_then(|()| Mounted::new(&["-o", "loop,ro", text(&image)]));
        let Some(mounted) = or_skip(&format!("{test}, {name}"), made) else { continue };
        assert_eq!(Storage::of(mounted.path()).kind, StorageKind::Image);
        let stats = load(&mounted.path().join(FILE), &file);
        assert_eq!((stats.storage.as_str(), stats.direct_bytes), (name, 0));
    }
}

#[test]
fn fuse_is_read_from_front_to_back_by_one_direct_reader_in_large_requests() {
    let file = file_of(&[5 * MIB + 3, 77, 9 * MIB, 2 * MIB]);
    let options = [MountOption::CUSTOM("subtype=gcsfuse".into()), MountOption::FSName("my-bucket".into())];
    let mounted = RecordingFuse::mount(FILE, file.clone(), &options);
    let Some(fuse) = or_skip("fuse", mounted) else { return };
    let stats = load(&fuse.file(FILE), &file);
    assert_eq!((stats.storage.as_str(), stats.readers), ("fuse.gcsfuse", 1));

    let reads = fuse.reads();
    assert!(reads.iter().all(|read| read.direct), "{reads:?}");
    // The first is the header's, when the checkpoint is opened; the load is the rest.
    let load = &reads[1..];
    let bytes: u64 = load.iter().map(|read| read.bytes).sum();
    assert!((stats.bytes..stats.bytes + (1 << 20)).contains(&bytes), "{bytes} bytes for {}", stats.bytes);
    for pair in load.windows(2) {
        assert_eq!(pair[0].offset + pair[0].bytes, pair[1].offset, "a jump loses the daemon's read-ahead");
    }
    // The kernel cuts the 2 MiB asked for at what it lets a request hold: 1 MiB, or 128 KiB before Linux 4.20.
    let mean = bytes / load.len() as u64;
    assert!(mean >= 128 << 10, "{} requests of {mean} bytes", load.len());
}

#[test]
fn each_of_several_fuse_readers_goes_from_front_to_back_through_a_file_of_its_own() {
    let (blocks, readers) = (60, 3);
    let file = file_of(&vec![2 * MIB; blocks]);
    let mounted = RecordingFuse::mount(FILE, file.clone(), &[]);
    let Some(fuse) = or_skip("fuse", mounted) else { return };
    fuse.answer_after(Duration::from_millis(1));
    let checkpoint = open(&fuse.file(FILE));
    let before = fuse.reads().len();
    let config = Config { readers: Some(readers), ..Config::default() };
    let stats = run_to_the_end(&checkpoint, &file, begin(&checkpoint, &config)).unwrap();
    assert_eq!(stats.readers, readers as u64);

    let mut handles: BTreeMap<u64, Vec<Read>> = BTreeMap::new();
    for read in &fuse.reads()[before..] {
        handles.entry(read.handle).or_default().push(*read);
    }
    assert!((2..=readers).contains(&handles.len()), "{} open files", handles.len());
    assert!(!handles.contains_key(&fuse.reads()[0].handle), "the one that all share is used too");
    let jumps = |reads: &Vec<Read>| {
        reads.windows(2).filter(|pair| pair[0].offset + pair[0].bytes != pair[1].offset).count()
    };
    // The remaining half, and half of that, and so on: a few for each reader. Taking turns, each would jump every time.
    let jumps: usize = handles.values().map(jumps).sum();
    assert!(jumps <= blocks / 3, "{jumps} jumps in {blocks} blocks");
}

#[test]
fn fuse_without_a_subtype_is_known_by_its_source() {
    let file = file_of(&[MIB]);
    let options = [MountOption::FSName("mountpoint-s3".into())];
    let Some(fuse) = or_skip("fuse", RecordingFuse::mount(FILE, file.clone(), &options)) else { return };
    assert_eq!(load(&fuse.file(FILE), &file).storage, "fuse.mountpoint-s3");
}
