//! Where every tensor of a plan lies in one slab of host memory.
//!
//! Tensors keep the distances they have in their file as far as that makes their reads contiguous, and addresses that
//! equal their file offsets modulo a huge page, so that direct reads need no copy and blocks do not share huge pages.
//! A tensor whose file offset does not suit its dtype gets an address that does.

use super::blocks::Plan;
use crate::memory::{HUGE_PAGE, PAGE};

/// Addresses of tensors that do not follow the file are multiples of this.
const ALIGN: u64 = 64;

/// Offsets of a plan's tensors in a slab of [`Layout::bytes`] bytes that begins at a multiple of a huge page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    offsets: Vec<u64>,
    bytes: u64,
}

impl Layout {
    /// The layout of `plan`'s tensors.
    pub fn of(plan: &Plan) -> Self {
        let mut offsets = Vec::with_capacity(plan.tensors().len());
        // The end of what is laid out, and the file position that would continue it.
        let mut end = 0u64;
        let mut follows: Option<(u32, u64)> = None;
        let mut object = None;
        for tensor in plan.tensors() {
            let step = if object == Some(tensor.object) { PAGE } else { HUGE_PAGE } as u64;
            object = Some(tensor.object);
            let bytes = tensor.bytes();
            let in_phase = tensor.file_start().filter(|start| start.is_multiple_of(tensor.element_align()));
            let offset = match in_phase {
                Some(start) => {
                    // A short gap in the file costs less here than a new run: the run's phase is kept.
                    let gap = follows
                        .filter(|(object, _)| *object == tensor.object)
                        .and_then(|(_, at)| start.checked_sub(at))
                        .filter(|gap| *gap < PAGE as u64);
                    gap.map_or_else(|| next_with_phase(end, start, step), |gap| end.saturating_add(gap))
                }
                None => end.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX),
            };
            offsets.push(offset);
            // More than can be addressed: reserving it fails.
            end = offset.saturating_add(bytes);
            follows = in_phase.map(|start| (tensor.object, start + bytes));
        }
        Self { offsets, bytes: end }
    }

    /// Where the tensor begins in the slab.
    pub fn offset(&self, tensor: usize) -> u64 {
        self.offsets[tensor]
    }

    /// Bytes of the slab.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The first place from `end` on that equals `file_offset` modulo `step`. A new object begins in phase with its huge
/// pages; runs within it only with its pages, since a huge page for every short run would waste memory.
fn next_with_phase(end: u64, file_offset: u64, step: u64) -> u64 {
    let phase = file_offset % step;
    let base = (end / step * step).saturating_add(phase);
    if base >= end { base } else { base.saturating_add(step) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_begins_at_its_file_phase() {
        let huge = HUGE_PAGE as u64;
        assert_eq!(next_with_phase(0, 5_000_000, huge), 5_000_000 % huge);
        assert_eq!(next_with_phase(10_000, 4096 * 7 + 8, 4096), 12_296);
        assert_eq!(next_with_phase(12_297, 8, 4096), 16_392);
    }
}
