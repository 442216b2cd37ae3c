//! (skeleton)

/// Parses the arguments, runs the command and maps its outcome to an exit code.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
