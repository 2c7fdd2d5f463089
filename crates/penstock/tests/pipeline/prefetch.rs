//! Reading ahead of a load: what is asked for and when, and how it ends.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use penstock::Result;
use penstock::checkpoint::Checkpoint;
use penstock::pipeline::Prefetch;
use penstock::store::{Entry, Identity, LocalStore, Object, Store};
use serde_json::json;

use super::children::in_child;
use super::faulty_store::{Control, FaultyStore};
use super::{alone, eventually};

const MIB: u64 = 1 << 20;
/// Tensors of 20 MiB, in steps of 8 MiB of the file.
const TENSORS: u64 = 10;

/// A file that has a size and hardly any bytes, and a store that says when it is asked.
struct Sparse {
    _dir: tempfile::TempDir,
    control: Arc<Control>,
    checkpoint: Arc<Checkpoint>,
}

impl Sparse {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tensor = |number: u64| {
            let span = [number * 20 * MIB, (number + 1) * 20 * MIB];
            (format!("t{number}"), json!({"dtype": "U8", "shape": [20 * MIB], "data_offsets": span}))
        };
        let header =
            serde_json::to_vec(&(0..TENSORS).map(tensor).collect::<serde_json::Map<_, _>>()).unwrap();
        let path = dir.path().join("model.safetensors");
        let mut file = File::create(&path).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(&header).unwrap();
        file.set_len(8 + header.len() as u64 + TENSORS * 20 * MIB).unwrap();
        let store = FaultyStore::default();
        let control = Arc::clone(&store.control);
        let location = path.to_str().unwrap().to_owned();
        let checkpoint = Arc::new(Checkpoint::open(Arc::new(store), &[location]).unwrap());
        control.reset();
        Self { _dir: dir, control, checkpoint }
    }

    fn begin(&self) -> Prefetch {
        let all: Vec<_> = (0..self.checkpoint.tensors().len()).collect();
        Prefetch::begin(Arc::clone(&self.checkpoint), &all)
    }

    fn asked(&self) -> usize {
        self.control.asked.lock().unwrap().len()
    }

    /// Reading ahead that waits for the first of eight stretches to come in.
    fn begin_and_wait(&self) -> Prefetch {
        self.control.block_from.store(1, SeqCst);
        let ahead = self.begin();
        self.control.wait_for_reads(1);
        assert_eq!(self.asked(), 8);
        ahead
    }
}

#[test]
fn everything_is_asked_for_once_in_the_order_of_the_file() {
    let _alone = alone();
    let sparse = Sparse::new();
    let ahead = sparse.begin();
    eventually("all is asked for", || ahead.is_done());
    let asked = sparse.control.asked.lock().unwrap();
    let tensors = sparse.checkpoint.tensors();
    assert_eq!(asked.first().unwrap().start, tensors[0].range.start);
    assert_eq!(asked.last().unwrap().end, tensors.last().unwrap().range.end);
    assert!(asked.windows(2).all(|pair| pair[0].end == pair[1].start), "{asked:?}");
    assert_eq!(ahead.bytes(), TENSORS * 20 * MIB);
}

#[test]
fn where_an_object_lies_is_looked_up_once() {
    let _alone = alone();
    let sparse = Sparse::new();
    let ahead = sparse.begin();
    eventually("all is asked for", || ahead.is_done());
    assert!(sparse.asked() > 20);
    assert_eq!(sparse.control.located.load(SeqCst), 1);
}

/// A store of URLs whose objects lie in a file of this machine too, and that counts how often its server is asked.
struct Kept {
    file: PathBuf,
    asked: Arc<AtomicUsize>,
}

impl Store for Kept {
    fn open(&self, _: &str) -> Result<Arc<dyn Object>> {
        self.asked.fetch_add(1, SeqCst);
        LocalStore::default().open(self.file.to_str().unwrap())
    }

    fn list(&self, _: &str) -> Result<Vec<Entry>> {
        unreachable!("nothing is listed")
    }

    fn directories(&self, _: &str) -> Vec<String> {
        unreachable!("nothing is listed")
    }

    fn file_of(&self, _: &str, _: &Identity) -> Option<PathBuf> {
        Some(self.file.clone())
    }
}

#[test]
fn a_server_is_never_asked_not_even_where_the_disk_fails_to_give_what_it_keeps() {
    let _alone = alone();
    let sparse = Sparse::new();
    let file = PathBuf::from(&sparse.checkpoint.objects()[0].location);
    let asked = Arc::new(AtomicUsize::new(0));
    let store = Arc::new(Kept { file: file.clone(), asked: Arc::clone(&asked) });
    let url = "https://example.com/model.safetensors".to_owned();
    let checkpoint = Arc::new(Checkpoint::open(store, &[url]).unwrap());
    let all: Vec<_> = (0..checkpoint.tensors().len()).collect();
    for bytes in [u64::MAX, 30 * MIB, 0] {
        if bytes < u64::MAX {
            File::options().write(true).open(&file).unwrap().set_len(bytes).unwrap();
        }
        let mut ahead = Prefetch::begin(Arc::clone(&checkpoint), &all);
        eventually("it ends by itself", || ahead.is_done());
        ahead.stop();
    }
    assert_eq!(asked.load(SeqCst), 1);
}

#[test]
fn of_some_tensors_only_their_bytes_are_asked_for() {
    let _alone = alone();
    let sparse = Sparse::new();
    let ahead = Prefetch::begin(Arc::clone(&sparse.checkpoint), &[2, 7]);
    eventually("both are asked for", || ahead.is_done());
    assert_eq!(ahead.bytes(), 2 * 20 * MIB);
}

#[test]
fn no_more_is_asked_for_than_the_disk_works_on_until_some_of_it_is_there() {
    let _alone = alone();
    let sparse = Sparse::new();
    let ahead = sparse.begin_and_wait();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!((sparse.asked(), ahead.is_done()), (8, false));
    sparse.control.release();
    eventually("all is asked for", || ahead.is_done());
    assert_eq!(ahead.bytes(), TENSORS * 20 * MIB);
}

#[test]
fn after_stopping_nothing_is_asked_for() {
    let _alone = alone();
    let sparse = Sparse::new();
    let mut ahead = sparse.begin_and_wait();
    std::thread::scope(|scope| {
        scope.spawn(|| ahead.stop());
        std::thread::sleep(std::time::Duration::from_millis(20));
        sparse.control.release();
    });
    assert!(ahead.is_done());
    assert_eq!(sparse.asked(), 8);
    ahead.stop();
}

#[test]
fn dropping_it_waits_for_no_disk() {
    let _alone = alone();
    let sparse = Sparse::new();
    drop(sparse.begin_and_wait());
    sparse.control.release();
    eventually("the thread lets go of the file", || Arc::strong_count(&sparse.checkpoint) == 1);
    assert_eq!(sparse.asked(), 8);
}

#[test]
fn what_cannot_be_read_ends_it_without_a_word() {
    let _alone = alone();
    let sparse = Sparse::new();
    sparse.control.fail_at.store(2, SeqCst);
    let mut ahead = sparse.begin();
    eventually("it ends", || ahead.is_done());
    assert_eq!(sparse.asked(), 9);
    ahead.stop();
}

#[test]
fn a_child_after_fork_leaves_it_to_its_parent() {
    let _alone = alone();
    let sparse = Sparse::new();
    let mut ahead = sparse.begin_and_wait();
    in_child(|| {
        ahead.stop();
        drop(ahead);
    });
    sparse.control.release();
    eventually("the parent's thread ends", || Arc::strong_count(&sparse.checkpoint) == 1);
}
