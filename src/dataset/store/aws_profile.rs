//! AWS profiles: `~/.aws/credentials` and `~/.aws/config`.
//!
//! Keys (with a session token), region and endpoint are taken from these files. The files are read
//! again when they change, so a long job picks up keys that another tool renews. Profiles that need
//! a login are refused with a line that says how to get keys.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

type Variables = BTreeMap<String, String>;

/// One profile's settings.
#[derive(Clone, Default)]
pub struct Profile {
    name: String,
    pub region: Option<String>,
    pub endpoint: Option<String>,
    settings: BTreeMap<String, String>,
}

/// How a profile gets its keys.
pub enum KeySource {
    /// The profile has settings only.
    None,
    Static(AwsCredential),
    WebIdentity {
        token_file: String,
        role: String,
    },
}

/// The profile that `AWS_PROFILE` names, else `default` if it exists. An error is one line.
pub fn find(variables: &Variables) -> Result<Option<Profile>, String> {
    let requested = variables.get("AWS_PROFILE").filter(|name| !name.is_empty());
    let name = requested.map_or("default", String::as_str);
    let files = ProfileFiles::of(variables);
    let mut settings = BTreeMap::new();
    let mut found = false;
    // The credentials file is read last, since its settings override those of the config file.
    for (file, section) in [
        (&files.config, config_section_name(name)),
        (&files.credentials, name.to_string()),
    ] {
        let Some(text) = read(file)? else { continue };
        if let Some(section) = parse_section(&text, &section) {
            found = true;
            settings.extend(section);
        }
    }
    match (found, requested) {
        (true, _) => Ok(Some(Profile {
            name: name.to_string(),
            region: settings.get("region").cloned(),
            endpoint: settings.get("endpoint_url").cloned(),
            settings,
        })),
        (false, None) => Ok(None),
        (false, Some(name)) => Err(format!(
            "`AWS_PROFILE` names `{name}`, which is neither in `{}` nor in `{}`",
            files.display(&files.credentials),
            files.display(&files.config)
        )),
    }
}

impl Profile {
    /// How this profile gets its keys. An error is one line.
    pub fn key_source(&self) -> Result<KeySource, String> {
        let get = |key: &str| self.settings.get(key).filter(|value| !value.is_empty()).cloned();
        let name = &self.name;
        if let (Some(role), Some(token_file)) = (get("role_arn"), get("web_identity_token_file")) {
            return Ok(KeySource::WebIdentity { token_file, role });
        }
        // A role takes precedence over keys of the same profile, as in Amazon's own tools.
        if get("role_arn").is_some() {
            return Err(login_error(name, "assumes a role"));
        }
        match (get("aws_access_key_id"), get("aws_secret_access_key")) {
            (Some(key_id), Some(secret_key)) => Ok(KeySource::Static(AwsCredential {
                key_id,
                secret_key,
                token: get("aws_session_token"),
            })),
            (Some(_), None) => Err(format!("profile `{name}` has no `aws_secret_access_key`")),
            (None, Some(_)) => Err(format!("profile `{name}` has no `aws_access_key_id`")),
            (None, None) if get("sso_session").or(get("sso_start_url")).is_some() => {
                Err(login_error(name, "signs in by SSO"))
            }
            (None, None) if get("credential_process").is_some() => {
                Err(login_error(name, "runs a program for its keys"))
            }
            (None, None) => Ok(KeySource::None),
        }
    }
}

/// The error for a profile that needs a login. `action` is what the profile does for its keys.
fn login_error(name: &str, action: &str) -> String {
    format!(
        "profile `{name}` {action}, which gristmill does not do: set the variables that `aws configure \
         export-credentials --profile {name} --format env` prints"
    )
}

/// The keys of a profile, read again when its files change.
pub struct ProfileCredentials {
    variables: Variables,
    /// The keys, and the times of the files from which they were read.
    last: Mutex<(ModifiedTimes, Arc<AwsCredential>)>,
}

/// Times of the last change of the credentials file and of the config file.
type ModifiedTimes = [Option<SystemTime>; 2];

impl ProfileCredentials {
    /// The credentials of `profile`, which was found with `variables` and must have static keys.
    pub fn new(variables: &Variables, profile: Profile) -> Result<ProfileCredentials, String> {
        let modified_times = ProfileFiles::of(variables).modified_times();
        let KeySource::Static(keys) = profile.key_source()? else {
            return Err(format!("profile `{}` has no keys", profile.name));
        };
        Ok(ProfileCredentials {
            variables: variables.clone(),
            last: Mutex::new((modified_times, Arc::new(keys))),
        })
    }

    fn current(&self) -> Arc<AwsCredential> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let modified_times = ProfileFiles::of(&self.variables).modified_times();
        if modified_times != last.0 {
            match find(&self.variables).and_then(|found| found.map(|profile| profile.key_source()).transpose()) {
                Ok(Some(KeySource::Static(keys))) => *last = (modified_times, Arc::new(keys)),
                // The old keys may still be valid, and another program may be writing a file right
                // now.
                Ok(_) => tracing::warn!("the AWS profile has no keys any more: going on with the last ones"),
                Err(why) => tracing::warn!("{why}: going on with the last keys"),
            }
        }
        last.1.clone()
    }
}

impl std::fmt::Debug for ProfileCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProfileCredentials")
    }
}

#[async_trait]
impl CredentialProvider for ProfileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        Ok(self.current())
    }
}

/// Paths of the two files; `None` if both the variable of the file and `HOME` are unset.
struct ProfileFiles {
    credentials: Option<PathBuf>,
    config: Option<PathBuf>,
}

impl ProfileFiles {
    fn of(variables: &Variables) -> ProfileFiles {
        let file = |variable: &str, name: &str| {
            let set = |name: &str| variables.get(name).filter(|value| !value.is_empty());
            let home = || set("HOME").map(|home| PathBuf::from(home).join(".aws").join(name));
            set(variable).map(PathBuf::from).or_else(home)
        };
        ProfileFiles {
            credentials: file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config: file("AWS_CONFIG_FILE", "config"),
        }
    }

    fn modified_times(&self) -> ModifiedTimes {
        [&self.credentials, &self.config].map(|file| std::fs::metadata(file.as_ref()?).ok()?.modified().ok())
    }

    fn display(&self, file: &Option<PathBuf>) -> String {
        file.as_ref()
            .map_or_else(|| "~/.aws".into(), |file| file.display().to_string())
    }
}

fn read(file: &Option<PathBuf>) -> Result<Option<String>, String> {
    let Some(file) = file else { return Ok(None) };
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("cannot read `{}`: {error}", file.display())),
    }
}

fn config_section_name(name: &str) -> String {
    match name {
        "default" => name.to_string(),
        _ => format!("profile {name}"),
    }
}

/// The settings of one section, with keys in lower case; `None` if the section is missing.
fn parse_section(text: &str, wanted: &str) -> Option<BTreeMap<String, String>> {
    let mut found: Option<BTreeMap<String, String>> = None;
    let mut inside = false;
    for line in text.lines() {
        let trimmed = line.trim();
        // Indented lines are nested settings, which are not used here.
        if trimmed.is_empty() || line.starts_with([' ', '\t', '#', ';']) {
            continue;
        }
        if let Some(section) = trimmed.strip_prefix('[') {
            let name = section.split(']').next().unwrap_or_default();
            inside = name.split_whitespace().eq(wanted.split_whitespace());
            if inside {
                found.get_or_insert_default();
            }
        } else if inside && let Some((key, value)) = trimmed.split_once('=') {
            let value = value.split(" #").next().unwrap_or_default().trim();
            found
                .get_or_insert_default()
                .insert(key.trim().to_ascii_lowercase(), value.to_string());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Variables that lead to these two files.
    fn files(credentials: &str, config: &str) -> (tempfile::TempDir, Variables) {
        let folder = tempfile::tempdir().unwrap();
        let aws = folder.path().join(".aws");
        std::fs::create_dir(&aws).unwrap();
        std::fs::write(aws.join("credentials"), credentials).unwrap();
        std::fs::write(aws.join("config"), config).unwrap();
        let home = folder.path().display().to_string();
        (folder, BTreeMap::from([("HOME".to_string(), home)]))
    }

    fn named(mut variables: Variables, name: &str) -> Variables {
        variables.insert("AWS_PROFILE".into(), name.into());
        variables
    }

    const CREDENTIALS: &str = "# mine\n[default]\naws_access_key_id = A\naws_secret_access_key=S=/+\n\n[work]\n\
                               aws_access_key_id=WA\naws_secret_access_key=WS # secret\naws_session_token=WT\n";
    const CONFIG: &str = "[default]\nregion=eu-west-1\ns3 =\n  region = wrong\n[profile work]\nRegion = us-west-2\n\
                          endpoint_url = https://minio.example\naws_access_key_id = old\n\
                          [profile sso]\nsso_session = x\n[profile role]\nrole_arn = arn:x\nsource_profile = work\n\
                          [profile web]\nrole_arn = arn:x\nweb_identity_token_file = /token\n\
                          [profile program]\ncredential_process = /bin/keys\n[profile half]\naws_access_key_id = A\n";

    fn keys(profile: &Profile) -> AwsCredential {
        match profile.key_source().unwrap() {
            KeySource::Static(keys) => keys,
            _ => panic!("no keys"),
        }
    }

    #[test]
    fn profiles_are_merged_from_both_files() {
        let (_folder, variables) = files(CREDENTIALS, CONFIG);
        let profile = find(&variables).unwrap().unwrap();
        assert_eq!(profile.region.as_deref(), Some("eu-west-1"));
        assert_eq!(
            (keys(&profile).key_id.as_str(), keys(&profile).secret_key.as_str()),
            ("A", "S=/+")
        );
        assert_eq!(keys(&profile).token, None);
        let work = find(&named(variables, "work")).unwrap().unwrap();
        assert_eq!(work.region.as_deref(), Some("us-west-2"));
        assert_eq!(work.endpoint.as_deref(), Some("https://minio.example"));
        assert_eq!(
            (keys(&work).key_id.as_str(), keys(&work).secret_key.as_str()),
            ("WA", "WS")
        );
        assert_eq!(keys(&work).token.as_deref(), Some("WT"));
    }

    #[test]
    fn profiles_that_need_a_login_are_refused_in_one_line() {
        let (_folder, variables) = files(CREDENTIALS, CONFIG);
        for (name, word) in [
            ("sso", "SSO"),
            ("role", "assumes a role"),
            ("program", "runs a program"),
            ("half", "no `aws_secret"),
        ] {
            let profile = find(&named(variables.clone(), name)).unwrap().unwrap();
            let Err(why) = profile.key_source() else {
                panic!("{name} has keys")
            };
            assert!(why.contains(word) && why.contains(name) && !why.contains('\n'), "{why}");
        }
        let web = find(&named(variables.clone(), "web")).unwrap().unwrap();
        assert!(matches!(web.key_source(), Ok(KeySource::WebIdentity { .. })));
        let Err(why) = find(&named(variables, "gone")) else {
            panic!("found")
        };
        assert!(why.contains("`gone`"), "{why}");
    }

    #[test]
    fn without_files_there_is_no_default_profile() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().display().to_string();
        assert!(find(&BTreeMap::from([("HOME".to_string(), home)])).unwrap().is_none());
        assert!(find(&Variables::new()).unwrap().is_none());
    }

    #[test]
    fn renewed_keys_are_read_and_a_broken_file_keeps_the_last() {
        let (folder, variables) = files("[default]\naws_access_key_id=1\naws_secret_access_key=S", "");
        let credentials = ProfileCredentials::new(&variables, find(&variables).unwrap().unwrap()).unwrap();
        let file = folder.path().join(".aws/credentials");
        let write = |text: &str, second| {
            std::fs::write(&file, text).unwrap();
            let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(second);
            std::fs::File::open(&file).unwrap().set_modified(time).unwrap();
        };
        assert_eq!(credentials.current().key_id, "1");
        write("[default]\naws_access_key_id=2\naws_secret_access_key=S", 1000);
        assert_eq!(credentials.current().key_id, "2");
        write("[default]\naws_access_key_id=3", 2000);
        assert_eq!(credentials.current().key_id, "2");
        write("[default]\naws_access_key_id=4\naws_secret_access_key=S", 3000);
        assert_eq!(credentials.current().key_id, "4");
        assert_eq!(format!("{credentials:?}"), "ProfileCredentials");
    }
}
