//! Shell patterns on whole keys, as Python's `fnmatch` has them: `*` also matches slashes.

/// Whether `text` matches `pattern`: `*` any characters, `?` one, `[abc]`, `[a-z]`, `[!abc]` one of these or none of them.
/// A bracket that is not closed stands for itself. As for Hugging Face's own tools, a pattern that ends in a slash means
/// everything below it.
pub fn matches(pattern: &str, text: &str) -> bool {
    let mut pattern: Vec<char> = pattern.chars().collect();
    if pattern.last() == Some(&'/') {
        pattern.push('*');
    }
    let text: Vec<char> = text.chars().collect();
    let (mut at, mut seen) = (0, 0);
    // Where to go on after the last star: what it has taken so far was too little.
    let mut star: Option<(usize, usize)> = None;
    loop {
        let step = match (pattern.get(at), text.get(seen)) {
            (None, None) => return true,
            (Some('*'), _) => {
                star = Some((at + 1, seen));
                at += 1;
                continue;
            }
            (Some(_), Some(c)) => one(&pattern[at..], *c),
            _ => None,
        };
        match (step, star) {
            (Some(taken), _) => (at, seen) = (at + taken, seen + 1),
            (None, Some((after, from))) if from < text.len() => {
                star = Some((after, from + 1));
                (at, seen) = (after, from + 1);
            }
            (None, _) => return false,
        }
    }
}

/// How many characters of the pattern match `c`, if its beginning does.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern[0] {
        '?' => Some(1),
        '[' => {
            let negated = pattern.get(1) == Some(&'!');
            let begin = 1 + usize::from(negated);
            // A bracket that comes first belongs to the set.
            let end = pattern.iter().skip(begin + 1).position(|c| *c == ']').map(|end| end + begin + 1);
            let Some(end) = end else { return (c == '[').then_some(1) };
            (is_in(&pattern[begin..end], c) != negated).then_some(end + 1)
        }
        literal => (literal == c).then_some(1),
    }
}

fn is_in(set: &[char], c: char) -> bool {
    let mut at = 0;
    while at < set.len() {
        match (set.get(at + 1), set.get(at + 2)) {
            (Some('-'), Some(last)) => {
                if (set[at]..=*last).contains(&c) {
                    return true;
                }
                at += 3;
            }
            _ => {
                if set[at] == c {
                    return true;
                }
                at += 1;
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_fnmatch_means_by_them() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*.safetensors", "a/b/model-1.safetensors", true),
            ("*.safetensors", "model.safetensors.index.json", false),
            ("model-?.bin", "model-1.bin", true),
            ("model-?.bin", "model-.bin", false),
            ("[ab]x[!0-9]", "bxz", true),
            ("[ab]x[!0-9]", "bx7", false),
            ("[]]", "]", true),
            ("[!]]", "]", false),
            ("a[", "a[", true),
            ("a-[z", "a-[z", true),
            ("[a-]", "-", true),
            ("unet/", "unet/a/b", true),
            ("unet/", "vae/unet/a", false),
            ("**a*b", "xaxab", true),
            ("*ü?", "aüß", true),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern:?} {text:?}");
        }
        // Backtracking that does not explode.
        assert!(!matches(&"*a".repeat(60), &"a".repeat(59)));
        assert!(!matches(&format!("{}b", "*a".repeat(40)), &"a".repeat(5000)));
    }
}
