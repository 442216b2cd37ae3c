//! Arguments of `gristmill serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args};

use super::{EngineArgs, QueueArgs, TraceArgs, positive_seconds};

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Where files, batches and results lie: a folder, or a prefix in a bucket (`s3://bucket/batches`)
    #[arg(long, value_name = "URL")]
    pub store: String,
    /// The models on offer (YAML): names for clients, and the folders of their checkpoints (see docs/serve.md)
    #[arg(long, value_name = "FILE")]
    pub models: PathBuf,
    /// Where to listen: a port of this machine alone, or at ADDRESS (0.0.0.0 for everybody, which needs --keys)
    #[arg(long, value_name = "[ADDRESS:]PORT", default_value = "8000", value_parser = crate::http::parse_address)]
    pub listen: SocketAddr,
    /// Where to answer `GET /metrics` with Prometheus metrics: a port of this machine alone, or at ADDRESS
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = crate::http::parse_address)]
    pub metrics_port: Option<SocketAddr>,
    /// The API keys (YAML): the SHA-256 of each, its tenant, and the tenant's limits (see docs/serve.md)
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
    /// Where to post that batches have ended (YAML): addresses, and where their secrets are (see docs/serve.md)
    #[arg(long, value_name = "FILE")]
    pub webhooks: Option<PathBuf>,
    /// Pause after the first failed try of a webhook; each of the ten that may follow takes longer, in all 50,000 times as long
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = positive_seconds, requires = "webhooks")]
    pub webhook_retry_first: f64,
    /// Whether the dashboard (`GET /`) shows prompts and answers, each tenant its own
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub dashboard_prompts: bool,
    #[command(flatten)]
    pub queue: QueueArgs,
    /// Answer the requests in this process, without a queue; for one model
    #[arg(long, conflicts_with_all = ["queue", "kafka"])]
    pub work: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Seconds between writes of finished rows to the jobs' logs, where --work: the most work that a kill can cost
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = positive_seconds)]
    pub log_interval: f64,
    /// Seconds between two looks at an unfinished batch; up to twice as many while nothing changes
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = positive_seconds)]
    pub poll: f64,
    /// Seconds without progress before a shard is enqueued again
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = positive_seconds)]
    pub reconcile_every: f64,
    #[command(flatten)]
    pub traces: TraceArgs,
}
