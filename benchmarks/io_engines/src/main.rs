//! Is io_uring worth being an engine of the local store? Reads the same bytes by threads and by io_uring, in turn.
//!
//! Every measurement runs in a process of its own, so that its CPU time is its own too: io_uring's kernel threads end
//! with it. The page cache's state is proved before each, engines take turns within a round in an order that changes
//! from round to round, and each engine reads the same ranges of a round. Ratios are taken within rounds. What the
//! kernel refuses is said once and left out.

mod args;
mod cache;
mod files;
mod machine;
mod measure;
mod memory;
mod plan;
mod report;
mod ring;
mod rounds;
mod threads;
mod usage;

use std::process::ExitCode;

fn main() -> ExitCode {
    let outcome = match args::parse(std::env::args().skip(1)) {
        Ok(args::Wish::Help) => {
            println!("{}", args::HELP);
            Ok(())
        }
        Ok(args::Wish::Measure(task)) => measure::in_this_process(&task),
        Ok(args::Wish::Compare(options)) => rounds::compare(&options),
        Err(problem) => Err(problem.into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("io_engines: {error}");
            ExitCode::FAILURE
        }
    }
}
