//! Which servers are trusted: those with a certificate of the system's authorities, or of those that a variable names.
//!
//! `AWS_CA_BUNDLE` comes first for S3, as does `ca_bundle` in a profile of AWS. Then come OpenSSL's variables, and those of
//! Python's requests and of curl.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_native_certs::{CertificateResult, load_certs_from_paths};

use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::settings::address::Provider;
use crate::store::remote::settings::environment::Environment;

/// Certificates to trust instead of the system's: a file of them or a directory, and the setting that names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CaBundle {
    path: PathBuf,
    /// What names it, and how to do without it.
    setting: String,
    without: String,
}

/// What names certificates for every provider; the first that is set counts.
const VARIABLES: [&str; 4] = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_DIR"];

/// Where distributions keep the certificates of the system's authorities, all in one file.
const SYSTEM_FILES: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ssl/cert.pem",
];

/// The certificates that the environment names for a provider.
pub(crate) fn bundle(environment: &Environment, provider: Provider) -> Option<CaBundle> {
    let of_provider = (provider == Provider::S3).then_some("AWS_CA_BUNDLE");
    of_provider.into_iter().chain(VARIABLES).find_map(|variable| {
        Some(CaBundle {
            path: environment.get(&[variable])?.into(),
            setting: environment.setting(variable),
            without: environment.without(variable),
        })
    })
}

/// The settings of TLS with the certificates of `bundle`, else the system's.
pub(crate) fn tls(bundle: Option<&CaBundle>) -> Result<ClientConfig> {
    // (`load_native_certs` would read variables of the process.)
    let of_system = || SYSTEM_FILES.iter().map(Path::new).find(|path| path.exists());
    let found = bundle.map(|bundle| &*bundle.path).or_else(of_system).map(certificates).unwrap_or_default();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if let Some(bundle) = bundle.filter(|_| roots.is_empty()) {
        let why = found.errors.first().map(ToString::to_string);
        return Err(bundle.refused(why.as_deref().unwrap_or("it holds no certificate")));
    }
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map(|config| config.with_root_certificates(roots).with_no_client_auth())
        .map_err(|error| Error::new(ErrorKind::Config, format!("TLS could not be set up: {error}")))
}

impl CaBundle {
    /// That of a profile of AWS, in its `ca_bundle`.
    pub(crate) fn of_profile(path: String) -> Self {
        let setting = "ca_bundle".to_owned();
        Self { path: path.into(), without: format!("take {setting} out of the profile"), setting }
    }

    fn refused(&self, cause: &str) -> Error {
        let Self { path, setting, without } = self;
        Error::new(ErrorKind::Config, format!("{setting}={}: {cause}", path.display()))
            .remedy(format!("Give the path of a PEM file of certificates, or {without}"))
    }
}

/// The certificates of a file or a directory.
fn certificates(path: &Path) -> CertificateResult {
    let (file, directory) = if path.is_dir() { (None, Some(path)) } else { (Some(path), None) };
    load_certs_from_paths(file, directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_is_the_one_of_the_provider_else_that_of_all() {
        let environment = Environment::of([("AWS_CA_BUNDLE", "/a"), ("CURL_CA_BUNDLE", "/c")]);
        let named = |provider| bundle(&environment, provider).map(|bundle| bundle.setting);
        assert_eq!(named(Provider::S3), Some("AWS_CA_BUNDLE".into()));
        assert_eq!(named(Provider::Gcs), Some("CURL_CA_BUNDLE".into()));
        assert_eq!(bundle(&Environment::of([("AWS_CA_BUNDLE", "/a")]), Provider::Web), None);
        let system = Environment::of([("SSL_CERT_FILE", "/s"), ("CURL_CA_BUNDLE", "/c")]);
        assert_eq!(bundle(&system, Provider::S3).unwrap().path, Path::new("/s"));
        let directory = Environment::of([("SSL_CERT_DIR", "/d"), ("AWS_CA_BUNDLE", "/a")]);
        assert_eq!(bundle(&directory, Provider::Gcs).unwrap().path, Path::new("/d"));
    }

    #[test]
    fn a_bundle_that_cannot_be_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let empty = directory.path().join("empty.pem");
        std::fs::write(&empty, "").unwrap();
        for path in [directory.path().join("none.pem"), empty, directory.path().to_owned()] {
            let path = path.to_str().unwrap();
            let set = Environment::of([("REQUESTS_CA_BUNDLE", path)]);
            let error = tls(bundle(&set, Provider::S3).as_ref()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains("REQUESTS_CA_BUNDLE="), "{error}");
            assert!(error.remedy_text().unwrap().ends_with("or unset REQUESTS_CA_BUNDLE"), "{error}");
            let option = ("AWS_CA_BUNDLE".to_owned(), path.to_owned(), "ca_bundle".to_owned());
            let given = Environment::default().overlaid(&[], vec![option]);
            let error = tls(bundle(&given, Provider::S3).as_ref()).unwrap_err();
            assert!(error.to_string().contains("storage_options[\"ca_bundle\"]="), "{error}");
            assert!(
                error.remedy_text().unwrap().ends_with("or leave out storage_options[\"ca_bundle\"]"),
                "{error}"
            );
        }
    }
}
