//! How web servers (`http://`, `https://`) are reached: redirects and names are looked at before a request follows them.
//!
//! A server may answer with a redirect, and a name may resolve to any address. Neither may lead a request to a link-local address or a
//! metadata service (see [`super::hosts`]) that nobody named. In a process that works on queued jobs, redirects lead only to where
//! those jobs may read.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use object_store::ClientOptions;
use object_store::client::{HttpClient, HttpConnector};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect;
use url::Url;

use super::hosts::{is_link_local, names_link_local};

/// Redirects of one request, as browsers and reqwest itself have it, more or less.
const REDIRECTS_MAX: usize = 10;

/// Whether a redirect may lead to an address.
pub type MayFollow = Arc<dyn Fn(&Url) -> bool + Send + Sync>;

/// Something that a request must not do, though a server or a name asks for it. Another try would not change that.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

/// The refusal in a chain of errors, where there is one.
pub fn refusal<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e Refusal> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(refusal) = error.downcast_ref::<Refusal>() {
            return Some(refusal);
        }
        next = error.source();
    }
    None
}

/// Makes the client for one web server.
pub struct WebConnector {
    /// The server's own address, as somebody named it.
    pub server: Url,
    pub timeout: Duration,
    pub connect_timeout: Duration,
    /// `None`: wherever is not link-local.
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
            let to = super::stores::shown(attempt.url());
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
                    "it redirects to `{to}`, which queued jobs may not read; to let them, start the worker with \
                     `--accept-inputs {host}/`"
                )));
            }
            if attempt.previous().len() > REDIRECTS_MAX {
                return attempt.error(Refusal(format!("it redirects more than {REDIRECTS_MAX} times")));
            }
            attempt.follow()
        })
    }

    /// The name that may resolve to a link-local address: that of the server, where a person at the command line named it, or where a
    /// worker was told to accept it by a name that means nothing else.
    fn exempt(&self) -> Option<String> {
        let told = self.may_follow.is_none() || names_link_local(&self.server);
        told.then(|| self.server.host_str().map(str::to_ascii_lowercase))
            .flatten()
    }
}

impl HttpConnector for WebConnector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = reqwest::Client::builder()
            .user_agent(concat!("gristmill/", env!("CARGO_PKG_VERSION")))
            .timeout(self.timeout)
            .connect_timeout(self.connect_timeout)
            // Who writes `http://` means it; from `https://` no redirect leads to an unencrypted answer.
            .http1_only()
            .https_only(self.server.scheme() != "http")
            .redirect(self.redirects())
            .dns_resolver(Arc::new(Names { exempt: self.exempt() }))
            .build();
        let client = client.map_err(|source| object_store::Error::Generic {
            store: "HTTP",
            source: Box::new(source),
        })?;
        Ok(HttpClient::new(client))
    }
}

/// Resolves names as the system does, without link-local addresses.
struct Names {
    exempt: Option<String>,
}

impl Resolve for Names {
    fn resolve(&self, name: Name) -> Resolving {
        let exempt = self.exempt.as_deref() == Some(&name.as_str().to_ascii_lowercase());
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let kept: Vec<SocketAddr> = match exempt {
                true => found,
                false => allowed(name.as_str(), found)?,
            };
            Ok(Box::new(kept.into_iter()) as Addrs)
        })
    }
}

fn allowed(name: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Refusal> {
    let kept: Vec<SocketAddr> = found.iter().filter(|at| !is_link_local(at.ip())).copied().collect();
    match kept.is_empty() && !found.is_empty() {
        true => Err(Refusal(format!(
            "`{name}` resolves to {}, a link-local address or metadata service",
            found[0].ip()
        ))),
        false => Ok(kept),
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
}
