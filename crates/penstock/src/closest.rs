//! The names most like one that is not there.
//!
//! Most wrong tensor names are right but for a prefix (`model.` too much or too little), their case, or a slip of the
//! finger. The search is linear over all names with a bounded edit distance, and runs only when an error is made.

/// Up to three of `names` that `wanted` may have meant, the likeliest first.
pub(crate) fn closest<'n>(wanted: &str, names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    let mut scored: Vec<_> = names.filter_map(|name| Some((score(wanted, name)?, name))).collect();
    scored.sort_unstable();
    scored.into_iter().take(3).map(|(_, name)| name).collect()
}

/// How far `name` is from `wanted`: smaller is nearer, none is too far.
fn score(wanted: &str, name: &str) -> Option<usize> {
    let extends = |long: &str, short: &str| {
        !short.is_empty() && long.strip_suffix(short).is_some_and(|prefix| prefix.ends_with('.'))
    };
    if wanted.eq_ignore_ascii_case(name) {
        Some(0)
    } else if extends(name, wanted) || extends(wanted, name) {
        Some(1)
    } else if swapped(wanted.as_bytes(), name.as_bytes()) {
        Some(2)
    } else {
        let limit = (wanted.len() / 5).clamp(1, 12);
        distance(wanted.as_bytes(), name.as_bytes(), limit).map(|distance| 1 + distance)
    }
}

/// Whether two neighbours changed places: one slip of the fingers, though two edits.
fn swapped(a: &[u8], b: &[u8]) -> bool {
    let at = a.iter().zip(b).position(|(a, b)| a != b).filter(|_| a.len() == b.len());
    at.is_some_and(|at| {
        at + 1 < a.len() && a[at] == b[at + 1] && a[at + 1] == b[at] && a[at + 2..] == b[at + 2..]
    })
}

/// The Levenshtein distance of two byte strings, if it is at most `limit`.
fn distance(a: &[u8], b: &[u8], limit: usize) -> Option<usize> {
    if a.len().abs_diff(b.len()) > limit {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        // Only the diagonal band of width `limit` can hold a path that short.
        let from = i.saturating_sub(limit);
        let to = b.len().min(i + limit + 1);
        let mut diagonal = std::mem::replace(&mut row[from], if from == 0 { i + 1 } else { limit + 1 });
        let mut best = row[from];
        for j in from..to {
            let above = if j + 1 > i + limit { limit + 1 } else { row[j + 1] };
            let value = (diagonal + usize::from(*x != b[j])).min(above + 1).min(row[j] + 1);
            diagonal = row[j + 1];
            row[j + 1] = value;
            best = best.min(value);
        }
        if best > limit {
            return None;
        }
    }
    Some(row[b.len()]).filter(|distance| *distance <= limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(a: &[u8], b: &[u8]) -> usize {
        match (a, b) {
            ([], rest) | (rest, []) => rest.len(),
            ([x, a @ ..], [y, b @ ..]) if x == y => plain(a, b),
            ([_, a1 @ ..], [_, b1 @ ..]) => 1 + plain(a1, b).min(plain(a, b1)).min(plain(a1, b1)),
        }
    }

    #[test]
    fn letters_that_changed_places_are_one_slip() {
        assert_eq!(closest("secrte", ["secret", "key"].into_iter()), ["secret"]);
        for (a, b) in [("ab", "ab"), ("abc", "bac1"), ("abcd", "badc"), ("a", "b"), ("", "")] {
            assert!(!swapped(a.as_bytes(), b.as_bytes()), "{a} {b}");
        }
    }

    #[test]
    fn bounded_distance_is_the_distance() {
        let words = ["", "a", "ab", "ba", "abc", "acb", "bca", "aabb", "abab", "cabab", "bbbbb", "abcabc"];
        for a in words.map(str::as_bytes) {
            for b in words.map(str::as_bytes) {
                for limit in 0..7 {
                    let full = plain(a, b);
                    let expected = (full <= limit).then_some(full);
                    assert_eq!(distance(a, b, limit), expected, "{a:?} {b:?} {limit}");
                }
            }
        }
    }

    #[test]
    fn prefixes_case_and_slips_are_found() {
        let names = ["model.layers.0.weight", "lm_head.weight", "model.norm.weight"];
        let find = |wanted| closest(wanted, names.into_iter());
        assert_eq!(find("layers.0.weight"), ["model.layers.0.weight"]);
        assert_eq!(find("model.lm_head.weight"), ["lm_head.weight"]);
        assert_eq!(find("LM_HEAD.weight"), ["lm_head.weight"]);
        assert_eq!(find("lm_haed.weight"), ["lm_head.weight"]);
        assert!(find("visual.patch_embed").is_empty());
    }
}
