//! Values that take time to end: their threads are joined, their files closed.
//!
//! Python frees an object with the GIL held, in whatever thread drops its last reference. A read that hangs must not
//! stop the other threads of the program from there, so such a value is dropped with the GIL released.

use std::ops::Deref;

use pyo3::prelude::*;

/// A value that is dropped with the GIL released.
pub struct Detached<T: Send>(Option<T>);

impl<T: Send> Detached<T> {
    pub fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.0 {
            Some(value) => value,
            None => unreachable!("it is taken out by drop alone"),
        }
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        // Where the interpreter is gone or going, no other thread of it waits: the value is dropped as it is.
        Python::try_attach(|py| py.detach(|| drop(value)));
    }
}
