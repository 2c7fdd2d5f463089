//! The header parser against the `safetensors` crate: for random headers, valid and damaged, both accept or both refuse,
//! and what both accept they describe alike. The one allowed difference is a name or key given twice, which only we refuse.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use penstock::checkpoint::Dtype;
use penstock::checkpoint::header::parse_object_prefix;
use proptest::prelude::*;
use proptest::sample::Index;
use safetensors::SafeTensors;

/// One tensor's entry in the header.
#[derive(Debug, Clone)]
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
    /// A further field, as JSON.
    extra: Option<&'static str>,
}

/// How a header is damaged before it is written: what it says is wrong.
#[derive(Debug, Clone)]
enum Lie {
    Drop(Index),
    /// The same name once more.
    Twice(Index, Index),
    /// The tensor and all behind it lie elsewhere.
    Shift(Index, i64),
    Swap(Index, Index),
    End(Index, i64),
    Dtype(Index, Dtype),
    Extent(Index, u64),
    Extra(Index, &'static str),
}

/// How its text is damaged: at places given as fractions of its length.
#[derive(Debug, Clone)]
enum Damage {
    Replace(Index, u8),
    Remove(Index, usize),
    Repeat(Index, usize),
    Truncate(Index),
    Append(usize),
    /// Puts another number in the place of one, or of its end.
    Number(Index, u64),
}

/// Values of a further field: what some readers can read and others cannot.
const EXTRAS: [&str; 9] = [
    "null",
    "[1,{\"a\":-2.5e3,\"a\":true}]",
    "1e999",
    "-0",
    "18446744073709551616",
    r#""\ud800""#,
    r#""\ud83e\udd80\u0000""#,
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",
    "[01]",
];

/// Tensors laid out one after the other, as a writer would; a tensor that ends within a byte is rounded down or up.
fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let name = prop_oneof!["[a-z.0-9]{1,12}", ".{0,4}", Just("__metadata".to_owned())];
    let shape = prop::collection::vec(prop_oneof![0u64..9, Just(16)], 0..4);
    let tensor = (name, prop::sample::select(Dtype::ALL.to_vec()), shape, 0u64..8);
    prop::collection::vec(tensor, 0..6).prop_map(|tensors| {
        let mut end = 0;
        let lay_out = |(name, dtype, shape, rounding): (String, Dtype, Vec<u64>, u64)| {
            let begin = end;
            end += (shape.iter().product::<u64>() * dtype.bits() + rounding) / 8;
            Entry { name, dtype, shape, begin, end, extra: None }
        };
        tensors.into_iter().map(lay_out).collect()
    })
}

fn lie() -> impl Strategy<Value = Lie> {
    let at = any::<Index>;
    let extent = prop_oneof![0u64..9, Just(1 << 32), Just(1 << 61), Just(u64::MAX / 2)];
    prop_oneof![
        at().prop_map(Lie::Drop),
        (at(), at()).prop_map(|(at, name)| Lie::Twice(at, name)),
        (at(), -9i64..9).prop_map(|(at, by)| Lie::Shift(at, by)),
        (at(), at()).prop_map(|(at, other)| Lie::Swap(at, other)),
        (at(), -9i64..9).prop_map(|(at, by)| Lie::End(at, by)),
        (at(), prop::sample::select(Dtype::ALL.to_vec())).prop_map(|(at, dtype)| Lie::Dtype(at, dtype)),
        (at(), extent).prop_map(|(at, extent)| Lie::Extent(at, extent)),
        (at(), prop::sample::select(EXTRAS.to_vec())).prop_map(|(at, extra)| Lie::Extra(at, extra)),
    ]
}

fn damage() -> impl Strategy<Value = Damage> {
    let byte = prop_oneof![any::<u8>(), prop::sample::select(b"{}[]\",:0123456789-e. \\u".to_vec())];
    let number = prop_oneof![0u64..20, Just(u64::MAX / 2), any::<u32>().prop_map(u64::from)];
    prop_oneof![
        (any::<Index>(), byte).prop_map(|(at, byte)| Damage::Replace(at, byte)),
        (any::<Index>(), 1..20usize).prop_map(|(at, count)| Damage::Remove(at, count)),
        (any::<Index>(), 1..80usize).prop_map(|(at, count)| Damage::Repeat(at, count)),
        any::<Index>().prop_map(Damage::Truncate),
        (1..20usize).prop_map(Damage::Append),
        (any::<Index>(), number).prop_map(|(at, number)| Damage::Number(at, number)),
    ]
}

fn tell(lie: &Lie, entries: &mut Vec<Entry>) {
    let count = entries.len();
    if count == 0 {
        return;
    }
    match *lie {
        Lie::Drop(at) => drop(entries.remove(at.index(count))),
        Lie::Twice(at, name) => entries[at.index(count)].name = entries[name.index(count)].name.clone(),
        Lie::Shift(at, by) => {
            for entry in &mut entries[at.index(count)..] {
                entry.begin = entry.begin.saturating_add_signed(by);
                entry.end = entry.end.saturating_add_signed(by);
            }
        }
        Lie::Swap(at, other) => {
            let (at, other) = (at.index(count), other.index(count));
            let offsets = (entries[at].begin, entries[at].end);
            (entries[at].begin, entries[at].end) = (entries[other].begin, entries[other].end);
            (entries[other].begin, entries[other].end) = offsets;
        }
        Lie::End(at, by) => {
            let entry = &mut entries[at.index(count)];
            entry.end = entry.end.saturating_add_signed(by);
        }
        Lie::Dtype(at, dtype) => entries[at.index(count)].dtype = dtype,
        Lie::Extent(at, extent) => entries[at.index(count)].shape.push(extent),
        Lie::Extra(at, extra) => entries[at.index(count)].extra = Some(extra),
    }
}

/// The header's text, its tensors listed from the `first`th on.
fn text(entries: &[Entry], first: Index, metadata: Option<&str>, padding: usize) -> String {
    let mut written: Vec<_> = entries
        .iter()
        .map(|Entry { name, dtype, shape, begin, end, extra }| {
            let name = serde_json::to_string(name).unwrap();
            let extra = extra.map(|json| format!(r#""extra":{json},"#)).unwrap_or_default();
            format!(r#"{name}:{{{extra}"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
        })
        .collect();
    if !written.is_empty() {
        let by = first.index(written.len());
        written.rotate_left(by);
    }
    if let Some(value) = metadata {
        written.insert(0, format!(r#""__metadata__":{value}"#));
    }
    format!("{{{}}}{:padding$}", written.join(","), "")
}

fn apply(damage: &Damage, text: &mut Vec<u8>, data: &mut u64) {
    match *damage {
        Damage::Replace(at, byte) => {
            let at = at.index(text.len());
            text[at] = byte;
        }
        Damage::Remove(at, count) => {
            let at = at.index(text.len());
            text.drain(at..text.len().min(at + count));
        }
        Damage::Repeat(at, count) => {
            let at = at.index(text.len());
            let again = text[at..text.len().min(at + count)].to_vec();
            text.splice(at..at, again);
        }
        Damage::Truncate(at) => *data = at.index(usize::try_from(*data).unwrap() + 1) as u64,
        Damage::Append(count) => *data += count as u64,
        Damage::Number(at, number) => {
            let digits: Vec<_> = (0..text.len()).filter(|i| text[*i].is_ascii_digit()).collect();
            if !digits.is_empty() {
                let start = digits[at.index(digits.len())];
                let end = (start..text.len()).find(|i| !text[*i].is_ascii_digit()).unwrap_or(text.len());
                text.splice(start..end, number.to_string().into_bytes());
            }
        }
    }
}

fn compare(text: &[u8], data: u64) -> Result<(), TestCaseError> {
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text);
    file.resize(file.len() + usize::try_from(data).unwrap(), 0);
    let ours = parse_object_prefix(&file, file.len() as u64);
    // safetensors may overflow, and panic in this build, on offsets of twenty digits.
    if file.split(|byte| !byte.is_ascii_digit()).any(|digits| digits.len() >= 20) {
        return Ok(());
    }
    match (ours, SafeTensors::read_metadata(&file)) {
        (Ok(ours), Ok((length, theirs))) => {
            prop_assert_eq!(ours.data_start, 8 + length as u64);
            prop_assert_eq!(ours.tensors.len(), theirs.tensors().len());
            for tensor in &ours.tensors {
                let other = theirs.info(&tensor.name).unwrap();
                let offsets = other.data_offsets.0 as u64..other.data_offsets.1 as u64;
                let shape: Vec<_> = other.shape.iter().map(|extent| *extent as u64).collect();
                prop_assert_eq!(tensor.dtype.name(), other.dtype.to_string());
                prop_assert_eq!((&tensor.shape, &tensor.range), (&shape, &offsets));
            }
            let metadata = theirs.metadata().clone().unwrap_or_default();
            prop_assert_eq!(ours.metadata, metadata.into_iter().collect());
        }
        (Err(ours), Ok(_)) => prop_assert!(ours.cause().contains(" twice"), "refused, but valid: {}", ours),
        (Ok(_), Err(theirs)) => prop_assert!(false, "accepted, but invalid: {}", theirs),
        (Err(_), Err(_)) => {}
    }
    Ok(())
}

const METADATA: [&str; 5] =
    ["null", "{}", r#"{"format":"pt","a":"b"}"#, r#"{"a":1}"#, r#"{"a":"1","a":"2"}"#];

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn same_verdict_and_same_tensors(
        mut entries in entries(),
        first in any::<Index>(),
        metadata in prop::option::of(prop::sample::select(METADATA.to_vec())),
        padding in 0usize..9,
        lies in prop::collection::vec(lie(), 0..3),
        damages in prop::collection::vec(damage(), 0..3),
    ) {
        lies.iter().for_each(|lie| tell(lie, &mut entries));
        let mut data = entries.iter().map(|entry| entry.end).max().unwrap_or(0).min(1 << 20);
        let mut text = text(&entries, first, metadata, padding).into_bytes();
        for damage in &damages {
            if !text.is_empty() {
                apply(damage, &mut text, &mut data);
            }
        }
        compare(&text, data)?;
    }
}
