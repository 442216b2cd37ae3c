//! Failpoints: marked places where this process aborts, fails or pauses at the n-th pass.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The variable that arms failpoints.
pub const VARIABLE: &str = "GRISTMILL_FAILPOINTS";

/// All points, before and after each boundary between a worker's stages, in the order of a shard's
/// processing.
pub const POINTS: &[&str] = &[
    "intake.before-receive",
    "intake.after-receive",
    "intake.before-attempt",
    "intake.after-attempt",
    "intake.before-read",
    "intake.after-read",
    "device.before-submit",
    "device.before-step",
    "device.after-step",
    "keeper.before-log",
    "keeper.between-data-and-record",
    "keeper.after-log",
    "keeper.before-part",
    "keeper.between-part-and-commit",
    "keeper.between-commit-and-finish",
    "keeper.between-digest-and-success",
    "keeper.after-commit",
    "keeper.before-acknowledge",
    "keeper.after-acknowledge",
];

/// The error returned by a point that is armed with `error`.
#[derive(Debug, thiserror::Error)]
#[error("failpoint `{0}`: an error, as armed")]
pub struct Injected(&'static str);

/// The action of an armed point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Abort,
    Error,
    Pause(Duration),
}

#[derive(Debug)]
struct ArmedPoint {
    action: Action,
    /// The number of the pass at which the point acts, from 1.
    pass: u64,
    passes: AtomicU64,
}

/// Passes the point `name` in async code. A pause blocks only this task.
///
/// # Errors
/// The point is armed with `error`, and this is its pass.
pub async fn point(name: &'static str) -> Result<(), Injected> {
    match due_action(name) {
        Some(Action::Pause(time)) => {
            tokio::time::sleep(time).await;
            Ok(())
        }
        action => perform_blocking(name, action),
    }
}

/// Passes the point `name` on a blocking thread. A pause blocks the thread.
///
/// # Errors
/// See [`point`].
pub fn point_blocking(name: &'static str) -> Result<(), Injected> {
    perform_blocking(name, due_action(name))
}

fn perform_blocking(name: &'static str, action: Option<Action>) -> Result<(), Injected> {
    match action {
        None => Ok(()),
        Some(Action::Abort) => std::process::abort(),
        Some(Action::Error) => Err(Injected(name)),
        Some(Action::Pause(time)) => {
            std::thread::sleep(time);
            Ok(())
        }
    }
}

/// Counts a pass of the point, and returns the action that is due at it. The action is reported on
/// stderr, so that a test can see that it happened.
fn due_action(name: &'static str) -> Option<Action> {
    static ARMED: OnceLock<HashMap<&'static str, ArmedPoint>> = OnceLock::new();
    let armed = ARMED.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        parse(&text).unwrap_or_else(|why| super::refuse(VARIABLE, &why))
    });
    debug_assert!(POINTS.contains(&name), "no point `{name}`");
    let armed = armed.get(name)?;
    let pass = armed.passes.fetch_add(1, Ordering::Relaxed) + 1;
    if pass != armed.pass {
        return None;
    }
    eprintln!("gristmill: failpoint `{name}`: {:?} at pass {pass}", armed.action);
    Some(armed.action)
}

fn parse(text: &str) -> Result<HashMap<&'static str, ArmedPoint>, String> {
    let mut armed = HashMap::new();
    for entry in text.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
        let syntax_error = || format!("`{entry}`: write `NAME=abort@N`, `NAME=error@N` or `NAME=pause:MILLISECONDS@N`");
        let (name, rest) = entry.split_once('=').ok_or_else(syntax_error)?;
        let (action, pass) = rest.split_once('@').ok_or_else(syntax_error)?;
        let action = match (action, action.strip_prefix("pause:")) {
            ("abort", _) => Action::Abort,
            ("error", _) => Action::Error,
            (_, Some(ms)) => Action::Pause(Duration::from_millis(ms.parse().map_err(|_| syntax_error())?)),
            _ => return Err(syntax_error()),
        };
        let pass = pass.parse().ok().filter(|pass| *pass > 0).ok_or_else(syntax_error)?;
        let known = POINTS.iter().find(|known| **known == name);
        let name = known.ok_or_else(|| format!("there is no failpoint `{name}`"))?;
        let passes = AtomicU64::new(0);
        if armed.insert(*name, ArmedPoint { action, pass, passes }).is_some() {
            return Err(format!("failpoint `{name}` is armed twice"));
        }
    }
    Ok(armed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arming_names_point_action_and_pass() {
        let armed =
            parse("keeper.before-log=abort@3; keeper.after-log=error@1;device.before-step=pause:1500@2").unwrap();
        let armed_at = |name: &str| (armed[name].action, armed[name].pass);
        assert_eq!(armed.len(), 3);
        assert_eq!(armed_at("keeper.before-log"), (Action::Abort, 3));
        assert_eq!(armed_at("keeper.after-log"), (Action::Error, 1));
        assert_eq!(
            armed_at("device.before-step"),
            (Action::Pause(Duration::from_millis(1500)), 2)
        );
        assert!(parse("").unwrap().is_empty());
    }

    #[test]
    fn invalid_settings_are_refused() {
        for (text, why) in [
            ("keeper.before-lunch=abort@1", "no failpoint"),
            ("keeper.before-log=abort", "write `NAME"),
            ("keeper.before-log=abort@0", "write `NAME"),
            ("keeper.before-log=explode@1", "write `NAME"),
            ("keeper.before-log=pause:soon@1", "write `NAME"),
            ("keeper.before-log=abort@1;keeper.before-log=error@2", "twice"),
        ] {
            assert!(parse(text).unwrap_err().contains(why), "{text}");
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names = POINTS.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), POINTS.len());
    }
}
