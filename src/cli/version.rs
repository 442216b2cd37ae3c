//! What `gristmill --version` prints: version, commit, target and what can compute.

use std::sync::LazyLock;

use crate::device::cpu::Isa;

/// Version and build, such as `0.1.0 (d3ae01d, x86_64-unknown-linux-gnu, cuda, cpu: avx512-vnni)`.
/// The last part is what the CPU of this machine computes with.
pub(super) fn long_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let (commit, target) = (env!("GRISTMILL_BUILD_COMMIT"), env!("GRISTMILL_BUILD_TARGET"));
        let faults = if cfg!(feature = "faults") { "faults" } else { "" };
        let cpu = format!("cpu: {}", Isa::detect());
        let known: Vec<&str> = [commit, target, faults, "cuda", &cpu]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect();
        format!("{} ({})", env!("CARGO_PKG_VERSION"), known.join(", "))
    });
    &TEXT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_begins_with_the_packages_and_has_no_empty_part() {
        let text = long_version();
        assert!(text.starts_with(concat!(env!("CARGO_PKG_VERSION"), " (")), "{text}");
        assert!(!text.contains("(,") && !text.contains(", ,"), "{text}");
        assert!(text.contains(env!("GRISTMILL_BUILD_TARGET")), "{text}");
    }
}
