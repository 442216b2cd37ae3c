//! Identifies this process, and checks whether another process of this machine still exists, so
//! that a paused process does not count as dead.

use std::fs;
use std::io::ErrorKind;

/// The name of a process, `BOOT NAMESPACE PID START`: the boot id of the machine, the PID
/// namespace, the PID, and the clock tick at which the process began. No two processes share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Process {
    name: String,
}

/// Whether a process still exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessState {
    /// The process exists, running or paused.
    Present,
    Gone,
    /// The process is of another machine or container, or its state cannot be read.
    Unknown,
}

impl Process {
    /// This process; `None` where the operating system does not provide the fields.
    pub(super) fn own() -> Option<Process> {
        let pid = std::process::id();
        let name = format!("{} {pid} {}", boot_and_namespace()?, Stat::of(pid).ok()?.start);
        Some(Process { name })
    }

    pub(super) fn as_str(&self) -> &str {
        &self.name
    }
}

/// The state of the process with this name.
pub(super) fn process_state(name: &str) -> ProcessState {
    let found = || {
        let mut fields = name.rsplitn(3, ' ');
        let (start, pid, boot_and_ns) = (fields.next()?, fields.next()?, fields.next()?);
        // If PID 1 cannot be read, other users' processes are hidden, and an invisible process may
        // still exist.
        let (own_boot_and_ns, init) = (boot_and_namespace()?, Stat::of(1));
        if boot_and_ns != own_boot_and_ns || init.is_err() {
            return None;
        }
        match Stat::of(pid.parse().ok()?) {
            Ok(stat) if stat.start == start && !stat.is_dead => Some(ProcessState::Present),
            Ok(_) => Some(ProcessState::Gone),
            Err(error) if error.kind() == ErrorKind::NotFound => Some(ProcessState::Gone),
            Err(_) => None,
        }
    };
    found().unwrap_or(ProcessState::Unknown)
}

/// The boot id of the machine, and this process's PID namespace.
fn boot_and_namespace() -> Option<String> {
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
            // Field 22 of the file; the state is field 3.
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
        format!(
            "{} {pid} {}",
            boot_and_namespace().unwrap(),
            Stat::of(pid).unwrap().start
        )
    }

    #[test]
    fn a_paused_process_is_here_and_a_killed_one_gone() {
        assert_eq!(process_state(Process::own().unwrap().as_str()), ProcessState::Present);
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let name = name_of(child.id());
        let signal = |name: &str| {
            let sent = Command::new("kill").args([name, &child.id().to_string()]).status();
            assert!(sent.unwrap().success());
        };
        signal("-STOP");
        assert_eq!(process_state(&name), ProcessState::Present);
        signal("-KILL");
        while process_state(&name) == ProcessState::Present {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(
            process_state(&name),
            ProcessState::Gone,
            "nobody has asked for its exit code yet"
        );
        child.wait().unwrap();
        assert_eq!(process_state(&name), ProcessState::Gone);
    }

    #[test]
    fn a_number_that_is_used_again_is_another_process_and_other_machines_tell_nothing() {
        let own = Process::own().unwrap().name;
        let (rest, start) = own.rsplit_once(' ').unwrap();
        assert_eq!(
            process_state(&format!("{rest} {}", start.parse::<u64>().unwrap() + 1)),
            ProcessState::Gone
        );
        assert_eq!(
            process_state(&format!("another-boot {}", own.split_once(' ').unwrap().1)),
            ProcessState::Unknown
        );
        for other in ["", "x", "a b c d", "🦀 🦀"] {
            assert_eq!(process_state(other), ProcessState::Unknown, "{other}");
        }
    }

    #[test]
    fn commands_may_hold_anything() {
        let stat = "7 (a) b (c) T 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 1";
        let stat = Stat::parse(stat).unwrap();
        assert_eq!((stat.start.as_str(), stat.is_dead), ("123456", false));
    }
}
