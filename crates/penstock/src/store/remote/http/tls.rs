//! Which servers are trusted: those with a certificate of the system's authorities, or of those that a variable names.
//!
//! `AWS_CA_BUNDLE` comes first for S3, as does `ca_bundle` in a profile of AWS. Then come OpenSSL's variables, of which both
//! may be set, and those of Python's requests and of curl.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_native_certs::{CertificateResult, load_certs_from_paths};

use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::settings::address::Provider;
use crate::store::remote::settings::environment::Environment;

/// Certificates to trust instead of the system's: files of them and directories, and the setting that names them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CaBundle {
    paths: Vec<PathBuf>,
    /// What names them, what it says, and how to do without it.
    setting: String,
    value: String,
    without: String,
}

/// What names certificates for every provider; the first that is set counts.
const VARIABLES: [&str; 4] = [FILE, "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", DIRECTORIES];
/// OpenSSL's variables: a file, and directories with colons between them. Both count where both are set.
const FILE: &str = "SSL_CERT_FILE";
const DIRECTORIES: &str = "SSL_CERT_DIR";

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
    let (variable, value) = of_provider
        .into_iter()
        .chain(VARIABLES)
        .find_map(|variable| Some((variable, environment.get(&[variable])?)))?;
    let mut paths = if variable == DIRECTORIES { Vec::new() } else { vec![value.into()] };
    if let Some(directories) = environment.get(&[DIRECTORIES])
        && [FILE, DIRECTORIES].contains(&variable)
    {
        paths.extend(std::env::split_paths(directories).filter(|path| !path.as_os_str().is_empty()));
    }
    let (setting, without) = (environment.setting(variable), environment.without(variable));
    Some(CaBundle { paths, setting, value: value.to_owned(), without })
}

/// Where the certificates are that are trusted: those of `bundle`, else the system's.
pub(crate) fn trusted(bundle: Option<&CaBundle>) -> Vec<PathBuf> {
    // (`load_native_certs` would read variables of the process.)
    let of_system = || SYSTEM_FILES.iter().map(PathBuf::from).find(|path| path.exists());
    bundle.map_or_else(|| of_system().into_iter().collect(), |bundle| bundle.paths.clone())
}

/// The settings of TLS with the certificates of `bundle`, else the system's.
pub(crate) fn tls(bundle: Option<&CaBundle>) -> Result<ClientConfig> {
    let found: Vec<_> = trusted(bundle).iter().map(|path| certificates(path)).collect();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.iter().flat_map(|found| found.certs.iter().cloned()));
    if let Some(bundle) = bundle.filter(|_| roots.is_empty()) {
        let why = found.iter().find_map(|found| found.errors.first()).map(ToString::to_string);
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
        let without = format!("take {setting} out of the profile");
        Self { paths: vec![PathBuf::from(&path)], setting, value: path, without }
    }

    fn refused(&self, cause: &str) -> Error {
        let Self { setting, value, without, .. } = self;
        Error::new(ErrorKind::Config, format!("{setting}={value}: {cause}"))
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
        assert_eq!(bundle(&system, Provider::S3).unwrap().paths, [Path::new("/s")]);
        let directory = Environment::of([("SSL_CERT_DIR", "/d"), ("AWS_CA_BUNDLE", "/a")]);
        assert_eq!(bundle(&directory, Provider::Gcs).unwrap().paths, [Path::new("/d")]);
        assert_eq!(bundle(&directory, Provider::S3).unwrap().paths, [Path::new("/a")]);
    }

    #[test]
    fn openssls_directories_count_beside_its_file() {
        let paths = |variables: &[(&str, &str)]| {
            bundle(&Environment::of(variables.iter().copied()), Provider::Web).unwrap().paths
        };
        let directories = ("SSL_CERT_DIR", "/d:/e::");
        assert_eq!(paths(&[directories]), [Path::new("/d"), Path::new("/e")]);
        let both = paths(&[directories, ("SSL_CERT_FILE", "/s:1")]);
        assert_eq!(both, [Path::new("/s:1"), Path::new("/d"), Path::new("/e")]);
        assert_eq!(paths(&[directories, ("CURL_CA_BUNDLE", "/c")]), [Path::new("/c")]);
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
