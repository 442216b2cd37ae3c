//! Identifies this process, and tells whether another process of this machine is gone, so that a
//! paused process does not count as dead.

use std::fs;
use std::io::ErrorKind;

/// `BOOT NAMESPACE PID START`: the boot id of the machine, the PID namespace, the PID, and the
/// clock tick at which the process began. No other process has all four.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Process {
    name: String,
}

/// What is known of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// The process exists, running or paused.
    Here,
    Gone,
    /// The process is of another machine or container, or its state cannot be found.
    Elsewhere,
}

impl Process {
    /// This process; `None` where the operating system does not provide the fields.
    pub(super) fn own() -> Option<Process> {
        let pid = std::process::id();
        let name = format!("{} {pid} {}", machine()?, Stat::of(pid).ok()?.start);
        Some(Process { name })
    }

    pub(super) fn as_str(&self) -> &str {
        &self.name
    }
}

/// Looks for the process of this name.
pub(super) fn see(name: &str) -> Seen {
    let found = || {
        let mut words = name.rsplitn(3, ' ');
        let (start, pid, of) = (words.next()?, words.next()?, words.next()?);
        // Where other users' processes are hidden, an invisible process may still exist.
        let (own, first) = (machine()?, Stat::of(1));
        if of != own || first.is_err() {
            return None;
        }
        match Stat::of(pid.parse().ok()?) {
            Ok(stat) if stat.start == start && !stat.is_dead => Some(Seen::Here),
            Ok(_) => Some(Seen::Gone),
            Err(error) if error.kind() == ErrorKind::NotFound => Some(Seen::Gone),
            Err(_) => None,
        }
    };
    found().unwrap_or(Seen::Elsewhere)
}

/// The boot id of the machine, and this process's PID namespace.
fn machine() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.to_str()?))
}

/// Fields of `/proc/PID/stat`.
struct Stat {
    /// The clock tick since boot at which the process began.
    start: String,
    /// The process has ended, and its parent has not waited for it yet.
    is_dead: bool,
}

impl Stat {
    fn of(pid: u32) -> std::io::Result<Stat> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        Stat::parse(&text).ok_or_else(|| std::io::Error::from(ErrorKind::InvalidData))
    }

    /// `PID (COMMAND) STATE …`; a command may hold spaces and parentheses.
    fn parse(text: &str) -> Option<Stat> {
        let mut fields = text.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?;
        Some(Stat {
            // The 22nd of all fields; the state is the third.
            start: fields.nth(18)?.to_string(),
            is_dead: matches!(state, "Z" | "X" | "x"),
        })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn name_of(pid: u32) -> String {
        format!("{} {pid} {}", machine().unwrap(), Stat::of(pid).unwrap().start)
    }

    #[test]
    fn a_paused_process_is_here_and_a_killed_one_gone() {
        assert_eq!(see(Process::own().unwrap().as_str()), Seen::Here);
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let name = name_of(child.id());
        let signal = |name: &str| {
            let sent = Command::new("kill").args([name, &child.id().to_string()]).status();
            assert!(sent.unwrap().success());
        };
        signal("-STOP");
        assert_eq!(see(&name), Seen::Here);
        signal("-KILL");
        while see(&name) == Seen::Here {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(see(&name), Seen::Gone, "nobody has asked for its exit code yet");
        child.wait().unwrap();
        assert_eq!(see(&name), Seen::Gone);
    }

    #[test]
    fn a_number_that_is_used_again_is_another_process_and_other_machines_tell_nothing() {
        let own = Process::own().unwrap().name;
        let (rest, start) = own.rsplit_once(' ').unwrap();
        assert_eq!(
            see(&format!("{rest} {}", start.parse::<u64>().unwrap() + 1)),
            Seen::Gone
        );
        assert_eq!(
            see(&format!("another-boot {}", own.split_once(' ').unwrap().1)),
            Seen::Elsewhere
        );
        for other in ["", "x", "a b c d", "🦀 🦀"] {
            assert_eq!(see(other), Seen::Elsewhere, "{other}");
        }
    }

    #[test]
    fn commands_may_hold_anything() {
        let stat = "7 (a) b (c) T 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 1";
        let stat = Stat::parse(stat).unwrap();
        assert_eq!((stat.start.as_str(), stat.is_dead), ("123456", false));
    }
}
