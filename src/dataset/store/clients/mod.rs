//! Opens object stores with one client per bucket and process; credentials and options follow each
//! cloud's own conventions.
//!
//! `docs/stores.md` lists the environment variables in use. Only variables with a cloud's prefix
//! count: object_store also accepts names without one (`TOKEN`, `REGION`, `ENDPOINT`), which may
//! have another meaning on a machine.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::{HttpBuilder, HttpStore};
use object_store::list::PaginatedListStore;
use object_store::path::Path;
use object_store::{
    BackoffConfig, Certificate, ClientConfigKey, ClientOptions, ObjectStore, ObjectStoreScheme, RetryConfig,
};
use percent_encoding::percent_decode_str;
use url::{Position, Url};

use super::aws_profile::{self, KeySource, ProfileCredentials};
use super::credentials::{Cloud, FirstCredentials, uses_metadata_service};
use super::web::{MayFollow, WebConnector};

/// Timeout of one request in seconds, including the body, unless `GRISTMILL_STORE_TIMEOUT` is set.
/// A part of 256 MB then needs 4.3 MB/s.
const TIMEOUT_SECONDS: f64 = 60.0;
/// Maximum connect timeout in seconds.
const CONNECT_SECONDS_MAX: f64 = 5.0;
/// Maximum retries of one request. Callers that write have their own retry loops above these.
const RETRIES_MAX: usize = 8;
/// Maximum time for retries in seconds. A request's credentials and signature are not renewed
/// between its retries, so this stays well below their 5 minutes.
const RETRY_SECONDS_MAX: u64 = 120;

/// The reason why a store cannot be opened: one line, without secrets.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct OpenError(pub String);

/// The open stores of one environment.
pub struct Stores {
    variables: BTreeMap<String, String>,
    clients: Mutex<BTreeMap<String, StoreClient>>,
    /// The allowed targets of web servers' redirects, in a process that works on queued jobs.
    may_follow: OnceLock<MayFollow>,
}

/// The client of one bucket or web server.
#[derive(Clone)]
struct StoreClient {
    store: Arc<dyn ObjectStore>,
    /// The same client, if it supports paginated listing.
    paginated: Option<Arc<dyn PaginatedListStore>>,
}

impl StoreClient {
    fn with_pagination<Store: ObjectStore + PaginatedListStore>(store: Store) -> StoreClient {
        let store = Arc::new(store);
        StoreClient {
            paginated: Some(store.clone()),
            store,
        }
    }
}

impl Stores {
    /// The stores of this process. The first call reads the environment.
    pub fn of_process() -> &'static Stores {
        static OF_PROCESS: OnceLock<Stores> = OnceLock::new();
        OF_PROCESS.get_or_init(|| {
            let text = |value: std::ffi::OsString| value.into_string().ok();
            Stores::new(std::env::vars_os().filter_map(|(name, value)| Some((text(name)?, text(value)?))))
        })
    }

    /// Stores that use these variables instead of the process's environment.
    pub fn new(variables: impl IntoIterator<Item = (String, String)>) -> Stores {
        Stores {
            variables: variables.into_iter().collect(),
            clients: Mutex::default(),
            may_follow: OnceLock::new(),
        }
    }

    /// Lets web servers that are opened from now on redirect only to addresses that `may_follow`
    /// allows. Only the first call has an effect.
    pub fn restrict_redirects(&self, may_follow: MayFollow) {
        self.may_follow.get_or_init(|| may_follow);
    }

    /// The store of `url`, and the key in it. Sends no request.
    pub fn open(&self, url: &Url) -> Result<(Arc<dyn ObjectStore>, Path), OpenError> {
        self.open_client(url).map(|(client, path)| (client.store, path))
    }

    /// The store of `url`, if it supports paginated listing, as bucket stores do. Sends no request.
    pub fn paginated(&self, url: &Url) -> Option<Arc<dyn PaginatedListStore>> {
        self.open_client(url).ok()?.0.paginated
    }

    fn open_client(&self, url: &Url) -> Result<(StoreClient, Path), OpenError> {
        let (scheme, path) = ObjectStoreScheme::parse(url).map_err(|_| {
            OpenError(format!(
                "`{}` is no scheme of a store: give a path, or an address with `s3://`, `gs://`, `az://`, `abfss://` or `https://`",
                url.scheme()
            ))
        })?;
        let bucket = bucket_of(url, &path);
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = clients.get(&bucket) {
            return Ok((found.clone(), path));
        }
        let plain = |store: Arc<dyn ObjectStore>| StoreClient { store, paginated: None };
        let client = match scheme {
            ObjectStoreScheme::AmazonS3 => StoreClient::with_pagination(self.s3(url)?),
            ObjectStoreScheme::GoogleCloudStorage => StoreClient::with_pagination(self.gcs(url)?),
            ObjectStoreScheme::MicrosoftAzure => StoreClient::with_pagination(self.azure(url)?),
            ObjectStoreScheme::Http => plain(Arc::new(self.http(url)?)),
            _ => {
                let (store, _) = object_store::parse_url(url).map_err(|e| OpenError(e.to_string()))?;
                plain(Arc::from(store))
            }
        };
        clients.insert(bucket, client.clone());
        Ok((client, path))
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.variables
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    /// The variables with `prefix` that object_store knows.
    fn options<'a, Key: FromStr + 'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (Key, &'a str)> {
        self.variables
            .iter()
            .filter(move |(name, value)| name.starts_with(prefix) && !value.is_empty())
            .filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.as_str())))
    }

    fn s3(&self, url: &Url) -> Result<AmazonS3, OpenError> {
        let mut client = self.client_options()?;
        if let Some(file) = self.variable("AWS_CA_BUNDLE") {
            for certificate in certificates(file)? {
                client = client.with_root_certificate(certificate);
            }
        }
        let mut builder = AmazonS3Builder::new()
            .with_retry(self.retry_config()?)
            .with_client_options(client);
        // Amazon's own tools read this variable.
        if let Some(endpoint) = self.variable("AWS_EC2_METADATA_SERVICE_ENDPOINT") {
            builder = builder.with_metadata_endpoint(endpoint.trim_end_matches('/'));
        }
        for (key, value) in self.options::<AmazonS3ConfigKey>("AWS_") {
            builder = builder.with_config(key, value);
        }
        builder = self.with_profile(builder)?;
        let config = |key| builder.get_config_value(&key);
        let endpoint = config(AmazonS3ConfigKey::S3Endpoint).or_else(|| config(AmazonS3ConfigKey::Endpoint));
        let allows_http =
            config(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp)).is_some_and(|value| value == "true");
        if let Some(endpoint) = endpoint.filter(|endpoint| endpoint.starts_with("http://") && !allows_http) {
            let endpoint = Url::parse(&endpoint).map_or_else(|_| "http://…".into(), |url| redacted(&url));
            return Err(OpenError(format!(
                "the endpoint `{endpoint}` is not encrypted: set `AWS_ALLOW_HTTP=true` to use it all the same"
            )));
        }
        builder = builder.with_url(url.as_str());
        let store = builder.clone().build().map_err(open_error)?;
        if !uses_metadata_service(store.credentials()) {
            return Ok(store);
        }
        let first = FirstCredentials::new(store.credentials().clone(), Cloud::Aws);
        builder.with_credentials(Arc::new(first)).build().map_err(open_error)
    }

    /// Applies the AWS profile's settings where the environment sets none.
    fn with_profile(&self, mut builder: AmazonS3Builder) -> Result<AmazonS3Builder, OpenError> {
        let Some(profile) = aws_profile::find(&self.variables).map_err(OpenError)? else {
            return Ok(builder);
        };
        let is_set = |builder: &AmazonS3Builder, key| builder.get_config_value(&key).is_some();
        if let Some(region) = &profile.region
            && !is_set(&builder, AmazonS3ConfigKey::Region)
        {
            builder = builder.with_region(region);
        }
        if let Some(endpoint) = &profile.endpoint
            && !is_set(&builder, AmazonS3ConfigKey::Endpoint)
        {
            builder = builder.with_endpoint(endpoint);
        }
        // Keys in the environment take precedence, as in Amazon's own tools.
        if is_set(&builder, AmazonS3ConfigKey::AccessKeyId)
            || builder
                .get_config_value(&AmazonS3ConfigKey::SkipSignature)
                .is_some_and(|skip| skip == "true")
        {
            return Ok(builder);
        }
        match profile.key_source().map_err(OpenError)? {
            KeySource::None => {}
            KeySource::Static(_) => {
                let credentials = ProfileCredentials::new(&self.variables, profile).map_err(OpenError)?;
                builder = builder.with_credentials(Arc::new(credentials));
            }
            KeySource::WebIdentity { token_file, role } => {
                builder = builder
                    .with_config(AmazonS3ConfigKey::WebIdentityTokenFile, token_file)
                    .with_config(AmazonS3ConfigKey::RoleArn, role);
            }
        }
        Ok(builder)
    }

    fn gcs(&self, url: &Url) -> Result<GoogleCloudStorage, OpenError> {
        // The metadata server, which gives out credentials, speaks plain HTTP.
        let client = self.client_options()?.with_allow_http(true);
        let builder = GoogleCloudStorageBuilder::new()
            .with_retry(self.retry_config()?)
            .with_client_options(client);
        let builder = self
            .options::<GoogleConfigKey>("GOOGLE_")
            .fold(builder, |builder, (key, value)| builder.with_config(key, value))
            .with_url(url.as_str());
        let store = builder.clone().build().map_err(open_error)?;
        if !uses_metadata_service(store.credentials()) {
            return Ok(store);
        }
        let first = FirstCredentials::new(store.credentials().clone(), Cloud::Google);
        builder.with_credentials(Arc::new(first)).build().map_err(open_error)
    }

    fn azure(&self, url: &Url) -> Result<MicrosoftAzure, OpenError> {
        let mut builder = MicrosoftAzureBuilder::new()
            .with_retry(self.retry_config()?)
            .with_client_options(self.client_options()?);
        // Azure's hosts (functions, app services) provide identities at this endpoint.
        if let Some(endpoint) = self.variable("IDENTITY_ENDPOINT") {
            builder = builder.with_msi_endpoint(endpoint);
        }
        let builder = self
            .options::<AzureConfigKey>("AZURE_")
            .fold(builder, |builder, (key, value)| builder.with_config(key, value))
            .with_url(url.as_str());
        let store = builder.clone().build().map_err(azure_open_error)?;
        if !uses_metadata_service(store.credentials()) {
            return Ok(store);
        }
        let first = FirstCredentials::new(store.credentials().clone(), Cloud::Azure);
        builder.with_credentials(Arc::new(first)).build().map_err(open_error)
    }

    fn http(&self, url: &Url) -> Result<HttpStore, OpenError> {
        // Plain HTTP is allowed if the address says `http://`.
        let client = self.client_options()?.with_allow_http(url.scheme() == "http");
        let seconds = self.timeout_seconds()?;
        let connector = WebConnector {
            server: url.clone(),
            timeout: Duration::from_secs_f64(seconds),
            connect_timeout: Duration::from_secs_f64(seconds.min(CONNECT_SECONDS_MAX)),
            may_follow: self.may_follow.get().cloned(),
        };
        HttpBuilder::new()
            .with_retry(self.retry_config()?)
            .with_client_options(client)
            .with_http_connector(connector)
            .with_url(&url[..Position::BeforePath])
            .build()
            .map_err(open_error)
    }

    fn client_options(&self) -> Result<ClientOptions, OpenError> {
        let seconds = self.timeout_seconds()?;
        Ok(ClientOptions::new()
            .with_timeout(Duration::from_secs_f64(seconds))
            .with_connect_timeout(Duration::from_secs_f64(seconds.min(CONNECT_SECONDS_MAX))))
    }

    /// The backoff starts at 0.1 s and grows by half on average: the last retry begins after about
    /// 8 s.
    fn retry_config(&self) -> Result<RetryConfig, OpenError> {
        let backoff = BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(5),
            base: 3.0,
        };
        Ok(RetryConfig {
            backoff,
            max_retries: RETRIES_MAX,
            retry_timeout: Duration::from_secs(RETRY_SECONDS_MAX),
        })
    }

    fn timeout_seconds(&self) -> Result<f64, OpenError> {
        const NAME: &str = "GRISTMILL_STORE_TIMEOUT";
        let Some(text) = self.variable(NAME) else {
            return Ok(TIMEOUT_SECONDS);
        };
        match text.parse::<f64>() {
            Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
            _ => Err(OpenError(format!(
                "`{NAME}` is `{text}`, but must be a number of seconds from 0.01 to 3,600"
            ))),
        }
    }
}

/// `url` without `path`, its key: the part that all addresses of one client share.
pub fn bucket_of(url: &Url, path: &Path) -> String {
    let mut segments: Vec<&str> = url.path().split('/').filter(|part| !part.is_empty()).collect();
    let mut below = path.parts().count();
    // A segment with an encoded `/` is several parts of a key.
    while below > 0
        && let Some(segment) = segments.pop()
    {
        let decoded = percent_decode_str(segment).decode_utf8_lossy();
        let parts = decoded.split('/').filter(|part| !part.is_empty()).count();
        below = below.saturating_sub(parts);
    }
    format!("{}/{}", &url[..Position::BeforePath], segments.join("/"))
}

/// Whether the URL's host can be the name of a bucket. object_store inserts the name unescaped into
/// paths and host names.
pub fn has_valid_bucket(url: &Url) -> bool {
    let authority = &url[Position::BeforeUsername..Position::BeforePath];
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.$@:".contains(c);
    authority.chars().all(plain)
        && authority.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '$')
        && !authority.contains("..")
}

/// `url` without its secrets.
pub fn redacted(url: &Url) -> String {
    let mut url = url.clone();
    if url.password().is_some() {
        // Fails only for addresses without a host, which have no password either.
        let _ = url.set_password(Some("…"));
    }
    if url.query().is_some() {
        url.set_query(Some("…"));
    }
    url.to_string().replace("%E2%80%A6", "…")
}

/// The certificates in a PEM file.
fn certificates(file: &str) -> Result<Vec<Certificate>, OpenError> {
    let bytes = std::fs::read(file).map_err(|e| OpenError(format!("`AWS_CA_BUNDLE` names `{file}`: {e}")))?;
    Certificate::from_pem_bundle(&bytes).map_err(|e| OpenError(format!("`AWS_CA_BUNDLE` names `{file}`: {e}")))
}

/// The error of Azure's builder. Its own text about a missing account names no variable.
fn azure_open_error(error: object_store::Error) -> OpenError {
    match open_error(error) {
        OpenError(why) if why == "Account must be specified" => OpenError(
            "it names no storage account: set `AZURE_STORAGE_ACCOUNT_NAME`, or write \
             `abfss://container@account.dfs.core.windows.net/key`"
                .into(),
        ),
        error => error,
    }
}

/// A builder's error without the name of its store, which object_store puts before the cause.
fn open_error(error: object_store::Error) -> OpenError {
    OpenError(super::error::cause(&error))
}

#[cfg(test)]
mod tests;
