//! What a load did: bytes by route, seconds by stage, settings chosen, and what limited it.
//!
//! Readers count for themselves and hand their counts in when they end, so that counting costs nothing while loading.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use crate::tune::Trial;

/// Figures of one load. Seconds of a stage are summed over readers, so they may exceed the wall-clock time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadStats {
    /// Bytes of tensors delivered or still to be delivered by this load.
    pub bytes: u64,
    /// Bytes that left the store, alignment and bridged gaps included.
    pub read_bytes: u64,
    /// Of those: copied from the page cache.
    pub cached_bytes: u64,
    /// Of those: read straight from the device, by-passing the page cache.
    pub direct_bytes: u64,
    /// Of those: read through the page cache although not in it.
    pub buffered_bytes: u64,
    /// Of those: from an object store or HTTP server.
    pub network_bytes: u64,
    /// Bytes that were compared with a manifest before they were handed out; what was read of a mapping is not counted.
    pub verified_bytes: u64,
    /// Bytes read only because blocks are verified whole.
    pub verification_excess_bytes: u64,
    /// Calls made to the store.
    pub calls: u64,
    /// Of those: answered by an object store with "too fast".
    pub throttled: u64,
    /// Tensors and blocks in the plan.
    pub tensors: u64,
    /// See `tensors`.
    pub blocks: u64,
    /// The most reader threads that ran at once.
    pub readers: u64,
    /// The numbers of readers that the tuner tried, in order, and their rates.
    pub tried: Vec<Trial>,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Most staging memory this load held at once, in bytes.
    pub staging_bytes: u64,
    /// What most of the bytes lie on: `ext4 on nvme0n1p2`, `nfs4`, `tmpfs`, `s3`; empty where no one said.
    pub storage: String,
    /// Its class, of few words: see [`StorageKind::name`](crate::tune::StorageKind::name); empty where no one said.
    pub storage_kind: &'static str,
    /// Whether that is reached over a network.
    pub network: bool,
    /// Whether the staging memory was pinned (registered with the device).
    pub pinned: bool,
    /// From the start of the session to its last delivered byte.
    pub wall: Duration,
    /// Time that reader threads had a core.
    pub cpu: Duration,
    /// The cores that this process may use.
    pub cores: u64,
    /// Reader time in store reads.
    pub reading: Duration,
    /// Of that: time spent copying from the page cache.
    pub cached_reading: Duration,
    /// Reader time spent scattering or packing in host memory, and issuing copies.
    pub copying: Duration,
    /// Reader time waiting for copies to the device to end.
    pub device_wait: Duration,
    /// Reader time without destinations to read to: the consumer's pace.
    pub consumer_wait: Duration,
    /// Things worth knowing: a fallback taken, a limit met.
    pub notes: Vec<String>,
}

impl LoadStats {
    /// Delivered bytes per second of wall-clock time, in GB/s (1e9); 0 before anything took time.
    pub fn gb_per_s(&self) -> f64 {
        let seconds = self.wall.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds / 1e9 } else { 0.0 }
    }

    /// What most of the readers' time went to: `"disk"`, `"network"`, `"page cache"`, `"pcie"`, `"memory"` or
    /// `"consumer"`; `"cores"` instead of `"network"` where the readers kept most of the cores busy.
    pub fn limited_by(&self) -> &'static str {
        let reading = match self.cached_reading > self.reading / 2 {
            true => "page cache",
            false if self.network && self.kept_cores_busy() => "cores",
            false if self.network => "network",
            false => "disk",
        };
        [
            (self.reading, reading),
            (self.device_wait, "pcie"),
            (self.copying, "memory"),
            (self.consumer_wait, "consumer"),
        ]
        .into_iter()
        .max_by_key(|(time, _)| *time)
        .map_or("disk", |(_, name)| name)
    }

    /// What to do about it, in a sentence; none where nothing was loaded.
    pub fn advice(&self) -> Option<&'static str> {
        if self.bytes == 0 {
            return None;
        }
        Some(match self.limited_by() {
            "network" => {
                "the network or the store is what limits: a disk cache (PENSTOCK_CACHE_DIR) keeps what comes for the next load"
            }
            "cores" => "the CPU cores are what limits: give the process more of them",
            "page cache" => "copying from the page cache is what limits: the storage is not",
            "pcie" => {
                "the copies to the device are what limits: check that the GPU has its full PCIe width (nvidia-smi -q)"
            }
            "memory" => "host memory is what limits: copying and page faults, not the storage",
            "consumer" => "the consumer is what limits: storage waited for memory to read into",
            _ => {
                "the disk is what limits: a faster disk, or files that are in the page cache, would load faster"
            }
        })
    }

    fn kept_cores_busy(&self) -> bool {
        const MOST: f64 = 0.75;
        self.cores > 0 && self.cpu.as_secs_f64() > MOST * self.wall.as_secs_f64() * self.cores as f64
    }

    /// Adds what one reader did.
    pub(crate) fn add(&mut self, other: &Self) {
        self.read_bytes += other.read_bytes;
        self.cached_bytes += other.cached_bytes;
        self.direct_bytes += other.direct_bytes;
        self.buffered_bytes += other.buffered_bytes;
        self.network_bytes += other.network_bytes;
        self.verified_bytes += other.verified_bytes;
        self.verification_excess_bytes += other.verification_excess_bytes;
        self.calls += other.calls;
        self.throttled += other.throttled;
        self.reading += other.reading;
        self.cached_reading += other.cached_reading;
        self.cpu += other.cpu;
        self.copying += other.copying;
        self.device_wait += other.device_wait;
        other.notes.iter().for_each(|note| self.note(note.clone()));
    }

    /// Adds a note, once.
    pub(crate) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

/// The stages of the load, one on each line: what went through it, how long its readers were at it, and what follows.
impl Display for LoadStats {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let seconds = self.wall.as_secs_f64();
        let tensors = plural(self.tensors, "tensor");
        let (bytes, speed) = (scaled(self.bytes as f64), scaled(self.gb_per_s() * 1e9));
        writeln!(f, "{tensors}, {bytes} in {seconds:.3} s: {speed}/s from {}", self.source())?;
        let waits = self.device_wait + self.consumer_wait;
        let all = (self.reading + self.copying + waits).as_secs_f64();
        let mut stage = |name: &str, time: Duration, what: &str| {
            let share = if all > 0.0 { time.as_secs_f64() / all * 100.0 } else { 0.0 };
            let line = format!("  {name:<20}{:>9.3} s  {share:>3.0} %  {what}", time.as_secs_f64());
            writeln!(f, "{}", line.trim_end())
        };
        stage("read", self.reading, &self.routes())?;
        stage("place and enqueue", self.copying, "")?;
        if !self.device_wait.is_zero() || self.staging_bytes > 0 {
            let pinned = if self.pinned { "pinned" } else { "not pinned" };
            let staging = format!("through {} of {pinned} memory", scaled(self.staging_bytes as f64));
            stage("copy to the device", self.device_wait, &staging)?;
        }
        stage("wait for memory", self.consumer_wait, "")?;
        let cpu = self.cpu.as_secs_f64();
        write!(f, "  of {}; CPU time {cpu:.3} s", plural(self.readers, "reader"))?;
        if let Some(advice) = self.advice() {
            write!(f, "\n{advice}")?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "\nnote: {note}"))
    }
}

impl LoadStats {
    fn source(&self) -> &str {
        if self.storage.is_empty() { "an unknown storage" } else { &self.storage }
    }

    /// How much came by which route.
    fn routes(&self) -> String {
        let routes = [
            (self.cached_bytes, "from the page cache"),
            (self.direct_bytes, "direct"),
            (self.buffered_bytes, "buffered"),
            (self.network_bytes, "from the network"),
        ];
        let used = routes.iter().filter(|(bytes, _)| *bytes > 0);
        used.map(|(bytes, name)| format!("{} {name}", scaled(*bytes as f64))).collect::<Vec<_>>().join(", ")
    }
}

/// A number of things.
pub fn plural(number: u64, of: &str) -> String {
    format!("{number} {of}{}", if number == 1 { "" } else { "s" })
}

/// Bytes with the unit that leaves few digits before the point.
pub fn scaled(bytes: f64) -> String {
    let units = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    // From half a digit below the unit, which would be rounded up to it.
    match units.iter().find(|(unit, _)| bytes >= unit * 0.9995) {
        Some((unit, name)) => format!("{:.2} {name}", bytes / unit),
        None => format!("{bytes:.0} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_where_the_readers_spent_their_time() {
        let seconds = Duration::from_secs;
        let mut stats = LoadStats { reading: seconds(4), cached_reading: seconds(3), ..LoadStats::default() };
        assert_eq!(stats.limited_by(), "page cache");
        stats.cached_reading = seconds(1);
        assert_eq!(stats.limited_by(), "disk");
        stats.network = true;
        assert_eq!(stats.limited_by(), "network");
        (stats.cores, stats.wall, stats.cpu) = (2, seconds(2), seconds(1));
        assert_eq!(stats.limited_by(), "network");
        stats.cpu = seconds(4);
        assert_eq!(stats.limited_by(), "cores");
        stats.consumer_wait = seconds(5);
        assert_eq!(stats.limited_by(), "consumer");
    }

    #[test]
    fn what_is_printed_has_a_line_for_each_stage_and_one_of_advice() {
        let seconds = Duration::from_secs;
        let mut stats = LoadStats {
            bytes: 3_000_000_000,
            tensors: 1,
            readers: 2,
            reading: seconds(3),
            copying: seconds(1),
            direct_bytes: 2_000_000_000,
            cached_bytes: 1_000_000_000,
            wall: seconds(2),
            storage: "ext4 on nvme0n1".to_owned(),
            ..LoadStats::default()
        };
        let lines = "1 tensor, 3.00 GB in 2.000 s: 1.50 GB/s from ext4 on nvme0n1
  read                    3.000 s   75 %  1.00 GB from the page cache, 2.00 GB direct
  place and enqueue       1.000 s   25 %
  wait for memory         0.000 s    0 %
  of 2 readers; CPU time 0.000 s
the disk is what limits: a faster disk, or files that are in the page cache, would load faster";
        assert_eq!(stats.to_string(), lines);
        (stats.staging_bytes, stats.pinned, stats.device_wait) = (8_000_000, true, seconds(4));
        let printed = stats.to_string();
        assert!(
            printed.contains("  copy to the device      4.000 s   50 %  through 8.00 MB of pinned memory\n")
        );
        assert!(printed.contains("PCIe"), "{printed}");
        assert_eq!(LoadStats::default().advice(), None, "nothing was loaded");
    }
}
