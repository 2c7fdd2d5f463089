//! Every setting, in one place, with one order of precedence: keyword, then environment, then found by itself.
//!
//! `None` means "found by itself" and is what everyone should use; a setting exists so that a benchmark can pin it and
//! a person can rule it out. Sizes are bytes, written `4194304`, `4MiB`, `4M` or `4MB` (1e6) in the environment.

use std::path::PathBuf;

use crate::error::{Error, ErrorKind, Result};
use crate::manifest::Verify;
use crate::store::CachePolicy;

/// The most readers that one load may have.
pub const MAX_READERS: usize = 256;

/// What a load may use, and how.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Config {
    /// Reader threads (`PENSTOCK_READERS`), 1 to [`MAX_READERS`].
    pub readers: Option<usize>,
    /// Bytes of a block (`PENSTOCK_BLOCK_BYTES`), rounded up to 4 KiB; 4 KiB to 64 MiB.
    pub block_bytes: Option<u64>,
    /// Budget of host staging memory (`PENSTOCK_STAGING_BYTES`); 512 MiB where nothing is said.
    pub staging_bytes: Option<u64>,
    /// How far a stream reads ahead of its consumer, in bytes of finished or started tensors
    /// (`PENSTOCK_WINDOW_BYTES`); 512 MiB where nothing is said. At least one tensor is always in flight.
    pub window_bytes: Option<u64>,
    /// How the page cache is used (`PENSTOCK_CACHE`: `auto`, `use`, `bypass` or `populate`).
    pub cache: Option<CachePolicy>,
    /// Where what comes over the network is kept for the next load (`PENSTOCK_CACHE_DIR`); nowhere where nothing is said.
    pub cache_dir: Option<PathBuf>,
    /// The most bytes kept there (`PENSTOCK_CACHE_BYTES`); 80 % of the disk's free space and what is there already
    /// where nothing is said.
    pub cache_bytes: Option<u64>,
    /// When what is loaded is compared with a manifest (`PENSTOCK_VERIFY`: `auto`, `require` or `off`).
    pub verify: Option<Verify>,
    /// The file that a load's trace is added to (`PENSTOCK_TRACE`); none where nothing is said, or an empty name.
    pub trace: Option<PathBuf>,
}

impl Config {
    /// Fills what is not set from the environment, through `lookup`.
    ///
    /// # Errors
    /// `Config`, naming the variable and its value, where a value does not parse or is out of bounds.
    pub fn or_environment(self, lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        fn read<T>(
            lookup: &impl Fn(&str) -> Option<String>,
            variable: &'static str,
            parse: impl Fn(&str) -> Option<T>,
            expected: &str,
        ) -> Result<Option<T>> {
            match lookup(variable) {
                None => Ok(None),
                Some(text) if text.trim().is_empty() => Ok(None),
                Some(text) => parse(text.trim()).map(Some).ok_or_else(|| {
                    Error::new(ErrorKind::Config, format!("{variable}={text:?} is not {expected}"))
                        .remedy(format!("Unset {variable}: Penstock finds good values by itself"))
                }),
            }
        }
        const SIZE: &str = "a size in bytes such as 4194304 or 4MiB";
        let or = |own: Option<u64>, variable| match own {
            Some(value) => Ok(Some(value)),
            None => read(&lookup, variable, parse_size, SIZE),
        };
        Self {
            readers: match self.readers {
                Some(readers) => Some(readers),
                None => read(&lookup, "PENSTOCK_READERS", |t| t.parse().ok(), "a number of threads")?,
            },
            block_bytes: or(self.block_bytes, "PENSTOCK_BLOCK_BYTES")?,
            staging_bytes: or(self.staging_bytes, "PENSTOCK_STAGING_BYTES")?,
            window_bytes: or(self.window_bytes, "PENSTOCK_WINDOW_BYTES")?,
            cache: match self.cache {
                Some(cache) => Some(cache),
                None => read(
                    &lookup,
                    "PENSTOCK_CACHE",
                    CachePolicy::from_name,
                    "one of auto, use, bypass, populate",
                )?,
            },
            cache_dir: match self.cache_dir {
                Some(directory) => Some(directory),
                None => read(&lookup, "PENSTOCK_CACHE_DIR", |t| Some(t.into()), "a directory")?,
            }
            .map(|directory| at_home(directory, &lookup)),
            cache_bytes: or(self.cache_bytes, "PENSTOCK_CACHE_BYTES")?,
            verify: match self.verify {
                Some(verify) => Some(verify),
                None => read(&lookup, "PENSTOCK_VERIFY", Verify::from_name, "one of auto, require, off")?,
            },
            trace: match self.trace {
                Some(file) => Some(file),
                None => read(&lookup, "PENSTOCK_TRACE", |t| Some(t.into()), "a file")?,
            }
            .map(|file| at_home(file, &lookup)),
        }
        .checked()
    }

    fn checked(self) -> Result<Self> {
        let out_of_bounds = |what: &str, value: u64, bounds: &str| {
            Error::new(ErrorKind::Config, format!("{what} is {value}, outside of {bounds}"))
                .remedy("Leave it unset: Penstock finds good values by itself")
        };
        if let Some(readers) = self.readers.filter(|n| !(1..=MAX_READERS).contains(n)) {
            return Err(out_of_bounds("readers", readers as u64, "1 to 256"));
        }
        if let Some(bytes) = self.block_bytes.filter(|n| !(4096..=64 << 20).contains(n)) {
            return Err(out_of_bounds("block_bytes", bytes, "4 KiB to 64 MiB"));
        }
        if let Some(bytes) = self.staging_bytes.filter(|n| *n < 1 << 20) {
            return Err(out_of_bounds("staging_bytes", bytes, "1 MiB and more"));
        }
        Ok(self)
    }
}

/// The path, in the home directory where it begins with `~`: shells expand that, Kubernetes and systemd do not.
fn at_home(path: PathBuf, lookup: impl Fn(&str) -> Option<String>) -> PathBuf {
    match (path.strip_prefix("~"), lookup("HOME")) {
        (Ok(below), Some(home)) => PathBuf::from(home).join(below),
        _ => path,
    }
}

/// A size in bytes with an optional binary (`K KiB M MiB G GiB T TiB`) or decimal (`KB MB GB TB`) unit, in any case.
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    let (prefix, base): (_, u64) = match unit.strip_suffix('b').unwrap_or(&unit) {
        binary if binary.len() == 2 => (binary.strip_suffix('i')?, 1024),
        prefix if unit.ends_with('b') => (prefix, 1000),
        prefix => (prefix, 1024),
    };
    let power = match prefix {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(base.pow(power))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variable: &'static str, value: &'static str) -> impl Fn(&str) -> Option<String> {
        move |asked| (asked == variable).then(|| value.to_owned())
    }

    #[test]
    fn a_keyword_wins_over_the_environment() {
        let config = Config { readers: Some(3), ..Config::default() };
        let config = config.or_environment(environment("PENSTOCK_READERS", "9")).unwrap();
        assert_eq!(config.readers, Some(3));
    }

    #[test]
    fn the_environment_fills_what_is_not_set() {
        let config = Config::default().or_environment(environment("PENSTOCK_BLOCK_BYTES", "4MiB")).unwrap();
        assert_eq!(config.block_bytes, Some(4 << 20));
        let config = Config::default().or_environment(environment("PENSTOCK_CACHE_DIR", "/c")).unwrap();
        assert_eq!(config.cache_dir, Some(PathBuf::from("/c")));
        let config = Config { cache_dir: Some("~/c".into()), ..Config::default() };
        let config = config.or_environment(environment("HOME", "/u")).unwrap();
        assert_eq!(config.cache_dir, Some(PathBuf::from("/u/c")));
        let config = Config::default().or_environment(environment("PENSTOCK_CACHE_BYTES", "2GB")).unwrap();
        assert_eq!(config.cache_bytes, Some(2_000_000_000));
        let config = Config::default().or_environment(environment("PENSTOCK_VERIFY", "require")).unwrap();
        assert_eq!(config.verify, Some(Verify::Require));
        let config = Config::default().or_environment(environment("PENSTOCK_TRACE", "/t.json")).unwrap();
        assert_eq!(config.trace, Some(PathBuf::from("/t.json")));
        let config = Config::default().or_environment(environment("PENSTOCK_CACHE", "bypass")).unwrap();
        assert_eq!(config.cache, Some(CachePolicy::Bypass));
    }

    #[test]
    fn values_that_make_no_sense_name_their_variable() {
        for (variable, value) in
            [("PENSTOCK_READERS", "many"), ("PENSTOCK_STAGING_BYTES", "1TiBx"), ("PENSTOCK_CACHE", "yes")]
        {
            let error = Config::default().or_environment(environment(variable, value)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(variable) && error.to_string().contains(value), "{error}");
        }
        for (variable, value) in [("PENSTOCK_READERS", "0"), ("PENSTOCK_BLOCK_BYTES", "1")] {
            assert!(Config::default().or_environment(environment(variable, value)).is_err());
        }
    }

    #[test]
    fn sizes_take_binary_and_decimal_units() {
        assert_eq!(parse_size("512 MiB"), Some(512 << 20));
        assert_eq!(parse_size("2GB"), Some(2_000_000_000));
        assert_eq!((parse_size("5tib"), parse_size("5 TB")), (Some(5 << 40), Some(5_000_000_000_000)));
        assert_eq!((parse_size("7"), parse_size("7B"), parse_size("7m")), (Some(7), Some(7), Some(7 << 20)));
        assert!(
            ["GiBB", "1i", "1iB", "1XB", "1KiBx", "GB", ""].iter().all(|text| parse_size(text).is_none())
        );
        assert_eq!(parse_size("99999999999G"), None);
        assert_eq!(parse_size("-1"), None);
    }
}
