//! What the search finds, on storage of many kinds.

use proptest::prelude::*;

use super::*;

const BOUNDS: Bounds = Bounds { initial: 8, start: 8, least: 1, most: 64 };

/// Lets the tuner load from a storage with this rate for every number of readers; returns what it settles on.
fn converge(tuner: &mut Tuner, rate: impl Fn(usize) -> f64, epochs: usize) -> usize {
    for _ in 0..epochs {
        let rate = rate(tuner.readers());
        tuner.observe(Epoch {
            bytes: 1 << 24,
            seconds: f64::from(1 << 24) / rate,
            reading: 1.0,
            on_cpu: 0.6,
        });
    }
    tuner.readers()
}

#[test]
fn storage_that_wants_many_requests_gets_them() {
    // 90 MB/s for every connection, up to a link of 5 GB/s.
    let rate = |readers: usize| (readers as f64 * 90e6).min(5e9);
    let readers = converge(&mut Tuner::new(BOUNDS), rate, 30);
    assert!(rate(readers) >= 0.97 * 5e9, "{readers}");
}

#[test]
fn a_disk_that_is_full_with_any_number_keeps_the_number_it_began_with() {
    assert_eq!(converge(&mut Tuner::new(BOUNDS), |_| 3.5e9, 30), 8);
}

#[test]
fn fewer_readers_are_not_kept_for_a_rate_that_rose_by_itself() {
    // Faster by a quarter from some moment on, whatever the number of readers.
    for moment in 0..30 {
        let mut tuner = Tuner::new(Bounds { initial: 16, start: 16, least: 2, most: 16 });
        converge(&mut tuner, |_| 2e9, moment);
        assert_eq!(converge(&mut tuner, |_| 2.5e9, 60), 16, "{moment}");
    }
}

#[test]
fn a_load_that_leaves_the_cores_idle_goes_on_with_all_of_its_readers_at_once() {
    let few = Bounds { initial: 4, start: 24, ..BOUNDS };
    let after =
        |on_cpu| Tuner::new(few).observe(Epoch { bytes: 1 << 23, seconds: 0.1, reading: 1.0, on_cpu });
    assert_eq!(Tuner::new(few).readers(), 4);
    assert_eq!((after(0.05), after(0.6), after(0.95)), (24, 4, 4));
}

#[test]
fn few_readers_that_keep_the_cores_busy_stay_as_few() {
    let few = Bounds { initial: 4, start: 24, ..BOUNDS };
    let found = |on_cpu| {
        let mut tuner = Tuner::new(few);
        tuner.observe(Epoch { bytes: 1 << 23, seconds: 0.1, reading: 1.0, on_cpu });
        converge(&mut tuner, |readers| 1e8 * readers as f64, 30)
    };
    assert_eq!((found(0.95), found(0.6)), (4, 64));
}

#[test]
fn nothing_is_tried_while_the_consumer_is_what_limits() {
    let mut tuner = Tuner::new(BOUNDS);
    for _ in 0..30 {
        tuner.observe(Epoch { bytes: 1 << 20, seconds: 0.005, reading: 0.1, on_cpu: 1.0 });
    }
    assert_eq!((tuner.readers(), tuner.tried().len()), (8, 1));
}

#[test]
fn a_lasting_change_of_the_rate_begins_the_search_anew_and_a_short_one_does_not() {
    let mut tuner = Tuner::new(BOUNDS);
    converge(&mut tuner, |_| 10e9, 30);
    converge(&mut tuner, |_| 1e9, 2);
    assert_eq!(converge(&mut tuner, |_| 10e9, 30), 8);
    let rate = |readers: usize| readers as f64 * 1e8;
    assert!(converge(&mut tuner, rate, 60) > 50);
}

#[test]
fn a_store_that_throttles_gets_half_and_later_a_little_more() {
    let rate = |readers: usize| readers as f64 * 1e8;
    let mut tuner = Tuner::new(Bounds { initial: 64, start: 64, ..BOUNDS });
    assert_eq!((tuner.on_throttle(), tuner.on_throttle()), (32, 16));
    // However well it goes, not where it said no.
    assert!(converge(&mut tuner, rate, CALM_FOR as usize - 1) < 32);
    assert!(converge(&mut tuner, rate, 80) > 60);
    for _ in 0..10 {
        tuner.on_throttle();
    }
    assert_eq!(tuner.readers(), BOUNDS.least);
}

#[test]
fn a_fixed_number_stays() {
    let mut tuner = Tuner::new(Bounds::fixed(5));
    assert!(tuner.is_fixed());
    assert_eq!(converge(&mut tuner, |readers| readers as f64, 30), 5);
}

proptest! {
    /// Whatever the storage does: within the bounds, and for any that rises to a plateau and may fall afterwards,
    /// the search ends, near the best rate.
    #[test]
    fn the_search_ends_near_the_best_and_within_bounds(
        least in 1usize..4, first in 1usize..17, start in 4usize..17, most in 17usize..128,
        knee in 1usize..100, fall in 0.0f64..0.02,
    ) {
        let bounds = Bounds { initial: first, start, least, most };
        let rate = |readers: usize| {
            let over = readers.saturating_sub(knee) as f64;
            1e8 * readers.min(knee) as f64 / (1.0 + fall * over)
        };
        let mut tuner = Tuner::new(bounds);
        for _ in 0..60 {
            prop_assert!((least..=most).contains(&tuner.readers()));
            converge(&mut tuner, rate, 1);
        }
        let best = (least..=most).map(rate).fold(0.0, f64::max);
        // A step is a factor of 1.5, so the peak itself may lie between two of them.
        let found = rate(tuner.readers());
        prop_assert!(found >= best / 1.5, "{found} of {best} with {}", tuner.readers());
        let converged = tuner.readers();
        converge(&mut tuner, rate, 40);
        prop_assert_eq!(tuner.readers(), converged);
    }

    #[test]
    fn any_sequence_of_epochs_stays_within_bounds(
        epochs in prop::collection::vec((0u64..1 << 40, 0.0f64..1.0, 0.0f64..1.0, 0.0f64..1.0, 0u8..20), 0..200),
    ) {
        let mut tuner = Tuner::new(Bounds { initial: 2, ..BOUNDS });
        for (bytes, seconds, reading, on_cpu, what) in epochs {
            let readers = match what {
                0 => tuner.on_throttle(),
                _ => tuner.observe(Epoch { bytes, seconds, reading, on_cpu }),
            };
            prop_assert!((BOUNDS.least..=BOUNDS.most).contains(&readers));
        }
    }
}
