//! The trace of a load: it accounts for every byte, and its rows can be drawn.

use std::collections::{BTreeMap, BTreeSet};

use penstock::store::CachePolicy;
use serde_json::Value;

use super::simulated_device::SimulatedDevice;
use super::*;

/// A traced load of everything; its events, and its figures.
fn traced(
    model: &Model,
    target: &LoadTarget,
    readers: usize,
    request_bytes: Option<u64>,
) -> (Vec<Value>, penstock::stats::LoadStats) {
    let path = model.dir.path().join("trace.json");
    let mut load = Load::begin(model, &model.plan(64 * KIB), target, readers);
    load.session.trace_to(path.clone());
    if let Some(request_bytes) = request_bytes {
        let storage = Storage::unknown();
        let settings = Settings::choose(&Config::default(), &storage, true);
        load.session.on_storage(&storage, &Settings { request_bytes, ..settings });
    }
    load.attach_all();
    load.run().unwrap();
    load.check(model, &[]);
    let stats = load.session.finish().unwrap();
    drop(load);
    let file: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    (file["traceEvents"].as_array().unwrap().clone(), stats)
}

fn sum<'a>(events: impl Iterator<Item = &'a Value>) -> u64 {
    events.map(|event| event["args"]["bytes"].as_u64().unwrap()).sum()
}

fn of_category<'a>(events: &'a [Value], category: &'a str) -> impl Iterator<Item = &'a Value> {
    events.iter().filter(move |event| event["cat"] == category)
}

#[track_caller]
fn can_be_drawn(events: &[Value]) {
    let named: BTreeSet<_> =
        events.iter().filter(|e| e["name"] == "thread_name").map(|e| e["tid"].as_u64()).collect();
    let mut rows: BTreeMap<_, Vec<(f64, f64)>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        assert!(named.contains(&event["tid"].as_u64()), "a row without a name: {event}");
        let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        assert!(ts > 0.0 && dur >= 0.0, "{event}");
        rows.entry(event["tid"].as_u64()).or_default().push((ts, ts + dur));
    }
    for row in rows.values_mut() {
        row.sort_by(|one, other| one.0.total_cmp(&other.0));
        for pair in row.windows(2) {
            // A nanosecond is lost where microseconds are written.
            assert!(pair[0].1 <= pair[1].0 + 0.002, "slices of one row overlap: {pair:?}");
        }
    }
}

#[test]
fn the_bytes_of_a_trace_are_those_that_were_read_whatever_they_were_read_to() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        let (events, stats) = traced(&model, &target, 3, None);
        can_be_drawn(&events);
        assert!(stats.read_bytes >= stats.bytes);
        assert_eq!(sum(of_category(&events, "read")), stats.read_bytes);
        let blocks: BTreeSet<_> =
            of_category(&events, "read").map(|event| event["args"]["block"].as_u64()).collect();
        assert_eq!(blocks.len() as u64, stats.blocks);
        let load = of_category(&events, "load").next().unwrap();
        assert_eq!(load["args"]["outcome"], "complete");
        assert_eq!(load["args"]["left_out"], 0);
        fs::remove_file(model.dir.path().join("trace.json")).unwrap();
        nothing_remains(&model, &target);
    }
}

#[test]
fn every_block_passes_a_staging_buffer_and_is_copied_once() {
    let _alone = alone();
    for (policy, request) in [(CachePolicy::Auto, None), (CachePolicy::Bypass, Some(16 * KIB))] {
        let model = Model::cached_as(policy);
        let target = LoadTarget::Device(SimulatedDevice::new(), 16 << 20);
        let (events, stats) = traced(&model, &target, 2, request);
        can_be_drawn(&events);
        let blocks = model.plan(64 * KIB);
        let bytes: u64 = blocks.blocks().iter().map(|block| block.range.end - block.range.start).sum();
        assert_eq!(sum(of_category(&events, "staging")), bytes);
        assert_eq!(sum(of_category(&events, "copy")), bytes);
        let rows: BTreeSet<_> = of_category(&events, "copy").map(|event| event["tid"].as_u64()).collect();
        // Two readers with two buffers each, or with one whose halves take turns.
        assert!((1..=8).contains(&rows.len()), "{} rows", rows.len());
        if request.is_some() {
            assert!(
                of_category(&events, "copy").count() as u64 > stats.blocks,
                "requests are copies of their own"
            );
        }
    }
}

#[test]
fn a_load_that_ends_early_leaves_a_trace_that_says_so() {
    let _alone = alone();
    let model = Model::new();
    let path = model.dir.path().join("trace.json");
    let mut load = Load::begin(&model, &model.plan(64 * KIB), &LoadTarget::Slab, 2);
    load.session.trace_to(path.clone());
    load.attach(3);
    load.take(1);
    drop(load);
    let file: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    can_be_drawn(events);
    assert_eq!(of_category(events, "load").next().unwrap()["args"]["outcome"], "cancelled");
}
