//! Arguments → command → exit code.

fn main() -> std::process::ExitCode {
    gristmill::cli::main()
}
