//! Loads of a checkpoint with a manifest: nothing of a damaged block is copied or delivered, by whatever way it goes.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use penstock::ErrorKind;
use penstock::checkpoint::Checkpoint;
use penstock::config::Config;
use penstock::manifest::{FileHashes, MANIFEST_NAME, Manifest, Verify};
use penstock::plan::{Plan, Selection};
use penstock::store::{CachePolicy, LocalStore};
use penstock::tune::{Settings, Storage};

use super::faulty_store::FaultyStore;
use super::{KIB, Load, LoadTarget, Model, alone, nothing_remains};

const BLOCK: u64 = 64 * KIB;

/// A model with a manifest of blocks of 64 KiB.
fn verified(cache: CachePolicy) -> Model {
    let mut model = Model::cached_as(cache);
    let hashes = |(number, bytes): (usize, &Vec<u8>)| {
        let blocks: Vec<_> = bytes.chunks(BLOCK as usize).collect();
        let any = FileHashes::new("any", BLOCK * 2, BLOCK, vec![[0; 32]; 2]).unwrap();
        let value = |(number, block): (usize, &&[u8])| {
            if blocks.len() == 1 {
                panic!("a file of one block is hashed in another way");
            }
            let mut hasher = any.hasher(number as u64);
            hasher.update(block);
            hasher.value()
        };
        let values = blocks.iter().enumerate().map(value).collect();
        FileHashes::new(&format!("{number}.safetensors"), bytes.len() as u64, BLOCK, values).unwrap()
    };
    let manifest = Manifest::new(model.files.iter().enumerate().map(hashes).collect()).unwrap();
    fs::write(model.dir.path().join(MANIFEST_NAME), manifest.to_bytes()).unwrap();
    let store = FaultyStore { inner: LocalStore::new(cache), control: Arc::clone(&model.control) };
    let at = model.dir.path().to_str().unwrap().to_owned();
    let opened = Checkpoint::open_verified(Arc::new(store), &[at], Verify::Require).unwrap();
    model.checkpoint = Arc::new(opened);
    model.control.reset();
    model
}

/// A plan that is made for blocks of the manifest, or for others.
fn plan(model: &Model, block_bytes: u64) -> Arc<Plan> {
    let wanted = model.checkpoint.tensors().iter().map(|tensor| (tensor, Selection::all(tensor)));
    Arc::new(Plan::new(wanted.collect(), block_bytes, BLOCK))
}

#[test]
fn a_verified_load_reads_each_block_once_and_is_right() {
    let _alone = alone();
    for cache in [CachePolicy::Auto, CachePolicy::Bypass] {
        let model = verified(cache);
        let whole: u64 = model.files.iter().map(|bytes| bytes.len() as u64).sum();
        for target in LoadTarget::all() {
            for (block, request) in
                [(BLOCK, u64::MAX), (16 * BLOCK, BLOCK), (16 * KIB, 4 * KIB), (3 * BLOCK, BLOCK)]
            {
                model.control.piecemeal.store(request == u64::MAX, SeqCst);
                let plan = plan(&model, block);
                let mut load = Load::begin(&model, &plan, &target, 3);
                let usual = Settings::choose(&Config::default(), &Storage::unknown(), true);
                load.session.on_storage(&Storage::unknown(), &Settings { request_bytes: request, ..usual });
                load.attach_all();
                load.run().unwrap();
                load.check(&model, &[]);
                let stats = load.session.finish().unwrap();
                if block % BLOCK == 0 {
                    assert_eq!(stats.verified_bytes, whole, "{block} {stats:?}");
                    // Direct reads bring whole sectors at both ends of what they are asked for.
                    let sectors = if cache == CachePolicy::Bypass { stats.calls * 8 * KIB } else { 0 };
                    assert!((whole..=whole + sectors).contains(&stats.read_bytes), "{block} {stats:?}");
                    assert_eq!(stats.verification_excess_bytes, whole - plan.bytes(), "{block} {stats:?}");
                } else {
                    assert!(stats.verified_bytes > whole, "{stats:?}");
                }
                drop(load);
                nothing_remains(&model, &target);
                model.control.reset();
            }
        }
    }
}

#[test]
fn nothing_of_a_damaged_block_is_copied_or_delivered() {
    let _alone = alone();
    for cache in [CachePolicy::Auto, CachePolicy::Bypass] {
        let model = verified(cache);
        for file in 0..2 {
            let (path, len) = (model.path(file), model.files[file].len() as u64);
            for at in [model.checkpoint.objects()[file].data_start, BLOCK - 1, BLOCK, len / 2, len - 1] {
                flip(&path, at, &model.files[file]);
                for target in LoadTarget::all() {
                    for block in [BLOCK, 4 * BLOCK, 16 * KIB] {
                        check_damage(&model, file, at, &target, block);
                    }
                }
                // And back.
                fs::write(&path, &model.files[file]).unwrap();
            }
        }
    }
}

fn flip(path: &str, at: u64, bytes: &[u8]) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&[bytes[at as usize] ^ 0x20], at).unwrap();
}

fn check_damage(model: &Model, damaged: usize, at: u64, target: &LoadTarget, block: u64) {
    // As one would who opened it before the damage.
    let mut reopened = Model {
        dir: tempfile::tempdir().unwrap(),
        files: model.files.clone(),
        control: Arc::clone(&model.control),
        checkpoint: Arc::clone(&model.checkpoint),
    };
    let place = model.dir.path().to_str().unwrap().to_owned();
    let store = FaultyStore { control: Arc::clone(&model.control), ..FaultyStore::default() };
    match Checkpoint::open_verified(Arc::new(store), &[place], Verify::Require) {
        // The block of a header.
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Integrity);
            return;
        }
        Ok(checkpoint) => reopened.checkpoint = Arc::new(checkpoint),
    }
    let mut load = Load::begin(&reopened, &plan(&reopened, block), target, 2);
    load.attach_all();
    let error = load.run().unwrap_err();
    let bad = at / BLOCK * BLOCK..(at / BLOCK + 1) * BLOCK;
    assert_eq!(error.kind(), ErrorKind::Integrity, "{error}");
    assert_eq!(error.byte_range().unwrap().start, bad.start);
    load.check(&reopened, &[]);
    let tensors: Vec<_> = load.session.plan().tensors().iter().map(|tensor| tensor.name.clone()).collect();
    let is_device = matches!(target, LoadTarget::Device(..));
    let landed = load.landed.clone();
    let (session, memory) = (load.session, load.memory);
    // Copies have ended once the session is gone.
    drop(session);
    for ((name, landed), memory) in tensors.iter().zip(landed).zip(&memory) {
        let info = reopened.checkpoint.require(name).unwrap();
        let touched = info.range.start.max(bad.start)..info.range.end.min(bad.end);
        if info.object as usize != damaged || touched.is_empty() {
            continue;
        }
        assert!(!landed, "{name} was delivered");
        let own = (touched.start - info.range.start) as usize..(touched.end - info.range.start) as usize;
        assert!(!is_device || memory[own].iter().all(|byte| *byte == 0xA5), "{name} was copied");
    }
    nothing_remains(&reopened, target);
}
