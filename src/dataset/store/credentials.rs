//! Credentials from a machine's metadata service, where the environment holds none.
//!
//! Stores ask that service last. On a machine outside a cloud the service fails or never responds,
//! and its error says nothing about the variables that a user forgot.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use object_store::CredentialProvider;

use super::error::{cause, chain};

/// Maximum wait for the first credentials. Services respond within milliseconds.
const FIRST_MAX: Duration = Duration::from_secs(5);
/// Paths of the metadata services of AWS, Google Cloud and Azure, as they appear in errors.
const METADATA_PATHS: [&str; 4] = [
    "/latest/api/token",
    "/latest/meta-data/",
    "/computeMetadata/",
    "/metadata/identity/",
];

/// There are no credentials for a store. The text says how to give some.
#[derive(Debug, thiserror::Error)]
#[error("no {}, and this machine's metadata service gives none ({why})", cloud.words())]
pub struct NoCredentials {
    cloud: Cloud,
    why: String,
}

/// Whose credentials are missing.
#[derive(Debug, Clone, Copy)]
pub enum Cloud {
    Aws,
    Google,
    Azure,
}

impl Cloud {
    fn words(self) -> &'static str {
        match self {
            Cloud::Aws => {
                "AWS credentials: set `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or `AWS_PROFILE`, or \
                 `AWS_SKIP_SIGNATURE=true` for a public bucket; none is set"
            }
            Cloud::Google => {
                "Google credentials: set `GOOGLE_APPLICATION_CREDENTIALS` to a key file, or \
                 `GOOGLE_SKIP_SIGNATURE=true` for a public bucket; none is set"
            }
            Cloud::Azure => {
                "Azure credentials: set `AZURE_STORAGE_ACCOUNT_KEY` or `AZURE_STORAGE_SAS_KEY`, or \
                 `AZURE_SKIP_SIGNATURE=true` for a public container; none is set"
            }
        }
    }
}

/// Whether a provider asks the metadata service. object_store's types are private, and their names
/// appear in their debug output.
pub fn asks_metadata(provider: &impl fmt::Debug) -> bool {
    let provider = format!("{provider:?}");
    ["InstanceCredentialProvider", "ImdsManagedIdentityProvider"]
        .iter()
        .any(|name| provider.contains(name))
}

/// Replaces errors of the metadata service by [`NoCredentials`] until it gives the first
/// credentials. Later errors are failures to renew them, and worth a retry.
pub struct FirstCredentials<Credential> {
    inner: Arc<dyn CredentialProvider<Credential = Credential>>,
    cloud: Cloud,
    first_max: Duration,
    /// Whether credentials were given before.
    is_given: AtomicBool,
}

impl<Credential: fmt::Debug + Send + Sync> FirstCredentials<Credential> {
    pub fn new(inner: Arc<dyn CredentialProvider<Credential = Credential>>, cloud: Cloud) -> Self {
        FirstCredentials {
            inner,
            cloud,
            first_max: FIRST_MAX,
            is_given: AtomicBool::new(false),
        }
    }

    fn none(&self, why: String) -> object_store::Error {
        object_store::Error::Unauthenticated {
            path: String::new(),
            source: Box::new(NoCredentials { cloud: self.cloud, why }),
        }
    }
}

impl<Credential> fmt::Debug for FirstCredentials<Credential> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FirstCredentials").field(&self.cloud).finish()
    }
}

#[async_trait]
impl<Credential: fmt::Debug + Send + Sync> CredentialProvider for FirstCredentials<Credential> {
    type Credential = Credential;

    async fn get_credential(&self) -> object_store::Result<Arc<Credential>> {
        if self.is_given.load(Ordering::Relaxed) {
            return self.inner.get_credential().await;
        }
        match tokio::time::timeout(self.first_max, self.inner.get_credential()).await {
            Ok(Ok(credential)) => {
                self.is_given.store(true, Ordering::Relaxed);
                Ok(credential)
            }
            Ok(Err(error)) if names_metadata(&error) => Err(self.none(cause(&error))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(self.none(format!("no response within {} s", self.first_max.as_secs()))),
        }
    }
}

/// Whether an error came from a request to a metadata service.
fn names_metadata(error: &(dyn std::error::Error + 'static)) -> bool {
    chain(error).any(|error| {
        let text = error.to_string();
        METADATA_PATHS.iter().any(|path| text.contains(path))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Gives these results, one per call; afterwards it never responds.
    #[derive(Debug)]
    struct Scripted(Mutex<Vec<Result<(), &'static str>>>);

    #[async_trait]
    impl CredentialProvider for Scripted {
        type Credential = ();

        async fn get_credential(&self) -> object_store::Result<Arc<()>> {
            let next = self.0.lock().unwrap().pop();
            match next {
                Some(Ok(())) => Ok(Arc::new(())),
                Some(Err(text)) => Err(object_store::Error::Generic {
                    store: "S3",
                    source: text.into(),
                }),
                None => std::future::pending().await,
            }
        }
    }

    fn scripted(mut results: Vec<Result<(), &'static str>>) -> FirstCredentials<()> {
        results.reverse();
        let mut first = FirstCredentials::new(Arc::new(Scripted(Mutex::new(results))), Cloud::Aws);
        first.first_max = Duration::from_millis(50);
        first
    }

    #[tokio::test]
    async fn a_machine_without_credentials_is_told_which_variables_to_set() {
        let metadata = "Error performing PUT http://169.254.169.254/latest/api/token: refused";
        let first = scripted(vec![Err(metadata)]);
        for why in ["refused", "no response within 0 s"] {
            let error = first.get_credential().await.unwrap_err();
            assert!(
                matches!(error, object_store::Error::Unauthenticated { .. }),
                "{error:?}"
            );
            let line = cause(&error);
            assert!(line.contains("set `AWS_ACCESS_KEY_ID`") && line.contains(why), "{line}");
        }
    }

    #[tokio::test]
    async fn a_failed_renewal_is_no_lack_of_credentials() {
        let metadata = "Error performing PUT http://169.254.169.254/latest/api/token: 503";
        let first = scripted(vec![Ok(()), Err(metadata)]);
        first.get_credential().await.unwrap();
        let error = first.get_credential().await.unwrap_err();
        assert!(matches!(error, object_store::Error::Generic { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn errors_of_other_servers_pass_unchanged() {
        let first = scripted(vec![Err(
            "Error performing POST https://sts.eu-west-1.amazonaws.com: 400",
        )]);
        let error = first.get_credential().await.unwrap_err();
        assert!(matches!(error, object_store::Error::Generic { .. }), "{error:?}");
    }
}
