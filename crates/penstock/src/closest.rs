//! The names most like one that is not there.
//!
//! Most wrong tensor names are right but for a prefix (`model.` too much or too little), their case, or a typing error.
//! The search is linear over all names of about the same length, and runs only when an error is made.

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
    // A module's name, where that of its tensor is meant.
    let is_of_module =
        || !wanted.is_empty() && name.strip_prefix(wanted).is_some_and(|rest| rest.starts_with('.'));
    if wanted.eq_ignore_ascii_case(name) {
        Some(0)
    } else if extends(name, wanted) || extends(wanted, name) {
        Some(1)
    } else if is_of_module() {
        Some(2)
    } else {
        let limit = (wanted.len() / 5).clamp(1, 12);
        // Two neighbours that changed places are one edit.
        let distance = || Some(strsim::osa_distance(wanted, name)).filter(|distance| *distance <= limit);
        let is_near = wanted.len().abs_diff(name.len()) <= limit;
        is_near.then(distance)?.map(|distance| 1 + distance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_that_changed_places_are_one_slip() {
        assert_eq!(closest("secrte", ["secret", "key"].into_iter()), ["secret"]);
        assert!(closest("abcd", ["badc"].into_iter()).is_empty());
    }

    #[test]
    fn prefixes_case_and_slips_are_found() {
        let names = ["model.layers.0.weight", "lm_head.weight", "model.norm.weight"];
        let find = |wanted| closest(wanted, names.into_iter());
        assert_eq!(find("layers.0.weight"), ["model.layers.0.weight"]);
        assert_eq!(find("model.lm_head.weight"), ["lm_head.weight"]);
        assert_eq!(find("LM_HEAD.weight"), ["lm_head.weight"]);
        assert_eq!(find("lm_head"), ["lm_head.weight"]);
        assert_eq!(find("model.layers"), ["model.layers.0.weight"]);
        assert!(find("").is_empty());
        assert_eq!(find("lm_haed.weight"), ["lm_head.weight"]);
        assert!(find("visual.patch_embed").is_empty());
    }
}
