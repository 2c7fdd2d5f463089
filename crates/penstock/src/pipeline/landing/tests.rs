//! Bytes land in host memory where the plan says, while several readers write to neighbouring memory at once. Everything
//! is in memory, so that Miri can watch; what needs mappings, which Miri has none of, is left out there.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::checkpoint::{Dtype, TensorInfo};
use crate::plan::{Layout, Selection};
use crate::store::Identity;

const GUARD: u8 = 0xA5;
const BRIDGE: u64 = 64;

/// An object in memory, which puts what goes to a slot at an odd place.
struct Bytes(Vec<u8>);

impl Object for Bytes {
    fn location(&self) -> &str {
        "memory"
    }

    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn identity(&self) -> Identity {
        Identity(String::new())
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, _: &mut Lane) -> Result<()> {
        let (start, len) = (to_usize(offset), into.len());
        into.write(0, &self.0[start..start + len]);
        Ok(())
    }

    fn read_to_slot(&self, range: Range<u64>, mut slot: Window<'_>, lane: &mut Lane) -> Result<usize> {
        const ODD: usize = 4097;
        let len = to_usize(range.end - range.start);
        self.read_into(range.start, slot.part(ODD, len), lane).map(|()| ODD)
    }

    fn verify_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// Tensors of these many bytes one after the other, with a gap of a few bytes between two of them.
fn tensors(sizes: &[u64]) -> (Bytes, Vec<TensorInfo>) {
    let mut end = 13;
    let mut made = Vec::new();
    for (number, size) in sizes.iter().enumerate() {
        let range = end..end + size;
        end = range.end + u64::from(number == 1) * 5;
        let (name, shape) = (format!("t{number}").into(), vec![*size]);
        made.push(TensorInfo { name, dtype: Dtype::U8, shape, object: 0, range });
    }
    // Not byte by byte, which takes Miri minutes.
    let mut bytes = (0..251).collect::<Vec<u8>>().repeat(to_usize(end / 251 + 1));
    bytes.truncate(to_usize(end));
    (Bytes(bytes), made)
}

fn plan_of(tensors: &[TensorInfo], block_bytes: u64) -> Plan {
    Plan::new(tensors.iter().map(|tensor| (tensor, Selection::all(tensor))).collect(), block_bytes, BRIDGE)
}

/// Has three readers bring in all blocks.
fn read_all(plan: &Plan, object: &Bytes, destinations: &Destinations) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let (mut lane, mut scratch) = (Lane::default(), None);
                while let Some(block) = plan.blocks().get(next.fetch_add(1, Ordering::Relaxed)) {
                    to_host(plan, block, object, destinations, &mut lane, &mut scratch).unwrap();
                }
            });
        }
    });
}

/// Loads to one piece of memory laid out as a slab is.
#[test]
fn neighbours_in_one_slab_are_read_in_place_by_several_readers() {
    for block_bytes in [200, 1000, 1 << 20] {
        let (object, infos) = tensors(&[100, 7, 0, 3000, 1, 500]);
        let plan = plan_of(&infos, block_bytes);
        let layout = Layout::of(&plan);
        let mut memory = vec![GUARD; to_usize(layout.bytes()) + 1];
        let destinations = Destinations::new(infos.len(), true);
        let base = memory.as_mut_ptr() as usize as u64;
        for tensor in 0..infos.len() {
            destinations.set(tensor, base + layout.offset(tensor));
        }
        read_all(&plan, &object, &destinations);
        for (tensor, info) in infos.iter().enumerate() {
            let start = to_usize(layout.offset(tensor));
            let file = to_usize(info.range.start)..to_usize(info.range.end);
            assert_eq!(memory[start..start + file.len()], object.0[file], "{}", info.name);
        }
        assert_eq!(memory.last(), Some(&GUARD), "written too far");
    }
}

/// Loads to memory of each tensor's own.
fn land_apart(sizes: &[u64], block_bytes: u64) {
    let (object, infos) = tensors(sizes);
    let plan = plan_of(&infos, block_bytes);
    let memory: Vec<_> =
        infos.iter().map(|info| vec![GUARD; to_usize(info.bytes()) + 1]).map(Mutex::new).collect();
    let destinations = Destinations::new(infos.len(), false);
    for (tensor, memory) in memory.iter().enumerate() {
        destinations.set(tensor, memory.lock().unwrap().as_mut_ptr() as usize as u64);
    }
    read_all(&plan, &object, &destinations);
    for (memory, info) in memory.iter().zip(&infos) {
        let memory = memory.lock().unwrap();
        let (guard, bytes) = memory.split_last().unwrap();
        assert_eq!(*guard, GUARD, "{} was written too far", info.name);
        assert!(bytes == &object.0[to_usize(info.range.start)..to_usize(info.range.end)], "{}", info.name);
    }
}

#[test]
fn large_tensors_apart_from_each_other_get_reads_of_their_own() {
    land_apart(&[300_000, 270_001, 0, 400_000], 1 << 20);
}

#[test]
fn a_tensor_of_many_blocks_is_read_in_place_wherever_it_lies() {
    land_apart(&[10_000], 1000);
}

#[test]
#[cfg_attr(miri, ignore = "scratch memory is mapped with flags that Miri does not know")]
fn small_tensors_apart_from_each_other_are_copied_from_one_read() {
    land_apart(&[100, 7, 0, 3000, 1, 500], 1 << 20);
}
