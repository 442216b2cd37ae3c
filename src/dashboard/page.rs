//! The page, and the headers that keep it from loading or running anything that is no part of it.

use std::sync::LazyLock;

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("page.html");

/// The page's `Content-Security-Policy`: its own script and style by their hashes, and the API.
static POLICY: LazyLock<Option<HeaderValue>> = LazyLock::new(|| HeaderValue::try_from(policy(PAGE)).ok());

/// `GET /`
pub async fn show_page() -> Response {
    let mut response = PAGE.into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/html; charset=utf-8"),
    );
    // Hashes are text without special characters, so there always is a policy.
    if let Some(policy) = &*POLICY {
        headers.insert(header::CONTENT_SECURITY_POLICY, policy.clone());
    }
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        // The page and the API's form belong to one version.
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn policy(page: &str) -> String {
    format!(
        "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; form-action \
         'none'; frame-ancestors 'none'",
        sources(page, "script"),
        sources(page, "style")
    )
}

/// The hashes of the inline elements of this name.
fn sources(page: &str, element: &str) -> String {
    let (open, close) = (format!("<{element}"), format!("</{element}>"));
    let inline = page.split(open.as_str()).skip(1).filter_map(|rest| {
        let rest = rest
            .strip_prefix(|c: char| c == '>' || c.is_ascii_whitespace())
            .map(|_| rest)?;
        let (_, rest) = rest.split_once('>')?;
        let (text, _) = rest.split_once(close.as_str())?;
        Some(format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text))))
    });
    let hashes: Vec<String> = inline.collect();
    if hashes.is_empty() {
        "'none'".into()
    } else {
        hashes.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_has_the_hash_of_each_inline_element() {
        // The hash is that of the specification's example.
        let page = "<style>a{}</style><script>alert('Hello, world.');</script><script type=\"x\">2</script><scripty>3";
        let hash = "'sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng='";
        let second = format!("'sha256-{}'", STANDARD.encode(Sha256::digest("2")));
        assert_eq!(sources(page, "script"), format!("{hash} {second}"));
        assert!(policy(page).contains(&format!("script-src {hash} {second}; style-src 'sha256-")));
        assert_eq!(sources("<p>", "style"), "'none'");
    }

    #[tokio::test]
    async fn the_page_needs_nothing_else() {
        let response = show_page().await;
        let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'sha256-"),
            "{policy}"
        );
        for word in ["unsafe", "http:", "https:", "*"] {
            assert!(!policy.contains(word), "{policy}");
        }
    }
}
