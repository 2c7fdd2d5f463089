//! What a load did: bytes by route, seconds by stage, settings chosen, and what limited it.
//!
//! Readers count for themselves and hand their counts in when they end, so that counting costs nothing while loading.

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
}
