//! What of a file is in the page cache, and how to get it out or in.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// The same number on every architecture.
const SYS_CACHESTAT: libc::c_long = 451;
const PAGE: u64 = 4096;
const OVERLAYFS: u64 = 0x794c_7630;

#[repr(C)]
struct Range {
    off: u64,
    len: u64,
}

/// Drops a file's clean pages. What is dirty or mapped elsewhere stays, which [`cached_share`] would tell.
pub fn drop_pages(file: &File) -> io::Result<()> {
    // SAFETY: takes no memory of ours.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Reads a file once, by several threads, so that it is cached.
pub fn fill(file: &File, bytes: u64) -> io::Result<()> {
    let share = bytes.div_ceil(4);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|part| {
                scope.spawn(move || {
                    let mut buffer = vec![0; 1 << 20];
                    let (mut at, end) = (part * share, ((part + 1) * share).min(bytes));
                    while at < end {
                        at += file.read_at(&mut buffer, at)?.max(1) as u64;
                    }
                    io::Result::Ok(())
                })
            })
            .collect();
        readers
            .into_iter()
            .try_for_each(|reader| reader.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into())))
    })
}

/// The share of a file's pages that are cached: by `cachestat(2)`, or `mincore(2)` where that is missing or asks the
/// wrong inode (overlayfs).
pub fn cached_share(file: &File, bytes: u64) -> io::Result<f64> {
    let pages = bytes.div_ceil(PAGE);
    // SAFETY: all zeros is a valid statfs, which the call fills in.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `system` is writable and lives through the call.
    unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) };
    #[allow(clippy::unnecessary_cast, reason = "the field's type differs between C libraries")]
    let overlay = system.f_type as u64 & 0xffff_ffff == OVERLAYFS;
    let asked = Range { off: 0, len: bytes };
    let mut answer = [0_u64; 5];
    // SAFETY: both have the layout of linux/mman.h (two and five 64-bit words) and live through the call.
    let code = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut answer, 0 as libc::c_uint)
    };
    let cached = if code == 0 && !overlay { answer[0] } else { resident_pages(file, bytes)? };
    Ok(cached as f64 / pages as f64)
}

fn resident_pages(file: &File, bytes: u64) -> io::Result<u64> {
    let len = usize::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: a fresh mapping at an address of the kernel's choice; its pages are never touched.
    let mapped = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mut states = vec![0_u8; len.div_ceil(PAGE as usize)];
    // SAFETY: the mapping is `len` bytes and `states` has a byte for each of its pages; it is unmapped once, unused after.
    let code = unsafe {
        let code = libc::mincore(mapped, len, states.as_mut_ptr().cast());
        libc::munmap(mapped, len);
        code
    };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(states.iter().filter(|state| **state & 1 == 1).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_asking_agree_when_a_file_is_cached_and_when_it_is_not() {
        // Not in a tmpfs, whose pages cannot be dropped.
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        io::Write::write_all(&mut file, &vec![7; 4 << 20]).expect("written");
        file.sync_all().expect("clean");
        drop_pages(&file).expect("dropped");
        assert_eq!(
            (cached_share(&file, 4 << 20).ok(), resident_pages(&file, 4 << 20).ok()),
            (Some(0.0), Some(0))
        );
        fill(&file, 4 << 20).expect("read");
        assert_eq!(
            (cached_share(&file, 4 << 20).ok(), resident_pages(&file, 4 << 20).ok()),
            (Some(1.0), Some(1024))
        );
    }
}
