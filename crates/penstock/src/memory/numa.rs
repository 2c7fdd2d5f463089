//! Which memory lies beside which device, on machines with several memory nodes.
//!
//! A copy to a GPU from memory of another processor's node crosses the link between processors, which is narrower
//! than PCIe on many machines and shared by everything else. So staging memory is asked for on the GPU's node. It is
//! a wish, never a condition: the kernel takes another node where that one is full, and a container that forbids
//! `mbind(2)` gets memory from wherever the thread that touches it runs.
//!
//! Reader threads are *not* moved to the node. A thread's affinity is also what the process's owner says with
//! `taskset`, a CPU manager or `numactl`; the reader's other half, the page cache or the disk's controller, may lie on
//! the other node; and with all the GPUs of a machine loading, one node's processors would do the work of two. It
//! would have to be measured on such a machine first.

use std::fs;
use std::path::Path;

use super::Region;

/// The node that the PCI device `id` (`0000:17:00.0`) is attached to; `None` where the machine does not say.
/// `root` is where the file system begins: `/`.
pub fn node_of_pci_device(root: &Path, id: &str) -> Option<u32> {
    let id = id.to_ascii_lowercase();
    let (domain, place) = id.split_once(':')?;
    // The kernel writes domains with at least four digits, other tools with eight.
    let domain = u32::from_str_radix(domain, 16).ok()?;
    let file = root.join(format!("sys/bus/pci/devices/{domain:04x}:{place}/numa_node"));
    // -1 stands for "unknown", which includes machines with one node.
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The node to ask memory of for a device on `node`: none where there is nothing to choose.
///
/// A node without processors does not count: that is memory of a device, or memory behind a link.
pub(super) fn choose(root: &Path, node: Option<u32>) -> Option<u32> {
    let node = node?;
    let read = |name| {
        fs::read_to_string(root.join("sys/devices/system/node").join(name))
            .map_or_else(|_| Vec::new(), |text| parse_list(&text))
    };
    let with_processors = read("has_cpu");
    let nodes: Vec<_> = read("has_memory").into_iter().filter(|n| with_processors.contains(n)).collect();
    (nodes.len() > 1 && nodes.contains(&node)).then_some(node)
}

/// Node numbers as the kernel lists them: `0-3,8`. What is not a number is left out.
fn parse_list(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<u32>().ok()?..=last.trim().parse::<u32>().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// Asks for the pages of `region` on `node`: those not touched yet come from there while it has any.
///
/// # Errors
/// The system's answer: a kernel without NUMA, a container that forbids the call, a node outside of the cpuset.
pub(super) fn prefer(region: &Region, node: u32) -> std::io::Result<()> {
    const BITS: usize = u64::BITS as usize;
    let node = node as usize;
    let mut mask = vec![0u64; node / BITS + 1];
    mask[node / BITS] = 1 << (node % BITS);
    // SAFETY: the span is a mapping of ours; the mask has the bits that are named, and one more is named because the
    // kernel leaves the last one out. The call moves and changes no bytes.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            region.as_ptr(),
            region.len(),
            libc::MPOL_PREFERRED,
            mask.as_ptr(),
            mask.len() * BITS + 1,
            0,
        )
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PAGE;

    /// A machine's `/sys`, as far as it is read here.
    fn machine(has_memory: &str, has_cpu: &str, devices: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let nodes = root.path().join("sys/devices/system/node");
        fs::create_dir_all(&nodes).unwrap();
        fs::write(nodes.join("has_memory"), has_memory).unwrap();
        fs::write(nodes.join("has_cpu"), has_cpu).unwrap();
        for (device, node) in devices {
            let device = root.path().join("sys/bus/pci/devices").join(device);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("numa_node"), node).unwrap();
        }
        root
    }

    #[test]
    fn a_device_is_found_however_its_id_is_written() {
        let machine = machine("0-1\n", "0-1\n", &[("0000:9b:00.0", "1\n"), ("10000:01:00.0", "0\n")]);
        for id in ["0000:9b:00.0", "0000:9B:00.0", "00000000:9B:00.0"] {
            assert_eq!(node_of_pci_device(machine.path(), id), Some(1), "{id}");
        }
        assert_eq!(node_of_pci_device(machine.path(), "00010000:01:00.0"), Some(0));
    }

    #[test]
    fn a_device_that_is_not_there_or_has_no_node_has_none() {
        let machine = machine("0", "0", &[("0000:9b:00.0", "-1\n"), ("0000:9c:00.0", "")]);
        for id in ["0000:9b:00.0", "0000:9c:00.0", "0000:9d:00.0", "", "9b", "x:9b:00.0"] {
            assert_eq!(node_of_pci_device(machine.path(), id), None, "{id}");
        }
    }

    #[test]
    fn there_is_a_choice_only_between_several_nodes_that_have_memory_and_processors() {
        for (has_memory, has_cpu, node, chosen) in [
            ("0-1\n", "0-1\n", Some(1), Some(1)),
            ("0-1,4", "0-1,4-7", Some(4), Some(4)),
            ("0-1", "0-1", None, None),
            ("0-1", "0-1", Some(2), None),
            ("0", "0-1", Some(0), None),
            ("0-8", "0", Some(0), None), // the memory of GPUs, as nodes of their own
            ("", "", Some(0), None),
        ] {
            let machine = machine(has_memory, has_cpu, &[]);
            assert_eq!(choose(machine.path(), node), chosen, "{has_memory:?} {has_cpu:?} {node:?}");
        }
        assert_eq!(choose(Path::new("/no/such/root"), Some(0)), None);
    }

    #[test]
    fn memory_may_be_asked_of_a_node_and_is_there_whether_the_node_exists_or_not() {
        let mut region = Region::reserve(4 * PAGE).unwrap();
        match prefer(&region, 0) {
            Ok(()) => {}
            // What a kernel without NUMA and a container's seccomp filter say.
            Err(error) => {
                assert!(matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)), "{error}");
            }
        }
        prefer(&region, 4321).unwrap_err();
        region.window().write(0, &[7; 4 * PAGE]);
    }
}
