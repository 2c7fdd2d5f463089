//! Behaviour of the catalogue and of the ways to name a checkpoint, over real directories.

mod changing;
mod opening;
mod resolving;
