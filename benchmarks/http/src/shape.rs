//! A network that is slower than this machine's own: so many bytes a second, and a wait before they come.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most that is sent at once where the rate is limited.
pub const PIECE: u64 = 128 << 10;

/// How late a thread may wake up on a busy machine without being slowed down for it.
const LATE: Duration = Duration::from_millis(10);

/// What the network is like. Rates are bytes a second.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape {
    /// Seconds before each answer.
    pub latency: f64,
    pub connection: Option<f64>,
    pub link: Option<f64>,
    /// Seconds after the first request when everything is lost, and for how long.
    pub outage_after: Option<f64>,
    pub outage: f64,
}

/// A link of one rate: whoever sends takes the next stretch of time that nobody has.
#[derive(Debug)]
pub struct Pacer {
    rate: Option<f64>,
    free: Mutex<Instant>,
}

impl Pacer {
    pub fn new(rate: Option<f64>) -> Self {
        Self { rate, free: Mutex::new(Instant::now()) }
    }

    /// When `bytes` that are sent now have gone through.
    pub fn done_at(&self, bytes: u64, now: Instant) -> Instant {
        let Some(rate) = self.rate else { return now };
        let mut free = lock(&self.free);
        // Whoever woke up late makes up for it; idle time is not saved up.
        let earliest = now.checked_sub(LATE).unwrap_or(now);
        *free = earliest.max(*free) + Duration::from_secs_f64(bytes as f64 / rate);
        *free
    }
}

/// The network that all connections share.
#[derive(Debug)]
pub struct Network {
    shape: Shape,
    link: Pacer,
    first: Mutex<Option<Instant>>,
}

impl Network {
    pub fn new(shape: Shape) -> Self {
        Self { shape, link: Pacer::new(shape.link), first: Mutex::new(None) }
    }

    /// A connection's own share of it.
    pub fn connection(&self) -> Pacer {
        Pacer::new(self.shape.connection)
    }

    /// Waits for as long as a request and its answer are on their way.
    pub fn answer(&self) {
        lock(&self.first).get_or_insert_with(Instant::now);
        std::thread::sleep(Duration::from_secs_f64(self.shape.latency));
    }

    /// Whether rates are limited, so that bytes have to be sent in pieces.
    pub fn is_paced(&self) -> bool {
        self.shape.link.is_some() || self.shape.connection.is_some() || self.shape.outage_after.is_some()
    }

    /// Waits until a piece of `bytes` has gone through.
    pub fn pass(&self, connection: &Pacer, bytes: u64) {
        let now = Instant::now();
        let done = connection.done_at(bytes, now).max(self.link.done_at(bytes, now));
        std::thread::sleep(done.saturating_duration_since(Instant::now()));
    }

    /// Whether there is an outage now.
    pub fn is_down(&self) -> bool {
        let (Some(after), Some(first)) = (self.shape.outage_after, *lock(&self.first)) else { return false };
        let at = first.elapsed().as_secs_f64();
        (after..after + self.shape.outage).contains(&at)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_their_time_one_after_the_other_and_idle_time_is_not_saved_up() {
        let now = Instant::now() + Duration::from_secs(1);
        let pacer = Pacer::new(Some(1000.0));
        assert_eq!(pacer.done_at(500, now), now + Duration::from_millis(500) - LATE);
        assert_eq!(pacer.done_at(500, now), now + Duration::from_secs(1) - LATE);
        let later = now + Duration::from_secs(10);
        assert_eq!(pacer.done_at(1000, later), later + Duration::from_secs(1) - LATE);
        assert_eq!(Pacer::new(None).done_at(1 << 40, now), now);
    }
}
