//! The entry point: it runs `gristmill::cli::main`.

fn main() -> std::process::ExitCode {
    gristmill::cli::main()
}
