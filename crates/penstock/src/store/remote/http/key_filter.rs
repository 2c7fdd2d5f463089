//! Keys that `object_store` cannot hold, taken out of listings before it sees them.
//!
//! It refuses keys with empty parts, `.`, `..` or control characters, and with one of them the whole listing; and of a
//! key that begins with a slash it makes another one. A single such object, which any upload with a slash too many makes,
//! must not hide thousands of others. So whoever lists does it under [`KeyFilter::watch`]: the transport shows the filter
//! every page, which passes on what can be held and keeps the rest by name.
//!
//! Pages are XML, and S3's, Google's and Azure's differ in what elements are called. They are cut at those elements, not
//! parsed: markup cannot be part of a key, and what is left goes through `object_store`'s parser as ever.

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use object_store::path::Path;

use super::response_recorder::element;

/// Elements of a page that stand for an object or for a prefix, and the one in them that names it.
const ENTRIES: [(&str, &str, ElementKind); 4] = [
    ("Contents", "Key", ElementKind::Object),
    ("CommonPrefixes", "Prefix", ElementKind::Prefix),
    ("Blob", "Name", ElementKind::Object),
    ("BlobPrefix", "Name", ElementKind::Prefix),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ElementKind {
    Object,
    Prefix,
}

/// What was taken out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Odd {
    /// Keys and sizes.
    pub(crate) objects: Vec<(String, u64)>,
    /// What has objects below it, with a slash at its end.
    pub(crate) prefixes: Vec<String>,
}

tokio::task_local! {
    static FILTER: KeyFilter;
}

/// What a listing holds that `object_store` cannot.
#[derive(Clone, Default)]
pub(crate) struct KeyFilter {
    odd: Arc<Mutex<Odd>>,
    /// The queries of the pages so far.
    asked: Arc<Mutex<HashSet<String>>>,
}

impl KeyFilter {
    /// Runs `work`, whose listings go through a filter; returns what that kept.
    pub(crate) async fn watch<T>(work: impl Future<Output = T>) -> (T, Odd) {
        let key_filter = Self::default();
        let done = FILTER.scope(key_filter.clone(), work).await;
        let odd = std::mem::take(&mut *key_filter.odd.lock().unwrap_or_else(PoisonError::into_inner));
        (done, odd)
    }

    /// The filter that an answer to this query goes through: none, unless it is a page of a listing that someone watches.
    pub(crate) fn of(query: Option<&str>) -> Option<Self> {
        let is_page = |query: &str| query.split('&').any(|part| part == "list-type=2" || part == "comp=list");
        FILTER.try_with(Self::clone).ok().filter(|_| query.is_some_and(is_page))
    }

    /// Whether this page was not asked for before: a server whose continuation tokens repeat would be followed for ever.
    pub(crate) fn is_new(&self, query: Option<&str>) -> bool {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.insert(query.unwrap_or_default().to_owned())
    }

    /// The page without what cannot be held.
    pub(crate) fn filter_page(&self, page: Bytes) -> Bytes {
        let Ok(text) = std::str::from_utf8(&page) else { return page };
        let mut odd = self.odd.lock().unwrap_or_else(PoisonError::into_inner);
        let mut filtered = String::new();
        let (mut at, mut kept) = (0, 0);
        while let Some((begin, end, name, kind)) = next(text, at) {
            at = end;
            let entry = &text[begin..end];
            let Some(key) = element(entry.as_bytes(), name).filter(|key| !can_be_held(key)) else { continue };
            filtered.push_str(&text[kept..begin]);
            kept = end;
            let size = || ["Size", "Content-Length"].iter().find_map(|size| element(entry.as_bytes(), size));
            match kind {
                ElementKind::Object => {
                    let size = size().and_then(|size| size.parse().ok()).unwrap_or_default();
                    odd.objects.push((key, size));
                }
                ElementKind::Prefix => odd.prefixes.push(key),
            }
        }
        if kept == 0 {
            return page;
        }
        filtered.push_str(&text[kept..]);
        filtered.into()
    }
}

/// The next entry from `at` on: where it begins and ends, which element names it, and what it is.
fn next(text: &str, at: usize) -> Option<(usize, usize, &'static str, ElementKind)> {
    let mut from = at;
    loop {
        let begin = from + text[from..].find('<')?;
        let tag = &text[begin + 1..];
        let found = ENTRIES
            .iter()
            .find(|(entry, ..)| tag.strip_prefix(entry).is_some_and(|rest| rest.starts_with('>')));
        if let Some((entry, name, kind)) = found {
            let close = format!("</{entry}>");
            let end = begin + text[begin..].find(&close)? + close.len();
            return Some((begin, end, name, *kind));
        }
        from = begin + 1;
    }
}

/// Whether `object_store` makes of a key what it is. A slash at the end is that of a directory's marker.
fn can_be_held(key: &str) -> bool {
    Path::parse(key).is_ok_and(|path| path.as_ref() == key.strip_suffix('/').unwrap_or(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filtered(page: &str) -> (String, Odd) {
        let key_filter = KeyFilter::default();
        let left = key_filter.filter_page(Bytes::from(page.to_owned()));
        let odd = std::mem::take(&mut *key_filter.odd.lock().unwrap());
        (String::from_utf8(left.to_vec()).unwrap(), odd)
    }

    #[test]
    fn keys_that_cannot_be_held_are_kept_by_name_and_the_rest_passes() {
        let s3 = |key: &str| format!("<Contents><Key>{key}</Key><Size>7</Size></Contents>");
        let odd = ["p//x", "/p/x", "p/../x", "p/./x", "p/&#10;x", "p&#x2F;/&lt;x&amp;y&gt;"];
        let plain = ["p/x", "p/x/", "p/&lt;Contents&gt;", "p/a b", "p/..."];
        let prefixes = "<CommonPrefixes><Prefix>p//</Prefix></CommonPrefixes>\
                        <CommonPrefixes><Prefix>p/q/</Prefix></CommonPrefixes>";
        let head = "<?xml version=\"1.0\"?>\n<ListBucketResult><Prefix>p//</Prefix>";
        let page =
            format!("{head}{}{}{prefixes}</ListBucketResult>", odd.map(s3).concat(), plain.map(s3).concat());
        let (left, kept) = filtered(&page);
        let of_q = "<CommonPrefixes><Prefix>p/q/</Prefix></CommonPrefixes>";
        assert_eq!(left, format!("{head}{}{of_q}</ListBucketResult>", plain.map(s3).concat()));
        let names = ["p//x", "/p/x", "p/../x", "p/./x", "p/\nx", "p//<x&y>"];
        assert_eq!(kept.objects, names.map(|name| (name.to_owned(), 7)));
        assert_eq!(kept.prefixes, ["p//"]);
    }

    #[test]
    fn azures_pages_are_filtered_too() {
        let blob = |name: &str| {
            format!(
                "<Blob><Name>{name}</Name><Properties><Content-Length>9</Content-Length></Properties></Blob>"
            )
        };
        let prefix = |name: &str| format!("<BlobPrefix><Name>{name}</Name></BlobPrefix>");
        let page = |entries: &[String]| format!("\u{feff}<Blobs>{}</Blobs>", entries.concat());
        let (left, odd) = filtered(&page(&[blob("a//b"), blob("a/b"), prefix("a//"), prefix("a/c/")]));
        assert_eq!(left, page(&[blob("a/b"), prefix("a/c/")]));
        assert_eq!((odd.objects, odd.prefixes), (vec![("a//b".to_owned(), 9)], vec!["a//".to_owned()]));
    }

    #[test]
    fn what_is_no_page_is_left_alone() {
        for text in
            ["", "<", "<Contents>", "<Contents><Key>a//b</Key>", "<Contents></Contents>", "{}", "ü<Blob"]
        {
            assert_eq!(filtered(text), (text.to_owned(), Odd::default()));
        }
        assert!(KeyFilter::of(Some("list-type=2")).is_none(), "nobody watches");
    }

    #[test]
    fn only_pages_of_listings_go_through_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (found, _) = runtime.block_on(KeyFilter::watch(async {
            [
                Some("prefix=a%2F&list-type=2"),
                Some("restype=container&comp=list"),
                Some("x=list-type=2"),
                None,
            ]
            .map(|query| KeyFilter::of(query).is_some())
        }));
        assert_eq!(found, [true, true, false, false]);
    }
}
