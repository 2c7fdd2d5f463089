//! All patterns and engines, in turn, round by round, each measurement in a process of its own.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::args::Options;
use crate::cache::{cached_share, drop_pages, fill};
use crate::measure::{Figures, Outcome, Task};
use crate::plan::{Engine, Pattern, State};
use crate::report::Report;
use crate::{files, machine, ring, usage};

/// A page cache that differs by more than this from what it should be is not measured.
const TOLERANCE: f64 = 0.01;
/// Reads a pattern once before its engines do, so that none of them finds a host's or a disk's cache colder than others.
const FIRST: Engine = Engine::Threads(8);

/// One measurement of a row.
#[derive(Debug, Clone)]
pub struct Sample {
    pub round: usize,
    pub pattern: Pattern,
    pub engine: Engine,
    pub cached_share: f64,
    pub figures: Figures,
}

/// Compares, prints tables, and writes the results where they are wanted.
pub fn compare(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let began = Instant::now();
    let (paths, each) = files::prepare(&options.directories, options.gib)?;
    let mut report = Report::new(options, &paths, each, ring::refusal());
    if let Some(why) = &report.refusal {
        println!("io_uring is refused here: {why}. Only threads are measured.");
    }
    let patterns: Vec<_> =
        Pattern::all().into_iter().filter(|pattern| pattern.to_string().contains(&options.only)).collect();
    if patterns.is_empty() {
        return Err(format!("no pattern's name contains {:?}", options.only).into());
    }
    let mut longest = 0.0_f64;
    for round in 0..options.rounds {
        let start = began.elapsed().as_secs_f64();
        if round > 0 && start + longest > options.budget.as_secs_f64() {
            report.notes.push(format!("rounds that fit into the budget: {round} of {}", options.rounds));
            break;
        }
        for pattern in &patterns {
            turn(options, &paths, each, round, *pattern, &mut report)?;
        }
        longest = longest.max(began.elapsed().as_secs_f64() - start);
        eprintln!("round {} done after {:.0} s", round + 1, began.elapsed().as_secs_f64());
    }
    report.seconds = began.elapsed().as_secs_f64();
    report.print();
    if let Some(output) = &options.output {
        std::fs::write(output, serde_json::to_string_pretty(&report.json())? + "\n")?;
    }
    if options.remove {
        for path in &paths {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// One pattern of one round.
fn turn(
    options: &Options,
    paths: &[PathBuf],
    each: u64,
    round: usize,
    pattern: Pattern,
    report: &mut Report,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut engines = Engine::of(pattern, machine::cores());
    engines.retain(|engine| report.is_worth_trying(pattern, *engine));
    // Coprime steps: an engine's neighbours change too.
    let count = engines.len().max(1);
    engines.rotate_left(round * (count / 2 + 1) % count);
    if round % 2 == 1 {
        engines.reverse();
    }
    let task =
        |engine| Task { paths: paths.to_vec(), each, pattern, engine, seed: round as u64, cap: options.cap };
    for (number, engine) in [FIRST].into_iter().chain(engines).enumerate() {
        let share = match bring_about(pattern.state, paths, each) {
            Ok(share) => share,
            Err(error) => {
                report.notes.push(format!("{pattern}, {engine}, round {round}: {error}"));
                continue;
            }
        };
        usage::wait_for_quiet(options.quiet);
        match run(&task(engine))? {
            // Not measured, whatever came of it: engines say for themselves what is refused.
            _ if number == 0 => {}
            Outcome::Measured(figures) => {
                report.samples.push(Sample { round, pattern, engine, cached_share: share, figures });
            }
            Outcome::Refused(why) => report.refuse(pattern, engine, why),
        }
    }
    Ok(())
}

/// Brings the page cache into a state, and proves it: the share of pages that are cached.
fn bring_about(state: State, paths: &[PathBuf], each: u64) -> io::Result<f64> {
    let mut total = 0.0;
    for path in paths {
        let file = File::open(path)?;
        let wanted = |share: f64| match state {
            State::Warm => share >= 1.0 - TOLERANCE,
            State::Direct | State::Through => share <= TOLERANCE,
        };
        let mut share = cached_share(&file, each)?;
        if state == State::Through || !wanted(share) {
            match state {
                State::Warm => fill(&file, each)?,
                State::Direct | State::Through => drop_pages(&file)?,
            }
            share = cached_share(&file, each)?;
        }
        if !wanted(share) {
            return Err(io::Error::other(format!(
                "not measured: {:.1} % of the pages are cached",
                share * 100.0
            )));
        }
        total += share;
    }
    Ok(total / paths.len() as f64)
}

fn run(task: &Task) -> Result<Outcome, Box<dyn std::error::Error>> {
    let child = Command::new(std::env::current_exe()?)
        .args(["--measure", &serde_json::to_string(task)?])
        .stderr(Stdio::inherit())
        .output()?;
    if !child.status.success() {
        return Err(format!("measuring {} ({}) failed: {}", task.pattern, task.engine, child.status).into());
    }
    Ok(serde_json::from_slice(&child.stdout)?)
}
