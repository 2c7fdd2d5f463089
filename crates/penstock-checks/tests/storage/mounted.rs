//! Real mounts, for as long as a test needs them. Most need root; who may not mount skips, and says why.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted file system, unmounted when it is dropped.
pub struct Mounted {
    point: PathBuf,
    /// Holds the mount point and, for images, the image.
    _folder: Option<tempfile::TempDir>,
}

impl Mounted {
    /// Mounts with `mount(8)` at a new directory; the reason where that is refused.
    pub fn new(arguments: &[&str]) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let point = folder.path().join("mnt");
        fs::create_dir(&point).map_err(|error| error.to_string())?;
        run("mount", &[arguments, &[text(&point)]].concat())?;
        Ok(Self { point, _folder: Some(folder) })
    }

    /// Mounts at a path that exists.
    pub fn at(point: &Path, arguments: &[&str]) -> Result<Self, String> {
        run("mount", &[arguments, &[text(point)]].concat())?;
        Ok(Self { point: point.to_owned(), _folder: None })
    }

    /// Takes over what someone else has mounted at `point`.
    pub fn over(point: &Path) -> Self {
        Self { point: point.to_owned(), _folder: None }
    }

    /// Mounts an image that `make` (a `mkfs` command line, but for the image's path) formats.
    pub fn image(make: &[&str]) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let (image, point) = (folder.path().join("image"), folder.path().join("mnt"));
        let made = fs::File::create(&image).and_then(|file| file.set_len(320 << 20));
        made.and_then(|()| fs::create_dir(&point)).map_err(|error| error.to_string())?;
        run(make[0], &[&make[1..], &[text(&image)]].concat())?;
        run("mount", &["-o", "loop", text(&image), text(&point)])?;
        Ok(Self { point, _folder: Some(folder) })
    }

    pub fn path(&self) -> &Path {
        &self.point
    }

    /// The image that is mounted.
    pub fn image_file(&self) -> PathBuf {
        self.point.with_file_name("image")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a failed test may have files open, and so may a child of another test that has yet to exec.
        let _ = run("umount", &["-l", text(&self.point)]);
    }
}

/// What `made` holds; else says on stderr, past the harness's capture, why the test is skipped.
pub fn or_skip<T>(test: &str, made: Result<T, String>) -> Option<T> {
    made.map_err(|reason| {
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {}", reason.trim());
    })
    .ok()
}

/// Runs a command to its end; what it said where it failed.
pub fn run(command: &str, arguments: &[&str]) -> Result<(), String> {
    let done = Command::new(command).args(arguments).env("LC_ALL", "C").output();
    let done = done.map_err(|error| format!("{command}: {error}"))?;
    match done.status.success() {
        true => Ok(()),
        false => Err(format!("{command}: {}", String::from_utf8_lossy(&done.stderr))),
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
