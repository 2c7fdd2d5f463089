//! What the core logs, for Python's `logging`.
//!
//! The core's threads must not wait for the GIL: whoever holds it may be waiting for them. So events are queued, and
//! emitted by the next thread that has the GIL and waits for the core ([`emit`]). Loggers are called after the core's
//! modules, `penstock.store.remote.fetch`, so that `logging.getLogger("penstock")` decides about all of them.

use std::fmt::{Debug, Write};

use crossbeam_channel::{Receiver, Sender, bounded};
use penstock::memory::PerProcess;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The most events that are kept; later ones are dropped.
const MOST: usize = 256;

/// Level (as Python numbers it), logger and message.
type Entry = (u8, String, String);

/// What is queued, of this process: a thread of the parent may have been at its queue when it forked.
static QUEUE: PerProcess<(Sender<Entry>, Receiver<Entry>)> = PerProcess::new();

fn queue() -> &'static (Sender<Entry>, Receiver<Entry>) {
    QUEUE.get_or_init(|| bounded(MOST))
}

/// Takes what the core logs from now on. Called once, when the extension is imported.
pub fn install() {
    // Fails where there is one already, in a process that imports the extension a second time.
    let _ = tracing::subscriber::set_global_default(Queue);
}

/// Hands the events that are queued to Python's loggers. An `Exception` that logging raises is ignored: it must not fail a
/// load.
///
/// # Errors
/// What ends a program and a handler raised, as `KeyboardInterrupt`: a signal may have come while it ran.
pub fn emit(py: Python<'_>) -> PyResult<()> {
    let (_, queued) = queue();
    while let Ok((level, name, message)) = queued.try_recv() {
        let logged = py
            .import("logging")
            .and_then(|logging| logging.call_method1("getLogger", (name,)))
            .and_then(|logger| logger.call_method1("log", (level, "%s", message)));
        if let Err(error) = logged
            && !error.is_instance_of::<PyException>(py)
        {
            return Err(error);
        }
    }
    Ok(())
}

struct Queue;

impl Subscriber for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::DEBUG && metadata.target().starts_with("penstock")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::DEBUG)
    }

    fn event(&self, event: &Event<'_>) {
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            Level::INFO => 20,
            _ => 10,
        };
        let mut text = Text::default();
        event.record(&mut text);
        let name = event.metadata().target().replace("::", ".");
        // Not waiting for room: whoever logs may hold what the others need.
        let _ = queue().0.try_send((level, name, text.message + &text.fields));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// An event's message, and its other fields after it.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
