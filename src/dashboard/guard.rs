//! What protects a dashboard without keys, which only this machine may reach, from pages of other
//! sites in a browser on this machine.
//!
//! * A name of another site may be made to lead to this machine (DNS rebinding). Its requests have
//!   that name in `Host`, so only names of this machine are answered.
//! * Another site's page may send requests without reading the answers. A request that changes
//!   something must be of a type that browsers send to other sites only after asking, and must not
//!   say that it comes from another site.

use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderName, Method, header};

use super::error::ApiError;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Checks a request to the API of a dashboard without keys.
///
/// # Errors
/// The request may come from a page of another site.
pub fn check_local_request(method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    check_site(method, headers)?;
    if *method == Method::GET || *method == Method::HEAD {
        return Ok(());
    }
    let content_type = text(headers, &header::CONTENT_TYPE).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        Ok(())
    } else {
        Err(ApiError::forbidden("send `Content-Type: application/json`"))
    }
}

/// As [`check_local_request`], for an API whose clients may send bodies of any type.
///
/// # Errors
/// The request comes from a page of another site, as far as its browser tells.
pub fn check_site(method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    let host = text(headers, &header::HOST).unwrap_or_default();
    if !is_this_machine(host) {
        return Err(ApiError::forbidden(
            "without keys, only requests to this machine's own names (`localhost`, `127.0.0.1`, `[::1]`) are answered",
        ));
    }
    if *method == Method::GET || *method == Method::HEAD {
        return Ok(());
    }
    let is_other_site =
        headers.contains_key(SEC_FETCH_SITE) && !matches!(text(headers, &SEC_FETCH_SITE), Some("same-origin" | "none"));
    let is_other_origin = headers.contains_key(header::ORIGIN)
        && text(headers, &header::ORIGIN) != Some(&format!("http://{host}"))
        && text(headers, &header::ORIGIN) != Some(&format!("https://{host}"));
    if is_other_site || is_other_origin {
        return Err(ApiError::forbidden("the request comes from a page of another site"));
    }
    Ok(())
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Whether `host`, with or without a port, is an address or the name of this machine alone.
fn is_this_machine(host: &str) -> bool {
    let is_port = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let name = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, "")) => address,
            Some((address, port)) if port.strip_prefix(':').is_some_and(is_port) => address,
            _ => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) if is_port(port) => name,
            Some(_) => return false,
            None => host,
        },
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: Method, headers: &[(&'static str, &str)]) -> bool {
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()));
        check_local_request(&method, &headers.collect()).is_ok()
    }

    #[test]
    fn only_names_of_this_machine_are_answered() {
        for host in [
            "localhost",
            "LOCALHOST:8680",
            "127.0.0.1:1",
            "127.8.8.8",
            "[::1]:80",
            "[::1]",
        ] {
            assert!(check(Method::GET, &[("host", host)]), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8680",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "0.0.0.0",
            "[::1].evil.example",
            "localhost:8680:1",
            "localhost:x",
            "",
        ] {
            assert!(!check(Method::GET, &[("host", host)]), "{host}");
        }
        assert!(!check(Method::GET, &[]));
    }

    #[test]
    fn changes_are_refused_to_other_sites() {
        let host = ("host", "localhost:8680");
        let json = ("content-type", "application/json; charset=utf-8");
        assert!(check(Method::POST, &[host, json]));
        assert!(check(
            Method::POST,
            &[
                host,
                json,
                ("origin", "http://localhost:8680"),
                ("sec-fetch-site", "same-origin")
            ]
        ));
        assert!(!check(Method::POST, &[host]));
        for kind in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "text/plain; application/json",
        ] {
            assert!(!check(Method::POST, &[host, ("content-type", kind)]), "{kind}");
        }
        for site in ["cross-site", "same-site", "odd"] {
            assert!(!check(Method::POST, &[host, json, ("sec-fetch-site", site)]), "{site}");
        }
        for origin in [
            "http://evil.example",
            "null",
            "http://localhost:9999",
            "http://localhost",
        ] {
            assert!(!check(Method::POST, &[host, json, ("origin", origin)]), "{origin}");
        }
        assert!(!check(Method::POST, &[("host", "evil.example"), json]));
    }
}
