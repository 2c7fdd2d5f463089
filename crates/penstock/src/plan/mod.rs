//! What goes where: from the tensors asked for to the reads that bring them.
//!
//! * [`Selection`] (`selection`): a tensor, or a part of it, as pieces of consecutive bytes.
//! * [`Plan`] (`blocks`): all pieces of a load, in file order, merged where they touch and cut into equal [`Block`]s
//!   whatever the tensors' sizes; a block is what one reader reads at once.
//! * [`Layout`] (`layout`): where every tensor lies in one slab of host memory.
//!
//! A plan is pure: made from the catalogue alone, it opens nothing and knows no addresses. Its promises, checked by
//! property tests: every requested byte is written exactly once, nothing else is touched, and nothing is read that no
//! one asked for, except gaps too small to be worth a read of their own.

mod blocks;
mod layout;
mod selection;

pub use blocks::{Block, Plan, PlannedTensor, Segment};
pub use layout::Layout;
pub use selection::Selection;
