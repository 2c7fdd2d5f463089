//! A profile of AWS's configuration files, and the credentials that AWS's default chain finds.
//!
//! `aws-config` knows profiles, SSO, assumed roles, credential processes, web identities, containers and instances. Its
//! own default chain reads the process's variables whenever credentials are fetched; here the chain is put together
//! from the variables of an [`Environment`]: which profile of which files, which web identity. (What only containers
//! and instances have, `AWS_CONTAINER_…` and the instance metadata's endpoint, `aws-config` still reads itself.)

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use aws_config::Region;
use aws_config::ecs::EcsCredentialsProvider;
use aws_config::imds::credentials::ImdsCredentialsProvider;
use aws_config::meta::credentials::CredentialsProviderChain;
use aws_config::profile::{ProfileFileCredentialsProvider, ProfileSet};
use aws_config::provider_config::ProviderConfig;
use aws_config::web_identity_token::{StaticConfiguration, WebIdentityTokenCredentialsProvider};
use aws_credential_types::provider::SharedCredentialsProvider;
use aws_runtime::env_config::EnvConfigValue;
use aws_runtime::env_config::file::{EnvConfigFileKind, EnvConfigFiles};
use aws_types::os_shim_internal::{Env, Fs};

use super::aws::Client;
use super::backend::innermost;
use crate::closest::closest;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::settings::environment::Environment;

const NAMES: [&str; 2] = ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"];

/// A profile, and the credentials that it leads to.
#[derive(Clone)]
pub(crate) struct Profile {
    pub(crate) name: String,
    sections: ProfileSet,
    files: EnvConfigFiles,
    /// Variables, which come before what the profile says.
    env: Env,
}

impl Profile {
    /// The profile that `environment` leads to; none where it is no process's.
    ///
    /// # Errors
    /// `Config` where a variable or an option names a profile that is not there, or a file cannot be parsed.
    pub(crate) async fn of(environment: &Environment) -> Result<Option<Self>> {
        if !environment.is_of_process() {
            return Ok(None);
        }
        let set = NAMES.into_iter().find_map(|name| Some((name, environment.get(&[name])?)));
        let name = set.map_or("default", |(_, name)| name).to_owned();
        let env = Env::from(environment.starting_with("AWS_").map(owned).collect::<HashMap<_, _>>());
        let paths = [
            (EnvConfigFileKind::Config, file(environment, "AWS_CONFIG_FILE", "config")),
            (EnvConfigFileKind::Credentials, file(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials")),
        ];
        let present = paths
            .iter()
            .filter_map(|(kind, path)| Some((*kind, path.as_ref().filter(|path| path.is_file())?)));
        // Some file there must be, and none is asked for that is not.
        let files = EnvConfigFiles::builder().with_contents(EnvConfigFileKind::Config, "");
        let files = present.fold(files, |files, (kind, path)| files.with_file(kind, path)).build();
        let disk = Fs::real();
        let sections = aws_config::profile::load(&disk, &env, &files, Some(name.clone().into()));
        let sections = sections.await.map_err(|error| {
            let cause = format!("AWS's configuration files cannot be used: {}", innermost(&error));
            Error::new(ErrorKind::Config, cause)
                .remedy("Check AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE")
        })?;
        if let Some((variable, name)) = set.filter(|(_, name)| sections.get_profile(name).is_none())
            // Keys of one's own need no profile.
            && super::s3::own_keys(environment).is_none()
        {
            let looked =
                paths.into_iter().filter_map(|(_, path)| path).map(|path| path.display().to_string());
            let looked: Vec<_> = looked.collect();
            return Err(missing(environment, variable, name, &sections, &looked.join(" or ")));
        }
        Ok(Some(Self { name, sections, files, env }))
    }

    /// What a variable, else the profile says of S3.
    pub(crate) fn get(&self, variable: &str, key: &str) -> Option<String> {
        let value = EnvConfigValue::new().env(variable).profile(key).service_id("S3");
        Some(value.load(&self.env, Some(&self.sections))?.0.into_owned())
    }

    /// Whether the profile, or the one whose role it assumes, signs in by SSO.
    pub(crate) fn by_sso(&self) -> bool {
        let of = |name: &str| self.sections.get_profile(name);
        let sso = |name: &str| {
            let get = |key| of(name).and_then(|profile| profile.get(key));
            get("sso_session").or_else(|| get("sso_start_url")).is_some()
        };
        let source = of(&self.name).and_then(|profile| profile.get("source_profile"));
        sso(&self.name) || source.is_some_and(sso)
    }

    /// Whether there is any such profile.
    pub(crate) fn exists(&self) -> bool {
        self.sections.get_profile(&self.name).is_some()
    }

    /// AWS's default chain but for keys in variables: profile, web identity, container, instance.
    pub(crate) fn credentials(
        &self,
        environment: &Environment,
        client: &ClientKey,
        region: &str,
    ) -> SharedCredentialsProvider {
        let conf = ProviderConfig::without_region()
            .with_http_client(Client(client.clone()))
            .with_region(Some(Region::new(region.to_owned())));
        let profile = ProfileFileCredentialsProvider::builder().configure(&conf);
        let profile = profile.profile_files(self.files.clone()).profile_name(&self.name).build();
        let mut chain = CredentialsProviderChain::first_try("Profile", profile);
        let identity =
            environment.get(&["AWS_WEB_IDENTITY_TOKEN_FILE"]).zip(environment.get(&["AWS_ROLE_ARN"]));
        if let Some((token, role)) = identity {
            let session = environment.get(&["AWS_ROLE_SESSION_NAME"]).unwrap_or("penstock");
            let identity = StaticConfiguration {
                web_identity_token_file: token.into(),
                role_arn: role.into(),
                session_name: session.into(),
            };
            let provider = WebIdentityTokenCredentialsProvider::builder().configure(&conf);
            chain = chain.or_else("WebIdentityToken", provider.static_configuration(identity).build());
        }
        chain = chain.or_else("EcsContainer", EcsCredentialsProvider::builder().configure(&conf).build());
        if !environment.is_set(&["AWS_EC2_METADATA_DISABLED"]) {
            chain = chain
                .or_else("Ec2InstanceMetadata", ImdsCredentialsProvider::builder().configure(&conf).build());
        }
        SharedCredentialsProvider::new(chain)
    }
}

fn owned((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// One of AWS's files: where a variable says, else in the user's directory.
fn file(environment: &Environment, variable: &str, name: &str) -> Option<PathBuf> {
    let home = environment.get(&["HOME"]).map(Path::new);
    match environment.get(&[variable]) {
        Some(set) => Some(match (set.strip_prefix("~/"), home) {
            (Some(rest), Some(home)) => home.join(rest),
            _ => set.into(),
        }),
        None => Some(home?.join(".aws").join(name)),
    }
}

fn missing(
    environment: &Environment,
    variable: &str,
    name: &str,
    sections: &ProfileSet,
    looked: &str,
) -> Error {
    let mut known: Vec<_> = sections.profiles().collect();
    known.sort_unstable();
    let like = closest(name, known.iter().copied());
    let remedy = match (&like[..], &known[..]) {
        ([like, ..], _) => format!("Did you mean {like:?}?"),
        ([], []) => format!(
            "There is no profile in {looked}: {}, or run `aws configure --profile {name}`",
            environment.without(variable)
        ),
        ([], known) => format!("There are: {}", known.join(", ")),
    };
    let origin = environment.origin(variable);
    let place =
        if origin == variable { format!("{variable}={name}") } else { format!("{origin}: profile {name:?}") };
    Error::new(ErrorKind::Config, format!("{place}: AWS has no profile of this name ({looked})"))
        .remedy(remedy)
}
