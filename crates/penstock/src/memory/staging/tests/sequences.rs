//! Any sequence of what loads do, by one user and by several at once.

use std::sync::atomic::Ordering::SeqCst;

use proptest::prelude::*;

use super::{Bench, all};
use crate::memory::{Lease, PAGE, StagingBuffer};

#[derive(Debug, Clone)]
enum Step {
    Begin { budget: usize, wanted: usize },
    End,
    Acquire,
    Drop(usize),
    Release,
    Spare(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..20usize, 0..20usize).prop_map(|(budget, wanted)| Step::Begin { budget, wanted }),
        1 => Just(Step::End),
        8 => Just(Step::Acquire),
        5 => any::<usize>().prop_map(Step::Drop),
        1 => Just(Step::Release),
        1 => prop_oneof![Just(1 << 30), 0..100u64].prop_map(Step::Spare),
    ]
}

/// The most buffers that these steps allow for.
fn largest_budget(steps: &[Step]) -> usize {
    let budget = |step: &Step| if let Step::Begin { budget, .. } = step { *budget } else { 0 };
    steps.iter().map(budget).max().unwrap_or(0).max(1)
}

/// One user of an arena: at most one load, and its buffers, each filled with a mark of its own.
struct User<'a> {
    bench: &'a Bench,
    mark: u8,
    load: Option<Lease>,
    held: Vec<StagingBuffer>,
}

impl User<'_> {
    fn take(&mut self, step: &Step) {
        match step {
            Step::Begin { budget, wanted } => {
                self.take(&Step::End);
                self.load = Some(self.bench.load(*budget, *wanted));
            }
            Step::End => {
                while !self.held.is_empty() {
                    self.take(&Step::Drop(0));
                }
                self.load = None;
            }
            Step::Acquire => {
                if let Some(mut buffer) = self.load.as_ref().and_then(|load| load.try_acquire().unwrap()) {
                    buffer.window().write(0, &[self.mark; PAGE]);
                    self.held.push(buffer);
                }
            }
            Step::Drop(which) if !self.held.is_empty() => {
                let mut buffer = self.held.swap_remove(which % self.held.len());
                let window = buffer.window();
                // SAFETY: written in full when it was acquired.
                let bytes = unsafe { window.assume_filled(0, PAGE) };
                assert!(bytes.iter().all(|byte| *byte == self.mark), "someone else wrote to this buffer");
            }
            Step::Drop(_) => {}
            Step::Release => {
                self.bench.release();
            }
            Step::Spare(buffers) => self.bench.spare_buffers.store(*buffers, SeqCst),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_user_s_buffers_are_counted_exactly_and_given_whenever_there_is_room(
        steps in proptest::collection::vec(step(), 0..60)
    ) {
        let bench = Bench::new();
        let mut user = User { bench: &bench, mark: 1, load: None, held: Vec::new() };
        let (mut budget, mut wanted, mut always_rich) = (1, 1, true);
        for step in &steps {
            let before = (bench.buffers(), user.held.len());
            user.take(step);
            let (buffers, held) = (bench.buffers(), user.held.len());
            prop_assert_eq!(bench.arena.usage().buffers_taken, held);
            prop_assert!(held <= buffers && buffers == bench.pinning.registered(), "{} buffers", buffers);
            match step {
                Step::Begin { budget: b, wanted: w } => {
                    (budget, wanted) = ((*b).max(1), (*w).max(1));
                    prop_assert!(buffers <= budget.max(before.0));
                    prop_assert!(buffers <= budget, "an idle arena is brought down to the budget");
                }
                Step::Acquire if user.load.is_some() => {
                    let room = before.0 > before.1 || before.0 < budget.min(wanted);
                    let got = held > before.1;
                    prop_assert!(!got || room, "a buffer beyond the budget");
                    prop_assert!(got || !room || !always_rich, "no buffer although there was room");
                    prop_assert!(got || held >= 2.min(budget).min(wanted), "fewer than a load needs to move");
                    prop_assert!(buffers <= before.0.max(budget.min(wanted)));
                }
                Step::Spare(spare) => always_rich &= *spare > 1000,
                Step::Release => prop_assert!(buffers == held),
                _ => {}
            }
        }
        drop(user);
        bench.release();
        prop_assert_eq!((bench.buffers(), bench.pinning.registered()), (0, 0));
    }

    #[test]
    fn several_users_never_share_a_buffer_never_lose_one_and_stay_within_the_largest_budget(
        steps in proptest::collection::vec(proptest::collection::vec(step(), 0..40), 2..5)
    ) {
        let bench = Bench::new();
        let most = steps.iter().map(|steps| largest_budget(steps)).max().unwrap_or(1);
        std::thread::scope(|scope| {
            for (user, steps) in steps.iter().enumerate() {
                let mark = u8::try_from(user).unwrap() + 1;
                let mut user = User { bench: &bench, mark, load: None, held: Vec::new() };
                scope.spawn(move || {
                    for step in steps {
                        user.take(step);
                        let usage = user.bench.arena.usage();
                        assert!(usage.buffers <= most, "{} buffers, {most} allowed", usage.buffers);
                        assert!(user.held.len() <= usage.buffers_taken && usage.buffers_taken <= usage.buffers);
                    }
                    user.take(&Step::End);
                });
            }
        });
        let buffers = bench.buffers();
        prop_assert_eq!(bench.arena.usage().buffers_taken, 0);
        let load = bench.load(buffers, buffers);
        prop_assert_eq!(all(&load).len(), buffers.max(1), "every buffer that exists can be had");
        drop(load);
        bench.release();
        prop_assert_eq!((bench.buffers(), bench.pinning.registered()), (0, 0));
    }
}
