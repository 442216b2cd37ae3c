//! Access to web servers (`http://`, `https://`): redirects and resolved addresses are checked
//! before a request is sent there.
//!
//! A server may send a redirect, and a name may resolve to any address. Both could lead a request
//! to a link-local address or metadata service (see [`super::hosts`]). Such requests are refused
//! unless the user named that host. In a process that works on queued jobs, redirects may lead only
//! to addresses that those jobs may read.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use object_store::ClientOptions;
use object_store::client::{HttpClient, HttpConnector};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect;
use url::Url;

use super::error::find_source;
use super::hosts::{is_link_local, is_link_local_url};

/// Maximum redirects per request, about as many as in browsers and in reqwest itself.
const REDIRECTS_MAX: usize = 10;

/// Maximum seconds without a byte of a download.
const READ_SECONDS_MAX: u64 = 60;
/// Maximum seconds until a download's server is connected.
const CONNECT_SECONDS_MAX: u64 = 10;

/// Returns whether a redirect to an address may be followed.
pub type MayFollow = Arc<dyn Fn(&Url) -> bool + Send + Sync>;

/// The reason why a redirect or a resolved address was not followed. A retry would fail too.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

/// The refusal in a chain of errors, if there is one.
pub fn refusal<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e Refusal> {
    find_source(error)
}

/// Builds the client for one web server.
pub struct WebConnector {
    /// The server's own address, as configured.
    pub server: Url,
    pub timeout: Duration,
    pub connect_timeout: Duration,
    /// The allowed targets of redirects; `None`: all addresses that are not link-local.
    pub may_follow: Option<MayFollow>,
}

impl std::fmt::Debug for WebConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("WebConnector").field(&self.server.host_str()).finish()
    }
}

impl WebConnector {
    fn redirect_policy(&self) -> redirect::Policy {
        let may_follow = self.may_follow.clone();
        redirect::Policy::custom(move |attempt| {
            let to = super::clients::redacted(attempt.url());
            if is_link_local_url(attempt.url()) {
                return attempt.error(Refusal(format!(
                    "it redirects to `{to}`, a link-local address or metadata service, which is not followed"
                )));
            }
            if let Some(may_follow) = &may_follow
                && !may_follow(attempt.url())
            {
                let host = attempt.url().origin().ascii_serialization();
                return attempt.error(Refusal(format!(
                    "it redirects to `{to}`, which this job may not read; to have it read, give `--accept-inputs {host}/`"
                )));
            }
            if attempt.previous().len() > REDIRECTS_MAX {
                return attempt.error(Refusal(format!("it redirects more than {REDIRECTS_MAX} times")));
            }
            attempt.follow()
        })
    }

    /// The host name that may resolve to a link-local address. It is the server's name if a person
    /// gave the address at the command line (`may_follow` is `None`). In a worker, which has
    /// accepted the address, it is the server's name only if that names a metadata service.
    fn exempt_name(&self) -> Option<String> {
        let is_exempt = self.may_follow.is_none() || is_link_local_url(&self.server);
        is_exempt
            .then(|| self.server.host_str().map(str::to_ascii_lowercase))
            .flatten()
    }

    /// A client that resolves names with `lookup`.
    fn client(&self, lookup: Lookup) -> reqwest::Result<reqwest::Client> {
        client_builder(&self.server, self.exempt_name(), lookup)
            .timeout(self.timeout)
            .connect_timeout(self.connect_timeout)
            .redirect(self.redirect_policy())
            .build()
    }
}

impl HttpConnector for WebConnector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = self
            .client(system_lookup)
            .map_err(|source| object_store::Error::Generic {
                store: "HTTP",
                source: Box::new(source),
            })?;
        Ok(HttpClient::new(client))
    }
}

/// A client for posts to `url`. It follows no redirects and connects to no link-local address. A
/// request ends within `timeout`.
pub fn post_client(url: &Url, timeout: Duration) -> reqwest::Result<reqwest::Client> {
    post_client_with(system_lookup, url, timeout)
}

fn post_client_with(lookup: Lookup, url: &Url, timeout: Duration) -> reqwest::Result<reqwest::Client> {
    client_builder(url, None, lookup)
        .timeout(timeout)
        .redirect(redirect::Policy::none())
        .build()
}

/// A client for downloads from `server`, a person's own choice. A download may take any time, but
/// its bytes must not pause for `READ_SECONDS_MAX`. If it `follows` redirects, they do not lead to
/// link-local addresses, and other servers get no token.
pub fn download_client(server: &Url, follows: bool) -> reqwest::Result<reqwest::Client> {
    let connector = WebConnector {
        server: server.clone(),
        timeout: Duration::from_secs(READ_SECONDS_MAX),
        connect_timeout: Duration::from_secs(CONNECT_SECONDS_MAX),
        may_follow: None,
    };
    let policy = if follows {
        connector.redirect_policy()
    } else {
        redirect::Policy::none()
    };
    client_builder(server, connector.exempt_name(), system_lookup)
        .read_timeout(connector.timeout)
        .connect_timeout(connector.connect_timeout)
        .redirect(policy)
        .build()
}

/// What all clients for `server` have in common.
fn client_builder(server: &Url, exempt_name: Option<String>, lookup: Lookup) -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .user_agent(concat!("gristmill/", env!("CARGO_PKG_VERSION")))
        .http1_only()
        // Plain HTTP is allowed if the address says `http://`; a redirect from `https://` must not
        // lead to an unencrypted response.
        .https_only(server.scheme() != "http")
        .dns_resolver(Arc::new(LinkLocalFilter { exempt_name, lookup }))
}

/// Resolves a name to its addresses.
type Lookup = fn(String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>>;

fn system_lookup(name: String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> {
    Box::pin(async move { Ok(tokio::net::lookup_host((name, 0)).await?.collect()) })
}

/// A resolver that filters out link-local addresses.
struct LinkLocalFilter {
    exempt_name: Option<String>,
    lookup: Lookup,
}

impl Resolve for LinkLocalFilter {
    fn resolve(&self, name: Name) -> Resolving {
        let is_exempt = self.exempt_name.as_deref() == Some(&name.as_str().to_ascii_lowercase());
        let lookup = (self.lookup)(name.as_str().to_string());
        Box::pin(async move {
            let found = lookup.await?;
            let allowed: Vec<SocketAddr> = if is_exempt {
                found
            } else {
                without_link_local(name.as_str(), found)?
            };
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

/// The addresses of `name` that are not link-local. Fails if all of them are.
fn without_link_local(name: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Refusal> {
    let others: Vec<SocketAddr> = found.iter().filter(|one| !is_link_local(one.ip())).copied().collect();
    if others.is_empty() && !found.is_empty() {
        Err(Refusal(format!(
            "`{name}` resolves to {}, a link-local address or metadata service",
            found[0].ip()
        )))
    } else {
        Ok(others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_local_addresses_of_a_name_are_left_out() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (metadata, plain) = (at("169.254.169.254:0"), at("192.0.2.1:0"));
        assert!(without_link_local("x", vec![metadata, at("[fe80::1]:0")]).is_err());
        assert_eq!(without_link_local("x", vec![metadata, plain]).unwrap(), [plain]);
        assert_eq!(without_link_local("x", Vec::new()).unwrap(), []);
    }

    #[test]
    fn a_name_is_exempt_if_a_person_gave_it_or_if_it_names_a_metadata_service() {
        let exempt_name = |server: &str, queued: bool| {
            let connector = WebConnector {
                server: Url::parse(server).unwrap(),
                timeout: Duration::from_secs(1),
                connect_timeout: Duration::from_secs(1),
                may_follow: queued.then(|| Arc::new(|_: &Url| true) as MayFollow),
            };
            connector.exempt_name()
        };
        assert_eq!(
            exempt_name("http://board.local/x", false).as_deref(),
            Some("board.local")
        );
        assert_eq!(exempt_name("http://board.local/x", true), None);
        assert!(exempt_name("http://metadata.google.internal/x", true).is_some());
    }

    /// A hostile name server.
    fn hostile_lookup(name: String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> {
        let ip = match name.as_str() {
            "rows.example" => "127.0.0.1",
            _ => "169.254.169.254",
        };
        Box::pin(async move { Ok(vec![format!("{ip}:0").parse().unwrap()]) })
    }

    /// A server that redirects to `http://sneaky.example/`; its port.
    fn spawn_redirecting_server() -> u16 {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            use std::io::{Read, Write};
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _length = stream.read(&mut [0; 4096]).unwrap();
                let answer = "HTTP/1.1 302 Found\r\nLocation: http://sneaky.example/\r\nContent-Length: 0\r\n\r\n";
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        port
    }

    /// No request is sent to a name that resolves to a metadata service, whether a queued job or a
    /// redirect gives it.
    #[tokio::test]
    async fn a_request_follows_no_name_to_a_metadata_service() {
        let rows = format!("http://rows.example:{}/", spawn_redirecting_server());
        for (server, queued) in [("http://sneaky.example/", true), (&rows, true), (&rows, false)] {
            let connector = WebConnector {
                server: Url::parse(server).unwrap(),
                timeout: Duration::from_secs(5),
                connect_timeout: Duration::from_secs(1),
                may_follow: queued.then(|| Arc::new(|_: &Url| true) as MayFollow),
            };
            let client = connector.client(hostile_lookup).unwrap();
            let error = client.get(server).send().await.unwrap_err();
            let why = refusal(&error).unwrap_or_else(|| panic!("{server}: {error:?}"));
            assert_eq!(
                why.to_string(),
                "`sneaky.example` resolves to 169.254.169.254, a link-local address or metadata service"
            );
        }
    }

    #[tokio::test]
    async fn nothing_is_posted_by_name_to_a_metadata_service() {
        let url = Url::parse("http://sneaky.example/").unwrap();
        let client = post_client_with(hostile_lookup, &url, Duration::from_secs(5)).unwrap();
        let error = client.post(url).send().await.unwrap_err();
        assert!(refusal(&error).is_some(), "{error:?}");
    }

    #[tokio::test]
    async fn the_systems_answers_are_filtered() {
        let resolver = LinkLocalFilter {
            exempt_name: None,
            lookup: system_lookup,
        };
        // An address in any form needs no name server.
        let name = "169.254.169.254".parse().unwrap();
        let error = resolver.resolve(name).await.map(|_| ()).unwrap_err();
        assert!(refusal(&*error).is_some(), "{error}");
        assert_eq!(resolver.resolve("127.0.0.1".parse().unwrap()).await.unwrap().count(), 1);
    }
}
