//! Medians, ratios within rounds, and how they are shown.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::args::Options;
use crate::machine::{Machine, storage};
use crate::plan::{Engine, Pattern};
use crate::rounds::Sample;

/// An engine within this share of the fastest of its kind is fast enough to be chosen for its CPU time.
const NEARLY: f64 = 0.9;
/// CPU seconds below which the kernel's threads say nothing about how they are counted.
const ENOUGH_CPU: f64 = 0.05;

/// Everything that was found.
#[derive(Debug)]
pub struct Report {
    command: String,
    machine: Machine,
    storage: Vec<Value>,
    bytes: u64,
    cap: f64,
    pub seconds: f64,
    /// Why there are no rings at all.
    pub refusal: Option<String>,
    pub samples: Vec<Sample>,
    pub notes: Vec<String>,
    refused: Vec<(Pattern, Engine, String)>,
}

/// One engine on one pattern.
struct Row {
    pattern: Pattern,
    engine: Engine,
    samples: Vec<Sample>,
}

impl Row {
    /// Whether others disturbed most measurements.
    fn is_disturbed(&self) -> bool {
        2 * self.samples.iter().filter(|sample| sample.figures.disturbed).count() > self.samples.len()
    }

    /// The measurements that count: undisturbed ones, or all of them if those are too few.
    fn counted(&self) -> impl Iterator<Item = &Sample> {
        let all = self.is_disturbed();
        self.samples.iter().filter(move |sample| all || !sample.figures.disturbed)
    }

    fn median(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        median(self.counted().map(of).collect())
    }

    fn rate(&self) -> f64 {
        self.median(rate)
    }

    fn cpu(&self) -> f64 {
        self.median(cpu)
    }

    /// This row's figure over another's, for each round that both count, or each round if none.
    fn ratios(&self, other: &Self, of: impl Fn(&Sample) -> f64) -> Vec<f64> {
        let paired = |ours: Vec<&Sample>, theirs: Vec<&Sample>| -> Vec<f64> {
            let partner = |sample: &Sample| theirs.iter().find(|theirs| theirs.round == sample.round);
            ours.into_iter().filter_map(|ours| Some(of(ours) / of(partner(ours)?))).collect()
        };
        let counted = paired(self.counted().collect(), other.counted().collect());
        if counted.is_empty() {
            return paired(self.samples.iter().collect(), other.samples.iter().collect());
        }
        counted
    }
}

fn rate(sample: &Sample) -> f64 {
    sample.figures.gb / sample.figures.seconds
}

fn cpu(sample: &Sample) -> f64 {
    sample.figures.cpu_s / sample.figures.gb
}

/// Of the machine, with what the kernel does for no process: interrupts, the disk's workers.
fn machine_cpu(sample: &Sample) -> f64 {
    sample.figures.machine_cpu_s / sample.figures.gb
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

impl Report {
    pub fn new(options: &Options, paths: &[PathBuf], each: u64, refusal: Option<String>) -> Self {
        Self {
            command: options.command(),
            machine: Machine::here(),
            storage: paths.iter().map(|path| storage(path)).collect(),
            bytes: each * paths.len() as u64,
            cap: options.cap.as_secs_f64(),
            seconds: 0.0,
            refusal,
            samples: Vec::new(),
            notes: Vec::new(),
            refused: Vec::new(),
        }
    }

    /// Whether an engine may run: it was not refused before.
    pub fn is_worth_trying(&self, pattern: Pattern, engine: Engine) -> bool {
        let refused = self.refused.iter().any(|(where_, who, _)| (*where_, *who) == (pattern, engine));
        !(refused || engine.is_ring() && self.refusal.is_some())
    }

    /// Notes that an engine cannot run, and says so.
    pub fn refuse(&mut self, pattern: Pattern, engine: Engine, why: String) {
        println!("{engine} is refused here ({pattern}): {why}");
        self.refused.push((pattern, engine, why));
    }

    fn patterns(&self) -> Vec<Pattern> {
        Pattern::all()
            .into_iter()
            .filter(|pattern| self.samples.iter().any(|sample| sample.pattern == *pattern))
            .collect()
    }

    fn rows(&self, pattern: Pattern) -> Vec<Row> {
        let of = |engine| {
            let found =
                self.samples.iter().filter(|sample| (sample.pattern, sample.engine) == (pattern, engine));
            Row { pattern, engine, samples: found.cloned().collect() }
        };
        Engine::of(pattern, self.machine.cores)
            .into_iter()
            .map(of)
            .filter(|row| !row.samples.is_empty())
            .collect()
    }

    /// Prints a table for each pattern, and the summary.
    pub fn print(&self) {
        for pattern in self.patterns() {
            let rows = self.rows(pattern);
            let best = chosen(&rows, false);
            println!("\n{pattern}");
            println!(
                "{:<30}{:>8}{:>11}{:>10}{:>9}{:>9}{:>9}{:>10}{:>8}",
                "", "GB/s", "of threads", "CPU s/GB", "machine", "p50 ms", "p99 ms", "setup ms", "kernel"
            );
            for row in &rows {
                let share = best.map_or(f64::NAN, |best| median(row.ratios(best, rate)));
                println!(
                    "{:<30}{:>8.2}{share:>11.2}{:>10.3}{:>9.3}{:>9.3}{:>9.3}{:>10.1}{:>8.0}",
                    format!("{}{}", row.engine, if row.is_disturbed() { " !" } else { "" }),
                    row.rate(),
                    row.cpu(),
                    row.median(machine_cpu),
                    row.median(|sample| sample.figures.p50_us) / 1e3,
                    row.median(|sample| sample.figures.p99_us) / 1e3,
                    row.median(|sample| sample.figures.setup_ms),
                    row.median(|sample| sample.figures.kernel_threads as f64),
                );
            }
        }
        println!(
            "\n\"of threads\": speed over that of the chosen threads in the same round. \"kernel\": io_uring's kernel threads."
        );
        println!(
            "\"machine\": CPU s/GB of the whole machine. \"!\": others took a fifth of the machine in most rounds. In {} of {} measurements they did; the rest counts, if it can.",
            self.samples.iter().filter(|sample| sample.figures.disturbed).count(),
            self.samples.len()
        );
        println!("Chosen: the least CPU time among those within 10 % of their kind's fastest.\n");
        println!(
            "| {} cores | threads: GB/s, CPU s/GB | io_uring: GB/s, CPU s/GB | speed (rounds) | CPU (rounds) |",
            self.machine.cores
        );
        println!("|---|---|---|---|---|");
        for pattern in self.patterns() {
            let rows = self.rows(pattern);
            if let (Some(threads), Some(ring)) = (chosen(&rows, false), chosen(&rows, true)) {
                println!(
                    "| {pattern} | {} | {} | {} | {} |",
                    cell(threads),
                    cell(ring),
                    spread(&ring.ratios(threads, rate)),
                    spread(&ring.ratios(threads, cpu))
                );
            }
        }
        println!();
        if let Some(accounting) = self.accounting() {
            println!("{accounting}");
        }
        for note in &self.notes {
            println!("{note}");
        }
        println!("{:.0} s in all", self.seconds);
    }

    /// Whether `getrusage` counts the kernel's threads, where they did enough for that to be seen.
    fn accounting(&self) -> Option<String> {
        let heavy = self.samples.iter().filter(|sample| sample.figures.kernel_threads_cpu_s >= ENOUGH_CPU);
        let shares: Vec<_> = heavy
            .map(|Sample { figures, .. }| {
                (figures.cpu_s / (figures.own_cpu_s + figures.kernel_threads_cpu_s), figures)
            })
            .collect();
        let kernel: f64 = shares.iter().map(|(_, figures)| figures.kernel_threads_cpu_s).sum();
        let all: f64 = shares.iter().map(|(_, figures)| figures.cpu_s).sum();
        let middle = median(shares.iter().map(|(share, _)| *share).collect());
        (!shares.is_empty()).then(|| {
            format!(
                "getrusage saw {middle:.2} of the CPU time of our threads and the kernel's for us together (median of {} \
                 measurements in which the latter took {:.0} % of it).",
                shares.len(),
                kernel / all * 100.0
            )
        })
    }

    /// Everything, for a file.
    pub fn json(&self) -> Value {
        let rows: Vec<_> = self.patterns().into_iter().flat_map(|pattern| self.rows(pattern)).collect();
        let summary: Vec<_> = self
            .patterns()
            .into_iter()
            .filter_map(|pattern| {
                let rows = self.rows(pattern);
                let (threads, ring) = (chosen(&rows, false)?, chosen(&rows, true)?);
                Some(json!({
                    "pattern": pattern.to_string(),
                    "threads": threads.engine.to_string(),
                    "io_uring": ring.engine.to_string(),
                    "speed_ratio": rounded(median(ring.ratios(threads, rate))),
                    "speed_ratios": ring.ratios(threads, rate).into_iter().map(rounded).collect::<Vec<_>>(),
                    "cpu_ratio": rounded(median(ring.ratios(threads, cpu))),
                    "cpu_ratios": ring.ratios(threads, cpu).into_iter().map(rounded).collect::<Vec<_>>(),
                }))
            })
            .collect();
        json!({
            "command": self.command,
            "machine": self.machine,
            "storage": self.storage,
            "bytes": self.bytes,
            "cap_seconds": self.cap,
            "seconds": self.seconds.round(),
            "io_uring": self.refusal.as_deref().unwrap_or("allowed"),
            "accounting": self.accounting(),
            "notes": self.notes,
            "refused": self.refused.iter().map(|(pattern, engine, why)| json!({
                "pattern": pattern.to_string(), "engine": engine.to_string(), "why": why,
            })).collect::<Vec<_>>(),
            "summary": summary,
            "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
        })
    }
}

impl Row {
    fn json(&self) -> Value {
        let all = |of: &dyn Fn(&Sample) -> f64| {
            self.samples.iter().map(|sample| rounded(of(sample))).collect::<Vec<_>>()
        };
        json!({
            "pattern": self.pattern.to_string(),
            "engine": self.engine.to_string(),
            "gb_per_s": rounded(self.rate()),
            "cpu_s_per_gb": rounded(self.cpu()),
            "machine_cpu_s_per_gb": rounded(self.median(machine_cpu)),
            "p50_us": rounded(self.median(|sample| sample.figures.p50_us)),
            "p99_us": rounded(self.median(|sample| sample.figures.p99_us)),
            "setup_ms": rounded(self.median(|sample| sample.figures.setup_ms)),
            "kernel_threads": self.median(|sample| sample.figures.kernel_threads as f64),
            "rounds": {
                "round": self.samples.iter().map(|sample| sample.round).collect::<Vec<_>>(),
                "gb": all(&|sample| sample.figures.gb),
                "seconds": all(&|sample| sample.figures.seconds),
                "cpu_s": all(&|sample| sample.figures.cpu_s),
                "own_cpu_s": all(&|sample| sample.figures.own_cpu_s),
                "kernel_threads_cpu_s": all(&|sample| sample.figures.kernel_threads_cpu_s),
                "machine_cpu_s": all(&|sample| sample.figures.machine_cpu_s),
                "disturbed": self.samples.iter().map(|sample| sample.figures.disturbed).collect::<Vec<_>>(),
                "p50_us": all(&|sample| sample.figures.p50_us),
                "p99_us": all(&|sample| sample.figures.p99_us),
                "cached_share": all(&|sample| sample.cached_share),
            },
        })
    }
}

/// Of threads or rings, the one with the least CPU time among those nearly as fast as the fastest.
fn chosen(rows: &[Row], rings: bool) -> Option<&Row> {
    let kind = || rows.iter().filter(|row| row.engine.is_ring() == rings);
    let fastest = kind().map(Row::rate).fold(0.0, f64::max);
    kind().filter(|row| row.rate() >= NEARLY * fastest).min_by(|a, b| a.cpu().total_cmp(&b.cpu()))
}

fn cell(row: &Row) -> String {
    format!("{:.2}, {:.3} ({})", row.rate(), row.cpu(), row.engine)
}

fn spread(ratios: &[f64]) -> String {
    if ratios.is_empty() {
        return "no common round".to_owned();
    }
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    format!("{:.2} ({least:.2}-{most:.2})", median(ratios.to_vec()))
}

/// Four significant digits are more than any figure here deserves.
fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Figures;
    use crate::plan::How;

    fn row(engine: Engine, seconds_and_cpu: &[(f64, f64)]) -> Row {
        let pattern = Pattern::all()[0];
        let samples = seconds_and_cpu.iter().enumerate().map(|(round, (seconds, cpu_s))| Sample {
            round,
            pattern,
            engine,
            cached_share: 0.0,
            figures: Figures {
                gb: 1.0,
                seconds: *seconds,
                cpu_s: *cpu_s,
                own_cpu_s: 0.0,
                kernel_threads_cpu_s: 0.0,
                kernel_threads: 0,
                machine_cpu_s: 0.0,
                disturbed: false,
                setup_ms: 0.0,
                p50_us: 0.0,
                p99_us: 0.0,
            },
        });
        Row { pattern, engine, samples: samples.collect() }
    }

    #[test]
    fn ratios_are_taken_within_rounds() {
        let ring = Engine::Rings { rings: 1, depth: 8, how: How::Plain };
        // Twice as fast in every round, however much the rounds differ.
        let (slow, fast) =
            (row(Engine::Threads(8), &[(2.0, 1.0), (20.0, 1.0)]), row(ring, &[(1.0, 1.0), (10.0, 1.0)]));
        assert_eq!(fast.ratios(&slow, rate), [2.0, 2.0]);
        assert_eq!(spread(&fast.ratios(&slow, rate)), "2.00 (2.00-2.00)");
    }

    #[test]
    fn the_cheapest_of_the_nearly_fastest_is_chosen() {
        let rows = [
            row(Engine::Threads(4), &[(2.0, 0.1)]),
            row(Engine::Threads(8), &[(1.02, 0.2)]),
            row(Engine::Threads(16), &[(1.0, 0.3)]),
        ];
        assert_eq!(chosen(&rows, false).map(|row| row.engine), Some(Engine::Threads(8)));
        assert!(chosen(&rows, true).is_none());
    }

    #[test]
    fn disturbed_measurements_count_only_where_most_are() {
        let mut found =
            row(Engine::Threads(8), &[(1.0, 0.1), (1.0, 0.1), (9.0, 0.1), (9.0, 0.1), (9.0, 0.1)]);
        for number in [3, 4] {
            found.samples[number].figures.disturbed = true;
        }
        assert_eq!((found.rate(), found.is_disturbed()), (1.0, false));
        found.samples[2].figures.disturbed = true;
        assert_eq!((found.rate(), found.is_disturbed()), (1.0 / 9.0, true));
    }

    #[test]
    fn medians_of_even_and_odd_counts() {
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
        assert_eq!((rounded(0.123_456), rounded(12346.0), rounded(0.0)), (0.1235, 12350.0, 0.0));
    }
}
