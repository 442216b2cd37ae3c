//! What a terminal of 60 columns shows of a running job.

use serde_json::Value;

use crate::support::{arg, job_in, py};

/// Runs a command on a terminal of 60 columns; prints its lines, as JSON, without control sequences.
const ON_A_TERMINAL: &str = r#"
import fcntl, json, os, pty, re, struct, sys, termios
child, terminal = pty.fork()
if child == 0:
    os.environ["TERM"] = "xterm"
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    os.execv(COMMAND[0], COMMAND)
shown = b""
while True:
    try:
        piece = os.read(terminal, 65536)
    except OSError:
        break
    if not piece:
        break
    shown += piece
if os.waitpid(child, 0)[1] != 0:
    sys.exit(shown.decode(errors="replace"))
plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
print(json.dumps([line for line in re.split(r"[\r\n]+", plain) if line.strip()]))
"#;

#[test]
fn progress_fits_the_terminal_and_shows_the_cost() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", |text| text);
    let command = serde_json::to_string(&[env!("CARGO_BIN_EXE_gristmill"), "run", arg(&job)]).unwrap();
    let shown: Value =
        serde_json::from_str(&py(folder.path(), &format!("COMMAND = {command}\n{ON_A_TERMINAL}"))).unwrap();
    let shown: Vec<&str> = shown
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line.as_str().unwrap())
        .collect();
    let progress: Vec<&&str> = shown.iter().filter(|line| line.contains("/2,000 rows, ")).collect();
    assert!(progress.len() > 2, "{shown:#?}");
    assert!(progress.iter().all(|line| line.chars().count() <= 60), "{progress:#?}");
    let whole = |line: &&&str| line.contains(" tokens/s, ") && line.trim_end().ends_with(" so far");
    assert!(progress.iter().any(whole), "{progress:#?}");
    // The bar takes what the text leaves.
    assert!(progress.iter().any(|line| line.contains(['█', '░'])), "{progress:#?}");
}
