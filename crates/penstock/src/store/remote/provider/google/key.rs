//! A service account's key that acts as another service account.
//!
//! `object_store` signs with it, as it does where the key is used by itself: a token that the account makes out for
//! itself (<https://google.aip.dev/auth/4111>), for which nobody needs to be asked.

use object_store::gcp::{GcpCredentialProvider, GoogleCloudStorageBuilder};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::token_client::TokenGrant;
use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::response_recorder::CredentialError;
use crate::store::remote::http::transport::Connector;

/// A service account's private key. It has no `Debug` form.
pub(super) struct Key {
    email: String,
    signer: GcpCredentialProvider,
}

/// The file.
#[derive(Deserialize, Serialize)]
pub(super) struct File {
    client_email: String,
    private_key: String,
    private_key_id: String,
}

impl Key {
    /// The key in a file.
    ///
    /// # Errors
    /// What is wrong, by field.
    pub(super) fn of(file: File, client: &ClientKey) -> Result<Self, String> {
        // These fields alone: `object_store` takes settings of the file that are none of a key's.
        let key = json!(file);
        let made = GoogleCloudStorageBuilder::new()
            // Of no consequence, but it wants one.
            .with_bucket_name("bucket")
            .with_service_account_key(key.to_string())
            .with_http_connector(Connector(client.clone()))
            .build();
        // Its words might show some of the key.
        let made = made.map_err(|_| "private_key is not an RSA key in PEM form")?;
        Ok(Self { email: file.client_email, signer: made.credentials().clone() })
    }

    pub(super) fn email(&self) -> &str {
        &self.email
    }

    pub(super) async fn token(&self) -> Result<TokenGrant, CredentialError> {
        let signed = self.signer.get_credential().await;
        let signed = signed.map_err(|_| CredentialError::new("the key does not sign"))?;
        // It is good for an hour; what is got for it says for how long that is.
        Ok(TokenGrant { token: signed.bearer.clone(), expires: None })
    }
}
