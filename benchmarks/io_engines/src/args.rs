//! What is asked for on the command line.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

pub const HELP: &str = "\
Reads a file by threads and by io_uring, in turn, and says which is faster and what it costs.

    io_engines DIRECTORY... [options]

The file is made in DIRECTORY if it is not there: of random words that tell where they are, which every read checks.
Several directories, one on each disk, share the bytes.

  --gib N          bytes of all files together, GiB (2)
  --rounds N       rounds, each with every engine and pattern (3)
  --cap SECONDS    longest measurement; what was read by then counts (0.4)
  --budget SECONDS no round is begun that would not end in this time (140)
  --quiet SECONDS  wait so long before each measurement for others to leave the processors alone (0)
  --only TEXT      only patterns whose name contains this, e.g. \"cold\", \"16 KiB\"
  --output FILE    results as JSON
  --remove         remove the files afterwards";

/// What the command line wants done.
#[derive(Debug)]
pub enum Wish {
    Help,
    Compare(Options),
    /// One measurement, described by JSON: how the program calls itself.
    Measure(String),
}

/// How to compare.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    pub directories: Vec<PathBuf>,
    pub gib: f64,
    pub rounds: usize,
    pub cap: Duration,
    pub budget: Duration,
    pub quiet: Duration,
    pub only: String,
    pub output: Option<PathBuf>,
    pub remove: bool,
}

impl Options {
    /// The command that does this, without saying where.
    pub fn command(&self) -> String {
        let only = if self.only.is_empty() { String::new() } else { format!(" --only {:?}", self.only) };
        let [cap, budget, quiet] = [self.cap, self.budget, self.quiet].map(|span| span.as_secs_f64());
        let directories = vec!["DIRECTORY"; self.directories.len()].join(" ");
        format!(
            "io_engines {directories} --gib {} --rounds {} --cap {cap} --budget {budget} --quiet {quiet}{only}",
            self.gib, self.rounds
        )
    }
}

/// Reads the arguments, or says which is wrong.
pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Wish, String> {
    let mut options = Options {
        directories: Vec::new(),
        gib: 2.0,
        rounds: 3,
        cap: Duration::from_millis(400),
        budget: Duration::from_secs(140),
        quiet: Duration::ZERO,
        only: String::new(),
        output: None,
        remove: false,
    };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value (--help)"));
        match argument.as_str() {
            "-h" | "--help" => return Ok(Wish::Help),
            "--measure" => return Ok(Wish::Measure(value()?)),
            "--gib" => options.gib = number(&argument, &value()?)?,
            "--rounds" => options.rounds = number(&argument, &value()?)?,
            "--cap" => options.cap = seconds(&argument, &value()?)?,
            "--budget" => options.budget = seconds(&argument, &value()?)?,
            "--quiet" => options.quiet = seconds(&argument, &value()?)?,
            "--only" => options.only = value()?,
            "--output" => options.output = Some(value()?.into()),
            "--remove" => options.remove = true,
            unknown if unknown.starts_with('-') => return Err(format!("unknown option {unknown} (--help)")),
            directory => options.directories.push(directory.into()),
        }
    }
    if options.directories.is_empty() {
        return Err("which directory shall the file be in? (--help)".into());
    }
    if !(0.03..=4096.0).contains(&options.gib) || options.rounds == 0 {
        return Err("--gib must be 0.03 to 4096, and --rounds at least 1".into());
    }
    Ok(Wish::Compare(options))
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{name}: {value:?} is not such a number"))
}

fn seconds(name: &str, value: &str) -> Result<Duration, String> {
    Duration::try_from_secs_f64(number(name, value)?).map_err(|error| format!("{name}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Wish, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn directories_and_options_may_come_in_any_order() {
        let Ok(Wish::Compare(options)) = parsed("--gib 1.5 /a --remove /b --cap 0.25") else { panic!() };
        assert_eq!(options.directories, [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert_eq!((options.gib, options.cap, options.remove), (1.5, Duration::from_millis(250), true));
        assert!(!options.command().contains("/a"));
    }

    #[test]
    fn what_cannot_be_meant_is_named() {
        for (line, named) in [
            ("", "directory"),
            ("/a --gib x", "--gib"),
            ("/a --cap -1", "--cap"),
            ("/a --what", "--what"),
            ("/a --only", "--only"),
            ("/a --rounds 0", "--rounds"),
        ] {
            assert!(parsed(line).is_err_and(|problem| problem.contains(named)), "{line}");
        }
    }
}
