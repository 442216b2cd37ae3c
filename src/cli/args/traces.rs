//! The argument for traces, of commands that work for long.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// Send traces to an OpenTelemetry collector at this address, as OTLP over HTTP (default: OTEL_EXPORTER_OTLP_ENDPOINT, if it is
    /// set; see docs/traces.md)
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}
