//! Which servers are trusted: those with a certificate of the system's authorities, or of those that a variable names.
//!
//! The system's are found where OpenSSL finds them, unless `SSL_CERT_FILE` and `SSL_CERT_DIR` say where. `AWS_CA_BUNDLE` comes before
//! them for S3, as does `ca_bundle` in a profile of AWS; `REQUESTS_CA_BUNDLE` and `CURL_CA_BUNDLE`, of Python's requests and
//! of curl, count for everything where no `SSL_CERT_FILE` is set.
//!
//! A certificate that is itself one of the trusted ones is taken from a server, though it may say that it is an
//! authority's: `openssl req -x509` writes that into every certificate that signs itself. OpenSSL takes such a one, and so
//! does whatever is built on it; the verifier of rustls does not.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, OtherError, RootCertStore, SignatureScheme,
};

use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::settings::address::Provider;
use crate::store::remote::settings::environment::Environment;

/// Certificates to trust instead of the system's: files of them or directories, and the setting that names them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CaBundle {
    variable: &'static str,
    paths: Vec<PathBuf>,
    /// What names them, and how to do without it.
    setting: String,
    without: String,
}

/// OpenSSL's variables. What they name may be missing, as it may for OpenSSL.
const OPENSSL: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Where distributions keep the certificates of the system's authorities, all in one file.
const SYSTEM_FILES: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ssl/cert.pem",
];
/// The same, in a file each.
const SYSTEM_DIRECTORIES: [&str; 2] = ["/etc/ssl/certs", "/etc/pki/tls/certs"];

/// The certificates that the environment names for a provider.
pub(crate) fn bundle(environment: &Environment, provider: Provider) -> Option<CaBundle> {
    let made = |variable, paths| CaBundle {
        variable,
        paths,
        setting: environment.setting(variable),
        without: environment.without(variable),
    };
    let named = |variable| Some(made(variable, vec![environment.get(&[variable])?.into()]));
    let of_provider = (provider == Provider::S3).then(|| named("AWS_CA_BUNDLE")).flatten();
    let of_openssl = || {
        let set = OPENSSL.map(|name| environment.get(&[name]).unwrap_or_default());
        let paths = std::iter::once(set[0]).chain(set[1].split(':')).filter(|path| !path.is_empty());
        let paths: Vec<_> = paths.map(PathBuf::from).collect();
        (!paths.is_empty()).then(|| made(OPENSSL[0], paths))
    };
    let of_all = || ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"].into_iter().find_map(named);
    let file_is_set = environment.get(&[OPENSSL[0]]).is_some();
    of_provider.or_else(|| (!file_is_set).then(of_all).flatten()).or_else(of_openssl)
}

/// The settings of TLS with the certificates of `bundle`, else the system's.
pub(crate) fn tls(bundle: Option<&CaBundle>) -> Result<ClientConfig> {
    let certificates = match bundle {
        Some(bundle) => bundle.read()?,
        None => of_system(),
    };
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates.iter().cloned());
    if let (0, Some(bundle)) = (added, bundle) {
        return Err(bundle.refused("it holds no certificate"));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let failed = |error: &dyn std::fmt::Display| {
        Error::new(ErrorKind::Config, format!("TLS could not be set up: {error}"))
    };
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&error))?;
    if roots.is_empty() {
        // A verifier wants some; servers without TLS want none.
        return Ok(config.with_root_certificates(roots).with_no_client_auth());
    }
    let verifier = Verifier::new(roots, certificates, provider).map_err(|error| failed(&error))?;
    Ok(config.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth())
}

impl CaBundle {
    /// Those of a profile of AWS, in its `ca_bundle`.
    pub(crate) fn of_profile(path: String) -> Self {
        let variable = "ca_bundle";
        let without = format!("take {variable} out of the profile");
        Self { variable, paths: vec![path.into()], setting: variable.to_owned(), without }
    }

    fn read(&self) -> Result<Vec<CertificateDer<'static>>> {
        match &self.paths[..] {
            [path] if !OPENSSL.contains(&self.variable) && !path.is_dir() => {
                CertificateDer::pem_file_iter(path)
                    .and_then(Iterator::collect)
                    .map_err(|error| self.refused(&error.to_string()))
            }
            paths => Ok(paths.iter().flat_map(|path| certificates(path)).collect()),
        }
    }

    fn refused(&self, cause: &str) -> Error {
        let Self { paths, setting, without, .. } = self;
        let path = paths.first().map(|path| path.display().to_string()).unwrap_or_default();
        Error::new(ErrorKind::Config, format!("{setting}={path}: {cause}"))
            .remedy(format!("Give the path of a PEM file of certificates, or {without}"))
    }
}

/// The certificates of a file or a directory that can be read.
fn certificates(path: &Path) -> Vec<CertificateDer<'static>> {
    let (file, directory) = if path.is_dir() { (None, Some(path)) } else { (Some(path), None) };
    rustls_native_certs::load_certs_from_paths(file, directory).certs
}

/// Those of the system's authorities. (`load_native_certs` would read variables of the process.)
fn of_system() -> Vec<CertificateDer<'static>> {
    let file = SYSTEM_FILES.iter().map(Path::new).find(|path| path.exists());
    let directories = SYSTEM_DIRECTORIES.iter().map(Path::new).filter(|path| path.exists());
    file.into_iter().chain(directories).flat_map(certificates).collect()
}

/// Accepts certificates of the authorities, and those that are trusted themselves.
#[derive(Debug)]
struct Verifier {
    authorities: Arc<WebPkiServerVerifier>,
    trusted: Vec<CertificateDer<'static>>,
}

impl Verifier {
    fn new(
        roots: RootCertStore,
        trusted: Vec<CertificateDer<'static>>,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, rustls::client::VerifierBuilderError> {
        let authorities = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        Ok(Self { authorities, trusted })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        server: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.authorities.verify_server_cert(server, intermediates, name, ocsp, now) {
            // Its dates had been looked at before that was noticed, its name had not.
            Err(error) if is_authority(&error) && self.trusted.iter().any(|known| known == server) => {
                verify_server_name(&ParsedCertificate::try_from(server)?, name)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authorities.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authorities.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }
}

/// Whether a certificate was refused because it is an authority's.
fn is_authority(error: &rustls::Error) -> bool {
    let rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(cause))) = error else {
        return false;
    };
    matches!(cause.downcast_ref::<webpki::Error>(), Some(webpki::Error::CaUsedAsEndEntity))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_is_the_one_of_the_provider_else_that_of_all() {
        let environment = Environment::of([("AWS_CA_BUNDLE", "/a"), ("CURL_CA_BUNDLE", "/c")]);
        let named = |provider| bundle(&environment, provider).map(|bundle| bundle.variable);
        assert_eq!(named(Provider::S3), Some("AWS_CA_BUNDLE"));
        assert_eq!(named(Provider::Gcs), Some("CURL_CA_BUNDLE"));
        assert_eq!(bundle(&Environment::of([("AWS_CA_BUNDLE", "/a")]), Provider::Web), None);
        let system = Environment::of([("SSL_CERT_FILE", "/s"), ("CURL_CA_BUNDLE", "/c")]);
        assert_eq!(bundle(&system, Provider::S3).unwrap().paths, [Path::new("/s")]);
        let directories = Environment::of([("SSL_CERT_DIR", "/d:/e"), ("AWS_CA_BUNDLE", "/a")]);
        assert_eq!(bundle(&directories, Provider::Gcs).unwrap().paths, [Path::new("/d"), Path::new("/e")]);
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
