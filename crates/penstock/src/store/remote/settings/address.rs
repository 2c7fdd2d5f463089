//! Locations taken apart: which store, which bucket, which key.
//!
//! What a person types is kept apart from what may be shown: user names, passwords and query strings (which carry
//! signatures) are part of the address but never of [`Address::shown`].

use crate::error::{Error, ErrorKind, Result};
use crate::store::location::{HIDDEN, provider};

pub(crate) use crate::store::location::Provider;

/// What to do about a URL that is none.
pub(crate) const ESCAPE: &str = "Write https://host/path or https://host:port/path; what is special in a user and a password is \
                                 escaped (%2F for /, %3F for ?, %23 for #, %40 for @)";

/// Why a location is refused whose bucket can have no such name.
pub(crate) const NO_BUCKET: &str = "no bucket is called like this";

impl Provider {
    /// As errors call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::S3 => "S3",
            Self::Gcs => "Google Cloud Storage",
            Self::Azure => "Azure Blob Storage",
            Self::Web => "the HTTP server",
            Self::Hub => "the Hugging Face hub",
        }
    }
}

/// A location, taken apart. It has no `Debug` form: its parts may be secret.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) provider: Provider,
    /// The bucket or container; empty for a plain HTTP server.
    pub(crate) bucket: String,
    /// Azure: the storage account and the host that serves it, where the location says.
    pub(crate) account: Option<(String, String)>,
    /// The object's key, or the prefix of keys, without a slash at its end. For a plain HTTP server: empty.
    pub(crate) key: String,
    /// What comes before the key in the location, user name and password included.
    root: String,
    /// The query string, with its question mark, or nothing. HTTP only.
    pub(crate) query: String,
}

impl Address {
    /// Takes `location` apart.
    ///
    /// # Errors
    /// `NotFound` where the scheme is not one of ours or the location names no bucket.
    pub(crate) fn parse(location: &str) -> Result<Self> {
        let refuse = |cause: &str, remedy: &'static str| {
            Error::new(ErrorKind::NotFound, cause.to_owned()).object(shown(location)).remedy(remedy)
        };
        let Some((scheme, rest)) = location.split_once("://") else {
            return Err(refuse("this is not a URL", "Write scheme://…"));
        };
        let bucket_and_key = |rest: &str| {
            let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
            (bucket.to_owned(), key.trim_end_matches('/').to_owned())
        };
        let made = |provider, account, (bucket, key): (String, String)| {
            let end = location.len() - rest.len();
            let root = match rest.find('/') {
                Some(at) => location[..=end + at].to_owned(),
                None => format!("{location}/"),
            };
            Self { provider, bucket, account, key, root, query: String::new() }
        };
        let address = match provider(location) {
            Some(Provider::S3) => made(Provider::S3, None, bucket_and_key(rest)),
            Some(Provider::Gcs) => made(Provider::Gcs, None, bucket_and_key(rest)),
            Some(Provider::Azure) => {
                let (authority, key) = bucket_and_key(rest);
                match authority.rsplit_once('@') {
                    Some((_, host)) if !is_azure(host) => {
                        // Or a location could have tokens of this machine's identity sent to whomever it names.
                        return Err(refuse(
                            "its host is none of Azure's storage",
                            "Write az://container/key, and set AZURE_STORAGE_CONNECTION_STRING with the host as its \
                             BlobEndpoint",
                        ));
                    }
                    Some((container, host)) => {
                        let account = (account_of(host), host.replacen(".dfs.", ".blob.", 1));
                        made(Provider::Azure, Some(account), (container.to_owned(), key))
                    }
                    None => made(Provider::Azure, None, (authority, key)),
                }
            }
            Some(Provider::Web) => return Self::parse_http(location, rest),
            Some(Provider::Hub) | None => {
                return Err(refuse(
                    &format!("{scheme}:// locations are not supported"),
                    "Penstock reads paths of this machine and s3://, gs://, az://, abfss://, hf://, http:// and \
                     https:// locations",
                ));
            }
        };
        if address.bucket.is_empty() {
            return Err(refuse("the location names no bucket", "Write scheme://bucket/key"));
        }
        if address.bucket.contains(['@', ':']) {
            return Err(refuse(
                NO_BUCKET,
                "Write scheme://bucket/key: the host of a server goes to storage_options or AWS_ENDPOINT_URL_S3, \
                 credentials to storage_options or to the environment; an access point is named by its alias",
            ));
        }
        Ok(address)
    }

    fn parse_http(location: &str, rest: &str) -> Result<Self> {
        let plain = location.split('#').next().unwrap_or(location);
        let (plain, query) = plain.split_at(plain.find('?').unwrap_or(plain.len()));
        let host = rest.split(['/', '?', '#']).next().unwrap_or(rest);
        // Of a password that is not escaped, a part would be taken for a host and asked for.
        let is_doubtful = shown(location).contains(HIDDEN);
        // Requests are made of what both take for a URL.
        let is_url = match url::Url::parse(location) {
            Ok(url) => url.as_str().parse::<http::Uri>().is_ok(),
            Err(error) => error == url::ParseError::EmptyHost,
        };
        if is_doubtful || !is_url {
            return Err(Error::new(ErrorKind::NotFound, "this is not a URL")
                .object(shown(location))
                .remedy(ESCAPE));
        }
        if host.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "the URL names no host")
                .object(shown(location))
                .remedy("Write https://host/path"));
        }
        Ok(Self {
            provider: Provider::Web,
            bucket: String::new(),
            account: None,
            key: String::new(),
            // Which the rules of URLs would take for a slash.
            root: plain.replace('\\', "%5C"),
            query: query.to_owned(),
        })
    }

    /// The location of another key of the same bucket, in the form that this one was given in.
    pub(crate) fn with_key(&self, key: &str) -> String {
        format!("{}{key}{}", self.root, self.query)
    }

    /// For a plain HTTP server: the whole URL.
    pub(crate) fn url(&self) -> String {
        format!("{}{}", self.root, self.query)
    }

    /// For a plain HTTP server: whether the URL names a user.
    pub(crate) fn has_user(&self) -> bool {
        self.root.split('/').nth(2).is_some_and(|host| host.contains('@'))
    }

    /// The location without what may be secret.
    pub(crate) fn shown(&self) -> String {
        shown(&self.with_key(&self.key))
    }
}

/// Whether a host is an account of Azure's storage, in one of its clouds, so that credentials may be sent there.
fn is_azure(host: &str) -> bool {
    const CLOUDS: [&str; 4] =
        [".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net", ".storage.azure.net"];
    let host = host.to_ascii_lowercase();
    let host = host.strip_suffix(":443").unwrap_or(&host);
    CLOUDS.iter().filter_map(|cloud| host.strip_suffix(cloud)).any(|account| {
        let valid = account.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte));
        valid && (account.contains(".blob") || account.contains(".dfs"))
    })
}

fn account_of(host: &str) -> String {
    host.split('.').next().unwrap_or(host).to_owned()
}

/// A location without user name, password, query and fragment.
pub(crate) fn shown(location: &str) -> String {
    crate::store::shown(location).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(location: &str) -> (Provider, String, String) {
        let address = Address::parse(location).unwrap();
        (address.provider, address.bucket, address.key)
    }

    #[test]
    fn every_scheme_names_its_store_bucket_and_key() {
        let expect = |provider, bucket: &str, key: &str| (provider, bucket.to_owned(), key.to_owned());
        assert_eq!(parts("s3://b/a/m.safetensors"), expect(Provider::S3, "b", "a/m.safetensors"));
        assert_eq!(parts("S3A://b"), expect(Provider::S3, "b", ""));
        assert_eq!(parts("s3://b/what?#100%/"), expect(Provider::S3, "b", "what?#100%"));
        assert_eq!(parts("gs://b/a/"), expect(Provider::Gcs, "b", "a"));
        assert_eq!(parts("az://c/a"), expect(Provider::Azure, "c", "a"));
        assert_eq!(parts("abfss://c@acc.dfs.core.windows.net/a/b"), expect(Provider::Azure, "c", "a/b"));
        assert_eq!(parts("https://acc.blob.core.windows.net/c/a%20b?sig=x"), expect(Provider::Web, "", ""));
        assert_eq!(parts("https://host:1/x?y"), expect(Provider::Web, "", ""));
        assert_eq!(Address::parse("https://host/a\\b?c\\d").unwrap().url(), "https://host/a%5Cb?c\\d");
    }

    #[test]
    fn credentials_of_azure_go_to_azure_only() {
        for host in
            ["acc.blob.core.evil.example", "acc.blob.core.windows.net.evil.example", "localhost:1", ""]
        {
            let error = Address::parse(&format!("abfss://c@{host}/a")).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{host}");
        }
        assert_eq!(parts("abfss://c@acc.z21.blob.storage.azure.net/a").0, Provider::Azure);
        assert_eq!(parts("abfss://c@acc.blob.core.usgovcloudapi.net/a").0, Provider::Azure);
    }

    #[test]
    fn an_account_is_taken_from_the_host() {
        let account = |location| Address::parse(location).unwrap().account.unwrap();
        let expect = ("acc".to_owned(), "acc.blob.core.windows.net".to_owned());
        assert_eq!(account("abfss://c@acc.dfs.core.windows.net/a"), expect);
        assert_eq!(account("abfss://c@acc.blob.core.windows.net/a"), expect);
    }

    #[test]
    fn other_keys_are_named_as_the_first_one_was() {
        let other = |location: &str, key| Address::parse(location).unwrap().with_key(key);
        assert_eq!(other("s3://b/a/x", "a/y z"), "s3://b/a/y z");
        assert_eq!(other("gs://b", "y"), "gs://b/y");
    }

    #[test]
    fn what_is_secret_is_not_shown() {
        for location in [
            "https://me:SECRET@host/a.safetensors?token=SECRET#SECRET",
            "https://acc.blob.core.windows.net/c/a?sig=SECRET",
        ] {
            assert!(!Address::parse(location).unwrap().shown().contains("SECRET"), "{location}");
        }
        for location in [
            "ftp://me:SECRET@host/x?SECRET",
            "https://",
            "s3:///x?sig=SECRET",
            "s3://arn:aws:s3:::bucket/x?X-Amz-Signature=SECRET",
        ] {
            let error = Address::parse(location).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::NotFound);
            assert!(!error.to_string().contains("SECRET"), "{error}");
        }
    }
}
