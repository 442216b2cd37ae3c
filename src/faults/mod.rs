//! Switches of the fault build that break the guarantee on purpose: the tests must notice each.

use std::sync::{LazyLock, PoisonError, RwLock};

/// Names the switches that are on from the start, with commas between.
const ENVIRONMENT: &str = "GRISTMILL_FAULT_SWITCHES";

static SWITCHES: LazyLock<RwLock<Vec<String>>> = LazyLock::new(|| {
    let named = std::env::var(ENVIRONMENT).unwrap_or_default();
    RwLock::new(named.split(',').map(|name| name.trim().to_string()).collect())
});

/// Whether the switch of that name is on.
pub fn switch(name: &str) -> bool {
    let on = SWITCHES.read().unwrap_or_else(PoisonError::into_inner);
    on.iter().any(|on| on == name)
}

/// Turns exactly these switches on, in this process.
pub fn set_switches(names: &[&str]) {
    let mut on = SWITCHES.write().unwrap_or_else(PoisonError::into_inner);
    *on = names.iter().map(|name| name.to_string()).collect();
}
