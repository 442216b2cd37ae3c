//! Access to web servers (`http://`, `https://`): redirects and resolved names are checked before a
//! request follows them.
//!
//! A server may send a redirect, and a name may resolve to any address. Neither may lead a request
//! to a link-local address or metadata service (see [`super::hosts`]) that the user did not name.
//! In a process that works on queued jobs, redirects may lead only to addresses that those jobs may
//! read.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use object_store::ClientOptions;
use object_store::client::{HttpClient, HttpConnector};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect;
use url::Url;

use super::error::found;
use super::hosts::{is_link_local, names_link_local};

/// Maximum redirects per request, about as many as in browsers and in reqwest itself.
const REDIRECTS_MAX: usize = 10;

/// Whether a redirect may lead to an address.
pub type MayFollow = Arc<dyn Fn(&Url) -> bool + Send + Sync>;

/// A request that was refused although a server or a name leads to it. A retry would not change
/// that.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

/// The refusal in a chain of errors, if there is one.
pub fn refusal<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e Refusal> {
    found(error)
}

/// Builds the client for one web server.
pub struct WebConnector {
    /// The server's own address, as configured.
    pub server: Url,
    pub timeout: Duration,
    pub connect_timeout: Duration,
    /// `None`: any address that is not link-local.
    pub may_follow: Option<MayFollow>,
}

impl std::fmt::Debug for WebConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("WebConnector").field(&self.server.host_str()).finish()
    }
}

impl WebConnector {
    fn redirects(&self) -> redirect::Policy {
        let may_follow = self.may_follow.clone();
        redirect::Policy::custom(move |attempt| {
            let to = super::clients::shown(attempt.url());
            if names_link_local(attempt.url()) {
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

    /// The name that may resolve to a link-local address: the server's own, if a person gave it at
    /// the command line, or if the worker accepts it and it is by itself a metadata service's name.
    fn exempt(&self) -> Option<String> {
        let told = self.may_follow.is_none() || names_link_local(&self.server);
        told.then(|| self.server.host_str().map(str::to_ascii_lowercase))
            .flatten()
    }

    /// A client that resolves names with `lookup`.
    fn client(&self, lookup: Lookup) -> reqwest::Result<reqwest::Client> {
        let exempt = self.exempt();
        reqwest::Client::builder()
            .user_agent(concat!("gristmill/", env!("CARGO_PKG_VERSION")))
            .timeout(self.timeout)
            .connect_timeout(self.connect_timeout)
            // Plain HTTP is allowed if the address says `http://`; a redirect from `https://` must
            // not lead to an unencrypted response.
            .http1_only()
            .https_only(self.server.scheme() != "http")
            .redirect(self.redirects())
            .dns_resolver(Arc::new(Names { exempt, lookup }))
            .build()
    }
}

impl HttpConnector for WebConnector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = self.client(by_system).map_err(|source| object_store::Error::Generic {
            store: "HTTP",
            source: Box::new(source),
        })?;
        Ok(HttpClient::new(client))
    }
}

/// A client that posts to `url`. It follows no redirect, and no name that resolves to a link-local
/// address. A request ends within `timeout`.
pub fn poster(url: &Url, timeout: Duration) -> reqwest::Result<reqwest::Client> {
    poster_by(by_system, url, timeout)
}

fn poster_by(lookup: Lookup, url: &Url, timeout: Duration) -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder()
        .user_agent(concat!("gristmill/", env!("CARGO_PKG_VERSION")))
        .timeout(timeout)
        .http1_only()
        .https_only(url.scheme() != "http")
        .redirect(redirect::Policy::none())
        .dns_resolver(Arc::new(Names { exempt: None, lookup }))
        .build()
}

/// Resolves a name to its addresses.
type Lookup = fn(String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>>;

fn by_system(name: String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> {
    Box::pin(async move { Ok(tokio::net::lookup_host((name, 0)).await?.collect()) })
}

/// A resolver that filters out link-local addresses.
struct Names {
    exempt: Option<String>,
    lookup: Lookup,
}

impl Resolve for Names {
    fn resolve(&self, name: Name) -> Resolving {
        let exempt = self.exempt.as_deref() == Some(&name.as_str().to_ascii_lowercase());
        let lookup = (self.lookup)(name.as_str().to_string());
        Box::pin(async move {
            let found = lookup.await?;
            let kept: Vec<SocketAddr> = if exempt { found } else { allowed(name.as_str(), found)? };
            Ok(Box::new(kept.into_iter()) as Addrs)
        })
    }
}

fn allowed(name: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Refusal> {
    let kept: Vec<SocketAddr> = found.iter().filter(|at| !is_link_local(at.ip())).copied().collect();
    if kept.is_empty() && !found.is_empty() {
        Err(Refusal(format!(
            "`{name}` resolves to {}, a link-local address or metadata service",
            found[0].ip()
        )))
    } else {
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_for_a_link_local_address_leads_nowhere() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (metadata, plain) = (at("169.254.169.254:0"), at("192.0.2.1:0"));
        assert!(allowed("x", vec![metadata, at("[fe80::1]:0")]).is_err());
        assert_eq!(allowed("x", vec![metadata, plain]).unwrap(), [plain]);
        assert_eq!(allowed("x", Vec::new()).unwrap(), []);
    }

    #[test]
    fn a_name_is_exempt_where_it_was_named_for_that() {
        let exempt = |server: &str, queued: bool| {
            let connector = WebConnector {
                server: Url::parse(server).unwrap(),
                timeout: Duration::from_secs(1),
                connect_timeout: Duration::from_secs(1),
                may_follow: queued.then(|| Arc::new(|_: &Url| true) as MayFollow),
            };
            connector.exempt()
        };
        assert_eq!(exempt("http://board.local/x", false).as_deref(), Some("board.local"));
        assert_eq!(exempt("http://board.local/x", true), None);
        assert!(exempt("http://metadata.google.internal/x", true).is_some());
    }

    /// Names as a hostile name server resolves them.
    fn by_stranger(name: String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> {
        let ip = match name.as_str() {
            "rows.example" => "127.0.0.1",
            _ => "169.254.169.254",
        };
        Box::pin(async move { Ok(vec![format!("{ip}:0").parse().unwrap()]) })
    }

    /// A server that redirects to `http://sneaky.example/`; its port.
    fn redirecting() -> u16 {
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
        let rows = format!("http://rows.example:{}/", redirecting());
        for (server, queued) in [("http://sneaky.example/", true), (&rows, true), (&rows, false)] {
            let connector = WebConnector {
                server: Url::parse(server).unwrap(),
                timeout: Duration::from_secs(5),
                connect_timeout: Duration::from_secs(1),
                may_follow: queued.then(|| Arc::new(|_: &Url| true) as MayFollow),
            };
            let client = connector.client(by_stranger).unwrap();
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
        let client = poster_by(by_stranger, &url, Duration::from_secs(5)).unwrap();
        let error = client.post(url).send().await.unwrap_err();
        assert!(refusal(&error).is_some(), "{error:?}");
    }

    #[tokio::test]
    async fn the_systems_answers_are_filtered() {
        let names = Names {
            exempt: None,
            lookup: by_system,
        };
        // An address in any form needs no name server.
        let name = "169.254.169.254".parse().unwrap();
        let error = names.resolve(name).await.map(|_| ()).unwrap_err();
        assert!(refusal(&*error).is_some(), "{error}");
        assert_eq!(names.resolve("127.0.0.1".parse().unwrap()).await.unwrap().count(), 1);
    }
}
