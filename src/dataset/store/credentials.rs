//! Credentials from a machine's metadata service, for an environment without credentials.
//!
//! Stores ask that service last. On a machine outside a cloud, requests to it fail or get no
//! response, and the error does not name the variables that the user forgot.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use object_store::CredentialProvider;

use super::error::{cause, chain};

/// Maximum wait for the first credentials. Services respond within milliseconds.
const FIRST_TIMEOUT: Duration = Duration::from_secs(5);
/// Paths of the metadata services of AWS, Google Cloud and Azure, as they appear in errors.
const METADATA_PATHS: [&str; 4] = [
    "/latest/api/token",
    "/latest/meta-data/",
    "/computeMetadata/",
    "/metadata/identity/",
];

/// The error that a store has no credentials. Its text names the variables to set.
#[derive(Debug, thiserror::Error)]
#[error("no {}, and this machine's metadata service gives none ({why})", cloud.remedy())]
pub struct NoCredentials {
    cloud: Cloud,
    why: String,
}

/// The cloud whose credentials are missing.
#[derive(Debug, Clone, Copy)]
pub enum Cloud {
    Aws,
    Google,
    Azure,
}

impl Cloud {
    fn remedy(self) -> &'static str {
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

/// Whether a provider gets its credentials from the metadata service. object_store's types are
/// private, so they are recognised by their names in the debug output.
pub fn uses_metadata_service(provider: &impl fmt::Debug) -> bool {
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
    first_timeout: Duration,
    /// Whether the service has returned credentials before.
    has_succeeded: AtomicBool,
}

impl<Credential: fmt::Debug + Send + Sync> FirstCredentials<Credential> {
    pub fn new(inner: Arc<dyn CredentialProvider<Credential = Credential>>, cloud: Cloud) -> Self {
        FirstCredentials {
            inner,
            cloud,
            first_timeout: FIRST_TIMEOUT,
            has_succeeded: AtomicBool::new(false),
        }
    }

    fn no_credentials(&self, why: String) -> object_store::Error {
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
        if self.has_succeeded.load(Ordering::Relaxed) {
            return self.inner.get_credential().await;
        }
        match tokio::time::timeout(self.first_timeout, self.inner.get_credential()).await {
            Ok(Ok(credential)) => {
                self.has_succeeded.store(true, Ordering::Relaxed);
                Ok(credential)
            }
            Ok(Err(error)) if is_of_metadata_service(&error) => Err(self.no_credentials(cause(&error))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(self.no_credentials(format!("no response within {} s", self.first_timeout.as_secs()))),
        }
    }
}

/// Whether an error came from a request to a metadata service.
fn is_of_metadata_service(error: &(dyn std::error::Error + 'static)) -> bool {
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
        first.first_timeout = Duration::from_millis(50);
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
    async fn a_failed_renewal_passes_unchanged() {
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
