//! Hosts that give out credentials or configuration of the requesting machine: link-local addresses
//! and clouds' metadata services. The checks are pure functions and resolve no names.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use url::{Host, Url};

/// Host names of clouds' metadata services.
const METADATA_NAMES: [&str; 5] = [
    "metadata",
    "metadata.google.internal",
    "metadata.goog",
    "instance-data",
    "instance-data.ec2.internal",
];
/// Metadata services outside the link-local range: Azure's wire server, Alibaba's, Oracle's older
/// one.
const METADATA_V4: [Ipv4Addr; 3] = [
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
];
/// Amazon's and Google's metadata services over IPv6.
const METADATA_V6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
];

/// Whether `ip` is a link-local address or a metadata service.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local() || METADATA_V4.contains(&ip),
        IpAddr::V6(ip) => {
            ip.is_unicast_link_local()
                || METADATA_V6.contains(&ip)
                || embedded_v4(ip).is_some_and(|inner| is_link_local(IpAddr::V4(inner)))
        }
    }
}

/// The IPv4 address embedded in an IPv6 address: mapped, compatible, NAT64 or 6to4.
fn embedded_v4(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let v4 = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match ip.segments() {
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        _ => None,
    }
}

/// Whether a URL's host is link-local or a metadata service. (URL parsing already turns decimal,
/// octal and hexadecimal forms into addresses.)
pub fn is_link_local_url(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(ip)) => is_link_local(ip.into()),
        Some(Host::Ipv6(ip)) => is_link_local(ip.into()),
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.').to_ascii_lowercase();
            METADATA_NAMES.contains(&name.as_str())
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_link_local_address_is_known() {
        for host in [
            "169.254.169.254",
            "169.254.0.1:8080",
            "2852039166",
            "0xa9fea9fe",
            "0xa9.0xfe.0xa9.0xfe",
            "0251.0376.0251.0376",
            "0251.254.43518",
            "169.254.43518",
            "%31%36%39.254.169.254",
            "１６９.254.169.254",
            "169.254.169.254.",
            "[fe80::1]",
            "[febf::1]",
            "[fd00:ec2::254]",
            "[::ffff:169.254.169.254]",
            "[::ffff:a9fe:a9fe]",
            "[::169.254.169.254]",
            "[64:ff9b::a9fe:a9fe]",
            "[2002:a9fe:a9fe::]",
            "168.63.129.16",
            "100.100.100.200",
            "metadata.google.internal",
            "METADATA.google.internal.",
            "metadata",
            "user@169.254.169.254",
        ] {
            let url = Url::parse(&format!("http://{host}/latest/meta-data")).unwrap();
            assert!(is_link_local_url(&url), "{host} → {url}");
        }
    }

    #[test]
    fn other_hosts_are_not_link_local() {
        for host in [
            "example.com",
            "169.253.1.1",
            "127.0.0.1",
            "10.0.0.1",
            "[::1]",
            "[2001:db8::1]",
            "metadata.example.com",
            "169.254.169.254.example.com",
        ] {
            let url = Url::parse(&format!("http://{host}/")).unwrap();
            assert!(!is_link_local_url(&url), "{host}");
        }
    }
}
