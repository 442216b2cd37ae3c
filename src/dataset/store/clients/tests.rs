//! Clients are shared, plain HTTP must be allowed explicitly, and no error shows a secret.

use super::*;

fn stores(variables: &[(&str, &str)]) -> Stores {
    Stores::new(
        variables
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string())),
    )
}

fn url(text: &str) -> Url {
    Url::parse(text).unwrap()
}

const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "hush")];

#[test]
fn a_bucket_has_one_client() {
    let stores = stores(&KEYS);
    let open = |text| stores.open(&url(text)).unwrap();
    let (first, key) = open("s3://bucket/a/b");
    assert_eq!(key.as_ref(), "a/b");
    assert!(Arc::ptr_eq(&first, &open("s3://bucket/c").0));
    assert!(Arc::ptr_eq(&first, &open("s3://bucket").0));
    assert!(!Arc::ptr_eq(&first, &open("s3://other/c").0));
    let (regional, key) = open("https://s3.eu-west-1.amazonaws.com/bucket/a");
    assert_eq!(key.as_ref(), "a");
    assert!(Arc::ptr_eq(
        &regional,
        &open("https://s3.eu-west-1.amazonaws.com/bucket/b").0
    ));
    assert!(!Arc::ptr_eq(
        &regional,
        &open("https://s3.eu-west-1.amazonaws.com/other/b").0
    ));
}

#[test]
fn an_encoded_slash_belongs_to_the_key() {
    let of = |text: &str| {
        let (_, key) = ObjectStoreScheme::parse(&url(text)).unwrap();
        bucket_of(&url(text), &key)
    };
    let regional = "https://s3.eu-west-1.amazonaws.com/bucket";
    for key in ["", "/", "/a", "/a%2Fb", "/a%2Fb/c%2fd%2Fe"] {
        assert_eq!(of(&format!("s3://bucket{key}")), "s3://bucket/", "{key}");
        assert_eq!(of(&format!("{regional}{key}")), regional, "{key}");
    }
}

#[test]
fn every_cloud_opens_by_its_own_variables() {
    let stores = stores(&[
        ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8="),
        ("GOOGLE_SKIP_SIGNATURE", "true"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "hush"),
        ("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms"),
        ("AWS_SSE_KMS_KEY_ID", "alias/jobs"),
    ]);
    for text in [
        "s3://bucket/key",
        "gs://bucket/key",
        "az://container/key",
        "https://example.com/data/key",
        "http://example.com/data/key",
    ] {
        stores.open(&url(text)).unwrap_or_else(|e| panic!("{text}: {e}"));
    }
}

#[test]
fn plain_http_must_be_allowed() {
    let endpoint = ("AWS_ENDPOINT_URL", "http://user:hush@127.0.0.1:9000");
    let why = stores(&[KEYS[0], KEYS[1], endpoint])
        .open(&url("s3://bucket/key"))
        .unwrap_err()
        .to_string();
    assert!(why.contains("AWS_ALLOW_HTTP=true") && !why.contains("hush"), "{why}");
    stores(&[KEYS[0], KEYS[1], endpoint, ("AWS_ALLOW_HTTP", "true")])
        .open(&url("s3://bucket/key"))
        .unwrap();
}

#[test]
fn wrong_settings_are_one_line_without_secrets() {
    for variables in [
        vec![KEYS[0], KEYS[1], ("GRISTMILL_STORE_TIMEOUT", "soon")],
        vec![KEYS[0], KEYS[1], ("GRISTMILL_STORE_TIMEOUT", "0")],
        vec![KEYS[0], KEYS[1], ("AWS_SERVER_SIDE_ENCRYPTION", "rot13")],
        vec![KEYS[0], KEYS[1], ("AWS_CA_BUNDLE", "/nowhere/ca.pem")],
        vec![KEYS[1]],
        vec![("AWS_PROFILE", "nobody"), ("HOME", "/nowhere")],
    ] {
        let why = stores(&variables)
            .open(&url("s3://bucket/key"))
            .map(|_| ())
            .unwrap_err()
            .to_string();
        assert!(
            !why.contains("hush") && !why.contains('\n') && !why.is_empty(),
            "{variables:?}: {why}"
        );
    }
}

#[test]
fn variables_without_a_prefix_are_ignored() {
    // A machine's own `ENDPOINT` or `REGION` must not redirect a client.
    let stores = stores(&[
        KEYS[0],
        KEYS[1],
        ("ENDPOINT", "http://evil"),
        ("TIMEOUT", "x"),
        ("BUCKET", "other"),
    ]);
    let (store, _) = stores.open(&url("s3://bucket/key")).unwrap();
    assert_eq!(store.to_string(), "AmazonS3(bucket)");
}

#[test]
fn addresses_are_shown_without_secrets() {
    assert_eq!(
        redacted(&url("https://me:hush@host/a?sig=hush")),
        "https://me:…@host/a?…"
    );
    assert_eq!(redacted(&url("s3://bucket/a b")), "s3://bucket/a%20b");
}

/// Debug output of the provider of a bucket's credentials.
fn provider(variables: &[(&str, &str)], bucket: &str) -> String {
    let (stores, url) = (stores(variables), url(bucket));
    match url.scheme() {
        "s3" => format!("{:?}", stores.s3(&url).unwrap().credentials()),
        "gs" => format!("{:?}", stores.gcs(&url).unwrap().credentials()),
        _ => format!("{:?}", stores.azure(&url).unwrap().credentials()),
    }
}

/// `FirstCredentials` limits the wait for the metadata service, and reports the service's errors as
/// missing credentials. Other providers keep their own errors.
#[test]
fn only_credentials_of_the_metadata_service_are_wrapped() {
    let account = ("AZURE_STORAGE_ACCOUNT_NAME", "account");
    let wrapped = |variables: &[(&str, &str)], bucket| provider(variables, bucket).contains("FirstCredentials");
    assert!(wrapped(&[], "s3://bucket/key"));
    assert!(wrapped(&[account], "az://container/key"));
    // A Google login of the person who runs the tests takes precedence over the metadata service.
    let login = std::env::home_dir().map(|home| home.join(".config/gcloud/application_default_credentials.json"));
    assert!(wrapped(&[], "gs://bucket/key") || login.is_some_and(|login| login.exists()));
    let web_identity = [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere/token"),
        ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"),
    ];
    assert!(!wrapped(&web_identity, "s3://bucket/key"));
    assert!(!wrapped(&KEYS, "s3://bucket/key"));
    assert!(!wrapped(
        &[account, ("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")],
        "az://container/key"
    ));
}
