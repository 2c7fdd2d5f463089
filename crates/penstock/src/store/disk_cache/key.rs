//! Which version of which object an entry is of.
//!
//! An ETag tells versions of *one* resource apart (RFC 9110, 8.8.3), so the key holds everything that says which resource
//! it is: the endpoint and the account that serve the location, and of a URL's query all but the parameters of known
//! signatures, which differ from day to day. A weak ETag names no bytes, only a meaning; a date names them once a minute
//! has passed, since a second write within the same second has the same date.
//!
//! The label is written to disk. What of a location may be secret is in it as a SHA-256 only, which does not lead back.

use std::borrow::Cow;

use crate::store::block_map::checksum;
use crate::store::location::fingerprint;
use crate::store::{Identity, RemoteStore, is_http};

/// What names one version of one object on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    /// The directory of the entry: a digest of all the rest.
    pub(super) name: String,
    /// Where the object is, without secrets, and the version: compared in full, since digests can be equal by chance.
    pub(super) label: String,
    pub(super) identity: Identity,
    pub(super) bytes: u64,
}

impl Key {
    /// The key of a version.
    ///
    /// # Errors
    /// Why there is none: nothing names the version, so that another could be taken for it.
    pub(super) fn of(
        store: &RemoteStore,
        location: &str,
        identity: &Identity,
    ) -> Result<Self, Cow<'static, str>> {
        let bytes = RemoteStore::bytes_of_named(identity)?;
        let resource = store.resource(location).map_err(|error| error.cause().to_owned())?;
        let mut label = format!("{resource}\n{}", identity.0);
        // Unknown parameters may be secret too.
        if let Some(query) = lasting_query(location) {
            label.push_str(&format!("\n{}", fingerprint(&query)));
        }
        let name = format!("{:016x}", checksum(label.as_bytes()));
        Ok(Self { name, label, identity: identity.clone(), bytes })
    }
}

/// The query of an HTTP URL without the parameters of signatures; `None` where nothing else is in it.
fn lasting_query(location: &str) -> Option<String> {
    let (_, query) = location.split('#').next()?.split_once('?').filter(|_| is_http(location))?;
    let names: Vec<_> = query.split('&').map(name_of).collect();
    let lasting = query.split('&').zip(&names).filter(|(_, name)| !is_of_signature(name, &names));
    let lasting: Vec<_> = lasting.map(|(parameter, _)| parameter).filter(|text| !text.is_empty()).collect();
    (!lasting.is_empty()).then(|| lasting.join("&"))
}

fn name_of(parameter: &str) -> String {
    let name = parameter.split('=').next().unwrap_or(parameter);
    percent_encoding::percent_decode_str(name).decode_utf8_lossy().to_ascii_lowercase()
}

/// Whether a parameter belongs to a signature, among parameters of these names. All names are in lower case.
fn is_of_signature(name: &str, all: &[String]) -> bool {
    /// Of S3 (version 2), Google Cloud Storage (version 2) and CloudFront.
    const SIGNED: [&str; 7] = [
        "signature",
        "expires",
        "awsaccesskeyid",
        "googleaccessid",
        "policy",
        "key-pair-id",
        "hash-algorithm",
    ];
    /// Of Azure's shared access signatures; `rscc` and the like set headers of the answer.
    const SHARED_ACCESS: [&str; 27] = [
        "sig", "sv", "ss", "srt", "sr", "st", "se", "sp", "sip", "spr", "si", "ses", "sdd", "skoid", "sktid",
        "skt", "ske", "sks", "skv", "saoid", "suoid", "scid", "rscc", "rscd", "rsce", "rscl", "rsct",
    ];
    let has = |wanted: &str| all.iter().any(|name| name == wanted);
    // Short names mean something else where nothing is signed.
    name.starts_with("x-amz-")
        || name.starts_with("x-goog-")
        || (has("signature") && SIGNED.contains(&name))
        || (has("sig") && SHARED_ACCESS.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Environment, RetryPolicy};

    const DAY: &str = "2020-11-21 06:47:41";
    const NONE: &str = "1970-01-01 00:00:00";

    fn identity(tag: &str, date: &str) -> Identity {
        Identity(format!("12\n{tag}\n\n{date} UTC"))
    }

    /// A key in an environment with credentials and these variables.
    fn key(
        variables: &[(&str, &str)],
        location: &str,
        tag: &str,
        date: &str,
    ) -> Result<Key, Cow<'static, str>> {
        let common = [
            ("AWS_SKIP_SIGNATURE", "true"),
            ("GOOGLE_SKIP_SIGNATURE", "true"),
            ("AZURE_SKIP_SIGNATURE", "true"),
            ("AZURE_STORAGE_ACCOUNT", "acc"),
        ];
        let all = common.into_iter().filter(|(name, _)| variables.iter().all(|(other, _)| other != name));
        let environment = Environment::of(all.chain(variables.iter().copied()));
        Key::of(&RemoteStore::new(environment, RetryPolicy::default()), location, &identity(tag, date))
    }

    fn same(one: &str, other: &str) -> bool {
        key(&[], one, "\"t\"", DAY).unwrap() == key(&[], other, "\"t\"", DAY).unwrap()
    }

    #[test]
    fn a_key_is_of_one_version_and_holds_no_secret() {
        let of = |location: &str, tag: &str, date: &str| key(&[], location, tag, date);
        let one = of("https://me:SECRET@h/a?id=SECRET&sig=SECRET", "\"t\"", DAY).unwrap();
        assert!(!one.label.contains("SECRET") && one.bytes == 12);
        // Nor a number that it can be computed from, as a CRC is.
        assert!(!one.label.contains(&format!("{:016x}", checksum(b"id=SECRET"))));
        assert!(one.label.ends_with(&format!("\n{}", fingerprint("id=SECRET"))), "{}", one.label);
        assert_ne!(
            of("https://h/a", "\"u\"", DAY).unwrap().name,
            of("https://h/a", "\"t\"", DAY).unwrap().name
        );
        assert!(!same("https://h/a", "https://h/b"));
        // Keys are taken to the letter.
        assert!(!same("s3://b/a?id=1", "s3://b/a?id=2"));
        assert!(!same("gs://b/a#1", "gs://b/a#2"));
        // An unchanged file of a repository is the same in the next commit.
        let commit = "0123456789012345678901234567890123456789";
        assert_eq!(
            of("hf://o/n/a", "\"t\"", NONE),
            of(&format!("hf://models/o/n@{commit}/a"), "\"t\"", NONE)
        );
        assert!(Key::of(&RemoteStore::default(), "https://h/a", &Identity("nonsense".into())).is_err());
    }

    #[test]
    fn a_signature_is_no_part_of_a_key_and_the_rest_of_a_query_is() {
        for (one, other) in [
            ("https://h/a?sig=1&se=2026&sv=1", "https://h/a?sv=2&sig=2"),
            ("https://h/a?X-Amz-Signature=1&X-Amz-Date=1", "https://h/a"),
            ("https://h/a?X-Goog-Signature=1&x-goog-date=1&id=1", "https://h/a?id=1"),
            ("https://h/a?AWSAccessKeyId=1&Expires=1&Signature=1", "https://h/a"),
            ("https://h/a?Policy=1&Key-Pair-Id=1&Signature=1#x", "https://h/a?"),
            ("https://me:one@h/a", "https://me:two@h/a"),
            ("http://me:one@h:9000/m%40v1/x", "http://me:two@h:9000/m%40v1/x"),
            (
                "https://acc.blob.core.windows.net/c/a?sig=1&sp=r",
                "https://acc.blob.core.windows.net/c/a?sig=2",
            ),
        ] {
            assert!(same(one, other), "{one} {other}");
        }
        for (one, other) in [
            ("https://h/a?id=1", "https://h/a?id=2"),
            ("https://alice:x@h/a", "https://bob:x@h/a"),
            ("https://alice:x@h/a", "https://h/a"),
            ("http://h:9000/m%40v1/x", "http://h:9001/m%40v1/x"),
            ("http://h:9000/m%40v1/x", "http://h:9000/n%40v1/x"),
            ("https://h/a?id=1&sig=1", "https://h/a?id=2&sig=1"),
            // Without a signature, these mean something.
            ("https://h/a?sv=1", "https://h/a?sv=2"),
            ("https://h/a?policy=1", "https://h/a?policy=2"),
            ("https://h/a?versionId=1&X-Amz-Date=1", "https://h/a?versionId=2&X-Amz-Date=1"),
        ] {
            assert!(!same(one, other), "{one} {other}");
        }
    }

    #[test]
    fn endpoints_and_accounts_are_part_of_a_key() {
        type Variables = &'static [(&'static str, &'static str)];
        let cases: [(&str, &[Variables]); 4] = [
            (
                "s3://b/a",
                &[
                    &[],
                    &[("AWS_REGION", "cn-north-1")],
                    &[("AWS_ENDPOINT_URL", "http://dev:9000")],
                    &[("AWS_ENDPOINT_URL_S3", "http://prod:9000")],
                    &[("AWS_ENDPOINT_URL", "http://dev:9001")],
                ],
            ),
            (
                "az://c/a",
                &[
                    &[],
                    &[("AZURE_STORAGE_ACCOUNT", "other")],
                    &[("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")],
                    &[("AZURE_STORAGE_CONNECTION_STRING", "AccountName=acc;BlobEndpoint=http://h:1/acc")],
                    &[("AZURE_STORAGE_ENDPOINT", "https://acc.blob.core.usgovcloudapi.net")],
                ],
            ),
            ("gs://b/a", &[&[], &[("STORAGE_EMULATOR_HOST", "h:1")], &[("STORAGE_EMULATOR_HOST", "h:2")]]),
            (
                "hf://o/n/a",
                &[&[], &[("HF_ENDPOINT", "https://mirror")], &[("HF_ENDPOINT", "https://mirror/2")]],
            ),
        ];
        for (location, environments) in cases {
            let keys: Vec<_> = environments
                .iter()
                .map(|variables| key(variables, location, "\"t\"", DAY).unwrap().label)
                .collect();
            for (number, one) in keys.iter().enumerate() {
                assert!(!keys[..number].contains(one), "{location}: {one}");
            }
        }
        // The same store, said otherwise.
        let of = |variables: &[(&str, &str)], location: &str| key(variables, location, "\"t\"", DAY).unwrap();
        assert_eq!(of(&[("AWS_REGION", "eu-west-1")], "s3://b/a"), of(&[], "s3://b/a"));
        assert_eq!(
            of(&[("AWS_ENDPOINT_URL", "http://u:SECRET@dev:9000/")], "s3://b/a"),
            of(&[("AWS_ENDPOINT_URL_S3", "http://DEV:9000")], "s3://b/a")
        );
        assert_eq!(of(&[("HF_ENDPOINT", "https://huggingface.co/")], "hf://o/n/a"), of(&[], "hf://o/n/a"));
    }

    #[test]
    fn weak_tags_and_fresh_dates_name_no_version() {
        // A date in the future is fresh too: the clocks of two machines differ.
        let now = "2999-01-01 00:00:00";
        for (tag, date, named) in [
            ("W/\"t\"", NONE, false),
            ("", NONE, false),
            ("", now, false),
            ("W/\"t\"", now, false),
            ("\"t\"", now, true),
            ("\"t\"", NONE, true),
            ("", DAY, true),
            ("W/\"t\"", DAY, true),
        ] {
            assert_eq!(key(&[], "https://h/a", tag, date).is_ok(), named, "{tag} {date}");
        }
    }
}
