//! The files that are read: random words, each told by its place, so that a read can be checked without another copy.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Files are a multiple of this, so that every pattern divides them.
pub const UNIT: u64 = 32 << 20;
const CHUNK: usize = 4 << 20;

/// SplitMix64: a random word for each number.
pub fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The word at `offset` (a multiple of 8) of file number `file`.
pub fn word(file: usize, offset: u64) -> u64 {
    mixed(((file as u64) << 48) | (offset / 8))
}

/// Makes what is missing of the files, one in each directory, `gib` together. Returns paths and the bytes of each.
pub fn prepare(directories: &[PathBuf], gib: f64) -> io::Result<(Vec<PathBuf>, u64)> {
    let each = ((gib * f64::from(1 << 30)) as u64 / directories.len() as u64 / UNIT).max(1) * UNIT;
    let mut paths = Vec::new();
    for (number, directory) in directories.iter().enumerate() {
        let path = directory.join(format!("io-engines-{number}-{}-mib.bin", each >> 20));
        if path.exists() {
            check(&path, number, each)?;
        } else {
            make(&path, number, each)?;
        }
        paths.push(path);
    }
    Ok((paths, each))
}

fn check(path: &Path, number: usize, bytes: u64) -> io::Result<()> {
    let file = File::open(path)?;
    let mut found = [0; 8];
    let ours = file.metadata()?.len() == bytes
        && (0..64).all(|step| {
            let at = bytes / 64 * step;
            file.read_exact_at(&mut found, at).is_ok() && u64::from_ne_bytes(found) == word(number, at)
        });
    if ours {
        Ok(())
    } else {
        Err(io::Error::other(format!("{} is there and not ours: remove it", path.display())))
    }
}

/// Written under another name first: what is there is whole.
fn make(path: &Path, number: usize, bytes: u64) -> io::Result<()> {
    eprintln!("making {} ({} MiB)", path.display(), bytes >> 20);
    let partial = path.with_extension("partial");
    let file = File::create(&partial)?;
    let next = AtomicU64::new(0);
    let write = || {
        let mut chunk = vec![0_u8; CHUNK];
        loop {
            let at = next.fetch_add(CHUNK as u64, Ordering::Relaxed);
            if at >= bytes {
                return io::Result::Ok(());
            }
            for (index, eight) in chunk.chunks_exact_mut(8).enumerate() {
                eight.copy_from_slice(&word(number, at + 8 * index as u64).to_ne_bytes());
            }
            file.write_all_at(&chunk, at)?;
        }
    };
    let written = std::thread::scope(|scope| {
        let writers = [(); 4].map(|()| scope.spawn(write));
        writers
            .into_iter()
            .try_for_each(|writer| writer.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into())))
    });
    let done = written.and_then(|()| file.sync_all()).and_then(|()| std::fs::rename(&partial, path));
    if done.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_made_once_and_one_that_is_not_ours_is_left_alone() {
        let place = tempfile::tempdir().expect("a directory");
        let directories = [place.path().to_owned()];
        let (paths, each) = prepare(&directories, 0.03).expect("made");
        assert_eq!(each, UNIT);
        let mut last = [0; 8];
        let file = File::options().read(true).write(true).open(&paths[0]).expect("there");
        file.read_exact_at(&mut last, each - 8).expect("whole");
        assert_eq!(u64::from_ne_bytes(last), word(0, each - 8));
        prepare(&directories, 0.03).expect("found");
        file.write_all_at(&[0; 8], each / 2).expect("written");
        assert!(prepare(&directories, 0.03).is_err());
        assert!(paths[0].exists());
    }
}
