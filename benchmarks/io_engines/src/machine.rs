//! What was measured on: processor, memory, kernel, file system and disk, without names that tell whose they are.

use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

/// The machine.
#[derive(Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_gib: f64,
    pub kernel: String,
}

impl Machine {
    pub fn here() -> Self {
        let field = |file, name| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let line = text.lines().find(|line: &&str| line.starts_with(name));
            line.and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
                .unwrap_or_default()
        };
        let kib: f64 = field("/proc/meminfo", "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0.0);
        Self {
            cpu: field("/proc/cpuinfo", "model name"),
            cores: cores(),
            memory_gib: (kib / f64::from(1 << 20) * 10.0).round() / 10.0,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        }
    }
}

/// Processors that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What a file lies on: the file system's type, and what its disk's queue says.
pub fn storage(path: &Path) -> Value {
    let Ok(metadata) = fs::metadata(path) else { return Value::Null };
    let device = metadata.st_dev();
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    let mut found = Map::new();
    // Fields: id, parent, device, root, mount point, options, tags, "-", type, source.
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&number));
    let kind = mount.and_then(|line| line.split_once(" - ")).and_then(|(_, rest)| rest.split(' ').next());
    found.insert("file_system".into(), kind.unwrap_or("unknown").into());
    let block = Path::new("/sys/dev/block").join(&number);
    // A partition's queue is its disk's.
    if let Some(queue) =
        [block.join("queue"), block.join("../queue")].into_iter().find(|queue| queue.is_dir())
    {
        for name in ["scheduler", "nr_requests", "max_sectors_kb", "io_poll"] {
            if let Ok(text) = fs::read_to_string(queue.join(name)) {
                found.insert(name.into(), text.trim().into());
            }
        }
    }
    Value::Object(found)
}
